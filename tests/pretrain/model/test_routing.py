"""The loss that balances a mixture's experts, against transformers' own forward with labels; and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from foundation.errors import InputError
from packing.batch import StepBatches, build_microbatch
from pretrain.metrics.health import Health
from pretrain.model.huggingface import load_config
from pretrain.model.packed import forward_backward, inputs_of
from pretrain.model.wrapping import convert, wrap_layers
from pretrain.settings.recipe import HealthSettings, ModelSettings

MIXTURE = {
    "num_experts_per_tok": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
MIXTURE |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}
KINDS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "olmoe": {"num_experts": 4, "initializer_range": 0.2},
    "mixtral": {"num_local_experts": 4, "initializer_range": 0.2, "router_jitter_noise": 0.0},
}


@pytest.mark.parametrize("how", ["plainly", "recomputed", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_loss_and_its_gradients_are_those_of_transformers(
    kind: str,
    how: str,
    build_model: Callable,
    plain_copy: Callable,
    random_packs: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = build_model(
        kind, recompute="full" if how == "recomputed" else "none", **MIXTURE | KINDS[kind]
    ).train()
    # traced as on a GPU, but not made into C++, which takes this compiler a minute
    if how == "compiled":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        convert(packed.hf, {}, packed.context)
        wrap_layers(packed, ModelSettings(source="none"), cast_to=None, compile_layers=True)
    plain = plain_copy(packed)
    batch = inputs_of(
        build_microbatch(random_packs([[32]], 32), mask_boundaries=True), torch.device("cpu")
    )
    batch["labels"] = ids = batch["input_ids"].clone()  # each token is its own label
    theirs, ours = (
        plain(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss,
        packed(**batch) / 32,
    )
    torch.testing.assert_close(ours, theirs)
    theirs.backward()
    ours.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(packed.hf.get_parameter(name).grad, parameter.grad, msg=name)
    assert not any("router_logits" in vars(module) for module in packed.modules()), (
        "they would keep what backward has freed"
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "afmoe"])
def test_logits_and_weights_of_bf16_activations_are_not_rounded(
    kind: str, build_model: Callable
) -> None:
    """Against the product in FP64; gradients are those of a BF16 linear that is given BF16. afmoe's weight is a linear's."""
    sizes = {
        key: size for key, size in (MIXTURE | KINDS["qwen3_moe"]).items() if "router" not in key
    }
    packed = build_model(
        kind, weights=torch.bfloat16, **sizes | ({"num_dense_layers": 0} if kind == "afmoe" else {})
    )
    router = next(iter(packed.routing.routers))
    (weight,), x = (
        router.parameters(),
        torch.randn(1, 64, 16, dtype=torch.bfloat16, requires_grad=True),
    )
    logits, weights, chosen = router(x, torch.zeros(4)) if kind == "afmoe" else router(x)
    exact, dy = x[0].double() @ weight.double().T, torch.randn(64, 4)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, exact.topk(2).indices) and weights.dtype == torch.float32
    ours = torch.autograd.grad(logits, (x, weight), dy)
    theirs = torch.autograd.grad(F.linear(x[0], weight), (x, weight), dy.bfloat16())
    torch.testing.assert_close(ours, theirs)


def test_a_step_tells_the_loss_apart_from_the_balance_of_its_experts(
    build_model: Callable, random_packs: Callable, accelerator: Accelerator
) -> None:
    """Of two microbatches, of which the second has fewer labels."""
    packed = build_model("qwen3_moe", **MIXTURE | KINDS["qwen3_moe"]).train()
    packs = random_packs([[32], [9]], 32)
    step = StepBatches(
        [build_microbatch([pack], mask_boundaries=True) for pack in packs], 64, 31 + 8, 0, 0.0
    )
    trained = forward_backward(packed, step, accelerator)
    losses = packed.mean_losses(accelerator, step.valid_tokens, trained)
    packed.eval()
    cross_entropy = (
        sum(packed(**inputs_of(batch, accelerator.device)) for batch in step.microbatches)
        / step.valid_tokens
    )
    torch.testing.assert_close(losses["loss"], cross_entropy)
    assert losses["router_loss"] > 1, "which even experts would have"
    assert 0.5 < losses["router_entropy"] < 1


def test_experts_that_starve_are_counted_and_warned_of(
    build_model: Callable, random_packs: Callable, accelerator: Accelerator
) -> None:
    """A router of zeros sends all tokens to the same two of four experts; the other layer's spreads them."""
    packed = build_model("qwen3_moe", **MIXTURE | KINDS["qwen3_moe"], recompute=1).train()
    convert(packed.hf, {}, packed.context)
    with torch.no_grad():
        packed.hf.model.layers[0].mlp.gate.weight.zero_()
    step = StepBatches(
        [build_microbatch(random_packs([[32]], 32), mask_boundaries=True)], 32, 31, 0, 0.0
    )
    for _ in range(2):  # a step's figures are its own
        losses = packed.mean_losses(accelerator, 31, forward_backward(packed, step, accelerator))
    assert losses["expert_load"] == 2 and losses["starved_experts"] == 0.25
    health = Health(HealthSettings())
    (warning,) = health.warnings_of(1, 0.0, 31, losses)
    assert "router_aux_loss_coef" in warning and "output_router_logits" not in warning, (
        "which it has"
    )
    assert not list(health.warnings_of(2, 0.0, 31, losses))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"router_aux_loss_coef": 0.1}, "output_router_logits: true"),
        ({"router_aux_loss_coef": -0.1, "output_router_logits": True}, "0.0 or more"),
        (
            {"num_experts": 4, "num_local_experts": 8},
            "another name of `model.config.num_local_experts`",
        ),
    ],
)
def test_settings_that_would_balance_nothing_or_mean_two_things_are_refused(
    config: dict[str, float], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        load_config(ModelSettings(config={"model_type": "qwen3_moe"} | config))
