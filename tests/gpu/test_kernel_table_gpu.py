"""Test the bytes and the documents of the table of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks import kernels
from pretrain.model.fused.formulas import Heads
from tests.gpu.conftest import DEVICE

HIDDEN = 64
WIDTH = 96
VOCABULARY = 160
HEADS = Heads(4, 2, 32)
LLAMA = kernels.Model(HIDDEN, WIDTH, VOCABULARY, HEADS, has_head_norms=True)
GPT2 = kernels.Model(HIDDEN, WIDTH, VOCABULARY, Heads(3, 3, 32), is_gpt2=True)
# Bytes that a kernel moves for each token, except for parameters. A BF16 value has two bytes, and a
# norm has an FP32 statistic.
GRADIENTS = 2 * (HEADS.query + 2 * HEADS.query) * HEADS.dim
COSINES_AND_SINES = 2 * HEADS.dim
QUERIES_AND_KEYS = 2 * (HEADS.query + HEADS.kv) * HEADS.dim
LABEL_AND_LOSS = 8 + 4
BYTES = {
    "norm": 4 * HIDDEN + 4,
    "norm, backward": 8 * HIDDEN + 4,
    "rotation": 4 * HEADS.width + COSINES_AND_SINES,
    "rotation, backward": GRADIENTS + QUERIES_AND_KEYS + COSINES_AND_SINES + 2 * HEADS.width,
    # Codes by rows and transposed are as large as BF16 values.
    "rotation, backward into delayed": (
        GRADIENTS + QUERIES_AND_KEYS + COSINES_AND_SINES + 2 * HEADS.width
    ),
    "activation": 6 * WIDTH,
    "activation, backward": 12 * WIDTH,
    "activation into delayed": 5 * WIDTH,
    "activation into current": 5 * WIDTH,
    "activation, backward into delayed": 11 * WIDTH,
    "activation, backward into current": 11 * WIDTH,
    "loss": 2 * VOCABULARY + LABEL_AND_LOSS,
    "loss and gradient": 4 * VOCABULARY + LABEL_AND_LOSS,
    # Each row of codes has an FP32 factor.
    "loss and gradient into delayed": 4 * VOCABULARY + LABEL_AND_LOSS + 4,
    "loss and gradient into current": 4 * VOCABULARY + LABEL_AND_LOSS + 4,
    "optimizer": 0,
}
BYTES_OF_GPT2 = BYTES | {
    # A LayerNorm has two statistics.
    "norm": 4 * HIDDEN + 8,
    "norm, backward": 8 * HIDDEN + 8,
    "rotation, backward": 2 * 2 * 9 * 32,
    "rotation, backward into delayed": 2 * 2 * 9 * 32,
    "activation": 4 * WIDTH,
    "activation, backward": 8 * WIDTH,
    "activation into delayed": 3 * WIDTH,
    "activation into current": 3 * WIDTH,
    "activation, backward into delayed": 7 * WIDTH,
    "activation, backward into current": 7 * WIDTH,
}
del BYTES_OF_GPT2["rotation"]


FAMILIES = [family for family in kernels.FAMILIES if family is not kernels.attentions]


def moved(
    model: kernels.Model, tokens: int, families: Sequence[Callable[..., Any]] = FAMILIES
) -> dict[str, int]:
    """Return the bytes that the kernels of `families` move, by the name of the kernel."""
    return {
        kernel.name: kernels.moved(kernel, kernel.call())
        for family in families
        for kernel in family(model, kernels.Inputs(DEVICE, tokens))
    }


@pytest.mark.parametrize(
    ("model", "expected"), [(LLAMA, BYTES), (GPT2, BYTES_OF_GPT2)], ids=["llama", "gpt2"]
)
def test_a_kernel_moves_each_input_and_each_result_once(
    model: kernels.Model, expected: dict[str, int]
) -> None:
    few, many = moved(model, 64), moved(model, 128)
    per_token = {name: (many[name] - few[name]) / 64 for name in few}
    assert {name: per_token[name] for name in expected} == expected


def test_the_optimizer_reads_and_writes_all_but_the_gradient() -> None:
    weights = HIDDEN * WIDTH
    # Weight, remainder and two moments are read and written. The gradient is FP32.
    expected = weights * (2 * (2 + 2 + 4 + 4) + 4) + 8
    assert moved(LLAMA, 32, [kernels.updates]) == {"optimizer": expected}


@pytest.mark.parametrize("mean", kernels.LOG_MEANS)
def test_documents_have_about_the_mean_length(mean: int) -> None:
    sizes = kernels.document_sizes(2**20, kernels.LOG_MEANS[mean])
    assert sizes.sum() == 2**20
    assert np.mean(sizes) == pytest.approx(mean, rel=0.05)
    ends = kernels.ends_of(sizes, kernels.Inputs("cpu", 2**20))
    assert len(ends) % 16 == 0 and ends.diff().sum() == 2**20
