"""A folder that serves a trained model: programs, weights, item vectors, a description, and `serve.py`.

query.pt2, or history.pt2 and candidates.pt2   the programs, without weights
weights.safetensors                           all weights and tables; new ones need no new program
items.npy, item_ids.npy, items.parquet        retrieval: unit vectors of all items, their ids and keys, for an index
serving.json                                  columns of a request, bounds, versions, checksums, an example
serve.py                                      answers requests with torch and numpy alone
states.py                                     the same from states of users, for other `model.memory` than "full"
follow.py                                     loads new versions, see `publish`
"""

import json
import platform
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.checkpoint import export
from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.embedding.zero_collision_layout import EMPTY
from freescale.errors import UsageError
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval
from freescale.serving import states
from freescale.serving.programs import Program, ServedModel, programs_of
from freescale.serving.request_columns import describe, example_value
from freescale.serving.serve import Recommender
from freescale.train.trained_model import LogKeys, TrainedModel

Format = Literal["pt2", "aoti"]
_SCRIPTS = ("serve.py", "states.py", "follow.py")
_STATIC = ("heads", "width")
_MOST = 1 << 16
"""Of every other size of a request."""


def write_package(trained: TrainedModel, target: Path, format: Format) -> list[str]:  # noqa: A002  the option's name
    """Write the folder, and check that it answers as the model does; return the names of its files."""
    if (target / "serving.json").exists():
        raise UsageError("there is an export in this folder already", where=str(target), remedy="choose another folder")
    served, ids = _served(trained)
    programs = programs_of(served)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as partial:
        folder = Path(partial)
        export.write_tensors(folder / "weights.safetensors", served.weights() | ids)
        with _compiler_cache(format):
            for name, program in programs.items():
                _write_program(served, program, folder / f"{name}.pt2", format)
        files = [*_SCRIPTS, "weights.safetensors", *(f"{name}.pt2" for name in programs)]
        if isinstance(served.model, Retrieval):
            _write_items(trained, served.tables["item"], ids.get("item.ids"), folder)
            files += ["items.npy", "item_ids.npy", "items.parquet"]
        for script in _SCRIPTS:
            shutil.copyfile(Path(__file__).with_name(script), folder / script)
        facts = _facts(trained.config, programs) | {"format": format, "step": trained.step, "items": trained.items}
        sharded = trained.sharded.tables.tables if trained.sharded.tables is not None else []
        facts["dynamic"] = {t.name: [t.layout.buckets, t.layout.slots] for t in sharded if t.layout is not None}
        facts["tokens"] = [served.prefix, served.per_event]
        if served.rule is not None:
            model = trained.config.model
            size = model.heads, 2 * model.layers * model.dim // model.heads  # of what is kept of a token
            facts["states"] = [served.rule.segment, served.rule.summaries, *size]
        facts["files"] = {name: export.describe(folder / name) for name in files}
        _write_facts(facts, folder)
        _write_facts(facts | {"example": _example(folder, programs)}, folder)
        _recommender(facts)(folder).check()
        written = [*sorted(files), "serving.json"]  # which comes last: with it the export is complete
        for name in written:
            (folder / name).replace(target / name)
    return written


def served_weights(trained: TrainedModel) -> dict[str, Tensor]:
    """Return the contents of weights.safetensors."""
    served, ids = _served(trained)
    return served.weights() | ids


def _served(trained: TrainedModel) -> tuple[ServedModel, dict[str, Tensor]]:
    """Return the model with all its tables, and the ids in the slots of dynamic ones, as NAME.ids."""
    if trained.world.world_size > 1:
        what = "a model to be served needs all tables in one process"
        raise UsageError(what, remedy="leave out --nproc")
    model, blocks = trained.sharded.module.model, _tables(trained)
    assert isinstance(model, Retrieval | Ranking)
    ids = {name: rows for name, rows in blocks.items() if name.endswith(".ids")}
    tables = {name: rows.float() for name, rows in blocks.items() if name not in ids}
    return ServedModel(trained.config, model.float(), tables).eval(), ids


def _write_facts(facts: Mapping[str, Any], folder: Path) -> None:
    (folder / "serving.json").write_text(json.dumps(facts, indent=1) + "\n")


def _example(folder: Path, programs: Mapping[str, Program]) -> dict[str, Any]:
    """Return a request and the answer of the programs before they were traced."""
    facts = json.loads((folder / "serving.json").read_text())
    eager = _recommender(facts)(folder, {name: program.module for name, program in programs.items()})
    columns = [column for of_program in eager.facts["programs"].values() for column in of_program.values()]
    request = {column["column"]: example_value(column) for column in columns}
    if facts["task"] == "retrieval":
        return {"request": request, "answer": eager.recommend([request])[0]}
    return {"request": request, "answer": eager.score(eager.encode([request]), [request])[0]}


def _recommender(facts: Mapping[str, Any]) -> type[Recommender]:
    """Return what answers requests."""
    return states.StatefulRecommender if "states" in facts else Recommender


def _tables(trained: TrainedModel) -> dict[str, Tensor]:
    """Return all tables on the host; of dynamic ids also the ids of their slots, as NAME.ids."""
    module, tables = trained.sharded.module, trained.sharded.tables
    if tables is None:
        assert module.replicated is not None
        return {name: rows.detach().cpu() for name, rows in module.replicated.weights.items()}
    return {name: rows.detach().cpu() for name, (_, rows) in tables.read_blocks(0, 1).items()}


def _compiler_cache(format: Format) -> AbstractContextManager[None]:  # noqa: A002
    """Remove what Inductor would leave in the folder of temporary files."""
    if format != "aoti":
        return nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def _write_program(served: ServedModel, program: Program, path: Path, format: Format) -> None:  # noqa: A002
    """Trace a program with dynamic sizes, and save or compile it."""
    names = {size for of in program.sizes.values() for size in of}
    dims: dict[str, Any] = {n: torch.export.Dim(n, min=1 if n == "samples" else 2, max=_MOST) for n in names}
    static = torch.export.Dim.STATIC
    dims |= dict.fromkeys(_STATIC, static)
    weights = dict(sorted(served.weights().items()))  # as `serve` passes them: AOTInductor ignores names
    shapes = (
        {name: dict.fromkeys(range(value.dim()), static) for name, value in weights.items()},
        {name: {i: dims[size] for i, size in enumerate(of)} for name, of in program.sizes.items()},
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of its own code
        traced = torch.export.export(program.module, (weights, program.example), dynamic_shapes=shapes, strict=False)
        if format == "aoti":
            torch._inductor.aoti_compile_and_package(traced, package_path=str(path))
        else:
            # Inputs are saved for their structure: with zeros for weights the same model gives the same small file.
            zeros = {name: value.new_zeros(()).expand(value.shape) for name, value in weights.items()}
            traced.example_inputs = ((zeros, program.example), {})
            torch.export.save(traced, path)


def _write_items(trained: TrainedModel, rows: Tensor, ids: Tensor | None, folder: Path) -> None:
    """Write the vectors of all items that can be recommended, by ascending id, with their keys."""
    if ids is None:
        numbers = torch.arange(trained.items)
    else:
        used = (ids.flatten() != EMPTY).nonzero()[:, 0]
        numbers, order = ids.flatten()[used].sort()
        rows = rows[used[order]]
    np.save(folder / "items.npy", F.normalize(rows[: len(numbers)].float(), dim=-1).numpy())
    np.save(folder / "item_ids.npy", numbers.numpy())
    keys = LogKeys.read(trained.config.data.path).of_items(pa.array(numbers.numpy()))
    pq.write_table(pa.table({"item_id": numbers.numpy(), "key": keys}), folder / "items.parquet")


def _facts(config: RunConfig, programs: Mapping[str, Program]) -> dict[str, Any]:
    """Return the description of the columns of a request, and of what made the programs."""
    items, most = Loader.from_run(config).vocabulary, config.data.max_history
    return {
        "task": config.task.kind,
        "labels": list(config.task.labels),
        "exclude_seen": config.task.seen == "exclude",
        "programs": {
            name: {key: describe(column, items, max_history=most) for key, column in program.columns.items()}
            for name, program in programs.items()
        },
        "made_with": {
            "torch": str(torch.__version__),
            "machine": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
    }
