"""The bits of what a run found, as one digest; loads no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError, safe_open


def rotations_digest(file: Path) -> str:
    """Return the SHA-256 of the names, shapes and bits of a run's rotations, by name.

    Raises:
        ValueError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with safe_open(file, framework="numpy") as held:
            for name in sorted(held.keys()):
                matrix = held.get_tensor(name)
                digest.update(f"{name} {matrix.dtype} {list(matrix.shape)}\n".encode())
                digest.update(matrix.tobytes())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cannot be read as safetensors ({error}); run the training again") from None
    return digest.hexdigest()
