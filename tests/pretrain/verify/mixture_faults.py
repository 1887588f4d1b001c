"""Faults of mixture-of-experts layers that affect one token in 64.

Importing this module registers them with `faults.FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.model import experts
from tests.pretrain.verify.faults import Make, Patch, fault
from tests.pretrain.verify.small_runs import MIXTURES, SmallRun


def changing_choices(change: Callable[[Tensor, Tensor], None], *, recorded: bool = True) -> Make:
    """Return a fault that changes the experts of every 64th token.

    `change` modifies the experts, int64 [tokens, choices], and their weights in place. If
    `recorded` is false, only the arrangement by experts is changed, not the choice that the run
    records.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(
            module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            hidden, chosen, weights = inputs[0], inputs[1].clone(), inputs[2].clone()
            change(chosen[::64], weights[::64])
            return hidden, chosen, weights

        def changed_arrangement(chosen: Tensor, *rest: int) -> Any:
            chosen = chosen.clone()
            change(chosen[::64], torch.zeros(()))
            return arrange(chosen, *rest)

        arrange = experts.arrange
        if recorded:
            for layer in run.layers:
                layer.mlp.experts.register_forward_pre_hook(changed)
        else:
            patch.setattr(experts, "arrange", changed_arrangement)

    return make


def choose_next_expert(chosen: Tensor, weights: Tensor) -> None:
    chosen.add_(1).remainder_(MIXTURES["qwen3_moe"]["num_experts"])


fault("one token in 64 gets zero weights for its experts", kind="qwen3_moe")(
    changing_choices(lambda chosen, weights: weights.zero_())
)
fault("one token in 64 is routed to the next experts", kind="qwen3_moe")(
    changing_choices(choose_next_expert)
)
fault("one token in 64 is computed by the next experts", kind="qwen3_moe")(
    changing_choices(choose_next_expert, recorded=False)
)
