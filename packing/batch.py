"""Packs to the tensors of a step: every batch has the same shapes, whatever documents it holds.

A microbatch is several packs laid end to end in one row of T = microbatch * length tokens. `cu_seqlens`, the offsets of the
documents, says which tokens may see each other; `labels`, shifted and masked already, which token is to be guessed where. So the
model needs no attention mask, no padding logic and no shifting, and the loss is a sum over the labels that are not IGNORE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foundation.errors import InputError
from packing.order import PackOrder, spread
from packing.prefetch import Prefetch
from packing.store import Pack, Packs

IGNORE = -100  # the label that torch's and transformers' losses skip

# The offsets are padded to a multiple of this, just above the real count. Slots of empty documents are not free: padding to the
# worst case (1,024 slots where 165 documents lie) costs 10 % of an H200's training speed. A tight bucket costs nothing, since the
# compiled attention takes this one size as dynamic; the multiple only spares it from seeing a new number in every microbatch.
OFFSETS_MULTIPLE = 16


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward pass takes; T = packs * length. All tensors lie on the CPU, pinned if asked for."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each document, or from first_position in a pack's first
    labels: Tensor  # [1, T] int64, already shifted: labels[i] is input_ids[i + 1] or IGNORE
    cu_seqlens: Tensor  # [bucket] int32: 0, the end of each document, then T up to the bucket's size
    max_seqlen: int  # the pack length, which bounds every document: a constant, since one that varied would recompile
    documents: int  # real ones: a padding tail has offsets of its own in cu_seqlens but counts nowhere
    valid_tokens: int  # labels that are not IGNORE
    sum_squared_lengths: int  # of real documents, for the FLOPs of attention; what attention spends on padding is no useful work


@dataclass(frozen=True)
class StepBatches:
    """What one rank does in one step, and what all ranks do together.

    The totals are over all ranks and need no communication: every rank reads the lengths of all the step's packs, but the tokens
    of its own packs only.
    """

    microbatches: list[Microbatch]  # of this rank
    tokens: int  # over all ranks, padding included: packs * length
    valid_tokens: int  # over all ranks; the loss is divided by this, never by a microbatch's count
    sum_squared_lengths: int  # over all ranks
    packs: int  # over all ranks
    epoch: float  # epochs consumed once this step is done


def build_microbatch(packs: Sequence[Pack], *, mask_boundaries: bool, pin_memory: bool = False) -> Microbatch:
    """Lay packs of one length end to end.

    The last token of a pack has no label: what follows belongs to another pack. With `mask_boundaries` the last token of every
    document has none either, since what follows it is another document's beginning; without, the label runs across as it does in
    plain concatenated training. No label is ever taken from a pack's padding tail, which is a document of its own to attention.
    """
    length = len(packs[0].input_ids)
    total = len(packs) * length
    sizes, first_positions = _cover(packs, length)
    ends = np.cumsum(sizes)

    input_ids = np.concatenate([pack.input_ids for pack in packs], dtype=np.int64)
    position_ids = np.arange(total) - np.repeat(ends - sizes - first_positions, sizes)
    labels = np.empty(total, dtype=np.int64)
    labels[:-1] = input_ids[1:]
    labels[(ends if mask_boundaries else np.arange(length, total + 1, length)) - 1] = IGNORE
    for begin, pack in zip(range(0, total, length), packs, strict=True):
        real = int(pack.lengths.sum())
        if real < length:  # from the last real token on, which would have to guess padding
            labels[begin + max(real - 1, 0) : begin + length] = IGNORE

    offsets = np.full(-(-(len(ends) + 1) // OFFSETS_MULTIPLE) * OFFSETS_MULTIPLE, total, dtype=np.int32)
    offsets[0] = 0
    offsets[1 : len(ends) + 1] = ends
    return Microbatch(
        input_ids=_tensor(input_ids[None], pin_memory),
        position_ids=_tensor(position_ids[None], pin_memory),
        labels=_tensor(labels[None], pin_memory),
        cu_seqlens=_tensor(offsets, pin_memory),
        max_seqlen=length,
        documents=sum(len(pack.lengths) for pack in packs),
        valid_tokens=int(np.count_nonzero(labels != IGNORE)),
        sum_squared_lengths=sum(sum_of_squares(pack.lengths) for pack in packs),
    )


def _cover(packs: Sequence[Pack], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of all documents and padding tails, which cover the microbatch without a gap, and the position each begins at."""
    sizes: list[int] = []
    first_positions: list[int] = []
    for pack in packs:
        own = pack.lengths.tolist()
        if (tail := length - sum(own)) > 0:
            own.append(tail)
        sizes += own
        first_positions += [pack.first_position] + [0] * (len(own) - 1)
    return np.array(sizes), np.array(first_positions)


def _tensor(array: np.ndarray, pin_memory: bool) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin_memory else tensor


def sum_of_squares(lengths: np.ndarray) -> int:
    """Sum of squared document lengths; causal attention's cost is proportional to it."""
    lengths = lengths.astype(np.int64)
    return int(lengths @ lengths)


def count_valid_tokens(lengths: np.ndarray, *, mask_boundaries: bool) -> int:
    """Labels of a pack with these document lengths, without building it: each document, or else the pack, loses its last."""
    real = int(lengths.sum())
    return real - len(lengths) if mask_boundaries else max(real - 1, 0)


class BatchStream:
    """The batches of one rank, by step number.

    `step(n)` is a pure function, so a run that resumes at step n gets the tensors that the uninterrupted one had; `steps` is the
    same a little ahead of time. Another `world_size` deals the same packs of a step out differently.
    """

    def __init__(
        self,
        packs: Packs,
        order: PackOrder,
        *,
        microbatch: int,
        rank: int,
        world_size: int,
        mask_boundaries: bool,
        pin_memory: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """microbatch: packs in one forward pass. vocab_size: if given, a token id beyond it is an InputError instead of a crash
        on the device. InputError too where a step's packs do not divide over the ranks and microbatches."""
        if order.packs_count != len(packs):
            raise ValueError(f"the order is over {order.packs_count} packs, but {packs.path} holds {len(packs)}")
        _check_rank(rank, world_size)
        if microbatch < 1 or order.packs_per_step % (world_size * microbatch):
            raise InputError(
                f"`batch.microbatch`: a step of {order.packs_per_step} packs does not divide into microbatches of {microbatch} "
                f"packs on {world_size} processes; choose a `batch.tokens` or `batch.microbatch` for which it does"
            )
        self.packs = packs
        self.order = order
        self.microbatch = microbatch
        self.rank = rank
        self.world_size = world_size
        self.mask_boundaries = mask_boundaries
        self.pin_memory = pin_memory
        self.vocab_size = vocab_size

    def step(self, number: int) -> StepBatches:
        """The batches of step `number`, counted from 0."""
        indices = self.order.packs_of_step(number).tolist()
        lengths = [self.packs.lengths(index) for index in indices]
        squares = [sum_of_squares(each) for each in lengths]
        microbatches = len(indices) // (self.world_size * self.microbatch)
        mine = spread(squares, self.world_size, microbatches)[self.rank]
        return StepBatches(
            microbatches=[self._build([indices[place] for place in places]) for places in mine],
            tokens=len(indices) * self.packs.length,
            valid_tokens=sum(count_valid_tokens(each, mask_boundaries=self.mask_boundaries) for each in lengths),
            sum_squared_lengths=sum(squares),
            packs=len(indices),
            epoch=self.order.epoch_of(number + 1),
        )

    def steps(self, start: int, stop: int) -> Prefetch[StepBatches]:
        """Steps `start` to `stop` (exclusive), built by a thread at most 2 steps ahead; its `data_wait_ms` is the last wait.

        Use it in a `with` block, or iterate to the end, so that the thread ends too.
        """
        return Prefetch(self.step, range(start, stop), initializer=_thread_setup(self.pin_memory))

    def _build(self, indices: Sequence[int]) -> Microbatch:
        chosen = [read_pack(self.packs, index, self.vocab_size) for index in indices]
        return build_microbatch(chosen, mask_boundaries=self.mask_boundaries, pin_memory=self.pin_memory)


def evaluation_batches(
    packs: Packs,
    *,
    microbatch: int,
    rank: int,
    world_size: int,
    mask_boundaries: bool,
    pin_memory: bool = False,
    vocab_size: int | None = None,
    limit: int | None = None,
) -> Prefetch[Microbatch]:
    """This rank's part of one pass over all packs, or over the first `limit` packs, in order.

    Every rank gets equally many microbatches, so that none waits for another in a collective: what is missing at the end is made
    up with packs without documents, whose labels are all masked. Summed over the ranks, losses and valid tokens are those of the
    packs, each counted once, for any world size.
    """
    _check_rank(rank, world_size)
    if microbatch < 1:
        raise ValueError(f"a microbatch holds at least 1 pack, not {microbatch}")
    count = len(packs) if limit is None else min(limit, len(packs))
    blank = Pack(np.zeros(packs.length, dtype=np.uint32), np.zeros(0, dtype=np.int32))

    def build(turn: int) -> Microbatch:
        first = (turn * world_size + rank) * microbatch
        indices = range(first, first + microbatch)
        chosen = [read_pack(packs, index, vocab_size) if index < count else blank for index in indices]
        return build_microbatch(chosen, mask_boundaries=mask_boundaries, pin_memory=pin_memory)

    turns = -(-count // (world_size * microbatch))
    return Prefetch(build, range(turns), initializer=_thread_setup(pin_memory))


def read_pack(packs: Packs, index: int, vocab_size: int | None) -> Pack:
    """Pack `index`; InputError where it holds a token id that a model of `vocab_size` (None: not known) does not have."""
    pack = packs[index]
    if vocab_size is not None and (highest := int(pack.input_ids.max())) >= vocab_size:
        raise InputError(
            f"{packs.path}: pack {index} holds token id {highest}, but the model's vocabulary has {vocab_size} tokens; "
            "prepare the packs with the model's own tokenizer, or choose the model they were made for"
        )
    return pack


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} processes")


def _thread_setup(pin_memory: bool) -> partial[None] | None:
    """Pinning goes through the current device, which a new thread takes to be the first: each rank would hold memory there."""
    if not pin_memory:
        return None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
