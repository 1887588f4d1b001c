"""Build things a little ahead of their use, in a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Iterates over build(n) for the numbers given, in order, with one thread that is at most `ahead` of the consumer.

    A thread suffices where the work is numpy's, which lets go of the interpreter lock. An exception of `build` is raised by the
    `next` that would have returned its result, and ends the iteration. `close`, or leaving a `with` block, drops what was not
    consumed and returns once the thread has ended; iterating to the end does the same.
    """

    def __init__(
        self, build: Callable[[int], T], numbers: Iterable[int], *, ahead: int = 2, initializer: Callable[[], None] | None = None
    ) -> None:
        self.data_wait_ms = 0.0  # how long the last `next` had to wait for its result
        self._build = build
        self._numbers = iter(numbers)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch", initializer=initializer)
        self._pending: deque[Future[T]] = deque()
        for _ in range(ahead):
            self._submit_one()

    def _submit_one(self) -> None:
        for number in self._numbers:
            self._pending.append(self._thread.submit(self._build, number))
            return

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        if not self._pending:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        future = self._pending.popleft()
        failed = future.exception() is not None  # waits
        self.data_wait_ms = (time.perf_counter() - began) * 1e3
        if failed:
            self.close()
        else:
            self._submit_one()
        return future.result()

    def close(self) -> None:
        """Drop what was not consumed and wait for the thread to end; closing twice is harmless."""
        self._numbers = iter(())
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
