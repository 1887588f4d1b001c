"""Which processes see the same run folder: one shared disk, or machines with disks of their own. Found out, never assumed.

A process writes a token into the run folder, and the others try to read it. Those that see the token of rank 0 share its disk. Of
a machine that does not, the first process makes a run folder there and writes a token of its own, which the machine's other
processes must see. So a path that only some machines have mounted is known before the run starts, and not at its first save.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed

from foundation.errors import InputError
from foundation.files import PARTIAL, PROOF
from foundation.reading import read_regular, reason_of
from pretrain.model.distributed import from_all_ranks, in_a_group

SECONDS = 2.0  # that a token may take to appear: network disks keep for a moment what a folder held


@dataclass(frozen=True)
class Disks:
    """Where each rank's run folder lies. All ranks hold the same, but for `rank`."""

    rank: int
    leaders: tuple[int, ...]  # by rank: the lowest rank that sees the same folder, which completes what lies there
    places: tuple[str, ...]  # by rank: host and absolute path of its run folder

    @classmethod
    def shared(cls, rank: int, world_size: int) -> Disks:
        """One disk that all ranks see."""
        return cls(rank, (0,) * world_size, ("",) * world_size)

    @property
    def are_one(self) -> bool:
        return len(set(self.leaders)) == 1

    @property
    def leader(self) -> int:
        return self.leaders[self.rank]

    @property
    def leads(self) -> bool:
        return self.leader == self.rank

    @property
    def members(self) -> list[int]:
        """The ranks that see this rank's folder, this one among them."""
        return self.ranks_of(self.leader)

    def ranks_of(self, leader: int) -> list[int]:
        return [rank for rank, its_leader in enumerate(self.leaders) if its_leader == leader]

    def describe(self) -> str:
        """Tells the user where the disks are, if there are several."""
        there = [f"{name_ranks(self.ranks_of(leader))}: {self.places[leader]}" for leader in sorted(set(self.leaders))]
        return (
            "machines share no disk for the run folder, so each keeps what its ranks need of a checkpoint; a resume on other "
            f"machines, and an export, need the files of all in one place ({'; '.join(there)})"
        )


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 8 to 15`, `ranks 1, 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2
    return f"ranks {ranks[0]} to {ranks[-1]}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"


def find_disks(folder: Path, claim: Callable[[], object]) -> Disks:
    """Prove that this process sees the run folder at `folder`, which exists where rank 0 runs. Collective.

    `claim` makes the folder and locks it; the first process of a machine that does not see rank 0's calls it. InputError on all
    ranks, naming the rank, its host and the path, where one sees neither rank 0's folder nor its own machine's.
    """
    if not in_a_group():
        return Disks.shared(0, 1)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    host, here = socket.gethostname(), f"{socket.gethostname()}:{folder.absolute()}"
    token = folder / f".{PROOF}.{rank}{PARTIAL}"
    tokens: dict[int, str] = {}
    written = False
    try:
        leaders: list[int | None] = [None] * world_size
        for is_first in (rank == 0, os.environ.get("LOCAL_RANK", "0") == "0"):
            mine, failure = None, None
            if is_first and leaders[rank] is None:
                try:
                    claim()
                    mine = uuid.uuid4().hex
                    token.write_text(mine)
                    written = True
                except (OSError, InputError) as error:
                    failure = (
                        f"{name_ranks([rank])} on {host} sees no run folder there and cannot make one: {_reason(error, folder)}"
                    )
            said = from_all_ranks((mine, failure))
            tokens |= {other: text for other, (text, _) in enumerate(said) if text is not None}
            leaders[rank] = leaders[rank] if leaders[rank] is not None else _seen(folder, tokens)
            leaders = from_all_ranks(leaders[rank])
            if None not in leaders:
                break
        places = from_all_ranks(here)
        if None in leaders:
            blind = leaders.index(None)
            machine, _, path = places[blind].partition(":")
            problem = said[blind][1] or f"{name_ranks([blind])} on {machine} sees no run folder there"
            raise InputError(
                f"{path}: {problem}; rank 0 on {places[0].partition(':')[0]} has made it. Mount that disk on {machine}, or set a "
                "`run_dir` that all processes of a machine can write"
            )
        torch.distributed.barrier()  # nobody looks for a token any more
    finally:
        if written:
            token.unlink(missing_ok=True)
    return Disks(rank, tuple(leaders), tuple(places))


def look_at_disks(folder: Path) -> Disks:
    """Finds what `find_disks` does without writing: folders of one inode that changed at one moment are the same. Collective."""
    if not in_a_group():
        return Disks.shared(0, 1)
    mark = (folder.stat().st_ino, folder.stat().st_mtime_ns) if folder.exists() else None
    seen = from_all_ranks((mark, f"{socket.gethostname()}:{folder.absolute()}"))
    marks = [mark for mark, _ in seen]
    return Disks(torch.distributed.get_rank(), tuple(map(marks.index, marks)), tuple(place for _, place in seen))


def _reason(error: OSError | InputError, folder: Path) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error).removeprefix(f"{folder}: ")


def _seen(folder: Path, tokens: dict[int, str]) -> int | None:
    """The first of the ranks whose token lies in `folder`; None where none does within SECONDS."""
    end = time.monotonic() + SECONDS
    while True:
        for rank, text in sorted(tokens.items()):
            try:
                os.listdir(folder.parent)  # a network disk then asks its server, and does not answer from memory
                os.listdir(folder)
                if read_regular(folder / f".{PROOF}.{rank}{PARTIAL}") == text.encode():
                    return rank
            except OSError:
                continue
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
