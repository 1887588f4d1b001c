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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from foundation.errors import InputError
from packing.records import ChatColumns, Counts, Ids, Rendered, TokenColumns, read_chunk
from packing.sources import Chunk, Records

START = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Tokens:
    """Documents as ids, in the order of their source: those of a chunk, or of all."""

    tokens: np.ndarray  # [sum of lengths] uint32
    lengths: np.ndarray  # [documents] int64, EOS included
    trained: np.ndarray | None  # [sum of lengths] bool, which tokens are to be learnt; None: all
    counts: Counts
    progress: float | None = None  # as of its chunk


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The documents of `parts`, one after another."""
    tokens = np.concatenate([np.zeros(0, np.uint32), *(part.tokens for part in parts)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
    masked = bool(parts) and parts[0].trained is not None
    trained = np.concatenate([part.trained for part in parts]) if masked else None
    return Tokens(tokens, lengths, trained, sum((part.counts for part in parts), Counts()))


class ChunkTokenizer:
    """Turns chunks into ids. tokenizer: path of a tokenizer.json. tail: ids to put after each text."""

    def __init__(self, tokenizer: Path, records: Records, skip_bad: bool, tail: list[int]) -> None:
        self._records, self._skip_bad, self._tail = records, skip_bad, tail
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        # It would add special tokens that nobody asks for, and take blanks out of offsets.
        self._tokenizer.post_processor = None

    def __call__(self, chunk: Chunk) -> Tokens:
        documents, left_out = read_chunk(chunk, self._records, self._skip_bad)
        kinds = {ChatColumns: self._of_chats, TokenColumns: self._of_tokens}
        ids, masks = kinds.get(type(self._records), self._of_texts)(documents)
        tokens = np.concatenate([np.zeros(0, np.uint32), *ids])
        trained = None if masks is None else np.concatenate([np.zeros(0, np.bool_), *masks])
        learnt = len(tokens) if trained is None else int(np.count_nonzero(trained))
        counts = left_out + Counts(len(ids), len(tokens), learnt, empty=len(documents) - len(ids))
        return Tokens(tokens, np.array([len(each) for each in ids], np.int64), trained, counts, chunk.progress)

    # Each returns the ids of documents [tokens] uint32 and which of them are to be learnt [tokens] bool, None for all. A document
    # without tokens of its own is left out: many tokenizers give none for blanks.

    def _of_tokens(self, documents: list[Ids]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        return [each.tokens for each in documents], [each.trained for each in documents] if self._records.labels else None

    def _of_texts(self, texts: list[str]) -> tuple[list[np.ndarray], None]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # computes no character offsets
        return [np.array(own + self._tail, np.uint32) for each in encodings if (own := each.ids)], None

    def _of_chats(self, chats: list[Rendered]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """A token is trained on where it has a character of an answer. A chat of which no token is has nothing to teach."""
        ids, masks = [], []
        encodings = self._tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        for chat, encoding in zip(chats, encodings, strict=True):
            begins, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            trained = np.logical_or.reduce([(begins < stop) & (stops > begin) for begin, stop in chat.answers])
            if trained.any():
                ids.append(np.array(encoding.ids, np.uint32))
                masks.append(trained)
        return ids, masks


class TokenizerWorkers:
    """`processes` workers, started when first needed and ended with the `with` block or with this process."""

    def __init__(self, processes: int, tokenizer: Path, records: Records, *, skip_bad: bool, tail: list[int]) -> None:
        self._processes, arguments = processes, (tokenizer, records, skip_bad, tail)
        self._pool = ProcessPoolExecutor(processes, mp_context=START, initializer=_begin, initargs=arguments)

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


_worker: ChunkTokenizer | None = None


def _begin(*arguments: Any) -> None:
    """Runs first in each worker; `arguments` as of `ChunkTokenizer`."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a worker would compete with the other workers
    _worker = ChunkTokenizer(*arguments)


def _tokenize(chunk: Chunk) -> Tokens:
    return _worker(chunk)
