"""The index of a checkpoint, which torch unpickles: read only if nothing in it can run code."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

NAMED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),  # Python 3.13's name of it
}
"""What an index names by module, beside dtypes: plain values alone."""


class CheckedReader(FileSystemReader):
    """Torch's reader, for checkpoints that may be somebody else's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            pickle.UnpicklingError: it names what no index needs.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as index:
            _Unpickler(index).load()
        return super().read_metadata(*args, **kwargs)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what an index may name."""
        if name in NAMED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no index of a checkpoint needs")
