"""Where the gradients of a step add up: FP32 (or BF16) sums beside the parameters, over microbatches and then over ranks.

Autograd sums into `parameter.grad`, in the parameter's dtype: BF16 rounds the sum with every microbatch after the first. Here
the sum is `parameter.main_grad`. A hook adds what autograd delivers in `.grad`, and frees it at once. A product may add to
`main_grad` itself; it then returns no gradient for that weight.

All sums lie in one allocation: what does not fit fails at the start, and clearing is one write. Cleared, it holds -0.0. Adding to
that changes no bits, and a sum that is all -0.0 has had nothing added: products begin at +0.0. They lie in about the order in
which backward finishes them, so that what is whole is in one piece, which ranks exchange while backward still runs (`RankSums`).

Under FSDP2 the gathered parameters have sums, which pretrain.model.sharding hands to it; what it gives is the shards' `.grad`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor

# values; a sum begins at a multiple of 256 bytes at least, where every kernel may write at its
# widest
_ALIGNMENT = 128
_EMPTY = -0.0
# Values of a bucket, at most, but for a parameter that alone has more: 64 MiB in FP32. Small ones waste time in starting, of a
# large one too little of the exchange is hidden behind backward.
BUCKET = 2**24
COPIES = 2  # sums kept in BF16 are exchanged as FP32 copies, of so many buckets at once


def local_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, live; any other tensor as it is."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The parameter's gradient, wherever it adds up; None where it has none and no buffer for one."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


# ── Over microbatches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def attach_main_gradients(
    model: nn.Module, dtype: torch.dtype, stacks: Sequence[Sequence[nn.Parameter]] = ()
) -> None:
    """Give every trained parameter of `model` a `main_grad` of its shape in `dtype` (FP32 or BF16), cleared; a tied one once.

    `stacks`: parameters that are the rows of one matrix, in order (queries, keys and values, say), each trained and in one stack.
    Their sums are the rows of one contiguous matrix too, so that one product can add to all of them.
    """
    attach_sums(
        [parameter for parameter in model.parameters() if parameter.requires_grad], dtype, stacks
    )
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
    # backward begins at the end
    runs.sort(key=lambda run: min(places[id(parameter)] for parameter in run), reverse=True)
    sizes = [_aligned(sum(map(torch.numel, run))) for run in runs]
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
    return sum(_aligned(parameter.numel()) for parameter in parameters)


def _aligned(values: int) -> int:
    return -(-values // _ALIGNMENT) * _ALIGNMENT


def empty_sums(memory: Tensor) -> None:
    """Marks the sums in `memory` as empty: nothing has been added to them yet."""
    memory.fill_(_EMPTY)


def clear_main_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Empty all sums, in place; what a backward that failed has left in `.grad` of these parameters goes too."""
    attached = [
        parameter for parameter in parameters if getattr(parameter, "main_grad", None) is not None
    ]
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
    # reduced from sums: under FSDP2 what nothing was added to has a gradient too
    if isinstance(gradient, DTensor):
        mesh, local = gradient.device_mesh, gradient.to_local()
        reached = ((local != 0).any() | ~local.signbit().all()).int()
        dist.all_reduce(reached, dist.ReduceOp.MAX, mesh.get_group(mesh.ndim - 1))
        return bool(reached)
    return (
        gradient is parameter.grad
        or bool((gradient != 0).any())
        or not bool(gradient.signbit().all())
    )


def _add_to_main(parameter: nn.Parameter) -> None:
    """Adds a gradient to its sum as soon as autograd has it whole. BF16 is added to FP32 without a copy; FP32 to BF16 is rounded
    once, the sum."""
    # the hook runs also where all that use the parameter have returned none
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def sum_rows_in_fp32(embedding: nn.Embedding) -> None:
    """Let the gradients of a BF16 table's repeated tokens add up in FP32: autograd sums them before the hook sees them, and a
    common token comes a thousand times in a microbatch. A tied head's gradient is made FP32 before autograd adds the two."""
    # as by `casting_output`
    changed = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)
    if embedding.weight.dtype == torch.float32 or not embedding.weight.requires_grad or changed:
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
        if (
            main is not None
            and main.is_cuda
            and ctx.padding < 0
            and not torch.are_deterministic_algorithms_enabled()
        ):
            # Without a gradient of the whole table, zeros but for the microbatch's tokens.
            main.index_add_(0, ids.flatten(), gradient.flatten(0, -2).float())
            return None, None, None
        rows = len(ctx.table)
        return (
            None,
            torch.ops.aten.embedding_dense_backward(
                gradient.float(), ids, rows, ctx.padding, False
            ),
            None,
        )


# ── Over ranks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RankSums:
    """The main gradients of one model, which become their sums over all ranks: in FP32, once a step, while the backward of the
    step's last microbatch still runs. A sum and not a mean, as the loss is divided by the tokens of all ranks.

    Every rank holds the whole model. The memory of its sums is cut into buckets; a bucket's all-reduce starts when backward has
    finished the last of its parameters. Buckets always start in the order in which they lie, so all ranks call the same
    collectives in the same order, also where a rank's microbatches do not reach a parameter. The bounds are fixed before the
    first step, so a resumed run adds in the order of the unbroken one. The sums have a process group of their own: within a
    backward, delayed scaling exchanges its amaxes in the default one, and which of the two comes first may differ between ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Collective: every rank has the same parameters, all with main gradients in one allocation."""
        attached = {
            id(each): each for each in parameters if getattr(each, "main_grad", None) is not None
        }
        in_order = sorted(attached.values(), key=lambda each: each.main_grad.storage_offset())
        memory = in_order[0].main_grad._base
        self._group = dist.new_group()
        self._buckets: list[Tensor] = []  # pieces of the main gradients' memory
        self._parameters: list[int] = []  # of each bucket
        # of these, those that the step's last backward has not finished; empty in any other
        self._missing: list[int] = []
        self._started = 0  # buckets
        # the exchange, its FP32 values, and the sums
        self._under_way: deque[tuple[dist.Work, Tensor, Tensor]] = deque()
        # of the graph; autograd itself keeps them, and their hooks, no longer than a graph
        self._ends: list[Node] = []
        for bucket, members in enumerate(_cut(in_order)):
            begin, last = members[0].main_grad.storage_offset(), members[-1].main_grad
            self._buckets.append(memory[begin : last.storage_offset() + last.numel()])
            self._parameters.append(len(members))
            for parameter in members:
                # Called after the last use of the parameter in a backward has delivered, also where all have returned none, as
                # products do that add to the main gradient; and after what was delivered has been added there.
                end = get_gradient_edge(parameter).node
                end.register_hook(partial(self._count, bucket))
                self._ends.append(end)

    @contextmanager
    def starting_early(self) -> Iterator[None]:
        """Put this around the backward after which nothing is added: each bucket starts once it and all before it are whole."""
        self._started, self._missing = 0, list(self._parameters)
        self._under_way.clear()  # of a step that was broken off
        try:
            yield
        finally:
            self._missing = []

    def finish(self) -> None:
        """Exchange what has not been yet, and wait: the main gradients are now their sums over ranks, the same bits on each.
        Collective. Once a step, after `starting_early` or, on a rank that has nothing to compute in this step, alone."""
        while self._started < len(self._buckets):
            self._start()
        while self._under_way:
            self._end()
        self._started = 0

    def _count(self, bucket: int, *_: object) -> None:
        if self._missing:
            self._missing[bucket] -= 1
            while self._started < len(self._buckets) and self._missing[self._started] == 0:
                self._start()

    def _start(self) -> None:
        sums = self._buckets[self._started]
        self._started += 1
        if sums.dtype != torch.float32 and len(self._under_way) == COPIES:
            self._end()
        values = sums.float()  # a copy of BF16 sums only
        self._under_way.append(
            (dist.all_reduce(values, group=self._group, async_op=True), values, sums)
        )

    def _end(self) -> None:
        work, values, sums = self._under_way.popleft()
        work.wait()  # on a GPU the stream waits, and not the host
        if values is not sums:
            sums.copy_(values)


def _cut(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours in buckets of at most BUCKET values. One that is larger has a bucket of its own: others need not wait for it."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(map(torch.numel, bucket)) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket
