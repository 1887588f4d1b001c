"""Tokenising in several processes: chunks go out in order, arrays of ids come back in the same order.

The workers are interpreters on two pipes, `python -m packing.workers`. Forking would copy whatever the caller has loaded (torch,
a CUDA context, threads), and multiprocessing's `spawn` would import the caller's script again in each worker. A frame on a pipe
is two sizes, a JSON header and raw bytes: nothing is pickled. One thread a worker waits on its pipes.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from foundation.errors import InputError
from packing.chunks import Chunk, TextTemplate, read_chunk

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SIZES = struct.Struct("<QQ")  # bytes of the header, bytes of the payload


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker gets on its command line."""

    tokenizer: str  # path of a tokenizer.json
    text: str  # column or template
    skip_bad: bool
    bos: int | None  # id to put before each document
    eos: int | None  # and after


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
    """`processes` workers, started when first needed and stopped on leaving the `with` block."""

    def __init__(self, settings: WorkerSettings, processes: int) -> None:
        self._settings, self._processes = settings, processes
        self._workers: list[subprocess.Popen[bytes]] = []
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="tokenize")

    def __enter__(self) -> TokenizerWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()  # also frees the thread that waits on its pipe
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.communicate()

    def map(self, chunks: Iterable[Chunk]) -> Iterator[Tokenized]:
        """Results in the order of `chunks`, up to 3 chunks a worker ahead. Raises the InputError of the first bad record."""
        waiting: deque[Future[Tokenized]] = deque()
        for chunk in chunks:
            waiting.append(self._threads.submit(self._ask, chunk))
            if len(waiting) >= 3 * self._processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _ask(self, chunk: Chunk) -> Tokenized:
        if not hasattr(self._own, "worker"):
            self._own.worker = self._start()
        worker = self._own.worker
        header = {"kind": chunk.kind, "origin": chunk.origin, "first": chunk.first}
        try:
            _send(worker.stdin, header, chunk.payload)
            reply, payload = _receive(worker.stdout)
        except (BrokenPipeError, EOFError):
            code = worker.wait()
            cause = f"signal {-code}" if code < 0 else f"status {code}"
            raise InputError(
                f"a tokenizer process ended with {cause} while working on "
                f"{chunk.origin} from {chunk.first} on; if memory ran out, set data.processes lower. What is done is kept"
            ) from None
        if "error" in reply:
            raise InputError(reply["error"])
        count = reply.pop("tokens")
        tokens = np.frombuffer(payload, np.uint32, count)
        return Tokenized(
            tokens, np.frombuffer(payload, np.int64, offset=-(-tokens.nbytes // 8) * 8), **reply, progress=chunk.progress
        )

    def _start(self) -> subprocess.Popen[bytes]:
        package = Path(__file__).resolve().parent.parent
        path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
        # One thread a process: more would compete for the same cores.
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "packing.workers", json.dumps(asdict(self._settings))]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._workers.append(worker)
        return worker


def _send(pipe: BinaryIO, header: dict[str, Any], *payload: bytes | memoryview) -> None:
    text = json.dumps(header).encode()
    pipe.write(_SIZES.pack(len(text), sum(map(len, payload))))
    pipe.write(text)
    for part in payload:
        pipe.write(part)
    pipe.flush()


def _receive(pipe: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """One frame. Raises EOFError where the other side has closed."""
    sizes = pipe.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        raise EOFError
    header_size, payload_size = _SIZES.unpack(sizes)
    header, payload = pipe.read(header_size), pipe.read(payload_size)
    if len(payload) < payload_size:
        raise EOFError
    return json.loads(header), payload


def _serve(settings: WorkerSettings, requests: BinaryIO, replies: BinaryIO) -> None:
    """What a worker does: it answers until the parent closes the pipes or dies."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(settings.tokenizer)
    template = TextTemplate.parse(settings.text)
    while True:
        try:
            header, payload = _receive(requests)
            try:
                texts = read_chunk(Chunk(**header, payload=payload), template, settings.skip_bad)
            except InputError as error:
                _send(replies, {"error": str(error)})
                continue
            tokens, lengths = _encode(tokenizer, texts.documents, settings)
            empty = texts.empty + len(texts.documents) - len(lengths)
            counts = {"tokens": len(tokens), "skipped": texts.skipped, "first_skipped": texts.first_skipped, "empty": empty}
            _send(replies, counts, tokens.tobytes(), bytes(-tokens.nbytes % 8), lengths.tobytes())
        except (EOFError, BrokenPipeError):
            return


def _encode(tokenizer: Tokenizer, documents: list[str], settings: WorkerSettings) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all documents in one array (uint32), and the length of each (int64).

    A document without tokens of its own is left out: many tokenizers give none for blanks.
    """
    head = [] if settings.bos is None else [settings.bos]
    tail = [] if settings.eos is None else [settings.eos]
    ids: list[int] = []  # one list for all: an array for each short document would take more memory than its tokens
    ends = [0]
    # encode_batch_fast computes no character offsets.
    for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        if own := encoding.ids:
            ids += head
            ids += own
            ids += tail
            ends.append(len(ids))
    return np.array(ids, dtype=np.uint32), np.diff(ends).astype(np.int64)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between the frames
    _serve(WorkerSettings(**json.loads(sys.argv[1])), sys.stdin.buffer, frames)
