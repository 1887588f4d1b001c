"""Kernels that check themselves, and the doctor, on a GPU: real kernels agree, broken ones are found, and each takes its time.

The Triton kernels' cases run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pretrain import __main__ as commands
from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.fused import rotary, rotary_kernel
from pretrain.model.fused.layers import not_fused_because
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.precision.transformer_engine import unavailable_because
from pretrain.run.trial import QWEN3_1_7B
from pretrain.settings.recipe import LossSettings, ModelSettings
from pretrain.verify.kernels import TABLE, choose, try_kernel
from pretrain.verify.one_layer import Situation
from pretrain.verify.operands import compare_operands
from tests.gpu import interpreted
from tests.gpu.interpreted import GPU_OR_INTERPRETER, INTERPRETED, cuda_only

DEVICE = torch.device(interpreted.DEVICE)
pytestmark = [
    *GPU_OR_INTERPRETER,
    pytest.mark.usefixtures("conversions_that_round"),
]
QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]
SMALLER = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@cache
def situation(precision: str, small: bool = False, dim: int = 64) -> Situation:
    """Of a run with defaults, Qwen3-1.7B's shape or a smaller one."""
    backend = "transformer_engine" if PRECISIONS[precision].quantized else "torch"
    active = ActivePrecision(precision, PRECISIONS[precision], backend, LowPrecisionSettings().resolved(precision))
    config = QWEN3_1_7B | (SMALLER | {"head_dim": dim} if small else {})
    fused = INTERPRETED or not_fused_because("auto", active, DEVICE.type, torch.bfloat16) is None
    return Situation(
        device=DEVICE,
        hf=model.build_on_meta(model.load_config(ModelSettings(config=config))),
        length=4096,
        active=active,
        attention="packed_sdpa",
        fused=fused,
        loss=LossSettings(),
        weights="bf16_exact",
        gradients=torch.float32,
        moments=torch.float32,
    )


def hardware(name: str) -> str:
    """`name`, or the test is skipped where this machine does not compute it."""
    if missing := unavailable_because(PRECISIONS[name]):
        pytest.skip(f"{name} needs {missing}")
    return name


# ── Triton's kernels: right, and broken ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rotated_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "has_kernel", lambda rows, heads: True)


@pytest.mark.usefixtures("rotated_by_kernel")
def test_the_rotations_kernels_agree_and_a_broken_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = situation("bf16", small=True)
    verdict = try_kernel(TABLE["rotation"], run)
    assert verdict.agrees and len(verdict.errors) == 6, verdict
    right = rotary_kernel.rotate_backward

    def wrong(*arguments: Any) -> tuple[Tensor, ...]:
        gradient, *norms = right(*arguments)
        return 1.1 * gradient, *norms

    monkeypatch.setattr(rotary_kernel, "rotate_backward", wrong)
    assert try_kernel(TABLE["rotation"], run).worst == "gradient" and not try_kernel(TABLE["rotation"], run).agrees


@cuda_only
def test_the_softmax_agrees_and_a_broken_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretrain.model.loss import softmax_kernel

    verdict = try_kernel(TABLE["loss"], situation("bf16"))
    assert verdict.agrees, verdict
    right = softmax_kernel.softmax_gradient_
    monkeypatch.setattr(softmax_kernel, "softmax_gradient_", lambda logits, labels, ignore: right(logits, labels.roll(1), ignore))
    assert not try_kernel(TABLE["loss"], situation("bf16")).agrees


# ── Transformer Engine's ──────────────────────────────────────────────────────────────────────────────────────────────────────


@cuda_only
@pytest.mark.parametrize("precision", QUANTIZED)
def test_the_librarys_operands_are_read_and_are_ours_bit_for_bit(precision: str) -> None:
    found = dict(compare_operands(situation(hardware(precision)).active, DEVICE))
    assert len(found) >= 3 and {name: differs for name, differs in found.items() if differs} == {}


@cuda_only
@pytest.mark.parametrize("precision", ["fp32", "bf16", *QUANTIZED])
def test_every_kernel_of_a_run_agrees_and_the_time_it_takes_is_shown(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time: the first compiles what the run would compile."""
    if PRECISIONS[precision].quantized:
        hardware(precision)
    run = situation(precision)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    choice = attention.choose("auto", "cuda", run.heads, dtype, run.length)
    run = replace(run, attention=choice.name)
    first = choose(run, choice, "auto", "auto")
    torch.cuda.synchronize()
    began = time.perf_counter()
    chosen = choose(run, choice, "auto", "auto")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n{precision}: {seconds:.2f} s, first {sum(each.seconds for each in first.verdicts):.2f} s")
        for verdict in first.verdicts:
            print(f"  {verdict.kernel} {verdict} in {verdict.seconds:.2f} s")
    assert all(verdict.agrees for verdict in chosen.verdicts) and chosen.not_fused is None
    assert chosen.attention == choice
    names = {verdict.kernel.split()[0] for verdict in chosen.verdicts}
    assert names >= {"attention", "loss", "optimizer"} and (precision not in QUANTIZED or names >= {"products", "layer"})


@cuda_only
@pytest.mark.parametrize("precision", ["bf16", *QUANTIZED])
def test_products_and_layers_agree_for_tokens_that_are_no_whole_tiles(precision: str) -> None:
    """Other kernels may take them: the library's activation where ours wants whole tiles, and its transform in two."""
    multiple = PRECISIONS[precision].multiple_of
    if PRECISIONS[precision].quantized:
        hardware(precision)
    for beyond in (each for each in (multiple, 96) if each % multiple == 0):
        run = replace(situation(precision), tokens=2 * 4096 + beyond)
        kinds = ["layer", "products"] if precision in QUANTIZED else ["layer"]
        verdicts = [try_kernel(TABLE[kind], run) for kind in kinds]
        assert all(verdict.agrees for verdict in verdicts), (beyond, verdicts)


@cuda_only
def test_a_broken_librarys_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch.module.linear as te_linear

    run = situation(hardware("current"), small=True)
    right = te_linear.general_gemm

    def wrong(*operands: Any, **options: Any) -> Any:
        product, *rest = right(*operands, **options)
        return product * 1.25, *rest

    monkeypatch.setattr(te_linear, "general_gemm", wrong)
    verdict = try_kernel(TABLE["products"], run)
    broken = {name: error for name, error in verdict.errors.items() if not name.startswith("searched")}  # those are our own calls
    assert verdict.failure is None and not verdict.agrees, verdict
    assert broken and min(broken.values()) > 0.2, verdict


# ── The command ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cuda_only
def test_the_doctor_makes_its_table_on_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    precisions = ["bf16", "mxfp4", *(name for name in ("current", "mxfp8") if not unavailable_because(PRECISIONS[name]))]
    assert commands.main(["doctor", "--precisions", ",".join(precisions)]) == 0
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{said}")
    assert all(f"| {name} " in said for name in precisions) and "Traceback" not in said and "TE None" not in said
    assert "| emulation " in said, "mxfp4 is tried, not timed"


@cuda_only
def test_the_full_examination_of_a_precision_passes_on_this_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, out = hardware("current"), tmp_path / "doctor.md"
    status = commands.main(["doctor", "--full", "--precisions", name, "--out", str(out)])
    text = out.read_text()
    with capsys.disabled():
        print(f"\n{text.partition('## Figures')[0]}")
    found = json.loads(text.partition("```json\n")[2].partition("```")[0])["findings"][name]
    assert status == 0 and {each["status"] for each in found} == {"passed"}, text
    assert all(each["seconds"] >= 0 for each in found)
    assert {"speed of a layer", "parity at step 0", "audit", "resuming", "ten steps"} <= {each["part"] for each in found}
