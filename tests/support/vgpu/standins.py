"""What cannot run on a virtual GPU, and what stands in for it: kernels of FBGEMM and of Triton.

A stand-in computes with the CPU's kernel over the same memory and counts the launches that the kernel takes on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.vgpu import device, fused_on_cpu, slots_on_cpu


class StandIn(NamedTuple):
    """A replaced function."""

    replaces: str
    """Module and name."""
    launches: int
    """Kernels that the function launches on a GPU."""
    by: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Takes the function and returns its stand-in."""


def install() -> None:
    """Replace every function of the table."""
    import importlib

    for entry in TABLE:
        module_name, _, name = entry.replaces.rpartition(".")
        module = importlib.import_module(module_name)
        setattr(module, name, _counted(entry, getattr(module, name)))


def _counted(entry: StandIn, function: Callable[..., Any]) -> Callable[..., Any]:
    stand_in = entry.by(function)

    def run(*args: Any, **options: Any) -> Any:
        if entry.launches:
            name = entry.replaces.rpartition(".")[2]
            device.launches[device.thread_name(), device.source_line(), name] += entry.launches
        return stand_in(*args, **options)

    return run


def _fused_rows_on_cpu(fused_shard: Callable[..., Any]) -> Callable[..., Any]:
    """Let FBGEMM allocate on the CPU."""

    def build(tables: Any, config: Any, group: Any, _: torch.device) -> Any:
        return fused_shard(tables, config, _gloo_group(group), torch.device("cpu"))

    return build


def _rows_of_the_device(collection: Callable[..., Any]) -> Callable[..., Any]:
    """Show the rows of a collection on the CPU as memory of the device."""

    def build(*args: Any) -> Any:
        built = collection(*args)
        on_cpu, wholes = built.state(), {}
        state = {}
        for name, rows in on_cpu.items():  # tables that are neighbours in memory are so on the device
            whole = wholes.setdefault(rows.untyped_storage().data_ptr(), device.on_device(rows))
            state[name] = whole.as_strided(rows.shape, rows.stride(), rows.storage_offset())
        built.weights = {name: state[name] for name in built.weights}
        built.state = lambda: state
        return built

    return build


def _torchrec_on_cpu(train: Callable[..., Any]) -> Callable[..., Any]:
    """Train with TorchRec's own loops on the CPU, over gloo: its kernels know no other device here."""

    def run(config: Any, world: Any, folder: Any, model: Any, *, pipelined: bool) -> Any:
        from freescale.transport.world import from_group

        cpu = torch.device("cpu")
        on_cpu = from_group(_gloo_group(world.group), cpu, timeout=world.transport.timeout)
        return train(config, on_cpu, folder, model.to(cpu), pipelined=pipelined)

    return run


def _gloo_group(group: Any) -> Any:
    return torch.distributed.new_group(torch.distributed.get_process_group_ranks(group), backend="gloo")


def _attention_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute HSTU attention with the CPU's blocks. Its kernels read all inputs and write all outputs."""
    from freescale.models.attention import blocks

    compute = getattr(blocks, function.__name__)

    def run(x: Any, *d_out: Tensor) -> Any:
        inputs = type(x)(*(device.on_cpu(v) if device.is_ours(v) else v for v in x))
        outputs = compute(inputs, *map(device.on_cpu, d_out))
        single = isinstance(outputs, Tensor)
        made = [device.on_device(value) for value in ([outputs] if single else outputs)]
        reads: Sequence[Tensor] = [value for value in (*x, *d_out) if device.is_ours(value)]
        device.gpu.memory.kernel(f"hstu_{function.__name__}", list(reads), [], made, None)
        return made[0] if single else type(outputs)(*made)

    return run


def _fused_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute what a fused kernel does with torch operators on the CPU. It reads all inputs and writes all outputs."""
    compute = getattr(fused_on_cpu, function.__name__)

    def run(*args: Any, **options: Any) -> Any:
        reads: list[Tensor] = []
        outputs = compute(*(_cpu_values(value, reads) for value in args), **options)
        single = isinstance(outputs, Tensor)
        made = [device.on_device(value) for value in ([outputs] if single else outputs)]
        device.gpu.memory.kernel(function.__name__, reads, [], made, None)
        return made[0] if single else type(outputs)(*made)

    return run


def _row_update_on_cpu(_: Callable[..., Any]) -> Callable[..., Any]:
    """Update rows with torch operators on the CPU. The kernel uses the given rows of weights and sums only."""

    def run(weights: Tensor, sums: Tensor | None, ordered: Any, gradients: Tensor, **options: Any) -> None:
        reads: list[Tensor] = []
        on_cpu = [_cpu_values(value, reads) for value in (weights, sums, ordered, gradients)]
        fused_on_cpu.update_sorted_rows(*on_cpu, **options)
        rows, others = frozenset(on_cpu[2].rows.tolist()), [*ordered, gradients]
        for table in (weights, sums):
            if table is not None:
                device.gpu.memory.kernel("update_rows", [*others, table], [table], [], rows, indexed=table)

    return run


def _slots_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute what a kernel of dynamic ids does on the CPU."""
    return getattr(slots_on_cpu, function.__name__)


def _cpu_values(value: Any, reads: list[Tensor]) -> Any:
    """Return an argument with tensors of the CPU, and collect those of the device."""
    if isinstance(value, tuple):
        return type(value)(*(_cpu_values(each, reads) for each in value))
    if not device.is_ours(value):
        return value
    reads.append(value)
    return device.on_cpu(value)


def _launches_without_profiler(_: Callable[..., Any]) -> Callable[..., Any]:
    """Name the launches by the counters of the device."""

    def kernels(transfer: Callable[[], object]) -> list[str]:
        before = device.launches.copy()
        transfer()
        names = {name for _, _, name in device.launches - before}
        return sorted(names - {"copy", "barrier"})

    return kernels


TABLE = (
    StandIn("freescale.transport.copy_engine.kernels_launched_by", 0, _launches_without_profiler),
    StandIn("freescale.bench.torchrec_loops.train", 0, _torchrec_on_cpu),
    StandIn("freescale.embedding.fused.fused_shard", 0, _fused_rows_on_cpu),
    StandIn("freescale.embedding.fused.FusedCollection", 0, _rows_of_the_device),
    StandIn("freescale.models.fused_launch.splitmix64", 1, _fused_on_cpu),
    StandIn("freescale.models.fused_launch.dropout", 1, _fused_on_cpu),
    StandIn("freescale.models.fused_launch.compute_token_losses", 1, _fused_on_cpu),
    StandIn("freescale.models.fused_launch.compute_row_gradients", 1, _fused_on_cpu),
    StandIn("freescale.embedding.row_update.update_sorted_rows", 1, _row_update_on_cpu),
    StandIn("freescale.embedding.zero_collision_launch.find_slots", 1, _slots_on_cpu),
    StandIn("freescale.embedding.zero_collision_launch.insert_sorted", 3, _slots_on_cpu),
    StandIn("freescale.embedding.zero_collision_launch.initialize_rows", 1, _slots_on_cpu),
    StandIn("freescale.models.attention.triton_launch.forward", 2, _attention_on_cpu),
    StandIn("freescale.models.attention.triton_launch.backward", 5, _attention_on_cpu),
)
