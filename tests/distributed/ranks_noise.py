"""What the ranks of a test do: read a sharded model with rounding noise."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any


def load(overrides: list[str], folder: str) -> tuple[str, Any]:
    """Return the digest of the weights that this run reads, and its whole embedding."""
    from ranks_experiment import compose

    from rotexp.experiment.context import open_context
    from rotexp.experiment.inputs import open_inputs
    from rotexp.experiment.loading import load_model, shard_model
    from rotexp.launch.rank import open_accelerator
    from rotexp.models.arch import embedding_name
    from rotexp.sharding.local_rows import whole

    config = compose(["model=random_llama", "data.global_batch_size=12", *overrides])
    context = open_context(config, open_inputs(config), Path(folder), accelerator=open_accelerator(config))
    with ExitStack() as at_end:
        model = load_model(context)
        digest = shard_model(context, model, at_end).weights
        embedding = whole(model.network.get_parameter(f"{embedding_name(model.network)}.weight"))
        return digest, embedding.detach().numpy()
