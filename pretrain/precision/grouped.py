"""Grouped products: the linears of a mixture's experts, each over the tokens that chose it, in one product.

    forward  y[e]  = x[e] w[e]^T      x [rows, in], w [experts, out, in]
    dgrad    dx[e] = dy[e] w[e]       dy [rows, out]
    wgrad    dw[e] = dy[e]^T x[e]

An expert's rows lie together. `arrange` sorts the choices of all tokens by expert, drops none, and begins each expert at a
multiple of what kernels and blocks of formats ask for: the few rows between are zeros, which add nothing to any product. How many
rows there are follows from the numbers of tokens and experts alone, so nothing waits for the device.

An operand is quantized as a whole: [rows, in], and a weight as [experts x out, in]. So where a tensor has one scale, all experts
share it, and blocks are those of each expert, as an expert's rows and features are multiples of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.overrides import overridden
from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import watched
from pretrain.precision.product import Gemm, LinearCall, Operand, PlainProduct, Saved, add_to

STACKS = ("gate_up_proj", "down_proj")  # the weights of all experts, by transformers' names
MULTIPLE_OF = 8  # features: torch's grouped products take rows of a multiple of 16 bytes
# rows: kernels read operands 16 bytes at a time, along the rows too, of which a value has one at
# least
ALIGNED = 16


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each module, by name, that holds the weights of a layer's experts as transformers mostly stacks them,
    [experts, out, in]: gate and up as one, then down, without biases."""
    for name, module in model.named_modules():
        is_other = any(
            getattr(module, flag, False)
            for flag in ("is_transposed", "has_bias", "has_post_expert_norm")
        )
        if (
            hasattr(module, "_apply_gate")
            and not is_other
            and all(key in module._parameters for key in STACKS)
        ):
            yield name, module


def check_experts(model: PreTrainedModel) -> None:
    """InputError for stacked experts of sizes that no grouped product takes, and for fewer of them than a token is to have; a
    model on the meta device is enough."""
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for name, module in stacked_experts(model):
        for key in STACKS:
            experts, width, features = module.get_parameter(key).shape
            if type(chosen) is int and not 0 < chosen <= experts:
                taken = f"a token takes {chosen} of the {experts} experts of {name}"
                raise InputError(
                    f"`model.config.num_experts_per_tok`: {taken}; choose 1 to {experts}"
                )
            if width % MULTIPLE_OF or features % MULTIPLE_OF:
                raise InputError(
                    f"`model.config`: {name}.{key} has experts of {width} x {features}; `hidden_size` and an expert's "
                    f"`moe_intermediate_size`, or `intermediate_size`, must be multiples of {MULTIPLE_OF}"
                )


# ── Rows by expert ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Groups:
    """Which rows are whose. A choice is a token's, of one of its experts: choice n is of token n // choices."""

    ends: Tensor  # int32 [experts]: where each expert's rows end, the last one's with all rows
    choice: Tensor  # int64 [rows]: of each row, and any where there is none
    place: Tensor  # int64 [tokens x choices]: the row of each choice
    empty: Tensor  # int64: the rows without a choice
    load: Tensor  # int64 [experts]: tokens of each expert


@torch.no_grad()
def arrange(chosen: Tensor, experts: int, aligned: int) -> Groups:
    """Sorts `chosen` int64 [tokens, choices], the experts of each token, by expert, and tokens in order."""
    by_expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=chosen.device)
    begins = torch.searchsorted(by_expert, numbers)
    load = torch.searchsorted(by_expert, numbers, right=True) - begins
    ends = (-(-load // aligned) * aligned).cumsum(0)
    # the most that they can be
    rows = -(-(len(order) + experts * (aligned - 1)) // aligned) * aligned
    moved = ends.roll(1).index_fill_(0, numbers[:1], 0) - begins
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=chosen.device) + moved[by_expert]
    choice = torch.full((rows,), -1, device=chosen.device).scatter_(
        0, place, torch.arange(len(order), device=chosen.device)
    )
    empty = (choice >= 0).sort(stable=True).indices[: rows - len(order)]
    ends[-1] = rows
    return Groups(ends.int(), choice.clamp(min=0), place, empty, load)


# ── Products ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class GroupedCall(LinearCall):
    """One forward of a grouped product, and its backward. Both use the rows of `groups`, though the product may compute other
    groups in between."""

    def __init__(self, *args: Any, groups: Groups, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ends = groups.ends

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Saved]:
        self.context.groups[self.product.name] = self._ends
        with overridden(self.product, ends=self._ends):
            return super().forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.context.groups[self.product.name] = self._ends
        with overridden(self.product, ends=self._ends):
            return super().backward(*args, **options)


class Grouped:
    """What grouped products have in common, whatever computes them. `ends`: of the rows, while one is under way."""

    ends: Tensor | None = None
    members: Sequence[str]
    aligned: int = ALIGNED  # rows that each expert's are a multiple of

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> Operand:
        """As one matrix: a stack is [experts x out, in]."""
        return super().operand(role, x.flatten(0, -2), both=both)

    def accumulate(
        self, total: Tensor, left: Operand, right: Operand, *, overwrite: bool = False
    ) -> None:
        """Adds a weight's gradient to the sum in `total`'s dtype. A GPU's kernels give it rounded to BF16, once a microbatch."""
        add_to(total, self.multiply("wgrad", left, right, None), overwrite=overwrite)


class PlainGroupedProduct(Grouped, PlainProduct):
    """In the dtype of the operands."""

    def multiply(
        self,
        gemm: Gemm,
        left: Tensor,
        right: Tensor,
        dtype: torch.dtype | None,
        *added: Tensor | None,
    ) -> Tensor:
        with watched(self.members, gemm):
            return multiply(gemm, left, right, self.ends).to(dtype or left.dtype)


def multiply(gemm: Gemm, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The grouped product `gemm` of two operands as they stand in the formulas above."""
    return F.grouped_mm(
        left.t() if gemm == "wgrad" else left, right.mT if gemm == "forward" else right, offs=ends
    )
