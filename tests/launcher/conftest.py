"""A fixture of the launcher's tests, which changes the small recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# torch.compile imports setuptools. This import fails if a test has imported distutils before.
import setuptools  # noqa: F401

from tests.conftest import Finished, Trainer

LOW = ("precision=delayed", "weights=bf16_exact", "fp8_config.on_unsupported=emulate")


# A mixture of experts in two layers.
EXPERTS = (
    "model.config={model_type: olmoe, vocab_size: 61, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, num_experts: 4, "
    "num_experts_per_tok: 2, output_router_logits: true, router_aux_loss_coef: 0.01, "
    "max_position_embeddings: 64, tie_word_embeddings: true}"
)


@pytest.fixture
def started(train_here: Trainer) -> Callable[..., Finished]:
    """Function that trains five steps of two microbatches in a folder, and saves each of them.

    The weights are exact BF16.
    """
    train_here.recipe |= {
        "train": {"steps": 5},
        "evaluate": {},
        "checkpoint": {"every": 1, "keep": 9},
        "weights": "bf16_exact",
        "batch": {"tokens": 128, "microbatch": 2},
        "fp8_config": {"on_unsupported": "emulate"},
        "schedule": {"kind": "constant"},
    }

    def start(folder: str, *arguments: str, **options: Any) -> Finished:
        run = train_here(f"run_dir={train_here.folder / folder}", *arguments, **options).done()
        assert "Traceback" not in run.output, run.output
        return run

    return start
