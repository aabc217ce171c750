"""What happens to every pair of a query and a key, by `pairs.c`: fp32 on a CPU, one pass instead of twenty.

The file is compiled when it is first needed (a third of a second) and loaded through ctypes; nothing is kept on disk.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from freescale.errors import DataError
from freescale.models.attention.matrix import Matrix
from freescale.models.attention.operands import Inputs
from freescale.models.sequence import CELL_SHIFT, bucket_of_cell

_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC", f"-DCELL_SHIFT={CELL_SHIFT}")
_WORTH_THREADS = 1 << 17  # pairs; fewer are done before another thread has begun
Kernel = Callable[..., None]
_Sums = Sequence[Sequence[Tensor]]
_Count, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Block(ctypes.Structure):
    """As in pairs.c."""

    _fields_ = (
        *((name, _Count) for name in ("samples", "heads", "rows", "keys", "begin", "longest")),
        *((name, _Pointer) for name in ("history", "asked", "event", "time", "by_cell", "bucket_of_cell", "reversed")),
        ("distances", _Count),
    )


@lru_cache
def library() -> ctypes.CDLL | str:
    """The compiled file, or why there is none."""
    compiler, *options = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler) is None:
        return "no C compiler was found"
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(__file__).with_name("pairs.c"), Path(folder) / "pairs.so"
        command = [compiler, *options, *_FLAGS, "-o", built, source, "-lm"]
        own = {**os.environ, "TMPDIR": folder}  # so that an interrupted compiler leaves nothing behind either
        run = subprocess.run(command, capture_output=True, text=True, env=own)
        if run.returncode:
            return f"{compiler} failed: {(run.stderr.strip().splitlines() or ['without a word'])[0]}"
        try:
            return ctypes.CDLL(str(built))
        except OSError as error:
            return f"what was compiled cannot be loaded: {error}"


class Pairs:
    """Scores to weights, and gradients of weights to those of scores and biases."""

    def __init__(self, x: Inputs, compiled: ctypes.CDLL) -> None:
        self._library = compiled
        self._time, self._reversed = x.time.float().contiguous(), x.position.float().flip(0)
        self._table = bucket_of_cell(x.q.device)
        self._by_cell = self._time.index_select(0, self._table)
        self._threads = torch.get_num_threads()
        self._of_reversed = torch.zeros(self._threads, len(self._reversed), dtype=torch.float32)
        self._of_time = torch.zeros(self._threads, len(self._time), dtype=torch.float32)

    def weigh_(self, score: Tensor, matrix: Matrix, rows: slice) -> None:
        """silu(score + biases), and 0 where a query does not see a key."""
        self._dealt(self._library.weights, (score,), matrix, rows)

    def weigh_back_(self, score: Tensor, d_weights: Tensor, matrix: Matrix, rows: slice) -> None:
        """The same; gradients of weights become those of scores, and add to those of the biases."""
        sums = list(zip(self._of_reversed, self._of_time, strict=True))
        self._dealt(self._library.gradients, (score, d_weights), matrix, rows, sums)

    def of_biases(self) -> tuple[Tensor, Tensor]:
        """Gradients of position and time, over all blocks so far."""
        return self._of_reversed.sum(0).flip(0), self._of_time.sum(0)

    def _dealt(self, kernel: Kernel, scores: Sequence[Tensor], matrix: Matrix, rows: slice, sums: _Sums = ()) -> None:
        """Every thread takes some of the rows, and has sums of its own."""
        history, longest, when = matrix.bucket.history, matrix.bucket.longest, matrix.times
        assert when is not None
        history = torch.full((matrix.samples,), longest) if history is None else history
        history = history.to(torch.int64).contiguous()
        furthest = min(int(history.max()), longest - 1)
        if furthest >= len(self._reversed):  # C does not look where it reads
            what = f"two events are {furthest} places apart, but the position bias has {len(self._reversed)} amounts"
            raise DataError(what, remedy="build the model with `longest` at least as long as its longest sample")
        count, keys = rows.stop - rows.start, rows.stop
        tensors = history, when.asked, when.event, self._time, self._by_cell, self._table, self._reversed
        sizes = matrix.samples, matrix.heads, count, keys, rows.start, longest
        block = _Block(*sizes, *map(Tensor.data_ptr, tensors), len(self._reversed))
        threads = self._threads if scores[0].numel() >= _WORTH_THREADS else 1

        def part(thread: int) -> None:
            room = torch.empty(keys, dtype=torch.int32)
            first, last = (_Count(count * end // threads) for end in (thread, thread + 1))
            added = [_address(one) for one in (sums[thread] if sums else ())]
            kernel(ctypes.byref(block), *map(_address, scores), first, last, _address(room), *added)

        if threads == 1:
            part(0)
        else:
            list(_pool(threads).map(part, range(threads)))


os.register_at_fork(after_in_child=lambda: _pool.cache_clear())


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="pairs")


def _address(x: Tensor) -> ctypes.c_void_p:
    return _Pointer(x.data_ptr())
