"""Attributes that have other values for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foundation.attributes import holding


def test_attributes_have_their_old_values_after_an_error_too() -> None:
    owner = SimpleNamespace(first=1, second=2, third=3)
    with pytest.raises(ZeroDivisionError), holding(owner, first=10, third=None):
        assert vars(owner) == {"first": 10, "second": 2, "third": None}
        raise ZeroDivisionError
    assert vars(owner) == {"first": 1, "second": 2, "third": 3}


def test_an_attribute_that_is_not_there_is_an_error_that_changes_nothing() -> None:
    owner = SimpleNamespace(first=1)
    with pytest.raises(AttributeError, match="second"), holding(owner, first=10, second=20):
        pass
    assert vars(owner) == {"first": 1}
