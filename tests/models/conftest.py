"""Kernels run in the interpreter of Triton."""

from tests.support.interpreter import interpreter

__all__ = ["interpreter"]
