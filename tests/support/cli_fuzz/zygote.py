"""Runs commands in processes that are forked from one that has imported torch, since importing it takes seconds.

Started by python -m. It reads one request per line of stdin and writes one reply per line of stdout. A request names
the words of the command, its folder and its environment; the reply holds the exit code, what was printed, and the
processes that the command left behind.
"""

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import resource
import runpy
import select
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from freescale.cli import main
from tests.support.forked_python import preload, run_and_exit

_MEMORY = 6 << 30
"""Address space that a command may take beyond what it starts with."""
_GRACE_SECONDS = 3.0
"""For helper processes of a command to notice that it has ended."""
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _CAPABILITY_VERSION = 24, 36, 0x20080522
_IGNORES_PERMISSIONS = (1, 2, 3)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER."""


def serve() -> None:
    """Answer requests until stdin ends."""
    preload(["typeguard"])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a command leaves behind becomes a child of this process, and is reaped
    replies = os.dup(1)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        (out, out_end), (err, err_end), (begun, begun_end) = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (replies, out, err, begun):
                os.close(descriptor)
            _become(request, out_end, err_end)
            run_and_exit(functools.partial(_run, begun_end))
        for descriptor in (out_end, err_end, begun_end):
            os.close(descriptor)
        select.select([begun], [], [], request["seconds"])  # then its time begins, however busy the machine
        os.close(begun)
        reply = _watch(pid, request, {out: b"", err: b""})
        os.write(replies, json.dumps(reply).encode() + b"\n")


def _run(begun: int) -> None:
    """Run the command. Close `begun` where it is dispatched: before that, Python prints a traceback at Ctrl-C."""
    dispatch = main._dispatch

    def begin(words: list[str]) -> int:
        os.close(begun)
        return dispatch(words)

    main._dispatch = begin
    runpy.run_module("freescale", run_name="__main__", alter_sys=True)


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """Turn this process into one that a shell has just started for a command."""
    os.setsid()
    os.chdir(request["folder"])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if request["full_stdout"]:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        os.close(out)
    else:
        os.dup2(out, 1)
    os.dup2(err, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the zygote may ignore it
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # or what was found in the zygote would be used
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + _MEMORY
    for limit, value in (("AS", memory), ("CORE", 0), ("FSIZE", request["file_bytes"])):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))
    if os.geteuid() == 0:
        _obey_permissions()
    sys.argv = ["freescale", *request["words"]]


def _obey_permissions() -> None:
    """Give up what lets root write into read-only folders, here and in programs that are started from here."""
    for capability in _IGNORES_PERMISSIONS:
        _prctl(_PR_CAPBSET_DROP, capability)
    libc, header = ctypes.CDLL(None), struct.pack("Ii", _CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(24)
    libc.capget(header, held)
    words = list(struct.unpack("6I", held.raw))
    for capability in _IGNORES_PERMISSIONS:
        words[:3] = [word & ~(1 << capability) for word in words[:3]]
    libc.capset(header, struct.pack("6I", *words))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(pid: int, request: dict[str, Any], printed: dict[int, bytes]) -> dict[str, Any]:
    """Collect what a command prints until it ends or its time is over."""
    began, streams, status, late = time.monotonic(), list(printed), None, False
    interrupt_at = request["interrupt_after"]
    while status is None and not late:
        seconds = time.monotonic() - began
        late = seconds > request["seconds"]
        if interrupt_at is not None and seconds > interrupt_at:
            os.kill(pid, signal.SIGINT)
            interrupt_at = None
        _read(printed, 0.02)
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
    seconds = time.monotonic() - began
    if status is None:
        os.kill(pid, signal.SIGUSR1)  # faulthandler writes where it is
        _read(printed, 1.0)
        os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    left = [] if late else _left_behind(pid, printed)
    _end_session(pid)
    _read(printed, 0.0)
    for stream in streams:
        os.close(stream)
    out, err = (printed[stream].decode("utf-8", "replace") for stream in streams)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "late": late, "seconds": round(seconds, 3), "out": out, "err": err, "left": left}


def _read(printed: dict[int, bytes], seconds: float) -> None:
    """Take what can be read, for at most so long."""
    waiting = list(printed)
    while waiting:
        ready, _, _ = select.select(waiting, [], [], seconds)
        if not ready:
            return
        for stream in ready:
            chunk = os.read(stream, 1 << 16)
            printed[stream] += chunk
            if not chunk:
                waiting.remove(stream)
        seconds = 0.0
    time.sleep(0.02)  # everything is closed, and the command may still run


def _left_behind(session: int, printed: dict[int, bytes]) -> list[str]:
    """Command lines of processes that outlive their command."""
    until = time.monotonic() + _GRACE_SECONDS
    while (left := _of_session(session)) and time.monotonic() < until:
        _read(printed, 0.05)
    return [_command_line(pid) for pid in left]


def _end_session(session: int) -> None:
    """Kill what a command left behind, and reap it."""
    while left := _of_session(session):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _of_session(session: int) -> list[int]:
    """Processes that a command started, by their session; zombies of this process are reaped on the way."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) != session:
            continue
        if fields[0] == "Z":
            _reap(int(folder.name))
        else:
            found.append(int(folder.name))
    return found


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:200]
    except OSError:
        return f"process {pid}"


if __name__ == "__main__":
    serve()
    os._exit(0)  # torch takes long to be taken apart
