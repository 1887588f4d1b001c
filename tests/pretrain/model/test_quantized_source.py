"""Load sources with quantized weights, and compare them with independent readers.

compressed-tensors and transformers quantize the weights of small models on the spot, and read them
again. They share no code with our reader.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from foundation.errors import InputError
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build
from pretrain.precision.layouts import LAYOUTS, layout_of
from pretrain.precision.quantizers import E4M3, blocks, tensor
from pretrain.settings.recipe import ModelSettings
from tests.forked_commands import forking

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BF16, FP32 = torch.bfloat16, torch.float32
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
LINEAR = "model.layers.0.self_attn.q_proj"
TOKENS = torch.arange(48)[None] % 64


def load(folder: Path, weights: torch.dtype = BF16) -> PreTrainedModel:
    source = ModelSettings(source=str(folder))
    return build(
        source,
        load_config(source),
        weights=weights,
        seed=1,
        device=torch.device("cpu"),
        backend="sdpa",
    )


def write_model(folder: Path, config: PretrainedConfig, seed: int = 3, **options: Any) -> None:
    """Write a BF16 model with random weights."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder, **options)


def rewrite(folder: Path, quantization: dict[str, Any] | None, change: Change) -> None:
    """Replace the tensors of a folder by `change(tensors)`, and set or remove its description."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))


def is_linear(name: str, value: Tensor) -> bool:
    others = ("embed_tokens", "lm_head", "mlp.gate.")
    return value.dim() == 2 and not any(other in name for other in others)


def in_fp8(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Quantize linears as transformers does when it saves a fine-grained FP8 model."""
    config = FineGrainedFP8Config(**options)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    written: dict[str, Tensor] = {}
    for name, value in tensors.items():
        written |= quantize._quantize_one(name, value) if is_linear(name, value) else {name: value}
    return {name: value.contiguous() for name, value in written.items()}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS).logits.float()


def check_equal(ours: PreTrainedModel, expected: dict[str, Tensor], theirs: Tensor) -> None:
    """Compare the parameters and the logits of a model."""
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, value in parameters.items():
        assert torch.equal(value, expected[name]), name
    ours.set_attn_implementation("sdpa")
    assert torch.equal(logits(ours), theirs)


# ── transformers' fine-grained FP8 ──

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Map each source to its configuration, the dtypes of loaded weights and of scales, and options.
BY_TRANSFORMERS: dict[str, tuple[PretrainedConfig, torch.dtype, torch.dtype, dict[str, Any]]] = {
    "tied": (Qwen3Config(**SIZES, tie_word_embeddings=True), BF16, FP32, {}),
    "in FP32": (Qwen3Config(**SIZES), FP32, FP32, {}),
    "E8M0": (Qwen3Config(**SIZES), BF16, FP32, {"scale_fmt": "ue8m0"}),
    "scales in BF16": (Qwen3Config(**SIZES), BF16, BF16, {}),
    "experts": (Qwen3MoeConfig(**SIZES, **MOE), BF16, FP32, {}),
}


@pytest.mark.parametrize("source", BY_TRANSFORMERS)
def test_block_fp8_equals_the_loading_of_transformers(source: str, tmp_path: Path) -> None:
    config, weights, scales, options = BY_TRANSFORMERS[source]

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value.to(scales) if name.endswith("scale_inv") else value
            for name, value in in_fp8(tensors, **options).items()
        }

    write_model(tmp_path, config)
    rewrite(tmp_path, FP8 | options, change)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=weights, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = load(tmp_path, weights)
    # transformers leaves parameters without codes in BF16.
    theirs = theirs.float() if weights == FP32 else theirs
    check_equal(ours, dict(theirs.named_parameters()), logits(theirs))
    from_scratch = load_config(ModelSettings(source=str(tmp_path), from_scratch=True))
    assert not any(hasattr(read, "quantization_config") for read in (ours.config, from_scratch))
    assert all(parameter.dtype == weights for parameter in ours.parameters())


def test_shards_and_their_generation_config_are_read(block_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((block_folder / "config.json").read_bytes())
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(tmp_path)
    tensors = load_file(block_folder / "model.safetensors")
    names = sorted(tensors)
    # The codes of a weight and their scales may be in two files.
    files = {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, tmp_path / file)
        files |= dict.fromkeys(names[part::2], file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ours = load(tmp_path)
    for name, value in load(block_folder).named_parameters():
        assert torch.equal(ours.get_parameter(name), value), name
    assert ours.generation_config.temperature == 0.25


# ── Other FP8 files, read with NumPy ──


def with_one_scale(name: str, shape: tuple[int, ...]) -> Change:
    """Quantize each linear with one scale, as AutoFP8, vLLM (`weight_scale`) or transformers do."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # Scales of the cache belong to attention, not to a linear.
        written = tensors | {"model.layers.1.self_attn.k_scale": torch.tensor(1.5)}
        for key, value in tensors.items():
            if is_linear(key, value):
                scale = value.abs().max().float() / 448
                written[key] = (value / scale).to(torch.float8_e4m3fn)
                written[key.replace("weight", name)] = scale.reshape(shape)
                written[key.replace("weight", "input_scale")] = torch.tensor(0.25)
        return written

    return change


def with_random_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantize each linear in blocks of 128 x 128 with random scales."""
    rng = np.random.default_rng(0)
    written = dict(tensors)
    for key, value in tensors.items():
        if is_linear(key, value):
            grid = rng.uniform(1e-5, 1e-3, [-(-length // 128) for length in value.shape])
            written[key] = (value.float() * 3000).clamp(-448, 448).to(torch.float8_e4m3fn)
            written[f"{key}_scale_inv"] = torch.from_numpy(grid.astype(np.float32))
    return written


# `kv_a_proj_with_mqa` has 144 rows, of which the second block has 16. DeepSeek-V3 has 4.5 blocks.
LATENT = DeepseekV3Config(
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    **{"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "kv_lora_rank": 128},
    **{"q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
)
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize(
    ("config", "quantization", "change", "linears"),
    [
        (Qwen3Config(**SIZES), STATIC, with_one_scale("weight_scale", ()), 14),
        (Qwen3Config(**SIZES), STATIC, with_one_scale("weight_scale_inv", (1,)), 14),
        (Qwen3Config(**SIZES), STATIC, with_one_scale("weight_scale", (1, 1)), 14),
        (LATENT, FP8, with_random_scales, 28),
    ],
    ids=["scalar", "one element", "matrix", "incomplete blocks"],
)
def test_weights_are_codes_times_the_scales_of_their_blocks(
    config: PretrainedConfig,
    quantization: dict[str, Any],
    change: Change,
    linears: int,
    tmp_path: Path,
) -> None:
    write_model(tmp_path, config)
    rewrite(tmp_path, quantization, change)
    ours = load(tmp_path, FP32)
    tensors = load_file(tmp_path / "model.safetensors")
    codes = {name: value for name, value in tensors.items() if value.itemsize == 1}
    assert len(codes) == linears
    for name, value in codes.items():
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        spread = scale.reshape(1, 1).numpy() if scale.numel() == 1 else scale.numpy()
        rows, columns = value.shape
        spread = np.kron(spread, np.ones((256, 256) if scale.numel() == 1 else (128, 128)))
        expected = value.float() * torch.from_numpy(spread[:rows, :columns].astype(np.float32))
        assert torch.equal(stored_in(ours, name), expected), name


def stored_in(hf: PreTrainedModel, name: str) -> Tensor:
    """Return the weight of a linear, which may be an expert in a stack of all experts."""
    if ".experts." not in name:
        return hf.get_parameter(name)
    stack, number, projection, _ = name.rsplit(".", 3)
    if projection == "down_proj":
        return hf.get_parameter(f"{stack}.down_proj")[int(number)]
    gate, up = hf.get_parameter(f"{stack}.gate_up_proj")[int(number)].chunk(2)
    return gate if projection == "gate_proj" else up


# ── compressed-tensors ──

GROUPS: dict[str, dict[str, Any]] = {
    "tensor": {"num_bits": 8, "strategy": "tensor"},
    "channel": {"num_bits": 8, "strategy": "channel"},
    "group": {"num_bits": 8, "strategy": "group", "group_size": 32},
    "block": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "MXFP8": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "MXFP4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "NVFP4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
}
FORMATS = {
    "MXFP8": "mxfp8-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
}
# Quantizes models with the compressors of the package, and reads them with transformers.
COMPRESS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
torch.set_grad_enabled(False)
for folder, kept in json.loads(sys.argv[1]).items():
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    declared = config["quantization_config"]
    scheme = QuantizationScheme(**declared["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(declared["format"])
    args = scheme.weights
    written = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        linear = name.removesuffix(".weight")
        if weight.dim() < 2 or any(part in name for part in kept):
            written[name] = weight
            continue
        values = weight.float()
        if args.strategy == "tensor":
            blocks = values.reshape(1, -1)
        elif args.strategy == "channel":
            blocks = values[:, None]
        elif args.strategy == "block":
            blocks = values.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            blocks = blocks.transpose(1, 2).flatten(2)
        else:
            blocks = values.unflatten(-1, (-1, args.group_size))
        state = {"weight": values}
        ends = values.min(), values.max()
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(*ends).reshape(1)
        scale, zero = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
        )
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        compressed = compressor.compress(state, scheme)
        compressed.pop("weight_zero_point", None)
        written |= {f"{linear}.{key}": value.contiguous() for key, value in compressed.items()}
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    dequantize = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=dequantize
    )
    tokens = torch.arange(48)[None] % 64
    torch.save((dict(model.named_parameters()), model(tokens).logits.float()), folder / "read.pt")
"""


@pytest.fixture(scope="module")
def compressed(references: Path, tmp_path_factory: Any) -> dict[str, Path]:
    """Map the names in GROUPS to folders that compressed-tensors has written and read.

    The package runs in another process, because transformers would load it into every run.
    """
    packages = [*references.glob("compressed_tensors*"), *references.glob("loguru*")]
    if not packages:
        pytest.skip(f"needs compressed-tensors in {references}; `make test` installs it")
    root = tmp_path_factory.mktemp("compressed")
    site = root / "site"
    site.mkdir()
    for package in packages:
        (site / package.name).symlink_to(package.absolute())
    folders = {name: root / name for name in (*GROUPS, "mixture")}
    for number, (name, folder) in enumerate(folders.items()):
        group = GROUPS.get(name, GROUPS["channel"])
        config: PretrainedConfig = Qwen3Config(**SIZES)
        if name == "mixture":
            config = Qwen3MoeConfig(
                **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
            )
        write_model(folder, config, number)
        rewrite(folder, quantization_of(name, group), unchanged)
    kept = ["embed_tokens", "lm_head", "mlp.gate."]
    script = site / "compress.py"
    script.write_text(COMPRESS)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps({str(f): kept for f in folders.values()})],
        env=forking() | {"FORKED_SCRIPTS": script.name},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folders


def quantization_of(name: str, group: dict[str, Any]) -> dict[str, Any]:
    weights = {"type": "float", "symmetric": True, "dynamic": False} | group
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS.get(name, "float-quantized"),
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "model.vision.of.another.model"],
    }


CHANNELS = quantization_of("channel", {"num_bits": 8, "strategy": "channel"})
# Weights are stored rotated, and servers rotate the inputs.
ROTATED = {
    "config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"]}]}}
}


def with_group(weights: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return the description of a file whose scales belong to rows, with a second group."""
    (group,) = quantization_of("", weights)["config_groups"].values()
    groups = CHANNELS["config_groups"] | {"group_1": group | keys}
    return CHANNELS | {"config_groups": groups}


@pytest.mark.parametrize("name", [*GROUPS, "mixture"])
def test_weights_and_logits_equal_those_of_compressed_tensors(
    name: str, compressed: dict[str, Path]
) -> None:
    folder = compressed[name]
    check_equal(load(folder), *torch.load(folder / "read.pt", weights_only=True))


def test_an_older_name_of_fp8_is_read(compressed: dict[str, Path], tmp_path: Path) -> None:
    older = CHANNELS | {"format": "naive-quantized"}
    copy_of(compressed["channel"], tmp_path, older, unchanged)
    expected = load(compressed["channel"]).get_parameter(f"{LINEAR}.weight")
    assert torch.equal(load(tmp_path).get_parameter(f"{LINEAR}.weight"), expected)


# ── Refusals ──

WEIGHT = f"{LINEAR}.weight"
SCALE = f"{LINEAR}.weight_scale_inv"


def unchanged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


def with_value(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors | {name: value(tensors[name]).contiguous()}


def without(*endings: str) -> Change:
    return lambda tensors: {
        name: value for name, value in tensors.items() if not name.endswith(endings)
    }


def copy_of(folder: Path, copy: Path, quantization: dict[str, Any] | None, change: Change) -> Path:
    copy.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    rewrite(copy, quantization, change)
    return copy


# Changes of the tensors of a folder in FP8 blocks, and words of the message.
DAMAGES: list[tuple[Change, str]] = [
    (without(SCALE), rf"{SCALE} is missing"),
    (without(WEIGHT), rf"no weights for 1 .*{WEIGHT}\)"),
    (with_value(SCALE, lambda scale: scale.repeat(2, 1)), rf"{LINEAR}: .* \[2, 1\].* \[1, 1\]"),
    (
        with_value(SCALE.replace("self_attn.q", "mlp.up"), lambda scale: scale.T),
        r"up_proj: weight_scale_inv has the shape \[1, 2\].*the shape \[2, 1\]",
    ),
    (with_value(SCALE, lambda scale: scale.long()), r"dtype torch\.int64"),
    (with_value(SCALE, torch.reciprocal), rf"{LINEAR}: .* factors from 0 to 1"),
    (with_value(SCALE, torch.neg), rf"{LINEAR}: .* factors from 0 to 1"),
    (with_value(SCALE, lambda scale: scale * torch.nan), "factors up to nan"),
    (lambda tensors: tensors | {f"{WEIGHT}_scale": torch.ones(1)}, "weight_scale is missing"),
    (
        with_value(WEIGHT, lambda codes: codes.float().to(torch.float8_e5m2)),
        rf"{WEIGHT} in F8_E5M2 has no scales",
    ),
    (with_value(WEIGHT, lambda codes: codes.view(torch.int8)), WEIGHT),
    (with_value(WEIGHT, lambda codes: codes.bfloat16()), rf"no place in the model \({SCALE}\)"),
    (
        lambda tensors: {name: value.bfloat16() for name, value in without("inv")(tensors).items()},
        "no weight has the codes of `quantization_config`",
    ),
    (
        lambda tensors: {name.replace("weight_scale", "scale"): v for name, v in tensors.items()},
        "weight_scale_inv is missing",
    ),
    (
        with_value(WEIGHT, lambda codes: torch.full_like(codes.byte(), 127).view(codes.dtype)),
        f"{WEIGHT} contains NaN",
    ),
]
OTHER_SIZES = {"group": 64, "MXFP8": 8, "NVFP4": 32}
# Descriptions of this folder, and words of the message.
UNKNOWN: list[tuple[dict[str, Any] | None, str]] = [
    (None, r"weight in F8_E4M3 has no scales"),
    ({"quant_method": "gptq", "bits": 4}, "`quant_method: gptq` with `format: None` is not"),
    ({"bits": 4}, "quant_method"),
    (CHANNELS | {"format": "pack-quantized"}, "pack-quantized` is not"),
    ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "config_groups"),
    (quantization_of("", {"num_bits": 8, "strategy": "tensor"}), "weight_scale is missing"),
    (quantization_of("", {"num_bits": 8}), "strategy"),
    (FP8 | {"weight_block_size": [64, 64]}, r"expected are the shape \[2, 4\]"),
    (FP8 | {"weight_block_size": [10**12, 10**12]}, r"expected are the shape \[1, 1\]"),
    (FP8 | {"weight_block_size": [0.5]}, "weights cannot be loaded"),
    (quantization_of("", {}) | {"config_groups": {"a": {"weights": None}}}, "strategy"),
    (FP8 | {"weight_block_size": [-128, 128]}, "weights cannot be loaded"),
    (FP8 | {"weight_block_size": None}, r"expected are the shape \[1, 1\]"),
    (FP8 | {"hadamard_config": {"block_size": 32}}, r"config\.hadamard_config\.block_size: 32"),
    (FP8 | {"expert_dtype": "fp4"}, r"quantization_config\.expert_dtype: 'fp4'"),
    (CHANNELS | {"transform_config": ROTATED}, r"config\.transform_config\.config_groups\.R4"),
    (CHANNELS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (with_group({"strategy": "group", "group_size": 32}), r"must have one `strategy`"),
    (with_group({"strategy": "channel", "symmetric": False}), "symmetric: False"),
    (with_group({"strategy": "channel"}, hadamard=True), r"group_1\.hadamard: True"),
]

# Names in GROUPS, sizes of groups, changes, and words of the message.
DAMAGED_GROUPS: list[tuple[str, int, Change, str]] = [
    *((name, size, unchanged, "scale has the shape") for name, size in OTHER_SIZES.items()),
    ("NVFP4", 16, with_value(f"{WEIGHT}_global_scale", torch.reciprocal), LINEAR),
    ("NVFP4", 16, with_value(f"{WEIGHT}_global_scale", torch.zeros_like), LINEAR),
    ("NVFP4", 16, with_value(f"{WEIGHT}_scale", lambda scale: scale.view(torch.uint8)), LINEAR),
    ("NVFP4", 16, without(f"{WEIGHT}_global_scale"), LINEAR),
    ("NVFP4", 16, lambda tensors: tensors | {WEIGHT: torch.ones(128, 128)}, LINEAR),
]


@pytest.fixture(scope="module")
def block_folder(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("block")
    write_model(folder, Qwen3Config(**SIZES))
    rewrite(folder, FP8, in_fp8)
    return folder


@pytest.mark.parametrize(
    ("source", "quantization", "change", "message"),
    [
        *(("FP8 blocks", FP8, *damage) for damage in DAMAGES),
        *(("FP8 blocks", keys, unchanged, words) for keys, words in UNKNOWN),
        *(
            (name, quantization_of(name, GROUPS[name] | {"group_size": size}), change, words)
            for name, size, change, words in DAMAGED_GROUPS
        ),
    ],
)
def test_damaged_tensors_and_unknown_descriptions_are_refused(
    source: str,
    quantization: dict[str, Any] | None,
    change: Change,
    message: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    if source == "FP8 blocks":
        folder = request.getfixturevalue("block_folder")
    else:
        folder = request.getfixturevalue("compressed")[source]
    copy_of(folder, tmp_path, quantization, change)
    with pytest.raises(InputError, match=rf"`model\.source`.*{message}"):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(block_folder: Path, tmp_path: Path) -> None:
    copy_of(block_folder, tmp_path, FP8, unchanged)
    scale = load_file(tmp_path / "model.safetensors")[SCALE]
    save_file({SCALE: scale}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(InputError, match=rf"{SCALE} is in two files"):
        load(tmp_path)


def test_keys_that_do_not_change_the_weights_are_accepted() -> None:
    keys = {
        **{"version": "0.14.0.1", "provider": "auto-round", "global_compression_ratio": None},
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": ["lm_head"]},
        "transform_config": {"config_groups": {}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": False},
    }
    weights = {"strategy": "channel", "actorder": "static", "observer_kwargs": {"maxshrink": 0.2}}
    activations = {"input_activations": {"dynamic": "local"}, "format": "float-quantized"}
    assert layout_of(with_group(weights, **activations) | keys).block == (1, None)
    assert layout_of(FP8 | FineGrainedFP8Config().to_dict()).block == (128, 128)


# ── Our layouts, read and written ──

QUANTIZERS: dict[str, Callable[[Tensor], Any]] = {
    "FP8": lambda x: tensor.quantize_by_amax(x, None, E4M3),
    "FP8 blocks": lambda x: blocks.quantize_fp8(x, E4M3, two_dimensional=True),
    "MXFP8": lambda x: blocks.quantize_mx(x, E4M3),
    "NVFP4": lambda x: blocks.quantize_nvfp4(x, two_dimensional=True),
}


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(QUANTIZERS)),
    seed=st.integers(0, 2**32),
    exponent=st.integers(-30, 0),
    spread=st.integers(0, 12),
)
def test_reading_inverts_writing(name: str, seed: int, exponent: int, spread: int) -> None:
    """All values are equal, and quantizing them again changes no value."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(128, 256, generator=generator) * 2.0**exponent
    weight *= torch.exp2(-spread * torch.rand(128, 1, generator=generator))
    quantized = QUANTIZERS[name](weight.bfloat16())
    layout = LAYOUTS[name]
    written = layout.tensors(quantized)
    read = layout_of(layout.config).read("linear", [written[part] for part in layout.parts])
    assert torch.equal(read.codes, quantized.codes)
    if name == "NVFP4":
        # The file has the reciprocal of the tensor's scale.
        torch.testing.assert_close(read.dequantize(), quantized.dequantize(), rtol=3e-7, atol=0)
    else:
        assert torch.equal(read.dequantize(), quantized.dequantize())
    again = QUANTIZERS[name](read.dequantize().bfloat16())
    assert torch.equal(again.dequantize().bfloat16(), read.dequantize().bfloat16())
