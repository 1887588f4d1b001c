"""How a launch is set up."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator

from pretrain.model.distributed import RANKS_WAIT, complete_topology, explaining_accelerate
from pretrain.settings.launch import with_topology
from pretrain.settings.recipe import Recipe


def as_launched(recipe: Recipe) -> tuple[Accelerator, tuple[str, ...]]:
    """The Accelerator and the notices of a command that trains nothing."""
    if recipe.deterministic:
        compute_in_a_fixed_order()
    launch = with_topology(os.environ, has_gpu=torch.accelerator.is_available())
    with explaining_accelerate():
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[RANKS_WAIT])
    complete_topology(accelerator, launch.replicas, gathers_as_fits=launch.gathers_as_fits)
    return accelerator, launch.notices


def compute_in_a_fixed_order() -> None:
    """`deterministic: true`: on a GPU too, the same bits from every run of one recipe, stopped and resumed or not. Called before
    anything is on a GPU, as cuBLAS reads the environment then.

    Attention takes a kernel with a fixed order (`attention.choose`), torch its deterministic algorithms, cuBLAS one workspace,
    NCCL no sums in switches; tables' gradients, searched products and compiled reductions ask torch whether that is so. What a
    step draws is seeded by its number, and a checkpoint holds the rest.

    torch ends a run that computes what has no deterministic form, and one with another workspace than :4096:8 and :16:8.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as large as what torch takes by itself on Hopper
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a pass over all new memory, and here all is written
