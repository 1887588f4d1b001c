from __future__ import annotations

from typing import Any

import pytest

from tests.pretrain.model.fused.fused_models import ARCHITECTURES


@pytest.fixture(params=ARCHITECTURES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A small model of each architecture that is fused."""
    return dict(ARCHITECTURES[request.param])
