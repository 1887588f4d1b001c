"""Gradient accumulation under FSDP2, on the shard groups that accelerate has created.

accelerate creates a shard group for each decoder layer, for the embedding, for the head (one for
both if they are tied), and for the rest, which is the final norm. docs/scaling.md describes when a
group is gathered and reduced. Either once a step (ZeRO-2): each rank accumulates unsharded
gradients. Or for each use (ZeRO-3): microbatches accumulate in the shards, in dtype `kept`.

In both cases the sums are `unsharded_accumulated_grad` of FSDP2, which adds to them and reduces
them. `Sharding` decides where they are stored: gathered parameters have a `main_grad`, which matrix
products add to. With ZeRO-3 all groups share one memory, because only one group at a time is in its
backward.

FSDP2 returns gradients in the parameter's dtype. That would round the FP32 sums of BF16 weights.
`kept` is the dtype to return instead. With FP32, BF16 shards and their remainder bits (`weights:
bf16_exact`) get the same updates as in one process.

This file uses private attributes of FSDP2's groups and parameters, which exist in torch 2.11 to
2.13.
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

from pretrain.model.gradients import (
    Summed,
    attach_sums,
    empty_sums,
    sum_rows_in_fp32,
    values_of_sums,
)


def part_from_first(values: Tensor | None, parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """Shard the first rank's `values` like `parameter` and return this process's part.

    On the first rank `values` has the full shape of `parameter` and dtype `dtype`. The other ranks
    pass None. Collective.
    """
    device = torch.device(parameter.device_mesh.device_type)
    if values is None:
        full = torch.empty(parameter.shape, dtype=dtype, device=device)
    else:
        full = values.to(device)
    return distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep the parameters outside of decoder layers gathered: embedding, final norm and head.

    For calls that bypass the forward of the prepared `model` and its hooks, such as generation. Has
    no effect without FSDP2. Collective.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if not isinstance(module, GradientCheckpointingLayer):
            module.unshard()
    try:
        yield
    finally:
        # Layers may have stayed gathered after their forward.
        for module in sharded:
            module.reshard()


@dataclass
class _Group:
    """Parameters that are gathered and reduced together."""

    module: FSDPModule  # one of the modules of the group
    fsdp: Any  # torch's FSDPParamGroup
    sums: Tensor | None = None  # memory of the main gradients
    shares_memory: bool = False  # with other groups

    @property
    def trained(self) -> list[Any]:
        """The FSDPParam of torch for each trained parameter."""
        return [param for param in self.fsdp.fsdp_params if param.sharded_param.requires_grad]

    @property
    def is_accumulating(self) -> bool:
        """True if the main gradients hold values that are not reduced yet."""
        return any(param.unsharded_accumulated_grad is not None for param in self.trained)


class Sharding:
    """Main gradients and their reduction for one model that accelerate has sharded.

    Create it once, after `accelerator.prepare`. All methods are collective.

    Args:
        model: The prepared model.
        kept: Dtype of the reduced gradients in the shards.
        stacks: Parameters of the sharded model that are the rows of one matrix; see
            `attach_main_gradients`.
        once_a_step: Gather and reduce once a step (ZeRO-2) instead of for each use (ZeRO-3).
    """

    def __init__(
        self,
        model: nn.Module,
        kept: torch.dtype,
        stacks: Sequence[Sequence[Summed]],
        *,
        once_a_step: bool,
    ) -> None:
        self.once_a_step = once_a_step
        self._model: Any = model
        self._kept = kept
        # A fused layer returns a view of its result. torch warns because a layer might write into
        # its input, and no layer does.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        self._groups = _groups_of(model)
        for number, group in enumerate(self._groups):
            # The backward of the root and of a tied embedding overlaps with that of others.
            is_root = number == 0 and group.module is model
            group.shares_memory = not (once_a_step or is_root or len(group.fsdp.modules) > 1)
        self._attach(stacks)
        for group in self._groups:
            for module in group.fsdp.modules:
                module.register_forward_hook(partial(self._after_forward, group))
        model.register_forward_hook(self._after_model)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients of a microbatch that is not the last of its step."""
        model = self._model
        if self.once_a_step:
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
        else:
            # Replicas of shards exchange their sums once a step.
            model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)

    def discard_partial_gradients(self) -> None:
        """Discard sums that are not reduced, and reshard.

        A backward leaves such sums if it fails or is not the last of its step.
        """
        for group in self._groups:
            for param in group.fsdp.fsdp_params:
                param.unsharded_accumulated_grad = None
                param._unsharded_param.grad = None
        self._reshard()

    def _reshard(self) -> None:
        for group in self._groups:
            group.module.reshard()

    def _attach(self, stacks: Sequence[Sequence[Summed]]) -> None:
        """Give each gathered parameter a main gradient.

        A gathered parameter is the same object every time that it is gathered.
        """
        shared = None
        sharing = [group for group in self._groups if group.shares_memory]
        if sharing:
            values = max(
                values_of_sums(p.sharded_param for p in group.trained) for group in sharing
            )
            device = sharing[0].trained[0].sharded_param.device
            shared = torch.empty(values, dtype=torch.float32, device=device)
        for group in self._groups:
            trained = group.trained
            group.module.unshard()
            gathered_of = {id(param.sharded_param): param._unsharded_param for param in trained}
            rows = [
                [gathered_of[id(parameter)] for parameter in stack]
                for stack in stacks
                if id(stack[0]) in gathered_of
            ]
            if trained:
                memory = shared if group.shares_memory else None
                group.sums = attach_sums(list(gathered_of.values()), torch.float32, rows, memory)
            for param in trained:
                param.sharded_param.grad_dtype = None  # accepts gradients of any dtype
                for module in (param._module_info.module, *param._module_info.shared_modules):
                    if isinstance(module, nn.Embedding):
                        sum_rows_in_fp32(module)
            group.module.reshard()

    def _after_forward(self, group: _Group, module: nn.Module, inputs: Any, output: Any) -> None:
        """Register `_before_backward` on the outputs of a group's forward.

        FSDP2 prepares its backward in the same way: a hook on an output runs before everything else
        in the group's backward.
        """
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._before_backward(group))

    def _before_backward(self, group: _Group) -> None:
        """Empty a group's main gradients and pass them to FSDP2, at the first use in a step."""
        group.fsdp._orig_dtype = self._kept
        # The sums may come from an earlier microbatch or from another module of the group.
        if group.is_accumulating or group.sums is None:
            return
        if group.shares_memory and any(
            other.shares_memory and other.is_accumulating for other in self._groups
        ):
            raise RuntimeError(
                "FSDP2: the backward of a shard group began before that of another group had "
                "ended, and both use the same memory"
            )
        empty_sums(group.sums)
        for param in group.trained:
            param.unsharded_accumulated_grad = param._unsharded_param.main_grad

    def _after_model(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Reshard after a forward without gradients.

        No backward will reshard, and the weights may be changed next.
        """
        if not torch.is_grad_enabled():
            self._reshard()


def _groups_of(model: nn.Module) -> list[_Group]:
    """Return the shard groups of `model` without repetition, that of `model` itself first."""
    groups: dict[int, _Group] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # A module has one group in torch 2.11 and may have several in later versions.
            has_list = hasattr(state, "_fsdp_param_groups")
            param_groups = state._fsdp_param_groups if has_list else [state._fsdp_param_group]
            for fsdp in filter(None, param_groups):
                groups.setdefault(id(fsdp), _Group(module, fsdp))
    return list(groups.values())
