"""No file can execute code, write outside its folder, or inject markup into a page."""

import ast
import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp

from freescale import page
from freescale.bubbles import records
from freescale.bubbles.report import report_sections
from freescale.checkpoint import export
from freescale.checkpoint.conversion import convert
from freescale.checkpoint.dcp_pickle import PickledObject, load_inert
from freescale.cli.main import main
from freescale.data import histories, importers
from freescale.data.validation import Quarantine
from freescale.errors import DataError
from freescale.train import curves
from tests.support.datasets import ids, loader
from tests.support.fuzz import TARGETS, accepts
from tests.support.fuzz_training_inputs import some_histories, valid_data
from tests.support.fuzz_training_outputs import some_steps, valid_run
from tests.support.fuzz_values import Files

SOURCE = Path(__file__).parents[2] / "src"


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def written(write: Callable[[io.BytesIO], Any]) -> bytes:
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def as_npy(marker: Path) -> bytes:
    return written(lambda out: np.save(out, np.array([Planted(marker)], dtype=object), allow_pickle=True))


FORMS: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda marker: pickle.dumps(Planted(marker)),
    "old pickle": lambda marker: pickle.dumps(Planted(marker), protocol=0) + b"\n",
    "npy": as_npy,
    "npz": lambda marker: written(lambda out: np.savez(out, np.array([Planted(marker)], dtype=object))),
    "pt": lambda marker: written(lambda out: torch.save({"model": Planted(marker)}, out)),
    "packed": lambda marker: gzip.compress(pickle.dumps(Planted(marker))),
}
PLACES: dict[str, tuple[str, str, Files]] = {
    "config": ("config", "run.toml", {}),
    "cluster": ("cluster", "mine.toml", {}),
    "manifest": ("data", "manifest.json", valid_data()),
    "rows": ("data", "part-00000-01.parquet", valid_data()),
    "checksums": ("data", "part-00000-01.parquet.crc", valid_data()),
    "somebody's rows": ("data", "a.parquet", {}),
    "trace": ("kineto", "rank0.json", {}),
    "packed trace": ("kineto", "rank0.json.gz", {}),
    "intervals": ("run", "bubbles/intervals.jsonl", valid_run()),
    "steps": ("run", "bubbles/rank-00000.jsonl", valid_run()),
    "machine": ("run", "bubbles/machine.json", valid_run()),
    "config of a run": ("run", "config.toml", valid_run()),
}


def test_the_planted_pickle_would_execute(marker: Path) -> None:
    pickle.loads(FORMS["pickle"](marker))
    assert marker.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
def test_a_pickle_in_place_of_a_file_is_never_executed(place: str, form: str, marker: Path) -> None:
    (target, name, others), raw = PLACES[place], FORMS[form](marker)
    taken = accepts(TARGETS[target], {**others, name: raw})
    assert not marker.exists()
    assert not taken or (place == "steps" and b"\n" not in raw), "half a line is left out, as after a kill"


def log_import(folder: Path, kind: str, log: Path, vocabulary: Path | None = None) -> histories.ImportSummary:
    scratch, quarantine = folder / "scratch", Quarantine()
    scratch.mkdir()
    events = importers.open_log(kind, importers.LogSpec([log], scratch, quarantine))
    return histories.write_histories(
        histories.ImportJob(events, scratch, quarantine), folder / "out", vocabulary=vocabulary
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Arrow, of lines that are not UTF-8
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["log.csv", "log.parquet", "log.csv.gz", "log.zip"])
def test_a_pickle_in_place_of_a_log_is_never_executed(name: str, form: str, marker: Path, tmp_path: Path) -> None:
    raw = FORMS[form](marker)
    (tmp_path / name).write_bytes(raw)
    if name == "log.zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("ml-1m/ratings.dat", raw)
    with pytest.raises(DataError):
        log_import(tmp_path, "ml-1m" if name == "log.zip" else "events", tmp_path / name)
    assert not marker.exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_pickle_in_place_of_a_vocabulary_is_never_executed(form: str, marker: Path, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")
    (tmp_path / "vocabulary.parquet").write_bytes(FORMS[form](marker))
    with pytest.raises(DataError):
        log_import(tmp_path, "events", tmp_path / "log.csv", vocabulary=tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["export.json", "model.safetensors"])
def test_a_pickle_in_place_of_an_export_is_never_executed(name: str, form: str, marker: Path, tmp_path: Path) -> None:
    raw = FORMS[form](marker)
    listed = {"model.safetensors": {"sha256": hashlib.sha256(raw).hexdigest()}}
    (tmp_path / "export.json").write_text(json.dumps({"format": 1, "files": listed}))
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError):
        export.read(tmp_path)
    assert not marker.exists()


def dcp_folder(folder: Path, tensor: bytes) -> Path:
    """A checkpoint of torch.distributed.checkpoint whose tensor is these bytes."""
    dcp.save({"a": torch.ones(3), "b": "text"}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "a":
            place.offset, place.length = (folder / place.relative_path).stat().st_size, len(tensor)
            with (folder / place.relative_path).open("ab") as file:
                file.write(tensor)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def tensor_archive(raw: bytes) -> bytes:
    """What `torch.save` writes of a tensor, with another pickle in it."""
    out, good = io.BytesIO(), zipfile.ZipFile(io.BytesIO(written(lambda file: torch.save(torch.ones(3), file))))
    with zipfile.ZipFile(out, "w") as archive:
        for name in good.namelist():
            archive.writestr(name, raw if name.endswith("data.pkl") else good.read(name))
    return out.getvalue()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["metadata", "tensor", "pickle of a tensor"])
def test_a_pickle_in_a_dcp_folder_is_never_executed(place: str, form: str, marker: Path, tmp_path: Path) -> None:
    raw = FORMS[form](marker)
    folder = dcp_folder(tmp_path / "dcp", tensor_archive(raw) if place == "pickle of a tensor" else raw)
    if place == "metadata":
        (folder / ".metadata").write_bytes(raw)
    with pytest.raises(DataError):
        convert(folder, tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_an_object_in_a_dcp_folder_is_copied_and_never_executed(marker: Path, tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": Planted(marker)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again", like=tmp_path / "ours")
    assert not marker.exists()
    dcp.load({**state, "b": ""}, checkpoint_id=tmp_path / "back", no_dist=True)
    assert marker.exists(), "torch executes it"


NAMED = [
    "os.system",
    "builtins.eval",
    "torch.load",
    "torch.hub.load",
    "torch.float32.__class__",
    "torch.storage._load_from_bytes",
]


@pytest.mark.parametrize("name", NAMED)
def test_a_dcp_folder_may_name_dcps_classes_only(name: str, tmp_path: Path) -> None:
    module, _, function = name.partition(".") if name.startswith("torch.float32") else name.rpartition(".")
    words = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(function)])
    folder = dcp_folder(tmp_path / "dcp", b"")
    (folder / ".metadata").write_bytes(words + function.encode() + b"\x93.")
    with pytest.raises(DataError, match=f"it names {name}, which no checkpoint needs"):
        convert(folder, tmp_path / "out")


def test_what_a_pickle_says_of_a_class_changes_no_class() -> None:
    """BUILD with a state sets attributes of whatever is on the stack, which may be a class."""
    where = "torch.distributed.checkpoint.metadata"
    for state in ({"kind": "other"}, (None, {"kind": "other", "__setstate__": None})):
        raw = b"c" + where.encode() + b"\nMetadata\n" + pickle.dumps(state, protocol=0)[:-1] + b"b."
        with contextlib.suppress(DataError):
            load_inert(raw, where="test")
        assert PickledObject.kind == ""
        assert not hasattr(dcp.Metadata, "kind")
        assert PickledObject.__setstate__ is not None


def test_an_export_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"mine")
    listed = {"../secret.safetensors": {"sha256": hashlib.sha256(b"mine").hexdigest()}}
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text(json.dumps({"format": 1, "files": listed}))
    with pytest.raises(DataError, match=r"\.\./secret.safetensors is missing or was changed"):
        export.read(tmp_path / "export")


def test_parquet_metadata_is_never_executed(marker: Path, tmp_path: Path) -> None:
    raw, table = pickle.dumps(Planted(marker)), some_histories(8)
    for name in ("arrow.py_extension_type", "pandas.object", "arrow.unknown"):
        tag = {b"ARROW:extension:name": name.encode(), b"ARROW:extension:metadata": raw}
        fields = [field.with_metadata(tag) for field in table.schema]
        column = {"name": "item_id", "numpy_type": "object", "pandas_type": "bytes", "metadata": {"a": raw.hex()}}
        noted = {b"pandas": json.dumps({"columns": [column], "index_columns": []}).encode(), b"x": raw}
        pq.write_table(table.cast(pa.schema(fields, metadata=noted)), tmp_path / "a.parquet")
        assert sorted(sum((ids(batch) for batch in loader(tmp_path)), [])) == list(range(8))
        assert not marker.exists()


RUNS_CODE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "code"}
CALLS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.loads", "torch.load", "np.load"}


USED = {
    "freescale/checkpoint/dcp_pickle.py": {"pickle.Unpickler", "pickle.UnpicklingError"},
    "freescale/checkpoint/dcp_folder.py": {"pickle.dumps"},
}
"""The metadata of torch.distributed.checkpoint is a pickle. One file reads it, with an unpickler that resolves names to
classes which do nothing; another one writes it."""


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def found_in(path: Path) -> list[str]:
    """Return what in a file could execute code from outside. `eval` of a literal executes nothing that is read."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in RUNS_CODE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_CODE:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            literal = dotted(node.func) == "eval" and [type(word) for word in node.args] == [ast.Constant]
            found += [dotted(node.func)] if dotted(node.func) in CALLS_CODE and not literal else []
            found += [word.arg for word in node.keywords if word.arg in ("shell", "allow_pickle")]
    return found


def test_the_source_calls_nothing_that_executes_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import pickle\nfrom dill import load\nx = np.load(f, allow_pickle=True)\nrun(c, shell=True)\neval(a)\n"
    )
    assert sorted(found_in(tmp_path / "bad.py")) == ["allow_pickle", "dill", "eval", "np.load", "pickle", "shell"]
    found = {str(path.relative_to(SOURCE)): found for path in SOURCE.rglob("*.py") if (found := found_in(path))}
    assert found == {name: ["pickle"] for name in USED}
    for name, used in USED.items():
        tree = ast.parse((SOURCE / name).read_text())
        named = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert {name for name in named if name.startswith("pickle")} == used


@pytest.mark.parametrize("member", ["../../escaped/ratings.dat", "/tmp/escaped/ratings.dat", "a/../../../ratings.dat"])
def test_an_archive_cannot_write_outside_of_the_import(member: str, tmp_path: Path) -> None:
    inner = tmp_path / "deep" / "deeper"
    inner.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "log.zip", "w") as archive:
        archive.writestr(member, "1::2::5::100\n1::3::4::200\n")
    done = log_import(inner, "ml-1m", tmp_path / "log.zip")
    assert (done.users, done.events) == (1, 2)
    made = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert made == {"deep", "log.zip"}
    assert not Path("/tmp/escaped").exists()


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_names_from_runs_and_files_are_escaped_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [[one._replace(transfers=tuple(t._replace(name=EVIL) for t in one.transfers)) for one in ranks]
             for ranks in some_steps()]  # fmt: skip
    entry = {"kind": "evaluate", "step": 1, EVIL: 0.5}
    starts = [{"kind": "start", "step": step, "world_size": 2, "reason": EVIL} for step in (0, 1)]
    training = curves.training_sections([curves.RunMetrics(EVIL, [*starts, entry], damaged=1)])
    pages = [page.document(EVIL, EVIL, *training, *report_sections(records.from_steps(steps, 0), [3]))]
    data = tmp_path / EVIL.replace("/", "-")
    data.mkdir()
    for name, raw in valid_data().items():
        (data / name).write_bytes(raw)
    assert main(["data", "stats", str(data), "--ranks", "2", "--page", "stats.html"]) == 0
    shipped = (SOURCE / "freescale" / "simulate" / "clusters" / "h100.toml").read_text()
    Path("mine.toml").write_text(shipped.replace("H100 DGX", EVIL).replace("assumed", EVIL))
    words = ["--from-data", str(data), "--model", "tiny", "--steps", "5", "--gpus", "2", "--cluster", "mine.toml"]
    assert main(["simulate", *words, "--out", "simulate.html"]) == 0
    capsys.readouterr()
    pages += [Path(name).read_text() for name in ("stats.html", "simulate.html")]
    for text in pages:
        assert "<script" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text
