"""Faults of a mixture's experts, few of whose tokens are wrong; they register themselves with `faults.FAULTS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.model import experts
from tests.pretrain.verify.faults import Make, Patch, fault
from tests.pretrain.verify.small_runs import MIXTURES, SmallRun


def changing_choices(change: Callable[[Tensor, Tensor], None], *, recorded: bool = True) -> Make:
    """Of every 64th token, its experts int64 [tokens, choices] and their weights, in place."""

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(
            module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            hidden, chosen, weights = inputs[0], inputs[1].clone(), inputs[2].clone()
            change(chosen[::64], weights[::64])
            return hidden, chosen, weights

        def arranged(chosen: Tensor, *rest: int) -> Any:
            chosen = chosen.clone()
            change(chosen[::64], torch.zeros(()))
            return arrange(chosen, *rest)

        arrange = experts.arrange
        if not recorded:
            patch.setattr(experts, "arrange", arranged)
        for layer in run.layers if recorded else ():
            layer.mlp.experts.register_forward_pre_hook(changed)

    return make


def to_the_next(chosen: Tensor, weights: Tensor) -> None:
    chosen.add_(1).remainder_(MIXTURES["qwen3_moe"]["num_experts"])


fault("one token in 64 gets nothing of its experts", kind="qwen3_moe")(
    changing_choices(lambda chosen, weights: weights.zero_())
)
fault("one token in 64 chooses the next experts", kind="qwen3_moe")(changing_choices(to_the_next))
fault("one token in 64 is computed by the next experts", kind="qwen3_moe")(
    changing_choices(to_the_next, recorded=False)
)
