"""The matrices of Muon and the decayed weights of all model types that the launcher trains."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from foundation.errors import InputError
from pretrain.model.configuration import config_values
from pretrain.model.huggingface import build_on_meta, check_architecture, decoder_layers
from pretrain.model.hybrids.families import FAMILIES
from pretrain.observe.update_check import is_decayed
from pretrain.optimizer.adamw import groups_of
from pretrain.optimizer.muon import MatrixWeight, find_matrix_weights
from pretrain.precision.scope import LINEARS
from pretrain.settings.recipe import LossSettings

# The language models of transformers that `check_architecture` accepts.
NAMES = """
afmoe apertus arcee aria_text bamba beam bitnet cohere cohere2 cohere2_moe ctrl cwm diffllama
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text
gemma4_text gemma4_unified_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna
lfm2 lfm2_moe lfm3 llama mellum minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mixtral moshi nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3
phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
solar_open starcoder2 vaultgemma
"""
TRAINED = NAMES.split()
# Values of the keys that a configuration has, under any of their names.
SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    **{"moe_intermediate_size": 48, "shared_intermediate_size": 56},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"n_embd": 64, "n_head": 4, "n_layer": 2},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "attention_dropout": 0.0, "attn_pdrop": 0.0},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "attn_layer_indices": [1]},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 16),
    **{"mamba_n_groups": 2, "n_groups": 2, "mamba_d_ssm": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_qk_norm": True},
}
QWENS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# Kinds of two layers of types whose configuration has no kinds for any number of layers.
MIXED_LAYERS = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), ("conv", "full_attention")),
    "minimax": ("full_attention", "full_attention"),
    **dict.fromkeys(
        ("granitemoehybrid", "nemotron_h", "olmo_hybrid", *QWENS),
        ("linear_attention", "full_attention"),
    ),
}
# Patterns for the names of parameters in decoder layers, and of the parameters of routers.
IN_LAYER = re.compile(r"\.\d+\.")
# Modules of hybrid models whose projections stack matrices of several sizes, or by heads.
MIXER = re.compile(r"\.(linear_attn|self_attn|mamba|mixer|conv)$")
ROUTER = re.compile(r"\.(gate|router\w*)(\.|$)")
# Types that train, but whose layers stack matrices in a layout that Muon does not know.
UNKNOWN_LAYOUTS = {
    "aria_text",
    "ctrl",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "jetmoe",
    "persimmon",
    "phi3",
}


def small_config(model_type: str) -> PretrainedConfig:
    """Return the configuration of a small model."""
    kind = CONFIG_MAPPING[model_type]
    keys = config_values(kind, {})
    names = {kind.attribute_map.get(key, key): value for key, value in SIZES.items()}
    values = {name: value for name, value in names.items() if name in keys}
    layer_types = MIXED_LAYERS.get(model_type)
    changes: dict[str, Any] = {"layer_types": list(layer_types)} if layer_types else {}
    return kind.from_dict(values | changes | {"model_type": model_type})


def built(model_type: str) -> PreTrainedModel:
    """Return a small model on the meta device."""
    model = build_on_meta(small_config(model_type))
    check_architecture(model, 64, LossSettings())
    return model


def muon_matrices(model: PreTrainedModel) -> dict[str, int]:
    """Map the name of each parameter that Muon must update to its number of matrices.

    These are the matrices in the layers, except for routers. The rule is derived from names and
    sizes, because the test covers the optimizer's own rule. For example, experts have the weights
    gate_up [8, 2 x 64, 16] and down [8, 16, 64]. The second largest weight of the module, here
    down, has one matrix for each expert. gate_up has twice the values of down, so it has two
    matrices for each expert.
    """
    modules: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        is_matrix = is_decayed(name, parameter) and min(parameter.shape[-2:]) > 1
        if is_matrix and IN_LAYER.search(name) and not ROUTER.search(name):
            module = name.removesuffix(".weight").rpartition(".")[0]
            modules[module][name] = parameter
    matrices = {}
    for module, parameters in modules.items():
        # The size of the second largest parameter, or of the only one.
        size = sorted(map(torch.numel, parameters.values()))[-2:][0]
        for name, parameter in parameters.items():
            stacked = max(parameter.numel() // size, 1)
            if model.config.model_type in FAMILIES and MIXER.search(module):
                stacked = 1
            if parameter.requires_grad:
                matrices[name] = stacked * math.prod(parameter.shape[:-2])
    return matrices


def outputs_of(module: nn.Module) -> torch.Tensor:
    """Return the outputs of an MLP, or of four experts, each of which a token has chosen."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    if len(inspect.signature(module.forward).parameters) == 1:
        return module(x[None])
    return module(x, torch.arange(4)[:, None], torch.ones(4, 1))


def assert_split_as_computed(module: nn.Module, hidden: dict[nn.Parameter, MatrixWeight]) -> None:
    """Assert that an MLP returns zeros without its gate, and not without half of another matrix."""
    on_cpu = copy.deepcopy(module).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for name, weight in on_cpu.named_parameters():
        nn.init.normal_(weight, generator=generator)
        if name.endswith("bias"):
            nn.init.zeros_(weight)
    for name, parameter in module.named_parameters():
        if parameter not in hidden:
            continue
        item = hidden[parameter]
        weight = on_cpu.get_parameter(name)
        before = weight.clone()
        matrices = item.split(weight)
        is_zero = []
        for number in range(item.stacked):
            if item.stacked == 1:
                matrices[:, : matrices.shape[1] // 2] = 0
            else:
                matrices[number :: item.stacked] = 0
            is_zero.append(not outputs_of(on_cpu).any())
            weight.copy_(before)
        assert any(is_zero) is (item.stacked == 2), (type(module), name)


@torch.no_grad()
def test_all_model_types_that_train_have_their_matrices_and_decay() -> None:
    refused = set()
    computed = set()
    for model_type in TRAINED:
        hf = built(model_type)
        names = {parameter: name for name, parameter in hf.named_parameters()}
        decayed = {names[parameter] for parameter in groups_of(hf)[0]["params"]}
        assert decayed == {name for p, name in names.items() if is_decayed(name, p)}, model_type
        try:
            hidden = {item.parameter: item for item in find_matrix_weights(hf)}
        except InputError:
            refused.add(model_type)
            continue
        split = {names[parameter]: item.shape[0] for parameter, item in hidden.items()}
        assert split == muon_matrices(hf), model_type
        for layer in decoder_layers(hf).values():
            for module in layer.modules():
                arguments = inspect.signature(module.forward).parameters.keys()
                is_experts = arguments == {"hidden_states", "top_k_index", "top_k_weights"}
                linears = [child for child in module.children() if isinstance(child, LINEARS)]
                is_mlp = len(arguments) == 1 and len(linears) > 1
                if type(module) not in computed and (is_experts or is_mlp):
                    computed.add(type(module))
                    assert_split_as_computed(module, hidden)
    assert refused == UNKNOWN_LAYOUTS
    assert len(computed) > 75
