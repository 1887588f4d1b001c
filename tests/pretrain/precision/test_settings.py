"""All precisions, their keys of `fp8_config`, and the selection of a precision on a device."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.precision.formats.definition import Precision
from pretrain.precision.selection import SupportCheck, select_precision, support_check_on
from pretrain.precision.settings import OPTIONS, PRECISIONS, ActivePrecision, LowPrecisionSettings
from tests.conftest import ROOT
from tests.pretrain.conftest import ON_TE, QUANTIZED

# ── Precisions ─────────────────────────────────────────────────────────────────────────


A100, RTX_3090, L40S, H200, B200, B300 = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3)
RTX_5090, SPARK = (12, 0), (12, 1)
GPUS = (A100, RTX_3090, L40S, H200, B200, B300, RTX_5090, SPARK)
# For each precision, the GPUs on which Transformer Engine 2.20 trains in it, and a part of the
# message for the other GPUs. The sources are NVIDIA/TransformerEngine and the page
# https://nvidia.github.io/TransformerEngine/support_matrix.html.
SUPPORTED = {
    # pytorch/quantization.py, _compute_fp8_support: 8.9. The page says yes for 8.9 to 12.0. On 12.x
    # a product needs the layout TN, as on Hopper (nvte_is_non_tn_fp8_gemm_supported).
    "delayed": ({L40S, H200, B200, B300, RTX_5090, SPARK}, "8.9 or higher (L40S"),
    "current": ({L40S, H200, B200, B300, RTX_5090, SPARK}, "8.9 or higher (L40S"),
    # _compute_fp8_block_scaling_support: 9.0. From 10.0 on, pytorch/csrc/extensions/gemm.cpp
    # computes MXFP8 products in the layout TN, which cuBLAS supports on 12.x too (its section
    # "Narrow Precision Data Types Usage"). The page says yes for 12.0, and
    # tests/pytorch/distributed/fsdp2_tests trains in it on 12.0. Issue 2382 reports a training on
    # 12.0 that did not converge. It has neither code nor an answer.
    "block": ({H200, B200, B300, RTX_5090, SPARK}, "9.0 or higher (H100"),
    # _compute_mxfp8_support: 10.0 to below 12.0. docs/features/low_precision_training/mxfp8:
    # "SM 10.0, SM 10.3".
    "mxfp8": ({B200, B300}, "10.0 or higher and below 11.0 (B200"),
    # _compute_nvfp4_support: 10.0. docs/features/low_precision_training/nvfp4: "Training: SM 10.0,
    # SM 10.3". The FSDP2 tests skip NVFP4 on 12.x. Issue 3062 (default recipe) and pull request
    # 3281 (zeros instead of gradients) describe the faults on 12.x.
    "nvfp4": ({B200, B300}, "10.0 or higher and below 11.0 (B200"),
    "mxfp4": (set(), "a kernel, but no release"),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_precision_needs_the_gpus_on_which_transformer_engine_trains(
    name: str, gpu: tuple[int, int]
) -> None:
    gpus, range_of_gpus = SUPPORTED[name]
    need = PRECISIONS[name].hardware.unmet_need(gpu)
    assert (need is None) == (gpu in gpus)
    assert need is None or range_of_gpus in need
    assert range_of_gpus in PRECISIONS[name].hardware.unmet_need(None)


def test_the_refusal_names_the_gpu_its_capability_and_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: RTX_5090)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 5090")
    assert support_check_on("cuda")(PRECISIONS["nvfp4"]) == (
        "needs a GPU of compute capability 10.0 or higher and below 11.0 (B200, B300; Transformer "
        "Engine does not train in NVFP4 on later GPUs); this is an NVIDIA GeForce RTX 5090 of "
        "compute capability 12.0"
    )


def names_in(path: Path) -> list[str]:
    """Return the places at which a module names a precision.

    Every name of a quantized precision counts. "fp32" and "bf16" are also names of dtypes and
    values of `weights`. They count only in a comparison, subscript or match that contains
    "precision".
    """
    places = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_name = isinstance(node, ast.Constant) and node.value in QUANTIZED
        if (
            isinstance(node, ast.Compare | ast.Subscript | ast.Match)
            and "precision" in ast.unparse(node).lower()
        ):
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            is_name = not constants.isdisjoint(PRECISIONS)
        if is_name:
            line = ast.unparse(node).splitlines()[0]
            places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {line}")
    return places


def test_only_format_files_name_a_precision() -> None:
    files = [*ROOT.glob("pretrain/**/*.py"), *ROOT.glob("packing/*.py")]
    files = [file for file in files if file.stem not in {"unquantized", *PRECISIONS}]
    places = [names_in(path) for path in (*files, ROOT / "train_accelerate.py")]
    assert not any(places), places
    # The search finds the names in a format file.
    assert names_in(ROOT / "pretrain/precision/formats/current.py")


# ── `fp8_config` ───────────────────────────────────────────────────────────────────────

VALUES = {
    "fp8_format": ["HYBRID", "E4M3"],
    "margin": [0, 3],
    "amax_history_len": [1, 1024],
    "amax_compute_algo": ["max", "most_recent"],
    "disable_rht": [False, True],
    "disable_stochastic_rounding": [False, True],
}
GENERAL = {
    "backend": st.sampled_from(["TE", "emulation"]),
    "scope": st.sampled_from(["linear", "linear+head"]),
    "on_unsupported": st.sampled_from(["error", "emulate", "fallback"]),
    "keep_bf16_layers": st.fixed_dictionaries(
        {}, optional={"first": st.integers(0, 3), "last": st.integers(0, 3) | st.none()}
    ),
    "keep_bf16": st.lists(st.sampled_from(["down_proj", "layers.0.*"]), max_size=2),
    "use_autocast_during_eval": st.booleans(),
}
SETTINGS = st.fixed_dictionaries(
    {}, optional=GENERAL | {key: st.sampled_from([None, *values]) for key, values in VALUES.items()}
).map(LowPrecisionSettings.model_validate)
NAMES = st.sampled_from(sorted(PRECISIONS))


@given(SETTINGS, NAMES)
def test_resolved_settings_have_exactly_the_options_of_the_precision(
    settings: LowPrecisionSettings, name: str
):
    resolved = settings.resolved(name)
    defaults = PRECISIONS[name].options
    for key in OPTIONS:
        chosen = getattr(settings, key)
        expected = (defaults[key] if chosen is None else chosen) if key in defaults else None
        assert getattr(resolved, key) == expected
    assert all(getattr(resolved, key) == getattr(settings, key) for key in GENERAL)
    assert resolved.resolved(name) == resolved
    assert LowPrecisionSettings.model_validate(resolved.model_dump(mode="json")) == resolved


# ── Selection ──────────────────────────────────────────────────────────────────────────


def gpu(capability: tuple[int, int]) -> SupportCheck:
    """Return the check of a machine with Transformer Engine and a GPU of this capability."""

    def unsupported_because(precision: Precision) -> str | None:
        need = precision.hardware.unmet_need(capability)
        return f"needs {need}; this is another" if need else None

    return unsupported_because


CPU = support_check_on("cpu")


def select(name: str, unsupported_because: SupportCheck, **fp8_config: Any) -> ActivePrecision:
    return select_precision(name, LowPrecisionSettings(**fp8_config), unsupported_because)


@pytest.mark.parametrize("name", ON_TE)
def test_a_supported_gpu_uses_transformer_engine_and_a_cpu_emulates(name: str) -> None:
    active = select(name, gpu(B200))
    assert (active.precision.name, active.engine) == (name, "transformer_engine")
    assert active.reason is None and active.settings == LowPrecisionSettings().resolved(name)
    emulated = select(name, CPU, on_unsupported="emulate")
    assert (emulated.precision.name, emulated.engine) == (name, "emulation")
    assert "needs a GPU" in emulated.notice


@pytest.mark.parametrize(
    ("name", "unsupported_because", "words"),
    [
        *((name, CPU, "needs a GPU .*this run is on cpu.*`fp8_config.on_uns") for name in ON_TE),
        ("nvfp4", gpu(H200), r"10\.0.*emulate` .*fallback`, or `precision: delayed`, to train in"),
        ("mxfp4", gpu(B200), "needs a kernel, but no release"),
    ],
)
def test_a_refusal_names_the_need_and_remedies(
    name: str, unsupported_because: SupportCheck, words: str
) -> None:
    with pytest.raises(InputError, match=f"`precision: {name}` .*{words}"):
        select(name, unsupported_because)


@pytest.mark.parametrize(
    ("name", "unsupported_because", "effective", "engine"),
    [
        ("mxfp8", gpu(H200), "delayed", "transformer_engine"),
        ("block", gpu(H200), "block", "transformer_engine"),
        ("delayed", gpu(A100), "bf16", "torch"),
        ("current", CPU, "bf16", "torch"),
    ],
)
def test_fallback_is_delayed_scaling_if_supported_and_else_bf16(
    name: str, unsupported_because: SupportCheck, effective: str, engine: str
) -> None:
    # An option of the requested precision is none of the other one.
    of_mxfp8 = {"fp8_format": "E4M3"} if name == "mxfp8" else {}
    active = select(
        name, unsupported_because, on_unsupported="fallback", scope="linear+head", **of_mxfp8
    )
    assert (active.requested, active.precision.name, active.engine) == (name, effective, engine)
    assert (active.reason is None) == (name == effective)
    used = LowPrecisionSettings(on_unsupported="fallback", scope="linear+head")
    assert active.settings == used.resolved(effective)
