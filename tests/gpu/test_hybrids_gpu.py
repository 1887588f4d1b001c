"""Hybrid models on a GPU: fla-core's kernels beside transformers' functions, document by document.

With Triton 3.4 to 3.7.0, a Hopper GPU needs tilelang too: `pip install tilelang`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packing.batch import build_microbatch
from pretrain.model.gradients import gradient_of
from pretrain.model.hybrids import kernels
from pretrain.model.hybrids.families import FAMILIES
from pretrain.model.packed import inputs_of
from tests.conftest import Finished
from tests.pretrain.model.test_hybrids import (
    DELTA,
    DOCUMENTS,
    HYBRIDS,
    LENGTH,
    hidden_states,
    hybrid_recipe,
)
from tests.pretrain.small_models import build_model, plain_copy, plain_loss, random_packs

GPU = torch.device("cuda")
LAUNCH = ["--config_file", "accelerate_configs/bf16.yaml"]
# Kernels process at least 16 values of a head and of a state.
WIDE: dict[str, dict[str, Any]] = {
    name: HYBRIDS[name] | {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
    for name in HYBRIDS
    if HYBRIDS[name].keys() >= DELTA.keys()
}
WIDE |= {
    name: HYBRIDS[name] | {"mamba_d_state": 32}
    for name in HYBRIDS
    if "mamba_d_state" in HYBRIDS[name]
}
WIDE["nemotron_h"] = HYBRIDS["nemotron_h"] | {"ssm_state_size": 32}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if reason := kernels.missing(tuple(kernels.TRIALS)):
        pytest.fail(f"a hybrid model {reason}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.01), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_documents_of_a_pack_are_trained_separately(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    config = HYBRIDS[kind] | WIDE.get(kind, {})
    packed = build_model(kind, cast_to=dtype if dtype != torch.float32 else None, **config)
    packed = packed.to(GPU).train()
    packs = random_packs(DOCUMENTS, LENGTH)
    batch = inputs_of(build_microbatch(packs, mask_boundaries=True), GPU)
    loss = packed(**batch)
    loss.backward()
    states = hidden_states(packed, batch)
    ids = batch["input_ids"].clone()
    ids[0, 5:14] = (ids[0, 5:14] + 1) % 61
    changed = (hidden_states(packed, batch | {"input_ids": ids}) != states).any(1)
    assert changed[5:14].all()
    assert not changed[:5].any()
    assert not changed[14:].any()

    # The random packs are on the host, so the reference computes there.
    plain = plain_copy(packed.cpu())
    expected = plain_loss(plain, packs) * (batch["labels"] >= 0).sum().item()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    total = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    for (name, parameter), reference in zip(
        packed.hf.named_parameters(), plain.parameters(), strict=True
    ):
        difference = (gradient_of(parameter).cpu() - reference.grad).norm()
        assert difference <= tolerance * (2 * reference.grad.norm() + 0.01 * total), name


@pytest.mark.parametrize("compiled", ["none", "layer"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "bamba"])
def test_a_run_in_fp8_passes_parity_and_confirms_its_products(
    kind: str,
    compiled: str,
    recipe_for: Callable,
    start_in_processes: Callable[..., Finished],
    tmp_path: Path,
) -> None:
    recipe = hybrid_recipe(recipe_for(tmp_path / "run"), kind)
    config = recipe["model"]["config"] | {"hidden_size": 128, "vocab_size": 256, "head_dim": 64}
    if "linear_num_key_heads" in config:
        config |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
    if kind == "bamba":
        config |= {"mamba_n_heads": 16, "mamba_d_state": 32}
    recipe["model"] |= {"config": config, "compile": compiled}
    run = start_in_processes(recipe, tmp_path, "precision=delayed", launch=LAUNCH)
    assert run.status == 0, run.output
    assert run.audit()["parity"]["failures"] == []
    assert {row["backend"] for row in run.audit()["products"]} == {"transformer_engine", "torch"}
