"""Train from a source with quantized weights, and export the layout of the source again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from pretrain.__main__ import main
from pretrain.precision.layouts import LAYOUTS
from tests.conftest import BLOCK_LENGTH, VOCABULARY


def write_source(folder: Path, layout: str) -> dict[str, Tensor]:
    """Write a small Qwen3 with quantized linears. Return its tensors."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    config = Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True, **sizes, **heads)
    torch.manual_seed(7)
    hf = AutoModelForCausalLM.from_config(config).bfloat16()
    hf.config.quantization_config = LAYOUTS[layout].config
    tensors: dict[str, Tensor] = {}
    for name, weight in hf.named_parameters():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.detach()
            continue
        linear = name.removesuffix(".weight")
        blocks = (1, 32) if layout == "MXFP8" else (128, 128)
        split = weight.detach().float().unflatten(0, (-1, blocks[0])).unflatten(2, (-1, blocks[1]))
        scale = torch.exp2((split.abs().amax((1, 3)) / 448).log2().ceil())
        codes = (split / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
        tensors[name] = codes.contiguous()
        if layout == "MXFP8":
            tensors[f"{linear}.weight_scale"] = (scale.log2() + 127).to(torch.uint8)
        else:
            tensors[f"{linear}.weight_scale_inv"] = scale
    folder.mkdir()
    hf.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize(("layout", "precision"), [("FP8 blocks", "block"), ("MXFP8", "mxfp8")])
def test_a_round_trip_without_updates_changes_no_value(
    layout: str,
    precision: str,
    start_here: Callable,
    recipe_for: Callable,
    block_packs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_source(tmp_path / "source", layout)
    recipe = recipe_for(tmp_path / "run") | {
        "model": {"source": str(tmp_path / "source")},
        "data": {"packs": str(block_packs), "length": BLOCK_LENGTH},
        "batch": {"tokens": 2 * BLOCK_LENGTH, "microbatch": 2},
        # BF16 weights do not change by such a small step.
        "optimizer": {"learning_rate": 1e-30},
        "schedule": {"warmup": 0},
        "weights": "bf16",
        "train": {"steps": 1},
        "evaluate": {},
        "precision": precision,
        "fp8_config": {"on_unsupported": "emulate", "keep_bf16_layers": {"last": 0}},
    }
    run = start_here(recipe, tmp_path)
    assert run.status == 0, run.output
    values = sum(value.numel() for name, value in source.items() if name.endswith("proj.weight"))
    final = json.loads((run.run_dir / "final" / "config.json").read_text())
    assert "quantization_config" not in final

    out = tmp_path / "out"
    assert main(["export", str(run.run_dir), "--precision", "trained", "--out", str(out)]) == 0
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == source.keys()
    unchanged = 0
    for name, value in source.items():
        suffix = "_scale" if layout == "MXFP8" else "_scale_inv"
        if f"{name}{suffix}" not in source:
            assert "scale" in name or torch.equal(exported[name], value), name
            continue
        before, after = (tensors[f"{name}{suffix}"] for tensors in (source, exported))
        rows, columns = value.shape[0] // len(before), value.shape[1] // before.shape[1]
        if layout == "MXFP8":
            ratio = torch.exp2(before.float() - after.float())
        else:
            ratio = before / after
        # A block with the largest code 224 may get codes up to 448, and half of the scale.
        assert set(ratio.flatten().tolist()) <= {1.0, 2.0}
        spread = ratio.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        assert torch.equal(exported[name].float(), value.float() * spread)
        unchanged += int((spread == 1).sum())
    assert unchanged > 0.8 * values
