"""Counts kernel launches and host synchronizations of a training step, by thread and source line.

    python benchmarks/gpu_budget.py [VARIANT ...] [--ranks 2] [--steps 4] [--precision fp32] [--json] [--out FILE.json]
                                    [--before FILE.json]

Runs the trainer on virtual GPUs (see tests/support/vgpu), which count what a GPU would be asked to do. A step here is
the last one. `main_syncs`, `deferred_syncs`: how often the host waits for the device in the thread of the step and in
that of deferred transfers. `launches`: kernels of a step, all threads; `loss_launches`: those of the retrieval loss and
of dropout among them. `reports`: faults of stream order. Variants: see `tests.support.vgpu.budget`; all by default.
`--before`: the results of an earlier commit, whose counts are written beside the new ones.
"""

import argparse
import json
import tempfile
from pathlib import Path

from tests.support.ranks import Ranks
from tests.support.vgpu.budget import VARIANTS, count_step, write_logs

from record import save

_TABLES = ("syncs_by_line", "launches_by_line")
_COMPARED = ("main_syncs", "deferred_syncs", "launches", "loss_launches", "reports")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", choices=[*VARIANTS, []], default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp64"], default="fp32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks, results = Ranks(options.ranks, on_virtual_gpus=True), []
    earlier = json.loads(options.before.read_text())["results"] if options.before else []
    before = {counted["variant"]: {name: counted[name] for name in _COMPARED} for counted in earlier}
    with tempfile.TemporaryDirectory() as folder:
        write_logs(Path(folder))
        for name in options.variants or VARIANTS:
            words = (folder, name, options.precision, options.steps)
            counted = ranks.run(count_step, *words, timeout=600)[0]
            results.append({"variant": name, "before": before.get(name, {}), **counted})
            _print(results[-1], short=options.json)
    ranks.close()
    save(options.out, results)


def _print(counted: dict[str, object], *, short: bool) -> None:
    for name in () if short else _TABLES:
        print(name)
        for thread, line, what, count in counted[name][:60]:  # type: ignore[index]
            print(f"  {count:5d}  {thread:20s} {line:45s} {what}")
    print(json.dumps({name: value for name, value in counted.items() if name not in _TABLES}), flush=True)


if __name__ == "__main__":
    main()
