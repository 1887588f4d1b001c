"""The ways in which low precision is known to fail without a word; the audit has one for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundation.errors import InputError
from packing.batch import build_microbatch
from pretrain.model import huggingface as model
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import convert, wrap_layers
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import Decision, check_shapes, decide
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import ModelSettings
from pretrain.verify import audit

CPU = torch.device("cpu")
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
QUANTIZED = [name for name, recipe in PRECISIONS.items() if recipe.quantized]


class Converted:
    """A small model whose linears and head multiply in emulated `recipe`, ready to be audited."""

    def __init__(self, packed: PackedLanguageModel, inputs: dict, recipe: str = "current", **settings: object) -> None:
        settings = {"scope": "linear+head", **settings}
        self.active = ActivePrecision(recipe, PRECISIONS[recipe], "emulation", LowPrecisionSettings(**settings).resolved(recipe))
        self.packed, self.hf, self.inputs = packed.train(), packed.hf, inputs
        self.context = packed.context = PrecisionContext(EmulationBackend(self.active, CPU), torch.bfloat16)
        self.decisions = decide(self.hf, list(decoder_layers(self.hf).values()), self.active)
        convert(self.hf, self.decisions, self.context)

    def audit(self) -> list[audit.Entry]:
        return audit.observe(self.packed, lambda: self.packed(**self.inputs), self.active, self.decisions)

    def refusal(self) -> str:
        with pytest.raises(InputError) as error:
            self.audit()
        return str(error.value)


@pytest.fixture
def inputs(random_packs: Callable) -> dict:
    return inputs_of(build_microbatch(random_packs([[50, 78], [128]], 128), mask_boundaries=True), CPU)


@pytest.fixture
def converted(build_model: Callable, inputs: dict) -> Callable[..., Converted]:
    def make(recipe: str = "current", kind: str = "qwen3", **settings: object) -> Converted:
        sizes = WIDE if kind == "qwen3" else {"n_embd": 128, "n_head": 4, "vocab_size": 128, "n_positions": 256}
        return Converted(build_model(kind, weights=torch.bfloat16, **sizes), inputs, recipe, **settings)

    return make


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_model_that_keeps_its_promise_passes(recipe: str, kind: str, converted: Callable[..., Converted]) -> None:
    entries = converted(recipe, kind).audit()
    assert len(entries) == {"qwen3": 15, "gpt2": 9}[kind]
    assert {(entry["requested"], entry["effective"], entry["backend"]) for entry in entries} == {(recipe, recipe, "emulation")}
    assert all(entry["products"].keys() == {"forward", "dgrad", "wgrad"} for entry in entries)


def test_low_precision_that_never_engages_is_found(converted: Callable[..., Converted]) -> None:
    trained = converted()
    trained.context.forward = lambda **_: nullcontext()  # as under a launcher that never enters it: only the modules are there
    assert "15 of 15 modules did not run in it as they should: model.layers.0.self_attn.q_proj (bf16)" in trained.refusal()


def test_a_sibling_that_was_skipped_is_found(converted: Callable[..., Converted]) -> None:
    trained = converted()
    skipped = trained.hf.model.layers[1].mlp.up_proj
    plain = nn.Linear(*reversed(skipped.weight.shape), bias=False, device="meta")
    plain.weight = skipped.weight
    trained.hf.set_submodule("model.layers.1.mlp.up_proj", plain)
    assert "1 of 15 modules did not run in it as they should: model.layers.1.mlp.up_proj (bf16)" in trained.refusal()


def test_a_head_that_was_untied_is_found(converted: Callable[..., Converted]) -> None:
    trained = converted()
    head = trained.hf.get_output_embeddings()
    optimizer = torch.optim.SGD(trained.hf.parameters())
    head.weight = nn.Parameter(head.weight.detach().clone())
    said = trained.refusal()
    assert "ties the LM head to the embedding, and they have become two parameters" in said
    assert said.startswith("`model.config.tie_word_embeddings` is true, here or in the config.json of `model.source`")
    assert "set `model.config.tie_word_embeddings: false`" in said
    with pytest.raises(InputError, match=r"the optimizer does not know 1 parameters, lm_head\.weight"):
        audit.check_trained(trained.hf, optimizer)


@pytest.mark.parametrize("main_gradients", [None, torch.float32, torch.bfloat16])
def test_a_parameter_that_nothing_computes_with_is_found(
    main_gradients: torch.dtype | None, converted: Callable[..., Converted]
) -> None:
    trained = converted()
    trained.hf.model.layers[0].leftover = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    if main_gradients:
        attach_main_gradients(trained.packed, main_gradients)
    assert "1 parameters get no gradient, model.layers.0.leftover" in trained.refusal()


def test_a_recompute_outside_the_context_is_found(build_model: Callable, inputs: dict) -> None:
    trained = Converted(build_model(weights=torch.bfloat16, **WIDE), inputs)
    layer = trained.hf.model.layers[0]
    forward = layer.forward
    # torch's own recomputes where the engine calls it, which is outside our context; reentrant, it does not even compare dtypes.
    layer.forward = lambda hidden, **kwargs: checkpoint(partial(forward, **kwargs), hidden, use_reentrant=True)
    message = trained.refusal()
    assert "7 of 15" in message and "layers.0.self_attn.q_proj (1 calls outside the low-precision context)" in message


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_our_own_recompute_stays_inside(recipe: str, build_model: Callable, inputs: dict) -> None:
    trained = Converted(build_model(weights=torch.bfloat16, **WIDE), inputs, recipe)
    settings = model.ModelSettings(config={"model_type": "qwen3"}, gradient_checkpointing="full")
    wrap_layers(trained.packed, settings, cast_to=None, compile_layers=False)
    assert {entry["effective"] for entry in trained.audit()} == {recipe}


def test_a_backward_in_bf16_is_found(converted: Callable[..., Converted]) -> None:
    """Straight-through fake quantization: forward is right, and both gradients are products of BF16 operands."""
    trained = converted()
    module = trained.hf.model.layers[0].mlp.down_proj
    quantize = module.product

    def forward_only(
        x: torch.Tensor, weight: torch.Tensor, bias: None, *, first_microbatch: bool, **options: object
    ) -> torch.Tensor:
        plain = F.linear(x, weight)
        return plain + (quantize(x, weight, bias, first_microbatch=first_microbatch) - plain).detach()

    module.products[trained.context.backend] = forward_only
    message = trained.refusal()
    assert "1 of 15" in message and "layers.0.mlp.down_proj (dgrad not run, wgrad not run, a product of its own" in message


def test_operands_with_more_bits_than_the_format_has_are_found(converted: Callable[..., Converted], monkeypatch) -> None:
    trained = converted()
    module = trained.hf.model.layers[1].self_attn.o_proj
    honest = module.product.operand

    def lazy(role: str, x: torch.Tensor, along: str, scale: torch.Tensor | None, **options: object) -> object:
        operand = honest(role, x, along, scale, **options)
        return type(operand)(x.float() if along == "features" else x.t().float(), operand.scale) if role == "input" else operand

    monkeypatch.setattr(module.product, "operand", lazy)
    message = trained.refusal()
    assert "1 of 15" in message and "o_proj (forward input: of 256 blocks " in message
    assert "hold values that are no E4M3 numbers times their scale" in message


def test_the_first_step_is_held_against_the_audit(converted: Callable[..., Converted]) -> None:
    trained = converted()
    products = trained.audit()
    with audit.confirming(trained.packed, trained.active, products, 1):
        trained.packed(**trained.inputs).backward()
    with (
        pytest.raises(InputError, match=r"15 of 15 modules did not run in it as they should in step 1: .*\(not run\)"),
        audit.confirming(trained.packed, trained.active, products, 1),
    ):
        trained.context.forward = lambda **_: nullcontext()
        trained.packed(**trained.inputs).backward()


# ── What is decided
# ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reasons(decisions: dict[str, Decision]) -> dict[str, str]:
    return {name: decision.reason for name, decision in decisions.items() if decision.reason}


def test_scope_linear_leaves_the_head_out_and_nothing_else(converted: Callable[..., Converted]) -> None:
    trained = converted(scope="linear")
    assert reasons(trained.decisions) == {"lm_head": "scope linear leaves the LM head out"}
    entries = {entry["name"]: entry for entry in trained.audit()}
    assert (entries["lm_head"]["requested"], entries["lm_head"]["effective"], entries["lm_head"]["backend"]) == (
        "bf16",
        "bf16",
        "torch",
    )


def test_layers_at_either_end_can_be_kept(converted: Callable[..., Converted]) -> None:
    kept = reasons(converted(keep_bf16_layers={"first": 1}).decisions)
    assert (
        len(kept) == 7 and all(name.startswith("model.layers.0.") for name in kept) and set(kept.values()) == {"keep_bf16_layers"}
    )
    kept = reasons(converted(keep_bf16_layers={"last": 1}).decisions)
    assert all(name.startswith("model.layers.1.") for name in kept)


def test_matrices_that_are_no_linear_s_are_listed_as_what_they_are(build_model: Callable, inputs: dict) -> None:
    """The stacked experts of a mixture hold most of its weights, and no recipe converts them."""
    sizes = {key: value for key, value in WIDE.items() if key != "head_dim"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    packed = build_model("qwen3_moe", weights=torch.bfloat16, **sizes, **experts)
    entries = {entry["name"]: entry for entry in Converted(packed, inputs).audit()}
    expert, query = (entries[f"model.layers.1.{name}"] for name in ("mlp.experts", "self_attn.q_proj"))
    assert (expert["effective"], expert["backend"], expert["stored"]) == ("bf16", "torch", "bfloat16")
    assert expert["module"] == "Qwen3MoeExperts" and "no linear" in expert["reason"]
    assert query["effective"] == "current" and entries["model.layers.1.mlp.gate"]["effective"] == "bf16"


def test_shapes_that_a_recipe_cannot_take_are_kept_one_by_one(build_model: Callable, inputs: dict) -> None:
    odd = WIDE | {"intermediate_size": 200}
    trained = Converted(build_model(weights=torch.bfloat16, **odd), inputs, "mxfp8")
    assert reasons(trained.decisions) == {
        f"model.layers.{layer}.mlp.{name}": "200 is not a multiple of 32"
        for layer in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    effective = {entry["name"]: entry["effective"] for entry in trained.audit()}
    assert effective["model.layers.0.mlp.up_proj"] == "bf16" and effective["model.layers.0.self_attn.q_proj"] == "mxfp8"


@pytest.mark.parametrize(("scope", "refused"), [("linear", True), ("linear+head", False)])
def test_a_model_of_which_a_recipe_can_take_no_linear_is_refused(scope: str, refused: bool) -> None:
    """It would train in BF16 from beginning to end, under the name of a low precision."""
    odd = {"hidden_size": 128, "intermediate_size": 100, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 36}
    settings = ModelSettings(config={"model_type": "qwen3", "vocab_size": 128, "num_hidden_layers": 1, **odd})
    shapes = model.build_on_meta(model.load_config(settings))
    active = ActivePrecision("block", PRECISIONS["block"], "emulation", LowPrecisionSettings(scope=scope).resolved("block"))
    with pytest.raises(InputError, match="multiples of 128, and Qwen3ForCausalLM has none") if refused else nullcontext():
        check_shapes(shapes, active)
