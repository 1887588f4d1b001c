"""Every model type that trains keeps packed documents apart, in FP32, BF16 and FP8."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from packing.batch import StepBatches, build_microbatch
from pretrain.model.gradients import attach_main_gradients, gradient_of
from pretrain.model.huggingface import build, decoder_layers
from pretrain.model.hybrids.families import FAMILIES
from pretrain.model.packed import PackedLanguageModel, forward_backward, inputs_of
from pretrain.model.wrapping import convert, wrap_layers
from pretrain.optimizer.adamw import build_optimizer, clear_gradients, set_learning_rate
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import decide, quantized_names
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import PRECISIONS
from pretrain.settings.recipe import LossSettings, ModelSettings, OptimizerSettings
from tests.pretrain.conftest import active_in
from tests.pretrain.optimizer.test_model_types import TRAINED, small_config
from tests.pretrain.small_models import plain_loss, random_packs

# The attention of Nemotron does not pass boundaries on, so its first forward refuses packs.
TYPES = [model_type for model_type in TRAINED if model_type != "nemotron"]
# The tests of other models than hybrids are nightly, because test_model.py finds most faults.
HYBRIDS_AND_OTHERS = [
    pytest.param(model_type, marks=[] if model_type in FAMILIES else pytest.mark.nightly)
    for model_type in TYPES
]
CPU = torch.device("cpu")
LENGTH = 96
# A document is longer than a chunk of the gated delta rule, 64 tokens.
DOCUMENTS = [[5, 9, 1, 17, 20], [80, 9]]


def packed_model(
    model_type: str, precision: str, device: torch.device = CPU
) -> PackedLanguageModel:
    """Return a small model as the launcher assembles it. In "fp32" nothing is cast."""
    config = small_config(model_type)
    settings = ModelSettings(config={"model_type": model_type})
    options: dict[str, Any] = {"seed": 1, "device": device, "backend": "packed_documents"}
    hf = build(settings, config, weights=torch.float32, **options)
    with torch.no_grad():
        # The states of some models would vanish with the weights of a new model.
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    engine = "emulation" if PRECISIONS[precision].quantized else "torch"
    active = active_in(precision, engine, keep_bf16_layers={"last": 0})
    context = PrecisionContext(
        getattr(torch, active.precision.compute_dtype), make_engines([active], device), active
    )
    decisions = {}
    if active.precision.quantized:
        decisions = decide(hf, list(decoder_layers(hf).values()), active)
        assert quantized_names(decisions)
    packed = PackedLanguageModel(hf, "packed_documents", LossSettings(chunk=16), context)
    convert(hf, decisions, context)
    cast_to = context.compute_dtype if precision != "fp32" else None
    wrap_layers(packed, settings, cast_to=cast_to, compile_layers=False)
    attach_main_gradients(packed, torch.float32, ())
    return packed


def plain_copy(hf: PreTrainedModel, model_type: str) -> PreTrainedModel:
    """Return transformers' model with the weights of `hf`, in evaluation mode."""
    plain = AutoModelForCausalLM.from_config(
        small_config(model_type), attn_implementation="eager", experts_implementation="eager"
    )
    plain.load_state_dict(hf.state_dict())
    plain.config.use_cache = False
    return plain.eval()


def small_step() -> StepBatches:
    batch = build_microbatch(random_packs(DOCUMENTS, LENGTH), mask_boundaries=True)
    return StepBatches([batch], 2 * LENGTH, batch.valid_tokens, 0)


def assert_apart(packed: PackedLanguageModel) -> None:
    """Assert that a change in a document changes no hidden state of another document."""
    batch = inputs_of(small_step().microbatches[0], packed.hf.device)

    def hidden_states(ids: Tensor) -> Tensor:
        states: list[Tensor] = []
        head = packed.hf.get_output_embeddings()
        with (
            torch.no_grad(),
            head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0])),
        ):
            packed(**batch | {"input_ids": ids})
        return states[0]

    ids = batch["input_ids"]
    changed_ids = ids.clone()
    changed_ids[0, 5:14] = (ids[0, 5:14] + 1) % 61
    changed = (hidden_states(ids) != hidden_states(changed_ids)).any(1)
    assert changed[5:14].all()
    assert not changed[:5].any()
    assert not changed[14:].any()


def test_the_page_of_models_lists_all_types() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(\S+)`", page.partition("## All types")[2])
    assert listed == sorted(TYPES)


@pytest.mark.parametrize("model_type", HYBRIDS_AND_OTHERS)
def test_loss_and_gradients_are_those_of_separate_documents(
    model_type: str, accelerator: Accelerator
) -> None:
    packed = packed_model(model_type, "fp32").eval()
    step = small_step()
    loss = forward_backward(packed, step, accelerator)
    plain = plain_copy(packed.hf, model_type)
    expected = plain_loss(plain, random_packs(DOCUMENTS, LENGTH))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    total = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    for (name, parameter), reference in zip(
        packed.hf.named_parameters(), plain.parameters(), strict=True
    ):
        if parameter.requires_grad and reference.grad is not None:
            difference = (gradient_of(parameter) - reference.grad).norm()
            assert difference <= 1e-4 * reference.grad.norm() + 1e-6 * total, name


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
@pytest.mark.parametrize("model_type", HYBRIDS_AND_OTHERS)
def test_three_steps_keep_documents_apart(
    model_type: str, precision: str, accelerator: Accelerator
) -> None:
    packed = packed_model(model_type, precision).train()
    settings = OptimizerSettings(learning_rate=1e-3)
    optimizer = build_optimizer(packed, settings, exact=False)
    optimizer.materialise()
    set_learning_rate(optimizer, 1e-3)
    losses = []
    for _ in range(3):
        losses.append(forward_backward(packed, small_step(), accelerator).item())
        optimizer.step()
        clear_gradients(optimizer, packed)
    assert losses[0] > losses[1] > losses[2]
    assert_apart(packed.eval())
