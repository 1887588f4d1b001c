"""Main gradients: sums of the gradients of a step, in the attribute `main_grad` of parameters.

Autograd accumulates in `parameter.grad`, in the dtype of the parameter. In BF16, this sum is
rounded for every microbatch after the first. Main gradients are FP32 or BF16, whatever the dtype of
the parameter. They are summed over microbatches and then over ranks. When autograd has written
`.grad`, a hook adds `.grad` to the main gradient and frees `.grad` at once. A matrix product can
also add the gradient of its weight directly to the main gradient. The product then returns no
gradient of this weight to autograd.

All main gradients of a model are in one allocation. Therefore a run that does not fit into memory
fails at its start, and one write clears all gradients. Clearing writes -0.0, because x + -0.0 has
the same bits as x. If a gradient contains only -0.0, nothing has been added to it, because matrix
products start their sums from +0.0, and -0.0 + 0.0 is +0.0.

The main gradients are stored approximately in the order of the backward pass. Finished
gradients are therefore contiguous, and ranks exchange them while backward is still running
(`RankSums`).

Under FSDP2, the gathered parameters have main gradients, which `pretrain.model.sharding` passes to
FSDP2. The reduced gradients are in `.grad` of the shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

# Main gradients start at multiples of this number of values. This is an alignment of at least 256
# bytes, which allows the widest memory access of any kernel.
_ALIGNMENT = 128
# Ranks exchange main gradients in buckets, each by one all-reduce. BUCKET is the maximum number of
# values in a bucket, 64 MiB in FP32. Only a bucket with a single parameter may have more. Latency
# would dominate the all-reduce of smaller buckets, and the all-reduce of larger buckets would
# overlap less with backward.
BUCKET = 2**24
# An nn.Parameter with the attribute `main_grad`.
Summed = Any
# BF16 sums are exchanged as FP32 copies. This is the maximum number of buckets that have a copy at
# the same time.
COPIES = 2


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, or `tensor` itself if it is a plain tensor.

    The result is detached, and shares the memory of `tensor`.
    """
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor unchanged.

    If `tensor` is a DTensor, all ranks must call this function.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the main gradient of a parameter, or its `.grad` if it has no main gradient.

    Under ZeRO-3, other gathered parameters overwrite the main gradient of a gathered parameter, so
    it is valid only until FSDP2 has reduced it. Such a parameter has the attribute `shard`, its
    sharded parameter, and the result is the `.grad` of the shard.
    """
    shard = getattr(parameter, "shard", None)
    if shard is not None:
        return shard.grad
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Map the name of each parameter that has a gradient to the result of `gradient_of`."""
    return {
        name: gradient
        for name, parameter in model.named_parameters()
        if (gradient := gradient_of(parameter)) is not None
    }


# ── Sums over microbatches ──


def attach_main_gradients(
    model: nn.Module, dtype: torch.dtype, stacks: Sequence[Sequence[Summed]] = ()
) -> None:
    """Give every trained parameter of `model` a cleared `main_grad` of its shape.

    Args:
        model: The model. Tied parameters get one main gradient.
        dtype: FP32 or BF16.
        stacks: Lists of trained parameters. The parameters of a list are the rows of one matrix, in
            order, such as the weights of queries, keys and values. Their main gradients become the
            rows of one contiguous matrix, so that one product can add to all of them. A parameter
            may be in at most one list.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    attach_sums(trained, dtype, stacks)
    if dtype == torch.float32:
        for module in model.modules():
            sum_rows_in_fp32(module)


def attach_sums(
    trained: Sequence[Summed],
    dtype: torch.dtype,
    stacks: Sequence[Sequence[Summed]],
    memory: Tensor | None = None,
) -> Tensor:
    """Create a cleared main gradient, the attribute `main_grad`, for each parameter in `trained`.

    Args:
        trained: The parameters, without repetition. The parameters of a stack are in order.
        dtype: FP32 or BF16.
        stacks: As in `attach_main_gradients`.
        memory: Storage of the main gradients. It is 1-D, has the dtype `dtype`, and
            has at least `values_of_sums(trained)` values. Sets of parameters that never accumulate
            gradients at the same time may share this tensor. By default a new tensor is allocated.

    Returns:
        A view of `memory` with only the values that the main gradients use.
    """
    stack_of_first = {id(stack[0]): stack for stack in stacks}
    not_first = {id(parameter) for stack in stacks for parameter in stack[1:]}
    # A parameter that is in none of `stacks` is a stack of its own. Put the last parameters first,
    # because backward starts with them.
    all_stacks = [
        stack_of_first.get(id(parameter), [parameter])
        for parameter in reversed(trained)
        if id(parameter) not in not_first
    ]
    sizes = [_aligned(sum(map(torch.numel, stack))) for stack in all_stacks]
    if memory is None:
        memory = torch.empty(sum(sizes), dtype=dtype, device=trained[0].device)
    empty_sums(memory)
    used = memory[: sum(sizes)]
    for stack, part in zip(all_stacks, used.split(sizes), strict=True):
        counts = [parameter.numel() for parameter in stack]
        for parameter, sums in zip(stack, part[: sum(counts)].split(counts), strict=True):
            parameter.main_grad = sums.view(parameter.shape)
            parameter.grad_dtype = None  # accepts gradients of any dtype
            parameter.register_post_accumulate_grad_hook(_add_to_main)
    return used


def values_of_sums(parameters: Iterable[Tensor]) -> int:
    """Return the number of values that the main gradients of `parameters` need at most.

    The number includes padding for alignment. It is sufficient for any `stacks` of `attach_sums`.
    """
    return sum(_aligned(parameter.numel()) for parameter in parameters)


def _aligned(values: int) -> int:
    """Return the number `values`, rounded up to a multiple of `_ALIGNMENT`."""
    return -(-values // _ALIGNMENT) * _ALIGNMENT


def empty_sums(memory: Tensor) -> None:
    """Mark all main gradients in `memory` as empty by filling it with -0.0."""
    memory.fill_(-0.0)


def clear_main_gradients(parameters: Iterable[Summed]) -> None:
    """Clear the main gradients of `parameters` in place, and set `.grad` to None.

    A failed backward may have left a `.grad`.
    """
    attached = _with_main_gradients(parameters)
    # Usually all main gradients are in one allocation, which is cleared by one write.
    allocations = {id(p.main_grad._base): p.main_grad._base for p in attached}
    for memory in allocations.values():
        empty_sums(memory)
    for parameter in attached:
        parameter.grad = None


def _with_main_gradients(parameters: Iterable[Summed]) -> list[Summed]:
    """Return the parameters that have a main gradient."""
    return [p for p in parameters if getattr(p, "main_grad", None) is not None]


def was_reached(parameter: nn.Parameter) -> bool:
    """Return True if backward has added anything to the gradient since the gradient was cleared.

    The result is True even if backward has added only zeros. The host waits for the device. If the
    gradient is sharded, all ranks must call this function.
    """
    gradient = gradient_of(parameter)
    if gradient is None:
        return False
    local = local_part(gradient)
    # A cleared gradient contains only -0.0 (`empty_sums`).
    is_nonzero = (local != 0).any()
    has_other_zero = ~local.signbit().all()
    reached = (is_nonzero | has_other_zero).int()
    if isinstance(gradient, DTensor):
        # The last dimension of the mesh has the shards of one replica.
        mesh = gradient.device_mesh
        dist.all_reduce(reached, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))
    return bool(reached)


def _add_to_main(parameter: Summed) -> None:
    """Hook that adds a new `.grad` to the main gradient, and then frees `.grad`.

    A BF16 gradient is added to an FP32 main gradient without a copy. If an FP32 gradient is added
    to a BF16 main gradient, the result is rounded once.
    """
    # The hook also runs if no operation has returned a gradient for the parameter.
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def sum_rows_in_fp32(module: Any) -> None:
    """Accumulate the gradient of a BF16 nn.Embedding in FP32 over repeated tokens.

    A common token occurs a thousand times in a microbatch. Without this function, autograd would
    sum the gradients of these occurrences in BF16, before the hook adds the sum to the main
    gradient. If the weight is tied to the head, autograd converts the gradient from the head to
    FP32 before it adds both gradients. This function has no effect if `module` is no embedding, or
    if the embedding is FP32, is not trained, or has a replaced forward, such as that of
    `casting_output`.
    """
    if type(module).forward is not nn.Embedding.forward or "forward" in vars(module):
        return
    weight = module.weight
    if weight.dtype == torch.float32 or not weight.requires_grad:
        return
    weight.grad_dtype = torch.float32
    module.forward = lambda ids: _Lookup.apply(ids, module.weight, module.padding_idx)


class _Lookup(torch.autograd.Function):
    """Embedding lookup in a table [vocabulary, hidden] of any dtype, with an FP32 gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        ctx.padding = -1 if padding is None else padding
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        gradient = gradient.float()
        main = getattr(ctx.table, "main_grad", None)
        # Compute the gradient of the full table if the embedding has a padding token, or if results
        # must be reproducible. `index_add_` would add the gradients of padding tokens, and on a GPU
        # its order of additions differs from run to run.
        needs_full_gradient = ctx.padding >= 0 or torch.are_deterministic_algorithms_enabled()
        if main is not None and main.is_cuda and not needs_full_gradient:
            # Add the rows of the tokens directly. A gradient of the size of the table would be zero
            # except for these rows.
            main.index_add_(0, ids.flatten(), gradient.flatten(0, -2))
            return None, None, None
        d_table = torch.ops.aten.embedding_dense_backward(
            gradient, ids, len(ctx.table), ctx.padding, False
        )
        return None, d_table, None


# ── Sums over ranks ──


class RankSums:
    """Sums the main gradients over ranks that each have the complete model.

    Gradients are summed in FP32 once a step, while the backward of the last microbatch is running.
    The result is a sum and not a mean, because the loss is already divided by the number of tokens
    of all ranks.

    The memory of the main gradients is split into buckets. The all-reduce of a bucket starts when
    backward has finished all parameters of the bucket and the all-reduce of the previous bucket in
    memory has started. Therefore all ranks start the same collectives in the same order, even if
    the microbatches of one rank do not use a parameter. The buckets are fixed before the first
    step, so a resumed run sums in the same order as an uninterrupted run.

    The all-reduces have a separate process group. Delayed scaling exchanges amaxes in the default
    group during backward, and the order of amax exchanges and all-reduces may differ between ranks.
    """

    def __init__(self, parameters: Iterable[Summed]) -> None:
        """Create the buckets.

        All ranks must call this method, and pass the same parameters. The main gradients of the
        parameters must be in one allocation.
        """
        attached = _with_main_gradients(parameters)
        by_offset = sorted(attached, key=lambda p: p.main_grad.storage_offset())
        memory = by_offset[0].main_grad._base
        self._group = dist.new_group()
        self._buckets: list[Tensor] = []  # slices of `memory`
        # For each bucket, the number of parameters that the last backward of the step has not
        # finished yet. The list is empty outside of `starting_early`.
        self._unfinished: list[int] = []
        self._started = 0  # number of buckets whose all-reduce has started
        # All-reduces that are running: handle, FP32 values, and bucket of each.
        self._running: deque[tuple[dist.Work, Tensor, Tensor]] = deque()
        # The parameters of each bucket.
        self._members = list(_cut(by_offset))
        for members in self._members:
            start = members[0].main_grad.storage_offset()
            last = members[-1].main_grad
            self._buckets.append(memory[start : last.storage_offset() + last.numel()])

    @contextmanager
    def starting_early(self) -> Iterator[None]:
        """Context manager that starts all-reduces while the last backward of a step is running.

        Enter it before the forward pass of the last microbatch.
        """
        self._started = 0
        self._unfinished = list(map(len, self._members))
        self._running.clear()  # removes the all-reduces of an interrupted step
        # `nodes` keeps the autograd nodes of the parameters, and so their hooks, until the
        # microbatch ends. A node runs on the stream on which it was created. Nodes that live longer
        # would not run on the stream on which a CUDA graph is captured.
        nodes = []
        hooks = []
        for bucket, members in enumerate(self._members):
            for parameter in members:
                node = get_gradient_edge(parameter).node
                nodes.append(node)
                # This hook runs when the backward has finished all operations that use the
                # parameter, even if they add to the main gradient directly. `_add_to_main` runs
                # before this hook, so the main gradient contains `.grad` too.
                hooks.append(node.register_hook(partial(self._count, bucket)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._unfinished = []

    def finish(self) -> None:
        """Start the remaining all-reduces and wait until all main gradients are sums over ranks.

        The results are equal bit for bit on all ranks. Call this method once a step, after
        `starting_early`. A rank that has no microbatch in this step calls only this method. All
        ranks must call this method.
        """
        while self._started < len(self._buckets):
            self._start()
        while self._running:
            self._end()
        self._started = 0

    def _count(self, bucket: int, *_: object) -> None:
        """Hook that counts a finished parameter of `bucket` and starts the ready all-reduces."""
        self._unfinished[bucket] -= 1
        while self._started < len(self._buckets) and self._unfinished[self._started] == 0:
            self._start()

    def _start(self) -> None:
        """Start the all-reduce of the next bucket."""
        sums = self._buckets[self._started]
        self._started += 1
        # A BF16 bucket needs a copy, so free the oldest copy.
        if sums.dtype != torch.float32 and len(self._running) == COPIES:
            self._end()
        values = sums.float()  # `values` are the FP32 sums themselves, or a copy of BF16 sums.
        work = dist.all_reduce(values, group=self._group, async_op=True)
        self._running.append((work, values, sums))

    def _end(self) -> None:
        """Wait for the oldest all-reduce and store its result in the bucket."""
        work, values, sums = self._running.popleft()
        work.wait()  # on a GPU, the stream waits and the host continues
        if values is not sums:
            sums.copy_(values)


def _cut(parameters: Iterable[Summed]) -> Iterator[list[Summed]]:
    """Yield buckets: lists of consecutive parameters with at most BUCKET values together.

    A parameter with more than BUCKET values is the only parameter of its bucket. `parameters` must
    not be empty.
    """
    bucket: list[Summed] = []
    for parameter in parameters:
        if bucket and sum(map(torch.numel, bucket)) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket
