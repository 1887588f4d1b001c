"""What memory that is left over is spent on, by hand and for any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import Plan
from pretrain.plan.rendering import render
from pretrain.plan.spare import spend_spare_memory
from pretrain.precision.settings import PRECISIONS, ActivePrecision
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe

GIB = 2**30
H200 = int(139.8 * GIB)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of Qwen3-1.7B in FP8, head and all, on an H200: 8 packs of 4,096 at once."""
    hf = on_meta(QWEN3)
    wanted = recipe(precision="delayed", weights="bf16_exact", fp8_config={"scope": "linear+head"}, train={"steps": 10})
    settings = wanted.fp8_config.resolved("delayed")
    active = ActivePrecision("delayed", PRECISIONS["delayed"], "transformer_engine", settings)
    found = layers_of(hf, flops_of(hf), wanted, active, "cuda", "packed_cudnn")
    return Plan(wanted, active, Devices(name="NVIDIA H200", memory=H200), "qwen3", flops_of(hf), 745.0, {"delayed": found})


def of(plan: Plan, *, memory: int | None = H200, name: str = "NVIDIA H200", **changes: Any) -> Plan:
    """`plan` on another device, or with some sections of its recipe changed key by key."""
    sections = {key: getattr(plan.recipe, key).model_copy(update=values) for key, values in changes.items()}
    devices = replace(plan.devices, memory=memory, name=name)
    return spend_spare_memory(replace(plan, devices=devices, recipe=plan.recipe.model_copy(update=sections)))


def test_an_h200_has_room_for_queries_and_keys_and_takes_the_usual_chunks(plan: Plan) -> None:
    """28 layers' queries, keys and values of 4,096 values in BF16."""
    made = of(plan)
    assert (made.chunk, made.loss.tokens_at_once, made.keeps_rotated) == (None, 4096, True)
    assert made.memory.total(8) - plan.memory.total(8) == 28 * 2 * 4096 * 32_768
    assert "by the memory that is there: queries, keys and values kept" in render(made)


def test_chunks_shorten_only_where_nothing_else_helps(plan: Plan) -> None:
    needed = {chunk: replace(plan, chunk=chunk).memory.total(8) for chunk in (4096, 2048, 1024)}
    for size, chunk in ((needed[4096], None), (needed[4096] - 1, 2048), (needed[1024], 1024), (needed[1024] - 1, 1024)):
        made = of(plan, memory=size)
        assert (made.chunk, made.loss.tokens_at_once, made.keeps_rotated) == (chunk, chunk or 4096, False)
    assert "by the memory that is there: loss in chunks of 1,024 tokens" in render(made)


@given(words=st.sampled_from([65, 8192, 32_000, 50_257, 65_537, 128_256]), packs=st.sampled_from([1, 2, 8]))
def test_with_few_words_a_chunk_has_more_tokens(plan: Plan, words: int, packs: int) -> None:
    shape = replace(plan.flops.shape, vocabulary=words)
    small = replace(plan, flops=replace(plan.flops, shape=shape))
    chunk = of(small, batch={"microbatch": packs}).loss.tokens_at_once
    tokens = packs * plan.recipe.data.length
    assert 4096 <= chunk <= max(tokens, 4096)
    assert chunk == 4096 or chunk * words <= 2**29
    assert chunk * 2 > tokens or chunk * 2 * words > 2**29  # no longer one would do
    assert of(small, batch={"microbatch": packs}, memory=small.memory.total(packs)).chunk is None
