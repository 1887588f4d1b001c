"""Grouped products: the linear layers of a mixture's experts, each over the tokens that chose it.

    forward  y[e]  = x[e] w[e]^T      x [rows, in], w [experts, out, in]
    dgrad    dx[e] = dy[e] w[e]       dy [rows, out]
    wgrad    dw[e] = dy[e]^T x[e]

`arrange` sorts the choices of all tokens by expert and drops none, so the rows of one expert lie
together. Each expert begins at a multiple of what kernels and formats need. The rows in between are
zero and add nothing to a product. The number of rows depends on the numbers of tokens and experts
alone, so nothing waits for the device.

An operand is quantized as one matrix: [rows, in], and a weight as [experts x out, in]. In a format
with one scale a tensor, all experts share the scale. A block of values that share a scale belongs
to one expert, because an expert's rows and features are multiples of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError

STACKS = ("gate_up_proj", "down_proj")  # parameters with the weights of all experts
# Features: torch's grouped products need rows of a multiple of 16 bytes.
FEATURE_MULTIPLE = 8
# Rows of an expert: kernels read 16 bytes at a time along the rows too, and a value has one at
# least.
ROW_MULTIPLE = 16


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each layer's experts, if stacked as transformers mostly does it.

    The weights are [experts, out, in], gate and up as one, then down, without biases.
    """
    other_layouts = ("is_transposed", "has_bias", "has_post_expert_norm")
    for name, module in model.named_modules():
        is_stacked = all(key in module._parameters for key in STACKS)
        if not is_stacked or not hasattr(module, "_apply_gate"):
            continue
        if not any(getattr(module, flag, False) for flag in other_layouts):
            yield name, module


def check_experts(model: PreTrainedModel) -> None:
    """Raise InputError if grouped products cannot compute the stacked experts of `model`.

    A model on the meta device is enough.
    """
    choices = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for name, module in stacked_experts(model):
        for key in STACKS:
            experts, width, features = module.get_parameter(key).shape
            if type(choices) is int and not 0 < choices <= experts:
                raise InputError(
                    f"`model.config.num_experts_per_tok`: a token takes {choices} of the {experts} "
                    f"experts of {name}; choose 1 to {experts}"
                )
            if width % FEATURE_MULTIPLE or features % FEATURE_MULTIPLE:
                raise InputError(
                    f"`model.config`: {name}.{key} has experts of {width} x {features}; "
                    f"`hidden_size` and an expert's `moe_intermediate_size`, or "
                    f"`intermediate_size`, must be multiples of {FEATURE_MULTIPLE}"
                )


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert. Choice n is a choice of token n // choices."""

    ends: Tensor  # int32 [experts]: the end of each expert's rows; the last one includes all rows
    choice: Tensor  # int64 [rows]: the choice of each row, arbitrary for an empty row
    place: Tensor  # int64 [tokens x choices]: the row of each choice
    empty: Tensor  # int64: the rows without a choice
    load: Tensor  # int64 [experts]: the number of tokens of each expert


@torch.no_grad()
def arrange(chosen: Tensor, experts: int, multiple: int) -> Groups:
    """Sort `chosen` int64 [tokens, choices], the experts of each token, by expert, then by token.

    The rows of each expert begin at a multiple of `multiple`.
    """
    by_expert, order = chosen.flatten().sort(stable=True)
    choices = torch.arange(len(order), device=chosen.device)
    numbers = torch.arange(experts, device=chosen.device)
    begins = torch.searchsorted(by_expert, numbers)
    load = torch.searchsorted(by_expert, numbers, right=True) - begins
    ends = (-(-load // multiple) * multiple).cumsum(0)
    # The largest number of rows that any distribution of the choices needs.
    rows = -(-(len(order) + experts * (multiple - 1)) // multiple) * multiple
    shift = ends.roll(1).index_fill_(0, numbers[:1], 0) - begins
    place = torch.empty_like(order)
    place[order] = choices + shift[by_expert]
    choice = torch.full((rows,), -1, device=chosen.device).scatter_(0, place, choices)
    empty = (choice >= 0).sort(stable=True).indices[: rows - len(order)]
    ends[-1] = rows
    return Groups(ends.int(), choice.clamp(min=0), place, empty, load)


def matmul(kind: str, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the grouped product `kind` of operands that stand as in the formulas above."""
    if kind == "wgrad":
        left = left.t()
    elif kind == "forward":
        right = right.mT
    return F.grouped_mm(left, right, offs=ends)
