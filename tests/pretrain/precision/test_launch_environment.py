"""Precision out of accelerate's hands: what a launch asks for is read, and nothing of it is left for accelerate to act on."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils.dataclasses import FP8BackendType

from packing.errors import InputError
from pretrain.precision import recipes
from pretrain.precision.launch_environment import take_requested_precision

# What `accelerate launch` sets for `mixed_precision: fp8` with an `fp8_config`, its own defaults and unknown keys included.
FP8 = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_RECIPE": "Block",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
    "ACCELERATE_FP8_KEEP_BF16_LAYERS": "['lm_head', 'layers.0']",
}


@pytest.mark.parametrize(
    ("environment", "recipe"),
    [
        ({}, "fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, "bf16"),
        (FP8, "block"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}, "delayed"),
        # Left over in a shell: without `mixed_precision: fp8` it asks for nothing, but accelerate would convert all the same.
        (FP8 | {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
    ],
)
def test_the_named_precision_is_read_and_its_variables_are_taken_away(environment: dict[str, str], recipe: str) -> None:
    others = {"PATH": "/bin", "ACCELERATE_USE_CPU": "true", "FP8_BACKEND": "mine"}
    environ = others | environment
    assert take_requested_precision(environ) == recipe
    assert environ == others


@pytest.mark.parametrize("named", ["fp16", "fp4", ""])
def test_what_no_recipe_stands_for_is_refused_with_a_remedy(named: str) -> None:
    with pytest.raises(InputError, match=rf"mixed_precision: {named}.*bf16"):
        take_requested_precision({"ACCELERATE_MIXED_PRECISION": named})


@pytest.mark.parametrize("environment", [FP8, {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_FP8_BACKEND": "TE"}])
def test_accelerate_converts_nothing_afterwards(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    take_requested_precision(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    try:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32))
        before, forward = [(type(module), id(module)) for module in model.modules()], model.forward
        prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert (accelerator.mixed_precision, accelerator.fp8_backend) == ("no", FP8BackendType.NO)
        assert [(type(module), id(module)) for module in prepared.modules()] == before
        assert prepared.forward == forward  # autocast would have wrapped it
        assert {parameter.dtype for parameter in prepared.parameters()} == {torch.float32}
        assert prepared(torch.randn(2, 16)).dtype == torch.float32
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_would_have_acted_on_what_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for all this: if accelerate ever lets a model alone by itself, this module can go."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        model = torch.nn.Linear(16, 32)
        assert Accelerator(cpu=True).prepare(model).forward.__func__ is not torch.nn.Linear.forward
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_recipe_is_found_by_name_and_a_mistyped_one_gets_the_nearest() -> None:
    assert recipes.find("bf16", "here").compute_dtype == "bfloat16"
    with pytest.raises(InputError, match=r"accelerate configuration: unknown precision 'bf61'; did you mean 'bf16'\?"):
        recipes.find("bf61", "accelerate configuration")
    with pytest.raises(InputError, match=r"`precision`: unknown precision 'delayed'; known: "):
        recipes.find("delayed", "`precision`")


def test_every_recipe_and_weight_dtype_is_one_of_torch_s() -> None:
    names = [recipe.compute_dtype for recipe in recipes.RECIPES.values()] + list(recipes.WEIGHT_DTYPES.values())
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names)
    assert all(name == recipe.name for name, recipe in recipes.RECIPES.items())
