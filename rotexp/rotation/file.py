"""`rotations.safetensors`: every rotation once, with what one must know to use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def save_rotations(
    path: Path,
    rotations: Mapping[str, Tensor],
    *,
    placements: Mapping[str, str],
    online: Mapping[str, int],
    facts: Mapping[str, Any],
) -> None:
    """Write rotations (n, n), whole or not at all.

    Args:
        placements: where each rotation acts.
        online: order of each Hadamard transform that stays online; it is constructed, not stored.
        facts: further metadata: seed, config digest, model.
    """
    described = {
        name: {"placement": placements[name], "shape": list(matrix.shape), "dtype": str(matrix.dtype).split(".")[-1]}
        for name, matrix in rotations.items()
    }
    texts = {key: str(value) for key, value in facts.items()}
    metadata = {"format": "rotexp", "rotations": json.dumps(described), "online": json.dumps(dict(online)), **texts}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: matrix.cpu().contiguous() for name, matrix in rotations.items()}, aside, metadata=metadata)
        aside.chmod(0o666 & ~_umask())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
