"""What the processes of tests/moments.py and tests/ranks.py have in common: done once, by the one that they are forked from.

Runs import some of it late, and each process would do so anew. Nothing of it is garbage, nor will be: a collection in a forked
process neither looks through it nor copies its pages.
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
# Keeps what it compiles for all models, a thousand patterns: each export would do so anew.
sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("qwen3")
# As are the versions of packages.
folders = sys.modules["pretrain.metrics.run_folder"]
for package in folders.PACKAGES:
    folders.version_of(package)
gc.freeze()
gc.enable()
