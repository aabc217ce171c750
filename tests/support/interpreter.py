"""Triton's interpreter for all tests of kernels."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Processes with Triton's interpreter, which must be enabled before the import of Triton."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=_enable_interpreter) as pool:
        yield pool


def _enable_interpreter() -> None:
    """Enable the interpreter, and let it patch Triton's language once for each function that kernels call.

    It does so at every call of such a function, which changes nothing from the second one on and takes a third of the
    time.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patched = set()

    def call(function: "interpreter.InterpretedFunction[Any]", *arguments: Any, **options: Any) -> Any:
        if function.fn not in patched:
            patched.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call  # type: ignore[method-assign]
