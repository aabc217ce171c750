"""How every command is called: its options, what is a good value for each, and what keeps a valid call short."""

import dataclasses
import importlib
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from freescale.cli.main import COMMANDS
from freescale.config import RECIPES, RunConfig


class Option(NamedTuple):
    """An option of a command: how its value is drawn."""

    name: str
    kind: str
    """Of bad values: see `values`. "work": a whole number from which as much work follows. "ranks":
    processes to start. "flag": it has no value."""
    good: tuple[str, ...] = ()


class Form(NamedTuple):
    """How a command is called."""

    positional: tuple[Option, ...]
    always: tuple[str, ...]
    """Words that keep a valid call short. Options that are drawn come behind them, and win."""
    options: tuple[Option, ...]
    output: str = ""
    """The option or positional that names what is written."""
    weight: float = 1.0


_DATA = ("data/tiny", "data/other", "data/ranking")
_RUNS = ("runs/tiny", "runs/other", "runs/ranking", "runs/latest")
_JSON = Option("--json", "flag")
_NPROC = Option("--nproc", "ranks", ("1",))
_TRAINED = (Option("--data", "input", _DATA), _NPROC)
_RUN = Option("run", "input", _RUNS)
_OUT = Option("out", "output", ("out/new",))
_PAGE = Option("--out", "output", ("out/page.html", "page.html"))
_SHORT_RUN = ("--train.max-steps", "2", "--train.epochs", "1", "--data.shards", "4", "--data.global-batch", "16")


def _config_options() -> tuple[Option, ...]:
    """Every field of the config as an option."""
    found = []
    for section in dataclasses.fields(RunConfig):
        kind = get_type_hints(RunConfig)[section.name]
        if not dataclasses.is_dataclass(kind):
            found.append(_field_option(section.name, kind, section.default))
            continue
        hints = get_type_hints(kind)
        found += [_field_option(f"{section.name}.{f.name}", hints[f.name], f.default) for f in dataclasses.fields(kind)]
    return tuple(found)


_SLOW = ("aoti",)
"""Values that make a command take a minute: that of a compiler."""


def _field_option(name: str, kind: object, default: object) -> Option:
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is Literal:
        return Option(flag, "choice", tuple(str(value) for value in get_args(kind) if value not in _SLOW))
    if kind is bool:
        return Option(flag, "flag")
    if name.endswith("path"):
        return Option(flag, "input", _DATA)
    if Path in (kind, *get_args(kind)):
        return Option(flag, "output", ("out/more",))
    if kind is int:
        return Option(flag, "work", (str(default), "1", "2"))
    return Option(
        flag, "float" if kind is float else "text", (str(default),) if kind is float else ("rating", "label_click")
    )


CONFIG = _config_options()
_SOURCE = Option("source", "input", (*RECIPES, "tiny", "tiny", "run.toml", "runs/tiny/config.toml"))
_IMPORT = (
    Option("--user", "text", ("user", "user_id")),
    Option("--item", "text", ("item", "item_id")),
    Option("--time", "text", ("time", "none")),
    Option("--features", "text", ("rating",)),
    Option("--separator", "text", (",", "\t", ";")),
    Option("--quote", "text", ("none", '"')),
    Option("--encoding", "text", ("utf-8", "latin-1", "utf-16")),
    Option("--vocabulary", "input", ("data/tiny", "data/other")),
    Option("--on-bad", "choice", ("stop", "skip")),
    Option("--memory-mb", "int", ("1", "64")),
    _JSON,
)
_LOGS = (
    "logs/events.csv",
    "logs/events.tsv",
    "logs/events.parquet",
    "logs/events.jsonl",
    "logs/lists.txt",
    "logs/ml-1m.zip",
)
FORMS = {
    "doctor": Form((), (), (Option("--device", "choice", ("cpu", "auto", "cuda")), _JSON), weight=0.1),
    "config": Form((_SOURCE,), (), CONFIG, weight=6),
    "data import": Form(
        (
            Option("format", "choice", ("events", "events", "events", "ml-1m", "amazon", "kuairand", "ml-latest")),
            Option("log", "input", _LOGS),
            Option("target", "output", ("out/new",)),
        ),
        ("--user", "user", "--item", "item", "--time", "time"),
        _IMPORT,
        output="target",
        weight=24,
    ),
    "data synth": Form(
        (Option("target", "output", ("out/new",)),),
        ("--users", "20", "--items", "300", "--shorter", "20"),
        (
            Option("--preset", "choice", ("kuairand", "ml1m", "heavy", "planted", "yambda", "kuairand-ranking")),
            Option("--users", "work", ("1", "30")),
            Option("--items", "work", ("256", "1000")),
            Option("--popularity", "choice", ("public", "production")),
            Option("--seed", "int", ("0", "5")),
            Option("--shorter", "int", ("50", "100")),
        ),
        output="target",
        weight=8,
    ),
    "data stats": Form(
        (Option("path", "input", _DATA),),
        ("--ranks", "4"),
        (
            Option("--ranks", "work", ("1", "2")),
            Option("--batch", "work", ("1", "8")),
            Option("--max-history", "int", ("1", "100")),
            Option("--model.dim", "int", ("64",)),
            Option("--model.heads", "int", ("1",)),
            Option("--model.kind", "choice", ("hstu", "sasrec")),
            Option("--on-bad", "choice", ("stop", "skip")),
            Option("--page", "output", ("page.html",)),
            _JSON,
        ),
        weight=10,
    ),
    "train": Form(
        (_SOURCE,),
        ("--data", "data/tiny", "--restarts", "0", "--out", "out/run", *_SHORT_RUN),
        (
            *CONFIG,
            *3 * (Option("--out", "output", ("out/run", "runs/tiny")), Option("--resume", "flag")),
            Option("--data", "input", _DATA),
            Option("--hosts", "text", ("1", "1:1")),
            Option("--rdzv-endpoint", "text", ("127.0.0.1", "127.0.0.1:99999", ":")),
            Option("--tensorboard", "flag"),
            Option("--metrics-address", "text", ("127.0.0.1:99999", ":", "x")),
            Option("--metrics-file", "output", ("out/run.prom",)),
            Option("--quiet", "flag"),
            Option("--restarts", "work", ("0",)),
            _NPROC,
        ),
        weight=18,
    ),
    "runs": Form((Option("folder", "input", ("runs", "runs", "empty")),), (), (_JSON,), weight=4),
    "report": Form(
        (Option("runs", "input", _RUNS),),
        (),
        (
            Option("--from-kineto", "input", ("traces",)),
            Option("--steps", "work", ("1", "2", "3")),
            Option("--open", "flag"),
            _JSON,
        ),
        weight=9,
    ),
    "tables": Form((_RUN,), (), (_JSON,), weight=2),
    "simulate": Form(
        (_RUN,),
        ("--gpus", "2", "--steps", "6", "--without", "priority", "--out", "page.html"),
        (
            Option("--from-data", "input", _DATA),
            Option("--model", "input", ("tiny", "run.toml", "hstu-large")),
            Option("--gpus", "work", ("1", "4")),
            Option("--cluster", "input", ("cpu", "a100", "h100-200g", "cluster.toml")),
            Option("--without", "choice", ("balance", "priority", "sm-free")),
            Option("--max-history", "work", ("8", "64")),
            Option("--batch", "work", ("1", "4")),
            Option("--steps", "work", ("5", "8")),
            _PAGE,
            _JSON,
        ),
        output="--out",
        weight=9,
    ),
    "bench transport": Form(
        (), ("--nproc", "1", "--kib", "16"), (_NPROC, Option("--kib", "work", ("1", "64")), _PAGE, _JSON), weight=0.6
    ),
    "bench step": Form(
        (_SOURCE,),
        ("--data", "data/tiny", "--nproc", "1", "--steps", "2", "--turns", "1", "--exact-steps", "1", *_SHORT_RUN),
        (*CONFIG, _NPROC, Option("--turns", "work", ("1",)), Option("--emulated", "flag"), _PAGE, _JSON),
        weight=0.6,
    ),
    "bench attention": Form(
        (),
        ("--batch", "2", "--longest", "8", "--rounds", "1", "--width", "4"),
        (
            Option("--device", "choice", ("cpu", "cuda")),
            Option("--preset", "choice", ("kuairand", "ml1m", "heavy")),
            Option("--heads", "work", ("1", "2")),
            Option("--width", "work", ("4", "8")),
            Option("--longest", "work", ("1", "16")),
            Option("--rounds", "work", ("1",)),
            Option("--precision", "choice", ("fp32", "tf32", "bf16", "fp16")),
            _JSON,
        ),
        weight=0.4,
    ),
    "selftest": Form(
        (),
        ("--nproc", "1", "--only", "device"),
        (Option("--device", "choice", ("cpu", "cuda")), _NPROC, _JSON),
        weight=0.3,
    ),
    "checkpoint convert": Form(
        (Option("source", "input", _RUNS), _OUT),
        (),
        (Option("--like", "input", _RUNS), Option("--rename", "text", ("model.=net.",)), _JSON),
        output="out",
        weight=3,
    ),
    "publish": Form(
        (_RUN, Option("address", "output", ("out/new",))),
        (),
        (Option("--format", "choice", ("pt2",)), Option("--full-every", "int", ("1", "24"))),
        output="address",
    ),
    "evaluate": Form((_RUN,), (), (*_TRAINED, _JSON), weight=7),
    "predict": Form((_RUN, _OUT), (), (*_TRAINED, Option("--k", "int", ("1", "10", "100"))), output="out", weight=7),
    "export": Form((_RUN, _OUT), (), _TRAINED, output="out", weight=7),
}
"""Every command, with the options of which something is known."""


_SCHEMAS = {
    "doctor": "DoctorOptions",
    "data import": "ImportOptions",
    "data synth": "SynthOptions",
    "data stats": "StatsOptions",
    "runs": "RunListOptions",
    "report": "ReportOptions",
    "simulate": "SimulateOptions",
    "bench transport": "TransportBenchOptions",
    "bench attention": "AttentionBenchOptions",
    "selftest": "SelftestOptions",
    "checkpoint convert": "ConvertOptions",
    "publish": "PublishOptions",
    "evaluate": "EvaluateOptions",
    "predict": "PredictOptions",
    "export": "ExportOptions",
}
"""The options of each command that has a dataclass for them."""


def _completed(name: str, form: Form) -> Form:
    """Return the form of a command with all its other options, as its own parser declares them."""
    if name not in _SCHEMAS:
        return form
    schema = getattr(importlib.import_module(f"freescale.cli.{COMMANDS[name].module}"), _SCHEMAS[name])
    known = {option.name for option in (*form.positional, *form.options)}
    hints = get_type_hints(schema)
    optional = [f for f in dataclasses.fields(schema) if f.default is not dataclasses.MISSING and f.name not in known]
    others = [_field_option(f.name, hints[f.name], f.default) for f in optional]
    return form._replace(options=form.options + tuple(option for option in others if option.name not in known))


FORMS = {name: _completed(name, FORMS.get(name, Form((), (), ()))) for name in COMMANDS}
