"""Exact AdamW of the public API, compared with torch's AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from foundation.errors import InputError
from pretrain import api
from pretrain.optimizer.exact_weights import master_of


def test_exact_adamw_is_an_optimizer_of_torch_with_the_bits_of_fp32(tmp_path: Path):
    """Schedulers, groups, closures, and a resumed state, against torch's AdamW in FP32."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3).bfloat16()), nn.Parameter(torch.randn(3).bfloat16())]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    module = nn.ParameterList(weights)
    exact = api.exact_adamw(module, lr=1e-2, weight_decay=0.1)
    assert [group["weight_decay"] for group in exact.param_groups] == [0.1, 0.0]
    groups = [{"params": masters[:1]}, {"params": masters[1:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(x, 0.9) for x in (exact, plain)]
    for step in range(20):
        if step == 10:
            torch.save([exact.state_dict(), schedulers[0].state_dict()], tmp_path / "saved")
            exact = api.exact_adamw(module, lr=5.0)
            state, schedule = torch.load(tmp_path / "saved")
            exact.load_state_dict(state)
            schedulers[0] = torch.optim.lr_scheduler.ExponentialLR(exact, 0.9)
            schedulers[0].load_state_dict(schedule)
            exact.load_state_dict(state)
        for weight, master in zip(weights, masters, strict=True):
            weight.grad = torch.randn(weight.shape).bfloat16()
            master.grad = weight.grad.float()
        assert exact.step(lambda: 3.0) == 3.0
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        for weight, master in zip(weights, masters, strict=True):
            remainder = exact.state[weight]["remainder"]
            assert torch.equal(master_of(weight.detach(), remainder), master.detach())


def test_a_state_of_other_weights_is_refused():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    plain = torch.optim.AdamW([weight])
    plain.step()
    with pytest.raises(InputError, match="remainder"):
        api.exact_adamw([weight]).load_state_dict(plain.state_dict())
    with pytest.raises(TypeError):
        api.exact_adamw([weight], amsgrad=True)
    exact = api.exact_adamw([weight])
    exact.step()
    row = nn.Parameter(torch.ones(1, 4, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="dtype and shape"):
        api.exact_adamw([row]).load_state_dict(exact.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_that_would_be_rounded_are_refused(dtype: torch.dtype):
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(InputError, match="FP32 and BF16"):
        api.exact_adamw([weight]).step()
