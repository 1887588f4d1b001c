"""Make the parts of a stream ahead of the run that reads them: `python -m packing.follow`.

A part is a folder of packs, made from consecutive documents of a source. Its content depends only
on the settings, the source, and the offset in the source where the part starts. It does not depend
on the time, the number of repetitions, or the process. So parts that the run has read may be
deleted. If the run returns to an earlier step, or continues on another machine, these parts are
made again. The checkpoint of the run stores the offset where they begin. A file is opened at
this offset, a compressed file is decompressed up to this offset, and a dataset of the Hugging Face
hub is read from the file that contains this offset.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from foundation.command import run_command
from foundation.errors import InputError
from foundation.files import locked, remove_tree
from foundation.progress import say
from packing.arrow import FIRST, MANIFEST
from packing.chunks import require_documents
from packing.pack import Arranged
from packing.pack_maker import PackMaker, usable_cores
from packing.settings import DataSettings
from packing.store import training_sources
from packing.stream import (
    PartStart,
    StreamedPacks,
    bytes_below,
    part_folder,
    read_part,
    read_position,
)
from packing.token_log import PartTokens

# Lock of the process that makes parts.
PACKER_LOCK = ".packer.lock"
# Pattern of the names of parts.
_PART = "part-" + "[0-9]" * 8
# Seconds between two checks whether another part fits on the disk.
_POLL_SECONDS = 0.2


def follow(settings: DataSettings, parent: int) -> None:
    """Make parts until the run that reads the stream has ended.

    `parent` is the id of the run's process, which has started this packer. If the packer of an
    earlier run still makes parts of the stream, wait until it ends.
    """

    def wait(holder: str) -> None:
        say(f"waiting for {holder}, which makes the parts of this stream")

    with locked(settings.packs / PACKER_LOCK, wait), ExitStack() as stack:
        sources = training_sources(settings)
        # The run needs the other half of the cores.
        processes = usable_cores(2 * len(sources))
        makers = {
            name: stack.enter_context(PackMaker(source, processes))
            for name, source in sources.items()
        }
        for has_written in pack_ahead(settings, makers):
            # The system gives another parent to this process when the run has ended.
            if os.getppid() != parent:
                return
            if not has_written:
                time.sleep(_POLL_SECONDS)


def pack_ahead(settings: DataSettings, makers: Mapping[str, PackMaker]) -> Iterator[bool]:
    """Make parts in the run's reading order until `disk_gb` is full.

    `makers` maps the name of each source to its PackMaker. Yields True after a part was written.
    Yields False while the next part does not fit on the disk. Parts that the run has read are
    deleted.

    Raises InputError if `data.streaming.disk_gb` is too small for the packs of one step.
    """
    disk_gb = settings.streamed.disk_gb
    sources = {name: maker.settings for name, maker in makers.items()}
    mixture = StreamedPacks(settings, sources).mixture
    shares = dict(zip(makers, mixture.shares_of_packs(), strict=True))
    # For each source, the starts of the parts on the disk, and then of the next part to make.
    starts: dict[str, list[PartStart]] = {name: [] for name in makers}
    # Source and start of the part in `arranged`. The part is written when it fits on the disk.
    laid_out: tuple[str, PartStart] | None = None
    while True:
        position = read_position(settings.packs, makers)
        for name, start in position["starts"].items():
            starts[name] = keep_parts(sources[name].packs, PartStart(**start), starts[name])
        # The run needs the next part of this source first.
        name = min(starts, key=lambda source: starts[source][-1].first / shares[source])
        start = starts[name][-1]
        if laid_out != (name, start):
            arranged, epoch = make_part(makers[name], start)
            laid_out = (name, start)
            # Read the position again, because the run has continued meanwhile.
            continue
        # The margin of 0.2 % and 64 KiB is for the other files of a part, such as its manifest.
        needed = (bytes_below(settings.packs) + 1.002 * arranged.bytes() + 2**16) / 1e9
        if needed <= disk_gb:
            manifest = makers[name].write(start, arranged, epoch)
            # Take the start of the next part from the manifest, whose values were converted to JSON
            # and back. The starts in the run's position are read from JSON too, so that equal
            # starts compare equal.
            starts[name].append(PartStart(**manifest["statistics"]["stream"]["after"]))
            yield True
        elif start.first >= position["ends"][name]:
            # The current step needs no pack of this part. Wait until the run has read other parts,
            # which are then deleted.
            yield False
        else:
            raise InputError(
                f"data.streaming.disk_gb: {disk_gb:g} is too small: the packs of one step need "
                f"{needed:.3g} GB; either set data.streaming.disk_gb to "
                f"{needed * 1.05:.2g} or more, or start a new run with a smaller "
                "data.streaming.window (this run cannot continue with another window, because the "
                "window determines the packs)"
            )


def keep_parts(folder: Path, start: PartStart, earlier: list[PartStart]) -> list[PartStart]:
    """Delete the parts of a source that the run does not need, and damaged parts.

    The first part, the part that begins at `start`, and the complete parts that follow it without a
    gap are kept. Returns the starts of the kept parts from `start` on, and then the start of the
    next part to make. `earlier` is the result of the previous call. The parts in `earlier` are not
    verified again. All parts after a damaged part are deleted too.
    """
    if start in earlier:
        starts = earlier[earlier.index(start) :]
    else:
        starts = [start]
        with suppress(InputError):
            while part := read_part(folder, starts[-1]):
                starts.append(part.after)
    kept = {FIRST, *(part_folder(folder, kept_start.number).name for kept_start in starts[:-1])}
    # The second pattern finds the incomplete folders of packers that were killed.
    for path in (*folder.glob(_PART), *folder.glob(f".{_PART}.{'[0-9a-f]' * 8}.writing")):
        if path.name not in kept:
            # Delete the manifest first, because a part without a manifest is treated as absent.
            if not path.is_symlink():
                (path / MANIFEST).unlink(missing_ok=True)
            with suppress(OSError):
                remove_tree(path)
    return starts


# ── One part ──────────────────────────────────────────────────────────────────────────────────────


def make_part(maker: PackMaker, start: PartStart) -> tuple[Arranged, int]:
    """Tokenise a part after the first one. Return its documents, laid out in packs, and its epoch.

    If the source has ended, the part starts at the beginning of the source again. In this case, the
    documents that the first part has held out are held out again. Raises InputError if the source
    has no text.
    """
    tokens = PartTokens(start.place)
    maker.tokenize(tokens)
    # If the previous part ended with the last document of the source, `tokens` has no documents.
    begins_again = not tokens.counts.documents
    if begins_again:
        tokens = PartTokens({})
        maker.tokenize(tokens)
    require_documents(maker.settings, tokens.counts)
    arranged = maker.arrange(tokens.tokens(), held_out=begins_again)
    return arranged, start.epoch + begins_again


if __name__ == "__main__":
    section, process = sys.argv[1:]
    data = DataSettings(**json.loads(section))
    sys.exit(run_command(lambda: follow(data, int(process))))
