"""The registry's word on which GPU has which recipe, against Transformer Engine's own on the GPU at hand."""

from __future__ import annotations

import pytest
import torch

from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.settings.recipe import Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_recipe_runs_where_transformer_engine_says_that_it_does(name: str) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    available = getattr(te, AVAILABLE[name])()
    assert (PRECISIONS[name].hardware.missing(torch.cuda.get_device_capability()) is None) == available
    values = {"name": "small", "model": {"source": "m"}, "data": {"packs": "p"}, "train": {"steps": 1}, "precision": name}
    recipe = Recipe.model_validate(values | {"fp8_config": LowPrecisionSettings(on_unsupported="emulate")})
    active = select_precision(recipe.precision, recipe.fp8_config, missing_on("cuda"))
    assert active.backend == ("transformer_engine" if available else "emulation")
    assert (active.reason is None) == available
    assert available or torch.cuda.get_device_name() in active.reason
