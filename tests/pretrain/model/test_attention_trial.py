"""Attention that computes something else than its formula is passed over, or refused where it was requested by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import InputError
from pretrain.model.attention import backends
from pretrain.model.attention.heads import Heads
from pretrain.model.attention.trial import choose_tried, disagreement

HEADS, CPU = Heads(4, 2, 16), torch.device("cpu")
DOCUMENTS = backends.Choice("packed_documents", "fastest")
Change = Callable[[Tensor], Tensor]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Changes what `packed_documents` computes."""

    def breaks(change: Change) -> None:
        kernel = backends.packed_documents
        monkeypatch.setattr(
            backends, "packed_documents", lambda *states, **options: (change(kernel(*states, **options)[0]), None)
        )

    return breaks


@pytest.mark.parametrize("length", [1, 2, 3, 64, 4096])
def test_a_kernel_that_is_right_agrees_whatever_the_packs_length(length: int) -> None:
    assert disagreement("packed_documents", HEADS, torch.float32, length, CPU) is None


def fails(_: Any) -> Tensor:
    raise ValueError("no such kernel")


@pytest.mark.parametrize("change", [lambda output: 1.1 * output, lambda output: output * torch.nan, fails])
def test_a_kernel_that_is_wrong_is_passed_over_and_refused_by_name(change: Change, broken: Callable) -> None:
    broken(change)
    options = (HEADS, torch.float32, 64, CPU)
    chosen = choose_tried(DOCUMENTS, "auto", *options)
    assert chosen.name == "packed_sdpa" and "documents" in chosen.reason
    with pytest.raises(InputError, match=r"model\.attention: documents"):
        choose_tried(DOCUMENTS, "documents", *options)


def test_a_gradient_that_is_wrong_is_named(broken: Callable) -> None:
    broken(lambda output: output.detach() + 1.5 * (output - output.detach()))
    assert "dk" in disagreement("packed_documents", HEADS, torch.float32, 64, CPU)
