"""Forks a process for every command that a client sends: python -m tests.support.warm_python.server SOCKET PYTHON."""

import atexit
import contextlib
import json
import logging
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.support.forked_python import preload, run_and_exit


def serve(address: str, python: str) -> None:
    """Answer clients until stdin ends. `python`: what commands find as `sys.executable`."""
    preload(["torch.distributed.run"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    selector = selectors.DefaultSelector()
    for source in (sys.stdin, listener, woken):
        selector.register(source, selectors.EVENT_READ)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    clients: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return _end(clients)
            if key.fileobj is listener:
                client = listener.accept()[0]
                pid = _start(client, python)
                clients[pid] = client
                selector.register(client, selectors.EVENT_READ, data=pid)
            elif key.fileobj is woken:
                woken.recv(4096)
                _report(clients, selector)
            elif key.data in clients:  # a client that was killed: so is its command
                os.killpg(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)


def _start(client: socket.socket, python: str) -> int:
    """Fork the process of a command and tell the client its number."""
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    request = json.loads(client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.set_wakeup_fd(-1)
        _become(request["folder"], request["environment"], streams, python)
        run_and_exit(lambda: _run(request["words"]))
    for stream in streams:
        os.close(stream)
    client.sendall(f"{pid}\n".encode())
    return pid


def _report(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tell clients the exit codes of commands that ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = clients.pop(ended[0])
            with contextlib.suppress(OSError, KeyError):
                selector.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
            client.close()


def _end(clients: dict[int, socket.socket]) -> None:
    for pid in clients:
        os.killpg(pid, signal.SIGKILL)


def _become(folder: str, environment: dict[str, str], streams: Sequence[int], python: str) -> None:
    """Turn this process into one that a shell has just started."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    _close_all_but(0, 1, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tempfile.tempdir = None
    sys.executable = python
    multiprocessing.util.spawnv_passfds = _fork_instead
    atexit._clear()  # Triton's reports leaks that only a whole tear-down avoids
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _fork_instead(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Fork multiprocessing's forkserver and resource tracker: this process has imported what they would import."""
    pid = os.fork()
    if pid == 0:
        _close_all_but(0, 1, 2, *passfds)
        run_and_exit(lambda: exec(args[-1], {"__name__": "__main__"}))
    return pid


def _close_all_but(*kept: int) -> None:
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {*kept}:
        with contextlib.suppress(OSError):  # the one that listed them
            os.close(number)


def _run(words: Sequence[str]) -> None:
    """`python WORDS`."""
    if words[0] == "-u":  # torchrun's: no buffers
        words = words[1:]
    if words[0] == "-":
        with open(0, "rb", closefd=False) as code:
            words = ["-c", code.read().decode(), *words[1:]]
    if words[0] in ("-m", "-c"):
        sys.path[0] = ""
        sys.argv = list(words[1:] if words[0] == "-m" else ["-c", *words[2:]])
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        sys.argv = list(words)
    main = sys.modules["__main__"] = type(sys)("__main__")
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        main.__dict__["__file__"] = words[0]
        with open(words[0], "rb") as script:
            exec(compile(script.read(), words[0], "exec"), main.__dict__)


if __name__ == "__main__":
    serve(*sys.argv[1:])
    os._exit(0)
