"""Set up Accelerate and its topology, place the model on devices, and exchange small values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import psutil
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import InputError, as_input_error
from pretrain.launch.environment import is_true, with_topology
from pretrain.settings.recipe import Recipe

T = TypeVar("T")
# Timeout of a collective: the maximum time for which ranks wait for a rank that saves or exports.
RANKS_WAIT = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
_explaining_accelerate = partial(
    as_input_error,
    (ValueError, LookupError, TypeError, ImportError, AssertionError),
    "Accelerate configuration: Accelerate does not accept it",
)


# ── The Accelerator and its topology ──


def as_launched(recipe: Recipe) -> tuple[Accelerator, tuple[str, ...]]:
    """Return the Accelerator for the launched processes, and notices about corrected settings.

    The notices are about settings of Accelerate's configuration that this project replaces.
    """
    multiply_in_ieee_fp32()
    if recipe.deterministic:
        compute_in_a_fixed_order()
    replicas, notices = with_topology(os.environ, has_gpu=torch.accelerator.is_available())
    check_offload(recipe, os.environ)
    if "WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        # torchrun has not connected the ranks yet. This waits for a rank that was never started.
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, ranks, address, port = map(os.environ.get, names)
        print(f"rank {rank} waits for all {ranks} ranks at {address}:{port}", flush=True)
    with _explaining_accelerate():
        # Mixed precision is off, because this project converts the linear layers itself.
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[RANKS_WAIT])
    complete_topology(accelerator, replicas)
    return accelerator, notices


def multiply_in_ieee_fp32() -> None:
    """Turn off TF32 and BF16 in torch's FP32 matrix products, whatever the environment says.

    Raises InputError if NVIDIA_TF32_OVERRIDE turns on TF32, because cuBLAS reads this variable.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        raise InputError(
            "NVIDIA_TF32_OVERRIDE: this environment variable would round the operands of FP32 "
            "matrix products to TF32; unset it"
        )
    torch.set_float32_matmul_precision("highest")


def check_offload(recipe: Recipe, environ: Mapping[str, str]) -> None:
    """Raise InputError if FSDP2 stores in host memory the parameters that Muon updates.

    Muon orthogonalizes matrices on the device of the parameters, which would then be the CPU.

    environ: The environment variables, as `with_topology` has corrected them.
    """
    offloads = is_true(environ, "ACCELERATE_USE_FSDP") and is_true(environ, "FSDP_OFFLOAD_PARAMS")
    if offloads and recipe.optimizer.name == "muon":
        raise InputError(
            "Accelerate configuration: `fsdp_offload_params: true` needs AdamW, because Muon would "
            "orthogonalize its matrices on the CPU; set `fsdp_offload_params: false`, or "
            "`optimizer.name: adamw`"
        )


def compute_in_a_fixed_order() -> None:
    """Make results on a GPU reproducible bit for bit, for `deterministic: true`.

    Call this function before the GPU is used, because cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it
    starts. This function turns on torch's deterministic mode. Four computations of this project
    read this mode: the gradients of embedding tables, the backward of FlashAttention-4, the search
    for the fastest algorithm of a matrix product, and compiled reductions.
    docs/developers/distributed.md lists everything that reproducible runs need.
    """
    # The value is the workspace size that torch uses on Hopper.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Do not fill every new tensor with a constant, as torch does by default in deterministic mode.
    # The program writes all values before it reads them. mypy does not know that the attribute is a
    # property of the module's class.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def complete_topology(accelerator: Accelerator, replicas: int) -> None:
    """Set up FSDP2 on CPUs, and HSDP. Accelerate does not set up either of them.

    Args:
        accelerator: The run's Accelerator, changed in place.
        replicas: Number of copies of the parameters under FSDP2. Each copy is sharded over the
            processes of one replica (HSDP).

    Raises:
        InputError: Several processes were launched but do not form a process group. Accelerate
            would train an independent model in each process.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    count = accelerator.num_processes
    if launched != count:
        raise InputError(
            f"Accelerate configuration: {launched} processes were launched but each runs alone "
            f"(Accelerate uses {count}); for CPUs, set `distributed_type: MULTI_GPU` in the "
            "configuration and ACCELERATE_USE_CPU=true in the environment"
        )
    state = accelerator.state
    wants_fsdp = is_true(os.environ, "ACCELERATE_USE_FSDP")
    if wants_fsdp and accelerator.distributed_type != DistributedType.FSDP:
        # Accelerate has chosen DDP, as it always does for processes on CPUs.
        with _explaining_accelerate():
            state.fsdp_plugin = FullyShardedDataParallelPlugin()
            state.distributed_type = DistributedType.FSDP
            # All instances of this class have the same attributes.
            PartialState().distributed_type = DistributedType.FSDP
    if replicas > 1:
        # Set the number of replicas only after FSDP2 has been set, because Accelerate rejects
        # replicas without FSDP2. The processes of a replica have consecutive ranks.
        state.parallelism_config = ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=count // replicas
        )
        state.device_mesh = state.parallelism_config.get_device_mesh(accelerator.device.type)


def end_process_group(accelerator: Accelerator) -> None:
    """Drop Accelerate's references to the model and end the process group, if there is one.

    Under FSDP2, a process is aborted if its process group ends while a model exists. So no variable
    of a running function may refer to the model or its optimizer: build and use them in a function
    that has returned. All ranks must call this function.
    """
    if accelerator.num_processes == 1:
        return
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def gathers_once_a_step(accelerator: Accelerator) -> bool:
    """Return True if FSDP2 is configured to gather parameters once a step, and False otherwise."""
    return accelerator.is_fsdp2 and not accelerator.state.fsdp_plugin.reshard_after_forward


def replicas_of(accelerator: Accelerator) -> int:
    """Return the number of copies of the sharded parameters. It is 1 without sharding."""
    return accelerator.parallelism_config.dp_replicate_size if accelerator.parallelism_config else 1


def device_of(accelerator: Accelerator) -> tuple[str, int]:
    """Return the name of this process's device, and the memory for this process in bytes.

    For processes on CPUs, the memory of the machine is divided by the number of processes.
    """
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        return properties.name, properties.total_memory
    return "CPU", psutil.virtual_memory().total // accelerator.num_processes


def processes_on_host() -> int:
    """Return the number of processes on this host, from the variable that torchrun sets."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def describe_topology(accelerator: Accelerator) -> dict[str, Any]:
    """Return the topology of the run as a dict for environment.json."""
    topology = {
        "distributed_type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "sharded": accelerator.is_fsdp2,
        "replicas": replicas_of(accelerator),
    }
    if accelerator.is_fsdp2:
        topology["gathered"] = "once a step" if gathers_once_a_step(accelerator) else "for each use"
    return topology


def shard(
    accelerator: Accelerator, model: nn.Module, compute_dtype: torch.dtype, *, once_a_step: bool
) -> Any:
    """Shard `model` by FSDP2 in place, and return it. Its parameters then have no values.

    Parameters are gathered in `compute_dtype`, and gradients are summed over ranks in FP32. Build
    the optimizer of the shards after this call.

    A run without FSDP2 builds the model on its device and does not call `accelerator.prepare`.
    `prepare` would wrap the model in DistributedDataParallel, which sums gradients in the dtype of
    the parameters. `RankSums` of pretrain.model.gradients sums them in FP32 instead.

    Args:
        accelerator: The run's Accelerator.
        model: The model, on the meta device or not.
        compute_dtype: Dtype of gathered parameters.
        once_a_step: True to gather once a step (ZeRO-2), False to gather for each use (ZeRO-3).
    """
    plugin = accelerator.state.fsdp_plugin
    plugin.reshard_after_forward = not once_a_step
    # Make one shard group of each decoder layer. By default, Accelerate reads the layer classes
    # from the model. PackedLanguageModel does not define them, so Accelerate would gather all
    # layers at the same time.
    layers = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    }
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = sorted(layers)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Accelerate shards a model only together with an optimizer. The optimizer of the run cannot be
    # used, because Accelerate finds the shard of a parameter by its address, but parameters on the
    # meta device have no address.
    sharded, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    device = torch.device("cpu") if offloads else accelerator.device
    sharded._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Use a plain sum. By default, FSDP2 may sum values that it has multiplied by a factor.
            module.set_force_sum_reduction_for_comms(True)
    return sharded


# ── Agreement between processes ──


def from_all_ranks(item: T) -> list[T]:
    """Return a list of the `item` of each rank, in the order of ranks.

    The items should be small objects, because they are pickled. All ranks must call this function.
    """
    if not torch.distributed.is_initialized():
        return [item]
    items: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items


def largest_over_ranks(accelerator: Accelerator, value: int) -> int:
    """Return the largest `value` of all ranks. All ranks must call this function."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def raise_on_all_ranks(function: Callable[[], T]) -> T:
    """Call `function` on all ranks and return its result.

    All ranks must call this function. If `function` raises InputError on any rank, all ranks raise
    InputError with the message of the first of these ranks. Without this exchange, only the failing
    rank would stop, and the other ranks would wait for it in their next collective.
    """
    result = None
    refusal = None
    try:
        result = function()
    except InputError as error:
        refusal = str(error)
    for message in from_all_ranks(refusal):
        if message is not None:
            raise InputError(message)
    return cast(T, result)


@torch.no_grad()
def take_from_first_rank(accelerator: Accelerator, tensors: Iterable[Tensor]) -> None:
    """Overwrite contiguous `tensors` with the tensors of the first rank.

    All ranks must call this function. Use it for values that may differ between ranks, for example
    because the files and libraries of their machines differ.
    """
    if accelerator.num_processes > 1:
        for tensor in tensors:
            # Send bytes, because NCCL does not send all dtypes, such as int16.
            torch.distributed.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)
