"""What is wrong with how a command ended: nothing, or one line each."""

import re
from collections.abc import Iterator
from pathlib import Path

from freescale.cli import main

from .cases import Case
from .runner import Reply

_CODES = {int(code) for code in re.findall(r"\b\d+\b", main._EXIT_CODES)}
"""As `freescale --help` documents them."""
_CRASHES = re.compile(
    r"Traceback \(most recent call last\)|Exception ignored in|Fatal Python error|terminate called|Segmentation fault"
)
_PARSER = re.compile(r"helptext|^usage: ", re.MULTILINE)
_TEMPORARY = re.compile(r"(^|[._-])te?mp|partial|incomplete|\bscratch|~$")


def listing(folder: Path) -> set[str]:
    """Everything in the folder of a case."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def verdicts(case: Case, reply: Reply, before: set[str], folder: Path) -> Iterator[str]:
    """What must not be. `before`: what the folder held when the command began."""
    said = reply.out + reply.err
    if reply.late:
        yield f"hang: killed after {reply.seconds:.0f} s"
        return
    if _CRASHES.search(said):
        yield f"crash: {_last_line(said)}"
    elif reply.code not in _CODES:
        yield f"exit code {reply.code}, which is not documented"
    elif reply.code not in (0, 130) and not _explained(reply):
        yield f"exit code {reply.code} without an error and a remedy"
    elif reply.code == 0:
        yield from _nothing_done(case, reply, folder)
    if reply.left:
        yield f"left running: {reply.left[0]}"
    yield from _left_files(before, folder)


def _explained(reply: Reply) -> bool:
    """An error with its remedy, a message of an option parser, or findings on stdout (doctor, selftest, bench)."""
    if re.search(r"^error: ", reply.err, re.MULTILINE):
        return "remedy:" in reply.err
    return bool(_PARSER.search(reply.err + reply.out)) or bool(reply.out.strip())


def _nothing_done(case: Case, reply: Reply, folder: Path) -> Iterator[str]:
    asked = {"-h", "--help", "--version"} & set(case.words)
    if not (reply.out + reply.err).strip() and not case.circumstances.full_stdout and not case.outputs:
        yield "exit code 0, and nothing was said or written"
    for output in case.outputs if not asked else ():
        place = folder / output
        written = place.stat().st_size > 0 if place.is_file() else place.is_dir() and any(place.iterdir())
        if not written:
            yield f"exit code 0, but {output!r} was not written"


def _left_files(before: set[str], folder: Path) -> Iterator[str]:
    new = sorted(listing(folder) - before)
    stray = [path for path in new if path.startswith("tmp/") or _TEMPORARY.search(Path(path).name)]
    if stray:
        yield f"left behind: {', '.join(stray[:3])}"


def _last_line(said: str) -> str:
    """What was raised, without the traceback."""
    lines = [line for line in said.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit|Warning)\b", line)]
    return (lines or said.strip().splitlines())[-1][:300]
