"""Build the tensors of a training step from packs.

A microbatch is several packs laid end to end in one row of T = microbatch * length tokens. So the
tensors of tokens have the same shape in every step. `cu_seqlens`, the offsets of the documents,
determines which tokens may attend to each other. `labels` are already shifted and masked.
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

# The length of `cu_seqlens` is rounded up to a multiple of this number, so that only few different
# lengths occur. Padding to the worst case (1,024 offsets for 165 documents) costs 10 % of the
# training speed on an H200, because attention also spends time on empty documents.
OFFSETS_MULTIPLE = 16
# Number of results that a thread builds in advance.
_AHEAD = 2


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward and backward pass; T = packs * length. Tensors are on the CPU."""

    # Token ids, [1, T] int64.
    input_ids: Tensor
    # [1, T] int64. Positions start at 0 in each document, and after a cut between packs.
    position_ids: Tensor
    # [1, T] int64, already shifted: labels[i] is input_ids[i + 1] or IGNORE.
    labels: Tensor
    # [n] int32: 0, the end of each document, and then T until n is a multiple of OFFSETS_MULTIPLE.
    # In a step, n is the same in the microbatches that the ranks compute together.
    cu_seqlens: Tensor
    # Length of a pack, the upper bound of a document's length. It is the same in every microbatch,
    # because torch.compile would recompile for another value.
    max_seqlen: int
    # Number of labels that are not IGNORE.
    valid_tokens: int


@dataclass(frozen=True)
class StepBatches:
    """One rank's microbatches of a step, and totals of the step over all ranks.

    Every rank has the same number of microbatches. The totals need no communication, because every
    rank reads the document lengths of all packs of the step. A rank reads only the tokens of its
    own packs.
    """

    # Microbatches of this rank.
    microbatches: list[Microbatch]
    # Number of tokens over all ranks, including padding: packs * length.
    tokens: int
    # Number of labels that are not IGNORE, over all ranks. The sum of the losses is divided by this
    # number.
    valid_tokens: int
    # Sum of squared document lengths over all ranks, from which the FLOPs of attention follow.
    # Padding is excluded, because attention over padding is not useful work.
    sum_squared_lengths: int
    # Metrics after this step (`Order.metrics`), such as `epoch`.
    metrics: dict[str, float] = field(default_factory=dict)
    # Places of the step's packs in the endless stream of packs (see `Order`), over all ranks.
    places: range = range(0)


def sizes_of(pack: Pack) -> np.ndarray:
    """Return the lengths of the documents of a pack, and then of its padding if it has any.

    For attention, the padding is a separate document, so that documents cover a microbatch without
    a gap.
    """
    padding = len(pack.input_ids) - int(pack.lengths.sum())
    return np.append(pack.lengths, padding) if padding else pack.lengths


def build_microbatch(
    packs: Sequence[Pack], *, mask_boundaries: bool, pin_memory: bool = False, documents: int = 0
) -> Microbatch:
    """Return the microbatch of packs of equal length, laid end to end.

    The last token of a pack has no label. With `mask_boundaries`, the last token of each document
    has no label either. Otherwise, the last token of a document predicts the first token of the
    next document. Padding and tokens without a loss (`Pack.trained`) are not used as labels.

    documents: least number of documents that `cu_seqlens` has space for, including paddings.
    """
    length = len(packs[0].input_ids)
    total = len(packs) * length
    sizes = np.concatenate([sizes_of(pack) for pack in packs], dtype=np.int64)
    ends = np.cumsum(sizes)

    input_ids = np.concatenate([pack.input_ids for pack in packs], dtype=np.int64)
    position_ids = np.arange(total) - np.repeat(ends - sizes, sizes)
    # The first token of a pack is not a label, so the last token of the pack before it has none.
    is_label = np.concatenate([find_labels(pack, mask_boundaries) for pack in packs])
    labels = np.append(np.where(is_label, input_ids, IGNORE)[1:], IGNORE)

    # Round the number of offsets up to a multiple, so that few different lengths occur. The offsets
    # after the last document are all equal to `total`, so they belong to empty documents.
    count = max(len(ends), documents) + 1
    padding = -count % OFFSETS_MULTIPLE
    offsets = np.full(count + padding, total, dtype=np.int32)
    offsets[: len(ends) + 1] = np.append(0, ends)
    arrays = (input_ids[None], position_ids[None], labels[None], offsets)
    tensors = [torch.from_numpy(array) for array in arrays]
    if pin_memory:
        tensors = [tensor.pin_memory() for tensor in tensors]
    ids, positions, targets, cu_seqlens = tensors
    valid_tokens = int(np.count_nonzero(is_label))
    return Microbatch(ids, positions, targets, cu_seqlens, length, valid_tokens)


def blank_pack(length: int) -> Pack:
    """Return a pack without documents."""
    return Pack(np.zeros(length, np.uint32), np.zeros(0, np.int32))


def sum_of_squares(lengths: np.ndarray) -> int:
    """Return the sum of squared document lengths.

    The cost of causal attention is proportional to this sum.
    """
    lengths = lengths.astype(np.int64)
    return int(lengths @ lengths)


def find_labels(pack: Pack, mask_boundaries: bool) -> np.ndarray:
    """Return the tokens of a pack that are labels, [length] bool.

    Every token with a loss (`Pack.trained`) is a label, except padding and the first token of the
    pack. With `mask_boundaries`, the first token of each document is not a label either.
    """
    is_label = np.arange(len(pack.input_ids)) < pack.lengths.sum()
    if pack.trained is not None:
        is_label &= pack.trained
    if mask_boundaries:
        is_label[np.cumsum(pack.lengths[:-1])] = False
    is_label[0] = False
    return is_label


def count_valid_tokens(pack: Pack, mask_boundaries: bool) -> int:
    """Return the number of labels of one pack that are not IGNORE."""
    return int(np.count_nonzero(find_labels(pack, mask_boundaries)))


class Prefetch(AbstractContextManager, Iterator[T]):
    """Iterator over the results of `build(n)` for each n in `numbers`, in order.

    A thread builds the next two results in advance, while the caller computes. If `build` raises an
    exception, the call of `next` for this result raises the same exception. The end of the caller's
    `with` statement drops unused results and waits until the thread has ended.

    `next` starts to build another result. The thread and the caller share Python's interpreter
    lock, so this delays the caller by milliseconds. A caller that has to launch the kernels of a
    step calls `take`, launches them, and then calls `build_ahead`.
    """

    def __init__(
        self,
        build: Callable[[int], T],
        numbers: Iterable[int],
        pin_memory: bool,
        stop_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Set `pin_memory` if `build` pins memory. The end of the `with` statement calls
        `stop_waiting` to end a `build` that waits for packs.
        """
        # Time that calls of `wait_until_ready` have waited. The caller resets it to 0.
        self.data_wait_ms = 0.0
        self._build = build
        self._numbers = iter(numbers)
        self._stop_waiting = stop_waiting
        # Memory is pinned for the current device of the thread. By default, this is the first
        # device on every rank. So the thread must select the device of its rank.
        setup = None
        if pin_memory:
            device = torch.accelerator.current_device_index()
            setup = partial(torch.accelerator.set_device_index, device)
        self._thread = ThreadPoolExecutor(1, "prefetch", setup)
        self._pending: deque[Future[T]] = deque()
        self.build_ahead()

    def build_ahead(self) -> None:
        """Let the thread build results until it is two results ahead of the caller."""
        missing = _AHEAD - len(self._pending)
        self._pending.extend(
            self._thread.submit(self._build, number) for number in islice(self._numbers, missing)
        )

    def wait_until_ready(self, seconds: float | None = None) -> bool:
        """Wait for the next result, and return True if `next` would now return or raise at once.

        Wait at most `seconds`, or without a limit if `seconds` is None.
        """
        started = time.perf_counter()
        unfinished = wait(islice(self._pending, 1), seconds).not_done
        self.data_wait_ms += (time.perf_counter() - started) * 1e3
        return not unfinished

    @property
    def failure(self) -> BaseException | None:
        """The exception that `next` would raise without waiting, or None."""
        if self._pending and self._pending[0].done():
            return self._pending[0].exception()
        return None

    def take(self) -> T:
        """Return the next result, as `next` does, but do not start to build another result."""
        if not self._pending:
            raise StopIteration
        self.wait_until_ready()
        return self._pending.popleft().result()

    def __next__(self) -> T:
        result = self.take()
        self.build_ahead()
        return result

    def __exit__(self, *exception: object) -> None:
        self._pending.clear()
        self._stop_waiting()
        self._thread.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Rule that turns packs into the microbatches of one rank."""

    # Number of packs in one forward pass.
    microbatch: int
    rank: int
    world_size: int
    mask_boundaries: bool
    pin_memory: bool = False
    # Number of the model's token ids. A pack with an id that is not below this number raises
    # InputError, because the id would crash the device. None disables the check.
    vocab_size: int | None = None

    def build(self, packs: Packs, indices: Sequence[int], documents: int = 0) -> Microbatch:
        """Return the microbatch of the packs at `indices`.

        If there are fewer than `microbatch` packs, blank packs without documents are added.
        `documents` is described at `build_microbatch`.
        """
        chosen = [read_pack(packs, index, self.vocab_size) for index in indices]
        chosen += [blank_pack(packs.length)] * (self.microbatch - len(chosen))
        return build_microbatch(
            chosen,
            mask_boundaries=self.mask_boundaries,
            pin_memory=self.pin_memory,
            documents=documents,
        )

    def evaluation(self, packs: Packs, count: int) -> Prefetch[Microbatch]:
        """Return an iterator over this rank's microbatches of the first `count` packs.

        Every rank gets the same number of microbatches. Otherwise, a rank with more microbatches
        than the other ranks would wait for them forever in a collective operation.
        """

        def build(number: int) -> Microbatch:
            first = (number * self.world_size + self.rank) * self.microbatch
            return self.build(packs, range(count)[first : first + self.microbatch])

        microbatches = -(-count // (self.world_size * self.microbatch))
        return Prefetch(build, range(microbatches), self.pin_memory)


@dataclass(frozen=True)
class BatchStream(Batching):
    """The batches of one rank. A step is found by the place of its first pack.

    `step(place)` is a pure function, so a run that resumes at a place gets the same tensors as an
    uninterrupted run. If the packs of a step do not fill the microbatches of all ranks, blank packs
    are added. Blank packs have no labels, so they change neither losses nor gradients. A step has
    at least one pack for each rank, so the first microbatch of every rank has a pack
    that is not blank.
    """

    packs: Packs
    order: Order
    packs_per_step: int

    def step(self, place: int) -> StepBatches:
        """Return the batches of the step whose first pack is at `place`."""
        places = range(place, place + self.packs_per_step)
        indices = self.order.packs_at(places).tolist()
        packs = [self.packs[index] for index in indices]
        microbatches = -(-len(packs) // (self.world_size * self.microbatch))
        blanks = self.world_size * microbatches * self.microbatch - len(packs)
        packs += [blank_pack(self.packs.length)] * blanks
        # Blank packs have no cost. So `spread` assigns them last, and to the cheapest microbatches.
        # A microbatch that has only blank packs is the last microbatch of its rank.
        squares = [sum_of_squares(pack.lengths) for pack in packs]
        assigned = spread(squares, self.world_size, microbatches)
        documents = [len(sizes_of(pack)) for pack in packs]
        built = []
        for number, members in enumerate(assigned[self.rank]):
            # The ranks can only replay the same CUDA graph if `cu_seqlens` has the same length in
            # the microbatches that they compute together.
            most = max(sum(documents[i] for i in rank[number]) for rank in assigned)
            # The blank packs are the last ones of `packs`. `build` adds them again.
            own_indices = [indices[i] for i in members if i < len(indices)]
            built.append(self.build(self.packs, own_indices, most))
        valid_tokens = sum(count_valid_tokens(pack, self.mask_boundaries) for pack in packs)
        return StepBatches(
            microbatches=built,
            tokens=len(indices) * self.packs.length,
            valid_tokens=valid_tokens,
            sum_squared_lengths=sum(squares),
            metrics=self.order.metrics(places.stop),
            places=places,
        )

    def steps(self, place: int, count: int) -> Prefetch[StepBatches]:
        """Return an iterator over the batches of `count` steps. The first pack is at `place`.

        A thread builds the batches in advance. Use the iterator in a `with` statement, so that the
        thread ends.
        """
        places = range(place, place + count * self.packs_per_step, self.packs_per_step)
        return Prefetch(self.step, places, self.pin_memory, self.order.stop_waiting)


def read_pack(packs: Packs, index: int, vocab_size: int | None) -> Pack:
    """Return the pack with this index.

    Raises InputError if a token id is not below `vocab_size`. If `vocab_size` is None, the check is
    skipped.
    """
    pack = packs[index]
    if vocab_size is not None:
        highest = int(pack.input_ids.max())
        if highest >= vocab_size:
            remedy = (
                f"either set that to at least {highest + 1} for a model from scratch, or prepare "
                "the packs with the model's own tokenizer (`data.tokenizer`)"
            )
            if packs.path.is_file():
                remedy = f"set `data.token_dtype` to the dtype of the file, or {remedy}"
            raise InputError(
                f"{packs.path}: pack {index} contains the token id {highest}, but the model has "
                f"only {vocab_size} ids (`model.config.vocab_size`); {remedy}"
            )
    return pack
