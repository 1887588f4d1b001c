"""Hybrid models train as plain transformers does, with each document by itself."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from packing.batch import build_microbatch
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.gradients import gradient_of
from pretrain.model.huggingface import build_on_meta, check_architecture
from pretrain.model.hybrids import families, kernels, mixing
from pretrain.model.hybrids.families import FAMILIES, mixers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.conftest import VOCABULARY, Finished
from tests.golden.runs import tensors_of
from tests.pretrain.small_models import build_model, plain_copy, plain_loss, random_packs

CPU = torch.device("cpu")
LENGTH = 128
# Documents of one token, and of more tokens than a chunk of the gated delta rule has (64).
DOCUMENTS = [[5, 9, 1, 17, 71, 20], [101, 13]]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"initializer_range": 0.2}
TWO_LAYERS = SIZES | {"num_hidden_layers": 2}
DENSE = {"intermediate_size": 48}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
ONE_OF_TWO = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = TWO_LAYERS | ONE_OF_TWO | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
CONVOLUTION = TWO_LAYERS | DENSE | {"layer_types": ["conv", "full_attention"]}
SCAN = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
SCAN |= TWO_LAYERS | DENSE | {"mamba_chunk_size": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA | DENSE,
    "qwen3_5_moe_text": DELTA | SHARED,
    "qwen3_next": DELTA | DENSE | SHARED,
    "olmo_hybrid": DELTA | DENSE,
    "lfm2": CONVOLUTION | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTION | EXPERTS | {"num_dense_layers": 1},
    "lfm3": CONVOLUTION,
    # The scale of its logits is 1 here.
    "falcon_h1": SCAN | {"mamba_d_ssm": 64, "lm_head_multiplier": 1.0},
    "bamba": SCAN | {"attn_layer_indices": [1]},
    "granitemoehybrid": SCAN
    | ONE_OF_TWO
    | {"num_local_experts": 0, "shared_intermediate_size": 48},
    "nemotron_h": SIZES
    | DENSE
    | {"layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention"]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    | {"chunk_size": 8},
}


def small_batch() -> dict[str, Any]:
    packs = random_packs(DOCUMENTS, LENGTH)
    return inputs_of(build_microbatch(packs, mask_boundaries=True), CPU)


def hidden_states(packed: PackedLanguageModel, batch: dict[str, Any]) -> Tensor:
    """Return the hidden state of each token, [T, hidden]."""
    states: list[Tensor] = []
    head = packed.hf.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0])):
        packed(**batch)
    return states[0].detach()


@pytest.mark.parametrize("kind", FAMILIES)
def test_documents_of_a_pack_are_trained_separately(kind: str) -> None:
    packed = build_model(kind, backend="packed_documents", **HYBRIDS[kind]).train()
    check_architecture(packed.hf, LENGTH, LossSettings())
    batch = small_batch()
    loss = packed(**batch)
    loss.backward()
    states = hidden_states(packed, batch)
    for first, last in ((0, 5), (14, 15), (15, 32)):
        ids = batch["input_ids"].clone()
        ids[0, first:last] = (ids[0, first:last] + 1) % 61
        changed = (hidden_states(packed, batch | {"input_ids": ids}) != states).any(1)
        assert changed[first:last].all()
        assert not changed[:first].any()
        assert not changed[last:].any()

    plain = plain_copy(packed)
    packs = random_packs(DOCUMENTS, LENGTH)
    expected = plain_loss(plain, packs) * (batch["labels"] >= 0).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    for (name, parameter), reference in zip(
        packed.hf.named_parameters(), plain.parameters(), strict=True
    ):
        gradient = gradient_of(parameter)
        assert (gradient - reference.grad).norm() <= 1e-4 * reference.grad.norm(), name


def hybrid_recipe(recipe: dict[str, Any], kind: str = "qwen3_5_text") -> dict[str, Any]:
    """Return the recipe of a hybrid model, all of whose sizes suit FP8."""
    config = HYBRIDS[kind] | {"model_type": kind, "hidden_size": 64, "vocab_size": VOCABULARY}
    if "linear_num_key_heads" in config:
        config |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
    small = {"model": {"config": config}, "train": {"steps": 4}}
    return recipe | small | {"checkpoint": {"every": 2}, "evaluate": {}, "parity": True}


def test_a_hybrid_model_resumes_exactly_and_transformers_loads_it(
    recipe_for: Callable, start_here: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = ("precision=delayed", "fp8_config.on_unsupported=emulate", "weights=bf16_exact")
    settings += ("optimizer.name=muon", "model.gradient_checkpointing=full")
    recipe = hybrid_recipe(recipe_for(tmp_path / "run"))
    run = start_here(recipe, tmp_path, *settings)
    assert run.status == 0, run.output
    quantized = {row["name"] for row in run.audit()["products"] if row["effective"] == "delayed"}
    names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    assert {f"model.layers.0.linear_attn.{name}" for name in names} <= quantized
    expected = tensors_of(run.run_dir / "final")
    loaded = AutoModelForCausalLM.from_pretrained(run.run_dir / "final").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    shutil.rmtree(run.run_dir / "final")
    shutil.rmtree(run.run_dir / "checkpoints" / "step-00000004")
    resumed = start_here(recipe, tmp_path, *settings)
    assert resumed.status == 0, resumed.output
    weights = tensors_of(run.run_dir / "final")
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("kind", ["olmo_hybrid", "lfm2"])
def test_parity_finds_a_state_that_passes_into_the_next_document(
    kind: str,
    recipe_for: Callable,
    start_here: Callable[..., Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaking = {
        name: lambda plain, ends, *args, max_seqlen=None, documents=None, **options: plain(
            *args, **options
        )
        for name in mixing.MIXING
    }
    monkeypatch.setattr(families, "MIXING", leaking)
    run = start_here(hybrid_recipe(recipe_for(tmp_path / "run"), kind), tmp_path)
    assert run.status != 0
    assert "parity: this run would not train like plain transformers" in run.output


# ── Kernels, whose packages a CPU cannot run ───────────────────────────────────────────


def steps_of(ends: Tensor, *tensors: Tensor) -> list[tuple[bool, tuple[Tensor, ...]]]:
    """Return for each token whether a document begins, and its part of the tensors [1, T, ...]."""
    begins = set(ends.tolist())
    return [
        (token in begins, tuple(tensor[0, token] for tensor in tensors))
        for token in range(tensors[0].shape[1])
    ]


def delta_rule(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
    """The function of fla-core, as the recurrence of its paper."""
    assert use_qk_l2norm_in_kernel
    q, k = (F.normalize(x, dim=-1).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs = []
    for is_first, (query, key, value, decay, rate) in steps_of(cu_seqlens, q, k, v, g, beta):
        if is_first:
            state = torch.zeros(v.shape[2], v.shape[3], q.shape[3])
        state = state * decay.exp()[:, None, None]
        correction = (value - (state @ key[..., None])[..., 0]) * rate[:, None]
        state = state + correction[..., None] @ key[:, None]
        outputs.append((state @ query[..., None])[..., 0] * q.shape[3] ** -0.5)
    return torch.stack(outputs)[None], None


def gated_attention(q, k, v, g, *, scale, cu_seqlens):
    outputs = []
    for is_first, (query, key, value, decay) in steps_of(cu_seqlens, q, k, v, g):
        if is_first:
            state = torch.zeros(v.shape[2], v.shape[3], q.shape[3])
        state = state * decay.exp()[:, None, None] + value[..., None] @ key[:, None]
        outputs.append((state @ query[..., None])[..., 0] * scale)
    return torch.stack(outputs)[None], None


def convolve(x, weight, bias, *, activation, cu_seqlens):
    assert activation == "silu"
    outputs = []
    for is_first, (values,) in steps_of(cu_seqlens, x):
        if is_first:
            seen = [torch.zeros_like(values)] * weight.shape[1]
        seen = [*seen[1:], values]
        shift = 0 if bias is None else bias
        outputs.append(F.silu((torch.stack(seen, -1) * weight).sum(-1) + shift))
    return torch.stack(outputs)[None], None


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba"])
def test_kernels_compute_the_functions_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla-core's functions are replaced by recurrences with the same arguments."""
    packages = {
        "fla.modules.causal_conv1d": {"causal_conv1d": convolve},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule},
        "fla.ops.simple_gla": {"chunk_simple_gla": gated_attention},
    }
    for name, functions in packages.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    packed = build_model(kind, backend="packed_documents", **HYBRIDS[kind])
    _, mixer = next(mixers(packed.hf))
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, 3, 4, 40, 40], dtype=torch.int32)
    expected = mixer(x, cu_seqlens=ends)
    on_gpu = property(lambda _: True)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", on_gpu)
        output = mixer(x, cu_seqlens=ends)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Callable[[], Tensor]:
        def run() -> Tensor:
            raise error

        return run

    monkeypatch.setitem(kernels.TRIALS, "first", fail(ImportError("No module named 'fla'")))
    monkeypatch.setitem(kernels.TRIALS, "second", fail(RuntimeError("install tilelang\nmore")))
    monkeypatch.setitem(kernels.TRIALS, "third", lambda: torch.ones(1, requires_grad=True))
    assert "fla-core (pip install -r" in kernels.missing(("first",))
    assert kernels.missing(("third", "second")).endswith("fail on this GPU: install tilelang")
    assert kernels.missing(("third", "mamba2_split_conv1d_scan_combined")) is None


# ── FLOPs ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "falcon_h1", "nemotron_h"])
def test_flops_of_states_are_those_of_the_recurrence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 16
    config = load_config(ModelSettings(config={"model_type": kind} | HYBRIDS[kind]))
    plain = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ends = torch.tensor([0, tokens])

    def recurrent(query, key, value, *, g, beta, **_):
        return delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)

    def scanned(x, dt, A, B, C, **_):
        repeated = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (C, B))
        return gated_attention(*repeated, x, A * dt, scale=1.0, cu_seqlens=ends)[0]

    module = importlib.import_module(type(plain).__module__)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", recurrent, raising=False)
    monkeypatch.setattr(module, "mamba2_chunk_scan", scanned, raising=False)
    with FlopCounterMode(display=False) as counter:
        plain(input_ids=torch.arange(tokens)[None], use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    flops = ModelFlops.of(build_on_meta(config))
    assert not flops.uncounted
    # The convolution computes more outputs than tokens, because both ends are padded.
    counts[torch.ops.aten.convolution] *= tokens / (tokens + 3)
    expected = flops.per_token_matrix * tokens + 2 * flops.per_squared_length * tokens**2
    assert 3 * sum(counts.values()) == pytest.approx(expected, rel=1e-6)
