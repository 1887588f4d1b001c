"""Accelerate, set up: it owns processes, devices, sharding and gradient synchronisation, and converts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import InputError

M = TypeVar("M", bound=nn.Module)


def make_accelerator(replicas: int = 1) -> Accelerator:
    """The Accelerator of this process, in no precision of its own; the environment is as `settings.launch_topology` leaves it.

    `replicas`: under FSDP2, so many times the parameters are held, each time sharded over the processes of one replica (HSDP).
    InputError where several processes were launched but do not form a group: accelerate would train that many copies.
    """
    # Views into the communication buckets spare a copy of all gradients.
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    try:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[views])
    except (ValueError, LookupError, TypeError, ImportError, AssertionError) as error:
        raise InputError(f"accelerate configuration: accelerate does not take it: {' '.join(str(error).split())[:300]}") from None
    if launched != accelerator.num_processes:
        raise InputError(
            f"accelerate configuration: {launched} processes were launched but each runs alone (accelerate sees "
            f"{accelerator.num_processes}). On CPUs use `distributed_type: MULTI_GPU` and set ACCELERATE_USE_CPU=true"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and accelerator.distributed_type != DistributedType.FSDP:
        _enable_fsdp(accelerator)
    if replicas > 1:  # after FSDP2, without which accelerate refuses them
        _set_replicas(accelerator, replicas)
    return accelerator


def prepare(
    accelerator: Accelerator, model: M, optimizer: torch.optim.Optimizer, compute_dtype: torch.dtype
) -> tuple[M, torch.optim.Optimizer]:
    """The model wrapped for this topology and the optimizer over its (perhaps sharded) parameters.

    Under FSDP2, parameters are gathered in `compute_dtype` and gradients are summed over ranks in FP32.
    """
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    model, wrapped = accelerator.prepare(model, optimizer)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # The buffers are constants made from the config. Set here, as the argument of that name warns from torch 2.13 on.
        model.broadcast_buffers = False
    return model, wrapped.optimizer


def accumulating(accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    """For every microbatch of a step but the last: DistributedDataParallel then sums gradients over ranks once a step. FSDP2 sums
    them after each microbatch all the same: waiting would hold the whole model's gradients, unsharded and in FP32."""
    return nullcontext() if accelerator.is_fsdp2 else accelerator.no_sync(model)


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, the same on all ranks, laid out as `parameter` is: a DTensor where that is one."""
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; FSDP2 changes a module in place and wraps nothing."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Under FSDP2, hold whole what no decoder layer owns: embedding, final norm, head. Collective; elsewhere it does nothing.

    For calls that go past the forward of the prepared `model`, whose own hooks would do it, such as generation.
    """
    groups = [m for m in model.modules() if isinstance(m, FSDPModule) and not isinstance(m, GradientCheckpointingLayer)]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


def device_of(accelerator: Accelerator) -> tuple[str, int]:
    """Name and bytes of memory of the device that this process trains on; processes on CPUs share the machine's memory evenly."""
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        return properties.name, properties.total_memory
    return "CPU", psutil.virtual_memory().total // accelerator.num_processes


def describe_topology(accelerator: Accelerator) -> dict[str, Any]:
    """What accelerate set up, for the run's environment file."""
    replicas = replicas_of(accelerator)
    return {
        "distributed_type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "sharded": accelerator.is_fsdp2,
        **({"replicas": replicas} if replicas > 1 else {}),
    }


def replicas_of(accelerator: Accelerator) -> int:
    """How many times the sharded parameters are held; 1 where they are not sharded."""
    return accelerator.parallelism_config.dp_replicate_size if accelerator.parallelism_config else 1


def full_state_dict(accelerator: Accelerator, model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The parameters and persistent buffers of the prepared `model` under `prefix`, whole, on the main process; collective."""
    state_dict = accelerator.get_state_dict(model)
    return {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}


def _enable_fsdp(accelerator: Accelerator) -> None:
    """Turn FSDP2 on where the launch asked for it but accelerate chose plain DDP, as it does for CPU processes."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _set_replicas(accelerator: Accelerator, replicas: int) -> None:
    """Lay the processes out as `replicas` of equally many shards each; the processes of a replica follow each other."""
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=accelerator.num_processes // replicas)
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def largest_over_ranks(accelerator: Accelerator, value: int) -> int:
    """The largest of the ranks' values, the same on all of them, so that all leave a loop together."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def same_on_all_ranks(accelerator: Accelerator, *figures: Tensor) -> list[float]:
    """The first rank's scalars, as numbers on every rank: what is decided by them is decided alike. Waits for the device."""
    stacked = torch.stack([figure.to(accelerator.device) for figure in figures])
    if accelerator.num_processes > 1:
        torch.distributed.broadcast(stacked, src=0)
    return stacked.tolist()
