"""What a run gets where the device has its precision and where it has not, on GPUs of every kind that matters."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.errors import InputError
from foundation.settings import parse
from pretrain.plan.checks import check_fit
from pretrain.precision.formats.definition import Precision
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.selection import Missing, missing_on, select_precision
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import Recipe

SMALLEST = {"name": "small", "model": {"source": "somewhere"}, "data": {"packs": "packs"}, "train": {"steps": 10}}
QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]
ON_TE = [name for name in QUANTIZED if PRECISIONS[name].te_available]


def gpu(name: str, capability: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> Missing:
    """A machine with such a GPU and Transformer Engine."""

    def missing(recipe: Precision) -> str | None:
        need = recipe.hardware.missing(capability, cuda)
        return f"needs {need}; this is an {name}" if need else None

    return missing


A100, H200, B200 = gpu("NVIDIA A100", (8, 0)), gpu("NVIDIA H200", (9, 0)), gpu("NVIDIA B200", (10, 0))
OLD_CUDA = gpu("NVIDIA H200", (9, 0), (12, 8))


def asked(recipe: Recipe) -> tuple[str, LowPrecisionSettings]:
    return recipe.precision, recipe.fp8_config


def recipe_with(precision: str, fp8_config: dict[str, Any] | None = None, **values: Any) -> Recipe:
    return parse(Recipe, SMALLEST | {"precision": precision, "fp8_config": fp8_config or {}} | values, "recipe.yaml")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_quantizes_nothing_runs_on_torch_anywhere(name: str) -> None:
    for missing in (missing_on("cpu"), A100, B200):
        active = select_precision(*asked(recipe_with(name, {"on_unsupported": "emulate", "backend": "emulation"})), missing)
        assert (active.requested, active.precision.name, active.backend, active.reason) == (name, name, "torch", None)


@pytest.mark.parametrize("name", ON_TE)
def test_a_device_that_has_it_runs_it_on_transformer_engine(name: str) -> None:
    active = select_precision(*asked(recipe_with(name)), B200)
    assert (active.requested, active.precision.name, active.backend) == (name, name, "transformer_engine")
    assert active.reason is None
    assert active.settings == LowPrecisionSettings().resolved(name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_emulation_can_be_asked_for_where_the_hardware_could(name: str) -> None:
    for missing in (missing_on("cpu"), A100, B200):
        active = select_precision(*asked(recipe_with(name, {"backend": "emulation"})), missing)
        assert (active.precision.name, active.backend, active.reason) == (name, "emulation", None)


@pytest.mark.parametrize("name", ON_TE)
def test_a_cpu_has_none_of_them_and_says_which_device_has(name: str) -> None:
    says = (
        rf"`precision: {name}` needs a GPU of compute capability .*\d\); this run is on cpu\. .*`fp8_config.on_unsupported: emul"
    )
    with pytest.raises(InputError, match=says):
        select_precision(*asked(recipe_with(name)), missing_on("cpu"))
    active = select_precision(*asked(recipe_with(name, {"on_unsupported": "emulate"})), missing_on("cpu"))
    assert (active.precision.name, active.backend) == (name, "emulation")
    assert f"`precision: {name}` needs a GPU" in active.reason


def test_the_refusal_names_device_remedies_and_what_does_run_there() -> None:
    with pytest.raises(InputError) as error:
        select_precision(*asked(recipe_with("nvfp4")), H200)
    assert str(error.value) == (
        "`precision: nvfp4` needs a GPU of compute capability 10.0 or higher (B200, GB200); this is an NVIDIA H200. "
        "Set `fp8_config.on_unsupported: emulate` to compute the same numbers slowly, `fp8_config.on_unsupported: fallback` to "
        "train in delayed, or a `precision` that runs here: fp32, bf16, delayed, current, block"
    )
    with pytest.raises(InputError, match=r"`precision: block` needs CUDA 12.9 or newer, and this torch is built for 12.8"):
        select_precision(*asked(recipe_with("block")), OLD_CUDA)


@pytest.mark.parametrize(
    ("name", "missing", "effective", "backend"),
    [
        ("nvfp4", H200, "delayed", "transformer_engine"),
        ("mxfp8", H200, "delayed", "transformer_engine"),
        ("block", OLD_CUDA, "delayed", "transformer_engine"),
        ("block", H200, "block", "transformer_engine"),
        ("nvfp4", A100, "bf16", "torch"),
        ("delayed", A100, "bf16", "torch"),
        ("current", missing_on("cpu"), "bf16", "torch"),
    ],
)
def test_fallback_is_to_delayed_scaling_where_the_device_has_that_and_else_to_bf16(
    name: str, missing: Missing, effective: str, backend: str
) -> None:
    active = select_precision(*asked(recipe_with(name, {"on_unsupported": "fallback", "scope": "linear+head"})), missing)
    assert (active.requested, active.precision.name, active.backend) == (name, effective, backend)
    assert (active.reason is None) == (name == effective)
    assert active.settings.scope == "linear+head"


def test_what_is_fallen_back_to_has_its_own_defaults_and_no_option_of_the_other() -> None:
    recipe = recipe_with("block", {"on_unsupported": "fallback", "fp8_format": "E4M3"})
    settings = select_precision(recipe.precision, recipe.fp8_config, OLD_CUDA).settings
    assert settings.options_set == LowPrecisionSettings().resolved("delayed").options_set


# What a precision cannot take


def check(precision: str, *, length: int = 128, layers: int = 4, loss: str = "chunked", **fp8_config: Any) -> ActivePrecision:
    values = {"data": {"packs": "packs", "length": length}, "loss": {"kind": loss}}
    recipe = recipe_with(precision, fp8_config | {"backend": "emulation"}, **values)
    active = select_precision(recipe.precision, recipe.fp8_config, missing_on("cpu"))
    check_fit(active, recipe, layers)
    return active


@pytest.mark.parametrize("name", QUANTIZED)
def test_packs_are_a_multiple_of_what_the_recipe_takes_tokens_in(name: str) -> None:
    multiple = PRECISIONS[name].multiple_of
    check(name, length=multiple)
    check(name, length=7 * multiple)
    with pytest.raises(
        InputError, match=rf"`data.length: {multiple + 1}` is not a multiple of {multiple}, .*are {multiple} and {2 * multiple}"
    ):
        check(name, length=multiple + 1)
    with pytest.raises(InputError, match=rf"the nearest is {multiple}$"):
        check(name, length=1)


def test_a_layer_must_be_left_to_the_precision() -> None:
    check("delayed", layers=4, keep_bf16_layers={"first": 1, "last": 2})
    for kept in ({"first": 2, "last": 2}, {"first": 9}):
        with pytest.raises(
            InputError, match=r"`fp8_config.keep_bf16_layers`: .* of 4 layers are all of them; keep fewer for `prec"
        ):
            check("delayed", layers=4, keep_bf16_layers=kept)


def test_a_loss_with_a_kernel_of_its_own_leaves_the_head_out() -> None:
    check("delayed", loss="cce")
    check("delayed", loss="reference", scope="linear+head")
    with pytest.raises(InputError, match=r"`loss.kind: cce` and `fp8_config.scope: linear\+head` contradict.*kind: chunked"):
        check("delayed", loss="cce", scope="linear+head")


def test_nothing_of_this_concerns_a_precision_that_quantizes_nothing() -> None:
    check("bf16", length=33, layers=1, loss="cce", scope="linear+head", keep_bf16_layers={"first": 1})
