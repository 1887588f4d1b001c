"""Training FLOPs, exactly: matrix products from the model's shapes, attention from the documents that were really there.

Only matrix products count, two operations a multiply-add. Products that gradient checkpointing repeats do not count: this is
model FLOPs utilisation (MFU), not hardware utilisation.

Each token attends to the earlier tokens of its own document only, so attention's cost grows with the sum of squared document
lengths. With documents of 745 tokens, by squared length, in packs of 4,096 that is a tenth of what the usual `12 L H Q T` gives.

What others count stands in `pretrain.metrics.flop_formulas`, and how all of them come about in docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from foundation.units import TERA

FORWARD_AND_BACKWARD = 3  # backward takes the gradient with respect to the input and to the weight: two more products
# What an architecture raises that looks at values on the meta device, which has none, or whose own kernels are not for it.
_WITHOUT_VALUES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)


@dataclass(frozen=True)
class WeightMatrix:
    """One matrix product of the forward pass: a token's vector of width `inputs` becomes one of width `outputs`."""

    name: str
    inputs: int
    outputs: int
    part: str  # "attention projections" | "mlp" | "head"

    @property
    def forward_flops(self) -> int:
        """FLOPs a token; the bias, one addition an output, is not counted."""
        return 2 * self.inputs * self.outputs


@dataclass(frozen=True)
class LowPrecisionProducts:
    """The part of a model whose products run on a device's FP8 or FP4 units, and how fast those are."""

    weights: int  # of all linears whose products do, a tied head's too if its product does; each costs 3 multiply-adds a token
    peak_tflops: float  # dense peak of one device for that precision


@dataclass(frozen=True)
class Shape:
    """The sizes that formulas ask for, under the field's names; read from a Hugging Face configuration."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """InputError where the configuration lacks one of the sizes, or has one for each layer."""
        try:
            config: PretrainedConfig = model.config.get_text_config()
            heads, hidden = config.num_attention_heads, config.hidden_size

            def known(*names: str) -> Iterator[int]:  # architectures call one width by several names
                return (value for name in names if (value := getattr(config, name, None)))

            one_head = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
            shape = cls(
                layers=config.num_hidden_layers,
                hidden=hidden,
                heads=heads,
                kv_heads=1 if one_head else next(known("num_key_value_heads", "num_kv_heads"), heads),
                head_dim=getattr(config, "head_dim", None) or hidden // heads,
                feed_forward=next(known("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 4 * hidden),
                vocabulary=config.vocab_size,
            )
            reason = next((f"`{key}` is said for each layer" for key, size in vars(shape).items() if type(size) is not int), None)
        except (AttributeError, ValueError, RuntimeError) as error:
            reason = str(error).partition(". ")[0]
        if reason:
            raise InputError(f"model: {type(model).__name__} is not of equal layers with attention: {reason}; name another")
        return shape

    @property
    def query_width(self) -> int:
        """Width of all heads' queries together; not always `hidden` (Qwen3-0.6B: 2048 against 1024)."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ModelFlops:
    """What one model costs to train. All figures are forward and backward together."""

    shape: Shape
    matrices: tuple[WeightMatrix, ...]
    # Weights in no known product or embedding, such as stacked experts, or what a forward multiplies otherwise than the model's
    # shapes say, such as layers that run several times; empty: the count is complete.
    uncounted: tuple[str, ...]
    parameters: int  # tied weights once
    embedding_parameters: int  # input embeddings, learned positions among them
    position_parameters: int
    tied: bool
    layer_norm: bool = False  # its norms are LayerNorm; else RMSNorm

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Count `model`, which is on the meta device, before its layers are fused or converted to another precision.

        A head counts as a product, also if it shares its weight with the embedding; looking up an embedding does not count. The
        count is held against what torch sees in a forward of the model.
        """
        embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
        token_weight, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        shape, matrices = Shape.of(model), tuple(_matrices(model, head))
        known = set(embeddings) | {id(model.get_submodule(matrix.name).weight) for matrix in matrices}
        unknown = tuple(name for name, p in model.named_parameters() if p.ndim >= 2 and id(p) not in known)
        return cls(
            shape=shape,
            matrices=matrices,
            uncounted=unknown or tuple(_multiplied_otherwise(model, shape, matrices)),
            parameters=sum(p.numel() for p in model.parameters()),
            embedding_parameters=sum(embeddings.values()),
            position_parameters=sum(size for key, size in embeddings.items() if key != id(token_weight)),
            tied=head is not None and head.weight is token_weight,
            layer_norm=any(isinstance(module, nn.LayerNorm) for module in model.modules()),
        )

    @property
    def left_out(self) -> str:
        """What to know of the `uncounted`, where there are some."""
        more = ", ..." if len(self.uncounted) > 1 else ""
        return f"FLOPs are not complete, as shapes of weights do not tell them: {self.uncounted[0]}{more}"

    @property
    def gated(self) -> bool:
        """Whether the MLP is three matrices (SwiGLU) and not two: by its size, as some architectures stack two of the three."""
        weights = sum(matrix.inputs * matrix.outputs for matrix in self.matrices if matrix.part == "mlp")
        return weights > 2.5 * self.shape.layers * self.shape.hidden * self.shape.feed_forward

    @cached_property
    def per_token_matrix(self) -> float:
        """FLOPs a token, attention products not included."""
        return float(FORWARD_AND_BACKWARD * sum(m.forward_flops for m in self.matrices))

    @property
    def per_squared_length(self) -> float:
        """FLOPs for each unit of a document's squared length, as Megatron-LM counts variable-length attention.

        A document of n tokens takes 2 n² · query_width for the scores and as many for their sum over values, in each layer,
        three times with backward: 12 n² · query_width. Causality leaves half of that. A sliding window is not considered.
        """
        return 6.0 * self.shape.layers * self.shape.query_width

    def step(self, tokens: int, sum_squared_lengths: float) -> float:
        """FLOPs of a step over `tokens` tokens (padding included: it is computed) whose documents have these squared lengths."""
        return self.per_token_matrix * tokens + self.per_squared_length * sum_squared_lengths

    def seconds_at_peak(
        self, tokens: int, sum_squared_lengths: float, peak_tflops: float, low: LowPrecisionProducts | None = None
    ) -> float:
        """Seconds that one device would take for the FLOPs of `step` with every product at its own peak, one after another.

        `peak_tflops` is BF16's, in which all products but those of `low` run. Divided by the measured time this is the
        utilisation of a mixed run, at most 1.
        """
        in_low = float(2 * FORWARD_AND_BACKWARD * low.weights * tokens) if low else 0.0
        seconds = (self.step(tokens, sum_squared_lengths) - in_low) / (peak_tflops * TERA)
        return seconds + (in_low / (low.peak_tflops * TERA) if in_low else 0.0)

    def by_part(self, tokens: int, sum_squared_lengths: float) -> dict[str, float]:
        """The same FLOPs as `step`, divided over the parts of the model."""
        parts = {"attention projections": 0.0, "mlp": 0.0, "head": 0.0}
        for matrix in self.matrices:
            parts[matrix.part] += float(FORWARD_AND_BACKWARD * matrix.forward_flops * tokens)
        return {**parts, "attention products": self.per_squared_length * sum_squared_lengths}


def _multiplied_otherwise(model: PreTrainedModel, shape: Shape, matrices: tuple[WeightMatrix, ...]) -> Iterator[str]:
    """Yields what a forward of `model`, on the meta device, multiplies otherwise than its shapes say: layers that run several
    times or never, attention of other widths. Nothing for an architecture that cannot run there."""
    widths: list[int] = []  # of scores, and of their sum over values

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        batch, heads, tokens, width = query.shape
        widths.append(heads * (width + value.shape[-1]))
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    AttentionInterface.register("counted", attend)
    attention, tokens = model.config._attn_implementation, torch.zeros((1, 2), dtype=torch.long, device="meta")
    try:
        model.set_attn_implementation("counted")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.base_model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except _WITHOUT_VALUES:
        return
    finally:
        model.set_attn_implementation(attention)
    counts = counter.get_flop_counts()["Global"]  # a rotation's angles may be a `bmm`, which is none of these matrices
    seen = counts.get(torch.ops.aten.mm, 0) + counts.get(torch.ops.aten.addmm, 0)
    counted = tokens.numel() * sum(matrix.forward_flops for matrix in matrices if matrix.part != "head")
    if seen != counted:
        yield f"a forward has {seen / counted:.3g} times the products of its linears"
    if widths and sum(widths) != 2 * shape.layers * shape.query_width:
        yield f"attention is {sum(widths) / (2 * shape.layers * shape.query_width):.3g} times as wide as its configuration says"


def _matrices(model: nn.Module, head: nn.Module | None) -> Iterator[WeightMatrix]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            inputs, outputs = module.in_features, module.out_features
        elif isinstance(module, Conv1D):  # GPT-2's linear layer, its weight stored as [in, out]
            inputs, outputs = module.weight.shape
        else:
            continue
        yield WeightMatrix(name, inputs, outputs, "head" if module is head else _part(name))


def _part(name: str) -> str:
    """`model.layers.0.self_attn.q_proj`, `transformer.h.0.attn.c_attn`, `gpt_neox.layers.0.attention.dense`: attention."""
    return "attention projections" if any("attn" in part or "attention" in part for part in name.split(".")) else "mlp"
