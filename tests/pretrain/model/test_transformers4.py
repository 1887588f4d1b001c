"""transformers 4, a separate program, reads the same models and tokenizers in our exports.

One process with transformers 4 reads all folders. The expected values are those of transformers 5.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from packing.records import CHATML
from packing.tokenizer import save_tokenizer, train_tokenizer
from pretrain.model import huggingface as model
from pretrain.model.exported import old_keys, write_model, write_tokenizer
from pretrain.precision.settings import LowPrecisionSettings
from pretrain.run.served import served_weights
from pretrain.run.tokenizer import tokenizer_in
from tests.launcher.test_export_trained import decode

SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    # Large weights, so that the positions of tokens have an effect.
    "initializer_range": 0.3,
}
HEADS = {"head_dim": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
GEMMA3 = {
    "full_attention": LINEAR | {"rope_theta": 5e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e2},
}
THETA = {"rope_type": "default", "rope_theta": 2e5}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 4 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# All values of RoPE differ from the defaults of the classes.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "qwen3": HEADS | {"rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2": {"rope_theta": 2e6, "tie_word_embeddings": True},
    "mistral": HEADS | {"rope_theta": 1e6, "sliding_window": 16},
    "gpt2": {"vocab_size": 384, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma3_text": HEADS
    | {"rope_parameters": GEMMA3, "layer_types": ["sliding_attention", "full_attention"]}
    | {"sliding_window": 16},
    "olmo2": {"rope_theta": 5e5, "rope_scaling": LINEAR},
    "olmo3": {"rope_parameters": {"full_attention": THETA, "sliding_attention": THETA}}
    | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "phi": {"rope_theta": 5e3, "partial_rotary_factor": 0.25},
    "phi3": {"rope_theta": 5e3, "partial_rotary_factor": 0.5, "rope_scaling": LONGROPE}
    | {"original_max_position_embeddings": 48, "pad_token_id": 0},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 5e3},
    "qwen3_moe": HEADS | EXPERTS | {"rope_theta": 1e6, "moe_intermediate_size": 32},
    "olmoe": EXPERTS | {"rope_theta": 5e5},
}
# Precisions whose layout transformers 4 reads with compressed-tensors.
PRECISIONS = ("current", "mxfp8", "nvfp4")
# Model types with RoPE in several forms: one or two sets of parameters, old names of their own, a
# part of each head, and types other than `default`.
KINDS = {
    "apertus": {},
    "cohere2": {},
    "deepseek_v3": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "glm": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "granitemoehybrid": {"mamba_n_heads": 2},
    "laguna": {},
    "llama": {},
    "mellum": {},
    "minimax_m2": {},
    "ministral3": {},
    "modernbert-decoder": {},
    "olmo3": {},
    "phi": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "zaya": {},
}
TEXTS = [
    "Hello world 12345",
    "  two blanks",
    "a<|endoftext|> b<|im_end|>",
    "caf\u00e9 cafe\u0301\n",
]
IDS = torch.arange(3, 43)[None] * 7 % 384

READ = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
assert transformers.__version__.startswith("4."), transformers.__version__
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
folders, texts, ids, out = json.loads(sys.stdin.read())
results = {}
for name, (content, folder) in folders.items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [tokenizer(text).input_ids for text in texts]
    result = {
        "ids": encoded,
        "decoded": [tokenizer.decode(numbers) for numbers in encoded],
        "special": tokenizer.all_special_tokens,
        "template": tokenizer.chat_template,
    }
    if content != "tokenizer":
        options = {}
        if content == "quantized":
            from transformers import CompressedTensorsConfig
            options["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **options
        )
        # Decompressed weights are in BF16.
        result["logits"] = torch.nn.Module.float(model).eval()(torch.tensor(ids)).logits
        result["missing"] = sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"])
        result["eos"] = GenerationConfig.from_pretrained(folder).eos_token_id
        result["weights"] = dict(model.named_parameters()) if content == "quantized" else {}
    results[name] = result
torch.save(results, out)
"""


def rope_parameters_of(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a configuration, one dict for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [part for part in rope.values() if isinstance(part, dict)] or ([rope] if rope else [])


def build(kind: str) -> PreTrainedModel:
    config = MODELS[kind] if kind == "gpt2" else SIZES | MODELS[kind]
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, **copy.deepcopy(config))
    hf = AutoModelForCausalLM.from_config(config).eval()
    # Do not round buffers, such as the frequencies of the rotary embedding.
    model.round_weights(hf, torch.bfloat16)
    return hf


@torch.no_grad()
def logits_of(hf: PreTrainedModel) -> torch.Tensor:
    """Return logits that are computed in FP32."""
    model.round_weights(hf, torch.float32)
    return hf.eval()(IDS).logits


def write_tokenizers(folder: Path) -> dict[str, PreTrainedTokenizerFast]:
    """Write tokenizers to `folder`, and return them as the export writes them."""
    special = ["<|im_start|>", "<|im_end|>"]
    trained = train_tokenizer(["Hello world 12345, a quick caf\u00e9"] * 9, 384, special)
    save_tokenizer(trained, folder / "own")
    # transformers 4 changes this pre-tokenizer unless tokenizer_config.json has the same value.
    prefixed = Tokenizer.from_str(trained.to_str())
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    save_tokenizer(prefixed, folder / "prefixed")
    config = folder / "prefixed" / "tokenizer_config.json"
    extra = {"additional_special_tokens": ["<|im_end|>"], "bos_token": "<|im_start|>"}
    config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    words = Tokenizer(models.WordLevel({"a": 0, "Hello": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a").save_pretrained(folder / "words")
    tokenizers = {name: tokenizer_in(str(folder / name)) for name in ("own", "prefixed", "words")}
    tokenizers["own"].chat_template = CHATML
    return tokenizers


def serve(precision: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Export a Llama in a trained precision, as `python -m pretrain export` does.

    Return the folder of the model. The run quantizes all linears except the head.
    """
    hf = build("llama")
    linears = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear)]
    products = [
        {"name": name, "module": "linear", "products": name != "lm_head"} for name in linears
    ]
    folder.mkdir()
    audit = {"effective": precision, "products": products}
    (folder / "audit.json").write_text(json.dumps(audit))
    settings = LowPrecisionSettings(on_unsupported="emulate")
    tensors, hf.config.quantization_config, _ = served_weights(
        folder, precision, settings, hf, hf.state_dict().__getitem__, {}
    )
    write_model(hf, tensors.items(), tokenizer, folder / "out", {})
    return folder / "out"


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of BF16 exports and of tokenizers. All models have our own tokenizer."""
    folder = tmp_path_factory.mktemp("exports")
    tokenizers = write_tokenizers(folder / "given")
    for kind in MODELS:
        hf = build(kind)
        tensors = model.named_tensors(hf).items()
        write_model(hf, tensors, tokenizers["own"], folder / "models" / kind, {})
    for name, tokenizer in tokenizers.items():
        (folder / "tokenizers" / name).mkdir(parents=True)
        write_tokenizer(tokenizer, folder / "tokenizers" / name)
    return folder


@pytest.fixture(scope="module")
def in_version_4(exports: Path, transformers4: Path) -> dict[str, Any]:
    """Results of transformers 4 by the name of the folder."""
    folders = {path.name: ("model", str(path)) for path in exports.glob("models/*")}
    for path in exports.glob("tokenizers/*"):
        folders[path.name] = ("tokenizer", str(path))
    # `python -m pretrain tokenizer` writes this folder.
    folders["given"] = ("tokenizer", str(exports / "given" / "own"))
    packages = [transformers4]
    references = Path(os.environ.get("REFERENCES", transformers4.parent / "references"))
    if compressed_tensors := [*references.glob("compressed_tensors*"), *references.glob("loguru*")]:
        packages.append(exports / "packages")
        packages[-1].mkdir()
        for package in compressed_tensors:
            (packages[-1] / package.name).symlink_to(package.absolute())
        tokenizer = tokenizer_in(str(exports / "given" / "own"))
        for precision in PRECISIONS:
            served = serve(precision, exports / precision, tokenizer)
            folders[precision] = ("quantized", str(served))
    out = exports / "read.pt"
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps([folders, TEXTS, IDS.tolist(), str(out)]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("kind", MODELS)
def test_both_versions_compute_the_same_logits(
    kind: str, exports: Path, in_version_4: dict[str, Any]
) -> None:
    result = in_version_4[kind]
    assert result["missing"] == []
    trained = logits_of(build(kind))
    torch.testing.assert_close(result["logits"], trained, rtol=0, atol=1e-4)
    folder = exports / "models" / kind
    in_version_5 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits_of(in_version_5), trained, rtol=0, atol=1e-4)
    assert result["eos"] == 2
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_version_4_reads_the_quantized_weights_of_training(
    precision: str, exports: Path, in_version_4: dict[str, Any]
) -> None:
    if precision not in in_version_4:
        pytest.skip("needs compressed-tensors; `make test` installs it")
    result = in_version_4[precision]
    hf = build("llama")
    model.round_weights(hf, torch.float32)
    for name, weight in hf.named_parameters():
        served = result["weights"][name].float()
        if weight.dim() == 2 and "layers" in name:
            linear = decode(exports / precision / "out", name.removesuffix(".weight"))
            scale = 1 if linear.scale is None else linear.scale
            if precision == "nvfp4":
                scale = 1 / scale
            weight = torch.from_numpy(linear.values * scale).bfloat16().float()
        # Version 4 rounds the tensor scales of FP8 to BF16.
        tolerance = 2**-7 if precision == "current" else 0
        torch.testing.assert_close(served, weight, rtol=tolerance, atol=0, msg=name)
        hf.get_parameter(name).data = weight
    # Version 4 quantizes activations too, except in NVFP4.
    if precision == "nvfp4":
        torch.testing.assert_close(result["logits"], logits_of(hf), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["own", "prefixed", "words", "given", "llama"])
def test_both_versions_encode_texts_equally(
    name: str, exports: Path, in_version_4: dict[str, Any]
) -> None:
    given = exports / "given" / (name if name in ("prefixed", "words") else "own")
    backend = Tokenizer.from_file(str(given / "tokenizer.json"))
    (folder,) = exports.glob(f"*s/{name}") if name != "given" else [given]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = in_version_4[name]
    for text, numbers, decoded in zip(TEXTS, result["ids"], result["decoded"], strict=True):
        assert numbers == tokenizer(text).input_ids == backend.encode(text).ids, text
        assert decoded == tokenizer.decode(numbers), text
    assert {*result["special"]} == {*tokenizer.all_special_tokens}
    assert result["template"] == tokenizer.chat_template


def test_keys_of_this_process_are_not_written(exports: Path) -> None:
    for folder in exports.glob("tokenizers/*"):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert config.keys().isdisjoint(("backend", "is_local", "local_files_only"))


def test_the_old_keys_are_those_of_published_files() -> None:
    def keys(kind: str, **values: Any) -> dict[str, Any]:
        return old_keys(AutoConfig.for_model(kind, **copy.deepcopy(values)))

    assert keys("llama", **MODELS["llama"]) == {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    qwen3 = {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"}
    assert keys("qwen3", rope_theta=1e6, dtype="bfloat16") == qwen3
    gemma3 = {"rope_theta": 5e3, "rope_local_base_freq": 3e2, "rope_scaling": LINEAR}
    assert keys("gemma3_text", rope_parameters=GEMMA3) == gemma3
    neox = {"rotary_pct": 0.5, "rotary_emb_base": 5e3, "rope_scaling": None}
    assert keys("gpt_neox", rotary_pct=0.5, rotary_emb_base=5e3) == neox
    # The recipe has changed a value of the source's file.
    assert keys("gpt2", n_positions=64, n_ctx=1024)["n_ctx"] == 64
    assert "n_ctx" not in keys("codegen", n_positions=64)


@pytest.mark.parametrize("kind", KINDS)
def test_version_5_reads_the_same_configuration_with_old_keys(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **KINDS[kind])
    for rope in rope_parameters_of(config):
        rope["rope_theta"] = 12345.0
        if rope["rope_type"] == "default":
            rope.update(LINEAR)
    config.save_pretrained(tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | old_keys(config)))
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {key: read[key] for key in expected} == expected
