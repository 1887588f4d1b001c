"""Grouped products: the linear layers of all experts of a mixture, computed by one kernel.

Each expert e multiplies the rows of the tokens that the router assigned to it:

    forward  y[e]  = x[e] w[e]^T      x [rows, in], w [experts, out, in]
    dgrad    dx[e] = dy[e] w[e]       dy [rows, out]
    wgrad    dw[e] = dy[e]^T x[e]

A token chooses several experts. `arrange` sorts the choices of all tokens by expert and drops no
choice, so the rows of one expert are consecutive. The index of each expert's first row is a
multiple of a number that kernels and formats require. The gaps between the rows of two experts are
filled with zeros, which add nothing to a product. The total number of rows does not depend on the
router's choices. So the CPU knows the number without waiting for the GPU.

An operand is quantized as one matrix: an activation as [rows, in], and a weight as
[experts x out, in]. In a format with one scale per tensor, all experts share the scale. In a format
with one scale per block, a block never contains values of two experts, because the rows and
features of an expert are multiples of the block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError

# Names of the parameters with the weights of all experts.
STACKS = ("gate_up_proj", "down_proj")
# The number of features must be a multiple of 8, because torch's grouped products require that a
# row in BF16 takes a multiple of 16 bytes.
FEATURE_MULTIPLE = 8
# The number of rows of an expert must be a multiple of this. The product wgrad sums along the rows,
# so its kernel reads 16 bytes along this axis at a time. A value in FP8 takes one byte.
ROW_MULTIPLE = 16


def stacked_experts(model: nn.Module, *, biased: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of the experts of each layer, if grouped products support them.

    Grouped products support the usual layout of transformers: the module has the parameters STACKS,
    [experts, out, in], and no biases. `gate_up_proj` contains the gate and up projections. With
    `biased`, also yield experts with biases (gpt-oss), which are computed by transformers' code.
    """
    other_layouts = ("is_transposed", "has_bias", "has_post_expert_norm")
    for name, module in model.named_modules():
        is_stacked = all(isinstance(getattr(module, key, None), nn.Parameter) for key in STACKS)
        has_other_layout = any(getattr(module, flag, False) for flag in other_layouts)
        if biased and getattr(module, "has_bias", False):
            has_other_layout = False
        if is_stacked and hasattr(module, "_apply_gate") and not has_other_layout:
            yield name, module


def check_experts(model: PreTrainedModel) -> None:
    """Raise InputError if grouped products cannot compute the stacked experts of `model`.

    `model` may be on the meta device.
    """
    choices = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for name, module in stacked_experts(model):
        for key in STACKS:
            experts, width, features = module.get_parameter(key).shape
            if type(choices) is int and not 0 < choices <= experts:
                raise InputError(
                    f"`model.config.num_experts_per_tok: {choices}`: {name} has {experts} experts; "
                    f"set this key to a number from 1 to {experts}"
                )
            if width % FEATURE_MULTIPLE or features % FEATURE_MULTIPLE:
                raise InputError(
                    f"`model.config`: the experts of {name}.{key} have {width} x {features} "
                    f"weights; set `hidden_size` and `moe_intermediate_size` (some models: "
                    f"`intermediate_size`) to multiples of {FEATURE_MULTIPLE}"
                )


@dataclass(frozen=True)
class Groups:
    """The rows of a grouped product. Each choice of a token has one row. Rows are sorted by expert.

    The choices of all tokens are numbered in the order of the tokens. Choice n is a choice of token
    n // choices, where `choices` is the number of experts that each token chooses. Rows that only
    fill the gap to the next expert are empty.
    """

    ends: Tensor  # int32 [experts]: the end of each expert's rows. The last end is the row count.
    choice_of_row: Tensor  # int64 [rows]: number of the choice in each row, arbitrary if empty
    row_of_choice: Tensor  # int64 [tokens x choices]: index of the row of each choice
    empty_rows: Tensor  # int64: indices of the empty rows
    load: Tensor  # int64 [experts]: the number of tokens that chose each expert


@torch.no_grad()
def arrange(chosen: Tensor, experts: int, multiple: int) -> Groups:
    """Assign the choices of all tokens to rows, sorted by expert and then by token.

    chosen: the experts that each token chose, int64 [tokens, choices].
    experts: the number of experts.
    multiple: the first row of each expert is a multiple of this.
    """
    # The expert and the number of each choice, sorted by expert.
    sorted_experts, sorted_choices = chosen.flatten().sort(stable=True)
    choices = torch.arange(len(sorted_choices), device=chosen.device)
    expert_indices = torch.arange(experts, device=chosen.device)
    # Index in `sorted_experts` of the first choice of each expert.
    begins = torch.searchsorted(sorted_experts, expert_indices)
    load = torch.searchsorted(sorted_experts, expert_indices, right=True) - begins
    rows_of_expert = -(-load // multiple) * multiple
    ends = rows_of_expert.cumsum(0)
    # Number of empty rows before the first row of each expert.
    empty_before = ends - rows_of_expert - begins
    row_of_choice = torch.empty_like(sorted_choices)
    row_of_choice[sorted_choices] = choices + empty_before[sorted_experts]
    # This number of rows suffices for any distribution of the choices over the experts.
    rows = -(-(len(choices) + experts * (multiple - 1)) // multiple) * multiple
    ends[-1] = rows
    # Empty rows have the choice -1.
    choice_of_row = torch.full((rows,), -1, device=chosen.device)
    choice_of_row.scatter_(0, row_of_choice, choices)
    # Sort instead of calling `nonzero`, because `nonzero` makes the CPU wait for the GPU.
    empty_rows = (choice_of_row >= 0).sort(stable=True).indices[: rows - len(choices)]
    return Groups(ends.int(), choice_of_row.clamp(min=0), row_of_choice, empty_rows, load)


def matmul(kind: str, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the grouped product `kind` (forward, dgrad or wgrad).

    `left` and `right` are the factors in the formulas at the top of this file, before they are
    transposed. `ends` are the ends of each expert's rows, see `Groups`.
    """
    if kind == "wgrad":
        left = left.t()
    elif kind == "forward":
        right = right.mT
    return F.grouped_mm(left, right, offs=ends)


def right_for_kernel(kind: str, right: Tensor, experts: int) -> Tensor:
    """Return the right operand of a product in the layout that `F.grouped_mm` expects.

    right: the operand, stored so that the product sums along its last axis. A weight has the
        weights of all experts: [experts x out, in] in forward, and [in, experts x out] in dgrad.
    """
    if kind == "wgrad":
        return right.t()
    if kind == "forward":
        return right.unflatten(0, (experts, -1)).mT
    return right.unflatten(1, (experts, -1)).permute(1, 2, 0)
