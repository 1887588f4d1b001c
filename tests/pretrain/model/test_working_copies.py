"""Working copies: a forward in BF16, gradients in FP32, parameters untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pretrain.model.wrapping import casting_output, casting_parameters


class Layer(nn.Module):
    """Two linears, one of them used twice, and a buffer: what a decoder layer may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.register_buffer("frequencies", torch.full((8,), 1 + 2**-10))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = {name: parameter.dtype for name, parameter in self.named_parameters()} | {
            "frequencies": self.frequencies.dtype
        }
        return self.second(torch.tanh(self.second(self.first(hidden))))


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def test_forward_and_gradients_are_those_of_a_rounded_layer_the_latter_in_fp32(layer: Layer) -> None:
    rounded = Layer()
    rounded.load_state_dict(layer.state_dict())
    rounded.bfloat16()
    hidden = torch.randn(4, 8).bfloat16()
    output = casting_parameters(layer, layer.forward, torch.bfloat16)(hidden)
    expected = rounded(hidden)
    assert torch.equal(output, expected)
    output.float().square().sum().backward()
    expected.float().square().sum().backward()
    for (name, ours), reference in zip(layer.named_parameters(), rounded.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, reference.grad.float()), name


def test_parameters_are_copies_inside_and_themselves_again_outside(layer: Layer) -> None:
    before = dict(layer.named_parameters())
    casting_parameters(layer, layer.forward, torch.bfloat16)(torch.randn(2, 8).bfloat16())
    assert layer.seen.pop("frequencies") == torch.float32  # buffers are no weights: rotary frequencies in BF16 misplace tokens
    assert set(layer.seen.values()) == {torch.bfloat16}
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())


def test_parameters_come_back_after_an_error(layer: Layer) -> None:
    before = dict(layer.named_parameters())
    with pytest.raises(RuntimeError):
        casting_parameters(layer, layer.forward, torch.bfloat16)(torch.randn(2, 7).bfloat16())
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())


def test_gradients_of_repeated_embeddings_add_up_in_fp32() -> None:
    """256 additions of 1 + 2^-8: BF16, with 8 bits, would lose the fraction and then stand still at 256."""
    embedding = nn.Embedding(3, 1)
    rows = casting_output(embedding.forward, torch.bfloat16)(torch.ones(512, dtype=torch.int64))
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, embedding.weight[1].detach().bfloat16().expand(512, 1))
    rows.sum(dtype=torch.float32).backward()
    assert embedding.weight.grad.flatten().tolist() == [0.0, 512.0, 0.0]
