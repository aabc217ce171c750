"""The tensors of a run under stable names, as torch.distributed.checkpoint wants them.

Rows of sharded tables are DTensors, so any other number of ranks can read them. The tensors are the live ones: saving
copies from them, loading writes into them.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.embedding.sharded import ShardedTables


def of_model(
    network: nn.Module, tables: ShardedTables | None, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor]:
    """The dense part, of which every rank holds everything, and the own rows of sharded tables with their optimizer."""
    dense = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    return dense if tables is None else dense | _of_tables(tables, group, device)


def of_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the dense optimizer remembers of each parameter, by the parameter's name."""
    _begin(optimizer)
    found: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{kind}"] = value
    return found


def _of_tables(tables: ShardedTables, group: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, device.type)
    rows = {table.name: table.rows for table in tables.tables}
    found: dict[str, Tensor] = {}
    for name, local in tables.shard.state().items():
        whole = torch.Size([rows[name.split(".")[0]], *local.shape[1:]])
        found[f"tables.{name}"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole, stride=torch.empty(whole, device="meta").stride()
        )
    return found


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
