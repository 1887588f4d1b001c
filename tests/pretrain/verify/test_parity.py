"""The comparison with plain transformers: silent where the fast path is right, and naming the tensor where it is broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from packing.arrow import Pack
from packing.batch import StepBatches, build_microbatch
from pretrain.metrics.health import TrainingHalted
from pretrain.model import huggingface as model
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import attach_main_gradients, was_reached, wrap_layers
from pretrain.optimizer.adamw import build_optimizer
from pretrain.precision.formats.definition import Tolerance
from pretrain.precision.registry import PRECISIONS
from pretrain.settings.recipe import LossSettings, ModelSettings, OptimizerSettings
from pretrain.verify.parity import Parity, check_parity, compare, training_without_dropout
from pretrain.verify.reference_model import Pass, reference_model, reference_pass

CPU = torch.device("cpu")
VOCABULARY, LENGTH = 61, 16
LENGTHS = [[5, 1, 10], [7, 6], [16], [3, 13]]  # the second pack has a tail of padding
FP32, BF16 = PRECISIONS["fp32"].tolerance, PRECISIONS["bf16"].tolerance
EXACT = Tolerance(loss=1e-5, gradient_norm=1e-5, cosine=1 - 1e-6)

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES = {
    "qwen3": {**LLAMA, "head_dim": 8, "tie_word_embeddings": True},
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "qwen2": {**LLAMA, "use_sliding_window": False, "tie_word_embeddings": True},  # biases of q, k and v
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.5,
        "embd_pdrop": 0.5,
    },
}


def build(kind: str, *, cast_to: torch.dtype | None = None) -> PackedLanguageModel:
    """A model as the launcher assembles it, with weights far enough from zero for attention to have something to choose."""
    settings = ModelSettings(config={"model_type": kind, "vocab_size": VOCABULARY, "initializer_range": 0.3, **SHAPES[kind]})
    config = model.load_config(settings)
    hf = model.build(settings, config, weights=torch.float32, seed=1, device=CPU, backend="packed_sdpa")
    packed = PackedLanguageModel(hf, "packed_sdpa", LossSettings(chunk=16))
    wrap_layers(packed, settings, cast_to=cast_to, compile_layers=False)
    return packed


def step_of(packs: list[Pack], *, mask_boundaries: bool = True) -> StepBatches:
    """One rank's step, a pack a microbatch."""
    microbatches = [build_microbatch([pack], mask_boundaries=mask_boundaries) for pack in packs]
    squares = sum(each.sum_squared_lengths for each in microbatches)
    return StepBatches(microbatches, LENGTH * len(packs), sum(m.valid_tokens for m in microbatches), squares, len(packs), 1.0)


@pytest.fixture
def step(random_packs: Callable) -> StepBatches:
    return step_of(random_packs(LENGTHS, LENGTH))


@pytest.fixture
def checked(accelerator: Accelerator, step: StepBatches) -> Callable[..., Parity]:
    def check(packed: PackedLanguageModel, tolerance: Tolerance = FP32, *, of: StepBatches = step, preserving=None) -> Parity:
        adamw = build_optimizer(packed, OptimizerSettings(), exact=False)
        return check_parity(packed, packed.hf, adamw, of, tolerance, accelerator, preserving)

    return check


# The plain side


@pytest.mark.parametrize("kind", SHAPES)
def test_the_plain_pass_is_the_mean_over_documents_each_run_by_itself(
    kind: str, plain_copy: Callable, plain_loss: Callable, random_packs: Callable
) -> None:
    packs, packed = random_packs(LENGTHS, LENGTH), build(kind)
    found = reference_pass(reference_model(packed.hf, CPU), step_of(packs).microbatches, step_of(packs).valid_tokens, CPU)
    plain = plain_copy(packed)
    expected = plain_loss(plain, packs)
    expected.backward()
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_plain_model_has_the_stored_weights_in_fp32_and_nothing_of_ours() -> None:
    packed = build("qwen3")
    model.round_weights(packed.hf, torch.bfloat16)
    packed.hf.model.norm.weight.requires_grad_(False)
    plain = reference_model(packed.hf, CPU)
    assert type(plain.lm_head) is nn.Linear and plain.lm_head.weight is plain.model.embed_tokens.weight
    assert plain.config._attn_implementation == "eager" and packed.hf.config._attn_implementation == "packed_sdpa"
    for (name, mine), (_, stored) in zip(plain.named_parameters(), packed.hf.named_parameters(), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, stored.float()), name
        assert mine.requires_grad == stored.requires_grad


# A fast path that is right


@pytest.mark.parametrize("kind", SHAPES)
def test_the_packed_path_in_fp32_agrees_closely_on_every_tensor(kind: str, checked: Callable) -> None:
    packed = build(kind)
    found = checked(packed, EXACT)
    assert found.failures == []
    assert found.gradient_norm == pytest.approx(found.plain_gradient_norm, rel=1e-5)
    assert found.cosines.keys() == {name for name, _ in packed.hf.named_parameters()}, "a tied weight counts once"
    found.require()


@pytest.mark.parametrize("mask_boundaries", [True, False])
def test_documents_that_go_on_from_another_pack_keep_their_positions(
    mask_boundaries: bool, checked: Callable, random_packs: Callable
) -> None:
    packs = [Pack(pack.input_ids, pack.lengths, first_position=9) for pack in random_packs(LENGTHS, LENGTH)]
    for kind in ("gpt2", "qwen3"):  # learnt positions and rotated ones
        assert checked(build(kind), EXACT, of=step_of(packs, mask_boundaries=mask_boundaries)).failures == []


def test_bf16_compute_is_within_its_own_tolerance_and_not_within_fp32s(checked: Callable) -> None:
    assert checked(build("qwen3", cast_to=torch.bfloat16), BF16).failures == []
    assert checked(build("qwen3", cast_to=torch.bfloat16), EXACT).failures != []


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_main_gradients_are_what_is_compared_and_are_cleared(kind: str, checked: Callable) -> None:
    packed = build(kind)
    expected = checked(packed, EXACT)
    attach_main_gradients(packed, torch.float32)
    found = checked(packed, EXACT)
    assert found.failures == [] and found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-6)
    assert not any(was_reached(parameter) for parameter in packed.parameters())


def test_the_check_leaves_no_trace(checked: Callable) -> None:
    packed = build("gpt2").eval()
    packed.hf.transformer.h[1].train()
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    modes, random = [module.training for module in packed.modules()], torch.get_rng_state()
    checked(packed)
    assert [module.training for module in packed.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in packed.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in packed.state_dict().items())
    assert packed.hf.transformer.drop.p == packed.hf.transformer.h[0].mlp.dropout.p == 0.5


def test_dropout_is_off_while_everything_trains() -> None:
    packed = build("gpt2").eval()
    with training_without_dropout(packed):
        assert all(module.training for module in packed.modules())
        assert torch.equal(packed.hf.transformer.drop(torch.ones(1000)), torch.ones(1000))


def test_only_the_fast_pass_is_run_inside_what_preserves_its_state(checked: Callable) -> None:
    packed, calls = build("qwen3"), []
    packed.register_forward_hook(lambda *_: calls.append("fast"))

    @contextmanager
    def preserving() -> Iterator[None]:
        calls.append("enter")
        yield
        calls.append("exit")

    checked(packed, preserving=preserving())
    assert calls == ["enter", "fast", "fast", "exit"]


def test_two_microbatches_are_compared_with_gradients_of_the_size_they_have_in_their_step(
    checked: Callable, step: StepBatches, plain_copy: Callable, plain_loss: Callable, random_packs: Callable
) -> None:
    packed = build("qwen3")
    plain, loss = plain_copy(packed), checked(packed, EXACT).plain_loss
    expected = plain_loss(plain, random_packs(LENGTHS, LENGTH)[:2])
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    (expected * (24 / step.valid_tokens)).backward()  # 24 of the two packs' tokens have a label
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert checked(packed, EXACT).gradient_norm == pytest.approx(norm.item(), rel=1e-4)


# A fast path that is broken


def zero_gradient(packed: PackedLanguageModel) -> None:
    packed.hf.model.layers[1].mlp.up_proj.weight.register_hook(torch.zeros_like)


def no_gradient(packed: PackedLanguageModel) -> None:
    packed.hf.model.layers[1].mlp.up_proj.weight.requires_grad_(False)


def scaled_gradient(packed: PackedLanguageModel) -> None:
    """Too little to show in the norm over all tensors, and of the right direction."""
    packed.hf.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 1.05)


def broken_number(packed: PackedLanguageModel) -> None:
    packed.hf.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * float("nan"))


@pytest.mark.parametrize("breaking", [zero_gradient, scaled_gradient, broken_number])
def test_a_broken_gradient_is_caught_and_its_tensor_named_worst(breaking: Callable, checked: Callable) -> None:
    packed = build("qwen3")
    breaking(packed)
    with pytest.raises(TrainingHalted) as halt:
        checked(packed).require()
    message = str(halt.value)
    assert "step 0" in message and "gradients of 1 of" in message and "parity=false" in message
    heading, worst, *_ = message[message.index("\ntensor") + 1 :].splitlines()
    assert heading.split() == ["tensor", "cosine", "norm", "/", "plain", "share", "of", "gradient"]
    assert worst.startswith("model.layers.1.mlp.up_proj.weight")


def scaled_output(packed: PackedLanguageModel) -> None:
    packed.hf.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


def leaking_documents(packed: PackedLanguageModel) -> None:
    def one_document(module: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> tuple[tuple, dict[str, Tensor]]:
        return args, kwargs | {"cu_seqlens": torch.tensor([0, LENGTH], dtype=torch.int32)}

    packed.register_forward_pre_hook(one_document, with_kwargs=True)


def positions_that_run_on(packed: PackedLanguageModel) -> None:
    def counted_through(module: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> tuple[tuple, dict[str, Tensor]]:
        return args, kwargs | {"position_ids": torch.arange(LENGTH)[None] ** 2 // 4}

    packed.register_forward_pre_hook(counted_through, with_kwargs=True)


def untied_head(packed: PackedLanguageModel) -> None:
    head = packed.hf.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


@pytest.mark.parametrize("breaking", [scaled_output, leaking_documents, positions_that_run_on, untied_head])
def test_a_path_that_computes_something_else_is_caught(breaking: Callable, checked: Callable) -> None:
    packed = build("qwen3")
    breaking(packed)
    found = checked(packed, BF16)
    assert any("gradients of" in line for line in found.failures), found.table()
    if breaking is untied_head:
        assert {"lm_head.weight", "model.embed_tokens.weight"} == {t.name for t in found.tensors if t.excess(BF16) > 1}


@pytest.mark.parametrize(("noise", "is_noise"), [(0.001, True), (0.1, False)])
def test_where_the_plain_gradient_is_negligible_only_a_gradient_made_of_nothing_is_a_mismatch(
    noise: float, is_noise: bool
) -> None:
    measured = {"weight": torch.tensor([3.0, 4.0]), "silent": torch.tensor([noise])}
    plain = {"weight": torch.tensor([3.0, 4.0]), "silent": torch.tensor([-1e-6])}
    found = compare(Pass(2.0, measured), Pass(2.0, plain), FP32)
    assert found.cosines.keys() == {"weight"}
    assert (found.failures == []) == is_noise
    assert found.tensors[0].name == "silent"


def test_a_frozen_parameter_is_no_mismatch(checked: Callable) -> None:
    packed = build("qwen3")
    no_gradient(packed)
    assert checked(packed).failures == []


# The figures


vectors = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)


@given(st.lists(st.tuples(vectors, vectors), min_size=1, max_size=4))
def test_cosines_norms_and_shares_are_numpys(pairs: list) -> None:
    measured, plain = ({str(i): torch.tensor(pair[side], dtype=torch.float32) for i, pair in enumerate(pairs)} for side in (0, 1))
    found = compare(Pass(1.0, measured), Pass(1.0, plain), FP32)
    a, b = (np.array([gradient.double().numpy() for gradient in side.values()]) for side in (measured, plain))
    assert found.gradient_norm == pytest.approx(np.linalg.norm(a), rel=1e-6, abs=1e-20)
    assert found.plain_gradient_norm == pytest.approx(np.linalg.norm(b), rel=1e-6, abs=1e-20)
    for tensor in found.tensors:
        x, y = a[int(tensor.name)], b[int(tensor.name)]
        if tensor.cosine is None:
            assert np.linalg.norm(y) <= max(2e-6 * np.linalg.norm(b), 1e-15)  # below, squares in FP32 vanish
        elif np.linalg.norm(x) > 1e-15:
            assert tensor.cosine == pytest.approx(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)), abs=1e-5)
            assert tensor.plain_share == pytest.approx(np.linalg.norm(y) / np.linalg.norm(b), rel=1e-5)


def test_equal_gradients_have_nothing_to_report_and_the_record_is_plain_json() -> None:
    gradients = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    found = compare(Pass(2.0, gradients), Pass(2.0, gradients), EXACT)
    record = json.loads(json.dumps(found.record()))
    assert record["failures"] == []
    assert (record["least_cosine"], record["gradient_norm"], record["tensors_with_negligible_gradient"]) == (1.0, 5.0, 1)
    assert "loss +0.0e+00" in found.summary() and "(a)" in found.summary()


@pytest.mark.parametrize("loss", [2.1, float("nan"), float("inf")])
def test_a_loss_that_is_off_is_a_failure_by_itself(loss: float) -> None:
    gradients = {"a": torch.ones(2)}
    found = compare(Pass(loss, gradients), Pass(2.0, gradients), FP32)
    assert [line.split()[0] for line in found.failures] == ["loss"]
