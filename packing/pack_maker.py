"""Make packs of one source: tokenise in worker processes, lay out documents, write packs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from foundation.errors import InputError, as_input_error
from packing.arrow import FIRST, MANIFEST, Split, read_manifest, write_packs
from packing.chunks import Chunk, Tokens, tokenize
from packing.pack import Arranged
from packing.records import CHAT_TEMPLATE, ChatColumns, Records, records_of
from packing.settings import LAYOUT_KEYS, TOKEN_KEYS, DataSettings
from packing.sources import open_source, reading_settings
from packing.tokenizer import TextTokenizer, load_tokenizer

SPAWN = multiprocessing.get_context("spawn")
# Number of chunks in the queue for each worker.
_CHUNKS_AHEAD = 3


def usable_cores(shared_by: int = 1) -> int:
    """Return the number of cores that this process may use, divided by `shared_by`, at least 1.

    In a container, a process may be allowed to use fewer cores than the machine has.
    """
    return max(1, len(os.sched_getaffinity(0)) // shared_by)


def content_settings(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that determine the content of packs, as their manifest records them.

    For a stream, these include the number of tokens in a part.
    """
    values = settings.model_dump(mode="json")
    window = {"window": settings.stream.window} if settings.stream else {}
    return {key: values[key] for key in (*TOKEN_KEYS, *LAYOUT_KEYS)} | window


def _default_packing(reading: DataSettings) -> str:
    """Return the value of `packing` for settings that do not set it.

    All parts of a stream have the packing of the first part.
    """
    first = reading.packs / FIRST
    if (first / MANIFEST).is_file():
        return read_manifest(first)["settings"]["packing"]
    return "best_fit" if reading.messages else "truncate"


class PackMaker(AbstractContextManager):
    """Make the packs of one source.

    Worker processes tokenise the documents. The workers end with the caller's `with` statement,
    or with this process. The workers are spawned and not forked, because a fork would copy
    everything that the caller has loaded (torch, a CUDA context, threads).
    """

    def __init__(self, settings: DataSettings, processes: int) -> None:
        self.processes = processes
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.source = open_source(settings, Records((), ()))
        # The manifest of the packs records `settings`, without the changes of `reading_settings`.
        reading = reading_settings(settings, self.source)
        packing = {"packing": settings.packing or _default_packing(reading)}
        self.settings = settings.model_copy(update=packing)
        self.reading = reading.model_copy(update=packing)
        self.records = records_of(self.reading, self.tokenizer)
        self.source.records = self.records
        # Let each worker load the tokenizer itself. A tokenizer is larger than the buffer of a
        # pipe. So sending a tokenizer would block forever if the worker died meanwhile.
        # Also isolate multiprocessing's resource tracker, a process that the pool starts.
        with (
            as_input_error((OSError,), "tokenizer processes cannot be started (see /dev/shm)"),
            _isolated_children(),
        ):
            self._pool = ProcessPoolExecutor(processes, SPAWN, _start_worker, (self.reading,))

    def __exit__(self, *exception: object) -> None:
        # Close the queue, so that `shutdown` does not wait for a result that is only partly sent.
        self._pool._result_queue._writer.close()  # type: ignore[attr-defined]  # in CPython
        # Kill the workers, because their results are not needed. From Python 3.14 on, the pool has
        # a method `kill_workers` for this.
        for worker in list((self._pool._processes or {}).values()):
            worker.kill()
        self._pool.shutdown(cancel_futures=True)

    def key(self) -> dict[str, Any]:
        """Return all values that determine the tokens of this source.

        The setting `on_bad_line` is not included. So if a record cannot be read after hours of
        work, the user can set `on_bad_line` to `skip` and continue from this record. The value
        `records` is the hash of the rule that reads records, including its chat template.
        """
        excluded = {"on_bad_line", "source", "tokenizer"}
        return self.settings.model_dump(mode="json", include={*TOKEN_KEYS} - excluded) | {
            "source files": self.source.identity,
            "tokenizer fingerprint": self.tokenizer.fingerprint,
            "records": sha256(repr(self.records).encode()).hexdigest(),
        }

    def tokenize(self, chunks: Iterable[Chunk]) -> Iterator[Tokens]:
        """Yield the tokens of each chunk, in the order of `chunks`.

        Raises InputError if a record is malformed and not skipped, or if a worker dies.
        """
        results: deque[Future[Tokens]] = deque()
        try:
            for chunk in chunks:
                with _isolated_children():
                    results.append(self._pool.submit(_tokenize, chunk))
                if len(results) >= _CHUNKS_AHEAD * self.processes:
                    yield results.popleft().result()
            while results:
                yield results.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                f"a tokenizer process died while it read {chunk.where}, or text shortly before it. "
                "If the memory was full, run the same command with fewer cores (taskset). Finished "
                "work is kept"
            ) from None

    def arrange(self, tokens: Tokens, *, held_out: bool = True) -> Arranged:
        """Lay out documents in packs. With `held_out`, hold out the share in the settings."""
        share = self.settings.held_out if held_out else 0.0
        settings = self.reading.model_copy(update={"held_out": share})
        return Arranged(tokens, settings, text_files=self.source.kind == "text")

    def write(
        self, path: Path, arranged: Arranged, stream: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write packs to the folder `path` and return their manifest.

        `stream` is given for a part of a stream. It maps `start` to the start of this part, and
        `after` to the start of the next part, as dicts of PartStart. A part after the first one has
        neither held-out packs nor a tokenizer.
        """
        statistics = arranged.statistics()
        # Only the identity of a local source is recorded: to compare that of a dataset of the hub,
        # every start would need the network.
        if self.source.is_local:
            statistics["source_identity"] = self.source.identity
        splits: Iterable[Split] = arranged.layouts
        texts = {"tokenizer.json": self.tokenizer.tokenizer.to_str(pretty=True)}
        if isinstance(self.records, ChatColumns):
            texts[CHAT_TEMPLATE] = self.records.template
        if stream is not None:
            statistics["stream"] = stream
            if stream["start"]["number"] > 0:
                splits = ["train"]
                texts = {}
        with as_input_error(
            (OSError,), f"{path}: cannot be written", "correct the cause and run the command again"
        ):
            return write_packs(
                path,
                self.settings.length,
                {split: arranged.packs(split, self.tokenizer.padding) for split in splits},
                settings=content_settings(self.settings),
                statistics=statistics,
                tokenizer=self.tokenizer.describe(),
                texts=texts,
            )


# ── Worker processes ──────────────────────────────────────────────────────────────────────────────

# Arguments of `tokenize` in a worker process. `_start_worker` sets them.
_task: tuple[TextTokenizer, Records, DataSettings]


@contextmanager
def _isolated_children() -> Iterator[None]:
    """Context manager that isolates processes that start in the caller's `with` statement.

    These processes import neither the caller's script (the training script would import torch) nor
    modules of the current folder. The processes ignore Ctrl-C. The caller receives Ctrl-C too, and
    ends the processes.
    """
    main = sys.modules["__main__"]
    previous_safe_path = os.environ.get("PYTHONSAFEPATH", "")
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ["PYTHONSAFEPATH"] = "1"
    # Block Ctrl-C in child processes, which inherit the signal mask.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        sys.modules["__main__"] = main
        # An empty value is the same as no value.
        os.environ["PYTHONSAFEPATH"] = previous_safe_path


def _start_worker(settings: DataSettings) -> None:
    """Prepare a worker process. A thread ends the process when its parent ends."""
    global _task
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    # Tokenise in one thread. More threads of one worker would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(str(settings.tokenizer))
    # Remove the post-processor, which would add special tokens and exclude blanks from offsets.
    tokenizer.tokenizer.post_processor = None
    _task = tokenizer, records_of(settings, tokenizer), settings


def _tokenize(chunk: Chunk) -> Tokens:
    return tokenize(chunk, *_task)
