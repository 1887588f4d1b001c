"""Tokenise chunks in processes of `python -m packing.workers`.

A worker receives the settings of a source, and then chunks. It sends the tokens of each chunk, or
an InputError. It ends when the connection ends, which is when its parent has ended.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from foundation.errors import InputError, as_input_error
from packing.chunks import Chunk, Tokens, tokenize
from packing.records import record_rule
from packing.settings import DataSettings
from packing.tokenizer import load_tokenizer

# Number of chunks in the queue for each worker.
_CHUNKS_AHEAD = 3
# Environment variables that make the processes of a launcher report their exit. Processes that are
# started here must not inherit them.
_OF_THE_LAUNCHER = ("TORCHELASTIC_ERROR_FILE", "PRETRAIN_STATUS_FILE")


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with `options` of Popen, and return the process.

    The process imports no modules of the current folder (option -P). It is in a session of its own,
    so that it does not receive Ctrl-C: this process receives it, and ends the other one.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_LAUNCHER}
    search_path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)


def start_worker(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a worker that inherits the connection with this file descriptor."""
    return start_python("packing.workers", str(descriptor), pass_fds=[descriptor])


class Workers(ExitStack):
    """Processes that tokenise the chunks of one source.

    They end with the caller's `with` statement, or with this process. Python starts anew in each
    worker, because a fork would copy everything that the caller has loaded (torch, a CUDA context,
    threads).
    """

    def __init__(self, settings: DataSettings, count: int) -> None:
        """Start `count` workers for the source that `settings` describe."""
        super().__init__()
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        # A thread for each worker sends a chunk and waits for the result.
        self._threads = ThreadPoolExecutor(count, "tokenizer")
        self._most_pending = _CHUNKS_AHEAD * count
        # Callbacks run in reverse order. The workers are killed first, because their results are
        # not needed.
        self.callback(self._threads.shutdown, cancel_futures=True)
        for _ in range(count):
            connection, other_end = multiprocessing.Pipe()
            with other_end, as_input_error((OSError,), "tokenizer processes cannot be started"):
                worker = start_worker(other_end.fileno())
            self.callback(worker.wait)
            self.callback(worker.kill)
            # `_tokenize` reports workers that have died.
            with suppress(OSError):
                connection.send(settings)
            self._idle.put(connection)

    def tokenize(self, chunks: Iterable[Chunk]) -> Iterator[Tokens]:
        """Yield the tokens of each chunk, in the order of `chunks`.

        Raises InputError if a record is malformed, or if a worker dies.
        """
        pending: deque[Future[Tokens]] = deque()
        for chunk in chunks:
            pending.append(self._threads.submit(self._tokenize, chunk))
            if len(pending) >= self._most_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _tokenize(self, chunk: Chunk) -> Tokens:
        """Let an idle worker tokenise `chunk`."""
        connection = self._idle.get()
        try:
            connection.send(chunk)
            result = connection.recv()
        except (OSError, EOFError):
            raise InputError(
                f"a tokenizer process died while it read {chunk.where}. If the memory was full, "
                "run the same command with fewer cores (taskset). Finished work is kept"
            ) from None
        finally:
            self._idle.put(connection)
        if isinstance(result, InputError):
            raise result
        return result


# ── A worker ──────────────────────────────────────────────────────────────────────────────────────


def serve(connection: Connection) -> None:
    """Tokenise the chunks that `connection` receives, and send their tokens, until its end."""
    # Tokenise in one thread. More threads of one worker would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    settings = connection.recv()
    chunks: SimpleQueue[Chunk] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, chunks), daemon=True).start()
    # A worker loads the tokenizer itself, because a tokenizer is large.
    tokenizer = load_tokenizer(str(settings.tokenizer))
    # Remove the post-processor, which would add special tokens and exclude blanks from offsets.
    tokenizer.tokenizer.post_processor = None
    rule = record_rule(settings, tokenizer)
    while True:
        try:
            connection.send(tokenize(chunks.get(), tokenizer, rule))
        except InputError as error:
            connection.send(error)


def _receive(connection: Connection, chunks: SimpleQueue[Chunk]) -> None:
    """Put the chunks into a queue. When the connection ends, end this process at once."""
    try:
        while True:
            chunks.put(connection.recv())
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
