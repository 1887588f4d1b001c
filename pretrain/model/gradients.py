"""Main gradients: sums of gradients beside the parameters, over microbatches and then over ranks.

Autograd accumulates in `parameter.grad`, in the parameter's dtype. In BF16 the sum is rounded with
every microbatch after the first. Main gradients accumulate in `parameter.main_grad`, in FP32 or
BF16. A hook adds the gradient that autograd writes to `.grad`, and frees it at once. A matrix
product may add to `main_grad` itself; it then returns no gradient for that weight.

All main gradients of a model are in one allocation. A run that does not fit into memory fails at
its start, and clearing the gradients is one write. A cleared gradient holds -0.0, which changes no
bits when something is added. A sum of only -0.0 has had nothing added, because products start from
+0.0. The main gradients are stored about in the order of backward. Finished
gradients are therefore contiguous, and ranks exchange them while backward is still running
(`RankSums`).

Under FSDP2 the gathered parameters have main gradients, which `pretrain.model.sharding` passes to
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
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor

# Main gradients start at multiples of this number of values. These are at least 256 bytes, which
# allows the widest memory access of any kernel.
_ALIGNMENT = 128
_EMPTY = -0.0
# Maximum number of values in a bucket, unless a single parameter has more: 64 MiB in FP32. The
# all-reduce of a smaller bucket would be dominated by its latency. A larger one would overlap less
# with backward.
BUCKET = 2**24
# An nn.Parameter with the attribute `main_grad`.
Summed = Any
# BF16 sums are exchanged as FP32 copies. At most this number of buckets has a copy at a time.
COPIES = 2


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, or a plain tensor itself. Neither is copied."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the main gradient of a parameter, or its `.grad` if it has no main gradient."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


# ── Over microbatches ──


def attach_main_gradients(
    model: nn.Module, dtype: torch.dtype, stacks: Sequence[Sequence[Summed]] = ()
) -> None:
    """Give every trained parameter of `model` a cleared `main_grad` of its shape.

    Args:
        model: Tied parameters get one main gradient.
        dtype: FP32 or BF16.
        stacks: Lists of trained parameters that are the rows of one matrix, in order, such as
            queries, keys and values. Their main gradients are the rows of one contiguous matrix
            too, so that one product can add to all of them. A parameter is in one stack at most.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    attach_sums(trained, dtype, stacks)
    if dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                sum_rows_in_fp32(module)


def attach_sums(
    trained: Sequence[Summed],
    dtype: torch.dtype,
    stacks: Sequence[Sequence[Summed]],
    memory: Tensor | None = None,
) -> Tensor:
    """Give the parameters `trained` a cleared `main_grad`; see `attach_main_gradients`.

    `memory` is a 1-D tensor of `dtype` with at least `values_of_sums(trained)` values, to store the
    main gradients in. Sets of parameters that never accumulate at the same time may share it. By
    default it is allocated. Returns the part of the memory that is used.
    """
    stacked = {id(parameter) for stack in stacks for parameter in stack}
    single = [[parameter] for parameter in trained if id(parameter) not in stacked]
    runs = [*stacks, *single]
    places = {id(parameter): place for place, parameter in enumerate(trained)}
    # Backward starts with the last parameters.
    runs.sort(key=lambda run: min(places[id(parameter)] for parameter in run), reverse=True)
    sizes = [_aligned(sum(map(torch.numel, run))) for run in runs]
    if memory is None:
        memory = torch.empty(sum(sizes), dtype=dtype, device=trained[0].device)
    empty_sums(memory)
    run_start = 0
    for run, size in zip(runs, sizes, strict=True):
        start = run_start
        for parameter in run:
            end = start + parameter.numel()
            parameter.main_grad = memory[start:end].view(parameter.shape)
            parameter.grad_dtype = None  # accepts gradients of any dtype
            parameter.register_post_accumulate_grad_hook(_add_to_main)
            start = end
        run_start += size
    return memory[:run_start]


def values_of_sums(parameters: Iterable[Tensor]) -> int:
    """Return the maximum number of values in the main gradients, whatever the stacks."""
    return sum(_aligned(parameter.numel()) for parameter in parameters)


def _aligned(values: int) -> int:
    """Round up to a multiple of `_ALIGNMENT`."""
    return -(-values // _ALIGNMENT) * _ALIGNMENT


def empty_sums(memory: Tensor) -> None:
    """Mark all main gradients in `memory` as empty by filling it with -0.0."""
    memory.fill_(_EMPTY)


def clear_main_gradients(parameters: Iterable[Summed]) -> None:
    """Empty all main gradients in place.

    Also drop `.grad` of these parameters, which a failed backward may have left.
    """
    attached = [
        parameter for parameter in parameters if getattr(parameter, "main_grad", None) is not None
    ]
    allocations = {id(p.main_grad._base): p.main_grad._base for p in attached}
    for memory in allocations.values():
        empty_sums(memory)
    for parameter in attached:
        parameter.grad = None


def was_reached(parameter: nn.Parameter) -> bool:
    """Return whether backward has added to the gradient since it was cleared, even if only zeros.

    Waits for the device. Collective if the gradient is sharded.
    """
    gradient = gradient_of(parameter)
    if gradient is None:
        return False
    if isinstance(gradient, DTensor):
        # Under FSDP2 even an empty sum is reduced and has a gradient.
        mesh = gradient.device_mesh
        local = gradient.to_local()
        reached = ((local != 0).any() | ~local.signbit().all()).int()
        dist.all_reduce(reached, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))
        return bool(reached)
    if gradient is parameter.grad:
        return True
    return bool((gradient != 0).any()) or not bool(gradient.signbit().all())


def _add_to_main(parameter: Summed) -> None:
    """Add `.grad` to the main gradient and free it, as soon as autograd has accumulated it.

    A BF16 gradient is added to an FP32 sum without a copy. If an FP32 gradient is added to a BF16
    sum, the sum is rounded once.
    """
    # The hook also runs if all users of the parameter have returned no gradient.
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def sum_rows_in_fp32(embedding: Any) -> None:
    """Accumulate the gradient of a BF16 nn.Embedding in FP32 over repeated tokens.

    Autograd sums over tokens before the hook sees the gradient, and a common token occurs a
    thousand times in a microbatch. The gradient of a tied head is converted to FP32 before autograd
    adds both. Has no effect if the embedding is FP32, not trained, or has another forward, such as
    that of `casting_output`.
    """
    overridden = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)
    weight = embedding.weight
    if weight.dtype == torch.float32 or not weight.requires_grad or overridden:
        return
    weight.grad_dtype = torch.float32
    embedding.forward = lambda ids: _Lookup.apply(ids, embedding.weight, embedding.padding_idx)


class _Lookup(torch.autograd.Function):
    """Embedding lookup in a table [vocabulary, hidden] whose gradient is FP32 for any dtype."""

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
        in_order = ctx.padding >= 0 or torch.are_deterministic_algorithms_enabled()
        if main is not None and main.is_cuda and not in_order:
            # Avoids a gradient of the size of the table that is zero except for a few rows.
            main.index_add_(0, ids.flatten(), gradient.flatten(0, -2))
            return None, None, None
        d_table = torch.ops.aten.embedding_dense_backward(
            gradient, ids, len(ctx.table), ctx.padding, False
        )
        return None, d_table, None


# ── Over ranks ──


class RankSums:
    """Sum of the main gradients over ranks that each hold the complete model.

    Gradients are summed in FP32 once a step, overlapped with the backward of the last microbatch.
    The result is a sum and not a mean, because the loss is already divided by the tokens of all
    ranks.

    The memory of the main gradients is split into buckets. The all-reduce of a bucket starts when
    backward has finished the last of its parameters. Buckets always start in the order of memory.
    All ranks therefore issue the same collectives in the same order, even if the microbatches of
    one rank do not reach a parameter. The buckets are fixed before the first step, so a resumed run
    sums in the same order as an uninterrupted one.

    The sums have their own process group. Delayed scaling exchanges amaxes in the default group
    during backward, and the order of the two may differ between ranks.
    """

    def __init__(self, parameters: Iterable[Summed]) -> None:
        """Create the buckets. Collective.

        All ranks pass the same parameters, with main gradients in one allocation.
        """
        attached = {id(p): p for p in parameters if getattr(p, "main_grad", None) is not None}
        in_order = sorted(attached.values(), key=lambda p: p.main_grad.storage_offset())
        memory = in_order[0].main_grad._base
        self._group = dist.new_group()
        self._buckets: list[Tensor] = []  # slices of `memory`
        self._parameter_counts: list[int] = []  # number of parameters in each bucket
        # Number of parameters in each bucket that the last backward of the step has not finished.
        # Empty in any other backward.
        self._unfinished: list[int] = []
        self._started = 0  # number of buckets whose all-reduce has started
        # Running exchanges: the work, its FP32 values, and the bucket.
        self._running: deque[tuple[dist.Work, Tensor, Tensor]] = deque()
        # Autograd keeps these nodes, with their hooks, only as long as a graph exists.
        self._gradient_nodes: list[Node] = []
        for bucket, members in enumerate(_cut(in_order)):
            start = members[0].main_grad.storage_offset()
            last = members[-1].main_grad
            self._buckets.append(memory[start : last.storage_offset() + last.numel()])
            self._parameter_counts.append(len(members))
            for parameter in members:
                # The hook runs after all users of the parameter have finished in a backward, even
                # if they returned no gradient because they add to the main gradient. By then
                # `_add_to_main` has added `.grad`.
                node = get_gradient_edge(parameter).node
                node.register_hook(partial(self._count, bucket))
                self._gradient_nodes.append(node)

    @contextmanager
    def starting_early(self) -> Iterator[None]:
        """Start the exchange of finished buckets during the last backward of a step."""
        self._started = 0
        self._unfinished = list(self._parameter_counts)
        self._running.clear()  # may have work of an interrupted step
        try:
            yield
        finally:
            self._unfinished = []

    def finish(self) -> None:
        """Exchange the remaining buckets and wait, so that main gradients are sums over ranks.

        All ranks get the same bits. Call it once a step, after `starting_early`, or alone on a rank
        that has no microbatch in this step. Collective.
        """
        while self._started < len(self._buckets):
            self._start()
        while self._running:
            self._end()
        self._started = 0

    def _count(self, bucket: int, *_: object) -> None:
        """Count a finished parameter and start all buckets that are complete."""
        if self._unfinished:
            self._unfinished[bucket] -= 1
            while self._started < len(self._buckets) and self._unfinished[self._started] == 0:
                self._start()

    def _start(self) -> None:
        """Start the all-reduce of the next bucket."""
        sums = self._buckets[self._started]
        self._started += 1
        if sums.dtype != torch.float32 and len(self._running) == COPIES:
            self._end()
        values = sums.float()  # copies only BF16 sums
        work = dist.all_reduce(values, group=self._group, async_op=True)
        self._running.append((work, values, sums))

    def _end(self) -> None:
        """Wait for the oldest exchange and store its result in the bucket."""
        work, values, sums = self._running.popleft()
        work.wait()  # on a GPU this blocks the stream and not the host
        if values is not sums:
            sums.copy_(values)


def _cut(parameters: Iterable[Summed]) -> Iterator[list[Summed]]:
    """Group consecutive parameters into buckets of at most BUCKET values.

    A parameter with more values gets a bucket to itself, so that other parameters need not wait for
    it.
    """
    bucket: list[Summed] = []
    for parameter in parameters:
        if bucket and sum(map(torch.numel, bucket)) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket
