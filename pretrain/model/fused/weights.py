"""Weights of several linears as the rows of one matrix, while each stays the Hugging Face parameter that it was.

Queries, keys and values are one product of the same input, as gate and up are, and one large product is faster than three. Their
parameters are laid into one storage, one after the other, so the matrix is a view and costs nothing. Whoever looks at a parameter
sees its own shape and name: optimizer, checkpoints and export know nothing of the stack. FSDP2 shards parameters one by one and
gathers them apart; there the matrix is put together when it is used. So it is where a model was copied or converted after its
layers were fused: right, and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class StackedWeight:
    """The weights [out_i, in] of `linears` as one matrix [sum of out_i, in], and their biases as one vector.

    `linears` are nn.Linear, or one transformers Conv1D, whose weight [in, out] is then `transposed`. Parameters are looked up
    anew at each use, as FSDP2 exchanges them.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        self.linears = tuple(linears)
        self.transposed = isinstance(linears[0], Conv1D)
        self._copy: Tensor | None = None  # in the compute dtype, where the parameters have another

    @property
    def weights(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    @property
    def biases(self) -> list[Tensor]:
        """Empty, or one a linear: no architecture here has a bias in one of them alone."""
        return [linear.bias for linear in self.linears if linear.bias is not None]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    @property
    def out_features(self) -> int:
        return sum(weight.shape[1 if self.transposed else 0] for weight in self.weights)

    @property
    def in_features(self) -> int:
        return self.weights[0].shape[0 if self.transposed else 1]

    @torch.no_grad()
    def lay_together(self) -> None:
        """Move the parameters into one storage, in order; they keep their identity, shape and values."""
        for parameters in (self.weights, self.biases):
            if len(parameters) > 1:
                storage = torch.cat([parameter.data for parameter in parameters])
                for parameter, part in zip(parameters, storage.split([len(p) for p in parameters]), strict=True):
                    parameter.data = part

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in `dtype`, without a graph: a view of the parameters wherever they allow it."""
        return self._stacked([weight.detach() for weight in self.weights], dtype)

    def kept_matrix(self, dtype: torch.dtype, *, anew: bool) -> Tensor:
        """`matrix`; a cast is made `anew`, or else is the one that was made last, so that the microbatches of a step share it."""
        if self.weights[0].dtype == dtype:
            return self.matrix(dtype)
        if anew or self._copy is None:
            self._copy = self.matrix(dtype)
        return self._copy

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[out] in `dtype`, without a graph; None where the linears have none."""
        return self._stacked([bias.detach() for bias in self.biases], dtype) if self.biases else None

    @property
    def main_gradient(self) -> Tensor | None:
        """The buffer that the weights' gradients add up in, laid out as the weights are; None where autograd collects them."""
        gradients = [getattr(weight, "main_grad", None) for weight in self.weights]
        return None if gradients[0] is None else _rows_of_one(gradients)

    def weight_gradients(self, stacked: Tensor) -> list[Tensor]:
        """The gradient of `matrix` [out, in] as that of each parameter, in its layout; views."""
        if self.transposed:
            return [stacked.t()]
        return list(stacked.split([len(weight) for weight in self.weights]))

    def bias_gradients(self, dy: Tensor) -> list[Tensor]:
        """Of each bias, from dy [tokens, out]; summed in FP32. Empty where the linears have none."""
        if not self.biases:
            return []
        return list(dy.sum(dim=0, dtype=torch.float32).split([len(bias) for bias in self.biases]))

    def _stacked(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        if self.transposed and parts[0].dim() == 2:
            return parts[0].t().to(dtype).contiguous()
        whole = _rows_of_one(parts)
        return (torch.cat(parts) if whole is None else whole).to(dtype)


def _rows_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after the other in one storage as one tensor, stacked along their first dimension; else None."""
    first = parts[0]
    for one, next_one in pairwise(parts):
        adjacent = next_one.data_ptr() == one.data_ptr() + one.numel() * one.element_size()
        if not adjacent or one.untyped_storage().data_ptr() != next_one.untyped_storage().data_ptr():
            return None
    if not all(part.is_contiguous() for part in parts):
        return None
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
