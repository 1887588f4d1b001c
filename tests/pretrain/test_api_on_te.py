"""A converted model on Transformer Engine, whose kernels compute on a CPU here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pretrain import api
from tests.pretrain.conftest import batch_of, llama
from tests.te_on_a_cpu import transformer_engine_on_a_cpu


@pytest.fixture(scope="module", autouse=True)
def b200(references: Path) -> Iterator[None]:
    with transformer_engine_on_a_cpu(references):
        yield


def converted(**fp8_config: str) -> PreTrainedModel:
    model = llama(hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    api.convert(model, "mxfp8+head", **fp8_config)
    return model


def test_a_model_on_transformer_engine_equals_the_emulation(monkeypatch: pytest.MonkeyPatch):
    """The GPU of this test supports every precision, so `convert` chooses Transformer Engine."""
    monkeypatch.setattr(api, "support_check_on", lambda device: lambda precision: None)
    models = {"Transformer Engine": converted(), "emulation": converted(backend="emulation")}
    gradients = []
    batch = batch_of(2, 32)
    for engine, model in models.items():
        # Two microbatches, and an update by torch between two steps.
        for _ in range(2):
            model.zero_grad()
            for _ in range(2):
                model(**batch).loss.backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        products = api.audit(model, batch)
        gemms = Counter(product.gemm for product in products)
        assert gemms == dict.fromkeys(("forward", "dgrad", "wgrad"), 8)
        assert len({(product.name, product.gemm) for product in products}) == 3 * 8
        assert {(p.left, p.right, p.engine) for p in products} == {
            ("e4m3 in blocks of 32", "e4m3 in blocks of 32", engine)
        }
    for step in range(2):
        for by_library, emulated in zip(gradients[step], gradients[2 + step], strict=True):
            assert torch.equal(by_library, emulated)
