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

from foundation.errors import InputError
from foundation.progress import say
from packing.arrow import PackWriter
from packing.chunks import Chunk, Tokens, tokenize
from packing.pack import Arranged
from packing.records import CHAT_TEMPLATE, ChatColumns, Records, records_of
from packing.settings import LAYOUT_KEYS, TOKEN_KEYS, DataSettings
from packing.sources import open_source
from packing.tokenizer import TextTokenizer, load_tokenizer

SPAWN = multiprocessing.get_context("spawn")
_CHUNKS_AHEAD = 3  # of each worker


def usable_cores(shared_by: int = 1) -> int:
    """Return the number of cores for each of `shared_by` tasks, at least 1.

    Counts the cores that this process may use. In a container they can be fewer than the machine's.
    """
    return max(1, len(os.sched_getaffinity(0)) // shared_by)


def content_settings(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that decide what packs hold, as their manifest records them.

    The packs of a stream also depend on the size of its parts.
    """
    values = settings.model_dump(mode="json")
    window = {"window": settings.stream.window} if settings.stream else {}
    return {key: values[key] for key in (*TOKEN_KEYS, *LAYOUT_KEYS)} | window


class PackMaker(AbstractContextManager):
    """Makes packs of one source.

    Its worker processes end with the `with` block, or with this process. They are spawned: a fork
    would copy everything that the caller has loaded (torch, a CUDA context, threads).
    """

    def __init__(self, settings: DataSettings, processes: int) -> None:
        self.settings = settings
        self.processes = processes
        self.tokenizer = load_tokenizer(str(settings.tokenizer))
        self.records = records_of(settings, self.tokenizer)
        has_chatml_tokens = self.tokenizer.tokenizer.token_to_id("<|im_start|>") is not None
        if settings.chat_template == "chatml" and not has_chatml_tokens:
            say("warning: data.chat_template: chatml: <|im_start|> is several tokens here")
        self.source = open_source(settings, self.records)
        # Workers load the tokenizer themselves. Sending one, which is more than a pipe holds, to a
        # worker that dies meanwhile would never return.
        with _isolated_children():  # The pool starts multiprocessing's resource tracker.
            self._pool = ProcessPoolExecutor(processes, SPAWN, _start_worker, (settings,))

    def __exit__(self, *exception: object) -> None:
        # Closing the queue keeps shutdown from waiting for a result that is cut off.
        self._pool._result_queue._writer.close()  # type: ignore[attr-defined]  # CPython's
        # Nobody needs the running tasks. Python 3.14 has `kill_workers` for this.
        for worker in list((self._pool._processes or {}).values()):
            worker.kill()
        self._pool.shutdown(cancel_futures=True)

    def key(self) -> dict[str, Any]:
        """Return all values that decide the tokens of this source.

        `on_bad_line` is not among them: after a bad line hours into the work, `skip` continues from
        that line. The records' hash covers the content of a chat template's file.
        """
        left_out = {"on_bad_line", "source", "tokenizer"}
        return self.settings.model_dump(mode="json", include={*TOKEN_KEYS} - left_out) | {
            "source files": self.source.identity,
            "tokenizer fingerprint": self.tokenizer.fingerprint,
            "records": sha256(repr(self.records).encode()).hexdigest(),
        }

    def tokenize(self, chunks: Iterable[Chunk]) -> Iterator[Tokens]:
        """Yield the documents of each chunk, in the order of `chunks`.

        Raises the InputError of the first bad record, and InputError if a worker dies.
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
                "a tokenizer process died: if memory ran out, use fewer cores (taskset). "
                "The work is kept"
            ) from None

    def arrange(self, tokens: Tokens, *, held_out: bool = True) -> Arranged:
        """Lay out documents in packs. With `held_out`, set a share apart as the settings say."""
        share = self.settings.held_out if held_out else 0.0
        settings = self.settings.model_copy(update={"held_out": share})
        return Arranged(tokens, settings, one_file=self.source.kind == "text")

    def write(
        self, path: Path, arranged: Arranged, stream: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write packs to the folder `path` and return their manifest.

        `stream` is given for a part of a stream: it says where the part (`start`) and the next one
        (`after`) start in the source. Parts after the first have neither held-out packs nor the
        tokenizer.
        """
        statistics = arranged.statistics()
        if stream is not None:
            statistics["stream"] = stream
        with PackWriter(path, self.settings.length) as writer:
            if stream is not None and stream["start"]["number"] > 0:
                arranged.write(writer, "train", self.tokenizer.padding)
            else:
                for split in arranged.layouts:
                    arranged.write(writer, split, self.tokenizer.padding)
                self._write_tokenizer(writer.folder)
            return writer.finish(
                settings=content_settings(self.settings),
                statistics=statistics,
                tokenizer=self.tokenizer.describe(),
            )

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, and the template of a chat, beside the packs."""
        tokenizer = self.tokenizer.tokenizer.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        if isinstance(self.records, ChatColumns):
            (folder / CHAT_TEMPLATE).write_text(self.records.template, encoding="utf-8")


# ── Worker processes ──────────────────────────────────────────────────────────────────────────────

# In a worker: how it tokenises.
_task: tuple[TextTokenizer, Records, DataSettings]


@contextmanager
def _isolated_children() -> Iterator[None]:
    """Isolate the processes that are started in this block.

    They import neither the caller's script (the launcher's would import torch) nor modules of the
    current folder. They ignore Ctrl-C: the caller receives it too, and ends them.
    """
    main = sys.modules["__main__"]
    safe_path = os.environ.get("PYTHONSAFEPATH", "")
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ["PYTHONSAFEPATH"] = "1"
    blocked = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Children inherit the mask.
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.modules["__main__"] = main
        os.environ["PYTHONSAFEPATH"] = safe_path  # An empty value means unset.


def _start_worker(settings: DataSettings) -> None:
    """Prepare a worker process. It ends when its parent ends."""
    global _task
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    # Threads of one worker would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(str(settings.tokenizer))
    # A post-processor would add special tokens, and take blanks out of offsets.
    tokenizer.tokenizer.post_processor = None
    _task = tokenizer, records_of(settings, tokenizer), settings


def _tokenize(chunk: Chunk) -> Tokens:
    return tokenize(chunk, *_task)
