"""Kernels that are broken on purpose: each is found, replaced or refused, and the audit says so."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import InputError
from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.attention import cudnn, flash
from pretrain.model.attention.heads import Heads
from pretrain.model.fused import rotary
from pretrain.model.fused.layers import NormMLPAdd
from pretrain.optimizer import adamw_update
from pretrain.precision.emulation import EmulatedProduct, EmulationBackend
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings, ModelSettings
from pretrain.verify import kernels
from pretrain.verify.kernels import TABLE, Verdict, choose, relative_error, try_kernel
from pretrain.verify.one_layer import TOKENS, WHOLE, Situation, document_lengths, microbatch_of
from tests.pretrain.conftest import probabilities

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def situation(precision: str = "fp32", *, fused: bool = False, backend: str = "packed_sdpa", **changes: Any) -> Situation:
    active = ActivePrecision(precision, PRECISIONS[precision], "torch", LowPrecisionSettings().resolved(precision))
    fp32 = {"gradients": torch.float32, "moments": torch.float32}
    run = Situation(
        device=torch.device("cpu"),
        hf=model.build_on_meta(model.load_config(ModelSettings(config=QWEN3))),
        length=48,
        active=active,
        attention=backend,
        fused=fused,
        loss=LossSettings(),
        weights="fp32",
        **fp32,
    )
    return replace(run, **changes)


def varlen(broken: float = 1.0) -> Callable[..., Tensor]:
    """Torch's variable-length kernel as a formula, its dq so many times what it should be."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *_: Any, scale: float, **options: Any) -> Tensor:
        q = broken * q + (1 - broken) * q.detach()
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        return torch.einsum("hts,shd->thd", probabilities(q, k, cu_seqlens, scale), v)

    return attend


@pytest.fixture
def varlen_runs_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let `varlen` be a backend of this CPU, before sdpa, with a dq that is so many times too large."""

    def let(broken: float) -> None:
        obstacle = attention._obstacle
        monkeypatch.setattr(attention, "_obstacle", lambda kind, *rest: None if kind == "varlen" else obstacle(kind, *rest))
        monkeypatch.setattr(attention, "varlen_attn", varlen(broken))

    return let


def always(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Try these kernels here too, where plain torch stands for them."""
    for name in TABLE:
        monkeypatch.setitem(TABLE, name, replace(TABLE[name], used=lambda run, used=name in names: used))


@pytest.mark.parametrize("length", [2, 3, 32, 128])
def test_the_documents_of_a_case_are_uneven_with_one_of_a_token_and_one_of_a_pack(length: int) -> None:
    first, second = document_lengths(length)
    assert sum(first) == sum(second) == length and 1 in first and second == [length]


@pytest.mark.parametrize("length", [1, 2, 7, 9, 48, 100, 127, 255, 256, 1000, 4096, 4099])
def test_a_case_has_few_tokens_and_the_remainder_of_the_runs_microbatch(length: int) -> None:
    for microbatch in (1, 2, 3, 5, 8, 64):
        tokens = microbatch * length
        run = situation(length=length, tokens=tokens)
        inputs = microbatch_of(run)
        count, longest = inputs["input_ids"].numel(), inputs["max_seqlen"]
        assert count % WHOLE == tokens % WHOLE and count <= 4 * TOKENS
        assert count >= 2 * longest and longest <= min(length, TOKENS), "packs of the run's length at most, two or more"
        assert run.tokens_of_a_case(512) % WHOLE == tokens % WHOLE and 384 < run.tokens_of_a_case(512) <= 512


@pytest.mark.parametrize("precision", [name for name, each in PRECISIONS.items() if each.quantized])
def test_a_case_has_as_many_tokens_as_its_precision_takes(precision: str) -> None:
    multiple = PRECISIONS[precision].multiple_of
    for length, tokens in itertools.product((10, 48, 96, 400, 4096), (None, 16, 96, 160, 1000)):
        run = situation(precision, length=length, tokens=tokens)
        assert microbatch_of(run)["input_ids"].numel() % multiple == run.tokens_of_a_case(512) % multiple == 0
    whole = situation(precision, length=4096, tokens=4096)
    assert microbatch_of(whole)["input_ids"].numel() == whole.tokens_of_a_case(512) == 512


@pytest.mark.parametrize(
    ("ours", "plain", "error"),
    [
        ([3.0, 4.4], [3.0, 4.0], 0.08),
        ([0.0], [0.0], 0.0),
        ([1e-9], [0.0], math.inf),
        ([math.nan], [1.0], math.inf),
        ([1.0, 1.0], [1.0], math.inf),
    ],
)
def test_an_error_is_relative_to_the_norm_and_infinite_for_what_is_not_finite(ours: list, plain: list, error: float) -> None:
    assert relative_error(torch.tensor(ours), torch.tensor(plain)) == pytest.approx(error)


def test_plain_torch_is_not_tried() -> None:
    run = situation(fused=True)
    assert not [name for name, kernel in TABLE.items() if kernel.used(run)]
    assert choose(run, attention.Choice("packed_sdpa", "because"), "auto", "on").verdicts == ()


# ── Found ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("broken", [1.0, 1.3])
def test_a_wrong_dq_is_found_and_a_right_one_is_not(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", varlen(broken))
    verdict = try_kernel(TABLE["attention"], situation(backend="packed_varlen"))
    assert verdict.agrees == (broken == 1) and verdict.kernel == "attention packed_varlen"
    assert broken == 1 or (verdict.worst == "dq" and verdict.errors["dq"] == pytest.approx(0.3, rel=1e-3))


def test_a_wrong_dq_of_cudnn_is_found(cudnn_on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = situation(backend="packed_cudnn")
    assert try_kernel(TABLE["attention"], run).agrees
    theirs = cudnn._kernels()

    def wrong(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        dq, *rest = theirs.fused_attn_bwd(*arguments, **options)
        return 0.7 * dq, *rest

    broken = SimpleNamespace(**vars(theirs) | {"fused_attn_bwd": wrong})
    monkeypatch.setattr(cudnn, "_kernels", lambda: broken)
    assert str(try_kernel(TABLE["attention"], run)).startswith("disagrees with its formula in FP64: dq is 0.3 off")


def test_documents_that_see_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any, **options: Any) -> Tensor:
        return varlen()(q, k, v, cu_seqlens[[0, -1]], *rest, **options)

    monkeypatch.setattr(attention, "varlen_attn", leaking)
    assert not try_kernel(TABLE["attention"], situation(backend="packed_varlen")).agrees


def test_a_kernel_that_raises_has_its_reason_in_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **options: Any) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(attention, "varlen_attn", raises)
    verdict = try_kernel(TABLE["attention"], situation(backend="packed_varlen"))
    assert not verdict.agrees and str(verdict) == "fails here: RuntimeError: no kernel image is available"


def test_memory_that_is_full_speaks_against_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel in its place would be a silent fallback, and other bits than those of the run that is resumed."""

    def raises(*_: Any, **options: Any) -> Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(attention, "varlen_attn", raises)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        try_kernel(TABLE["attention"], situation(backend="packed_varlen"))


@pytest.mark.parametrize("direction", ["rotate", "rotate_backward"])
def test_a_wrong_rotation_is_found(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = situation("bf16", fused=True)
    assert try_kernel(TABLE["rotation"], run).agrees
    right = getattr(rotary, direction)

    def wrong(*arguments: Any) -> tuple[Tensor, ...]:
        first, *rest = right(*arguments)
        return -first, *rest

    monkeypatch.setattr(rotary, direction, wrong)
    assert not try_kernel(TABLE["rotation"], run).agrees


@pytest.fixture
def multiply_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[EmulatedProduct]], None]:
    """Put the emulation, with products of the class that this is given, in Transformer Engine's place."""

    def install(product: type[EmulatedProduct]) -> None:
        def make(active: ActivePrecision, device: torch.device) -> EmulationBackend:
            backend = EmulationBackend(active, device)
            if active.backend == "transformer_engine":
                backend.product = lambda name, *shape, bias: product(backend, name)
            return backend

        monkeypatch.setattr(kernels, "make_backend", make)

    return install


@pytest.mark.parametrize("precision", ["delayed", "current", "block", "nvfp4"])
@pytest.mark.parametrize("gemm", [None, "forward", "dgrad", "wgrad"])
def test_a_wrong_product_is_found(precision: str, gemm: str | None, multiply_by: Callable) -> None:

    class Broken(EmulatedProduct):
        def multiply(self, name: str, *operands: Any, **options: Any) -> Tensor:
            return (1.5 if name == gemm else 1.0) * super().multiply(name, *operands, **options)

    multiply_by(Broken)
    hf = model.build_on_meta(model.load_config(ModelSettings(config=QWEN3 | {"hidden_size": 128})))
    run = situation(hf=hf)
    active = ActivePrecision(precision, PRECISIONS[precision], "transformer_engine", LowPrecisionSettings().resolved(precision))
    verdict = try_kernel(TABLE["products"], replace(run, active=active))
    assert verdict.agrees == (gemm is None), verdict
    names = {"forward": "output", "dgrad": "input gradient", "wgrad": "weight gradient"}
    assert {name.partition(" of ")[0] for name, error in verdict.errors.items() if error > 0.05} == (
        {names[gemm]} if gemm else set()
    )


def wrong_beyond_whole_tiles(tokens: int) -> float:
    return 1.0 if tokens % 64 == 0 else 1.5


@pytest.mark.parametrize("tokens", [8 * 1024, 8 * 1024 + 32])
def test_a_product_that_is_wrong_beyond_whole_tiles_is_found_where_a_run_has_such_tokens(
    tokens: int, multiply_by: Callable
) -> None:
    class Broken(EmulatedProduct):
        def multiply(self, name: str, *operands: Any, **options: Any) -> Tensor:
            right = super().multiply(name, *operands, **options)
            return right if name == "wgrad" else wrong_beyond_whole_tiles(len(right)) * right

    multiply_by(Broken)
    active = ActivePrecision("nvfp4", PRECISIONS["nvfp4"], "transformer_engine", LowPrecisionSettings().resolved("nvfp4"))
    verdict = try_kernel(TABLE["products"], situation(active=active, length=1024, tokens=tokens))
    assert verdict.failure is None and verdict.agrees == (tokens % 64 == 0), verdict


@pytest.mark.parametrize("microbatch", [4, 3])
def test_a_layer_that_is_wrong_beyond_whole_tiles_is_found_where_a_run_has_such_tokens(
    microbatch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NormMLPAdd.apply

    def wrong(*arguments: Any) -> Tensor:
        x, residual = arguments[4:6]
        before = x + residual
        return before + wrong_beyond_whole_tiles(len(x.flatten(0, -2))) * (right(*arguments) - before)

    monkeypatch.setattr(NormMLPAdd, "apply", staticmethod(wrong))
    verdict = try_kernel(TABLE["layer"], situation("bf16", fused=True, length=4000, tokens=microbatch * 4000))
    assert verdict.failure is None and verdict.agrees == (microbatch == 4), verdict


@pytest.fixture
def half_an_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers whose MLP adds half of what it should."""
    right = NormMLPAdd.apply

    def wrong(*arguments: Any) -> Tensor:
        x, residual = arguments[4:6]
        return 0.5 * (x + residual + right(*arguments))

    monkeypatch.setattr(NormMLPAdd, "apply", staticmethod(wrong))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_layer_agrees_with_an_unfused_one(precision: str) -> None:
    verdict = try_kernel(TABLE["layer"], situation(precision, fused=True))
    assert verdict.agrees and len(verdict.errors) > 10, verdict


def test_a_wrong_fused_layer_is_found(half_an_mlp: None) -> None:
    verdict = try_kernel(TABLE["layer"], situation("bf16", fused=True))
    assert not verdict.agrees and verdict.worst in verdict.errors, verdict


# ── Replaced, or refused ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_fused_layer_is_not_used_where_that_was_left_open_and_refused_where_not(
    half_an_mlp: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, "layer")
    monkeypatch.setitem(TABLE, "layer", replace(TABLE["layer"], used=lambda run: run.parts is not None))
    run, choice = situation(fused=True), attention.Choice("packed_sdpa", "because")
    chosen = choose(run, choice, "auto", "auto")
    assert (
        chosen.not_fused.startswith("nothing: tried before training, the kernel `layer` disagrees") and not chosen.situation.fused
    )
    assert [verdict.instead for verdict in chosen.verdicts] == ["layers that are not fused"]
    with pytest.raises(
        InputError, match=r"`model.fused: on`: tried before training, the kernel `layer` disagrees .*model.fused: auto"
    ):
        choose(run, choice, "auto", "on")


def test_a_wrong_kernel_on_another_rank_is_wrong_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "largest_over_ranks", lambda accelerator, value: 1)
    monkeypatch.setattr(attention, "varlen_attn", varlen())
    chosen = choose(situation(backend="packed_varlen"), attention.Choice("packed_varlen", "fast"), "auto", "auto", object())
    assert chosen.attention.name == "packed_sdpa" and str(chosen.verdicts[0]) == "fails here: on another rank"


@pytest.mark.parametrize("repeats", [True, False])
def test_an_attention_whose_gradients_do_not_repeat_is_refused_where_bits_are_to(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, exact = itertools.count(), varlen()

    def attend(q: Tensor, *others: Any, **options: Any) -> Tensor:
        q.register_hook(lambda gradient: gradient if repeats else gradient * (1 + next(count) * 2**-20))
        return exact(q, *others, **options)

    monkeypatch.setattr(attention, "varlen_attn", attend)
    run = situation(backend="packed_varlen")
    assert try_kernel(TABLE["attention"], run).agrees, "as far as rounding goes"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    verdict = try_kernel(TABLE["attention"], run)
    assert verdict.agrees == repeats and (repeats or "dq a second time is " in str(verdict)), verdict


@pytest.mark.parametrize("reached", [True, False])
def test_flash_attention_4_is_tried_in_one_call_too_where_documents_may_be_long_enough(
    reached: bool, flash_attention_4_on_a_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case's own documents are short, so that its heads are apart; a run's are not, and those gradients are wrong."""
    exact = flash_attention_4_on_a_cpu._flash_attn_bwd

    def wrong_for_groups(q: Tensor, k: Tensor, *others: Any, **options: Any) -> tuple[Tensor, ...]:
        dq, dk, dv = exact(q, k, *others, **options)
        return dq, dk if k.shape == q.shape else 1.3 * dk, dv

    flash_attention_4_on_a_cpu._flash_attn_bwd = wrong_for_groups
    run = situation(backend="packed_fa4")
    monkeypatch.setattr(flash, "LONG", 2 * run.length - reached)
    verdict = try_kernel(TABLE["attention"], run)
    assert verdict.agrees != reached
    assert not reached or (verdict.worst == "dk in one call" and verdict.errors[verdict.worst] == pytest.approx(0.3, rel=1e-3))


def test_where_no_attention_is_right_the_run_stops() -> None:
    refused = dict.fromkeys(attention.FASTEST_FIRST, "disagrees")
    with pytest.raises(InputError, match=r"nothing here attends as it should: fa4 disagrees; .*sdpa disagrees"):
        attention.choose("auto", "cpu", Heads(4, 2, 32), torch.float32, 32, refused)


@pytest.fixture
def train_broken(train_here: Callable, small_recipe: dict[str, Any]) -> Callable[..., Any]:
    short = {"train": {"steps": 1}, "schedule": {}, "evaluate": {}, "checkpoint": {"every": None, "at_end": False}}
    return lambda *arguments: train_here(*arguments, recipe=small_recipe | short)


def test_auto_goes_on_to_the_next_attention_and_audit_and_screen_say_why(
    varlen_runs_here: Callable, train_broken: Callable
) -> None:
    varlen_runs_here(1.3)
    run = train_broken()
    assert run.status == 0, run.output
    found = json.loads((run.run_dir / "audit.json").read_text())
    attends = found["attention"]
    assert attends["kind"] == "packed_documents" and "varlen disagrees with its formula" in attends["reason"]
    wrong, right = found["kernels"]
    assert (
        not wrong["agrees"] and wrong["instead"] == "packed_documents" and wrong["errors"]["dq"] == pytest.approx(0.3, rel=1e-3)
    )
    assert right["agrees"]
    assert "NOT USED: the kernel `attention packed_varlen`, which disagrees" in " ".join(run.output.split())


def test_a_wrong_attention_that_was_asked_for_by_name_is_one_clear_message(
    varlen_runs_here: Callable, train_broken: Callable
) -> None:
    varlen_runs_here(1.3)
    said = train_broken("model.attention=varlen").refusal
    assert said.startswith("model.attention: varlen disagrees with its formula in FP64: dq is 0.3 off where rounding explains")
    assert said.endswith("name another; or set model.attention: auto")


def test_an_attention_that_agrees_is_used_and_recorded(varlen_runs_here: Callable, train_broken: Callable) -> None:
    varlen_runs_here(1.0)
    run = train_broken()
    found = json.loads((run.run_dir / "audit.json").read_text())
    assert found["attention"]["kind"] == "packed_varlen" and [each["agrees"] for each in found["kernels"]] == [True]
    assert "attention packed_varlen: as their plain forms" in " ".join(run.output.split())


@pytest.mark.parametrize(("asked", "packs"), [("2", 2), ("auto", 8)])
def test_kernels_are_tried_for_the_runs_microbatch_or_the_one_that_auto_should_find(
    asked: str, packs: int, train_broken: Callable, monkeypatch: pytest.MonkeyPatch, small_recipe: dict[str, Any]
) -> None:
    seen, right = [], kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda run, *others: seen.append(run) or right(run, *others))
    assert train_broken(f"batch.microbatch={asked}").status == 0
    assert [run.tokens for run in seen] == [packs * small_recipe["data"]["length"]]


def test_a_wrong_loss_stops_the_run_and_names_the_plain_one(train_broken: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "loss")
    right = kernels.softmax_gradient_
    monkeypatch.setattr(kernels, "softmax_gradient_", lambda logits, labels: 1.1 * right(logits, labels))
    said = train_broken().refusal
    assert said.startswith("tried before training, the kernel `loss` disagrees with cross-entropy in FP64: losses is 0.1 off")
    assert said.endswith("set `loss.kind: reference`")


def test_a_wrong_optimizer_kernel_is_replaced_by_the_update_in_torch(
    train_broken: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, "optimizer")

    class Wrong:
        def __call__(self, parameters: list, hyper: adamw_update.Hyperparameters, clip: Tensor) -> None:
            for each in parameters:
                adamw_update.update_parameter(each, replace(hyper, beta1=0.5), clip)

    adamw_kernel = pytest.importorskip("pretrain.optimizer.adamw_kernel", reason="needs Triton")
    monkeypatch.setattr(adamw_kernel, "FusedUpdate", Wrong)
    run = train_broken()
    (record,) = json.loads((run.run_dir / "audit.json").read_text())["kernels"]
    assert run.status == 0 and not record["agrees"] and record["instead"] == "the update in torch"


def test_trying_kernels_leaves_the_random_numbers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    assert isinstance(try_kernel(TABLE["layer"], situation(fused=True)), Verdict)
    assert torch.equal(torch.get_rng_state(), before)
