"""The FP8 head without a GPU: what it asks of Transformer Engine, which is a stand-in here that computes in torch.

Kernels and the real library are in tests/gpu/test_softmax_gpu.py and test_te_head_gpu.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from packing.arrow import IGNORE
from pretrain.model.loss import fp8_head as te_head
from pretrain.model.loss.chunk import softmax_gradient_
from pretrain.model.loss.head import LowPrecisionHead, chunked_loss
from pretrain.model.loss.softmax_kernel import QuantizedGradient
from pretrain.precision import searched, transformer_engine
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.transformer_engine import TransformerEngineProduct

TOKENS, HIDDEN, VOCABULARY, CHUNK = 96, 16, 48, 32


class Storage:
    """Float8TensorStorage, of values that are kept as they are; what is not asked for is not there."""

    def __init__(self, data: Tensor | None, data_transpose: Tensor | None, fp8_scale_inv: Tensor, **kind: Any) -> None:
        self.rows, self.columns, self.scale_inv = data, data_transpose, fp8_scale_inv

    def update_usage(self, *, columnwise_usage: bool) -> None:
        assert self.columns is not None or not columnwise_usage


class Quantizer:
    def __init__(self, dtype: str) -> None:
        self.dtype, self.calls, self.force_pow_2_scales = dtype, 0, False
        self.amax, self.scale = torch.zeros(1), torch.tensor(4.0)
        self.set_usage(True, True)

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        self.usage = (rowwise, columnwise)

    def __call__(self, x: Tensor) -> Storage:
        assert x.dtype == torch.bfloat16
        self.calls += 1
        return Storage(x.float() if self.usage[0] else None, x.float().t() if self.usage[1] else None, torch.ones(1))


class StandInLinear:
    """The part of te.Linear that is used."""

    use_bias = False

    def __init__(self) -> None:
        self.quantizers = {
            "scaling_fwd": [Quantizer("kFloat8E4M3") for _ in range(3)],
            "scaling_bwd": [Quantizer("kFloat8E5M2") for _ in range(2)],
        }
        self._fp8_workspaces: dict[str, Storage] = {}
        self.prepared = 0

    def prepare_forward(self, x: Tensor) -> None:
        assert x.dtype == torch.bfloat16
        self.prepared += 1

    def end_forward(self) -> None:
        self.prepared += 1

    def _enable_weight_preswizzle(self, *_: Any) -> bool:
        return False


def general_gemm(
    left: Storage,
    right: Storage,
    out_dtype: torch.dtype,
    use_split_accumulator: bool,
    grad: bool,
    layout: str = "TN",
    out: Tensor | None = None,
    accumulate: bool = False,
) -> tuple[Tensor, None]:
    """Operands as Hopper's products read them: the inner dimension last."""
    calls.append((layout, use_split_accumulator, grad))
    left_matrix = left.rows if layout[0] == "T" else left.columns
    right_matrix = right.columns if layout[1] == "T" else right.rows
    product = (right_matrix @ left_matrix.t() * (left.scale_inv * right.scale_inv)).to(out_dtype)
    if out is None:
        return product, None
    out.copy_(out + product if accumulate else product)
    return out, None


def quantized_softmax_gradient(
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    fp8: torch.dtype,
    amax: Tensor,
    scale: Tensor | None,
    *,
    power_of_two: bool = False,
) -> tuple[Tensor, QuantizedGradient]:
    """In FP32 and in place of codes, times scales that must be taken out again."""
    assert ignore == IGNORE and fp8 == torch.float8_e5m2 and (scale is not None or amax.item() == 0)
    gradient = logits.float()
    losses = softmax_gradient_(gradient, labels)
    torch.maximum(amax, gradient.abs().amax().reshape(1), out=amax)
    scale = torch.tensor(8.0) if scale is None else scale
    of_rows = torch.arange(1.0, len(logits) + 1)
    return losses, QuantizedGradient(gradient * of_rows[:, None], (gradient * scale).t(), 1 / of_rows, (1 / scale).reshape(1))


calls: list[tuple[str, bool, bool]] = []


class Head:
    """A fused head on the stand-in, as a forward of the model has it."""

    def __init__(self, *, delayed: bool, first_module: bool = False) -> None:
        self.linear, self.updates = StandInLinear(), 0
        self.te_recipe, self.precision = SimpleNamespace(), SimpleNamespace(keeps_history=delayed)
        if not delayed:
            for gemm, split in (("fprop", False), ("dgrad", True), ("wgrad", True)):
                setattr(self.te_recipe, f"fp8_gemm_{gemm}", SimpleNamespace(use_split_accumulator=split))
        self.first_module = first_module
        self.context = PrecisionContext(None, torch.bfloat16, low_precision=True)
        te = SimpleNamespace(Float8TensorStorage=Storage, DType=SimpleNamespace(cast=lambda name: SimpleNamespace(name=name)))
        backend = SimpleNamespace(te=te, te_recipe=self.te_recipe, precision=self.precision, observer=None)
        self.low_precision = FusedHead("head", TransformerEngineProduct("head", self.linear, backend), self.context)

    def _update(self) -> None:
        self.updates += 1

    def loss(self, hidden: Tensor, weight: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
        monkeypatch.setattr(transformer_engine, "cpp_extensions", lambda: SimpleNamespace(general_gemm=general_gemm))
        monkeypatch.setattr(transformer_engine, "is_first_in_forward", lambda: self.first_module)
        monkeypatch.setattr(transformer_engine, "finish_backward", self._update)
        monkeypatch.setattr(te_head, "quantized_softmax_gradient", quantized_softmax_gradient)
        monkeypatch.setattr(searched, "multiply", lambda *args, **options: None)
        calls.clear()
        return chunked_loss(hidden, weight, None, labels, CHUNK, self.low_precision)[0]


class FusedHead(LowPrecisionHead):
    supports_fused_loss = True


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[::7] = IGNORE
    hidden, weight = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(VOCABULARY, HIDDEN).bfloat16()
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@pytest.mark.parametrize("delayed", [True, False])
def test_loss_and_gradients_are_right_and_the_products_those_of_te_linear(
    delayed: bool, tensors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, labels = tensors
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels, ignore_index=IGNORE, reduction="sum")
    (expected / 7).backward()
    head = Head(delayed=delayed)
    value = head.loss(hidden, weight, labels, monkeypatch)
    (value / 7).backward()
    assert relative_error(value, expected) < 1e-3
    assert max(relative_error(t.grad, e.grad) for t, e in zip((hidden, weight), exact, strict=True)) < 2**-7
    assert calls == [("TN", False, False), ("NN", True, True), ("NT", True, True)] * 3
    assert head.linear.prepared == 2 and head.updates == 0
    assert (head.linear.quantizers["scaling_bwd"][0].amax.item() > 0.5) == delayed  # where its history begins, or not at all


def test_the_weight_is_quantized_in_the_first_microbatch_of_a_step_and_kept(
    tensors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, labels = tensors
    weight = weight.detach().float().requires_grad_()  # cast where it is quantized
    head = Head(delayed=True)
    quantizer = head.linear.quantizers["scaling_fwd"][1]
    before = head.loss(hidden, weight, labels, monkeypatch)
    with torch.no_grad():
        weight.mul_(2)
    head.context.first_microbatch = False
    assert head.loss(hidden, weight, labels, monkeypatch) == before and quantizer.calls == 1
    head.context.first_microbatch = True
    assert head.loss(hidden, weight, labels, monkeypatch) != before and quantizer.calls == 2
