"""Hybrid models: runs, kernels of fla-core and FLOPs. test_all_model_types.py tests documents."""

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
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build, build_on_meta
from pretrain.model.hybrids import families, kernels, mixing
from pretrain.model.hybrids.families import mixers
from pretrain.settings.recipe import ModelSettings
from tests.conftest import PACK_LENGTH, Finished
from tests.golden.runs import tensors_of
from tests.pretrain.model.test_all_model_types import packed_model
from tests.pretrain.optimizer.test_model_types import small_config


@pytest.fixture
def recipe_of(recipe_for: Callable, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Function that returns the recipe of a small model of a type, with parity."""

    def recipe(kind: str) -> dict[str, Any]:
        small_config(kind).save_pretrained(tmp_path / "model")
        model = {"source": str(tmp_path / "model"), "from_scratch": True}
        changes = {"model": model, "train": {"steps": 2}, "checkpoint": {"every": 1}}
        # Two microbatches of two packs.
        changes["batch"] = {"tokens": 4 * PACK_LENGTH, "microbatch": 2}
        return recipe_for(tmp_path / "run") | changes | {"evaluate": {}, "parity": True}

    return recipe


def test_a_hybrid_model_resumes_exactly_and_transformers_loads_it(
    recipe_of: Callable, start_here: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = ("precision=delayed", "fp8_config.on_unsupported=emulate", "weights=bf16_exact")
    settings += ("optimizer.name=muon", "model.gradient_checkpointing=full")
    recipe = recipe_of("qwen3_5_text")
    run = start_here(recipe, tmp_path, *settings)
    assert run.status == 0, run.output
    quantized = {row["name"] for row in run.audit()["products"] if row["effective"] == "delayed"}
    names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    assert {f"model.layers.0.linear_attn.{name}" for name in names} <= quantized
    expected = tensors_of(run.run_dir / "final")
    loaded = AutoModelForCausalLM.from_pretrained(run.run_dir / "final").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    shutil.rmtree(run.run_dir / "final")
    shutil.rmtree(run.run_dir / "checkpoints" / "step-00000002")
    resumed = start_here(recipe, tmp_path, *settings, "parity=off")
    assert resumed.status == 0, resumed.output
    weights = tensors_of(run.run_dir / "final")
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_a_source_with_images_is_trained_without_them(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    text = small_config("qwen3_5_text").to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"out_hidden_size": 64})
    source = Qwen3_5ForConditionalGeneration(config)
    source.save_pretrained(tmp_path)
    settings = ModelSettings(source=str(tmp_path), config={"rope_theta": 500.0})
    config = load_config(settings)
    options = {"seed": 1, "device": torch.device("cpu"), "backend": "packed_sdpa"}
    hf = build(settings, config, weights=torch.float32, **options)
    expected = source.model.language_model.state_dict()
    loaded = hf.model.state_dict()
    assert config.model_type == "qwen3_5_text" and loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def test_a_source_with_an_infinite_limit_of_time_steps_resumes(
    recipe_of: Callable, start_here: Callable[..., Finished], tmp_path: Path
) -> None:
    recipe = recipe_of("bamba") | {"parity": False}
    run = start_here(recipe, tmp_path)
    assert run.status == 0, run.output
    shutil.rmtree(run.run_dir / "final")
    shutil.rmtree(run.run_dir / "checkpoints" / "step-00000002")
    resumed = start_here(recipe, tmp_path)
    assert resumed.status == 0 and "step 2/2" in resumed.output, resumed.output
    changed = recipe | {"model": recipe["model"] | {"config": {"time_step_limit": [0.0, 1.0]}}}
    refused = start_here(changed, tmp_path)
    assert "model.config.time_step_limit" in refused.output


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("lfm2", "causal_conv1d_fn"),
        ("bamba", "mamba2_chunk_scan"),
    ],
)
def test_parity_finds_a_state_that_passes_into_the_next_document(
    kind: str,
    function: str,
    recipe_of: Callable,
    start_here: Callable[..., Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaking(
        plain: Callable[..., Tensor],
        cu_seqlens: Tensor,
        *args: Any,
        max_seqlen: int | None = None,
        documents: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        return plain(*args, **options)

    monkeypatch.setattr(families, "MIXING", mixing.MIXING | {function: leaking})
    run = start_here(recipe_of(kind), tmp_path)
    assert run.status != 0
    assert "documents: the tokens of a document change hidden states of the next one" in run.output


def test_experts_whose_roundings_depend_on_other_tokens_pass_parity(
    recipe_of: Callable, start_here: Callable[..., Finished], tmp_path: Path
) -> None:
    recipe = recipe_of("nemotron_h")
    recipe["model"]["config"] = {"layer_types": ["linear_attention", "moe"], "n_routed_experts": 32}
    run = start_here(recipe, tmp_path, "train.steps=1")
    assert run.status == 0, run.output


# ── Kernels of fla-core, which cannot run on a CPU ───────────────────────────────────────────


def steps_of(cu_seqlens: Tensor, *tensors: Tensor) -> list[tuple[bool, tuple[Tensor, ...]]]:
    """Return True for the first token of a document, and the token's part of tensors [1, T, ...].

    The list has one entry for each token.
    """
    first_tokens = set(cu_seqlens.tolist())
    steps = []
    for token in range(tensors[0].shape[1]):
        parts = tuple(tensor[0, token] for tensor in tensors)
        steps.append((token in first_tokens, parts))
    return steps


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """Compute fla-core's `chunk_gated_delta_rule` by the recurrence of its paper."""
    assert use_qk_l2norm_in_kernel
    q, k = (x * x.square().sum(-1, keepdim=True).add(1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs = []
    for is_first, (query, key, value, decay, rate) in steps_of(cu_seqlens, q, k, v, g, beta):
        if is_first:
            state = torch.zeros(v.shape[2], v.shape[3], q.shape[3])
        state = state * decay.exp()[:, None, None]
        correction = (value - (state @ key[..., None])[..., 0]) * rate[:, None]
        state = state + correction[..., None] @ key[:, None]
        outputs.append((state @ query[..., None])[..., 0] * q.shape[3] ** -0.5)
    return torch.stack(outputs)[None], None


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, cu_seqlens: Tensor
) -> tuple[Tensor, None]:
    """Compute fla-core's `chunk_simple_gla` by its recurrence."""
    outputs = []
    for is_first, (query, key, value, decay) in steps_of(cu_seqlens, q, k, v, g):
        if is_first:
            state = torch.zeros(v.shape[2], v.shape[3], q.shape[3])
        state = state * decay.exp()[:, None, None] + value[..., None] @ key[:, None]
        outputs.append((state @ query[..., None])[..., 0] * scale)
    return torch.stack(outputs)[None], None


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, cu_seqlens: Tensor
) -> tuple[Tensor, None]:
    """Compute fla-core's `causal_conv1d`, one token at a time."""
    assert activation == "silu"
    outputs = []
    for is_first, (values,) in steps_of(cu_seqlens, x):
        if is_first:
            window = [torch.zeros_like(values)] * weight.shape[1]
        window = [*window[1:], values]
        shift = 0 if bias is None else bias
        outputs.append(F.silu((torch.stack(window, -1) * weight).sum(-1) + shift))
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
    packed = packed_model(kind, "fp32")
    _, mixer = next(mixers(packed.hf))
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, 3, 4, 40, 40], dtype=torch.int32)
    expected = mixer(x, cu_seqlens=cu_seqlens)
    on_gpu = property(lambda _: True)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", on_gpu)
        output = mixer(x, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Callable[[], Tensor]:
        def run() -> Tensor:
            raise error

        return run

    monkeypatch.setitem(kernels.TRIALS, "first", fail(ImportError("No module named 'fla'")))
    monkeypatch.setitem(kernels.TRIALS, "second", fail(RuntimeError("install tilelang\nmore")))
    monkeypatch.setitem(kernels.TRIALS, "third", lambda: torch.ones(1, requires_grad=True))
    assert "fla-core (pip install -r" in kernels.unavailable_because(("first",))
    assert kernels.unavailable_because(("third", "second")).endswith(
        "fail on this GPU: install tilelang"
    )
    assert kernels.unavailable_because(("third", "mamba2_split_conv1d_scan_combined")) is None


# ── FLOPs ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "falcon_h1", "nemotron_h"])
def test_flops_of_states_are_those_of_the_recurrence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 16
    config = small_config(kind)
    plain = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    cu_seqlens = torch.tensor([0, tokens])

    def recurrent(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        return delta_rule(
            query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
        )

    def scanned(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Tensor:
        queries, keys = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (C, B))
        output, _ = gated_attention(queries, keys, x, A * dt, scale=1.0, cu_seqlens=cu_seqlens)
        return output

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
