"""Build the tensors of a step from packs. Every batch has the same shapes, whatever it holds.

A microbatch is several packs laid end to end in one row of T = microbatch * length tokens.
`cu_seqlens`, the offsets of the documents, decides which tokens may attend to each other. `labels`
are already shifted and masked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from foundation.errors import InputError
from packing.arrow import IGNORE, Pack, Packs
from packing.order import Order, spread

T = TypeVar("T")

# The number of offsets is rounded up to a multiple of this, so that it is not new in every
# microbatch. Padding to the worst case (1,024 slots for 165 documents) costs 10 % of an H200's
# training speed: empty documents are not free.
OFFSETS_MULTIPLE = 16
_AHEAD = 2  # results that a thread builds in advance


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward and backward pass; T = packs * length. Tensors are on the CPU."""

    input_ids: Tensor  # [1, T] int64
    # [1, T] int64, from 0 in each document, but from first_position in the first one of a pack
    position_ids: Tensor
    labels: Tensor  # [1, T] int64, already shifted: labels[i] is input_ids[i + 1] or IGNORE
    # [bucket] int32: 0, the end of each document, then T up to the bucket's size
    cu_seqlens: Tensor
    # The pack length, which bounds every document. It is constant: another value would recompile.
    max_seqlen: int
    valid_tokens: int  # labels that are not IGNORE


@dataclass(frozen=True)
class StepBatches:
    """One rank's microbatches of a step, and totals over all ranks.

    Every rank has the same number of microbatches. The totals need no communication: every rank
    reads the document lengths of all packs of the step, but only its own tokens.
    """

    microbatches: list[Microbatch]  # of this rank
    tokens: int  # over all ranks, with padding: packs * length
    valid_tokens: int  # over all ranks; the loss is divided by it
    # Over all ranks, for the FLOPs of attention. Attention over padding is not useful work.
    sum_squared_lengths: int
    epoch: float  # epochs after this step
    # After this step: epochs and share of each of several sources, and the part of a stream.
    sources: dict[str, float] = field(default_factory=dict)
    places: range = range(0)  # places of the step's packs in the stream, over all ranks


def build_microbatch(
    packs: Sequence[Pack], *, mask_boundaries: bool, pin_memory: bool = False
) -> Microbatch:
    """Lay packs of one length end to end.

    The last token of a pack has no label. The last token of a document has none with
    `mask_boundaries`; otherwise it predicts the first token of the next document. Tokens without a
    loss (`Pack.trained`) and padding are no labels. Padding at the end of a pack is a document of
    its own for attention.
    """
    length = len(packs[0].input_ids)
    total = len(packs) * length
    # Documents and padding cover the microbatch without a gap.
    tails = [length - int(pack.lengths.sum()) for pack in packs]
    parts = [
        np.append(pack.lengths, tail) if tail else pack.lengths
        for pack, tail in zip(packs, tails, strict=True)
    ]
    sizes = np.concatenate(parts, dtype=np.int64)
    ends = np.cumsum(sizes)
    first_positions = np.zeros_like(sizes)
    first_positions[np.cumsum([0, *map(len, parts[:-1])])] = [pack.first_position for pack in packs]

    input_ids = np.concatenate([pack.input_ids for pack in packs], dtype=np.int64)
    position_ids = np.arange(total) - np.repeat(ends - sizes - first_positions, sizes)
    labels = np.empty(total, dtype=np.int64)
    labels[:-1] = input_ids[1:]
    labels[(ends if mask_boundaries else np.arange(length, total + 1, length)) - 1] = IGNORE
    for row, pack, tail in zip(labels.reshape(-1, length), packs, tails, strict=True):
        if pack.trained is not None:
            row[:-1][~pack.trained[1:]] = IGNORE
        if tail:  # The last real token would have to predict padding, so it has no label either.
            row[-min(tail + 1, length) :] = IGNORE

    unfilled = -(len(ends) + 1) % OFFSETS_MULTIPLE
    offsets = np.concatenate([[0], ends, np.full(unfilled, total)], dtype=np.int32)
    return Microbatch(
        input_ids=_tensor(input_ids[None], pin_memory),
        position_ids=_tensor(position_ids[None], pin_memory),
        labels=_tensor(labels[None], pin_memory),
        cu_seqlens=_tensor(offsets, pin_memory),
        max_seqlen=length,
        valid_tokens=int(np.count_nonzero(labels != IGNORE)),
    )


def _tensor(array: np.ndarray, pin_memory: bool) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin_memory else tensor


def sum_of_squares(lengths: np.ndarray) -> int:
    """Return the sum of squared document lengths. The cost of causal attention is proportional."""
    lengths = lengths.astype(np.int64)
    return int(lengths @ lengths)


def count_valid_tokens(
    lengths: np.ndarray, trained: np.ndarray | None = None, *, mask_boundaries: bool
) -> int:
    """Return the number of labels of a pack with these document lengths.

    Every trained token is a label, except the first one of each document, or of the pack without
    `mask_boundaries`.
    """
    real = int(lengths.sum())
    firsts_count = len(lengths) if mask_boundaries else min(len(lengths), 1)
    if trained is None:
        return real - firsts_count
    firsts = (np.cumsum(lengths) - lengths)[:firsts_count]
    return int(np.count_nonzero(trained[:real]) - np.count_nonzero(trained[firsts]))


class Prefetch(AbstractContextManager, Iterator[T]):
    """Iterates over build(n) for the given numbers, in order. A thread builds ahead.

    NumPy releases the interpreter lock meanwhile. An exception of `build` is raised by the `next`
    that would have returned its result, and ends the iteration. Closing, leaving the `with` block
    and iterating to the end return when the thread has ended. Results that remain are dropped.
    """

    def __init__(
        self,
        build: Callable[[int], T],
        numbers: Iterable[int],
        pin_memory: bool,
        stop_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to build. `close` calls `stop_waiting`, to end a `build` that waits for packs."""
        self.data_wait_ms = 0.0  # time that the last `next`, and `ready` before it, have waited
        self._waited_ms = 0.0  # time that `ready` has waited since then
        self._build = build
        self._numbers = iter(numbers)
        self._stop_waiting = stop_waiting
        # Pinning uses the device of a thread, which by default is the first one for every rank.
        setup = None
        if pin_memory:
            device = torch.accelerator.current_device_index()
            setup = partial(torch.accelerator.set_device_index, device)
        self._thread = ThreadPoolExecutor(1, "prefetch", setup)
        self._pending: deque[Future[T]] = deque()
        self._submit(_AHEAD)

    def _submit(self, count: int) -> None:
        self._pending.extend(
            self._thread.submit(self._build, number) for number in islice(self._numbers, count)
        )

    def ready(self, seconds: float) -> bool:
        """Wait at most `seconds`. Return whether `next` would then return, or raise, at once."""
        started = time.perf_counter()
        is_ready = not self._pending or bool(wait(islice(self._pending, 1), seconds).done)
        self._waited_ms += (time.perf_counter() - started) * 1e3
        return is_ready

    @property
    def failure(self) -> BaseException | None:
        """The exception that `next` would raise at once, or None."""
        if self._pending and self._pending[0].done():
            return self._pending[0].exception()
        return None

    def __next__(self) -> T:
        if not self._pending:
            self.close()
            raise StopIteration
        started = time.perf_counter()
        future = self._pending.popleft()
        has_failed = future.exception() is not None  # This waits for the result.
        self.data_wait_ms = self._waited_ms + (time.perf_counter() - started) * 1e3
        self._waited_ms = 0.0
        if has_failed:
            self.close()
        else:
            self._submit(1)
        return future.result()

    def close(self) -> None:
        """Drop the remaining results and wait for the thread to end. Closing twice is harmless."""
        self._numbers = iter(())
        self._pending.clear()
        self._stop_waiting()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The rule that turns packs into the microbatches of one rank."""

    microbatch: int  # packs in one forward pass
    rank: int
    world_size: int
    mask_boundaries: bool
    pin_memory: bool = False
    # A larger token id raises InputError. On a device it would crash.
    vocab_size: int | None = None
    # A document that was cut between packs raises InputError beyond this number of positions.
    positions: int | None = None

    def build(self, packs: Packs, indices: Sequence[int]) -> Microbatch:
        """Return the microbatch of these packs, filled up with blank ones without documents."""
        chosen = [read_pack(packs, index, self.vocab_size, self.positions) for index in indices]
        blank = Pack(np.zeros(packs.length, np.uint32), np.zeros(0, np.int32))
        chosen += [blank] * (self.microbatch - len(chosen))
        return build_microbatch(
            chosen, mask_boundaries=self.mask_boundaries, pin_memory=self.pin_memory
        )

    def evaluation(self, packs: Packs, limit: int | None = None) -> Prefetch[Microbatch]:
        """Return this rank's part of one pass over the packs, or over the first `limit` ones.

        Every rank gets the same number of microbatches, so that none waits in a collective.
        """
        count = len(packs) if limit is None else min(limit, len(packs))

        def build(turn: int) -> Microbatch:
            first = (turn * self.world_size + self.rank) * self.microbatch
            return self.build(packs, range(min(first, count), min(first + self.microbatch, count)))

        turns = -(-count // (self.world_size * self.microbatch))
        return Prefetch(build, range(turns), self.pin_memory)


@dataclass(frozen=True)
class BatchStream(Batching):
    """The batches of one rank, by step number.

    `step(n)` is a pure function: a run that resumes at step n gets the tensors of the uninterrupted
    run. If the packs of a step do not fill the microbatches of all ranks, blank packs do. They have
    no labels, so they change neither losses nor gradients. A step has at least one pack for each
    rank, so every rank has one in its first microbatch.
    """

    packs: Packs
    order: Order

    def step(self, number: int) -> StepBatches:
        """Return the batches of step `number`, counted from 0."""
        indices = self.order.packs_of_step(number).tolist()
        packs = [self.packs[index] for index in indices]
        squares = [sum_of_squares(pack.lengths) for pack in packs]
        microbatches = -(-len(indices) // (self.world_size * self.microbatch))
        blanks = self.world_size * microbatches * self.microbatch - len(indices)
        # Blank packs cost nothing, so they go last, to the lightest microbatches. A microbatch of
        # blank packs alone comes last on its rank.
        of_rank = spread([*squares, *[0] * blanks], self.world_size, microbatches)[self.rank]
        return StepBatches(
            microbatches=[
                self.build(self.packs, [indices[i] for i in members if i < len(indices)])
                for members in of_rank
            ],
            tokens=len(indices) * self.packs.length,
            valid_tokens=sum(
                count_valid_tokens(pack.lengths, pack.trained, mask_boundaries=self.mask_boundaries)
                for pack in packs
            ),
            sum_squared_lengths=sum(squares),
            epoch=self.order.epoch_of(number + 1),
            sources=self.order.figures(number + 1),
            places=self.order.places_of_step(number),
        )

    def steps(self, start: int, stop: int) -> Prefetch[StepBatches]:
        """Return steps `start` to `stop` (exclusive), which a thread builds ahead.

        Use it in a `with` block, or iterate to the end.
        """
        return Prefetch(self.step, range(start, stop), self.pin_memory, self.order.stop_waiting)


def read_pack(
    packs: Packs, index: int, vocab_size: int | None, positions: int | None = None
) -> Pack:
    """Return pack `index`.

    Raises InputError if a token id is not below `vocab_size`, or if the first document reaches
    beyond `positions`. None means that any is accepted.
    """
    pack = packs[index]
    if vocab_size is not None:
        highest = int(pack.input_ids.max())
        if highest >= vocab_size:
            raise InputError(
                f"{packs.path}: pack {index} holds token id {highest}, and the model has "
                f"{vocab_size} ids; take its own tokenizer"
            )
    if positions and len(pack.lengths):
        end = pack.first_position + int(pack.lengths[0])
        if end > positions:
            raise InputError(
                f"{packs.path}: pack {index} goes on to position {end - 1:,}, the model knows "
                f"{positions:,}; let positions restart"
            )
    return pack
