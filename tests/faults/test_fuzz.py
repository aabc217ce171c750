"""Any file is accepted or refused with an error of ours, quickly and within bounded memory."""

import json

import pytest

from tests.support.fuzz import TARGETS, accepts, bounded_memory, fuzz
from tests.support.fuzz_training_inputs import sealed, valid_data
from tests.support.fuzz_training_outputs import valid_run
from tests.support.fuzz_values import Files, as_json

BODY = json.loads(valid_data()["manifest.json"])["data"]
(_, _, PARTS), *_ = BODY["stripes"]
LINE = json.loads(valid_run()["bubbles/rank-00000.jsonl"].splitlines()[0])


def manifest(**changes: object) -> Files:
    return {**valid_data(), "manifest.json": sealed({**BODY, **changes})}


def sample(**changes: object) -> Files:
    return {**valid_run(), "bubbles/rank-00000.jsonl": as_json({**LINE, **changes}) + b"\n"}


def figure(name: str, value: str) -> Files:
    from freescale.simulate import cluster

    lines = (cluster._package_folder() / "h100.toml").read_text().splitlines()
    lines = [
        f'{name} = {{ value = {value}, source = "me" }}' if line.startswith(f"{name} ") else line for line in lines
    ]
    return {"mine.toml": "\n".join(lines).encode()}


ONCE_FOUND: dict[str, tuple[str, Files]] = {
    "a long word in a text, over which the search for a line's number never ended": (
        "config",
        {"run.toml": b'seed = -1\n[data]\npath = """\n' + b"a" * 60 + b'!\n"""\n'},
    ),
    "a number that no float can hold": ("config", {"run.toml": b"[train]\nlr = 1" + b"0" * 400}),
    "a number that Python does not write": ("config", {"run.toml": b"seed = 0x" + b"f" * 5000}),
    "a whole number that no tensor can hold": ("config", {"run.toml": b"[data]\nmax_history = 1" + b"0" * 30}),
    "rows without end, of which a window would be numbered": ("data", manifest(stripes=[[10**15, 10**15, PARTS]])),
    "row groups without end": ("data", manifest(stripes=[[10**15, 1, PARTS]])),
    "row groups of no rows": ("data", manifest(stripes=[[11, 0, PARTS]])),
    "rows in no file": ("data", manifest(stripes=[[11, 3, []]])),
    "items that are not counted": ("data", manifest(items=None)),
    "a trace as deep as it is long": ("kineto", {"rank0.json": b"[" * 100_000}),
    "a trace that ends at infinity": (
        "kineto",
        {"rank0.json": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1e999}]}'},
    ),
    "a kernel without a name": (
        "kineto",
        {"rank0.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": null, "ts": 1}]}'},
    ),
    "a cluster in another encoding": ("cluster", {"mine.toml": b"\xff\xfe"}),
    "figures that are no table": ("cluster", {"mine.toml": b'name = "a"\ndevice = "cpu"\nfigures = 3\n'}),
    "half a rank per host": ("cluster", figure("ranks_per_host", "0.5")),
    "a time that varies beyond all numbers": ("cluster", figure("jitter", "469")),
    "a span of an unknown kind": ("run", sample(spans=[["sleeping", 1, 2]])),
    "a collective to which nobody came last": ("run", sample(last={})),
    "a moment that is no whole number": ("run", sample(end=1e300)),
    "a run on no rank": ("run", {**valid_run(), "bubbles/machine.json": b'{"device": "cpu", "world_size": 0}'}),
}


@pytest.mark.parametrize("fault", ONCE_FOUND)
def test_inputs_that_once_failed_are_refused(fault: str) -> None:
    name, files = ONCE_FOUND[fault]
    with bounded_memory():
        assert not accepts(TARGETS[name], files)


def test_a_link_so_slow_that_the_clock_loses_digits_is_simulated_to_its_end() -> None:
    assert accepts(TARGETS["cluster"], figure("near", "1"))


@pytest.mark.parametrize("name", TARGETS)
def test_fuzzed_files_raise_only_our_own_errors(name: str, whole_form: bool) -> None:
    examples = 10_000 if whole_form else 200
    found = fuzz(TARGETS[name], examples)
    assert found["inputs"] >= 0.9 * examples
    assert found["refused"] > found["inputs"] / 10
    assert found["accepted"] > found["inputs"] / 50, "inputs that are all refused prove little"
