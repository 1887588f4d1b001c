"""Warnings about operands that lose many values to underflow or saturation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.observe.operand_statistics import warning_of
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.conftest import QUANTIZED, active_in


def warnings_of(recipe: str) -> Callable[[int, list[dict]], str | None]:
    """Return a function that maps a step and its records to a warning or None."""
    precision = active_in(recipe).precision
    given: set[str] = set()
    return lambda step, records: warning_of(step, precision, records, given)


def operand(role: str = "input", layer: str = "model.layers.3.mlp.down_proj", **figures) -> dict:
    return {
        "layer": layer,
        "operand": role,
        "amax": 3.5,
        "scale": 128.0,
        "underflow": 0.0,
        "saturation": 0.0,
        **figures,
    }


@pytest.mark.parametrize(
    ("recipe", "record", "remedy"),
    [
        ("delayed", operand(saturation=0.004), "fp8_config.margin"),
        ("nvfp4", operand("grad_output", underflow=0.8), "keep_bf16_layers"),
    ],
)
def test_a_warning_names_the_operand_its_share_and_the_remedy(recipe, record, remedy):
    message = warnings_of(recipe)(
        400, [operand(), operand("weight"), operand("grad_output"), record]
    )
    assert (
        message.startswith("step 400: ")
        and f"model.layers.3.mlp.down_proj's {record['operand']}" in message
    )
    assert (
        f"{100 * max(record['underflow'], record['saturation']):.1f} %" in message
        and remedy in message
    )


@pytest.mark.parametrize("recipe", QUANTIZED)
@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_first_share_above_the_limit_causes_one_warning(recipe, shares):
    limit = PRECISIONS[recipe].underflow_limit
    warn = warnings_of(recipe)
    is_warned = [
        warn(step, [operand(underflow=share)]) is not None for step, share in enumerate(shares)
    ]
    above = [share > limit for share in shares]
    assert is_warned == [is_above and not any(above[:step]) for step, is_above in enumerate(above)]
