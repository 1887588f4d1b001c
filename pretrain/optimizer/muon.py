"""Muon for the weight matrices of decoder layers, and AdamW for all other parameters.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) updates a matrix by an orthogonal
matrix that is close to its momentum. A step computes, in FP32 unless noted:

    momentum  = β momentum + (1 - β) gradient
    direction = β momentum + (1 - β) gradient           (Nesterov)
    update    = orthogonalize(direction)                in BF16 or FP16
    weight    = (1 - rate · decay) weight - rate · scale · update

These are the operations of torch.optim.Muon in the same order. On Hopper and data-centre Blackwell,
`muon_kernel` orthogonalizes large matrices in FP16 with the same coefficients, but with fewer
multiplications. Weights are stored as by `ExactAdamW`, so BF16 weights with remainders follow the
trajectory of FP32 weights.

A stacked parameter has several matrices: one for each expert, gate and up, or queries, keys and
values. They are found by shapes, and each one is orthogonalized separately. Several processes share
the work: one of them orthogonalizes a parameter and sends the update to all others. If parameters
are sharded, all processes gather the direction first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.linalg import vector_norm

from foundation.errors import InputError
from pretrain.model.gradients import full_tensor, gradient_of, local_part
from pretrain.model.huggingface import decoder_layers
from pretrain.model.hybrids.sizes import is_one_matrix
from pretrain.optimizer.adamw import (
    ExactAdamW,
    Hyperparameters,
    ParameterTensors,
    Update,
    groups_of,
    options_of,
    prepare_updates,
)
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.product import LowPrecisionLinear
from pretrain.precision.scope import LINEARS, is_router, is_transposed
from pretrain.settings.recipe import OptimizerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pretrain.model.packed import PackedLanguageModel

# Name of Muon's moment in the state of a parameter.
MOMENTUM = "momentum"
# Value of `MatrixWeight.inputs_dim` for a parameter whose layout is not known.
UNKNOWN = 0
# Number of Newton-Schulz steps, and the coefficients of their polynomial a x + b x³ + c x⁵. The
# kernel (`newton_schulz`) has the same number of steps.
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Smallest norm by which a matrix is divided.
EPS = 1e-7
# Maximum number of values that a process orthogonalizes at once, 128 MiB in BF16.
BATCH = 1 << 26
# Factors of the learning rate for a matrix [outputs, inputs] (`optimizer.muon.adjust_lr_fn`).
SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
    "original": lambda outputs, inputs: math.sqrt(max(1.0, outputs / inputs)),
}


# ── The matrices of a model ──


@dataclass(frozen=True, eq=False)
class MatrixWeight:
    """A parameter of one or more matrices that have equal shapes."""

    parameter: nn.Parameter
    # Dimension of the inputs, -1 or -2. The parameter is [outputs, inputs], [inputs, outputs] or
    # [experts, outputs, inputs].
    inputs_dim: int
    # Number of matrices that are stacked along the outputs.
    stacked: int = 1

    def split(self, tensor: Tensor) -> Tensor:
        """Return the matrices of one or more tensors, [matrices, outputs, inputs].

        tensor: [*shape] or [tensors, *shape], where `shape` is the shape of the parameter. The
            matrices of a contiguous [*shape] are a view.
        """
        rows = tensor.movedim(self.inputs_dim, -1)  # [..., outputs of all matrices, inputs]
        return rows.unflatten(-2, (self.stacked, -1)).flatten(0, -3)

    def join(self, matrices: Tensor) -> Tensor:
        """Return the tensors [tensors, *shape] with these matrices, as a view. Inverse of `split`.

        matrices: [matrices, outputs, inputs].
        """
        experts = self.parameter.shape[:-2]
        rows = matrices.unflatten(0, (-1, *experts, self.stacked)).flatten(-3, -2)
        return rows.movedim(-1, self.inputs_dim)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the number of matrices, and the numbers of their outputs and inputs."""
        return tuple(self.split(torch.empty(self.parameter.shape, device="meta")).shape)


def find_matrix_weights(hf: PreTrainedModel) -> list[MatrixWeight]:
    """Return the trained matrices in the decoder layers of `hf`, except for routers.

    `hf` may be on the meta device, converted and sharded. Raises InputError if queries, keys and
    values, or experts, are stacked in an unknown layout, or if there is no matrix.
    """
    unsplit = _unsplit_weights(hf)
    # Map the name of each module to its weights, as (outputs, inputs) by name.
    sizes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, weight in unsplit.items():
        sizes[_module_of(name)][name] = weight.shape[1:]
    weights = []
    for name, weight in unsplit.items():
        module_name = _module_of(name)
        stacked = 1.0
        if not is_one_matrix(hf, module_name):
            stacked = count_stacked(name, sizes[module_name])
        if weight.inputs_dim == -2:
            # GPT-2 stacks queries, keys and values.
            supported = {1, 3}
        elif hasattr(hf.get_submodule(module_name), "layer_idx"):
            # If other attention layers stack queries, keys and values, they do so for each head.
            # The rows of a matrix are then not consecutive.
            supported = {1}
        else:
            # An MLP and experts may stack gate and up.
            supported = {1, 2}
        if weight.inputs_dim == UNKNOWN or stacked not in supported:
            raise InputError(
                f"`optimizer.name: muon`: the layout of the matrices in {name} is not known, so "
                "they cannot be updated separately; set `optimizer.name: adamw`"
            )
        parameter = weight.parameter
        # AdamW updates a matrix with one row or column, because it is a vector.
        if parameter.requires_grad and min(parameter.shape[-2:]) > 1:
            weights.append(replace(weight, stacked=int(stacked)))
    if not weights:
        raise InputError(
            f"`optimizer.name: muon`: {type(hf).__name__} has no decoder layers with matrices that "
            "Muon could update; set `optimizer.name: adamw`"
        )
    return weights


def _unsplit_weights(hf: PreTrainedModel) -> dict[str, MatrixWeight]:
    """Map the name of each weight in the decoder layers of `hf` to the weight as one matrix.

    A linear layer's weight has the name of the linear layer, and the weights of experts have the
    name of their parameter. Routers are omitted. Experts in another layout than the usual one have
    the dimension UNKNOWN.
    """
    weights = {}
    for name, parameter in hf.named_parameters():
        # The weight of a convolution of single channels is [channels, 1, width], and no matrix.
        if parameter.dim() == 3 and min(parameter.shape) > 1:
            weights[name] = MatrixWeight(parameter, UNKNOWN)
    for name, module in stacked_experts(hf):
        for key in STACKS:
            weights[f"{name}.{key}"] = MatrixWeight(module.get_parameter(key), -1)
    for layer_name, layer in decoder_layers(hf).items():
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, (*LINEARS, LowPrecisionLinear)) and not is_router(name):
                inputs_dim = -2 if is_transposed(module) else -1
                weights[name] = MatrixWeight(module.get_parameter("weight"), inputs_dim)
    return weights


def _module_of(name: str) -> str:
    """Return the name of the module with the weight `name`, such as an MLP or its experts.

    `name` is a key of the result of `_unsplit_weights`.
    """
    return name.rpartition(".")[0]


def count_stacked(name: str, sizes: Mapping[str, Sequence[int]]) -> float:
    """Return the number of matrices that are stacked along the outputs of a weight, at least 1.

    For example, an MLP has a weight [2 x 64, 16] and a second weight [16, 64]. The second weight
    maps the 64 outputs of a matrix back to the 16 inputs, so the first weight contains 128 / 64 = 2
    matrices: gate and up. The result is 1 if no other weight of the module leads back to the inputs
    of this weight. It is not an integer if the matrices have different sizes.

    name: the name of the weight.
    sizes: map the name of each weight of the same module to (outputs, inputs).
    """
    outputs, inputs = sizes[name]
    # Inputs of the other weights that lead back to the inputs of this weight.
    widths = [
        other_inputs
        for other, (other_outputs, other_inputs) in sizes.items()
        if other != name and other_outputs == inputs
    ]
    return max(1.0, outputs / max(widths, default=outputs))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return a nearly orthogonal matrix for each of the matrices, [matrices, outputs, inputs].

    Newton-Schulz steps in BF16 move all singular values to between about 0.7 and 1.2. Those below
    about a thousandth of the norm stay smaller. On Hopper and Blackwell GPUs, steps of large
    matrices are in FP16.
    """
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    # The largest singular value must be at most 1. The norm is at least as large.
    norms = vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    if _uses_kernel(x):
        # Imported here because a machine without a GPU may lack Triton.
        from pretrain.optimizer.muon_kernel import newton_schulz

        x = torch.div(x, norms, out=torch.empty_like(x, dtype=torch.float16))
        # The kernel multiplies xᵀ x. The transpose of a wide matrix makes this product small.
        x = newton_schulz(x.mT, COEFFICIENTS).mT
    else:
        x = x / norms
        a, b, c = COEFFICIENTS
        for _ in range(STEPS):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _uses_kernel(x: Tensor) -> bool:
    """Return whether the Triton kernel orthogonalizes `x`. Torch computes all other matrices.

    x: matrices [matrices, rows, columns], which have no more rows than columns.
    """
    matrices, rows, columns = x.shape
    # The kernel has no partial tiles. Small matrices have too few tiles for a GPU.
    if not x.is_cuda or rows < 768 or rows % 256 or columns % 64:
        return False
    # The kernel reads one matrix after another. The matrices that a single parameter of GPT-2
    # stacks are interleaved.
    if matrices > 1 and x.stride(0) < rows * columns:
        return False
    # Other GPUs have too little shared memory.
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def rounds_of(weights: Iterable[MatrixWeight], ranks: int) -> Iterator[list[list[MatrixWeight]]]:
    """Yield rounds. A round is a list of batches, and rank i orthogonalizes batch i.

    All weights of a round have the same shape. The last round of a shape may have fewer batches
    than there are ranks. Each rank has about the same number of weights of a shape. A batch has at
    most BATCH values, or a single weight.
    """
    by_shape: dict[tuple[Any, ...], list[MatrixWeight]] = defaultdict(list)
    for weight in weights:
        by_shape[weight.shape, weight.inputs_dim, weight.stacked].append(weight)
    for (shape, *_), same_shape in sorted(by_shape.items(), reverse=True):
        weights_per_rank = math.ceil(len(same_shape) / ranks)
        largest_batch = max(1, BATCH // math.prod(shape))
        # Batches have equal sizes. With batches of the largest size, the last round could have
        # batches for a few ranks only, and the other ranks would wait.
        rounds = math.ceil(weights_per_rank / largest_batch)
        size = math.ceil(weights_per_rank / rounds)
        for first in range(0, len(same_shape), size * ranks):
            in_round = same_shape[first : first + size * ranks]
            yield [in_round[start : start + size] for start in range(0, len(in_round), size)]


# ── The optimizer ──


class Muon(ExactAdamW):
    """Muon for the last parameter group, and AdamW for all others.

    The state of a parameter that Muon updates consists of `momentum`, `step`, and, for BF16
    parameters with `exact`, `remainder`.

    Args:
        groups: Parameter groups. The last one has the keys `momentum` and `adjust_lr_fn` too.
        weights: The matrices of the last group's parameters.
        options: Arguments of `ExactAdamW`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], weights: Sequence[MatrixWeight], **options: Any
    ) -> None:
        super().__init__(groups, **options)
        # Map each parameter of the last group to its matrices.
        self.matrix_weights = {weight.parameter: weight for weight in weights}

    def moments_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the names of the moments of a parameter in its state."""
        return (MOMENTUM,) if parameter in self.matrix_weights else super().moments_of(parameter)

    @torch.no_grad()
    def prepare(self, *, clip_coefficient: Tensor | None = None) -> Callable[[], None]:
        """Return a function that updates every parameter that has a gradient.

        The function updates all momenta and writes the directions, orthogonalizes the directions in
        place, and updates all weights of Muon and AdamW. All ranks must call it.
        `ExactAdamW.prepare` describes `clip_coefficient`.
        """
        with_gradient = [
            weight
            for weight in self.matrix_weights.values()
            if gradient_of(weight.parameter) is not None
        ]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rounds = [
            [_with_directions(weights) for weights in batches]
            for batches in rounds_of(with_gradient, ranks)
        ]
        directions: dict[Tensor, Tensor] = {
            weight.parameter: direction
            for batch in chain(*rounds)
            for weight, direction in zip(batch.weights, batch.directions, strict=True)
        }
        momentum_updates = [
            self._momentum_update(parameter, direction)
            for parameter, direction in directions.items()
            if direction.numel()  # 0 if this process has no part of a sharded parameter
        ]
        update_momenta = prepare_updates(momentum_updates, clip_coefficient)
        update_weights = self._prepare(clip_coefficient, directions)

        def update() -> None:
            update_momenta()
            norms = []
            for batches in rounds:
                # All weights of a round have the same shape, which determines the scale.
                parameter = batches[0].weights[0].parameter
                scale = self.hyperparameters_of(parameter, self.param_groups[-1], 1).scale
                for orthogonal in orthogonalize_directions(batches):
                    norms.append(scale * vector_norm(orthogonal, dtype=torch.float32))
            values = sum(map(torch.numel, self.matrix_weights))
            self.metrics = {"muon_update_rms": vector_norm(torch.stack(norms)) / math.sqrt(values)}
            update_weights()

        return update

    def _momentum_update(self, parameter: Tensor, direction: Tensor) -> Update:
        """Return the update of the momentum of `parameter`, which also writes `direction`.

        direction: memory for this process's part of the direction, BF16.
        """
        gradient: Any = gradient_of(parameter)
        tensors = ParameterTensors(
            weight=direction,
            remainder=None,
            gradient=local_part(gradient.contiguous()),
            exp_avg=local_part(self._state_of(parameter)[MOMENTUM]),
            exp_avg_sq=None,
        )
        momentum = self.param_groups[-1][MOMENTUM]
        return tensors, Hyperparameters(
            learning_rate=0.0, weight_decay=0.0, beta1=momentum, beta2=momentum
        )

    def hyperparameters_of(
        self, parameter: nn.Parameter, group: Mapping[str, Any], step: int
    ) -> Hyperparameters:
        """Return the hyperparameters of update number `step` of a parameter in `group`."""
        if parameter not in self.matrix_weights:
            return super().hyperparameters_of(parameter, group, step)
        _, outputs, inputs = self.matrix_weights[parameter].shape
        scale = SCALES[group["adjust_lr_fn"]](outputs, inputs)
        return Hyperparameters(group["lr"], group["weight_decay"], scale=scale)


class Batch(NamedTuple):
    """Weights of equal shapes that one process orthogonalizes, and their directions."""

    weights: Sequence[MatrixWeight]
    # This process's parts of the directions, BF16 [weights, *shape].
    directions: Tensor


def _with_directions(weights: Sequence[MatrixWeight]) -> Batch:
    """Return a batch with memory for the directions."""
    part = local_part(weights[0].parameter)
    directions = part.new_empty((len(weights), *part.shape), dtype=torch.bfloat16)
    return Batch(weights, directions)


def orthogonalize_directions(batches: Sequence[Batch]) -> list[Tensor]:
    """Orthogonalize the directions of a round in place.

    Return the orthogonalized directions of each batch over all shards, [weights, *shape] in BF16.
    """
    full_directions = [_full_directions(batch) for batch in batches]
    # Each rank orthogonalizes at most one batch. All ranks then get the results.
    this_rank = dist.get_rank() if dist.is_initialized() else 0
    if this_rank < len(batches):
        weight = batches[this_rank].weights[0]  # all weights of a batch are split alike
        directions = full_directions[this_rank]
        directions.copy_(weight.join(orthogonalize(weight.split(directions))))
    for rank, (batch, directions) in enumerate(zip(batches, full_directions, strict=True)):
        if dist.is_initialized():
            dist.broadcast(directions, src=rank)
        if directions is not batch.directions:
            _copy_parts(directions, batch)
    return full_directions


def _full_directions(batch: Batch) -> Tensor:
    """Return the directions over all shards. Without shards, return `batch.directions` itself."""
    if not isinstance(batch.weights[0].parameter, DTensor):
        return batch.directions
    full = []
    for weight, part in zip(batch.weights, batch.directions, strict=True):
        parameter: Any = weight.parameter
        full.append(full_tensor(DTensor(part, parameter._spec, requires_grad=False)))
    return torch.stack(full)


def _copy_parts(full_directions: Tensor, batch: Batch) -> None:
    """Copy this process's parts of `full_directions` into the directions of `batch`."""
    for weight, part, full in zip(batch.weights, batch.directions, full_directions, strict=True):
        parameter: Any = weight.parameter
        # Without `src_data_rank`, nothing is sent.
        sharded = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        part.copy_(local_part(sharded))


def build_muon(model: PackedLanguageModel, settings: OptimizerSettings, *, exact: bool) -> Muon:
    """Build Muon for the matrices in the decoder layers of `model`, and AdamW for the rest.

    With `exact`, the optimizer stores remainders for BF16 parameters.
    """
    weights = find_matrix_weights(model.hf)
    by_muon = dict.fromkeys(weight.parameter for weight in weights)
    by_adamw = groups_of(model, excluded=by_muon)
    group = {
        "params": list(by_muon),
        "lr_ratio": settings.muon_lr_ratio,
        "adjust_lr_fn": settings.muon.adjust_lr_fn,
        MOMENTUM: settings.muon.momentum,
    }
    return Muon([*by_adamw, group], weights, **options_of(settings, exact=exact))
