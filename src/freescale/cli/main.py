"""The console command: dispatches to a subcommand and prints our errors as one readable message.

Subcommands are imported only when they run, so `freescale --help` is fast and imports no torch.
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
    """A subcommand: the function that runs it, and its purpose."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "doctor": Command("doctor", "run_doctor", "check versions, devices and limits; each fault with its remedy"),
    "config": Command("train", "run_config", "print a recipe or a TOML file, whole, with overrides applied"),
    "data import": Command("data_import", "run_import", "turn a public data set or an event log into histories"),
    "data synth": Command("data_synth", "run_synth", "generate a synthetic log of any size"),
    "data stats": Command("data_stats", "run_stats", "lengths, popularity, and the bubble of random batches"),
    "train": Command("train", "run_train", "train a recipe or a config, on one rank or many"),
    "runs": Command("report", "run_list", "list the trainings here with their progress and best metric"),
    "report": Command("report", "run_report", "where the time of a training went: table, page, trace"),
    "tables": Command("slots", "run_tables", "what the tables with dynamic ids hold: load, age, hottest ids"),
    "simulate": Command("simulate", "run_simulate", "what other clusters and sizes would do with a run"),
    "bench transport": Command("bench", "run_transport", "speed of each transport between ranks"),
    "bench step": Command("bench", "run_step", "what each technique gains here, against TorchRec's loops"),
    "bench attention": Command("bench", "run_attention", "correctness and speed of attention on this device"),
    "selftest": Command("selftest", "run_selftest", "correctness of every transport and technique on your machines"),
    "evaluate": Command("trained_model", "run_evaluate", "metrics of a trained model on held-out data"),
    "predict": Command("trained_model", "run_predict", "the best items for every user, to Parquet"),
    "checkpoint convert": Command("convert", "run_convert", "a checkpoint to or from torch.distributed.checkpoint"),
    "publish": Command("trained_model", "run_publish", "a trained model as the next version that servers follow"),
    "export": Command("trained_model", "run_export", "a trained model as safetensors, with vocabulary and config"),
}

_EXIT_CODES = """exit codes: 0 done, 1 failed, 2 wrong use or config, 3 unusable data, 4 faulty install, 5 a rank lost,
            6 NaN or overflow, 7 a file or folder that may not be used, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A rank has a handler already, which sends its records to the agent for deduplication.
    with contextlib.nullcontext() if logger.handlers else handled_by(ConsoleHandler()):
        return _run(words, is_program=argv is None)


def _run(words: list[str], *, is_program: bool) -> int:
    try:
        return _dispatch_or_explain(words)
    except KeyboardInterrupt:
        logger.info("interrupted")
        eval("None")  # else CPython exits by SIGINT if the exception passed through `exec` of a string, as in an import
        return INTERRUPTED
    finally:
        if is_program:  # the process ends; Ctrl-C meanwhile would print a traceback from the cleanup of torch
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _dispatch_or_explain(words: list[str]) -> int:
    """Run the command; print an error of ours, and return its exit code."""
    try:
        with session(), _interrupted_by_sigterm():
            return _dispatch(words)
    except FreeScaleError as error:
        logger.error("%s", error)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a last resort: code that writes gives better messages (see `errors.writing`)
        if not is_file_error(error):
            raise
        storage_error = StorageError.from_os_error(error)
        logger.error("%s", storage_error)
        return storage_error.exit_code


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that it removes incomplete files.

    Not in a rank: native code that waits for another rank would delay the handler, and a rank has to end at once.
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
    _require_utf8(words)
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
            command = COMMANDS[name]
            module = importlib.import_module(f"freescale.cli.{command.module}")
            return getattr(module, command.function)(words[length:], f"freescale {name}")
    group = {name: c for name, c in COMMANDS.items() if name.startswith(f"{words[0]} ")}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        sys.stdout.write(_help(group))
        return 0
    unknown = " ".join(words[:2] if group else words[:1])
    raise UsageError(f"no command is called '{unknown}'", remedy=suggest(unknown, group or COMMANDS))


def _require_utf8(words: list[str]) -> None:
    """Refuse what the readers and writers of Parquet and safetensors would not take, before anything is done."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "an argument is not UTF-8", where=ascii(word), remedy="rename that file or folder"
            ) from error


def _help(commands: dict[str, Command] | None = None) -> str:
    shown = commands or COMMANDS
    width = max(map(len, shown))
    lines = [f"  freescale {name:<{width}}  {command.summary}" for name, command in shown.items()]
    return "\n".join(
        [
            "FreeScale: distributed training of sequence recommendation models without bubbles.",
            "",
            *lines,
            "",
            "Add --help to a command for its options.",
            _EXIT_CODES,
            "",
        ]
    )
