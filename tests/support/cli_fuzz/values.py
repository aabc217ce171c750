"""Values for the options of commands that are probably wrong."""

from random import Random

_LONG, _NOT_UTF8 = "a" * 300, "bad-\udcff"
# fmt: off
_NUMBERS = (
    "", " 5", "0", "-1", "-7", "nan", "inf", "-inf", "x", "1.5", "1e3", "1e400", "0x10", "1_0", "+3", "--3", "٣", "½",
    "1,0",
)
_RANKS = ("", "0", "-1", "-7", "nan", "x", "1.5", "1e400", "½")
_HUGE = ("2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 30, "1" + "0" * 5000)
_FLOATS = ("", "0", "-1", "nan", "inf", "-inf", "1e308", "1e-320", "x", "1,5", "0.5")
_CHOICES = ("", "x", "ON", "None", "0")
TEXTS = (
    "", " ", "\t", "\\t", "\n", "-", "'", '"', "::", "nope", "None", "none", "user item", "%s{}", "ünï-çødé", "🦊",
    _LONG, _NOT_UTF8,
)
_INPUTS = (
    "", ".", "~", "missing", "empty", "empty.txt", "dangling", "loop", "ünï/çødé", _LONG, _NOT_UTF8,
    "data", "data/tiny", "data/ranking", "data/other", "data/tiny/manifest.json", "data/tiny/*.parquet",
    "runs", "runs/tiny", "runs/ranking", "runs/latest", "runs/tiny/config.toml", "runs/tiny/config.toml/x",
    "logs", "logs/events.csv", "logs/events.parquet", "logs/events.jsonl", "logs/ml-1m.zip",
    "model", "traces", "run.toml", "cluster.toml", "nosuch://x", "memory://nothing", "file:///nowhere",
)
_OUTPUTS = (
    "", " ", ".", "new", "out/new", "deep/er/and/deeper", "ünï/çødé", _LONG, _NOT_UTF8, "readonly", "readonly/x",
    "empty", "logs/events.csv", "logs/events.csv/x", "data/tiny", "runs/tiny", "dangling", "dangling/x", "loop/x",
    "/proc/nowhere/x",
)
"""All lie in the folder of the case, or cannot be made: a mistyped command must overwrite nothing outside of it."""
# fmt: on
_BAD = {
    "int": _NUMBERS,
    "work": _NUMBERS,
    "ranks": _RANKS,
    "float": _FLOATS,
    "text": TEXTS,
    "input": _INPUTS,
    "output": _OUTPUTS,
    "choice": _CHOICES,
}


def bad(kind: str, rng: Random) -> str:
    """A bad value of a kind: see `forms.Option`."""
    if kind == "int" and rng.random() < 0.2:
        return rng.choice(_HUGE)
    return rng.choice(_BAD[kind])
