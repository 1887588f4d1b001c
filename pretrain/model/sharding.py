"""Gradient accumulation under FSDP2, on the shard groups that Accelerate has created.

A shard group is a set of parameters that FSDP2 gathers together and whose gradients it reduces
together. Accelerate creates one shard group for each decoder layer, one for the embedding, one for
the head, and one for all other parameters, such as the weight of the final norm. If embedding and
head are tied, they are one shard group. docs/developers/distributed.md describes the two modes:

* ZeRO-2 gathers and reduces each group once a step. Each rank accumulates unsharded gradients over
  the microbatches of the step.
* ZeRO-3 gathers a group for each use, and reduces its gradients in each microbatch. The reduced
  gradients are accumulated in the shards, in the dtype `Sharding.reduced_dtype`. The
  groups of the final norm and of a tied embedding are gathered and reduced once a step, as in
  ZeRO-2.

In low precision, both modes gather a decoder layer only in the first microbatch of a step. This
microbatch quantizes the weights, and each process keeps the codes of all weights until the end of
the step (`Gemm.weight`). The gathered weights are freed after this forward, although FSDP2 still
treats the group as gathered. The next pass that reads weights gathers them again: the first
microbatch of the next step, or an evaluation.

In both modes, FSDP2 accumulates the unsharded gradient of a parameter in the tensor
`unsharded_accumulated_grad`, and reduces this tensor over ranks. `Sharding` allocates the tensor
and also makes it the `main_grad` of the gathered parameter, so that matrix products can add to it.
With ZeRO-3, the main gradients of all groups share the same memory, because only one group at a
time is in its backward. The only exceptions are groups whose backward overlaps with the backward of
other groups: each of them has separate memory.

FSDP2 returns reduced gradients in the dtype of the parameter, which would round the FP32 sums of
BF16 weights. `Sharding` changes the returned dtype to `reduced_dtype`. If it is FP32, BF16 shards
and their remainder bits (`weights: bf16_exact`) get the same updates as in one process.

This file uses private attributes of FSDP2's groups and parameters. These attributes exist in torch
2.11 to 2.14.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from pretrain.precision.product import UNQUANTIZED_MODEL
from pretrain.precision.scope import QUANTIZED_SHARE

# A value that BF16 cannot store. BF16 cannot store its multiples either.
NOT_BF16 = 1 + 2**-12


def part_from_first(values: Tensor | None, parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """Shard `values` of the first rank like `parameter`, and return the part of this process.

    On the first rank, `values` has the full shape of `parameter` and the dtype `dtype`. All other
    ranks pass None. All ranks must call this function.
    """
    device = torch.device(parameter.device_mesh.device_type)
    if values is None:
        full = torch.empty(parameter.shape, dtype=dtype, device=device)
    else:
        full = values.to(device)
    return distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local()


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Context manager that gathers the parameters outside of decoder layers.

    These are the parameters of the embedding, the final norm and the head. Use this context for
    calls that bypass the forward of the prepared `model` and its hooks, such as generation. These
    calls are unquantized. With ZeRO-2, decoder layers stay gathered until the context ends. The
    context has no effect without FSDP2. All ranks must call this function.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if not isinstance(module, GradientCheckpointingLayer):
            module.unshard()
    try:
        with model.context.using(UNQUANTIZED_MODEL):
            yield
    finally:
        # Reshard the decoder layers too, because they may still be gathered after their forward.
        for module in sharded:
            module.reshard()


@dataclass
class _Group:
    """Parameters that are gathered and reduced together."""

    fsdp: Any  # the FSDPParamGroup of torch
    # The first parameters of the stacks of a fused layer. The first product of a backward
    # overwrites the main gradient of a stack (`StackedPass.add_weight_gradient`).
    overwritten: list[Summed] = field(default_factory=list)
    # Memory of all other main gradients. It is cleared before a backward.
    cleared: list[Tensor] = field(default_factory=list)
    # True if main gradients of other groups use the same memory. FSDP2 reduces such a group in each
    # microbatch, and all other groups once a step.
    shares_memory: bool = False
    # FSDPParams of the weights that all engines of the run quantize. Empty if the group cannot keep
    # codes instead of weights (`Sharding._find_quantized`).
    quantized: list[Any] = field(default_factory=list)
    # True from `free_quantized` to `reshard`. FSDP2 still treats the freed weights as gathered.
    quantized_are_freed: bool = False

    @property
    def module(self) -> Any:
        """One of the group's modules. Its `unshard` and `reshard` affect only this group."""
        return self.fsdp.modules[0]

    @cached_property
    def trained(self) -> list[Any]:
        """List with the FSDPParam of torch for each trained parameter."""
        return [param for param in self.fsdp.fsdp_params if param.sharded_param.requires_grad]

    def reshard(self) -> None:
        """Free all gathered parameters through FSDP2, which then gathers them before their use."""
        self.module.reshard()
        self.quantized_are_freed = False

    def free_quantized(self) -> None:
        """Free the gathered weights that have been quantized, unless they have been freed.

        Their memory was allocated, written and read in the current stream, so the allocator may
        reuse it at once. FSDP2 frees gathered parameters in the same way.
        """
        if not self.quantized_are_freed:
            for param in self.quantized:
                param.all_gather_outputs[0].untyped_storage().resize_(0)
        self.quantized_are_freed = True


class Sharding:
    """Main gradients and their reduction for one model that Accelerate has sharded.

    Create one object for a model, after `distributed.shard`. All ranks must call all methods.

    Args:
        model: The prepared PackedLanguageModel.
        reduced_dtype: Dtype of the reduced gradients in the shards.
        stacks: Lists of parameters of the sharded model. The parameters of a list are the rows of
            one matrix; see `attach_main_gradients`.
        once_a_step: True for ZeRO-2, False for ZeRO-3.
    """

    def __init__(
        self,
        model: Any,
        reduced_dtype: torch.dtype,
        stacks: Sequence[Sequence[Summed]],
        *,
        once_a_step: bool,
    ) -> None:
        self.once_a_step = once_a_step
        self._model = model
        self._context = model.context
        self.reduced_dtype = reduced_dtype
        # Ignore a warning of torch: a fused layer returns a view of its result, and the next layer
        # could write into this view. The warning does not apply, because no layer writes into its
        # input.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups = _groups_of(model)
        for group in self._groups:
            # The group of the root, and the group of a tied embedding and head, do not share
            # memory, because their backward overlaps with the backward of other groups.
            is_root = model in group.fsdp.modules
            group.shares_memory = not (once_a_step or is_root or len(group.fsdp.modules) > 1)
            if group.shares_memory and isinstance(group.fsdp.modules[0], nn.Embedding):
                # The backward of an embedding does not read its table.
                group.module.set_unshard_in_backward(False)
        self._attach(stacks)
        self._find_quantized()
        if once_a_step:
            self._keep_memory()
        elif hasattr(model, "set_reduce_scatter_max_input_buffers"):
            # Since torch 2.13, the backward of a layer need not wait until the reduction of the
            # previous layer ends, and gathers need not wait for reductions. With codes, backward
            # gathers nothing.
            model.set_reduce_scatter_max_input_buffers(2)
            keeps_codes = any(group.quantized for group in self._groups)
            model.set_separate_reduce_scatter_group(not keeps_codes)
        for group in self._groups:
            for module in group.fsdp.modules:
                # FSDP2 gathers the group in a hook of its own, which must run later.
                module.register_forward_pre_hook(partial(self._before_forward, group), prepend=True)
                module.register_forward_hook(partial(self._after_forward, group))
        model.register_forward_hook(self._after_model)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context manager for a microbatch that is not the last of its step."""
        if self._groups[0].fsdp.device.type == "cuda":
            # By default, the streams that gather weights wait for the stream that calls the model.
            # They would become a part of a CUDA graph that is captured on this stream.
            self._model.set_post_optim_event(torch.cuda.current_stream().record_event())
        for group in self._groups:
            # A group with memory of its own is reduced in the last microbatch of a step.
            group.module.set_requires_gradient_sync(group.shares_memory, recurse=False)
            # If later microbatches read only codes, FSDP2 must still treat the group as gathered. A
            # pass without quantization reads all weights. It must not keep them beside the codes.
            uses_codes = self._context.quantizing and self._is_quantized(group)
            reshards = group.shares_memory and not uses_codes
            group.module.set_reshard_after_backward(reshards, recurse=False)
        # Replicas of the shards exchange all gradients in the last microbatch of a step.
        self._model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)
            self._model.set_reshard_after_backward(True)

    def discard_partial_gradients(self) -> None:
        """Discard sums that FSDP2 has not reduced yet, and reshard the parameters.

        Such sums remain if a backward has failed or was not the last of its step.
        """
        for group in self._groups:
            for param in group.fsdp.fsdp_params:
                param.unsharded_accumulated_grad = None
                param.unsharded_param.grad = None
            group.reshard()

    def stale_weights(self) -> list[str]:
        """Return the names of weights whose gathered values differ from the shards.

        Each rank gathers all weights, one group at a time, and compares its own part. All ranks
        must call this method between two steps.
        """
        stale = []
        for group in self._groups:
            # If FSDP2 treats the group as gathered, this call gathers nothing.
            group.module.unshard()
            for param in group.fsdp.fsdp_params:
                shard = param.sharded_param
                gathered_shard = distribute_tensor(
                    param.unsharded_param.detach(),
                    shard.device_mesh,
                    shard.placements,
                    src_data_rank=None,
                ).to_local()
                if not torch.equal(gathered_shard, shard.to_local().to(gathered_shard)):
                    stale.append(self._names[shard])
            group.reshard()
        return stale

    def rounded_gradients(self) -> list[str]:
        """Return the names of parameters whose gradients FSDP2 rounds when it reduces them.

        Each rank passes the value NOT_BF16 to FSDP2, as all gradients of the model. The real
        gradients are discarded. All ranks must call this method between two steps.
        """
        for group in self._groups:
            group.module.unshard()
            # Pass the main gradients to FSDP2, as the hook of a real backward does.
            self._before_backward(group)
            for param in group.trained:
                param.unsharded_param.main_grad.fill_(NOT_BF16)
                # FSDP2 would add the reduced gradient to an existing one.
                param.sharded_param.grad = None
            group.fsdp.post_backward()
        # Wait for the reductions.
        self._model._get_fsdp_state()._root_post_backward_final_callback()
        rounded = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad.to_local()
                parameter.grad = None
                # Without rounding, each value is a multiple of NOT_BF16, and so no BF16 value.
                if gradient.eq(gradient.bfloat16()).any():
                    rounded.append(name)
        return rounded

    def _is_quantized(self, group: _Group) -> bool:
        """Return True if the current precision quantizes the weights of a group."""
        return self._context.engine is not None and bool(group.quantized)

    def _caches_codes(self, group: _Group) -> bool:
        """Return True if the current forward caches the codes of a group's weights."""
        is_low = self._context.low_precision and torch.is_grad_enabled()
        return is_low and self._is_quantized(group)

    def _find_quantized(self) -> None:
        """Find the groups that can keep codes. FSDP2 must not reshard them after each forward.

        A group of several modules keeps its weights, because an embedding reads a tied table.
        """
        modules = dict(self._model.hf.named_modules())
        parameters = dict(self._model.hf.named_parameters())
        by_engine = []
        for engine in self._context.engines.values():
            names = [name for gemm in engine.gemms.values() for name in gemm.members]
            # Each forward of a Conv1D transposes the weight, and torch raises if it was freed.
            names = [name for name in names if not getattr(modules.get(name), "transposed", False)]
            by_engine.append(
                {parameters.get(f"{name}.weight", parameters.get(name)) for name in names}
            )
        weights = set.intersection(*by_engine) if by_engine else set()
        for group in self._groups:
            sizes = {param: param.sharded_param.numel() for param in group.fsdp.fsdp_params}
            quantized = [param for param in sizes if param.sharded_param in weights]
            share = sum(sizes[param] for param in quantized) / sum(sizes.values())
            if share >= QUANTIZED_SHARE and len(group.fsdp.modules) == 1:
                group.quantized = quantized
                group.module.set_reshard_after_forward(False, recurse=False)

    def _keep_memory(self) -> None:
        """Stop FSDP2 from freeing parameters that an engine of the run reads unquantized.

        CUDA graphs read gathered parameters at fixed addresses. Each step needs this memory anyway.
        """
        for group in self._groups:
            for param in group.fsdp.fsdp_params:
                if param not in group.quantized:
                    param.free_unsharded_param = lambda: None

    def _attach(self, stacks: Sequence[Sequence[Summed]]) -> None:
        """Give each gathered parameter a main gradient.

        The groups that share memory use `shared`, which suffices for the largest of them. It is
        sufficient to call this method once, because FSDP2 uses the same tensor object each time it
        gathers a parameter.
        """
        sizes = [
            values_of_sums(param.sharded_param for param in group.trained)
            for group in self._groups
            if group.shares_memory
        ]
        device = next(self._model.parameters()).device
        shared = torch.empty(max(sizes, default=0), dtype=torch.float32, device=device)
        for group in self._groups:
            group.module.unshard()
            if group.trained:
                _attach_to_group(group, stacks, shared if group.shares_memory else None)
            for module in self._model.modules():
                # The weights of other groups are sharded now.
                if isinstance(module, nn.Embedding) and not isinstance(module.weight, DTensor):
                    sum_rows_in_fp32(module)
            group.module.reshard()

    def _before_forward(self, group: _Group, module: nn.Module, inputs: Any) -> None:
        """Forward pre-hook that makes FSDP2 gather freed weights again if the forward reads them.

        The forwards after the first microbatch of a step read only codes.
        """
        reads_codes = self._caches_codes(group) and not self._context.first_microbatch
        if group.quantized_are_freed and not reads_codes:
            group.reshard()

    def _after_forward(self, group: _Group, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook that frees weights, and registers `_before_backward` on a group's outputs.

        A hook on an output runs before everything else in the group's backward. FSDP2 prepares its
        backward by such hooks too.
        """
        if self._caches_codes(group):
            group.free_quantized()
        elif self._is_quantized(group) or (group.quantized and not self.once_a_step):
            # FSDP2 does not reshard groups that can keep codes, so reshard the group here. In the
            # first case, the forward has read weights that a training forward would quantize, as in
            # an evaluation. In the second case, the current precision does not quantize the
            # weights. With `once_a_step`, such weights stay gathered.
            group.reshard()
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._before_backward(group))

    def _before_backward(self, group: _Group) -> None:
        """Prepare the main gradients of a group for its backward.

        If the group has not accumulated anything since its last reduction, clear its main gradients
        or mark them to be overwritten, and pass them to FSDP2 again.
        """
        # FSDP2 returns reduced gradients in this dtype.
        group.fsdp._orig_dtype = self.reduced_dtype
        # Do not clear sums that FSDP2 has not reduced yet. An earlier microbatch, or another module
        # of the group, has added to them.
        if not group.trained or group.trained[0].unsharded_accumulated_grad is not None:
            return
        for sums in group.cleared:
            empty_sums(sums)
        for weight in group.overwritten:
            weight.overwrites_main_grad = True
        for param in group.trained:
            param.unsharded_accumulated_grad = param.unsharded_param.main_grad

    def _after_model(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook that reshards the model after a forward without gradients.

        After such a forward no backward reshards the model, and the next operation may change the
        weights.
        """
        if not torch.is_grad_enabled():
            for group in self._groups:
                group.reshard()


def _attach_to_group(
    group: _Group, stacks: Sequence[Sequence[Summed]], memory: Tensor | None
) -> None:
    """Give each gathered parameter of a group, which must be gathered now, a main gradient.

    stacks: the stacks of the model, as in `Sharding`.
    memory: memory that other groups use too, or None to allocate memory for this group.
    """
    gathered_of = {id(param.sharded_param): param.unsharded_param for param in group.trained}
    gathered_stacks = [
        [gathered_of[id(parameter)] for parameter in stack]
        for stack in stacks
        if id(stack[0]) in gathered_of
    ]
    trained = list(gathered_of.values())
    group.cleared = [attach_sums(trained, torch.float32, gathered_stacks, memory)]
    if gathered_stacks:
        # The backward of a fused layer writes the gradients of all its stacked weights.
        group.overwritten = [stack[0] for stack in gathered_stacks]
        stacked = {id(parameter) for stack in stacks for parameter in stack}
        group.cleared = [gathered_of[key].main_grad for key in gathered_of.keys() - stacked]
    for param in group.trained:
        param.sharded_param.grad_dtype = None  # accepts gradients of any dtype
        if group.shares_memory:
            param.unsharded_param.shard = param.sharded_param


def _groups_of(model: nn.Module) -> list[_Group]:
    """Return the shard groups of `model`. Some groups have several modules."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = dict.fromkeys(module._get_fsdp_state()._fsdp_param_group for module in modules)
    return [_Group(fsdp) for fsdp in groups if fsdp is not None]
