"""The tensors of a run under stable names, with the rows that this rank holds of each.

The tensors are the live ones: saving copies from them, loading writes into them.
"""

import torch
from torch import nn

from freescale.checkpoint.files import Part
from freescale.embedding.sharded import ShardedTables


def of_model(network: nn.Module, tables: ShardedTables | None, *, rank: int, world_size: int) -> dict[str, Part]:
    """The dense part, of which every rank holds everything, and the own rows of sharded tables with their optimizer."""
    dense = {f"model.{n}": Part.whole(tensor, everywhere=True) for n, tensor in network.state_dict().items()}
    return dense if tables is None else dense | _of_tables(tables, rank, world_size)


def of_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    """What the dense optimizer remembers of each parameter, by the parameter's name."""
    _begin(optimizer)
    return {
        f"optimizer.{name}.{kind}": Part.whole(value, everywhere=True)
        for name, parameter in network.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def of_generator(rank: int) -> dict[str, Part]:
    """A copy of what torch's own generator of this rank stands at."""
    return {f"generator.{rank}": Part.whole(torch.get_rng_state(), everywhere=False)}


def _of_tables(tables: ShardedTables, rank: int, world_size: int) -> dict[str, Part]:
    place = {table.name: (table.owned(rank, world_size).start, table.rows) for table in tables.tables}
    return {f"tables.{n}": Part(local, *place[n.split(".")[0]]) for n, local in tables.shard.state().items()}


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer make its memory by a step that changes nothing, so that there is something to load into."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
