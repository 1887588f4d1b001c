"""Models from configs and folders agree with plain transformers. Unusable sources are rejected."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from foundation.errors import InputError
from packing.batch import StepBatches, build_microbatch
from pretrain.model import huggingface as model
from pretrain.model.configuration import load_config
from pretrain.model.exported import keys_of_other_programs
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.gradients import attach_main_gradients, gradient_of
from pretrain.model.packed import forward_backward, inputs_of
from pretrain.model.wrapping import fuse, wrap_layers
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.pretrain.small_models import build_model, plain_copy, plain_loss, random_packs

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
CPU = torch.device("cpu")
LENGTH = 32
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
# Three packs, of which the second ends with padding and the last one has no document. A document of
# one token has no label, so each boundary is followed by a longer document, in which a leak changes
# the loss.
DOCUMENTS = [[5, 9, 1, 17], [17, 9], []]
CAPLESS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
# Models with sliding windows, recomputed layers or other particularities.
VARIANTS = {
    "gemma3": {"kind": "gemma3_text", "sliding_window": 6, "head_dim": 8}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"kind": "mistral", "sliding_window": 6},
    "qwen3": {"kind": "qwen3", "use_sliding_window": True, "sliding_window": 6}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "llama": {"kind": "llama", "recompute": "full"},
    "qwen2": {"kind": "qwen2", "recompute": 2, "use_sliding_window": False},
    "gpt2": {
        "kind": "gpt2",
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": True,
    },
    # It passes the attention mask by name.
    "afmoe": {"kind": "afmoe", "head_dim": 8, "num_dense_layers": 2},
    # Architectures that may cap scores and logits or have recurrent layers, with these options off.
    "gemma2": {"kind": "gemma2", "sliding_window": 6, "head_dim": 8} | CAPLESS,
    "vaultgemma": {"kind": "vaultgemma", "sliding_window": 6, "head_dim": 8} | CAPLESS,
    "granitemoehybrid": {"kind": "granitemoehybrid", "layer_types": ["attention"] * 2}
    | {"num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 2},
}


NOT_FUSED = ("gemma3", "afmoe", "gemma2", "vaultgemma", "granitemoehybrid")


def build_from(folder: Path, config: dict[str, object] | None = None) -> PreTrainedModel:
    """Return the model in `folder` with the changes in `config`, in FP32."""
    source = ModelSettings(source=str(folder), config=config)
    options = {"weights": torch.float32, "seed": 1, "device": CPU, "backend": "packed_sdpa"}
    return model.build(source, load_config(source), **options)


def change_weights(folder: Path, change: Change) -> None:
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("backend", "fused"),
    [("packed_sdpa", False), ("packed_documents", False), ("packed_sdpa", True)],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_loss_and_gradients_equal_those_of_separate_documents(
    name: str, backend: str, fused: bool
) -> None:
    sizes = {} if name == "gpt2" else SMALL
    packed = build_model(backend=backend, **sizes | VARIANTS[name]).train()
    model.check_architecture(packed.hf, LENGTH, LossSettings())
    if fused:
        packed.fused = fuse(model.decoder_layers(packed.hf), {}, Arithmetic(packed.context))
        assert bool(packed.fused.left_out) == (name in NOT_FUSED)
        attach_main_gradients(packed, torch.float32, packed.fused.stacks)
    packs = random_packs(DOCUMENTS, LENGTH)
    microbatch = build_microbatch(packs, mask_boundaries=True)
    loss = packed(**inputs_of(microbatch, CPU))
    loss.backward()

    plain = plain_copy(packed)
    expected = plain_loss(plain, packs) * microbatch.valid_tokens
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    for parameter, reference in zip(packed.hf.parameters(), plain.parameters(), strict=True):
        gradient = gradient_of(parameter)
        torch.testing.assert_close(gradient, reference.grad, rtol=1e-4, atol=1e-5)


def test_bf16_layer_norms_on_a_cpu_have_fp32_gradients() -> None:
    """The error of torch's own kernel would be 25 % after 4,096 rows."""
    microbatch = build_microbatch(random_packs([[16]] * 256, 16), mask_boundaries=True)
    gradients = []
    for dtype in (None, torch.bfloat16):
        packed = build_model("gpt2", embd_pdrop=0.0, resid_pdrop=0.0, cast_to=dtype).train()
        packed(**inputs_of(microbatch, CPU)).backward()
        gradients.append({name: parameter.grad for name, parameter in packed.hf.named_parameters()})
    exact, rounded = gradients
    norms = [name for name in exact if ".ln_" in name]
    assert len(norms) > 4
    for name in norms:
        assert (rounded[name] - exact[name]).norm() < 0.03 * exact[name].norm(), name


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_layers_with_layer_norms_compile_once(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After eight variants of a layer, torch.compile would fail."""
    from torch._dynamo.testing import CompileCounter  # The import takes half a second.

    batch = inputs_of(build_microbatch(random_packs([[16]], 16), mask_boundaries=True), CPU)
    graphs = []
    for layers in (2, 4):
        counter = CompileCounter()
        packed = build_model("gpt2", n_layer=layers).train()
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", partial(torch.compile, backend=counter))
            wrap_layers(packed, ModelSettings(source="none"), cast_to=dtype, compile_layers=True)
        packed(**batch).backward()
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]


def test_a_step_without_labels_has_no_loss_and_no_gradient(accelerator: Accelerator) -> None:
    microbatch = build_microbatch(random_packs([[1] * 9, []], LENGTH), mask_boundaries=True)
    packed = build_model()
    step = StepBatches([microbatch], 2 * LENGTH, microbatch.valid_tokens, 0)
    assert forward_backward(packed, step, accelerator) == 0
    assert not any(parameter.grad.any() for parameter in packed.parameters())


# ── Sources ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"model_type": "qwen3", **SMALL, "head_dim": 8}, torch.bfloat16),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}, torch.float32),
    ],
)
def test_under_fsdp2_only_the_first_rank_loads_weights(
    changes: dict[str, Any], kept: torch.dtype, tmp_path: Path
) -> None:
    settings = ModelSettings(config=changes | {"vocab_size": 61, "tie_word_embeddings": True})
    torch.manual_seed(3)
    drawn = AutoModelForCausalLM.from_config(load_config(settings))
    drawn.generation_config.temperature = 0.5
    drawn.generation_config.do_sample = True
    drawn.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    settings = ModelSettings(source=str(tmp_path / "model"))
    config = load_config(settings)
    options = {"seed": 7, "backend": "packed_sdpa"}
    expected = model.build(settings, config, weights=kept, device=CPU, **options)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    first = SimpleNamespace(is_main_process=True, device=CPU)
    dtypes = {"value_dtype": kept, "parameter_dtype": torch.bfloat16}
    try:
        hf, values = model.build_on_first_rank(settings, config, first, **dtypes, **options)
    finally:
        torch.distributed.destroy_process_group()
    parameters = dict(hf.named_parameters())
    assert list(values) == list(parameters) == list(dict(expected.named_parameters()))
    for name, parameter in parameters.items():
        assert parameter.is_meta and parameter.dtype == torch.bfloat16 and parameter.requires_grad
        assert parameter.shape == values[name].shape
        assert torch.equal(values[name], expected.get_parameter(name)), name
    for name, buffer in hf.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name))
    assert hf.generation_config.to_dict() == expected.generation_config.to_dict()
    assert hf.get_output_embeddings().weight is hf.get_input_embeddings().weight


def test_default_tokens_beyond_the_vocabulary_are_null(tmp_path: Path) -> None:
    for kind, chosen in (("gpt2", {}), ("phi3", {}), ("gpt2", {"eos_token_id": 96})):
        settings = ModelSettings(config={"model_type": kind, "vocab_size": 97, **chosen})
        config = load_config(settings)
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert (saved["eos_token_id"], saved["pad_token_id"]) == (chosen.get("eos_token_id"), None)
        hf = model.build_on_meta(config)
        assert hf.generation_config.eos_token_id == chosen.get("eos_token_id")
    assert load_config(ModelSettings(config={"model_type": "gpt2"})).eos_token_id == 50_256


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "olmoe"])
def test_a_key_that_only_the_layers_read_has_an_effect(kind: str) -> None:
    config = load_config(ModelSettings(config=SMALL | {"model_type": kind, "head_dim": 24}))
    layer = model.decoder_layers(model.build_on_meta(config))["model.layers.0"]
    assert layer.self_attn.q_proj.out_features == 4 * 24


def test_keys_set_over_a_source_also_change_derived_keys(tmp_path: Path) -> None:
    """The source is like Qwen2.5's config.json on the hub, then as transformers 5 writes it."""
    stored = SMALL | {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(stored))

    def load(**config: object) -> PretrainedConfig:
        return load_config(ModelSettings(source=str(tmp_path), config=config))

    default = {"rope_type": "default", "rope_theta": 2e6}
    assert load(use_sliding_window=True).layer_types == ["full_attention", "sliding_attention"]
    for _ in range(2):
        assert len(load(num_hidden_layers=1).layer_types) == 1
        for theta, change in (
            (1e6, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
            (5e6, {"rope_theta": 5e6}),
            (2e6, {"rope_parameters": default}),
        ):
            assert load(**change).rope_parameters["rope_theta"] == theta
        load().save_pretrained(tmp_path)


# Architecture, values in the source's config.json, and the key that is set over them.
KEYS = [
    ("phi", {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}),
    ("phi", {"partial_rotary_factor": 0.25}, {"rope_theta": 5e5}),
    ("phi", {}, {"partial_rotary_factor": 0.5}),  # default of the class
    ("glm", {}, {"partial_rotary_factor": 0.25}),
    ("phi3", {}, {"partial_rotary_factor": 0.5}),
    ("stablelm", {"rope_theta": 2e4}, {"partial_rotary_factor": 0.5}),
    ("llama", {"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {}, {"rope_scaling": None, "torch_dtype": "bfloat16"}),
    ("cohere2", {"num_hidden_layers": 4}, {"sliding_window_pattern": 2}),
    ("gemma3_text", {"num_hidden_layers": 4}, {"sliding_window_pattern": 2}),
    ("gemma3_text", {"num_hidden_layers": 2}, {"sliding_window_pattern": 6}),
    ("qwen3_next", {"num_hidden_layers": 4}, {"full_attention_interval": 2}),
    ("smollm3", {"num_hidden_layers": 4}, {"num_hidden_layers": 3}),
    ("gpt2", {"n_layer": 2}, {"num_hidden_layers": 3}),
]


@pytest.mark.parametrize(("kind", "stored", "key"), KEYS)
@pytest.mark.parametrize("written_by", ["hand", "transformers 5", "our export", "nobody"])
def test_a_key_counts_as_if_it_were_in_the_file(
    kind: str, stored: dict, key: dict, written_by: str, tmp_path: Path
) -> None:
    names = {"num_hidden_layers": "n_layer"} if kind == "gpt2" else {}
    older = {names.get(name, name): value for name, value in key.items()}
    expected = AutoConfig.for_model(kind, **copy.deepcopy(stored | older))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | stored))
    if written_by in ("transformers 5", "our export"):
        written = AutoConfig.for_model(kind, **stored)
        written.save_pretrained(tmp_path)
    if written_by == "our export":
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys_of_other_programs(written)))
    source = {"source": str(tmp_path), "config": key}
    if written_by == "nobody":
        source = {"config": {"model_type": kind} | stored | older}
    config = load_config(ModelSettings(**source))
    for name, value in expected.to_dict().items():
        if not name.startswith("_"):
            assert config.to_dict()[name] == value, name


LINEAR = {"rope_type": "linear", "factor": 4.0}
GEMMA3 = {
    "full_attention": LINEAR | {"rope_theta": 5e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e2},
}


def test_mlx_and_llama_cpp_find_their_keys_in_an_export() -> None:
    def keys(kind: str, **values: Any) -> dict[str, Any]:
        return keys_of_other_programs(AutoConfig.for_model(kind, **copy.deepcopy(values)))

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    rope = {"rope_theta": 5e5, "rope_scaling": llama3}
    assert keys("llama", **rope) == rope
    assert keys("qwen3", rope_theta=1e6) == {"rope_theta": 1e6, "rope_scaling": None}
    gemma3 = {"rope_theta": 5e3, "rope_local_base_freq": 3e2, "rope_scaling": LINEAR}
    assert keys("gemma3_text", rope_parameters=GEMMA3) == gemma3
    # The recipe has changed a value of the source's file.
    assert keys("gpt2", n_positions=64, n_ctx=1024)["n_ctx"] == 64
    assert "n_ctx" not in keys("codegen", n_positions=64)


# Model types with RoPE in several forms: one or two sets of parameters, a part of each head, and
# types other than `default`.
ROTATED = (
    *("apertus", "cohere2", "deepseek_v3", "gemma3_text", "gemma4_text", "glm", "gpt2", "gpt_neox"),
    *("gpt_oss", "laguna", "llama", "mellum", "minimax_m2", "ministral3", "modernbert-decoder"),
    *("olmo3", "phi", "qwen3_5_text", "qwen3_moe", "zaya"),
)


@pytest.mark.parametrize("kind", ROTATED)
def test_keys_of_other_programs_do_not_change_a_configuration(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [rope for rope in parameters.values() if isinstance(rope, dict)]
    for rope in by_layer or [parameters]:
        rope["rope_theta"] = 12345.0
        if rope.get("rope_type") == "default":
            rope.update(LINEAR)
    config.save_pretrained(tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys_of_other_programs(config)))
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {key: read[key] for key in expected} == expected


# Qwen2.5's file has a sliding window that is off.
UNUSED_WINDOW = SMALL | {"sliding_window": 8, "use_sliding_window": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
LLAMA3 |= {"low_freq_factor": 1.0, "original_max_position_embeddings": 64}
PARTLY_LINEAR = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
PARTLY = "partial_rotary_factor"
NEOX = {"rope_type": "default", "rope_theta": 1e4, PARTLY: 0.25}
SLIDING = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("gpt2", {"num_hidden_layers": 3}, {"n_layer": 3}),
        ("qwen2", UNUSED_WINDOW, {}),
        # A value of null means that it is derived from other keys.
        ("llama", {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}, {}),
        ("llama", {"rope_scaling": LLAMA3}, {}),
        ("llama", {"rope_parameters": PARTLY_LINEAR | {"rope_theta": 1e4}}, {}),
        ("phi", {"partial_rotary_factor": 0.25}, {}),
        ("gemma3_text", {"rope_parameters": SLIDING | {"full_attention": PARTLY_LINEAR}}, {}),
        # Keys of older files.
        ("gpt_neox", {"rotary_pct": 0.5}, {"rope_parameters": NEOX | {PARTLY: 0.5}}),
        ("gpt_neox", {"rotary_emb_base": 5e3}, {"rope_parameters": NEOX | {"rope_theta": 5e3}}),
    ],
)
def test_a_key_with_an_effect_is_accepted(
    kind: str, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    loaded = load_config(ModelSettings(config=config | {"model_type": kind}))
    assert {key: getattr(loaded, key) for key in expected} == expected


NO_KEY = r"`model\.config\.{}.*no such key"


@pytest.mark.parametrize(
    ("stored", "kind", "config", "words"),
    [
        (None, "qwen3_moe", {"head_dmi": 24}, NO_KEY),
        (None, "llama", {"gradient_checkpointing": True}, NO_KEY),
        (None, "llama", {"text_config": True}, NO_KEY),
        (None, "gemma3_text", {"_sliding_window_pattern": 2}, NO_KEY),
        (None, "gemma3_text", {"sliding_window_patern": 2}, NO_KEY),
        (None, "gpt_neox", {"rope_theta": 5e5}, NO_KEY),
        (None, "gpt2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, NO_KEY),
        (None, "llama", {"temperature": 0.5}, NO_KEY),
        (None, "llama", {"attn_implementation": "eager"}, NO_KEY),
        # Only classifiers and image encoders in the same file read these.
        (None, "gpt2", {"hidden_dropout": 0.3}, NO_KEY),
        (None, "gemma3_text", {"layer_norm_eps": 1e-3}, NO_KEY),
        (None, "gemma4_text", {"hidden_act": "gelu"}, NO_KEY),
        (None, "llama", {"rope_scaling": {"factor": 8.0}}, r"`factor: 8\.0` has .*`rope_type`"),
        (None, "llama", {"rope_parameters": {"factor": 8.0}}, r"`factor: 8\.0` .*`rope_type`"),
        (None, "qwen3_moe", {"router_aux_loss_coef": 0.1}, "output_router_logits: true.*or remove"),
        (None, "gpt2", {"n_inner": 0}, "`model.config.{}: 0` is below 1"),
        (None, "gpt2", {"n_layer": 0}, "`model.config.{}: 0` is below 1"),
        (None, "opt", {"ffn_dim": 0}, "`model.config.{}: 0` is below 1"),
        (None, "llama", {"head_dim": 0}, "`model.config.{}: 0` is below 1"),
        (UNUSED_WINDOW, "qwen2", {"sliding_window": 16}, "`model.config.{}: 16` has no effect"),
        ({"rotary_pct": 1.0}, "gpt_neox", {"rotary_pct": 0.5}, "{}: .*no .*`rope_parameters`"),
        (
            {"rotary_pct": 1.0},
            "gpt_neox",
            {"rotary_emb_base": 5e3},
            "{}: .*no effect.*`rope_parameters`",
        ),
        (SMALL, "qwen2", {"model_type": "llama"}, "model_type: llama.*which is qwen2; set"),
    ],
)
def test_a_key_without_effect_is_rejected(
    stored: dict | None, kind: str, config: dict, words: str, tmp_path: Path
) -> None:
    """With `stored` values, the key is set over a source."""
    settings = {"config": {"model_type": kind} | config}
    if stored is not None:
        AutoConfig.for_model(kind, **stored).save_pretrained(tmp_path)
        settings = {"source": str(tmp_path), "config": config}
    with pytest.raises(InputError, match=words.format(*config)) as error:
        load_config(ModelSettings(**settings))
    assert "`_" not in str(error.value).partition("did you mean")[2]


def test_untrained_parameters_stay_untrained_from_a_source(tmp_path: Path) -> None:
    built = build_model(
        "ernie4_5_moe",
        **SMALL,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        pad_token_id=0,
    ).hf
    built.save_pretrained(tmp_path)
    loaded = build_from(tmp_path)
    kept = {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad}
    assert (
        kept
        == {name for name in dict(built.named_parameters()) if "e_score_correction_bias" in name}
        != set()
    )


def with_weight(name: str, value: Tensor) -> Change:
    return lambda weights: weights | {name: value}


def prefixed(prefix: str) -> Change:
    return lambda weights: {f"{prefix}{name}": weight for name, weight in weights.items()}


def without_up_proj(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if "1.mlp.up_proj" not in name}


NAN = torch.full((32,), torch.nan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_weight("model.norm.weight", NAN), r"model\.norm\.weight contains NaN"),
        (with_weight("lm_head.weight", torch.zeros(61, 32)), "tie_word_embeddings: false"),
        (with_weight("score.weight", NAN), r"no place in the model \(score\.weight\)"),
        (without_up_proj, r" 1 of .*layers\.1\.mlp\.up_proj"),
        *(
            (prefixed(prefix), rf"\({prefix}model\.embed_tokens\.weight\).* differ in a prefix")
            for prefix in ("_orig_mod.", "module.", "module._orig_mod.")
        ),
    ],
)
def test_a_source_with_other_weights_is_rejected(
    change: Change, words: str, tmp_path: Path
) -> None:
    build_model("llama", **SMALL, tie_word_embeddings=True).hf.save_pretrained(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(InputError, match=rf"`model\.source`.*{words}"):
        build_from(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # Weights of another size are named with both shapes.
        ({"vocab_size": 96}, r"\[61, 32\], but \[96, 32\].* set `model.config.vocab_size: 61`$"),
        ({"intermediate_size": 80}, r"0\.mlp\.down_proj\.weight .* \[32, \d+\], but \[32, 80\]"),
        ({"hidden_size": 64}, r"\[61, 32\], but \[61, 64\].* change `model.config`"),
        ({"num_key_value_heads": 4}, r"k_proj.bias .* \[16\], but \[32\].* change `model.config`"),
        # Weights that the source has beyond its configuration.
        ({"attention_bias": False}, "no place in the model.* change `model.config`"),
        ({"num_hidden_layers": 1}, "no place in the model.* change `model.config`"),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights_is_rejected(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    build_model("llama", **SMALL, attention_bias=True).hf.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"`model\.source`.*{words}"):
        build_from(tmp_path, config)


def test_buffers_and_tied_heads_of_older_files_are_accepted(tmp_path: Path) -> None:
    build_model("llama", **SMALL, tie_word_embeddings=True).hf.save_pretrained(tmp_path)
    rotation = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(tmp_path, lambda weights: weights | rotation)
    change_weights(tmp_path, with_weight("lm_head.weight", embedding.clone()))
    build_from(tmp_path)
