"""The precision of a model can be changed permanently or temporarily."""

from __future__ import annotations

import torch

from pretrain.precision.product import PrecisionContext
from pretrain.precision.selection import make_engines
from tests.pretrain.conftest import active_in


def test_the_current_precision_determines_the_engine_of_products() -> None:
    current, delayed, bf16 = active_in("current"), active_in("delayed"), active_in("bf16", "torch")
    engines = make_engines([current, delayed, bf16], torch.device("cpu"))
    context = PrecisionContext(torch.bfloat16, engines, delayed)
    for active in (current, delayed, bf16):
        with context.using(active):
            assert context.current is active and context.engine is engines.get(active.name)
        assert context.engine is engines["delayed"]
    context.current = bf16
    assert context.engine is None
