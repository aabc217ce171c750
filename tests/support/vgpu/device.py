"""The device: torch's PrivateUse1 as `vgpu`. Its memory is the host's, and every operator runs the CPU's kernel.

Tensors are plain tensors. The storage of each keeps a CPU storage over the same memory; an operator runs on CPU tensors
over these, and its results become tensors of the device. Operators that a GPU would refuse are refused, and those that
make the host wait are counted.
"""

import ctypes
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from tests.support.vgpu import autocast, foreach
from tests.support.vgpu.build import guard
from tests.support.vgpu.clocks import Clocks, Progress, follow_threads, thread_name
from tests.support.vgpu.memory import Memory, follow_host, indexed_rows, source_line

NAME = "vgpu"
MEMORY_BYTES = 80 << 30
_DLPACK_EXTENSION = 12
_copy_bytes: Callable[..., Any] = Tensor.copy_
"""What copies of the device do; `follow_host` watches those of the host."""
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}
_WAITS |= {"is_nonzero", "bincount"}
"""Operators whose result's size or value the host needs."""
_TAKES_CPU_INDEX = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"}
_ATOMICS = {"scatter_add_", "scatter_add", "index_add_", "index_add", "scatter_reduce_", "scatter_reduce"}
_ATOMICS |= {"index_put_", "_index_put_impl_"}

clocks, progress = Clocks(), Progress()
launches: Counter[tuple[str, str, str]] = Counter()
"""Kernels by thread, line of FreeScale and operator."""
waits: Counter[tuple[str, str, str]] = Counter()
"""Host synchronizations by thread, line of FreeScale and cause."""


queues: dict[int, Any] = {}
"""Of streams whose copies and signals run on a thread of their own (see `symmetric`)."""


class VirtualGpu:
    """What is known of the device of this process."""

    def __init__(self) -> None:
        self.guard = guard()
        self.memory = Memory(clocks, self.guard.current_stream)
        self.priorities: dict[int, int] = {}
        """Of streams, by id; below 0: high."""
        self.own_index, self.count = 0, 1
        self.query_stream, self.elapsed_ms = progress.is_idle, progress.elapsed_ms

    def new_stream(self, stream: int, priority: int) -> None:
        self.priorities[stream] = priority

    def record_event(self, event: int, stream: int) -> None:
        clocks.record_event(event, stream)
        progress.record_event(event, stream)

    def wait_event(self, event: int, stream: int) -> None:
        clocks.wait_event(event, stream)
        progress.wait_event(event, stream)

    def query_event(self, event: int) -> bool:
        """Return whether an event has passed; then this thread knows that the work before it is complete."""
        has_passed = progress.has_passed(event)
        if has_passed:
            clocks.synchronize_event(event)
        return has_passed

    def synchronize_event(self, event: int) -> None:
        count_wait("event")
        clocks.synchronize_event(event)

    def synchronize_stream(self, stream: int) -> None:
        count_wait("stream")
        clocks.synchronize_stream(stream)

    def synchronize_device(self, device: int) -> None:
        count_wait("device")
        self.check_index(device)
        clocks.synchronize_device()

    def record_pointer(self, pointer: int, stream: int) -> None:
        self.memory.record_pointer(pointer, stream)

    def check_index(self, index: int) -> None:
        """Report the use of a device of another rank: on a GPU it creates a context there."""
        if index != self.own_index:
            self.memory.report(
                "device", f"vgpu:{index} is used at {source_line()} by the rank of vgpu:{self.own_index}"
            )


gpu: VirtualGpu
"""Set by `install`."""


def install(*, index: int = 0, count: int = 1) -> torch.device:
    """Register the device for good. `index`: the device of this rank. `count`: devices of the host."""
    global gpu
    gpu = VirtualGpu()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _DeviceModule(NAME))
    torch.utils.generate_methods_for_privateuse1_backend()
    gpu.guard.install(gpu, count)
    _library.fallback(_run_operator, "PrivateUse1")
    autocast.register(NAME)
    foreach.register(_run_operator)
    follow_threads(clocks)
    follow_host(gpu.memory)
    gpu.own_index, gpu.count = index, count
    torch.accelerator.set_device_index(index)
    return torch.device(NAME, index)


def count_wait(cause: str) -> None:
    """Count a host synchronization."""
    waits[thread_name(), source_line(), cause] += 1


def on_device(cpu: Tensor) -> Tensor:
    """Return a tensor of the device over the memory of a CPU tensor."""
    capsule = to_dlpack(torch.empty(0, dtype=torch.uint8).set_(cpu.untyped_storage()))
    device = ctypes.cast(_capsule_pointer(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
    device[0], device[1] = _DLPACK_EXTENSION, gpu.guard.current_device()
    whole = torch._C._from_dlpack(capsule)
    storage: Any = whole.untyped_storage()
    storage.cpu = cpu.untyped_storage()
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if cpu.dtype != torch.uint8:
            whole = whole[: len(whole) // cpu.itemsize * cpu.itemsize]
            whole = torch.ops.aten.view.dtype.redispatch(_CPU, whole, cpu.dtype)
        layout = cpu.size(), cpu.stride(), cpu.storage_offset()
        return torch.ops.aten.as_strided.default.redispatch(_CPU, whole, *layout)


def on_cpu(tensor: Tensor) -> Tensor:
    """Return the CPU tensor over the memory of a tensor of the device, when transfers into it are complete."""
    for work in _take_transfers(tensor):
        work.wait()
    return _over_same_memory(tensor)


def _over_same_memory(tensor: Tensor) -> Tensor:
    storage: Any = tensor.untyped_storage()
    layout = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage.cpu, *layout)


def _take_transfers(tensor: Tensor) -> Sequence[Any]:
    return tensor.untyped_storage().__dict__.pop("transfers", ())


def add_transfer(tensor: Tensor, work: Any) -> None:
    """Let the next use of a tensor wait for a transfer."""
    storage: Any = tensor.untyped_storage()
    storage.transfers = [*getattr(storage, "transfers", ()), work]


def is_ours(value: object) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


class _DeviceModule(types.ModuleType):
    """`torch.vgpu`: what torch calls of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def device_count(self) -> int:
        return gpu.count

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, *_: object) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: object) -> None:
        pass

    def synchronize(self, *_: object) -> None:
        torch.accelerator.synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def current_stream(self, *_: object) -> torch.Stream:
        return torch.accelerator.current_stream()

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return MEMORY_BYTES, MEMORY_BYTES


def _run_operator(op: Any, *args: Any, **options: Any) -> Any:
    """Run any operator with a tensor of the device."""
    name = op._schema.name.split("::")[1]
    if op.is_view or name in ("set_", "detach", "alias"):
        return op.redispatch(_CPU, *args, **options)
    if name in _SPECIAL:
        return _SPECIAL[name](op, *args, **options)
    tensors = _tensors((args, options), [])
    _refuse_mixed_devices(op, name, tensors, args)
    reads, writes = _reads_and_writes(op, args, options)
    rows = indexed_rows(name, args, lambda index: on_cpu(index) if is_ours(index) else index)
    _report_atomics(name, args, options)
    if not name.startswith(("empty", "new_empty")):
        launches[thread_name(), source_line(), name] += 1
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    results = op(*_cpu_arguments(op, args, pairs), **_cpu_options(options, pairs))
    for tensor, cpu in pairs.values():
        if cpu.size() != tensor.size() or cpu.stride() != tensor.stride():  # an `out=` of another size
            _resize_to(tensor, cpu)
    made: list[Tensor] = []
    result = _device_values(results, {id(cpu): tensor for tensor, cpu in pairs.values()}, made)
    for tensor in (*reads, *writes, *made):
        gpu.check_index(tensor.device.index)
    copies_all = name == "index_add" and made  # unless it adds in place
    indexed = None if rows is None or copies_all else args[0]
    gpu.memory.kernel(name, reads, writes, made, rows, indexed=indexed)
    if name in _WAITS or (name == "repeat_interleave" and options.get("output_size") is None):
        count_wait(name)
        clocks.synchronize_stream(gpu.guard.current_stream())
    return result


def _refuse_mixed_devices(op: Any, name: str, tensors: Sequence[Tensor], args: Sequence[Any]) -> None:
    for tensor in tensors:
        is_index = name in _TAKES_CPU_INDEX and tensor is not args[0]
        if tensor.device.type == "cpu" and tensor.dim() and not is_index:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found vgpu and cpu! (in {op})")


def _reads_and_writes(op: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of the device that an operator reads and writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(op._schema.arguments):
        value = args[place] if place < len(args) else options.get(argument.name)
        _tensors(value, writes if argument.is_write else reads)
    return [t for t in reads if is_ours(t)], [t for t in writes if is_ours(t)]


def _report_atomics(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Report float additions whose order a GPU does not fix: several into one place."""
    if name not in _ATOMICS:
        return
    if name.endswith(("index_put_", "index_put_impl_")):
        if not (len(args) > 3 and args[3]) and not options.get("accumulate"):
            return
        index = args[1][0]
    else:
        index = args[2]
    is_float = args[0].is_floating_point()
    index = on_cpu(index) if is_ours(index) else index
    if is_float and len(index.flatten().unique()) < index.numel():
        gpu.memory.report("float atomics", f"{name} at {source_line()}")


def _cpu_arguments(op: Any, args: Sequence[Any], pairs: dict[int, tuple[Tensor, Tensor]]) -> list[Any]:
    values = [_cpu_value(value, pairs) for value in args]
    for place, argument in enumerate(op._schema.arguments[: len(values)]):
        value = values[place]
        if isinstance(value, bool | int | float | complex) and str(argument.type) in ("Tensor", "Optional[Tensor]"):
            values[place] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return values


def _cpu_options(options: Mapping[str, Any], pairs: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    values = {name: _cpu_value(value, pairs) for name, value in options.items()}
    return values | ({"pin_memory": False} if values.get("pin_memory") else {})


def _cpu_value(value: Any, pairs: dict[int, tuple[Tensor, Tensor]]) -> Any:
    if is_ours(value):
        if id(value) not in pairs:
            pairs[id(value)] = value, on_cpu(value)
        return pairs[id(value)][1]
    if isinstance(value, (list, tuple)):
        return [_cpu_value(entry, pairs) for entry in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _device_values(value: Any, known: Mapping[int, Tensor], made: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) in known:
            return known[id(value)]
        made.append(on_device(value))
        return made[-1]
    if isinstance(value, (list, tuple)):
        return type(value)(_device_values(entry, known, made) for entry in value)
    return value


def _tensors(value: Any, into: list[Tensor]) -> list[Tensor]:
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _tensors(entry, into)
    elif isinstance(value, dict):
        for entry in value.values():
            _tensors(entry, into)
    return into


def _resize_to(tensor: Tensor, cpu: Tensor) -> None:
    """Give a tensor the size, and perhaps the memory, that a CPU kernel gave to its CPU tensor."""
    if cpu.untyped_storage().nbytes() == tensor.untyped_storage().nbytes():
        layout = cpu.storage_offset(), cpu.size(), cpu.stride()
        set_ = torch.ops.aten.set_.source_Storage_storage_offset
        set_.redispatch(_CPU, tensor, tensor.untyped_storage(), *layout)
    else:
        torch.ops.aten.set_.source_Tensor.redispatch(_CPU, tensor, on_device(cpu))


def _copy(op: Any, first: Tensor, second: Tensor, non_blocking: bool = False, **_: Any) -> Tensor:
    """Copy between the host and the device, or on the device."""
    into, source = (first, second) if op._schema.name == "aten::copy_" else (second, first)
    _move(into, source)
    launches[thread_name(), source_line(), "copy"] += 1
    host = next((tensor for tensor in (into, source) if not is_ours(tensor)), None)
    for tensor in (into, source):
        if is_ours(tensor):
            gpu.check_index(tensor.device.index)
    is_async = host is not None and non_blocking and host.is_pinned()
    tracked = [t for t in (into, source) if is_ours(t) or is_async]
    gpu.memory.kernel("copy", [t for t in tracked if t is source], [t for t in tracked if t is into], [])
    if host is not None and not is_async:
        count_wait("copy to host" if into is host else "copy from host")
        if into is host or not non_blocking:  # else the host waits until its memory is staged, not for the stream
            clocks.synchronize_stream(gpu.guard.current_stream())
    return into


def _move(into: Tensor, source: Tensor) -> None:
    """Copy now, or in the order of the current stream if it runs on a thread of its own."""
    stream, ours = gpu.guard.current_stream(), [tensor for tensor in (into, source) if is_ours(tensor)]
    if stream not in queues:
        _copy_bytes(*(on_cpu(tensor) if is_ours(tensor) else tensor for tensor in (into, source)))
        return
    earlier = [work for tensor in ours for work in _take_transfers(tensor)]
    operands = [_over_same_memory(tensor) if is_ours(tensor) else tensor for tensor in (into, source)]

    def copy() -> None:
        for work in earlier:
            work.wait()
        _copy_bytes(*operands)

    pending = queues[stream].submit(copy)
    progress.add(stream, pending)
    for tensor in ours:
        add_transfer(tensor, pending)


def _resize(_: Any, tensor: Tensor, size: Sequence[int], **__: Any) -> Tensor:
    cpu = torch.empty(size, dtype=tensor.dtype)
    if cpu.nbytes <= tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize:
        return tensor.as_strided_(cpu.size(), cpu.stride(), tensor.storage_offset())
    cpu.flatten()[: tensor.numel()].copy_(on_cpu(tensor).flatten())
    torch.ops.aten.set_.source_Tensor.redispatch(_CPU, tensor, on_device(cpu))
    return tensor


def _record_stream(_: Any, tensor: Tensor, stream: torch.Stream) -> None:
    gpu.memory.record_stream(tensor, stream.stream_id)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "_copy_from": _copy,
    "_copy_from_and_resize": _copy,
    "resize_": _resize,
    "record_stream": _record_stream,
    "is_pinned": lambda *_, **__: False,
}

_library = torch.library.Library("_", "IMPL")
