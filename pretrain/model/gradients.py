"""Where the gradients of a step add up: FP32 (or BF16) sums beside the parameters, which products may add to themselves.

Autograd sums into `parameter.grad`, in the parameter's dtype: BF16 rounds the sum with every microbatch after the first. Here
the sum is `parameter.main_grad`. A hook adds what autograd delivers in `.grad`, and frees it at once. A product may add to
`main_grad` itself; it then returns no gradient for that weight.

All sums lie in one allocation: what does not fit fails at the start, and clearing is one write. Cleared, it holds negative
zeros. x + -0.0 is x for every x, sign of zero included, and a sum that is still all negative zeros is one that nothing was
added to: products and sums begin at +0.0, and +0.0 + -0.0 is +0.0. They lie in about the order in which backward finishes them,
so that what is whole is in one piece: ranks begin to exchange it while backward still runs (pretrain.model.rank_sums).

Under FSDP2 the gathered parameters have sums, which pretrain.model.sharding hands to it; what it gives is the shards' `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

_ALIGNMENT = 128  # values; a sum begins at a multiple of 256 bytes at least, where every kernel may write at its widest
_EMPTY = -0.0


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The parameter's gradient, wherever it adds up; None where it has none and no buffer for one."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def attach_main_gradients(model: nn.Module, dtype: torch.dtype, stacks: Sequence[Sequence[nn.Parameter]] = ()) -> None:
    """Give every trained parameter of `model` a `main_grad` of its shape in `dtype` (FP32 or BF16), cleared; a tied one once.

    `stacks`: parameters that are the rows of one matrix, in order (queries, keys and values, say), each trained and in one stack.
    Their sums are the rows of one contiguous matrix too, so that one product can add to all of them.
    """
    attach_sums([parameter for parameter in model.parameters() if parameter.requires_grad], dtype, stacks)
    if dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                sum_rows_in_fp32(module)


def attach_sums(
    trained: Sequence[nn.Parameter],
    dtype: torch.dtype,
    stacks: Sequence[Sequence[nn.Parameter]],
    memory: Tensor | None = None,
) -> Tensor:
    """Does for these parameters what `attach_main_gradients` does. `memory`: where their sums are to lie, of `dtype` and of
    `values_of_sums` values at least; several sets of parameters may share it that never add up at the same time. Returns the part
    that is used."""
    stacked = {id(parameter) for stack in stacks for parameter in stack}
    runs = [*stacks, *([parameter] for parameter in trained if id(parameter) not in stacked)]
    places = {id(parameter): place for place, parameter in enumerate(trained)}
    runs.sort(key=lambda run: min(places[id(parameter)] for parameter in run), reverse=True)  # backward begins at the end
    sizes = [-(-sum(map(torch.numel, run)) // _ALIGNMENT) * _ALIGNMENT for run in runs]
    if memory is None:
        memory = torch.empty(sum(sizes), dtype=dtype, device=trained[0].device)
    empty_sums(memory)
    begin = 0
    for run, size in zip(runs, sizes, strict=True):
        at = begin
        for parameter in run:
            parameter.main_grad = memory[at : at + parameter.numel()].view(parameter.shape)
            parameter.grad_dtype = None  # any
            parameter.register_post_accumulate_grad_hook(_add_to_main)
            at += parameter.numel()
        begin += size
    return memory[:begin]


def values_of_sums(parameters: Iterable[Tensor]) -> int:
    """How many values the sums of these parameters take at most, however they are stacked."""
    return sum(-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters)


def empty_sums(memory: Tensor) -> None:
    """Marks the sums in `memory` as empty: nothing has been added to them yet."""
    memory.fill_(_EMPTY)


def clear_main_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Empty all sums, in place; what a backward that failed has left in `.grad` of these parameters goes too."""
    attached = [parameter for parameter in parameters if getattr(parameter, "main_grad", None) is not None]
    for memory in {id(each.main_grad._base): each.main_grad._base for each in attached}.values():
        empty_sums(memory)
    for parameter in attached:
        parameter.grad = None


def was_reached(parameter: nn.Parameter) -> bool:
    """Whether a backward has given this parameter a gradient since they were cleared, even one of zeros. Waits for the device;
    collective where the gradient is sharded."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return False
    if isinstance(gradient, DTensor):  # reduced from sums: under FSDP2 what nothing was added to has a gradient too
        mesh, local = gradient.device_mesh, gradient.to_local()
        reached = (local != 0).any() | ~local.signbit().all()
        torch.distributed.all_reduce(reached := reached.int(), torch.distributed.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))
        return bool(reached)
    return gradient is parameter.grad or bool((gradient != 0).any()) or not bool(gradient.signbit().all())


def _add_to_main(parameter: nn.Parameter) -> None:
    """Adds a gradient to its sum as soon as autograd has it whole. BF16 is added to FP32 without a copy; FP32 to BF16 is rounded
    once, the sum."""
    if parameter.grad is not None:  # the hook runs also where all that use the parameter have returned none
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def sum_rows_in_fp32(embedding: nn.Embedding) -> None:
    """Let the gradients of a BF16 table's repeated tokens add up in FP32: autograd sums them before the hook sees them, and a
    common token comes a thousand times in a microbatch. A tied head's gradient is made FP32 before autograd adds the two."""
    changed = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)  # as by `casting_output`
    special = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    if embedding.weight.dtype == torch.float32 or not embedding.weight.requires_grad or special or changed:
        return
    embedding.weight.grad_dtype = torch.float32
    embedding.forward = lambda ids: _Lookup.apply(ids, embedding.weight, embedding.padding_idx)


class _Lookup(torch.autograd.Function):
    """Rows of a table [vocabulary, hidden] by `ids`; the table's gradient is FP32 whatever the rows are."""

    @staticmethod
    def forward(ctx: FunctionCtx, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.padding = table, -1 if padding is None else padding
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        main = getattr(ctx.table, "main_grad", None)
        if main is not None and main.is_cuda and ctx.padding < 0 and not torch.are_deterministic_algorithms_enabled():
            # Without a gradient of the whole table, zeros but for the microbatch's tokens.
            main.index_add_(0, ids.flatten(), gradient.flatten(0, -2).float())
            return None, None, None
        rows = len(ctx.table)
        return None, torch.ops.aten.embedding_dense_backward(gradient.float(), ids, rows, ctx.padding, False), None
