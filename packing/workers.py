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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from foundation.errors import InputError
from packing.chunks import Chunk, Texts, TextTemplate, read_chunk

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Tokenized:
    """One chunk's documents as ids."""

    tokens: np.ndarray  # [sum of lengths] uint32
    lengths: np.ndarray  # [documents] int64, BOS and EOS included
    skipped: int
    first_skipped: str | None
    empty: int
    progress: float | None


class TokenizerWorkers:
    """`processes` workers, started when first needed and stopped on leaving the `with` block.

    tokenizer: path of a tokenizer.json. head, tail: ids to put before and after each document.
    """

    def __init__(
        self, processes: int, tokenizer: Path, template: TextTemplate, *, skip_bad: bool, head: list[int], tail: list[int]
    ) -> None:
        self._processes, self._arguments = processes, (str(tokenizer), template, skip_bad, head, tail)
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
        worker = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # or each worker would import the caller's script again
        try:
            worker.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()
        self._workers.append(worker)
        self._idle.put((worker, ours))


def _serve(pipe: Connection, file: str, template: TextTemplate, skip_bad: bool, head: list[int], tail: list[int]) -> None:
    """What a worker does: it answers until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a worker would compete with the other workers
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    with suppress(EOFError, ConnectionError):
        while True:
            chunk = pipe.recv()
            try:
                pipe.send(_tokenize(chunk, read_chunk(chunk, template, skip_bad), tokenizer, head, tail))
            except InputError as error:
                pipe.send(error)


def _tokenize(chunk: Chunk, texts: Texts, tokenizer: Tokenizer, head: list[int], tail: list[int]) -> Tokenized:
    """A document without tokens of its own is left out: many tokenizers give none for blanks."""
    ids: list[int] = []  # one list for all: an array for each short document would take more memory than its tokens
    ends = [0]
    # encode_batch_fast computes no character offsets.
    for encoding in tokenizer.encode_batch_fast(texts.documents, add_special_tokens=False):
        if own := encoding.ids:
            ids += head
            ids += own
            ids += tail
            ends.append(len(ids))
    lengths = np.diff(ends).astype(np.int64)
    empty = texts.empty + len(texts.documents) - len(lengths)
    return Tokenized(np.array(ids, np.uint32), lengths, texts.skipped, texts.first_skipped, empty, chunk.progress)
