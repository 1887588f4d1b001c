"""Small models of all fused architectures, packed documents for them, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.model import huggingface as model
from pretrain.model.configuration import load_config
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.gradients import attach_main_gradients, clear_main_gradients, gradient_of
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import choose_arithmetic, convert, fuse, wrap_layers
from pretrain.observe.audit import is_expected
from pretrain.observe.product_observer import ProductObserver
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import decide, is_called
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import LossSettings, ModelSettings

LENGTH, VOCABULARY = 64, 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0}
LLAMA3 |= {"high_freq_factor": 4.0, "low_freq_factor": 1.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0}
LLAMA = {"model_type": "llama"} | SIZES
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False} | SIZES
GPT2 = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 64, "n_inner": 96, "n_layer": 2}
GPT2 |= {"n_head": 4, "n_positions": 512}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama 3's angles": LLAMA | {"rope_parameters": LLAMA3},
    "mistral": SIZES | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "qwen2": QWEN2,
    "qwen2 under YaRN": QWEN2 | {"rope_parameters": YARN},
    "starcoder2": SIZES
    | {"model_type": "starcoder2", "sliding_window": None, "residual_dropout": 0.0},
    "gpt2": GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_5": SIZES
    | {"model_type": "qwen3_5_text", "head_dim": 16, "full_attention_interval": 2}
    | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16)
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "llama with biases": LLAMA | {"mlp_bias": True, "attention_bias": True},
}


def build(
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "packed_sdpa",
) -> PreTrainedModel:
    """Build a model with random weights, norms and biases.

    Norms of one and biases of zero would hide many errors.
    """
    settings = ModelSettings(config=config)
    options = {"weights": dtype, "seed": 1, "device": torch.device(device), "backend": backend}
    hf = model.build(settings, load_config(settings), **options)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return hf


def inputs(
    packs: int = 2, seed: int = 0, device: torch.device | str = "cpu", length: int = LENGTH
) -> dict[str, Any]:
    """Return a microbatch with documents of one token, of a full pack, and of sizes between."""
    draw = np.random.default_rng(seed)
    lengths = [np.array([1, 9, length - 10], dtype=np.int32), np.array([length], dtype=np.int32)]
    documents = [
        Pack(draw.integers(VOCABULARY, size=length).astype(np.uint32), lengths[pack % 2])
        for pack in range(packs)
    ]
    return inputs_of(build_microbatch(documents, mask_boundaries=True), torch.device(device))


def losses_and_gradients(
    packed: PackedLanguageModel, *, steps: int = 1, microbatches: int = 2, **of_inputs: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all microbatches, and the gradients of the last step in FP32.

    Weights are not updated. All steps have the same microbatches, `inputs(seed=index,
    **of_inputs)`.
    """
    losses = []
    for _ in range(steps):
        packed.zero_grad()
        clear_main_gradients(packed.parameters())
        for index in range(microbatches):
            packed.context.first_microbatch = index == 0
            loss = packed(**inputs(seed=index, **of_inputs)) / 1000
            loss.backward()
            losses.append(loss.item())
    parameters = dict(packed.hf.named_parameters())
    return losses, {name: gradient_of(p).float().clone() for name, p in parameters.items()}


def significant_parameters(gradients: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters whose gradient is not negligible.

    The bias of keys has almost none, because it shifts all scores by the same value.
    """
    largest = max(gradient.norm() for gradient in gradients.values())
    return [name for name, gradient in gradients.items() if gradient.norm() > 1e-3 * largest]


def packed(
    hf: PreTrainedModel,
    *,
    fused: bool = True,
    dtype: torch.dtype = torch.float32,
    arithmetic: type[Arithmetic] = Arithmetic,
) -> PackedLanguageModel:
    """Return the packed model of `hf`, with all decoder layers fused if `fused` is True.

    In a hybrid model, only the second half of each layer is fused.
    """
    context = PrecisionContext(dtype)
    backend = hf.config._attn_implementation
    trained = PackedLanguageModel(hf, backend, LossSettings(chunk=64), context).train()
    if fused:
        layers = model.decoder_layers(hf)
        trained.fused = fuse(layers, {}, arithmetic(context))
        assert trained.fused.layers.keys() == layers.keys()
        attach_main_gradients(trained, torch.float32, trained.fused.stacks)
    return trained


def assemble(
    config: dict[str, Any],
    active: ActivePrecision,
    *,
    fused: bool,
    device: str = "cpu",
    weights: torch.dtype = torch.bfloat16,
    backend: str = "packed_sdpa",
    loss: LossSettings | None = None,
    recompute: bool = False,
    kernels: Any = None,
) -> PackedLanguageModel:
    """Build a model that computes in a precision, with FP32 gradients, as a run builds it.

    `kernels` replace the Triton kernels of fused layers.
    """
    hf = build(config, torch.float32, device, backend)
    model.round_weights(hf, weights)
    layers = model.decoder_layers(hf)
    decisions = decide(hf, list(layers.values()), active)
    engines = make_engines([active], torch.device(device))
    context = PrecisionContext(torch.bfloat16, engines, active)
    loss = loss or LossSettings(chunk=64)
    trained = PackedLanguageModel(hf, backend, loss, context).train()
    if fused:
        arithmetic = choose_arithmetic(active, device, context, keeps_rotated=False)
        if kernels is not None:
            arithmetic.kernels = kernels
        trained.fused = fuse(layers, {active.name: decisions}, arithmetic)
        assert trained.fused.layers.keys() == layers.keys()
    convert(hf, decisions, context, trained.fused)
    attach_main_gradients(trained, torch.float32, trained.fused.stacks)
    settings = ModelSettings(config=config, gradient_checkpointing="full" if recompute else "none")
    cast_to = torch.bfloat16 if weights == torch.float32 else None
    wrap_layers(trained, settings, cast_to=cast_to, compile_layers=False)
    return trained


def check_products(
    observer: ProductObserver, active: ActivePrecision, keep: tuple[str, ...]
) -> None:
    """Assert that linears of the patterns `keep` compute in BF16, and all others in `active`."""
    for linear, products in observer.products.items():
        assert {product.gemm for product in products} == {"forward", "dgrad", "wgrad"}
        if any(is_called(linear, pattern) for pattern in keep):
            kinds = {kind for product in products for kind in (product.left, product.right)}
            assert kinds == {"bfloat16"}, linear
        else:
            assert all(is_expected(product, active) for product in products), products


def one_pass(trained: PackedLanguageModel) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one microbatch."""
    losses, gradients = losses_and_gradients(trained, microbatches=1)
    return losses[0], gradients
