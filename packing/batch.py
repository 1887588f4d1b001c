"""Packs to the tensors of a step: every batch has the same shapes, whatever documents it holds.

A microbatch is several packs laid end to end in one row of T = microbatch * length tokens. `cu_seqlens`, the offsets of the
documents, says which tokens may attend to each other; `labels` are shifted and masked already.
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

# The number of offsets is rounded up to a multiple of this, so that it is not a new number in every microbatch. Padding to the
# worst case instead (1,024 slots for 165 documents) costs 10 % of an H200's training speed: empty documents are not free.
OFFSETS_MULTIPLE = 16
_AHEAD = 2  # results that a thread builds before they are asked for


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward and backward pass; T = packs * length. All tensors lie on the CPU, pinned if asked for."""

    input_ids: Tensor  # [1, T] int64
    # [1, T] int64, from 0 in each document, or from first_position in a pack's first
    position_ids: Tensor
    labels: Tensor  # [1, T] int64, already shifted: labels[i] is input_ids[i + 1] or IGNORE
    # [bucket] int32: 0, the end of each document, then T up to the bucket's size
    cu_seqlens: Tensor
    # the pack length, which bounds every document; constant, since every other value would
    # recompile
    max_seqlen: int
    valid_tokens: int  # labels that are not IGNORE


@dataclass(frozen=True)
class StepBatches:
    """One rank's microbatches of one step, and totals over all ranks. Every rank has equally many microbatches.

    The totals need no communication: every rank reads the document lengths of all the step's packs, but tokens of its own only.
    """

    microbatches: list[Microbatch]  # of this rank
    tokens: int  # over all ranks, padding included: packs * length
    valid_tokens: int  # over all ranks; the loss is divided by this, never by a microbatch's count
    # Over all ranks, of real documents, for the FLOPs of attention; attention over padding is not useful work.
    sum_squared_lengths: int
    epoch: float  # epochs consumed once this step is done
    # Once the step is done: epochs and share of each of several sources, and the place in a stream.
    sources: dict[str, float] = field(default_factory=dict)
    places: range = range(0)  # of the step's packs in the stream, over all ranks


def build_microbatch(
    packs: Sequence[Pack], *, mask_boundaries: bool, pin_memory: bool = False
) -> Microbatch:
    """Lay packs of one length end to end.

    The last token of a pack has no label. The last one of a document has none with `mask_boundaries`, and else predicts the next
    document's first. Tokens that are not to be learnt (`Pack.trained`) are no labels, nor is padding at a pack's end, which is a
    document of its own to attention.
    """
    length = len(packs[0].input_ids)
    total = len(packs) * length
    # Documents and padding tails cover the microbatch without a gap.
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
    for begin, pack in zip(range(0, total, length), packs, strict=True):
        if pack.trained is not None:
            labels[begin : begin + length - 1][~pack.trained[1:]] = IGNORE
    for end, tail in zip(range(length, total + 1, length), tails, strict=True):
        if tail:  # from the last real token on, which would have to guess padding
            labels[end - min(tail + 1, length) : end] = IGNORE

    offsets = np.full(
        -(-(len(ends) + 1) // OFFSETS_MULTIPLE) * OFFSETS_MULTIPLE, total, dtype=np.int32
    )
    offsets[0] = 0
    offsets[1 : len(ends) + 1] = ends
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
    """Sum of squared document lengths, which causal attention's cost is proportional to."""
    lengths = lengths.astype(np.int64)
    return int(lengths @ lengths)


def count_valid_tokens(
    lengths: np.ndarray, trained: np.ndarray | None = None, *, mask_boundaries: bool
) -> int:
    """Labels of a pack with these document lengths, without building it: every token to be learnt is one but for the first of
    each document, or of the pack."""
    real = int(lengths.sum())
    if trained is None:
        return real - len(lengths) if mask_boundaries else max(real - 1, 0)
    firsts = (
        np.cumsum(lengths) - lengths
        if mask_boundaries
        else np.zeros(min(len(lengths), 1), np.int64)
    )
    return int(np.count_nonzero(trained[:real]) - np.count_nonzero(trained[firsts]))


class Prefetch(AbstractContextManager, Iterator[T]):
    """Iterates over build(n) for the numbers given, in order; a thread (numpy releases the interpreter lock) builds ahead.

    An exception of `build` is raised by the `next` that would have returned its result, and ends the iteration. `close`, leaving
    a `with` block and iterating to the end all return once the thread has ended; what was not consumed is dropped.
    """

    def __init__(
        self,
        build: Callable[[int], T],
        numbers: Iterable[int],
        pin_memory: bool,
        stop_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """`stop_waiting`: ends a `build` that waits for packs. `close` calls it."""
        # how long the last `next` waited for its result, and `ready` before it
        self.data_wait_ms = 0.0
        self._waited_ms = 0.0  # by `ready`, since then
        self._build = build
        self._numbers = iter(numbers)
        self._stop_waiting = stop_waiting
        setup = None
        # pinning goes through a thread's device, and by default every rank would take memory of the
        # first
        if pin_memory:
            setup = partial(
                torch.accelerator.set_device_index, torch.accelerator.current_device_index()
            )
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="prefetch", initializer=setup
        )
        self._pending: deque[Future[T]] = deque()
        self._submit(_AHEAD)

    def _submit(self, count: int) -> None:
        self._pending.extend(
            self._thread.submit(self._build, number) for number in islice(self._numbers, count)
        )

    def ready(self, seconds: float) -> bool:
        """Returns whether `next` would return, or raise, at once; waits for that, so many seconds at most."""
        started = time.perf_counter()
        done = not self._pending or bool(wait(islice(self._pending, 1), seconds).done)
        self._waited_ms += (time.perf_counter() - started) * 1e3
        return done

    @property
    def failure(self) -> BaseException | None:
        """What `next` would raise at once; None where it would not, or where that is not known yet."""
        return self._pending[0].exception() if self._pending and self._pending[0].done() else None

    def __next__(self) -> T:
        if not self._pending:
            self.close()
            raise StopIteration
        started = time.perf_counter()
        future = self._pending.popleft()
        failed = future.exception() is not None  # waits
        self.data_wait_ms, self._waited_ms = (
            self._waited_ms + (time.perf_counter() - started) * 1e3,
            0.0,
        )
        if failed:
            self.close()
        else:
            self._submit(1)
        return future.result()

    def close(self) -> None:
        """Drop what was not consumed and wait for the thread to end; closing twice is harmless."""
        self._numbers = iter(())
        self._pending.clear()
        self._stop_waiting()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How packs become the microbatches of one rank."""

    microbatch: int  # packs in one forward pass
    rank: int
    world_size: int
    mask_boundaries: bool
    pin_memory: bool = False
    # if given, a token id beyond it is an InputError instead of a crash on the device
    vocab_size: int | None = None
    # if given, so is a document that goes on from another pack beyond so many positions
    positions: int | None = None

    def build(self, packs: Packs, indices: Sequence[int]) -> Microbatch:
        """The microbatch of these packs, filled up with blank ones: without documents and labels."""
        chosen = [read_pack(packs, index, self.vocab_size, self.positions) for index in indices]
        blank = Pack(np.zeros(packs.length, np.uint32), np.zeros(0, np.int32))
        chosen += [blank] * (self.microbatch - len(chosen))
        return build_microbatch(
            chosen, mask_boundaries=self.mask_boundaries, pin_memory=self.pin_memory
        )

    def evaluation(self, packs: Packs, limit: int | None = None) -> Prefetch[Microbatch]:
        """This rank's part of one pass over all packs, or over the first `limit` packs, in order. Every rank gets equally many
        microbatches, so that none waits for another in a collective."""
        count = len(packs) if limit is None else min(limit, len(packs))

        def build(turn: int) -> Microbatch:
            first = (turn * self.world_size + self.rank) * self.microbatch
            return self.build(packs, range(min(first, count), min(first + self.microbatch, count)))

        turns = -(-count // (self.world_size * self.microbatch))
        return Prefetch(build, range(turns), self.pin_memory)


@dataclass(frozen=True)
class BatchStream(Batching):
    """The batches of one rank, by step number.

    `step(n)` is a pure function, so a run that resumes at step n gets the tensors that the uninterrupted one had. Where a step's
    packs do not fill the microbatches of all ranks, blank ones do: nothing in them is a label, so losses and gradients are those
    of the packs alone. A step has a pack for each rank at least, so every rank has one in its first microbatch.
    """

    packs: Packs
    order: Order

    def step(self, number: int) -> StepBatches:
        """The batches of step `number`, counted from 0."""
        indices = self.order.packs_of_step(number).tolist()
        packs = [self.packs[index] for index in indices]
        squares = [sum_of_squares(pack.lengths) for pack in packs]
        microbatches = -(-len(indices) // (self.world_size * self.microbatch))
        blanks = self.world_size * microbatches * self.microbatch - len(indices)
        # Blanks cost nothing, so they are dealt last, to the lightest microbatches; one of blanks alone ends its rank's.
        mine = spread([*squares, *[0] * blanks], self.world_size, microbatches)[self.rank]
        return StepBatches(
            microbatches=[
                self.build(self.packs, [indices[i] for i in places if i < len(indices)])
                for places in mine
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
        """Steps `start` to `stop` (exclusive), built ahead by a thread. Use it in a `with` block, or iterate to the end."""
        return Prefetch(self.step, range(start, stop), self.pin_memory, self.order.stop_waiting)


def read_pack(
    packs: Packs, index: int, vocab_size: int | None, positions: int | None = None
) -> Pack:
    """Pack `index`. InputError where it holds a token id that a model of `vocab_size` (None: not known) does not have, or where
    its first document goes on beyond so many `positions`."""
    pack = packs[index]
    if vocab_size is not None and (highest := int(pack.input_ids.max())) >= vocab_size:
        raise InputError(
            f"{packs.path}: pack {index} holds token id {highest}, and the model has {vocab_size} ids; take its own tokenizer"
        )
    if (
        positions
        and len(pack.lengths)
        and (end := pack.first_position + int(pack.lengths[0])) > positions
    ):
        raise InputError(
            f"{packs.path}: pack {index} goes on to position {end - 1:,}, the model knows {positions:,}; let positions restart"
        )
    return pack
