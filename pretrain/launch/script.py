"""Begin and end a script that imports torch.

Imports of torch and transformers take seconds. This module prepares a process for them, and frees
nothing object by object at the end.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from threading import Thread
from typing import NoReturn

from foundation.command import end_after_error, end_process
from foundation.signals import end_on_ctrl_c


def before_imports() -> None:
    """Prepare this process for the imports of torch and transformers.

    Until the training loop can save a checkpoint, Ctrl-C ends the process without a traceback.
    """
    end_on_ctrl_c()
    # Turn off garbage collection during the imports. Imports create no garbage, but garbage
    # collection took a fifth of the time of the imports.
    gc.disable()
    # Let torch's allocator use expandable segments, unless the user has set one of the variables
    # below. torch reads the variables when it first uses a GPU. By default, the allocator keeps
    # fragments of memory that no other tensor fits into. With Llama-3.1-8B in shards, the fragments
    # took 67.9 GiB in addition to the 67.2 GiB in use.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # NCCL cannot register buffers in such segments for the collectives of a CUDA graph.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # Hide torchao. This project does not use it, but transformers imports it if it is installed.
    # The import takes a second and uses CUDA, so that CUDA would not work in a fork.
    sys.modules["torchao"] = None  # type: ignore[assignment]


def after_imports() -> None:
    """Exclude imported objects from garbage collection, and turn garbage collection on.

    Imported objects live as long as the process. Otherwise each collection would traverse them,
    which took a third of a second.
    """
    gc.freeze()
    gc.enable()


def hash_triton() -> None:
    """Compute the hash of Triton's files, if there is a GPU.

    Triton computes this hash, which takes half a second, before it loads its first kernel, and
    keeps it for the rest of the process.
    """
    import torch

    if torch.cuda.is_available():
        from triton.runtime.cache import triton_key

        triton_key()


def run_to_end(main: Callable[[], int | None]) -> NoReturn:
    """Run `main`, and end this process with the exit status that `main` returns.

    The process ends by `end_process` instead of Python's usual exit, after an exception too. While
    a process group exists, the usual exit sometimes aborts the process.
    """
    after_imports()
    Thread(target=hash_triton, daemon=True).start()
    sys.excepthook = end_after_error
    end_process(main() or 0)
