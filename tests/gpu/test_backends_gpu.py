"""One small model under both backends: Transformer Engine and the emulation train the same thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.model import huggingface as model
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import convert
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import decide
from pretrain.precision.selection import make_backend
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings, ModelSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH, VOCABULARY, STEPS = 512, 1024, 3
CONFIG = {"model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SETTINGS = ModelSettings(config=CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64})

Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]  # losses, the last step's gradients, the backend's state


@pytest.fixture(scope="module")
def microbatches() -> list[dict]:
    rng = np.random.default_rng(0)
    packs = [
        Pack(rng.integers(VOCABULARY, size=LENGTH).astype(np.uint32), np.array([200, 312], dtype=np.int32)) for _ in range(4)
    ]
    return [inputs_of(build_microbatch(packs[i : i + 2], mask_boundaries=True), DEVICE) for i in (0, 2)]


def train(recipe: str, backend: str, microbatches: list[dict]) -> Trained:
    """Some steps of plain SGD, two microbatches each, weights quantized in the first."""
    active = ActivePrecision(recipe, PRECISIONS[recipe], backend, LowPrecisionSettings(scope="linear+head").resolved(recipe))
    attention = "packed_varlen" if DEVICE.type == "cuda" else "packed_sdpa"
    config = model.load_config(SETTINGS)
    hf = model.build(SETTINGS, config, weights=torch.bfloat16, seed=1, device=DEVICE, backend=attention)
    packed = PackedLanguageModel(hf, attention, LossSettings(chunk=256)).train()
    context = packed.context = PrecisionContext(make_backend(active, DEVICE), torch.bfloat16)
    convert(hf, decide(hf, list(decoder_layers(hf).values()), active), context)
    losses = []
    for _ in range(STEPS):
        hf.zero_grad()
        for index, inputs in enumerate(microbatches):
            context.first_microbatch = index == 0
            loss = packed(**inputs) / 2000
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter -= 0.02 * parameter.grad
    return losses, {name: parameter.grad.float() for name, parameter in hf.named_parameters()}, context.backend.state()


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_small_model_trains_the_same_on_transformer_engine_and_emulated(recipe: str, microbatches: list[dict]) -> None:
    """What the order of additions changes in one product, the next one quantizes into another code here and there: cosines are
    below one, and losses the same."""
    pytest.importorskip("transformer_engine.pytorch")
    theirs, ours = (train(recipe, backend, microbatches) for backend in ("transformer_engine", "emulation"))
    cosines = {name: F.cosine_similarity(theirs[1][name].flatten(), ours[1][name].flatten(), dim=0).item() for name in ours[1]}
    worst = sorted(cosines.items(), key=lambda item: item[1])[:3]
    print(recipe, [f"{a - b:+.1e}" for a, b in zip(theirs[0], ours[0], strict=True)], worst)
    assert theirs[0] == pytest.approx(ours[0], rel=1e-3)
    assert worst[0][1] > 0.98, worst
    assert theirs[2].keys() == ours[2].keys()
    for name, tensor in ours[2].items():
        # The largest value of a gradient that FP8 has touched several times, of a tensor of a few thousand values.
        assert torch.allclose(theirs[2][name], tensor, rtol=0.3), (name, theirs[2][name], tensor)
