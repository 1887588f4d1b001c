"""Make the parts of a stream ahead of the run that reads them: `python -m packing follow`.

What a part holds follows from the place in the source where it starts, never from who makes it,
when, or how often. So passed parts may be deleted. A run that goes back, or that continues on
another machine, has them made again from the place that its checkpoint names. Files are sought to
that place, archives are unpacked up to it, and a dataset of the hub starts with the file that has
it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.files import is_locked, locked
from foundation.progress import Progress, say
from packing.arrow import FIRST, MANIFEST
from packing.chunks import Counts, Place, Tokens, require_documents
from packing.pack import Arranged
from packing.pack_maker import PackMaker, usable_cores
from packing.settings import DataSettings
from packing.sources import CHUNK_BYTES
from packing.store import training_parts
from packing.stream import (
    RUN_LOCK,
    PartStart,
    StreamedPacks,
    bytes_below,
    check_disk,
    part_folder,
    read_part,
    read_position,
)

PACKER_LOCK = ".packer.lock"  # held by the process that makes parts
_LEAST_CHUNK = 2**12  # bytes
_LOOK = 0.2  # seconds between two looks for room on the disk


def follow(settings: DataSettings, parent: int | None = None) -> None:
    """Make parts until the run that reads the stream has ended.

    `parent` is the process of the run, if the run has started this one. Then another packer is
    waited for, and replaced when it ends. Without it, another packer is refused with InputError.
    """

    def meet_another(holder: str) -> None:
        if parent is None:
            raise InputError(f"{settings.packs}: {holder} makes the parts of this stream already")
        say(f"waiting for {holder}, which makes the parts of this stream")

    run = ReadingRun(settings.packs, parent)
    with locked(settings.packs / PACKER_LOCK, meet_another), ExitStack() as stack:
        parts = training_parts(settings)
        processes = usable_cores(2 * len(parts))  # The run needs the other half.
        makers = {
            name: stack.enter_context(PackMaker(part, processes)) for name, part in parts.items()
        }
        for has_made in pack_ahead(settings, makers):
            if run.has_ended():
                return
            if not has_made:
                time.sleep(_LOOK)


@dataclass
class ReadingRun:
    """The run that reads a stream, as its packer sees it."""

    packs: Path
    parent: int | None = None  # the process of the run, if the run has started the packer
    was_seen: bool = False

    def has_ended(self) -> bool:
        """Return whether the run has ended. A user's packer waits for a run that starts later."""
        if self.parent is not None:
            return os.getppid() != self.parent
        reads = is_locked(self.packs / RUN_LOCK)
        self.was_seen = self.was_seen or reads
        return self.was_seen and not reads


def pack_ahead(settings: DataSettings, makers: Mapping[str, PackMaker]) -> Iterator[bool]:
    """Make parts in the order of their use, as far ahead as the disk may hold.

    Yields True after each part, and False while the next one waits for room. `makers` has one of
    each source by name. Parts that the run has passed are deleted.

    Raises InputError if `data.streaming.disk_gb` is too little for the packs of a step.
    """
    limit = settings.streamed.disk_gb * 1e9
    parts = {name: maker.settings for name, maker in makers.items()}
    shares = dict(zip(makers, StreamedPacks(settings, parts).mixture.share_of_packs, strict=True))
    starts: dict[str, list[PartStart]] = {name: [] for name in makers}
    made: tuple[str, PartStart] | None = None  # the part that is laid out and not written
    while True:
        position = read_position(settings.packs, makers)
        for name, start in position["starts"].items():
            starts[name] = keep_parts(parts[name].packs, PartStart(**start), starts[name])
        name = min(starts, key=lambda name: starts[name][-1].first / shares[name])
        start = starts[name][-1]
        if made != (name, start):
            arranged, after = make_part(makers[name], start)
            made = (name, start)
            continue  # The run has moved on meanwhile.
        # With a margin for the files beside the packs.
        needed = bytes_below(settings.packs) + round(1.002 * arranged.bytes()) + 2**16
        if needed <= limit:
            manifest = write_part(makers[name], start, arranged, after)
            # The place as JSON gives it back, as the run's position does.
            starts[name].append(PartStart(**manifest["statistics"]["stream"]["after"]))
            yield True
        elif start.first >= position["ends"][name]:
            yield False
        else:
            raise InputError(
                f"data.streaming.disk_gb: {limit / 1e9:g} is too little: a step reads packs of "
                f"{needed / 1e9:.3g} GB; set it to {needed * 1.05e-9:.2g} or more, or a smaller "
                "data.streaming.window, which begins another stream"
            )


def keep_parts(folder: Path, start: PartStart, earlier: list[PartStart]) -> list[PartStart]:
    """Keep the parts that follow one another from `start` on, and the first; delete all others.

    Returns the starts of these parts and of the next one to make. `earlier` is the result
    of the last call, whose parts are not verified again. A damaged part is deleted.
    """
    if start in earlier[:1]:
        return earlier
    if start in earlier:
        starts = earlier[earlier.index(start) :]
    else:
        starts = [start]
        with suppress(InputError):
            while part := read_part(folder, starts[-1]):
                starts.append(part.after)
    kept = {FIRST, *(part_folder(folder, made.number).name for made in starts[:-1])}
    for path in folder.glob("*part-*"):  # also a folder that a killed packer has left half written
        if path.name not in kept:
            # The manifest goes first: a part without one does not exist.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
    return starts


# ── One part ──────────────────────────────────────────────────────────────────────────────────────


def make_part(maker: PackMaker, start: PartStart) -> tuple[Arranged, PartStart]:
    """Tokenise a part and lay it out. Also return the start of the next part.

    A source that has ended starts again with the next part. Documents that were held out of its
    beginning are held out again. Raises InputError if the source holds no text.
    """
    tokens = _tokenize_window(maker, start.place)
    # The part before may have the last document of the source.
    begins_again = not tokens.counts.documents and start.number > 0
    if begins_again:
        tokens = _tokenize_window(maker, {})
    require_documents(maker.settings, tokens.counts)
    arranged = maker.arrange(tokens, held_out=begins_again or start.number == 0)
    first = start.first + len(arranged.layouts["train"])
    return arranged, PartStart(start.number + 1, start.epoch + begins_again, tokens.after, first)


def _tokenize_window(maker: PackMaker, place: Place) -> Tokens:
    """Tokenise from `place` on until a part is full or the source ends."""
    window = maker.settings.streamed.window
    chunk_bytes = min(CHUNK_BYTES, max(_LEAST_CHUNK, window))
    ids = [np.zeros(0, np.uint32)]
    lengths = [np.zeros(0, np.int64)]
    counts = Counts()
    for result in maker.tokenize(maker.source.chunks(place, chunk_bytes)):
        ids.append(result.tokens)
        lengths.append(result.lengths)
        counts += result.counts
        place = result.after
        if counts.tokens >= window:
            break
    return Tokens(np.concatenate(ids), np.concatenate(lengths), counts, place)


def write_part(
    maker: PackMaker, start: PartStart, arranged: Arranged, after: PartStart
) -> dict[str, Any]:
    """Write the packs of a part and return their manifest."""
    folder = part_folder(maker.settings.packs, start.number)
    return maker.write(folder, arranged, {"start": asdict(start), "after": asdict(after)})


def make_first_part(part: DataSettings, settings: DataSettings, progress: bool) -> dict[str, Any]:
    """Make the first part of one source of the stream `settings`, and return its manifest."""
    check_disk(settings)
    with (
        PackMaker(part, usable_cores(2 * len(settings.shares))) as maker,
        Progress("packing the first part", shown=progress),
    ):
        say(f"{part.packs}: packing {maker.source.description} as the run goes on", progress)
        return write_part(maker, PartStart(), *make_part(maker, PartStart()))
