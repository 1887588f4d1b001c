"""Shards without processes; tests/multi/test_sharding.py has what they train."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foundation.errors import InputError
from pretrain.model.sharding import _NEEDED, _require


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in _NEEDED.items() for name in names])
def test_a_torch_that_keeps_its_shards_in_another_way_is_one_message(kind: str, name: str) -> None:
    there = {each: None for each in _NEEDED[kind]}
    _require(SimpleNamespace(**there), kind)
    del there[name]
    with pytest.raises(InputError) as refused:
        _require(SimpleNamespace(**there), kind)
    for word in (torch.__version__, kind, f"`{name}`", "2.13", "ddp.yaml"):
        assert word in str(refused.value)
