"""Accelerate, set up, and the model that it places on devices; it converts nothing. And processes that agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import InputError
from foundation.reading import refusing
from pretrain.settings.launch import with_topology
from pretrain.settings.recipe import Recipe

T = TypeVar("T")
# How long ranks wait in a collective for one that hangs or does what takes long: a save, an export.
RANKS_WAIT = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
_REFUSED = (ValueError, LookupError, TypeError, ImportError, AssertionError)
_explaining_accelerate = partial(
    refusing, _REFUSED, "accelerate configuration: accelerate does not take it"
)


# ── What accelerate sets up, and what it leaves out ─────────────────────────────────────────────────────────────────────────────


def as_launched(recipe: Recipe) -> tuple[Accelerator, tuple[str, ...]]:
    """The Accelerator of a launch, set up as `recipe` wants it, and notices of what was corrected in the launch."""
    if recipe.deterministic:
        compute_in_a_fixed_order()
    launch = with_topology(os.environ, has_gpu=torch.accelerator.is_available())
    with _explaining_accelerate():  # in no precision of its own: the linears are converted later
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[RANKS_WAIT])
    complete_topology(accelerator, launch.replicas, gathers_as_fits=launch.gathers_as_fits)
    return accelerator, launch.notices


def compute_in_a_fixed_order() -> None:
    """`deterministic: true`: on a GPU too, the same bits from every run of one recipe (docs/training.md has all that it takes).
    Called before anything is on a GPU, as cuBLAS reads the environment then. Tables' gradients, searched products and compiled
    reductions ask torch whether it is so."""
    # as large as what torch takes by itself on Hopper
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # it costs a pass over all new memory, and here all is written
    torch.utils.deterministic.fill_uninitialized_memory = False


def complete_topology(
    accelerator: Accelerator, replicas: int = 1, *, gathers_as_fits: bool = False
) -> None:
    """Set up of the launched topology what accelerate leaves out: FSDP2 on CPUs, HSDP, shards gathered as memory allows.

    `replicas`: under FSDP2, so many times the parameters are held, each time sharded over the processes of one replica (HSDP).
    `gathers_as_fits`: the plan says whether shards are gathered once a step or for each use.
    InputError where several processes were launched but do not form a group: accelerate would train that many copies.
    """
    launched, count = int(os.environ.get("WORLD_SIZE", "1")), accelerator.num_processes
    if launched != count:
        raise InputError(
            f"accelerate configuration: {launched} processes were launched but each runs alone (accelerate sees {count}). On "
            "CPUs use `distributed_type: MULTI_GPU` and set ACCELERATE_USE_CPU=true"
        )
    state = accelerator.state
    if (
        os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        and accelerator.distributed_type != DistributedType.FSDP
    ):
        with _explaining_accelerate():  # it has chosen DDP, as it does for processes on CPUs
            state.fsdp_plugin = FullyShardedDataParallelPlugin()
            state.distributed_type = PartialState._shared_state["distributed_type"] = (
                DistributedType.FSDP
            )
    # after FSDP2, without which accelerate refuses them; the processes of a replica follow each
    # other
    if replicas > 1:
        state.parallelism_config = ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=count // replicas
        )
        state.device_mesh = state.parallelism_config.get_device_mesh(accelerator.device.type)
    if accelerator.is_fsdp2 and gathers_as_fits:
        state.fsdp_plugin.reshard_after_forward = None


def end_processes(accelerator: Accelerator) -> None:
    """Free the model, then end the process group: under FSDP2, ending it first was seen to abort its process. Collective."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def gathers_once_a_step(accelerator: Accelerator) -> bool | None:
    """Whether FSDP2 was asked to gather once a step; None: as the memory planned allows. False without FSDP2."""
    reshards = accelerator.state.fsdp_plugin.reshard_after_forward if accelerator.is_fsdp2 else True
    return None if reshards is None else not reshards


def replicas_of(accelerator: Accelerator) -> int:
    """How many times the sharded parameters are held; 1 where they are not sharded."""
    return accelerator.parallelism_config.dp_replicate_size if accelerator.parallelism_config else 1


def device_of(accelerator: Accelerator) -> tuple[str, int]:
    """Name and bytes of memory of the device that this process trains on; processes on CPUs share the machine's memory evenly."""
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        return properties.name, properties.total_memory
    return "CPU", psutil.virtual_memory().total // accelerator.num_processes


def describe_topology(accelerator: Accelerator) -> dict[str, Any]:
    """What accelerate set up, for the run's environment file."""
    topology = {
        "distributed_type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
    }
    topology |= {
        "device": accelerator.device.type,
        "sharded": accelerator.is_fsdp2,
        "replicas": replicas_of(accelerator),
    }
    if accelerator.is_fsdp2:
        topology["gathered"] = "once a step" if gathers_once_a_step(accelerator) else "for each use"
    return topology


@contextmanager
def sharded_as_planned(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_dtype: torch.dtype,
    *,
    once_a_step: bool,
) -> Iterator[None]:
    """`accelerator.prepare(model, optimizer)` within this shards the model by FSDP2, and leaves `optimizer` with the shards.

    Parameters are gathered in `compute_dtype`, `once_a_step` or for each use, and gradients are summed over ranks in FP32. A run
    without FSDP2 needs none of it: its model is built on its device. DistributedDataParallel, which accelerate would put around
    that, adds up in the parameters' dtype; `RankSums` of pretrain.model.gradients adds up in FP32.
    """
    plugin = accelerator.state.fsdp_plugin
    plugin.reshard_after_forward = not once_a_step
    # A group of each decoder layer, whatever was asked for. accelerate asks the model for the classes of its layers; ours is
    # around transformers' model and names none, and then all layers would be one group, gathered at once.
    layers = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    }
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = (
        transformer_auto_wrap_policy,
        sorted(layers),
    )
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        [names[parameter] for parameter in group["params"]] for group in optimizer.param_groups
    ]
    del names  # or FSDP2 could not free the whole parameters as it shards them
    yield
    stay_on = (
        torch.device("cpu")
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        else accelerator.device
    )
    model._apply(lambda each: torch.empty_like(each, device=stay_on) if each.is_meta else each)
    # accelerate finds an optimizer's parameters again by their address, and on the meta device they have none.
    shards = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [shards[name] for name in of_group]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # a plain sum, or it would be one of values times a factor
            module.set_force_sum_reduction_for_comms(True)


# ── Processes that agree ────────────────────────────────────────────────────────────────────────────────────────────────────────


def from_all_ranks(item: T) -> list[T]:
    """Returns what every rank passed, in the order of the ranks; small objects only. Collective."""
    if not torch.distributed.is_initialized():
        return [item]
    items: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items


def largest_over_ranks(accelerator: Accelerator, value: int) -> int:
    """The largest of the ranks' values, the same on all of them, so that all leave a loop together."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def refused_together(make: Callable[[], T]) -> T:
    """What `make` returns, which every process calls. Where it raises InputError on any of them, all raise the first one's: the
    others would wait for it where it never comes. Collective."""
    made, refusal = None, None
    try:
        made = make()
    except InputError as error:
        refusal = str(error)
    if refusals := [each for each in from_all_ranks(refusal) if each is not None]:
        raise InputError(refusals[0])
    return made


@torch.no_grad()
def take_from_first_rank(accelerator: Accelerator, tensors: Iterable[Tensor]) -> None:
    """Overwrite `tensors`, contiguous, by the first rank's: other machines' files or libraries may differ. Collective."""
    if accelerator.num_processes > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)
