"""FSDP2 as accelerate has set it up: when weights are gathered, and where gradients add up. Configured, not rewritten.

accelerate makes a shard group of each decoder layer, of the embedding, of the head (of both where they are tied) and of what is
left, the final norm. docs/scaling.md says when a group is gathered and reduced: once a step (ZeRO-2), where each rank adds its
gradients up whole, or for each use (ZeRO-3), where microbatches add up in the shards, in `kept`.

In both, the sums are FSDP2's own `unsharded_accumulated_grad`, which it adds to and reduces. We say where they lie: the gathered
parameters have a `main_grad`, which products add to by themselves. For each use, all groups share one memory, since only one of
them is in its backward at a time.

FSDP2 returns gradients in the parameter's dtype, which would round the FP32 sums of BF16 weights. `kept` is the dtype to return
instead: with FP32, BF16 shards and their remainder bits (`weights: bf16_exact`) take the very updates that one process makes.

Private attributes of FSDP2's groups and parameters are used, which torch 2.11 to 2.13 have.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree
from transformers.modeling_layers import GradientCheckpointingLayer

from pretrain.model.gradients import attach_sums, empty_sums, sum_rows_in_fp32, values_of_sums


def part_from_first(values: Tensor | None, parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """This process's part, as `parameter` is sharded, of the first rank's `values`, which have the parameter's whole shape and
    `dtype`; the other ranks pass None. Collective."""
    device = torch.device(parameter.device_mesh.device_type)
    whole = (
        torch.empty(parameter.shape, dtype=dtype, device=device)
        if values is None
        else values.to(device)
    )
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Holds whole, while entered, what no decoder layer owns: embedding, final norm, head. Collective; without FSDP2 it does
    nothing. For calls that go past the forward of the prepared `model`, whose own hooks would do it, such as generation."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if not isinstance(module, GradientCheckpointingLayer):
            module.unshard()
    try:
        yield
    finally:
        for module in sharded:  # layers too: they may have been kept after their forward
            module.reshard()


@dataclass
class _Group:
    """Parameters that are gathered and reduced together."""

    module: FSDPModule  # one of those that the group was made of
    fsdp: Any  # torch's FSDPParamGroup
    sums: Tensor | None = None  # the memory that they add up in
    shares: bool = False  # the memory with other groups

    @property
    def trained(self) -> list[Any]:
        """torch's FSDPParam of each parameter that is trained."""
        return [each for each in self.fsdp.fsdp_params if each.sharded_param.requires_grad]

    @property
    def adds_up(self) -> bool:
        """Whether its sums hold something that is not reduced yet."""
        return any(each.unsharded_accumulated_grad is not None for each in self.trained)


class Sharding:
    """The groups of one prepared model; made once, after accelerate has sharded it. Collective, as all that it does.

    `kept`: the dtype of the reduced gradient in the shards. `stacks`: parameters of the sharded model that are the rows of one
    matrix, as in `attach_main_gradients`. `once_a_step`: the first of the two ways above.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: torch.dtype,
        stacks: Sequence[Sequence[nn.Parameter]],
        *,
        once_a_step: bool,
    ) -> None:
        self.once_a_step = once_a_step
        self._model, self._kept = model, kept
        # A fused layer returns a view of what it computed. No layer writes into what came in, which is what torch warns of.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        self._groups = _groups_of(model)
        self._attach(stacks)
        for group in self._groups:
            for module in group.fsdp.modules:
                module.register_forward_hook(partial(self._after_forward, group))
        model.register_forward_hook(self._after_model)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Put this around the forward and backward of every microbatch of a step but the last."""
        model = self._model
        if self.once_a_step:
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
        else:
            # replicas of shards exchange their sums once a step
            model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)

    def abandon(self) -> None:
        """Forget sums that were not reduced, as a backward leaves that failed or was not a step's last, and reshard."""
        for group in self._groups:
            for each in group.fsdp.fsdp_params:
                each.unsharded_accumulated_grad = each._unsharded_param.grad = None
        self._reshard()

    def _reshard(self) -> None:
        for group in self._groups:
            group.module.reshard()

    def _attach(self, stacks: Sequence[Sequence[nn.Parameter]]) -> None:
        """Give each gathered parameter its sum; the parameter is the same object each time that it is gathered again."""
        for number, group in enumerate(self._groups):
            # The model's own group, and that of a tied head and embedding, are in their backward beside others.
            beside_others = (number == 0 and group.module is self._model) or len(
                group.fsdp.modules
            ) > 1
            group.shares = not (self.once_a_step or beside_others)
        shared = None
        if sharing := [group for group in self._groups if group.shares]:
            values = max(
                values_of_sums(each.sharded_param for each in group.trained) for group in sharing
            )
            shared = torch.empty(
                values, dtype=torch.float32, device=sharing[0].trained[0].sharded_param.device
            )
        for group in self._groups:
            trained = group.trained
            group.module.unshard()
            whole = {id(each.sharded_param): each._unsharded_param for each in trained}
            rows = [[whole[id(one)] for one in stack] for stack in stacks if id(stack[0]) in whole]
            if trained:
                group.sums = attach_sums(
                    list(whole.values()), torch.float32, rows, shared if group.shares else None
                )
            for each in trained:
                each.sharded_param.grad_dtype = None  # any
                for module in (each._module_info.module, *each._module_info.shared_modules):
                    if isinstance(module, nn.Embedding):
                        sum_rows_in_fp32(module)
            group.module.reshard()

    def _after_forward(self, group: _Group, module: nn.Module, inputs: Any, output: Any) -> None:
        """Prepares the backward as FSDP2 does: a hook on what a group's forward returned runs before all else in its backward."""
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._before_backward(group))

    def _before_backward(self, group: _Group) -> None:
        group.fsdp._orig_dtype = self._kept
        # an earlier microbatch's, or that of another module of the group
        if group.adds_up or group.sums is None:
            return
        if group.shares and any(other.shares and other.adds_up for other in self._groups):
            raise RuntimeError(
                "FSDP2: the backward of a shard group began before that of another had ended, in the same memory"
            )
        empty_sums(group.sums)
        for each in group.trained:
            each.unsharded_accumulated_grad = each._unsharded_param.main_grad

    def _after_model(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """No backward will give back what a forward without gradients has gathered; and weights may be changed next."""
        if not torch.is_grad_enabled():
            self._reshard()


def _groups_of(model: nn.Module) -> list[_Group]:
    """Each once, that of `model` itself first where it has one."""
    groups: dict[int, _Group] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # torch 2.11 may know one group a module, later versions several.
            several = hasattr(state, "_fsdp_param_groups")
            for fsdp in (
                state._fsdp_param_groups if several else filter(None, [state._fsdp_param_group])
            ):
                groups.setdefault(id(fsdp), _Group(module, fsdp))
    return list(groups.values())
