"""A converted model on Transformer Engine, whose kernels compute on a CPU here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pretrain import api
from tests.te_on_a_cpu import transformer_engine_on_a_cpu


@pytest.fixture(scope="module", autouse=True)
def b200(references: Path) -> Iterator[None]:
    with transformer_engine_on_a_cpu(references):
        yield


def converted(**fp8_config: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads)).bfloat16().train()
    api.convert(model, "mxfp8+head", **fp8_config)
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def test_a_model_on_transformer_engine_equals_the_emulation(monkeypatch: pytest.MonkeyPatch):
    """The GPU of this test supports every precision, so `convert` chooses Transformer Engine."""
    monkeypatch.setattr(api, "missing_on", lambda device: lambda precision: None)
    models = {
        "Transformer Engine": converted(),
        "emulation": converted(backend="emulation"),
    }
    gradients = []
    for engine, model in models.items():
        # Two microbatches, and an update by torch between two steps.
        for _ in range(2):
            model.zero_grad()
            for _ in range(2):
                model(**batch()).loss.backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        products = api.audit(model, batch())
        assert len(products) == 3 * 8
        assert {(p.left, p.right, p.engine) for p in products} == {
            ("e4m3 in blocks of 32", "e4m3 in blocks of 32", engine)
        }
    for step in range(2):
        for by_library, emulated in zip(gradients[step], gradients[2 + step], strict=True):
            assert torch.equal(by_library, emulated)
