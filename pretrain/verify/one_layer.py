"""A model of one layer as a run would put it together, and documents for it: small enough to try before anything is trained."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.metrics.flops import Shape
from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.attention.heads import Heads
from pretrain.model.fused.layers import Parts, assess_layer, choose_arithmetic, parts_of
from pretrain.model.gradients import attach_main_gradients, clear_main_gradients, gradient_of
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import convert, fuse, wrap_layers
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.registry import WEIGHT_DTYPES, Weights
from pretrain.precision.scope import decide, low_precision_linears
from pretrain.precision.selection import make_backend
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings, ModelSettings

TOKENS = 256  # of a pack, at most
# What libraries and our kernels cut tokens into: tiles of codes, blocks that share a scale, whole lines of scales. For tokens
# that these do not divide they have other kernels, or other code in the same ones.
WHOLE = 128
VOCABULARY = 256  # embedding and head are not what is tried


@dataclass(frozen=True)
class Situation:
    """All that decides which kernels a run takes, and what their cases look like."""

    device: torch.device
    hf: PreTrainedModel  # on the meta device: class, configuration and layers
    length: int  # tokens of a pack
    active: ActivePrecision
    attention: str  # of transformers' registry
    fused: bool
    loss: LossSettings
    weights: Weights
    gradients: torch.dtype
    moments: torch.dtype
    tokens: int | None = None  # of a microbatch, as far as it is known; None: of two packs

    @property
    def heads(self) -> Heads:
        shape = Shape.of(self.hf)
        return Heads(shape.heads, shape.kv_heads, shape.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return getattr(torch, self.active.precision.compute_dtype)

    @property
    def parts(self) -> Parts | None:
        """The parts of the first layer; None where layers like it are not fused."""
        name, layer = next(iter(model.decoder_layers(self.hf).items()), ("", None))
        fused = self.fused and layer is not None and assess_layer(name, layer, {})[0] is None
        return parts_of(layer) if fused else None

    @property
    def computes_by_kernels(self) -> bool:
        """Whether fused layers compute with our kernels for a GPU, and Transformer Engine's where it is."""
        return self.device.type == "cuda"

    def tokens_of_a_case(self, most: int) -> int:
        """Returns a number of tokens up to `most` that the precision takes, with the remainder of the run's microbatch by
        WHOLE."""
        multiple = self.active.precision.multiple_of
        remainder = -(-(self.tokens or 2 * self.length) // multiple) * multiple % WHOLE
        return most - (most - remainder) % WHOLE

    def draw(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Draws normal values, the same every time."""
        generator = torch.Generator(self.device).manual_seed(seed + sum(shape))
        return torch.randn(shape, generator=generator, device=self.device).to(dtype or self.dtype)


def one_layer(
    run: Situation,
    active: ActivePrecision,
    *,
    fused: bool,
    backend: str,
    in_fp32: bool = False,
    compiled: bool = False,
) -> PackedLanguageModel:
    """The run's model with one layer and a small vocabulary, on its device, as the run puts it together; always the same weights.

    `in_fp32`: the same values computed in FP32. Norms and biases are drawn too: at one and zero, much would not show.
    """
    everything = LowPrecisionSettings()  # the one layer is not to be left out
    active = with_settings(active, keep_bf16_layers=everything.keep_bf16_layers)
    attention.register()
    config = cut_to_one_layer(run.hf.config)
    torch.manual_seed(1)
    with run.device:
        hf = type(run.hf)._from_config(config, dtype=torch.float32, attn_implementation=backend)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() == 1:
                parameter += run.draw(len(parameter), dtype=torch.float32) / 5
    dtype = torch.float32 if in_fp32 else run.dtype
    model.round_weights(hf, run.dtype)  # the values that both sides multiply
    model.round_weights(hf, torch.float32 if in_fp32 else getattr(torch, WEIGHT_DTYPES[run.weights]))
    low_precision = make_backend(active, run.device) if active.precision.quantized else None
    context = PrecisionContext(low_precision, dtype)
    loss = LossSettings(chunk=2 * VOCABULARY) if run.loss.kind == "chunked" else LossSettings(kind="reference")
    packed = PackedLanguageModel(hf, backend, loss, context).train()
    layers = model.decoder_layers(hf)
    if low_precision and not low_precision_linears(hf, list(layers.values()), active):
        active = with_settings(active, keep_bf16=everything.keep_bf16)
    decisions = decide(hf, list(layers.values()), active) if low_precision else {}
    arithmetic = choose_arithmetic("on", active, run.device.type, context)[0] if fused else None
    packed.fused = fuse(layers, {context.backend: decisions}, arithmetic) if arithmetic else None
    convert(hf, decisions, context, packed.fused)
    if packed.fused:
        attach_main_gradients(packed, run.gradients, packed.fused.stacks)
    stored = next(hf.parameters()).dtype
    settings = ModelSettings(config={"model_type": config.model_type})
    wrap_layers(packed, settings, cast_to=None if stored == dtype else dtype, compile_layers=compiled)
    return packed


def cut_to_one_layer(config: PretrainedConfig) -> PretrainedConfig:
    """The same widths and heads, one layer of the first kind, and a small vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 1, VOCABULARY
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, key, None)
    return config


def microbatch_of(run: Situation, tokens: int | None = None) -> dict[str, Any]:
    """Documents of uneven lengths, as many tokens as the precision takes: few, with the remainder of the run's own microbatch, or
    at least `tokens` in packs of the run's length."""
    packs, length = _few_packs(run) if tokens is None else (max(2, -(-tokens // run.length)), run.length)
    while packs * length % run.active.precision.multiple_of:
        packs += 1
    draw, kinds = np.random.default_rng(0), document_lengths(length)
    made = [
        Pack(draw.integers(VOCABULARY, size=length).astype(np.uint32), np.array(kinds[pack % 2], dtype=np.int32))
        for pack in range(packs)
    ]
    return inputs_of(build_microbatch(made, mask_boundaries=True), run.device)


def _few_packs(run: Situation) -> tuple[int, int]:
    """Packs, two or more, and the tokens of each: no more than a pack of the run has, and no less than half of what is taken of
    one at most."""
    most = min(run.length, TOKENS)
    remainder = run.tokens_of_a_case(WHOLE) % WHOLE
    lengths = range(most, (most - 1) // 2, -1)  # an odd one is among them, of which some number leaves any remainder
    return next((n, each) for n in itertools.count(2) for each in lengths if n * each % WHOLE == remainder)


def loss_and_gradients(packed: PackedLanguageModel, run: Situation, rounds: int = 1) -> dict[str, Tensor]:
    """The mean loss, and the gradient of each parameter by name, of the last of `rounds` forwards and backwards."""
    inputs = microbatch_of(run)
    eager = torch.compiler.set_stance("force_eager") if run.device.type == "cuda" else nullcontext()  # emulation compiles there
    with eager:
        for _ in range(rounds):
            packed.zero_grad(set_to_none=True)
            clear_main_gradients(packed.parameters())
            loss = packed(**inputs) / inputs["input_ids"].numel()
            loss.backward()
    gradients = {name: gradient_of(parameter) for name, parameter in packed.hf.named_parameters()}
    return {"loss": loss.detach()} | {name: each.detach().float() for name, each in gradients.items() if each is not None}


def document_lengths(length: int) -> list[list[int]]:
    """Returns the lengths of documents in two packs: uneven ones, one of them a single token; and one of a whole pack."""
    first = [each for each in (1, length // 3, length - 1 - length // 3) if each > 0]
    return [first if sum(first) == length else [length], [length]]


def without_stochastic_rounding(active: ActivePrecision) -> ActivePrecision:
    """Returns `active` without rounding by chance, which has nothing to be compared with; everything else stays."""
    if "disable_stochastic_rounding" not in getattr(active.precision, "options", {}):
        return active
    return with_settings(active, disable_stochastic_rounding=True)


def with_settings(active: ActivePrecision, **changes: Any) -> ActivePrecision:
    """`active` with these keys of its `fp8_config` changed."""
    return replace(active, settings=active.settings.model_copy(update=changes))
