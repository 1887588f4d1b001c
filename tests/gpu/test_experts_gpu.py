"""Experts on the real grouped kernels: BF16 beside FP32, FP8 beside the emulation, and small mixtures as a run assembles them.

FP8 is for whoever has a Hopper GPU with Transformer Engine: torch's grouped product in FP8 is for these.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from pretrain.model.experts import Dispatched
from pretrain.precision.emulation import BothWays, EmulationEngine
from pretrain.precision.formats.definition import HOPPER
from pretrain.precision.gemm import Gemm, TorchGemm
from pretrain.precision.grouped import arrange
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import PRECISIONS
from tests.gpu.conftest import needs, relative_error
from tests.pretrain.conftest import active_in
from tests.pretrain.verify.small_runs import build_run

DEVICE = torch.device("cuda")
EXPERTS, CHOICES, IN, OUT = 8, 2, 256, 384
LOADS = {"even": None, "one for all": [0, 1], "some for nobody": [1, 2, 5]}

fp8_experts = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER,
    reason="torch's grouped product in FP8",
)


def problem(load: str, aligned: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """BF16 rows by expert, weights, the output's gradient, which is zero in rows of nobody, and where experts' rows end."""
    torch.manual_seed(0)
    allowed = torch.tensor(LOADS[load] or range(EXPERTS), device=DEVICE)
    chosen = allowed[torch.rand(1000, len(allowed), device=DEVICE).argsort(1)[:, :CHOICES]]
    groups = arrange(chosen, EXPERTS, aligned)
    tokens, stack = (
        torch.randn(1000, IN, device=DEVICE),
        torch.randn(EXPERTS, OUT, IN, device=DEVICE),
    )
    rows = Dispatched.apply(tokens, groups)
    dy = torch.randn(len(rows), OUT, device=DEVICE).index_fill_(0, groups.empty, 0)
    return *(each.bfloat16() for each in (rows, stack, dy)), groups.ends


def three_products(
    gemm: Gemm, rows: Tensor, stack: Tensor, dy: Tensor, ends: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    gemm.begin(rows)
    x = gemm.quantize("input", rows)
    weight = gemm.weight_operand(lambda: stack, refresh=True, differentiable=True)
    y = gemm.matmul("forward", x, weight, dtype, ends=ends)
    gemm.end()
    saved = gemm.save(x)
    gradient = gemm.quantize("grad_output", dy)
    dx = gemm.matmul("dgrad", gradient, weight, dtype, ends=ends)
    total = torch.zeros_like(stack, dtype=torch.float32)
    gemm.accumulate(total, gradient, *gemm.restore(*saved), ends=ends)
    return [y, dx, total]


@pytest.mark.parametrize("load", LOADS)
def test_bf16_experts_are_those_of_fp32_but_for_one_rounding(load: str) -> None:
    rows, stack, dy, ends = problem(load)
    gemm = TorchGemm("experts")
    in_fp32 = three_products(gemm, rows.float(), stack.float(), dy.float(), ends, torch.float32)
    for ours, theirs in zip(
        three_products(gemm, rows, stack, dy, ends, torch.bfloat16), in_fp32, strict=True
    ):
        assert relative_error(ours, theirs) <= 2**-8 and not ours.isnan().any()
        assert torch.equal(ours == 0, theirs == 0), (
            "experts of nobody get no gradient, and rows of nobody nothing"
        )


def codes_of(gemm: Gemm, role: str, x: Tensor) -> Tensor:
    operand = gemm.quantize(role, x)
    codes = gemm.codes(operand)
    if not isinstance(operand, BothWays):
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float()


@fp8_experts
@pytest.mark.parametrize("precision", ["current", "delayed"])
@pytest.mark.parametrize("load", LOADS)
def test_fp8_experts_are_the_emulated_ones(load: str, precision: str) -> None:
    """Codes to the bit; products but for the order of sums, in which Hopper's FP8 units keep fewer bits, and BF16's rounding.
    Delayed scales are what one microbatch has left."""
    rows, stack, dy, ends = problem(load)
    both = []
    with ExitStack() as entered, torch.no_grad():
        for by in ("transformer_engine", "emulation"):
            (engine,) = make_engines(
                [active_in(needs(precision), by, fp8_format="E4M3")], DEVICE
            ).values()
            both.append(engine.gemm("experts", IN, OUT))
            entered.enter_context(engine.forward())
        for ours, theirs in zip(
            *(three_products(each, rows, stack, dy, ends, torch.bfloat16) for each in both),
            strict=True,
        ):
            assert relative_error(ours, theirs) <= 2**-7
            assert torch.equal((ours == 0).all(-1), (theirs == 0).all(-1)), "rows of nobody"
        for role, x in (("input", rows), ("weight", stack), ("grad_output", dy)):
            both[0].begin(rows)
            assert torch.equal(*(codes_of(each, role, x) for each in both)), role
            both[0].end()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "delayed", "current"])
def test_audit_parity_and_two_steps_of_a_small_mixture(
    precision: str, recompute: bool, accelerator: Accelerator
) -> None:
    low = PRECISIONS[needs(precision)].quantized
    options = {"fp8_format": "E4M3"} if low else {}
    run = build_run(
        accelerator, precision, "qwen3_moe", weights="bf16_exact", recompute=recompute, **options
    )
    entries = {entry["name"]: entry for entry in run.audit()}
    expert = entries["model.layers.0.mlp.experts.down_proj"]
    in_fp8 = low and torch.cuda.get_device_capability() == HOPPER
    assert expert["effective"] == (precision if in_fp8 else "bf16")
    assert not in_fp8 or expert["products"]["wgrad"] == "e4m3 tensor-scaled x e4m3 tensor-scaled"
    run.confirm([*entries.values()])
    run.train([*entries.values()])
    assert run.parity().failures == []


def test_experts_stay_in_bf16_where_gradients_would_be_e5m2(accelerator: Accelerator) -> None:
    needs("delayed")
    entries = {
        entry["name"]: entry for entry in build_run(accelerator, "delayed", "qwen3_moe").audit()
    }
    expert = entries["model.layers.0.mlp.experts.down_proj"]
    assert expert["effective"] == "bf16" and expert["reason"]


def test_emulated_experts_are_the_same_on_a_gpu() -> None:
    rows, stack, dy, ends = problem("some for nobody", aligned=32)
    results = []
    for device in ("cuda", "cpu"):
        engine = EmulationEngine(active_in("mxfp8"), torch.device(device))
        gemm = engine.gemm("experts", IN, OUT)
        inputs = (tensor.to(device) for tensor in (rows, stack, dy, ends))
        results.append([y.cpu() for y in three_products(gemm, *inputs, torch.float32)])
    for on_gpu, on_cpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-4)


def test_a_routers_logits_are_not_rounded_to_bf16(accelerator: Accelerator) -> None:
    router = build_run(accelerator, "bf16", "qwen3_moe", weights="bf16_exact").layers[0].mlp.gate
    x = torch.randn(64, router.weight.shape[1], dtype=torch.bfloat16, device=DEVICE)
    torch.testing.assert_close(
        router(x)[0].double(), x.double() @ router.weight.double().T, rtol=1e-5, atol=1e-6
    )
