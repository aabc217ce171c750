"""Sees the gradients that DistributedDataParallel adds up by itself."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bubbles.recorder import CollectiveRecord, Recorder


def watched(hook: Callable[[Any, dist.GradBucket], Any], recorder: Recorder) -> Callable[..., Any]:
    """A communication hook that does what another one does, and has its traffic recorded.

    When the last bucket is on its way and nothing is left to compute, the backward pass can do nothing but wait.
    """
    waiting: list[CollectiveRecord] = []

    def watching(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flight = recorder.arrive(f"bucket {bucket.index()}", "dense gradients", size=bucket.buffer().nbytes)
        waiting.append(flight)

        def on_complete(done: torch.futures.Future[Tensor]) -> Tensor:
            flight.on_complete()
            return done.value()

        future = hook(state, bucket).then(on_complete)
        if bucket.is_last():
            # Called when the graph is done, just before DDP's own end of the pass, which was queued after it.
            torch.autograd.Variable._execution_engine.queue_callback(on_wait)  # type: ignore[attr-defined]
        return future

    def on_wait() -> None:
        for one in waiting:
            one.on_wait()
        waiting.clear()

    return watching
