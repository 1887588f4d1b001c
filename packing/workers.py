"""Tokenising in several processes: chunks go out in order, arrays of ids come back in the same order.

Forking would copy whatever the caller has loaded (torch, a CUDA context, threads), so the workers are spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from foundation.errors import InputError
from packing.chat import Rendered
from packing.chunks import Chunk, Records, Texts, read_chunk
from packing.records import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Tokenized:
    """The documents of one chunk as ids."""

    tokens: np.ndarray  # [sum of lengths] uint32
    lengths: np.ndarray  # [documents] int64, BOS and EOS included
    trained: np.ndarray | None  # [sum of lengths] bool, which tokens are to be learnt; None: all
    skipped: int
    first_skipped: str | None
    empty: int
    progress: float | None


class TokenizerWorkers:
    """`processes` workers, started when first needed and stopped on leaving the `with` block.

    tokenizer: path of a tokenizer.json. head, tail: ids to put before and after each text; chats and tokens have their own.
    """

    def __init__(
        self, processes: int, tokenizer: Path, records: Records, *, skip_bad: bool, head: list[int], tail: list[int]
    ) -> None:
        self._processes, self._arguments = processes, (str(tokenizer), records, skip_bad, head, tail)
        self._workers: list[BaseProcess] = []
        self._idle: queue.SimpleQueue[tuple[BaseProcess, Connection]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="tokenize")

    def __enter__(self) -> TokenizerWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()  # also frees the thread that waits on its pipe
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.join()

    def map(self, chunks: Iterable[Chunk]) -> Iterator[Tokenized]:
        """Results in the order of `chunks`, up to 3 chunks a worker ahead. Raises the InputError of the first bad record."""
        waiting: deque[Future[Tokenized]] = deque()
        for chunk in chunks:
            if len(self._workers) < self._processes:
                self._start()
            waiting.append(self._threads.submit(self._ask, chunk))
            if len(waiting) >= 3 * self._processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _ask(self, chunk: Chunk) -> Tokenized:
        worker, pipe = self._idle.get()
        try:
            pipe.send(chunk)
            reply = pipe.recv()
        except (EOFError, ConnectionError):
            worker.join()
            cause = f"signal {-worker.exitcode}" if worker.exitcode < 0 else f"status {worker.exitcode}"
            raise InputError(
                f"a tokenizer process ended with {cause} while working on "
                f"{chunk.origin} from {chunk.first} on; if memory ran out, set data.processes lower. What is done is kept"
            ) from None
        finally:
            self._idle.put((worker, pipe))
        if isinstance(reply, InputError):
            raise reply
        return reply

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        worker = START.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        main = sys.modules["__main__"]
        with _ctrl_c_waits():  # reaches the whole group: a worker keeps it blocked for good, and the parent ends its workers
            sys.modules["__main__"] = ModuleType("__main__")  # or each worker would import the caller's script again
            try:
                worker.start()
            finally:
                sys.modules["__main__"] = main
            self._workers.append(worker)
        theirs.close()
        self._idle.put((worker, ours))


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """SIGINT comes to this thread after the block. A process that is started in the block begins with it blocked: one that
    ignored it by itself could do so only after its imports, and an interrupt in them would print a traceback."""
    resource_tracker.ensure_running()  # else the first start does this, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, file: str, records: Records, skip_bad: bool, head: list[int], tail: list[int]) -> None:
    """Runs in a worker: answers until the parent closes the pipe or dies."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a worker would compete with the other workers
    tokenizer = plain_tokenizer(file)
    with suppress(EOFError, ConnectionError):
        while True:
            chunk = pipe.recv()
            try:
                pipe.send(tokenize(chunk, read_chunk(chunk, records, skip_bad), tokenizer, head, tail))
            except InputError as error:
                pipe.send(error)


def plain_tokenizer(file: str) -> Tokenizer:
    """A tokenizer without its post-processor: that adds special tokens nobody asks for, and takes blanks out of offsets."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = None
    return tokenizer


def tokenize(chunk: Chunk, texts: Texts, tokenizer: Tokenizer, head: list[int], tail: list[int]) -> Tokenized:
    """A document without tokens of its own is left out: many tokenizers give none for blanks. InputError for one that the
    tokenizer cannot encode."""
    documents, empty = texts.documents, texts.empty
    first = documents[0] if documents else None
    if isinstance(first, Ids):
        columns = zip(*((each.tokens, each.lengths, each.trained) for each in documents), strict=True)
        ids, lengths, trained = (None if column[0] is None else np.concatenate(column) for column in columns)
    else:
        chats = isinstance(first, Rendered)
        try:
            ids, ends, trained = _of_chats(documents, tokenizer) if chats else _of_texts(documents, tokenizer, head, tail)
        except Exception as error:
            if type(error) is not Exception:  # the library knows no narrower class for what its vocabulary lacks
                raise
            raise InputError(
                f"{chunk.origin}: from record {chunk.first} on is a text that the tokenizer cannot encode: {error}; name one "
                "(data.tokenizer) with a token for what it does not know, or one of bytes"
            ) from None
        ids, lengths = np.array(ids, np.uint32), np.diff(ends).astype(np.int64)
        empty += len(documents) - len(lengths)
    return Tokenized(ids, lengths, trained, texts.skipped, texts.first_skipped, empty, chunk.progress)


def _of_texts(texts: list[str], tokenizer: Tokenizer, head: list[int], tail: list[int]) -> tuple[list[int], list[int], None]:
    ids: list[int] = []  # one list for all: an array for each short document would take more memory than its tokens
    ends = [0]
    # encode_batch_fast computes no character offsets.
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        if own := encoding.ids:
            ids += head
            ids += own
            ids += tail
            ends.append(len(ids))
    return ids, ends, None


def _of_chats(chats: list[Rendered], tokenizer: Tokenizer) -> tuple[list[int], list[int], np.ndarray | None]:
    """A token is trained on where it has a character of an answer. A chat of which no token is has nothing to teach: left out."""
    masked = chats[0].answers is not None
    ids: list[int] = []
    ends, masks = [0], []
    for chat, encoding in zip(
        chats, tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False), strict=True
    ):
        begins, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        answers = [(begins < stop) & (stops > begin) for begin, stop in chat.answers or ()]
        trained = np.logical_or.reduce(answers) if masked else np.ones(len(begins), bool)
        if trained.any():
            ids += encoding.ids
            ends.append(len(ids))
            masks.append(trained)
    return ids, ends, np.concatenate([np.zeros(0, bool), *masks]) if masked else None
