"""The router loss of mixtures of experts compared with that of transformers, and statistics."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from packing.batch import StepBatches, build_microbatch
from pretrain.metrics.health import Health
from pretrain.model.huggingface import build_on_meta, is_mixture
from pretrain.model.packed import forward_backward, inputs_of
from pretrain.model.wrapping import wrap_layers
from pretrain.settings.recipe import HealthSettings, ModelSettings
from tests.pretrain.optimizer.test_model_types import small_config
from tests.pretrain.small_models import build_model, plain_copy, random_packs

MIXTURE = {"num_experts_per_tok": 2, "hidden_size": 16, "intermediate_size": 24}
MIXTURE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
MIXTURE |= {"router_aux_loss_coef": 0.5, "output_router_logits": True}
KINDS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "olmoe": {"num_experts": 4, "initializer_range": 0.2},
    "mixtral": {"num_local_experts": 4, "initializer_range": 0.2, "router_jitter_noise": 0.0},
}


@pytest.mark.parametrize(
    ("kind", "execution"),
    [
        *((kind, execution) for kind in KINDS for execution in ("eager", "recomputed")),
        ("qwen3_moe", "compiled"),
        pytest.param("olmoe", "compiled", marks=pytest.mark.nightly),
        pytest.param("mixtral", "compiled", marks=pytest.mark.nightly),
    ],
)
def test_the_loss_and_its_gradients_are_those_of_transformers(
    kind: str, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recompute = "full" if execution == "recomputed" else "none"
    packed = build_model(kind, recompute=recompute, **MIXTURE | KINDS[kind]).train()
    if execution == "compiled":
        # Trace as on a GPU, but generate no C++, which would take a minute.
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        wrap_layers(packed, ModelSettings(source="none"), cast_to=None, compile_layers=True)
    plain = plain_copy(packed)
    microbatch = build_microbatch(random_packs([[32]], 32), mask_boundaries=True)
    batch = inputs_of(microbatch, torch.device("cpu"))
    ids = batch["input_ids"].clone()
    batch["labels"] = ids  # each token is its own label
    expected = plain(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss
    loss = packed(**batch) / 32
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(packed.hf.get_parameter(name).grad, parameter.grad, msg=name)
    # Logits would keep activations that backward has freed.
    assert not any("router_logits" in vars(module) for module in packed.modules())


@pytest.mark.parametrize("kind", ["qwen3_moe", "afmoe"])
def test_logits_and_router_weights_are_not_rounded_to_bf16(kind: str) -> None:
    """Logits agree with FP64, and gradients with those of a BF16 linear.

    The router's weight is a parameter in qwen3_moe and that of a linear in afmoe.
    """
    sizes = MIXTURE | KINDS["qwen3_moe"] | ({"num_dense_layers": 0} if kind == "afmoe" else {})
    sizes = {key: size for key, size in sizes.items() if "router" not in key}
    packed = build_model(kind, weights=torch.bfloat16, **sizes)
    router = next(iter(packed.routing.routers))
    (weight,) = router.parameters()
    x = torch.randn(1, 64, 16, dtype=torch.bfloat16, requires_grad=True)
    logits, weights, chosen = router(x, torch.zeros(4)) if kind == "afmoe" else router(x)
    exact = x[0].double() @ weight.double().T
    dy = torch.randn(64, 4)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, exact.topk(2).indices)
    assert weights.dtype == torch.float32
    gradients = torch.autograd.grad(logits, (x, weight), dy)
    expected = torch.autograd.grad(F.linear(x[0], weight), (x, weight), dy.bfloat16())
    torch.testing.assert_close(gradients, expected)


def test_a_step_reports_cross_entropy_and_router_loss_separately(accelerator: Accelerator) -> None:
    """The step has two microbatches with different numbers of labels."""
    packed = build_model("qwen3_moe", **MIXTURE | KINDS["qwen3_moe"]).train()
    packs = random_packs([[32], [9]], 32)
    step = StepBatches(
        [build_microbatch([pack], mask_boundaries=True) for pack in packs], 64, 31 + 8, 0
    )
    trained = forward_backward(packed, step, accelerator)
    losses = packed.mean_losses(accelerator, step.valid_tokens, trained)
    packed.eval()
    inputs = [inputs_of(batch, accelerator.device) for batch in step.microbatches]
    cross_entropy = sum(packed(**kwargs) for kwargs in inputs) / step.valid_tokens
    torch.testing.assert_close(losses["loss"], cross_entropy)
    assert losses["router_loss"] > 1, "1 is the loss of a perfectly even choice"
    assert 0.5 < losses["router_entropy"] < 1


def test_starved_experts_are_counted_and_reported(accelerator: Accelerator) -> None:
    """A router with zero weights sends all tokens to the same two of four experts."""
    packed = build_model("qwen3_moe", **MIXTURE | KINDS["qwen3_moe"], recompute=2).train()
    with torch.no_grad():
        packed.hf.model.layers[0].mlp.gate.weight.zero_()
    step = StepBatches(
        [build_microbatch(random_packs([[32]], 32), mask_boundaries=True)], 32, 31, 0
    )
    for _ in range(2):  # the figures of a step do not include the step before
        losses = packed.mean_losses(accelerator, 31, forward_backward(packed, step, accelerator))
    assert losses["expert_load"] == 2
    assert losses["starved_experts"] == 0.25
    health = Health(HealthSettings())
    (warning,) = health.warnings_of(1, 0.0, 31, losses)
    assert "router_aux_loss_coef" in warning
    assert not list(health.warnings_of(2, 0.0, 31, losses))


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("nemotron_h", {}, False),
        ("nemotron_h", {"layer_types": ["linear_attention", "moe"]}, True),
        ("granitemoehybrid", {"num_local_experts": 0}, False),
        ("granitemoehybrid", {}, True),
        ("qwen3_moe", {}, True),
    ],
)
def test_a_model_without_experts_is_no_mixture(
    kind: str, changes: dict[str, Any], expected: bool
) -> None:
    config = small_config(kind)
    config.update(changes)
    assert is_mixture(build_on_meta(config)) == expected
