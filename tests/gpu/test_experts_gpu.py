"""Test experts on the grouped CUDA kernels, and small mixtures as a run assembles them.

BF16 is compared with FP32, and FP8 with its emulation. torch's grouped GEMM in FP8 needs a Hopper
GPU and Transformer Engine.
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
EXPERTS = 8
CHOICES = 2
IN = 256
OUT = 384
# Experts that tokens may choose. None: all of them.
LOADS = {"even": None, "two experts": [0, 1], "three experts": [1, 2, 5]}

fp8_experts = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER,
    reason="torch's grouped GEMM in FP8 needs a Hopper GPU",
)


def problem(load: str, aligned: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows sorted by expert, stacked weights, the output's gradient and the experts' ends.

    The first three are BF16. The gradient is zero in padding rows.
    """
    torch.manual_seed(0)
    allowed = torch.tensor(LOADS[load] or range(EXPERTS), device=DEVICE)
    chosen = allowed[torch.rand(1000, len(allowed), device=DEVICE).argsort(1)[:, :CHOICES]]
    groups = arrange(chosen, EXPERTS, aligned)
    tokens = torch.randn(1000, IN, device=DEVICE)
    stack = torch.randn(EXPERTS, OUT, IN, device=DEVICE)
    rows = Dispatched.apply(tokens, groups)
    dy = torch.randn(len(rows), OUT, device=DEVICE).index_fill_(0, groups.empty_rows, 0)
    return rows.bfloat16(), stack.bfloat16(), dy.bfloat16(), groups.ends


def three_products(
    gemm: Gemm, rows: Tensor, stack: Tensor, dy: Tensor, ends: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output and the gradients of the rows and of the stacked weights."""
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
def test_bf16_experts_equal_fp32_within_one_rounding(load: str) -> None:
    rows, stack, dy, ends = problem(load)
    gemm = TorchGemm("experts")
    in_fp32 = three_products(gemm, rows.float(), stack.float(), dy.float(), ends, torch.float32)
    in_bf16 = three_products(gemm, rows, stack, dy, ends, torch.bfloat16)
    for actual, expected in zip(in_bf16, in_fp32, strict=True):
        assert relative_error(actual, expected) <= 2**-8
        assert not actual.isnan().any()
        assert torch.equal(actual == 0, expected == 0), (
            "padding rows and the gradients of unchosen experts are zero"
        )


def codes_of(gemm: Gemm, role: str, x: Tensor) -> Tensor:
    """Return the FP8 codes of an operand as FP32."""
    operand = gemm.quantize(role, x)
    codes = gemm.codes(operand)
    if not isinstance(operand, BothWays):
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float()


@fp8_experts
@pytest.mark.parametrize("precision", ["current", "delayed"])
@pytest.mark.parametrize("load", LOADS)
def test_fp8_experts_equal_the_emulation(load: str, precision: str) -> None:
    """Codes are equal bit for bit. Products differ by the order of sums and by BF16's rounding.

    Hopper's FP8 units keep fewer bits in sums. Delayed scales come from one earlier microbatch.
    """
    rows, stack, dy, ends = problem(load)
    gemms = []
    with ExitStack() as forwards, torch.no_grad():
        for engine_name in ("transformer_engine", "emulation"):
            active = active_in(needs(precision), engine_name, fp8_format="E4M3")
            (engine,) = make_engines([active], DEVICE).values()
            gemms.append(engine.gemm("experts", IN, OUT))
            forwards.enter_context(engine.forward())
        results = [three_products(gemm, rows, stack, dy, ends, torch.bfloat16) for gemm in gemms]
        for actual, emulated in zip(*results, strict=True):
            assert relative_error(actual, emulated) <= 2**-7
            assert torch.equal((actual == 0).all(-1), (emulated == 0).all(-1)), "padding rows"
        for role, x in (("input", rows), ("weight", stack), ("grad_output", dy)):
            gemms[0].begin(rows)
            assert torch.equal(*(codes_of(gemm, role, x) for gemm in gemms)), role
            gemms[0].end()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "delayed", "current"])
def test_a_small_mixture_trains_and_passes_audit_and_parity(
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
    audit = build_run(accelerator, "delayed", "qwen3_moe").audit()
    entries = {entry["name"]: entry for entry in audit}
    expert = entries["model.layers.0.mlp.experts.down_proj"]
    assert expert["effective"] == "bf16"
    assert expert["reason"]


def test_emulated_experts_are_the_same_on_cpu_and_gpu() -> None:
    rows, stack, dy, ends = problem("three experts", aligned=32)
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
