"""The console command: find the subcommand, run it, and turn our errors into one readable message.

Subcommands are imported only when they run, so `freescale --help` is quick and imports no torch.
"""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

from freescale.errors import INTERRUPTED, FreeScaleError, StorageError, UsageError, is_file_error, suggest
from freescale.launch import is_rank
from freescale.log import ConsoleHandler, handled_by, logger
from freescale.progress import session


class Command(NamedTuple):
    """A subcommand: where it lives and what it is for."""

    module: str
    summary: str


COMMANDS = {
    "doctor": Command("freescale.cli.doctor", "check versions, devices and limits; each fault with its remedy"),
    "config": Command("freescale.cli.config_show", "print a recipe or a TOML file, whole, with overrides applied"),
    "data import": Command("freescale.cli.data_import", "turn a public data set or an event log into histories"),
    "data synth": Command("freescale.cli.data_synth", "make up a log of any size"),
    "data stats": Command("freescale.cli.data_stats", "lengths, popularity, and the bubble of random batches"),
    "train": Command("freescale.cli.train", "train a recipe or a config, on one rank or many"),
    "runs": Command("freescale.cli.runs", "what was trained here, how far it came, and how good it became"),
    "report": Command("freescale.cli.report", "where the time of a training went: table, page, trace"),
    "simulate": Command("freescale.cli.simulate", "what other clusters and sizes would do with a run"),
    "bench transport": Command("freescale.cli.bench_transport", "how quick each way between ranks is here"),
    "bench step": Command("freescale.cli.bench_step", "what each technique wins here, against TorchRec's loops"),
    "bench attention": Command("freescale.cli.bench_attention", "is attention right on this device, and how quick"),
    "selftest": Command("freescale.cli.selftest", "correctness of every way and technique on your machines"),
    "evaluate": Command("freescale.cli.evaluate", "metrics of a trained model on what it has not seen"),
    "predict": Command("freescale.cli.predict", "the best items for every user, to Parquet"),
    "export": Command("freescale.cli.export", "a trained model as safetensors, with vocabulary and config"),
}

_EXIT_CODES = """exit codes: 0 done, 1 failed, 2 wrong use or config, 3 unusable data, 4 faulty install, 5 a rank lost,
            6 NaN or overflow, 7 a file or folder that may not be used, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A rank has a handler already: the process that started it writes what all ranks log alike once.
    with contextlib.nullcontext() if logger.handlers else handled_by(ConsoleHandler()):
        return _run(words)


def _run(words: list[str]) -> int:
    try:
        with session(), _interrupted_by_sigterm():
            return _dispatch(words)
    except FreeScaleError as error:
        logger.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        logger.info("interrupted")
        eval("None")  # else CPython exits by SIGINT if the exception passed through `exec` of a string, as in an import
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, which is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # the last resort: who writes knows better what to say (see `errors.writing`)
        if not is_file_error(error):
            raise
        refused = StorageError.from_os_error(error)
        logger.error("%s", refused)
        return refused.exit_code


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that it removes what it has half written.

    Not in a rank: one that waits for another in native code would not hear of it, and has to end at once.
    """
    if is_rank() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"freescale {version('freescale')}\n")
        return 0
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return importlib.import_module(COMMANDS[name].module).run(words[length:], f"freescale {name}")
    group = {name: c for name, c in COMMANDS.items() if name.startswith(f"{words[0]} ")}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        sys.stdout.write(_help(group))
        return 0
    asked = " ".join(words[:2] if group else words[:1])
    raise UsageError(f"no command is called '{asked}'", remedy=suggest(asked, group or COMMANDS))


def _help(commands: dict[str, Command] | None = None) -> str:
    shown = commands or COMMANDS
    width = max(map(len, shown))
    lines = [f"  freescale {name:<{width}}  {command.summary}" for name, command in shown.items()]
    return "\n".join(
        [
            "FreeScale: training sequence recommendation models without bubbles.",
            "",
            *lines,
            "",
            "Add --help to a command for its options.",
            _EXIT_CODES,
            "",
        ]
    )
