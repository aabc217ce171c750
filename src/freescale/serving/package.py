"""A folder that serves a trained model: programs, weights, item vectors, a description, and `serve.py`.

query.pt2, or history.pt2 and candidates.pt2   the programs, without weights
weights.safetensors                           all weights and tables; new ones need no new program
items.npy, item_ids.npy, items.parquet        retrieval: unit vectors of all items, their ids and keys, for an index
serving.json                                  columns of a request, bounds, versions, checksums
serve.py                                      answers requests with torch and numpy alone
"""

import json
import platform
import shutil
import warnings
from collections.abc import Mapping
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
from freescale.data.feature_schema import Feature, candidate_column
from freescale.data.loader import Loader
from freescale.data.vocabulary import ItemVocabulary
from freescale.embedding.zero_collision_layout import EMPTY
from freescale.errors import UsageError
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval
from freescale.serving.programs import Program, ServedModel, programs_of
from freescale.train.trained_model import LogKeys, TrainedModel

Format = Literal["pt2", "aoti"]
_MOST_SAMPLES, _MOST_COLUMNS = 1 << 16, 1 << 16
_MOST_CANDIDATES = 1 << 15
_SIZES = {"samples": (1, _MOST_SAMPLES), "events": (2, _MOST_COLUMNS), "candidates": (2, _MOST_CANDIDATES)}
"""The least and the most of each size of a request, with prefix tokens."""


def write_package(trained: TrainedModel, folder: Path, format: Format) -> list[str]:  # noqa: A002  the option's name
    """Write the folder; return the names of its files."""
    if trained.world.world_size > 1:
        raise UsageError(f"--format {format} needs all tables in one process", remedy="leave out --nproc")
    if (folder / "serving.json").exists():
        raise UsageError("there is an export in this folder already", where=str(folder), remedy="choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    loader = Loader.from_run(trained.config)
    model, blocks = trained.sharded.module.model, _tables(trained)
    assert isinstance(model, Retrieval | Ranking)
    tables = {name: rows for name, rows in blocks.items() if not name.endswith(".ids")}
    served = ServedModel(trained.config, model.float(), {n: rows.float() for n, rows in tables.items()}).eval()
    ids = {name: rows for name, rows in blocks.items() if name.endswith(".ids")}
    export.write_tensors(folder / "weights.safetensors", served.weights() | ids)
    programs = programs_of(served)
    for name, program in programs.items():
        _write_program(served, program, folder / f"{name}.pt2", format)
    files = ["serve.py", "weights.safetensors", *(f"{name}.pt2" for name in programs)]
    if isinstance(model, Retrieval):
        _write_items(trained, tables["item"], ids.get("item.ids"), folder)
        files += ["items.npy", "item_ids.npy", "items.parquet"]
    shutil.copyfile(Path(__file__).with_name("serve.py"), folder / "serve.py")
    facts = _facts(trained.config, loader, served, programs) | {"format": format, "step": trained.step}
    sharded = trained.sharded.tables.tables if trained.sharded.tables is not None else []
    facts["dynamic"] = {t.name: [t.layout.buckets, t.layout.slots] for t in sharded if t.layout is not None}
    facts["files"] = {name: export.describe(folder / name) for name in files}
    (folder / "serving.json").write_text(json.dumps(facts, indent=1) + "\n")
    return [*sorted(files), "serving.json"]


def _tables(trained: TrainedModel) -> dict[str, Tensor]:
    """Return all tables on the host; of dynamic ids also the ids of their slots, as NAME.ids."""
    module, tables = trained.sharded.module, trained.sharded.tables
    if tables is None:
        assert module.replicated is not None
        return {name: rows.detach().cpu() for name, rows in module.replicated.weights.items()}
    return {name: rows.detach().cpu() for name, (_, rows) in tables.read_blocks(0, 1).items()}


def _write_program(served: ServedModel, program: Program, path: Path, format: Format) -> None:  # noqa: A002
    """Trace a program with dynamic sizes, and save or compile it."""
    dims = {name: torch.export.Dim(name, min=least, max=most) for name, (least, most) in _SIZES.items()}
    static = torch.export.Dim.STATIC
    weights = served.weights()
    shapes = (
        {name: dict.fromkeys(range(value.dim()), static) for name, value in weights.items()},
        {name: {i: dims.get(size, static) for i, size in enumerate(of)} for name, of in program.sizes.items()},
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of its own code
        traced = torch.export.export(program.module, (weights, program.example), dynamic_shapes=shapes, strict=False)
        if format == "aoti":
            torch._inductor.aoti_compile_and_package(traced, package_path=str(path))
        else:
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
    keys = LogKeys.read(Path(trained.config.data.path)).of_items(pa.array(numbers.numpy()))
    pq.write_table(pa.table({"item_id": numbers.numpy(), "key": keys}), folder / "items.parquet")


def _facts(config: RunConfig, loader: Loader, served: ServedModel, programs: Mapping[str, Program]) -> dict[str, Any]:
    """Return the description of the columns of a request, and of what made the programs."""
    columns = _columns(config, loader, served)
    per_program = {
        name: {column: facts for column, facts in columns.items() if facts["input"] in program.sizes}
        for name, program in programs.items()
    }
    if "candidates" in per_program:  # of the history, a program of candidates has what is kept
        per_program["candidates"].pop("timestamp")
    return {
        "task": config.task.kind,
        "labels": list(config.task.labels),
        "exclude_seen": config.task.seen == "exclude",
        "programs": per_program,
        "prefix": served.prefix,
        "made_with": {
            "torch": str(torch.__version__),
            "machine": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
    }


def _columns(config: RunConfig, loader: Loader, served: ServedModel) -> dict[str, dict[str, Any]]:
    """Return the columns that requests have, in the order in which they are checked."""
    events, vocabulary = config.data.max_history, loader.vocabulary
    found = {
        "item_id": _column("item", "id", events, "item", vocabulary),
        "timestamp": _column("timestamp", "time", events),
        "candidate_id": _column("candidate_id", "id", _MOST_CANDIDATES, "item", vocabulary),
        "time": _column("time", "time", 0),
    }
    for feature in served.model.features.applicable("history"):
        found[feature.column] = _feature_column(feature, feature.column, events)
    for feature in served.model.features.applicable("sample"):
        found[feature.column] = _feature_column(feature, feature.column, 0)
    for feature in served.model.features.applicable("candidates"):
        name = candidate_column(feature.column)
        found[name] = _feature_column(feature, name, _MOST_CANDIDATES)
    return found


def _feature_column(feature: Feature, name: str, most: int) -> dict[str, Any]:
    is_id = feature.config.kind == "id" and feature.column != "user_id"
    return _column(
        name, feature.config.kind, most, feature.table if is_id else "", feature.vocabulary if is_id else None
    )


def _column(
    name: str, kind: str, most: int, table: str = "", vocabulary: ItemVocabulary | None = None
) -> dict[str, Any]:
    """Describe a column. `most`: entries of a request; 0: one value per request."""
    noun = "number" if kind == "number" else "integer"
    means = f"a list of {noun}s" if most else f"{'a' if noun == 'number' else 'an'} {noun}"
    known, shared = (0, 0) if vocabulary is None or vocabulary.dynamic else (vocabulary.items, vocabulary.oov_rows)
    facts = {"input": name, "kind": kind, "most": most, "means": means, "table": table}
    return facts | {"known": known, "shared": shared}
