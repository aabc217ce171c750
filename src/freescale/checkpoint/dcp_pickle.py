"""Reads the pickles of torch.distributed.checkpoint (DCP) without executing what they name.

A pickle may name any function of Python and call it. Here a name becomes a `PickledObject`, which keeps arguments and
state and does nothing with them, and only names of `_NAMES` are accepted: the classes of DCP's metadata, and what
`torch.save` writes of a tensor. The interpretation of the kept values is `dcp_folder`'s.
"""

import io
import pickle
from typing import Any

import torch

from freescale.errors import DataError, reason

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_NAMES = {
    *(f"{_METADATA}.{name}" for name in _RECORDS),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_tensor_v2",
    "collections.OrderedDict",
    *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Names of torch's storages, by which `torch.save` states the type of a tensor."""


class PickledObject:
    """What a pickle says of an object: the arguments of its class, and its state."""

    kind = ""

    def __new__(cls, *arguments: Any) -> "PickledObject":
        """Keep the arguments. Pickles create objects with and without a call of `__init__`."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Resolves names to inert classes, made for this pickle alone: it can change no class that others use."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if full == "torch.Size":
            return tuple
        if full not in _NAMES and not (module == "torch" and name in STORAGES):
            raise pickle.UnpicklingError(f"it names {full}, which no checkpoint needs")
        return type(name, (PickledObject,), {"kind": name})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def load_inert(raw: bytes, *, where: str) -> Any:
    """Return the content of a pickle. DataError if it names anything but the classes of DCP's metadata and tensors."""
    try:
        return _InertUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # a damaged pickle can raise anything
        what = f"this is not the metadata or a tensor of torch.distributed.checkpoint: {reason(error)}"
        remedy = "nothing of it was executed; save the checkpoint again with torch.distributed.checkpoint"
        raise DataError(what, where=where, remedy=remedy) from error
