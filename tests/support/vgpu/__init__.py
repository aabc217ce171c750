"""A virtual GPU for tests: PrivateUse1 on the CPU, with the rules of CUDA streams, NCCL and the caching allocator.

`install` registers it in this process for good, so tests install it in processes of their own.
"""

import torch


def install(folder: str, *, index: int = 0, count: int = 1) -> torch.device:
    """Register the device and all that belongs to it. `folder`: shared by the ranks. `index`: the device of this rank.

    `count`: devices of the host.
    """
    from tests.support.vgpu import device, group, standins, symmetric

    place = device.install(index=index, count=count)
    group.install()
    standins.install()
    symmetric.install(folder)
    return place
