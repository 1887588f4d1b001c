"""Compare caps and sinks of FlashAttention-4 with the formula, and train models with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from pretrain.model import attention, attention_backends
from pretrain.model.fused.formulas import Heads
from tests.gpu.conftest import cuda_only, needs, relative_error
from tests.gpu.test_attention_gpu import DOCUMENTS, LENGTH, SCALE, draw, offsets
from tests.pretrain.model.test_scores_and_logits import CHANGED_SCORES

pytestmark = cuda_only
# Gemma 2 of 27 and of 2 billion parameters, and gpt-oss.
SHAPES = [(Heads(32, 16, 128), 50.0), (Heads(8, 4, 256), 50.0), (Heads(64, 8, 64), 0.0)]


def case_of(heads: Heads) -> attention_backends.Case:
    return attention_backends.Case(
        "cuda", heads.dim, torch.bfloat16, changed_scores="capped scores"
    )


def results_of(
    backend: str, inputs: list[Tensor], d_output: Tensor, **options: Any
) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys, values and sinks."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    *states, sinks = leaves
    cu_seqlens = offsets(options.pop("sizes"), 7)
    # A model with a cap has no sinks.
    if options["softcap"]:
        sinks = None
        leaves = states
    name = f"packed_{backend}"
    documents = attention.documents_for(name, cu_seqlens, LENGTH, states[0].shape[2])
    output, _ = AttentionInterface()[name](
        None,
        *states,
        None,
        cu_seqlens=cu_seqlens,
        max_seqlen=LENGTH,
        documents=documents,
        scaling=SCALE,
        s_aux=sinks,
        **options,
    )
    return [output.detach(), *torch.autograd.grad(output, leaves, d_output.to(output.dtype))]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("heads", "cap"), SHAPES, ids=str)
def test_flash_attention_4_computes_caps_and_sinks(
    heads: Heads, cap: float, window: int | None, documents: str
) -> None:
    if obstacle := attention_backends.obstacle("flash_attn", case_of(heads)):
        pytest.skip(f"flash_attn {obstacle}")
    sizes = DOCUMENTS[documents]
    *states, d_output = draw(heads, sum(sizes))
    # Larger queries, so that the cap has an effect.
    states[0] = states[0] * (20 if cap else 1)
    states = [state.transpose(0, 1).contiguous()[None] for state in states]
    sinks = torch.linspace(-2, 4, heads.query, device="cuda", dtype=torch.bfloat16)
    options = {"sizes": sizes, "softcap": cap or None, "sliding_window": window}
    actual = results_of("fa4", [*states, sinks], d_output[None], **options)
    exact = [t.float() for t in (*states, sinks)]
    expected = results_of("sdpa", exact, d_output[None], **options)
    names = ("output", "dq", "dk", "dv", "d_sinks")
    for name, result, reference in zip(names, actual, expected, strict=False):
        assert relative_error(result, reference) < 2**-6, name


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "granitemoe_swa"])
def test_a_run_with_changed_scores_and_logits_passes_parity(
    name: str, precision: str, train: Callable, low_precision_recipe: dict[str, Any]
) -> None:
    """Parity compares compiled layers with plain transformers on each document."""
    if obstacle := attention_backends.obstacle("flash_attn", case_of(Heads(4, 2, 64))):
        pytest.skip(f"flash_attn {obstacle}")
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 128, "sliding_window": 40, "model_type": name}
    changes = {"parity": "on", "precision": needs(precision)}
    recipe = low_precision_recipe | changes | {"model": {"config": CHANGED_SCORES[name] | sizes}}
    scope = [] if precision == "bf16" else ["fp8_config.scope=linear+head"]
    finished = train(
        *scope, recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"]
    )
    assert finished.status == 0, finished.output
    audit = finished.audit()
    assert audit["attention"]["kind"] == "packed_fa4"
    assert not audit["parity"]["failures"]
    assert json.loads((finished.run_dir / "summary.json").read_text())["recompiles"] == 0
