"""Weights that a layout cannot hold exactly, and linears that servers stack."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foundation.errors import InputError
from pretrain.model.exported import write_model
from pretrain.precision.layouts import LAYOUTS
from pretrain.precision.quantizers.blocks import quantize_nvfp4
from pretrain.precision.settings import LowPrecisionSettings
from pretrain.run.served import served_weights


def test_the_reciprocal_of_nvfp4_moves_values_by_one_unit_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(512, 1024, generator=generator) * 0.12).bfloat16()
    quantized = quantize_nvfp4(weight, two_dimensional=True)
    tensors = LAYOUTS["NVFP4"].tensors(quantized)
    scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    served = (quantized.codes * scale.repeat_interleave(16, 1)).bfloat16()
    trained = quantized.dequantize().bfloat16()
    distance = (served.view(torch.int16).int() - trained.view(torch.int16).int()).abs()
    assert 0 < int(distance.count_nonzero()) < 0.06 * weight.numel()
    assert int(distance.max()) == 1
    scales = tensors["weight_scale"].float()
    assert torch.equal(scales.repeat_interleave(16, 1), quantized.block_scale)


# ── Linears that servers stack ──


SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}


def served(
    folder: Path,
    precision: str,
    quantized: Collection[str],
    *,
    fused: bool = False,
    model_type: str = "qwen3",
) -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Return a model of one layer, and its export after a run that quantizes some linears.

    quantized: last parts of the names of these linears.
    fused: True if the run has computed q, k and v in one product, and gate and up in another.
    """
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=False)
    hf = AutoModelForCausalLM.from_config(config).bfloat16()
    # The largest value of each linear differs.
    for number, weight in enumerate(hf.parameters()):
        weight.data *= 1 + number
    products = [
        {
            "name": name,
            "module": "fused Linear" if fused else "LowPrecisionLinear",
            "products": name.rpartition(".")[2] in quantized,
        }
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear)
    ]
    (folder / "audit.json").write_text(json.dumps({"effective": precision, "products": products}))
    settings = LowPrecisionSettings(on_unsupported="emulate")
    tensors, layout, facts = served_weights(folder, precision, settings, hf, hf.get_parameter, {})
    return hf, tensors, layout, facts


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STACKED = (LINEARS[:3], LINEARS[4:6])


@pytest.mark.parametrize("precision", ["current", "nvfp4"])
def test_fused_linears_share_the_scale_of_their_stack(precision: str, tmp_path: Path) -> None:
    hf, tensors, _, facts = served(tmp_path, precision, LINEARS, fused=True)
    weights = {
        name.split(".")[-2]: weight.detach().float()
        for name, weight in hf.named_parameters()
        if name.endswith("_proj.weight")
    }
    scales = {
        name.split(".")[-2]: scale.item()
        for name, scale in tensors.items()
        if name.endswith("weight_global_scale" if precision == "nvfp4" else "weight_scale")
    }
    for stack in (*STACKED, ("o_proj",), ("down_proj",)):
        largest = max(weights[name].abs().max().item() for name in stack)
        # The largest E4M3 value is 448, and the largest E2M1 value is 6.
        expected = 448 * 6 / largest if precision == "nvfp4" else largest / 448
        for name in stack:
            assert scales[name] == pytest.approx(expected, rel=1e-6), name
    assert "tensor scales" not in facts


@pytest.mark.parametrize("precision", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("kept", [*(name for stack in STACKED for name in stack), "o_proj"])
def test_linears_that_servers_stack_have_one_format(
    precision: str, kept: str, tmp_path: Path
) -> None:
    quantized = {*LINEARS} - {kept}
    hf, tensors, layout, facts = served(tmp_path, precision, quantized)
    in_bf16 = {kept, *(name for stack in STACKED if kept in stack for name in stack)}
    listed = layout["modules_to_not_convert" if precision == "block" else "ignore"]
    assert {name.rpartition(".")[2] for name in listed} == in_bf16 | {"lm_head"}
    for name, weight in hf.named_parameters():
        linear = name.split(".")[-2]
        if linear in LINEARS:
            assert (tensors[name].dtype == torch.bfloat16) == (linear in in_bf16), name
        if linear in in_bf16:
            assert torch.equal(tensors[name], weight)
    assert ("kept in BF16" in facts) == (kept != "o_proj")
    if kept != "o_proj":
        assert facts["kept in BF16"].startswith(f"{len(in_bf16) - 1} linear")


# ── Weights that transformers saves under other names or in other tensors ──


def test_weights_that_transformers_stacks_on_saving_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stacks or splits weights when it saves hrm_text"):
        served(tmp_path, "block", LINEARS, model_type="hrm_text")


def test_scales_of_a_renamed_head_are_renamed_with_it(tmp_path: Path) -> None:
    """Test the name `embed_out`, which GPT-NeoX's files have for `lm_head`."""
    hf, tensors, layout, _ = served(tmp_path, "block", ["lm_head"], model_type="gpt_neox")
    hf.config.quantization_config = layout
    write_model(hf, tensors.items(), None, tmp_path / "out", {})
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved["embed_out.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(saved["embed_out.weight_scale_inv"], tensors["lm_head.weight_scale_inv"])
