"""Triton's interpreter for all tests of kernels."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Processes with Triton's interpreter, which must be enabled before the import of Triton."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=_enable_interpreter) as pool:
        yield pool


def _enable_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
