"""Checks every use of device memory against the clocks: races, memory reused too early, and pinned memory."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.vgpu.clocks import AUTOGRAD, Clocks, thread_name

Rows = frozenset[int] | None
"""Rows of a table that an indexed kernel uses; None: all."""


class Use(NamedTuple):
    """A use of memory by a kernel."""

    stream: int
    number: int
    operator: str
    line: str
    is_write: bool
    rows: Rows

    def __str__(self) -> str:
        return f"stream {self.stream} {'writes' if self.is_write else 'reads'} by {self.operator} at {self.line}"


@dataclass
class Block:
    """One allocation."""

    stream: int
    """The stream that it was allocated on, whose later kernels may reuse it."""
    line: str
    pointer: int
    size: int
    uses: dict[tuple[int, bool, Rows], Use] = field(default_factory=dict)
    """The newest use of each kind."""
    arena: int | None = None
    """The symmetric memory that it is part of, if any: peers write to it."""
    recorded: set[int] = field(default_factory=set)
    """Streams that `record_stream` named: the allocator waits for them."""


class Memory:
    """The allocations of a process. `reports`: what a GPU would have done wrong, with counts."""

    def __init__(self, clocks: Clocks, current_stream: Callable[[], int]) -> None:
        self._clocks, self._current_stream = clocks, current_stream
        self._blocks: dict[int, Block] = {}
        self._freed: dict[int, list[tuple[Block, Use]]] = {}
        """Uses that were not complete when their memory was freed, by the stream that may reuse it."""
        self._threads: dict[int, str] = {}
        """The thread that launches on each stream."""
        self._freed_in_arena: list[tuple[Block, Use]] = []
        self._reused_in_arena: dict[int, list[tuple[int, Block, Use]]] = {}
        """By arena: uses of memory that is allocated again, and the stream that allocates."""
        self.reports: Counter[str] = Counter()

    def kernel(
        self,
        operator: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        made: Sequence[Tensor],
        rows: Rows = None,
        *,
        indexed: Tensor | None = None,
        of_group: bool = False,
    ) -> None:
        """Account for a kernel on the current stream. `rows`: those that it uses of `indexed`; of the others all.

        `of_group`: it runs on the stream of a communicator, which any thread may use.
        """
        line = source_line()
        with self._clocks.lock:
            stream = self._current_stream()
            if not of_group:
                self._check_thread(stream, line)
            number = self._clocks.launch(stream)
            if made:
                self._reuse(stream)
            for tensor in made:
                self._block(tensor, stream, line)
            if operator.startswith(("empty", "new_empty")):
                return
            for place, tensor in enumerate([*writes, *made, *reads]):
                is_write = place < len(writes) + len(made)
                of_tensor = rows if tensor is indexed else None
                self._use(tensor, Use(stream, number, operator, line, is_write, of_tensor))

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Keep memory until the kernels so far of a stream are complete."""
        with self._clocks.lock:
            self._block(tensor, self._current_stream(), source_line()).recorded.add(stream)

    def record_pointer(self, pointer: int, stream: int) -> None:
        with self._clocks.lock:
            for block in self._blocks.values():
                if block.pointer <= pointer <= block.pointer + block.size:
                    block.recorded.add(stream)

    def mark_arena(self, tensor: Tensor, arena: int) -> None:
        """Mark an allocation as part of some symmetric memory."""
        with self._clocks.lock:
            stream = self._current_stream()
            block = self._block(tensor, stream, source_line())
            block.arena = arena
            for old, use in list(self._freed_in_arena):
                if old.pointer < block.pointer + block.size and block.pointer < old.pointer + old.size:
                    self._freed_in_arena.remove((old, use))
                    self._reused_in_arena.setdefault(arena, []).append((stream, old, use))

    def check_arena(self, arena: int) -> None:
        """Check symmetric memory that is used again, when a barrier of the current stream lets peers write to it."""
        with self._clocks.lock:
            self._clocks.launch(self._current_stream())
            for stream, block, use in self._reused_in_arena.pop(arena, []):
                if not self._clocks.is_before(use.stream, use.number, stream):
                    self.report("freed early", f"peers may write to memory of {block.line}, while {use}")

    def host_use(self, tensor: Tensor, operator: str, *, is_write: bool) -> None:
        """Account for the use of pinned host memory by the host itself."""
        with self._clocks.lock:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            for use in block.uses.values() if block else ():
                if (use.is_write or is_write) and not self._clocks.is_known(use.stream, use.number):
                    kind = "writes" if is_write else "reads"
                    self.report("host", f"the host {kind} pinned memory by {operator} at {source_line()}, while {use}")

    def report(self, kind: str, text: str) -> None:
        """Count a report."""
        self.reports[f"{kind}: {text}"] += 1

    def _check_thread(self, stream: int, line: str) -> None:
        """Report a stream that two threads use: the order of their kernels is undefined."""
        thread = thread_name()
        if thread != AUTOGRAD and self._threads.setdefault(stream, thread) != thread:
            self.report("shared stream", f"{thread} and {self._threads[stream]} use stream {stream}, at {line}")

    def _block(self, tensor: Tensor, stream: int, line: str) -> Block:
        storage: Any = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = Block(stream, line, storage.data_ptr(), storage.nbytes())
            storage.tracked = True  # with an attribute, torch keeps the Python object as long as the storage
            weakref.finalize(storage, self._free, key)
        return self._blocks[key]

    def _use(self, tensor: Tensor, use: Use) -> None:
        if not tensor.numel():
            return
        block = self._block(tensor, use.stream, use.line)
        for other in block.uses.values():
            if other.stream == use.stream or not (use.is_write or other.is_write):
                continue
            is_unordered = not self._clocks.is_before(other.stream, other.number, use.stream)
            if is_unordered and (use.rows is None or other.rows is None or use.rows & other.rows):
                self.report("race", f"{use}, unordered with: {other}; allocated at {block.line}")
        block.uses[use.stream, use.is_write, use.rows] = use

    def _free(self, key: int) -> None:
        with self._clocks.lock:
            block = self._blocks.pop(key, None)
            for use in block.uses.values() if block else ():
                assert block is not None
                if block.arena is not None:
                    self._freed_in_arena.append((block, use))
                elif use.stream != block.stream and use.stream not in block.recorded:
                    self._freed.setdefault(block.stream, []).append((block, use))

    def _reuse(self, stream: int) -> None:
        """Check freed memory of a stream when it allocates again: the allocator may return any of it."""
        for block, use in self._freed.pop(stream, []):
            if not self._clocks.is_before(use.stream, use.number, stream):
                self.report("freed early", f"stream {stream} may reuse memory of {block.line}, while {use}")


def follow_host(memory: Memory) -> None:
    """Account for what the host does with pinned memory by the usual methods of tensors."""
    for name in ("numpy", "tolist", "item", "clone", "copy_"):
        setattr(Tensor, name, _watched(memory, name, getattr(Tensor, name)))


def _watched(memory: Memory, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(tensor: Tensor, *args: Any, **options: Any) -> Any:
        on_host = [x for x in (tensor, *args[:1]) if isinstance(x, Tensor)]
        if all(x.device.type == "cpu" for x in on_host):
            for x in on_host:
                memory.host_use(x, name, is_write=name == "copy_" and x is tensor)
        return method(tensor, *args, **options)

    return run


def source_line() -> str:
    """Return the innermost line of FreeScale that led here; "backward" inside the autograd engine."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/freescale/" in name:
            return f"{name.rsplit('/freescale/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"


def indexed_rows(operator: str, args: Sequence[object], to_cpu: Callable[[Tensor], Tensor]) -> Rows:
    """Return the rows of the first tensor that an indexed kernel uses; None: all."""
    index: object = None
    if operator in ("index_select", "index_add", "index_add_") and args[1] == 0:
        index = args[2]
    elif operator in ("index", "index_put_", "_index_put_impl_", "_unsafe_index") and len(args[1]) == 1:  # type: ignore[arg-type]
        index = args[1][0]  # type: ignore[index]
    elif operator == "embedding":
        index = args[1]
    if not isinstance(index, Tensor):
        return None
    index = to_cpu(index)
    return frozenset((index.nonzero()[:, 0] if index.dtype == torch.bool else index).flatten().tolist())
