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
LINEAR = "model.layers.0.self_attn.q_proj"
TOKENS = torch.arange(48)[None] % 64


def load(folder: Path, weights: torch.dtype = torch.bfloat16) -> PreTrainedModel:
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


def rewrite(folder: Path, quantization: dict[str, Any] | None, change: Callable) -> None:
    """Replace the tensors of a folder by `change(tensors)`, and set `quantization_config`."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
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


def check_equal(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    expected = dict(theirs.named_parameters())
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, value in parameters.items():
        assert torch.equal(value, expected[name]), name
    ours.set_attn_implementation("sdpa")
    assert torch.equal(logits(ours), logits(theirs))


# ── transformers' fine-grained FP8 ──


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("tied", [True, False])
def test_block_fp8_equals_the_loading_of_transformers(
    weights: torch.dtype, scale_fmt: str | None, tied: bool, tmp_path: Path
) -> None:
    write_model(tmp_path, Qwen3Config(**SIZES, tie_word_embeddings=tied))
    options = {"scale_fmt": scale_fmt} if scale_fmt else {}
    rewrite(tmp_path, FP8 | options, lambda tensors: in_fp8(tensors, **options))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=weights, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = load(tmp_path, weights)
    # transformers leaves parameters without codes in BF16.
    check_equal(ours, theirs.float() if weights == torch.float32 else theirs)
    assert not hasattr(ours.config, "quantization_config")
    assert all(parameter.dtype == weights for parameter in ours.parameters())


def test_experts_of_a_mixture_are_dequantized_and_stacked(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128
    )
    write_model(tmp_path, config)
    rewrite(tmp_path, FP8, in_fp8)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv" in names
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    check_equal(load(tmp_path), theirs)


def test_shards_and_their_generation_config_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "one", Qwen3Config(**SIZES))
    rewrite(tmp_path / "one", FP8, in_fp8)
    AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(folder)
    names = sorted(tensors)
    # The codes of a weight and their scales may be in two files.
    files = {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, folder / file)
        files |= dict.fromkeys(names[part::2], file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ours = load(folder)
    for name, value in load(tmp_path / "one").named_parameters():
        assert torch.equal(ours.get_parameter(name), value), name
    assert ours.generation_config.temperature == 0.25


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_static_fp8_has_either_name_of_a_scale(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """AutoFP8 and vLLM write `weight_scale`, transformers writes `weight_scale_inv`."""
    write_model(tmp_path, Qwen3Config(**SIZES))
    expected: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        written = {}
        for key, value in tensors.items():
            written[key] = value
            if is_linear(key, value):
                scale = value.abs().max().float() / 448
                written[key] = (value / scale).to(torch.float8_e4m3fn)
                written[key.replace("weight", name)] = scale.reshape(shape)
                written[key.replace("weight", "input_scale")] = torch.tensor(0.25)
                expected[key] = written[key].float() * scale
        # Scales of the cache belong to attention, not to a linear.
        return written | {"model.layers.1.self_attn.k_scale": torch.tensor(1.5)}

    rewrite(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, change)
    ours = load(tmp_path, torch.float32)
    assert len(expected) == 14
    for key, value in expected.items():
        assert torch.equal(ours.get_parameter(key), value)


def test_incomplete_blocks_have_their_own_scale(tmp_path: Path) -> None:
    """The projection `kv_a_proj_with_mqa` of DeepSeek-V3 has 576 rows, 4.5 blocks."""
    config = DeepseekV3Config(
        **{key: value for key, value in SIZES.items() if key != "head_dim"},
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        kv_lora_rank=128,
        q_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    write_model(tmp_path, config)
    rng = np.random.default_rng(0)
    expected: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        written = {}
        for key, value in tensors.items():
            written[key] = value
            if is_linear(key, value):
                rows, columns = value.shape
                codes = (value.float() * 3000).clamp(-448, 448).to(torch.float8_e4m3fn)
                grid = rng.uniform(1e-5, 1e-3, (-(-rows // 128), -(-columns // 128)))
                grid = grid.astype(np.float32)
                spread = np.kron(grid, np.ones((128, 128), np.float32))[:rows, :columns]
                written[key] = codes
                written[f"{key}_scale_inv"] = torch.from_numpy(grid)
                expected[key] = codes.float() * torch.from_numpy(spread)
        return written

    rewrite(tmp_path, FP8, change)
    ours = load(tmp_path, torch.float32)
    down = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert expected[down].shape == (144, 128)
    for key, value in expected.items():
        if ".experts." not in key:
            assert torch.equal(ours.get_parameter(key), value), key
    stacked = ours.get_parameter("model.layers.1.mlp.experts.down_proj")
    for number in range(4):
        name = f"model.layers.1.mlp.experts.{number}.down_proj.weight"
        assert torch.equal(stacked[number], expected[name])


def test_bf16_scales_equal_the_loading_of_transformers(tmp_path: Path) -> None:
    write_model(tmp_path, Qwen3Config(**SIZES))
    rewrite(
        tmp_path,
        FP8,
        lambda tensors: {
            name: value.bfloat16() if name.endswith("scale_inv") else value
            for name, value in in_fp8(tensors).items()
        },
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    check_equal(load(tmp_path), theirs)


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
        rewrite(folder, quantization_of(name, group), lambda tensors: tensors)
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
    ours = load(compressed[name])
    expected, expected_logits = torch.load(compressed[name] / "read.pt", weights_only=True)
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == expected.keys()
    for key, value in parameters.items():
        assert torch.equal(value, expected[key]), key
    ours.set_attn_implementation("sdpa")
    assert torch.equal(logits(ours), expected_logits)


def test_an_older_name_of_fp8_is_read(compressed: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(compressed["channel"] / "model.safetensors")
    config = json.loads((compressed["channel"] / "config.json").read_text())
    config["quantization_config"]["format"] = "naive-quantized"
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = load(compressed["channel"]).get_parameter(f"{LINEAR}.weight")
    assert torch.equal(load(tmp_path).get_parameter(f"{LINEAR}.weight"), expected)


# ── Refusals ──

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
SCALE = f"{LINEAR}.weight_scale_inv"


def with_value(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors | {name: value(tensors[name]).contiguous()}


def without(name: str) -> Change:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


# Map each damage to the change of the tensors, and to the message.
DAMAGES: dict[str, tuple[Change, str]] = {
    "no scale": (without(SCALE), rf"{SCALE} is missing"),
    "no codes": (without(f"{LINEAR}.weight"), rf"no weights for 1 .*{LINEAR}\.weight\)"),
    "another shape": (
        with_value(SCALE, lambda scale: scale.repeat(2, 1)),
        rf"{LINEAR}: weight_scale_inv has the shape \[2, 1\].*expected are the shape \[1, 1\]",
    ),
    "scales of rows": (
        with_value("model.layers.0.mlp.up_proj.weight_scale_inv", lambda scale: scale.T),
        r"mlp\.up_proj: weight_scale_inv has the shape \[1, 2\].*the shape \[2, 1\]",
    ),
    "integer scales": (with_value(SCALE, lambda scale: scale.long()), r"dtype torch\.int64"),
    "bytes": (
        with_value(SCALE, lambda scale: torch.full_like(scale, 0).byte()),
        r"dtype torch\.uint8",
    ),
    "reciprocals": (with_value(SCALE, torch.reciprocal), rf"{LINEAR}: .* factors from 0 to 1"),
    "negative": (with_value(SCALE, torch.neg), rf"{LINEAR}: .* factors from 0 to 1"),
    "not finite": (with_value(SCALE, lambda scale: scale * torch.nan), r"factors up to nan"),
    "two scales": (
        lambda tensors: tensors | {f"{LINEAR}.weight_scale": torch.ones(1)},
        r"model\.layers\..*\.weight_scale is missing",
    ),
    "another codec": (
        with_value(f"{LINEAR}.weight", lambda codes: codes.float().to(torch.float8_e5m2)),
        rf"{LINEAR}\.weight in F8_E5M2 has no scales",
    ),
    "integers": (
        with_value(f"{LINEAR}.weight", lambda codes: codes.view(torch.int8)),
        rf"{LINEAR}\.weight",
    ),
    "a scale without codes": (
        with_value(f"{LINEAR}.weight", lambda codes: codes.bfloat16()),
        rf"1 of its weights have no place in the model \({SCALE}\)",
    ),
    "nothing quantized": (
        lambda tensors: {
            name: value.bfloat16()
            for name, value in tensors.items()
            if not name.endswith("scale_inv")
        },
        r"no weight has the codes of `quantization_config`",
    ),
    "another name": (
        renamed("weight_scale_inv", "scale_inv"),
        "weight_scale_inv is missing",
    ),
    "NaN codes": (
        with_value(f"{LINEAR}.weight", lambda c: torch.full_like(c.byte(), 127).view(c.dtype)),
        rf"{LINEAR}\.weight contains NaN",
    ),
}


@pytest.fixture(scope="module")
def block_folder(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("block")
    write_model(folder, Qwen3Config(**SIZES))
    rewrite(folder, FP8, in_fp8)
    return folder


def copy_of(folder: Path, copy: Path, quantization: dict[str, Any] | None, change: Change) -> Path:
    copy.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    rewrite(copy, quantization, change)
    return copy


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(
    damage: str, block_folder: Path, tmp_path: Path
) -> None:
    change, message = DAMAGES[damage]
    copy_of(block_folder, tmp_path, FP8, change)
    with pytest.raises(InputError, match=rf"`model\.source`.*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("change", [lambda tensors: tensors, without(SCALE)])
def test_codes_without_a_description_are_refused(
    change: Change, block_folder: Path, tmp_path: Path
) -> None:
    copy_of(block_folder, tmp_path, None, change)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"weight in F8_E4M3 has no scales"):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(block_folder: Path, tmp_path: Path) -> None:
    copy_of(block_folder, tmp_path, FP8, lambda tensors: tensors)
    scale = load_file(tmp_path / "model.safetensors")[SCALE]
    save_file({SCALE: scale}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(InputError, match=rf"{SCALE} is in two files"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "`quant_method: gptq` with `format: None` is not"),
        ({"quant_method": "modelopt"}, "`quant_method: modelopt`"),
        ({"bits": 4}, "quant_method"),
        (quantization_of("pack", {}) | {"format": "pack-quantized"}, "pack-quantized` is not"),
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
        (FP8 | {"online_rotation": True}, r"quantization_config\.online_rotation: True"),
        (FP8 | {"expert_dtype": "fp4"}, r"quantization_config\.expert_dtype: 'fp4'"),
        (CHANNELS | {"transform_config": ROTATED}, r"config\.transform_config\.config_groups\.R4"),
        (CHANNELS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (with_group({"strategy": "tensor"}), r"must have one `strategy`"),
        (with_group({"strategy": "group", "group_size": 32}), r"must have one `strategy`"),
        (with_group({"strategy": "channel", "symmetric": False}), "symmetric: False"),
        (with_group({"strategy": "channel"}, hadamard=True), r"group_1\.hadamard: True"),
    ],
)
def test_an_unknown_description_is_refused(
    quantization: dict[str, Any], message: str, block_folder: Path, tmp_path: Path
) -> None:
    copy_of(block_folder, tmp_path, quantization, lambda tensors: tensors)
    with pytest.raises(InputError, match=rf"`model\.source`.*{message}"):
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


@pytest.mark.parametrize("size", [8, 32, 64])
@pytest.mark.parametrize("name", ["group", "MXFP8", "NVFP4"])
def test_another_group_size_than_that_of_the_scales_is_refused(
    name: str, size: int, compressed: dict[str, Path], tmp_path: Path
) -> None:
    if size == GROUPS[name]["group_size"]:
        return
    group = GROUPS[name] | {"group_size": size}
    copy_of(compressed[name], tmp_path, quantization_of(name, group), lambda tensors: tensors)
    with pytest.raises(InputError, match=r"weight_scale has the shape"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        with_value(f"{LINEAR}.weight_global_scale", torch.reciprocal),
        with_value(f"{LINEAR}.weight_global_scale", lambda scale: scale * 0),
        with_value(f"{LINEAR}.weight_scale", lambda scale: scale.view(torch.uint8)),
        without(f"{LINEAR}.weight_global_scale"),
        lambda tensors: tensors | {f"{LINEAR}.weight": torch.ones(128, 128)},
    ],
)
def test_damaged_nvfp4_is_refused(
    change: Change, compressed: dict[str, Path], tmp_path: Path
) -> None:
    quantization = quantization_of("NVFP4", GROUPS["NVFP4"])
    copy_of(compressed["NVFP4"], tmp_path, quantization, change)
    with pytest.raises(InputError, match=LINEAR):
        load(tmp_path)


# ── Our layouts, read and written ──

QUANTIZERS: dict[str, Callable[[Tensor], Any]] = {
    "FP8": lambda x: tensor.quantize_by_amax(x, None, E4M3),
    "FP8 blocks": lambda x: blocks.quantize_fp8(x, E4M3, two_dimensional=True),
    "MXFP8": lambda x: blocks.quantize_mx(x, E4M3),
    "NVFP4": lambda x: blocks.quantize_nvfp4(x, two_dimensional=True),
}


@settings(deadline=None, max_examples=20)
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
