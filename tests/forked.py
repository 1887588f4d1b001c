"""Imports and caches of the process from which tests/moments.py and tests/ranks.py fork others.

Runs import some of these modules late. Every forked process would import them again. The objects
are frozen, so that a garbage collection in a forked process neither visits them nor copies their
pages.
"""

from __future__ import annotations

import gc
import importlib
import sys

IMPORTED_LATE = (
    "torch.distributed.fsdp",
    "pretrain.metrics.trackers",
    "numpy.ctypeslib",
    "numpy.ma",
)
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "qwen3"))

gc.disable()
for module in ("train_accelerate", *MODELS, *IMPORTED_LATE):
    importlib.import_module(module)
# Compiles a thousand patterns, which every export would compile again.
sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("qwen3")
# Caches the versions of packages.
run_folder = sys.modules["pretrain.metrics.run_folder"]
for package in run_folder.PACKAGES:
    run_folder.version_of(package)
gc.freeze()
gc.enable()
