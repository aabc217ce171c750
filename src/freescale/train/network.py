"""The dense part of a run: the model and its replicated tables, with gradients added up over the ranks by DDP."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freescale.bubbles.recorder import Recorder, record_comm_hook
from freescale.embedding.ids import UniqueIds, deduplicate
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import ReplicatedTables
from freescale.models.protocol import Model, Rows
from freescale.overlap.schedule import bucket_bytes
from freescale.transport.c10d import C10d
from freescale.transport.world import World


class Network(nn.Module):
    """From a batch and the rows it needs to the sum of its losses."""

    def __init__(self, model: Model, replicated: ReplicatedTables | None) -> None:
        super().__init__()
        # In the order of use: gradients are sent in the reverse of it, and those of tables are there last.
        self.replicated, self.model = replicated, model

    def wanted(self, ids: Sequence[Mapping[str, Tensor]]) -> list[dict[str, UniqueIds]]:
        """Find the distinct ids over all parts of a batch; every part gets them, with its own places among them."""
        found: list[dict[str, UniqueIds]] = [{} for _ in ids]
        for name, (rows, _) in self.model.tables.items():
            asked = [part[name] for part in ids]
            unique, index = deduplicate(torch.cat([part.flatten() for part in asked]), rows=rows)
            places = index.split([part.numel() for part in asked])
            for part, place, shaped in zip(found, places, asked, strict=True):
                part[name] = UniqueIds(unique, place.view(shaped.shape))
        return found

    def rows(self, wanted: Mapping[str, UniqueIds], moved: Mapping[str, Tensor] | None) -> dict[str, Rows]:
        """Rows of all tables: those that travelled here or, of replicated tables, the own copies."""
        if moved is None:
            assert self.replicated is not None
            moved = self.replicated({name: ids.unique for name, ids in wanted.items()})
        return {name: Rows(moved[name], ids.inverse) for name, ids in wanted.items()}

    def read(self, ids: Mapping[str, Tensor], tables: ShardedTables | None) -> dict[str, Rows]:
        """Rows of ids, when nothing will be updated. Where tables are sharded, every rank must take part."""
        (wanted,) = self.wanted([ids])
        return self.rows(wanted, None if tables is None else tables.read(wanted))

    def named(self) -> dict[str, Tensor]:
        """All weights of the dense part under the model's own names; replicated tables as `tables.NAME`."""
        own = {name.removeprefix("model."): value for name, value in self.state_dict().items()}
        return {name.replace("replicated.weights.", "tables."): value for name, value in own.items()}

    def forward(self, inputs: Any, wanted: Mapping[str, UniqueIds], moved: Mapping[str, Tensor] | None) -> Tensor:
        """Sum of the losses of inputs."""
        return self.model(inputs, self.rows(wanted, moved))


def data_parallel(network: Network, world: World, recorder: Recorder | None = None) -> DistributedDataParallel:
    """Wrap for training on several ranks: gradients are summed, since each rank divides by the global count already.

    Looking for unused parameters keeps DDP from regrouping its buckets after the first step; a regrouped sum has
    another order of additions, and a resumed run would not be bitwise the uninterrupted one.
    """
    dense = sum(weight.nbytes for weight in network.parameters())
    parallel = DistributedDataParallel(
        network,
        process_group=world.group,
        find_unused_parameters=True,
        bucket_cap_mb=bucket_bytes(dense) / (1 << 20),  # type: ignore[arg-type]  # any number will do
    )
    parallel.register_comm_hook(world.transport, _add_up if recorder is None else record_comm_hook(_add_up, recorder))
    return parallel


def backward(loss: Tensor, computed: Callable[[], AbstractContextManager[None]]) -> None:
    """The last backward pass of a batch. `computed` is called when all gradients of this rank are there.

    That is before DDP waits until those of the dense part are added up: whatever `computed` begins goes on beside that
    wait, and what it gives surrounds it.
    """
    # Callbacks are called when the graph is done, in the order in which they were queued: DDP's own end comes later.
    queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
    with ExitStack() as waiting:
        hook = loss.register_hook(lambda _: queue(lambda: waiting.enter_context(computed())))
        loss.backward()
        hook.remove()  # or a loss whose batch is known to `computed` would hold itself


def _add_up(transport: C10d, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return transport.all_reduce_gradients(bucket)
