"""The sum of main gradients over ranks: in FP32, once a step, while the backward of the step's last microbatch still runs.

Every rank holds the whole model and adds its own microbatches up in main gradients (pretrain.model.gradients), as one process
does. Their memory is cut into buckets. A bucket's all-reduce starts when backward has finished the last of its parameters.

Buckets always start in the order in which they lie, whatever order they become whole in, so all ranks call the same collectives
in the same order, also where a rank's microbatches do not reach a parameter. The bounds are fixed before the first step, so a
resumed run adds in the order of the unbroken one. The sums have a process group of their own: within a backward, delayed scaling
exchanges its amaxes in the default one, and which of the two comes first may differ between ranks.

It is a sum and not a mean, as the loss is divided by the tokens of all ranks (pretrain.model.packed).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

# Values of a bucket, at most, but for a parameter that alone has more: 64 MiB in FP32. Small ones waste time in starting, of a
# large one too little of the exchange is hidden behind backward.
BUCKET = 2**24
# Sums kept in BF16 are exchanged as FP32 copies, of so many buckets at once.
COPIES = 2


@dataclass
class _Bucket:
    sums: Tensor  # a piece of the main gradients' memory
    parameters: int
    missing: int = 0  # parameters that the backward under way has not finished


class RankSums:
    """The main gradients of one model, which become their sums over all ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter], most: int = BUCKET) -> None:
        """Collective: every rank has the same parameters, all with main gradients in one allocation. `most`: values a bucket."""
        attached = {id(each): each for each in parameters if getattr(each, "main_grad", None) is not None}
        in_order = sorted(attached.values(), key=lambda each: each.main_grad.storage_offset())
        memory = in_order[0].main_grad._base
        self._group = dist.new_group()
        self._buckets: list[_Bucket] = []
        self._started = 0  # buckets
        self._early = False
        self._under_way: deque[tuple[dist.Work, Tensor, Tensor]] = deque()  # the exchange, its FP32 values, and the sums
        self._ends: list[Node] = []  # of the graph; autograd itself keeps them, and their hooks, no longer than a graph
        for members in _cut(in_order, most):
            begin, last = members[0].main_grad.storage_offset(), members[-1].main_grad
            bucket = _Bucket(memory[begin : last.storage_offset() + last.numel()], len(members))
            self._buckets.append(bucket)
            for parameter in members:
                # Called after the last use of the parameter in a backward has delivered, also where all have returned none, as
                # products do that add to the main gradient; and after what was delivered has been added there.
                end = get_gradient_edge(parameter).node
                end.register_hook(partial(self._count, bucket))
                self._ends.append(end)

    @contextmanager
    def starting_early(self) -> Iterator[None]:
        """Put this around the backward after which nothing more is added: each bucket starts once it and all before it are
        whole."""
        self._started, self._early = 0, True
        self._under_way.clear()  # of a step that was broken off
        for bucket in self._buckets:
            bucket.missing = bucket.parameters
        try:
            yield
        finally:
            self._early = False

    def finish(self) -> None:
        """Exchange what has not been yet, and wait: the main gradients are now their sums over ranks, the same bits on each.
        Collective. Once a step, after `starting_early` or, on a rank that has nothing to compute in this step, alone."""
        while self._started < len(self._buckets):
            self._start()
        while self._under_way:
            self._end()
        self._started = 0

    def _count(self, bucket: _Bucket, *_: object) -> None:
        if not self._early:
            return
        bucket.missing -= 1
        while self._started < len(self._buckets) and self._buckets[self._started].missing == 0:
            self._start()

    def _start(self) -> None:
        sums = self._buckets[self._started].sums
        self._started += 1
        if sums.dtype != torch.float32 and len(self._under_way) == COPIES:
            self._end()
        values = sums.float()  # a copy of BF16 sums only
        self._under_way.append((dist.all_reduce(values, group=self._group, async_op=True), values, sums))

    def _end(self) -> None:
        work, values, sums = self._under_way.popleft()
        work.wait()  # on a GPU the stream waits, and not the host
        if values is not sums:
            sums.copy_(values)


def _cut(parameters: Iterable[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours in buckets of at most `most` values. One that is larger has a bucket of its own: others need not wait for it."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(map(torch.numel, bucket)) + parameter.numel() > most:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket
