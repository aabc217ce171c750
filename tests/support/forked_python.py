"""What programs share that fork a process per command, from one that has imported torch: that takes seconds.

No thread may run in the process that forks. polars starts one when it is imported, and is left to the commands.
"""

import atexit
import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

_IMPORTS = (
    *("torchrec", "pyarrow.parquet", "pyarrow.compute", "rich.console", "rich.table", "tyro"),
    *("freescale.train.build", "freescale.cli.simulate", "freescale.cli.report", "freescale.cli.data_stats"),
)
_CANNOT_FLUSH = 120
"""As Python's."""


def preload(modules: Sequence[str] = ()) -> None:
    """Import what commands import, and leave it out of garbage collection: a collection would copy its pages."""
    gc.disable()
    for name in (*_IMPORTS, *modules):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Do what Python does around a program, but for taking torch apart, which takes seconds."""
    try:
        run()
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:  # multiprocessing's resource tracker closes its streams
                stream.flush()
    except OSError:
        traceback.print_exc()
        code = _CANNOT_FLUSH
    os._exit(code)
