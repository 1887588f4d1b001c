"""Faults of sharded runs: in their gathers, their codes and the reduction of their gradients.

All ranks enter each fault. The faults of a rank change only the second rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from pretrain.model.distributed import complete_topology, from_all_ranks
from pretrain.model.sharding import Sharding, _Group
from pretrain.precision import delayed_state, emulation
from pretrain.precision.emulation import BothWays, EmulatedGemm
from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import Gemm
from tests.pretrain.verify import faults
from tests.pretrain.verify.faults import Make, Patch, delayed, faults_in, patching, quantized
from tests.pretrain.verify.patched_faults import after_update
from tests.pretrain.verify.small_runs import SmallRun, build_run

FAULTS: list[faults.Fault] = []


REGISTER = {"weights": ("bf16_exact",), "registry": FAULTS}
fault = partial(faults.fault, **REGISTER)


def find_faults(layers: int = 2) -> None:
    """Print the checks that catch each fault, by fault and precision, and also without a fault."""
    accelerator = Accelerator(mixed_precision="no")
    complete_topology(accelerator, 1)
    found: dict[str, dict[str, Sequence[str]]] = {}
    for precision in sys.argv[1:]:
        histories: list[Tensor] = []
        for fault in (None, *FAULTS):
            run = build_run(
                accelerator, precision, layers=layers, weights="bf16_exact", histories=histories
            )
            histories = histories or run.packed.context.copied_state()
            if fault is None or fault.applies(run):
                what = fault.what if fault else "nothing"
                found.setdefault(what, {})[precision] = faults.caught_by(
                    run, fault, confirms=False, anywhere=lambda here: any(from_all_ranks(here))
                )
    # One write: both ranks write at the same time.
    os.write(1, f"FOUND {json.dumps(found)}\n".encode())
    accelerator.end_training()


def group_of(run: SmallRun, name: str) -> _Group:
    """Return the shard group of the parameter whose name ends with `name`."""
    (parameter,) = (
        parameter for key, parameter in run.packed.named_parameters() if key.endswith(name)
    )
    (group,) = (
        group
        for group in run.packed.sharding._groups
        if any(param.sharded_param is parameter for param in group.fsdp.fsdp_params)
    )
    return group


def layer_of(run: SmallRun) -> _Group:
    """Return the shard group of the first decoder layer."""
    return group_of(run, "layers.0.mlp.down_proj.weight")


# ── Reductions ──────────────────────────────────────────────────────────────────────────


# Writes the sums over all ranks to its argument.
Reduce = Callable[[Tensor], None]


def changing_reduction(
    patch: Patch, group: _Group, change: Callable[[Reduce, Tensor, Tensor], None]
) -> None:
    """Replace the reduction of a group by `change(reduce, output, input)`."""
    real = group.fsdp._reduce_scatter_comm

    class Changed:
        allocate = real.allocate

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any
        ) -> None:
            def reduce(output: Tensor) -> None:
                real(output_tensor=output, input_tensor=input_tensor, group=group, op=op)

            change(reduce, output_tensor, input_tensor)

    patch.setattr(group.fsdp, "_reduce_scatter_comm", Changed())


@fault("a shard group's last reduction is lost")
def reduction_dropped(run: SmallRun, patch: Patch) -> None:
    group = layer_of(run)
    accelerator = run.accelerator

    def own_part(reduce: Reduce, output: Tensor, sums: Tensor) -> None:
        # Replicas exchange gradients only in the last microbatch.
        if group.fsdp.all_reduce_grads:
            output.copy_(sums.view(accelerator.num_processes, -1)[accelerator.process_index])
        else:
            reduce(output)

    changing_reduction(patch, group, own_part)


@fault("a shard group is cleared too early")
@patching(Sharding, "_before_backward")
def cleared_too_often(run: SmallRun, real: Any, sharding: Sharding, group: _Group) -> None:
    real(sharding, group)
    if run.packed in group.fsdp.modules:
        for sums in group.cleared:
            sums.zero_()


@fault("the embedding is reduced twice")
def reduced_twice(run: SmallRun, patch: Patch) -> None:
    def twice(reduce: Reduce, output: Tensor, sums: Tensor) -> None:
        reduce(output)
        second = torch.empty_like(output)
        reduce(second)
        output.add_(second)

    group = group_of(run, "embed_tokens.weight")
    changing_reduction(patch, group, twice)


def changing_foreach_reduce(change: Callable[[list[Any]], None]) -> Make:
    """Return a fault that changes the arguments of FSDP2's reduction of a group."""

    @patching(_fsdp_param_group, "foreach_reduce")
    def make(run: SmallRun, real: Any, *arguments: Any) -> Any:
        changeable = list(arguments)
        change(changeable)
        return real(*changeable)

    return make


@fault(
    "gradients are reduced in BF16", lambda run: run.packed.context.compute_dtype == torch.bfloat16
)
@changing_foreach_reduce
def reduced_in_bf16(arguments: list[Any]) -> None:
    arguments[6] = torch.bfloat16


@fault("gradients are rounded before their reduction", quantized)
@changing_foreach_reduce
def rounded_before_reduction(arguments: list[Any]) -> None:
    arguments[1] = [gradient.bfloat16().float() for gradient in arguments[1]]


# ── Gathers ─────────────────────────────────────────────────────────────────────────────


@fault("gathered weights are freed too early", quantized)
def freed_too_early(run: SmallRun, patch: Patch) -> None:
    group = layer_of(run)
    run.layers[0].register_forward_pre_hook(lambda *_: group.free_quantized())


@fault("gathered weights are stale")
def not_gathered_again(run: SmallRun, patch: Patch) -> None:
    group = group_of(run, "embed_tokens.weight")
    unshard = group.fsdp.unshard
    stored: list[Tensor] = []

    def stale(*arguments: Any, **options: Any) -> Any:
        unshard(*arguments, **options)
        group.fsdp.wait_for_unshard()
        weight = group.fsdp.fsdp_params[0].unsharded_param.data
        if not stored:
            stored.append(weight.clone())
        weight.copy_(stored[0])

    patch.setattr(group.fsdp, "unshard", stale)


# ── Codes ───────────────────────────────────────────────────────────────────────────────


@fault("codes are stale", quantized)
def codes_not_renewed(run: SmallRun, patch: Patch) -> None:
    updated: list[int] = []
    after_update(run, patch, updated.append)

    @patching(Gemm, "weight_operand")
    def stale(
        run: SmallRun, real: Callable[..., Any], *arguments: Any, refresh: bool, **options: Any
    ) -> Any:
        return real(*arguments, refresh=refresh and not updated, **options)

    stale(run, patch)


# The scale of a weight whose largest value was larger by a tenth
faults_in(emulation, delayed, **REGISTER)("""
a rank's codes have an old scale
- with self._engine.without_autocast():
+ if role == "weight" and torch.distributed.get_rank() == 1:
+     scale = scale / 1.1
+ with self._engine.without_autocast():
""")


@fault("a rank's codes are shifted", quantized)
@patching(EmulatedGemm, "quantize")
def shifted_codes(
    run: SmallRun,
    real: Callable[..., BothWays],
    gemm: EmulatedGemm,
    role: Role,
    *arguments: Any,
    **options: Any,
) -> BothWays:
    operand = real(gemm, role, *arguments, **options)
    is_first = gemm.name == next(iter(run.packed.context.engine.gemms))
    if role != "weight" or not is_first or run.accelerator.process_index != 1:
        return operand
    features, rows = operand.features, operand.rows
    # An evaluation needs only one form.
    if rows is not None:
        rows = rows._replace(values=rows.values.roll(1, 1))
    return operand._replace(
        features=features._replace(values=features.values.roll(1, 0)), rows=rows
    )


faults_in(delayed_state, delayed, **REGISTER)("""
amaxes are not reduced
- if dist.is_initialized():
+ if False:
""")
