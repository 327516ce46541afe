"""Every published size of a supported structure is tried on a miniature, with every rotation."""

from __future__ import annotations

import pytest
import torch
from published import PUBLISHED, published_config

from rotexp.models.arch import FAMILIES, find_spec
from rotexp.models.structure import build_network
from rotexp.rotation.placement import _place_untried
from rotexp.rotation.trial import Trial


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_tried_beforehand(name: str) -> None:
    model = build_network(published_config(name), dtype=torch.bfloat16)
    trial = Trial(model, find_spec(model), _place_untried)
    for key in ("r2", "r4"):
        found = trial.find(key)
        assert found.untried is None
        assert found.obstacle is None


def test_published_sizes_are_of_every_structure() -> None:
    kinds = {published_config(name).model_type for name in PUBLISHED}
    assert all(kinds & {*spec.model_types} for spec in FAMILIES)
