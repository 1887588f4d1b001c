"""The registry: it finds each format file, every precision answers what the rest asks, and only format files know names."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from foundation.errors import InputError
from pretrain.metrics.peaks import PeakDtype
from pretrain.precision import formats, registry, settings
from pretrain.precision.formats.definition import Hardware
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import OPTIONS, LowPrecisionSettings

ROOT = Path(__file__).parents[3]
QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]


def test_the_dtypes_of_precisions_and_weights_are_torchs() -> None:
    names = [precision.compute_dtype for precision in PRECISIONS.values()] + list(registry.WEIGHT_DTYPES.values())
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names)
    assert all(name == precision.name for name, precision in PRECISIONS.items())
    assert {precision.peak for precision in PRECISIONS.values()} <= set(get_args(PeakDtype))


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_default_of_a_precision_is_a_value_that_its_key_can_have(name: str) -> None:
    options = PRECISIONS[name].options
    assert set(options) <= set(OPTIONS)
    defaults = {key: option.default for key, option in options.items()}
    assert LowPrecisionSettings.model_validate(defaults).contradictions(PRECISIONS[name]) == []
    assert all(PRECISIONS[name].takes(key, value) for key, value in defaults.items())


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantized_precision_has_an_accelerate_configuration_that_states_its_options(name: str) -> None:
    written = [yaml.safe_load(path.read_text()).get("fp8_config", {}) for path in ROOT.glob("accelerate_configs/*.yaml")]
    (ours,) = [fp8_config for fp8_config in written if fp8_config.get("recipe") == name]
    backend = "TE" if PRECISIONS[name].te_available else "emulation"
    expected = LowPrecisionSettings(backend=backend).resolved(name).model_dump(mode="json")
    assert {key: ours.get(key) for key in expected} == expected


def test_a_key_of_fp8_config_belongs_to_all_precisions_or_is_taken_by_one() -> None:
    general = {"backend", "scope", "on_unsupported", "keep_bf16_layers", "keep_bf16", "use_autocast_during_eval"}
    assert set(LowPrecisionSettings.model_fields) == general | set(OPTIONS)


A100, L40S, H200, B200, RTX_5090 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
HAVE = {
    "delayed": {L40S, H200, B200, RTX_5090},
    "current": {L40S, H200, B200, RTX_5090},
    "block": {H200, B200, RTX_5090},
    "mxfp8": {B200},  # not all of its products exist for consumer Blackwell
    "nvfp4": {B200, RTX_5090},
}


@pytest.mark.parametrize("name", HAVE)
def test_a_precision_runs_on_the_gpus_that_transformer_engine_supports_it_on(name: str) -> None:
    hardware = PRECISIONS[name].hardware
    gpus = (A100, L40S, H200, B200, RTX_5090)
    assert {gpu for gpu in gpus if hardware.missing(gpu, (13, 0)) is None} == HAVE[name]
    assert "a GPU of compute capability" in hardware.missing(None, None)


@pytest.mark.parametrize("name", HAVE)
def test_rows_of_codes_begin_at_16_bytes_whatever_sizes_a_precision_takes(name: str) -> None:
    """cuBLAS wants it of each operand, and every size is a row's in one of the three products. With NVFP4 in multiples of 16 the
    products of other sizes than multiples of 32 failed (TransformerEngine#2956)."""
    precision = PRECISIONS[name]
    bits = {"FP8": 8, "E2M1": 4}[precision.format_name]
    assert precision.multiple_of * bits % (16 * 8) == 0


def test_what_a_device_lacks_is_said_in_words() -> None:
    assert PRECISIONS["nvfp4"].hardware.missing(H200, (13, 0)) == "a GPU of compute capability 10.0 or higher (B200, GB200)"
    assert "10.0 or higher and below 12.0" in PRECISIONS["mxfp8"].hardware.missing(RTX_5090, (13, 0))
    hopper = Hardware((9, 0), "H100", cuda=(12, 9))
    assert hopper.missing(H200, (12, 8)) == "CUDA 12.9 or newer, and this torch is built for 12.8"
    assert hopper.missing(H200, None) == "CUDA 12.9 or newer, and this torch is built for none"
    assert hopper.missing(H200, (12, 9)) is None and hopper.missing(H200, (13, 0)) is None


def test_a_precision_is_found_by_name_and_a_mistyped_one_gets_the_nearest() -> None:
    assert registry.find("bf16", "here").compute_dtype == "bfloat16"
    with pytest.raises(
        InputError, match=r"accelerate configuration: unknown precision 'bf61'; did you mean 'bf16'\? known: fp32"
    ):
        registry.find("bf61", "accelerate configuration")
    with pytest.raises(InputError, match=r"`precision`: unknown precision 'posit'; known: fp32, bf16, delayed, "):
        registry.find("posit", "`precision`")


@pytest.mark.parametrize("name", ["fp8", "FP8", "fp4"])
def test_the_name_of_a_family_is_answered_with_the_precisions_of_it(name: str) -> None:
    members = [precision.name for precision in PRECISIONS.values() if precision.peak == name.lower()]
    says = registry.unknown(name)
    assert says.startswith(f"unknown precision {name!r}; the {name.upper()} precision") and "did you mean" not in says
    assert " and ".join(members[-2:]) in says.partition(";")[2] and all(member in says for member in members)


def test_a_file_beside_the_others_is_a_precision_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "posit.py").write_text(
        "from pretrain.precision.formats.definition import Precision\n"
        "class Posit(Precision):\n    name = 'posit'\n    order = 15\n"
        "PRECISION = Posit()\n"
    )
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    found = list(registry._discover())
    assert found == ["fp32", "bf16", "posit", *QUANTIZED]


def test_precisions_that_share_a_key_must_mean_the_same_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    key, option = next(iter(PRECISIONS["current"].options.items()))
    other = type(PRECISIONS["current"])()
    other.options = {key: replace(option, meaning="something else")}
    monkeypatch.setitem(settings.PRECISIONS, "other", other)
    with pytest.raises(ValueError, match=f"declares its option '{key}' otherwise"):
        settings._declared()


def test_every_option_is_documented_where_its_key_is_parsed() -> None:
    for precision in PRECISIONS.values():
        for key, option in precision.options.items():
            assert LowPrecisionSettings.model_fields[key].description == option.meaning != ""


def names_in(path: Path) -> list[str]:
    """Where a module knows a precision by its name, which `weights` and dtypes share with the unquantized ones."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        by_name = isinstance(node, ast.Constant) and node.value in QUANTIZED
        if isinstance(node, ast.Compare | ast.Subscript | ast.Match) and "precision" in ast.unparse(node).lower():
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            by_name = not constants.isdisjoint(PRECISIONS)
        if by_name:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def test_nothing_but_a_format_file_knows_a_precision_by_its_name() -> None:
    folders = (*ROOT.glob("pretrain/**/*.py"), *ROOT.glob("packing/*.py"), ROOT / "train_accelerate.py")
    assert [place for path in folders if path.stem not in PRECISIONS for place in names_in(path)] == []
    assert names_in(ROOT / "pretrain/precision/formats/current.py"), "the search finds names where there are some"
