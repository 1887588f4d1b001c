"""Tokenising in several processes: chunks go out in order, arrays of ids come back in the same order.

Forking would copy whatever the caller has loaded (torch, a CUDA context, threads), so the workers are spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from tokenizers import Tokenizer

from foundation.errors import InputError
from packing.records import Counts, read_chunk
from packing.settings import DataSettings
from packing.sources import Chunk, Encoded, Place, Records

START = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Tokens:
    """Documents as ids, in the order of their source: those of a chunk, or of all."""

    tokens: np.ndarray  # [sum of lengths] uint32
    lengths: np.ndarray  # [documents] int64, EOS included
    trained: np.ndarray | None  # [sum of lengths] bool, which tokens are to be learnt; None: all
    counts: Counts
    progress: float | None = None  # as of its chunk
    after: Place = field(default_factory=dict)  # as of its chunk


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The documents of `parts`, one after another."""
    columns = [
        None if any(column is None for column in some) else np.concatenate(some)
        for some in zip(*((part.tokens, part.lengths, part.trained) for part in parts), strict=True)
    ]
    return Tokens(*columns, sum((part.counts for part in parts), Counts()), after=parts[-1].after)


def tokenize(chunk: Chunk, tokenizer: Tokenizer, records: Records, settings: DataSettings) -> Tokens:
    """The documents of `chunk` as ids."""
    documents, left_out = read_chunk(chunk, records, settings.on_bad_line == "skip")
    encoded: list[Encoded] = list(records.encode(tokenizer, documents))
    lengths = np.array([len(ids) for ids, _ in encoded], np.int64)
    tokens = np.concatenate([np.zeros(0, np.uint32), *(ids for ids, _ in encoded)])
    trained = np.concatenate([np.zeros(0, np.bool_), *(mask for _, mask in encoded)]) if settings.masks else None
    learnt = len(tokens) if trained is None else int(np.count_nonzero(trained))
    counts = left_out + Counts(len(encoded), len(tokens), learnt, empty=len(documents) - len(encoded))
    return Tokens(tokens, lengths, trained, counts, chunk.progress, chunk.after)


class TokenizerWorkers:
    """`processes` workers, started when first needed and ended with the `with` block or with this process."""

    def __init__(self, processes: int, *how: Tokenizer | Records | DataSettings) -> None:
        """how: the last arguments of `tokenize`."""
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, mp_context=START, initializer=_begin, initargs=how)

    def __enter__(self) -> TokenizerWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(self, chunks: Iterable[Chunk]) -> Iterator[Tokens]:
        """Results in the order of `chunks`, up to 3 chunks a worker ahead. Raises the InputError of the first bad record."""
        waiting: deque[Future[Tokens]] = deque()
        try:
            for chunk in chunks:
                with _importing_nothing_of_the_caller():
                    waiting.append(self._pool.submit(_tokenize, chunk))
                if len(waiting) >= 3 * self._processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                "a tokenizer process has ended; if memory ran out, leave the run fewer cores (taskset). What is done is kept"
            ) from None


@contextmanager
def _importing_nothing_of_the_caller() -> Iterator[None]:
    """Processes that are started in the block import neither the caller's script again, as the launcher with torch, nor modules
    that lie in the current folder."""
    main, safe = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
    sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = main, safe  # empty means unset


_how: tuple[Tokenizer, Records, DataSettings] | None = None  # in a worker


def _begin(tokenizer: Tokenizer, records: Records, settings: DataSettings) -> None:
    """Runs first in each worker."""
    global _how
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a worker would compete with the other workers
    tokenizer.post_processor = None  # it would add special tokens that nobody asks for, and take blanks out of offsets
    _how = tokenizer, records, settings


def _tokenize(chunk: Chunk) -> Tokens:
    return tokenize(chunk, *_how)
