"""The precision of a model can be changed permanently or temporarily."""

from __future__ import annotations

import torch

from pretrain.precision.model_precision import ModelPrecision, PrecisionInModel
from pretrain.precision.product import PrecisionContext
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.selection import make_engines
from tests.pretrain.conftest import active_in


def test_the_engine_of_products_determines_the_precision() -> None:
    precisions = [
        active_in("current"),
        active_in("delayed"),
        active_in("bf16", "torch"),
    ]
    engines = make_engines(precisions, torch.device("cpu"))
    context = PrecisionContext(engines["delayed"], torch.bfloat16)
    in_model = {
        active.precision.name: PrecisionInModel(active, engines[active.precision.name], {}, {})
        for active in precisions
    }
    schedule = PrecisionSchedule([(None, precisions[1])], 10)
    precision = ModelPrecision(context, in_model, schedule)
    assert precision.current.name == "delayed"
    for name in in_model:
        with precision.using(name):
            assert precision.current.name == name and context.engine is engines[name]
        assert precision.current.name == "delayed"
    precision.use("bf16")
    assert precision.current.name == "bf16" and context.engine is None
