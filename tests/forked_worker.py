"""Tokenizer workers that are forked from a server, because starting Python takes longer."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from packing.workers import serve
from tests.moments import fork_context


class ForkedWorker:
    """Replacement of `packing.workers.start_worker`."""

    def __init__(self, descriptor: int) -> None:
        connection = Connection(os.dup(descriptor))
        process = fork_context.Process(target=serve, args=(connection,), daemon=True)
        process.start()
        self.kill = process.kill
        self.wait = process.join
