"""AdamW for FP32, BF16 and exact BF16 weights, with gradient norm, clipping and named state.

Updates are computed in FP32 for all three kinds of weights. BF16 weights with remainders
(`pretrain.optimizer.exact_weights`) therefore follow the trajectory of FP32 weights bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm

from foundation.errors import InputError
from pretrain.model.gradients import clear_main_gradients, gradient_of, local_part
from pretrain.optimizer.exact_weights import master_of, split
from pretrain.optimizer.offload import (
    MOMENTS,
    OFFLOADED,
    PIECE,
    pinned_zeros_like,
    update_in_pieces,
)
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.settings.recipe import OptimizerSettings

if TYPE_CHECKING:
    from pretrain.model.packed import PackedLanguageModel

# Number of values that a CPU updates at once, one megabyte of each FP32 tensor. The dozen
# operations of an update then find their operands in the cache. With a full matrix at once, each
# operation would read the matrix from memory.
IN_CACHE = 1 << 18


class ExactAdamW(torch.optim.Optimizer):
    """AdamW for FP32 and BF16 parameters, with optional exact BF16 weights.

    Parameters are plain tensors or DTensors. The state of a parameter consists of `exp_avg`,
    `exp_avg_sq`, `step`, and, for BF16 parameters with `exact`, `remainder`. The tensor `step` is
    on the host, so that it can be read without waiting for the device.

    Args:
        params: Parameters or parameter groups.
        lr, betas, eps, weight_decay: Hyperparameters of groups that do not set them.
        exact: True to store 16 remainder bits for each value of a BF16 parameter. The BF16 value
            and the remainder together are an FP32 weight. FP32 parameters have no remainder.
        moments: Dtype of both moments, FP32 or BF16. By default, the moments of BF16 parameters
            without `exact` are BF16, as in torch, and all other moments are FP32. BF16 moments take
            half the memory of FP32 moments. With beta2 = 0.999 a BF16 second moment never
            decreases, because 0.1 % is less than half a unit in its last place.
        offload: Names of the state tensors that are stored in pinned host memory if the parameter
            is on a GPU. The results do not change.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exact: bool = True,
        moments: torch.dtype | None = None,
        offload: Sequence[str] = (),
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        # Let torch raise its ValueError for invalid hyperparameters.
        torch.optim.AdamW([torch.zeros(())], **defaults)
        super().__init__(params, defaults)
        self.exact = exact
        self.moments = moments
        self.offload = offload
        # Number of lost updates and number of all updates in the last step, int64 [2] on the
        # parameters' device. They count the values on this process. The update of a value is lost
        # if the update is not zero, but the stored weight does not change. With `exact`, the stored
        # weight is the FP32 master. An update is zero if the learning rate is zero, or if the first
        # moment and weight decay * weight are both zero.
        self.lost_counts = torch.zeros(2, dtype=torch.int64)
        # Metrics of the last step by name, as scalars that are equal on all processes.
        self.metrics: dict[str, Tensor] = {}

    def moments_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the names of the moments of a parameter in its state."""
        return MOMENTS

    def hyperparameters_of(
        self, parameter: nn.Parameter, group: Mapping[str, Any], step: int
    ) -> Hyperparameters:
        """Return the hyperparameters of update number `step` of a parameter in `group`."""
        beta1, beta2 = group["betas"]
        return Hyperparameters(
            learning_rate=group["lr"],
            weight_decay=group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            step=step,
        )

    def materialise(self) -> None:
        """Allocate the state of all parameters before the first step.

        If the state does not fit into memory, the run then fails at its start. A checkpoint can be
        loaded into the allocated tensors.
        """
        for parameter in parameters_of(self):
            self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter. Allocate the state at the first call."""
        state = self.state[parameter]
        if state:
            return state
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(
                f"AdamW updates FP32 and BF16 weights, but a weight is {parameter.dtype}; "
                "cast the model before the optimizer is created"
            )
        default = torch.float32 if self.exact else parameter.dtype
        dtypes = dict.fromkeys(self.moments_of(parameter), self.moments or default)
        if self.exact and parameter.dtype == torch.bfloat16:
            dtypes["remainder"] = torch.int16
        part = local_part(parameter)
        offload = self.offload if part.is_cuda and part.numel() else ()
        state["step"] = torch.zeros(())
        for name, dtype in dtypes.items():
            zeros_like = pinned_zeros_like if name in offload else torch.zeros_like
            state[name] = zeros_like(parameter, dtype=dtype)
        return state

    def tensors_of(self, parameter: Tensor, gradient: Tensor) -> ParameterTensors:
        """Return the local tensors of a parameter for an update.

        gradient: the local gradient, or the orthogonalized direction of Muon.
        """
        state = {name: local_part(tensor) for name, tensor in self._state_of(parameter).items()}
        return ParameterTensors(
            weight=local_part(parameter),
            remainder=state.get("remainder"),
            gradient=gradient,
            exp_avg=state.get("exp_avg"),
            exp_avg_sq=state.get("exp_avg_sq"),
        )

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Set `parameter` and its remainder, if it has one, to the weight `master`.

        `master` is in FP32 if the parameter has a remainder. It is a DTensor with the sharding of
        `parameter`, or the local part of such a tensor.
        """
        weight = local_part(master)
        remainder = self._state_of(parameter).get("remainder")
        if remainder is not None:
            weight, remainder_bits = split(weight)
            local_part(remainder).copy_(remainder_bits)
        local_part(parameter).copy_(weight)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, which must be of the same kind of weights and moments.

        The values are copied without a change of their dtype. torch would cast moments and
        remainders to the dtype of the parameters. Raise InputError if the states differ.
        """
        super().load_state_dict({**state_dict, "state": {}})
        # torch numbers the parameters of all groups in their order.
        parameters = parameters_of(self)
        for number, saved in state_dict["state"].items():
            state = self._state_of(parameters[number])
            saved_layout = _dtypes_and_shapes(saved)
            layout = _dtypes_and_shapes(state)
            if saved_layout != layout:
                raise InputError(
                    f"the saved state of the optimizer has {saved_layout}, but this optimizer "
                    f"needs {layout}; create it with the same options, for weights of the same "
                    "dtype and shape"
                )
            for key, tensor in state.items():
                tensor.copy_(saved[key])

    def step(  # type: ignore[override]  # has one more argument
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip_coefficient: Tensor | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient, as `prepare` describes.

        Return the result of `closure`, which computes the gradients first, if it is not None.
        """
        loss = None if closure is None else closure()
        self.prepare(clip_coefficient=clip_coefficient)()
        return loss

    @torch.no_grad()
    def prepare(self, *, clip_coefficient: Tensor | None = None) -> Callable[[], None]:
        """Return a function that updates every parameter that has a gradient.

        Preparing takes milliseconds on the host. It does not wait for the device, so the device can
        compute the gradients at the same time.

        Each gradient is multiplied by `clip_coefficient`, an FP32 scalar on the device of the
        gradients. The multiplication is part of the update, so that no separate pass over all
        gradients is needed, and clipped BF16 gradients are not rounded to BF16 again.
        """
        return self._prepare(clip_coefficient, {})

    def _prepare(
        self, clip_coefficient: Tensor | None, directions: Mapping[Tensor, Tensor]
    ) -> Callable[[], None]:
        """Return the result of `prepare`.

        directions: map the parameters of Muon to their directions. The returned function reads the
            directions, so they may be computed after this call.
        """
        steps: list[Tensor] = []
        updates: list[Update] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = directions.get(parameter, gradient_of(parameter))
                if gradient is None:
                    continue
                step = self._state_of(parameter)["step"]
                steps.append(step)
                tensors = self.tensors_of(parameter, local_part(gradient.contiguous()))
                if tensors.weight.numel():  # 0 if this process has no part of a sharded parameter
                    hyper = self.hyperparameters_of(parameter, group, int(step) + 1)
                    updates.append((tensors, hyper))
        update_all: Callable[[], Tensor]
        if self.offload and updates and updates[0][0].weight.is_cuda:

            def update_piece(piece: Update) -> Tensor:
                return prepare_updates([piece], clip_coefficient)()

            update_all = partial(update_in_pieces, _cut(updates, PIECE), self.offload, update_piece)
        else:
            update_all = prepare_updates(updates, clip_coefficient)

        count = sum(tensors.weight.numel() for tensors, _ in updates)

        def update() -> None:
            lost = update_all()
            self.lost_counts = torch.stack([lost, torch.full_like(lost, count)])
            for step in steps:
                step.add_(1)

        return update


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of `optimizer`, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _dtypes_and_shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Map the name of each tensor to its dtype, followed by its sizes."""
    return {name: (tensor.dtype, *tensor.shape) for name, tensor in state.items()}


# ── The update ──


class Hyperparameters(NamedTuple):
    """Hyperparameters of one update, in double precision.

    As in torch, they are rounded to FP32 when the update uses them.
    """

    learning_rate: float
    weight_decay: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    # Number of this update, starting at 1.
    step: int = 1
    # Factor of the learning rate, but not of weight decay.
    scale: float = 1.0

    @property
    def decay(self) -> float:
        """Return the factor of the weight in decoupled weight decay."""
        return 1 - self.learning_rate * self.weight_decay

    @property
    def step_size(self) -> float:
        """Return the scaled learning rate divided by the bias correction of the first moment."""
        return self.learning_rate * self.scale / (1 - self.beta1**self.step)

    @property
    def bias_correction2_sqrt(self) -> float:
        """Return the square root of the bias correction of the second moment."""
        return math.sqrt(1 - self.beta2**self.step)


class ParameterTensors(NamedTuple):
    """Local tensors of one parameter for an update. The moments determine the kind of update.

    With both moments, AdamW updates the weight.

    With `exp_avg` alone, Muon updates its momentum `exp_avg`. It writes the direction, which it
    then orthogonalizes, to `weight`.

    Without moments, Muon updates the weight. `gradient` is the orthogonalized direction. It is not
    clipped, because it was computed from a clipped gradient.

    All tensors are contiguous and have the same shape. They are on the same device, except for the
    tensors in host memory (`ExactAdamW.offload`).
    """

    weight: Tensor  # FP32 or BF16
    remainder: Tensor | None  # int16 for exact BF16 weights, else None
    gradient: Tensor  # FP32 or BF16
    exp_avg: Tensor | None  # FP32 or BF16
    exp_avg_sq: Tensor | None  # FP32 or BF16


Update = tuple[ParameterTensors, Hyperparameters]


def prepare_updates(
    updates: Sequence[Update], clip_coefficient: Tensor | None
) -> Callable[[], Tensor]:
    """Return a function that updates parameters in place, and returns the number of lost updates.

    The number is an int64 scalar on the parameters' device. `ExactAdamW.lost_counts` defines lost
    updates. Each gradient is multiplied by the FP32 scalar `clip_coefficient`, if it is not None.
    """
    if updates and updates[0][0].weight.is_cuda:
        # Imported here because a machine without a GPU may lack Triton.
        from pretrain.optimizer.adamw_kernel import prepare_update

        return prepare_update(updates, clip_coefficient)
    return partial(_update_all, updates, clip_coefficient)


def _update_all(updates: Sequence[Update], clip_coefficient: Tensor | None) -> Tensor:
    """Update parameters in place on a CPU, and return the number of lost updates."""
    lost = torch.zeros((), dtype=torch.int64)
    for tensors, hyper in _cut(updates, IN_CACHE):
        lost += _update(tensors, hyper, clip_coefficient)
    return lost


def _cut(updates: Sequence[Update], size: int) -> Iterator[Update]:
    """Cut the tensors of all parameters into 1-D pieces of at most `size` values."""
    for tensors, hyper in updates:
        # A missing tensor, such as a remainder, is also missing in each piece. `repeat` never ends,
        # so `zip` is not strict.
        pieces_of_tensors = (
            repeat(None) if tensor is None else tensor.view(-1).split(size) for tensor in tensors
        )
        for piece in zip(*pieces_of_tensors, strict=False):
            yield ParameterTensors(*piece), hyper


def _update(
    tensors: ParameterTensors, hyper: Hyperparameters, clip_coefficient: Tensor | None
) -> Tensor:
    """Update one parameter in place on a CPU, and return the number of lost updates.

    The number is an int64 scalar. `ParameterTensors` lists the three kinds of updates. AdamW is
    algorithm 2 of Loshchilov and Hutter (arXiv:1711.05101). It computes the operations of
    `torch.optim.adam._single_tensor_adam` in the same order, in FP32. FP32 masters are therefore
    equal to the weights of `torch.optim.AdamW`, bit for bit. BF16 moments and BF16 weights without
    remainder are rounded once, when they are stored. The Triton kernel computes the same operations
    and rounds at the same places.
    """
    weight, remainder, gradient, exp_avg, exp_avg_sq = tensors
    before = master_of(weight, remainder)
    gradient = gradient.float()
    if exp_avg is None:
        direction = gradient
        master = (before * hyper.decay).add_(direction, alpha=-hyper.step_size)
    else:
        if clip_coefficient is not None:
            gradient = gradient * clip_coefficient
        # For an FP32 moment, `float` returns the moment itself. `lerp_` then updates the moment,
        # and `copy_` changes nothing.
        direction = exp_avg.float().lerp_(gradient, 1 - hyper.beta1)
        exp_avg.copy_(direction)
        if exp_avg_sq is None:
            # `weight` is the buffer of Muon's direction, and both betas are Muon's momentum.
            master = torch.lerp(gradient, direction, hyper.beta2)
        else:
            square = exp_avg_sq.float()
            square.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)
            exp_avg_sq.copy_(square)
            denominator = square.sqrt().div_(hyper.bias_correction2_sqrt).add_(hyper.eps)
            master = before * hyper.decay
            master.addcdiv_(direction, denominator, value=-hyper.step_size)

    if remainder is None:
        rounded = master.to(weight.dtype)
        after = rounded
    else:
        rounded, remainder_bits = split(master)
        remainder.copy_(remainder_bits)
        after = master
    lost = _count_lost(before, after, direction, hyper)
    # Write the weight last, because `before` has the memory of an FP32 weight.
    weight.copy_(rounded)
    return lost


def _count_lost(before: Tensor, after: Tensor, direction: Tensor, hyper: Hyperparameters) -> Tensor:
    """Return the number of lost updates, as `ExactAdamW.lost_counts` defines them.

    before, after: the stored weights before and after the update.
    direction: the first moment, or the direction of Muon.
    """
    # On a CPU, `x.bool()` takes a tenth of the time of `x != 0`. The difference of two infinite
    # weights is NaN, which converts to True, so an infinite weight is treated as changed.
    has_update = direction.bool()
    if hyper.weight_decay != 0:
        has_update |= before.bool()
    if hyper.learning_rate == 0:
        has_update.zero_()
    unchanged = ~(after - before).bool()
    return (has_update & unchanged).sum()


# ── Building, clipping and the state of the optimizer ──


def exact_adamw(params: nn.Module | Iterable[Any], **options: Any) -> ExactAdamW:
    """Return AdamW with FP32 updates of FP32 or BF16 weights.

    Each value of a BF16 weight has 16 more bits in the state of the optimizer, so that no update is
    lost. After each step, weights and bits together equal the FP32 weights of `torch.optim.AdamW`
    with the same gradients, bit for bit. The state takes 10 bytes per BF16 value.

    Args:
        params: A model, or parameters, or parameter groups. Of a model, all parameters that require
            gradients are updated, and `weight_decay` applies to matrices and embeddings, but not
            to norms and biases.
        options: Arguments of :class:`ExactAdamW`, such as `lr` and `weight_decay`.

    Example::

        >>> model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        >>> optimizer = exact_adamw(model, lr=3e-4, weight_decay=0.1)
    """
    if isinstance(params, nn.Module):
        params = groups_of(params)
    return ExactAdamW(params, **options)


def groups_of(model: nn.Module, excluded: Container[nn.Parameter] = ()) -> list[dict[str, Any]]:
    """Return two groups of the parameters of `model` that require gradients and are not `excluded`.

    Weight decay applies to matrices and embeddings, but not to norms and biases. The weights of a
    norm may be a matrix too, with a row for each head.
    """
    matrices = set()
    for module in model.modules():
        if not is_norm(module):
            of_module = module.named_parameters(recurse=False)
            matrices |= {p for key, p in of_module if p.dim() >= 2 and not key.endswith("bias")}
    trained = [p for p in model.parameters() if p.requires_grad and p not in excluded]
    decayed = [parameter for parameter in trained if parameter in matrices]
    not_decayed = [parameter for parameter in trained if parameter not in matrices]
    return [{"params": decayed}, {"params": not_decayed, "weight_decay": 0.0}]


def is_norm(module: nn.Module) -> bool:
    """Return True if `module` is a norm, by the name of its class, such as CohereLayerNorm."""
    # The class of an embedding whose rows are normalized has such a name too.
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)


def build_optimizer(model: nn.Module, settings: OptimizerSettings, *, exact: bool) -> ExactAdamW:
    """Build AdamW of a run, as `exact_adamw` does.

    With `exact`, the optimizer stores remainders for BF16 parameters.
    """
    return exact_adamw(model, **options_of(settings, exact=exact))


def options_of(settings: OptimizerSettings, *, exact: bool) -> dict[str, Any]:
    """Return the arguments of `ExactAdamW` that follow from the settings of a run."""
    moments = getattr(torch, WEIGHT_DTYPES[settings.moments]) if settings.moments else None
    offload = OFFLOADED[settings.offload]
    return {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "exact": exact,
        "moments": moments,
        "offload": offload,
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all parameter groups of `optimizer`.

    learning_rate: the learning rate of AdamW. A group with the key `lr_ratio` has this multiple.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_ratio", 1.0)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the L2 norm of the gradients of all `parameters`, over all shards.

    The norm is an FP32 scalar on the device of the gradients. The norms of BF16 gradients are
    summed in FP32 too. `clip_grad_norm_` of torch would return a BF16 value, which has only three
    digits. If gradients are sharded, all ranks must call this function.
    """
    gradients = [gradient for gradient in map(gradient_of, parameters) if gradient is not None]
    # torch 2.14 cannot compute these norms of DTensors in another dtype.
    parts = [local_part(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32))
    # Either all gradients are sharded or none is.
    if isinstance(gradients[0], DTensor):
        mesh = gradients[0].device_mesh
        squares = norms.square()
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norms = squares.sqrt()
    return vector_norm(norms)


def clip_coefficient(norm: Tensor, limit: float | None) -> Tensor | None:
    """Return the factor that reduces the norm of the gradients from `norm` to at most `limit`.

    The factor is an FP32 scalar on the device of `norm`. Return None if `limit` is None.
    """
    return None if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


def clear_gradients(optimizer: torch.optim.Optimizer, model: PackedLanguageModel) -> None:
    """Clear the gradients of all parameters after a step.

    Main gradients are cleared in place. The memory of all other gradients is freed.
    """
    model.discard_partial_gradients()
    clear_main_gradients(parameters_of(optimizer))
    optimizer.zero_grad()


def named_state(optimizer: ExactAdamW, model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from names such as `exp_avg/<parameter name>` to the optimizer's state tensors.

    The tensors `step` are not included. The returned tensors are not copies, so the caller can load
    a state by writing to them.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[parameter]}": tensor
        for parameter in parameters_of(optimizer)
        for key, tensor in optimizer.state[parameter].items()
        if key != "step"
    }


def set_updates_done(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Set the number of past updates of all parameters.

    The next update computes its bias correction from this number. `updates` is the number of
    training steps minus the number of skipped steps.
    """
    for state in optimizer.state.values():
        state["step"].fill_(updates)
