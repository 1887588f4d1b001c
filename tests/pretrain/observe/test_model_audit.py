"""`audit` reports the products of any model, as their kernels receive the operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from foundation.errors import InputError
from pretrain.observe import product_observer
from pretrain.observe.model_audit import Audit, audit
from tests.pretrain.conftest import batch_of, llama

LAYERS = 2


def gemms(products: Audit) -> dict[str, list[str]]:
    return {
        name: sorted(product.gemm for product in products if product.name == name)
        for name in {product.name for product in products}
    }


ALL = ["dgrad", "forward", "wgrad"]
NAMES = [*(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
NAMES += [f"self_attn.{name}_proj" for name in "qkvo"]
LINEARS = {"lm_head", *(f"model.layers.{i}.{name}" for i in range(LAYERS) for name in NAMES)}


# As many tokens as features, so that the products cannot be told apart by their shapes.
@pytest.mark.parametrize("shape", [(2, 16), (3, 16), (1, 16)])
@pytest.mark.parametrize("tied", [False, True])
def test_each_linear_of_a_model_has_its_three_products(shape: tuple[int, int], tied: bool):
    products = audit(llama(tie_word_embeddings=tied), batch_of(*shape))
    assert gemms(products) == dict.fromkeys(LINEARS, ALL)
    assert {(p.left, p.right, p.engine) for p in products} == {("bfloat16", "bfloat16", "aten.mm")}


def test_recomputed_and_compiled_layers_have_the_same_products():
    model = llama(torch.float32)
    model.gradient_checkpointing_enable()
    expected = dict.fromkeys(LINEARS, ALL)
    assert gemms(audit(model, batch_of(2, 16))) == expected
    compiled = torch.compile(model, backend=lambda *_: pytest.fail("compiled"))
    assert gemms(audit(compiled, batch_of(2, 16))) == expected


def test_autocast_and_frozen_weights_are_visible():
    model = llama(torch.float32)
    model.model.layers[0].requires_grad_(False)
    batch = batch_of(2, 16)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    products = audit(model, loss)
    assert {p.left for p in products} == {"bfloat16"}
    found = gemms(products)
    assert found["model.layers.1.mlp.up_proj"] == found["lm_head"] == ALL
    assert found["model.layers.0.mlp.up_proj"] == ["dgrad", "forward"]


@pytest.mark.parametrize(
    ("build", "batch", "words"),
    [
        (lambda: nn.Linear(2, 2), {"input": torch.ones(1, 2)}, "a function that computes the loss"),
        (llama, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, "labels"),
    ],
)
def test_a_batch_without_a_loss_is_refused(build, batch, words):
    with pytest.raises(InputError, match=words):
        audit(build(), batch)


def test_gradients_are_restored():
    model = llama(torch.float32)
    batch = batch_of(2, 16)
    model(**batch).loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    audit(model, batch)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_attention_scores_and_weights_of_other_modules_are_attributed():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 6, bias=False)
            self.used = nn.Linear(4, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.linear(x, self.used.weight)
            return y @ y.mT

    block = Block()
    x = torch.randn(2, 3, 4, requires_grad=True)
    products = audit(block, lambda: block(x).sum())
    assert gemms(products)["used"] == ["dgrad", "forward"]
    assert "unused" not in gemms(products)
    assert {p.gemm for p in products if p.name == ""} == {"other"}


class FakeFP8(torch.autograd.Function):
    """A linear that multiplies FP32 tensors with E4M3 values, as an emulation without scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8.float() @ w8.float().t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8 = ctx.saved_tensors
        g8 = dy.to(torch.float8_e5m2)
        return g8.float() @ w8.float(), g8.float().t() @ x8.float()


def test_values_of_fp8_in_a_wider_dtype_are_named():
    layer = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(nn.Linear(8, 8), layer)
    layer.forward = lambda x: FakeFP8.apply(x, layer.weight)  # type: ignore[method-assign]
    products = [p for p in audit(model, lambda: model(torch.randn(8, 8)).sum()) if p.name == "1"]
    e4m3, e5m2 = "float32 with e4m3 values", "float32 with e5m2 values"
    assert [(p.gemm, p.left, p.right) for p in products] == [
        ("forward", e4m3, e4m3),
        ("dgrad", e5m2, e4m3),
        ("wgrad", e5m2, e4m3),
    ]


@pytest.mark.parametrize(
    ("scale", "kind"), [((), "tensor-scaled"), ((16, 1), "row-scaled"), ((16, 4), "in blocks of 8")]
)
def test_the_scaling_of_scaled_mm_is_that_of_its_scales(scale: tuple[int, ...], kind: str):
    operand = torch.zeros(16, 32, dtype=torch.float8_e4m3fn)
    assert product_observer.operand_kind(operand, torch.ones(scale)) == f"e4m3 {kind}"


def test_scaled_mm_is_observed():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            one = torch.ones(())
            codes = [values.detach().to(torch.float8_e4m3fn) for values in (x, self.weight.t())]
            return torch._scaled_mm(*codes, one, one, out_dtype=torch.bfloat16)

    model = nn.Sequential(nn.Embedding(16, 16), Scaled(16, 16, bias=False), nn.Linear(16, 1))
    model = model.bfloat16()
    products = audit(model, lambda: model(torch.arange(16)).sum())
    scaled = [p for p in products if p.name == "1"]
    assert [(p.gemm, p.left, p.engine) for p in scaled] == [
        ("forward", "e4m3 tensor-scaled", "aten._scaled_mm")
    ]


def test_a_module_whose_kernel_is_not_visible_is_listed():
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (x[..., None] * self.weight.t()).sum(-2)

    model = nn.Sequential(Hidden(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4))
    products = audit(model[:2], lambda: model[:2](torch.randn(2, 4)).sum())
    assert [p.gemm for p in products if p.name == "0"] == ["not visible"]
    assert gemms(products)["1"] == ["dgrad", "forward", "wgrad"]


def test_weights_of_a_subclass_are_observed_below_it():
    """The products of a tensor that consists of two tensors are two products."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    half = torch.randn(8, 8)
    model[0].weight = nn.Parameter(TwoTensor(half, half.clone()))
    x = torch.randn(8, 8)
    products = audit(model, lambda: model(TwoTensor(x, x.clone())).sum())
    found = gemms(products)
    assert found["0"] == ["forward", "wgrad"] and found["1"] == ALL


def test_the_table_joins_equal_layers():
    table = str(audit(llama(torch.float32), batch_of(2, 16))).splitlines()
    assert len(table) == 1 + 3 * 7 + 3
    assert table[1].split() == [
        *("model.layers.*.self_attn.q_proj", "Linear", "forward"),
        *("float32", "float32", "aten.mm", "2"),
    ]
