"""A helper for training loops of Hugging Face Accelerate's own: keep the rotations out of its FSDP2.

rotexp's own runs do not need it, since they shard by `fully_shard` themselves. On CPU Accelerate (1.15) takes DDP in
place of FSDP2, whatever the plugin says; the lines of docs/sharding.md are tested on gloo with its preparation for
FSDP2 forced.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn


def ignore_module(plugin: Any, model: nn.Module, *, name: str) -> None:
    """Add one module of a model to what an Accelerate FSDP plugin leaves alone.

    Accelerate then neither shards nor broadcasts it and does not reduce its gradients: draw and consolidate by a
    `Coordinator`. A device map that an earlier placement left on the model is removed, since Accelerate refuses it.

    Args:
        plugin: an `accelerate.FullyShardedDataParallelPlugin`; its `ignored_modules` may be None, a list or a regex.
        name: the module's name in the model, such as `rotation_bank`.

    Raises:
        AttributeError: the model has no module of that name.
    """
    module = model.get_submodule(name)
    ignored = plugin.ignored_modules
    if isinstance(ignored, str):
        plugin.ignored_modules = f"(?:{ignored})|{re.escape(name)}"
    else:
        others = [other for other in ignored or () if other is not module]
        plugin.ignored_modules = [*others, module]
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map
