"""Compare the update of a training step with the optimizers of torch.

AdamW updates each value independently of all others, so it is enough to check a sample of the
values. Only clipping depends on all gradients: their norm is recomputed from all values. Muon
updates a matrix as a whole, so each check compares one complete matrix of each shape with
torch.optim.Muon, and checks of later steps take other matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils.rnn import pad_sequence

from pretrain.metrics.health import some_of
from pretrain.model.gradients import full_tensor, gradient_of, gradients_of, local_part
from pretrain.optimizer.adamw import MOMENTS, ExactAdamW
from pretrain.optimizer.exact_weights import master_of
from pretrain.optimizer.muon import MOMENTUM, MatrixWeight, Muon
from pretrain.precision.observed import dtype_name
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.settings.recipe import Recipe

# The largest number of values that are checked in each parameter.
VALUES = 1024
# Tolerance of an updated value, relative to the larger of two changes: the change of this value,
# and the root mean square of all changes in its tensor. The tolerance must be above 1e-6, because
# gradient norms that are summed in different orders differ by 1e-6.
RELATIVE = 1e-4
# Additional tolerance, relative to the value itself. An FP32 operation has a relative rounding
# error of 2^-24, and an update consists of a few operations.
ROUNDING = 2.0**-22
# Tolerance of the weights of a matrix that Muon has updated, relative to their change. Errors and
# change are multiplied by the momentum, because the update has singular values of about one also in
# directions where the momentum has only roundings of BF16, which depend on the order of sums.
MUON_RELATIVE = 0.05
# Tolerance of Muon's weight decay, relative to the decay, and the smallest cosine of the angle
# between the error and the weight. The error of a correct update has almost no component along the
# weight.
MUON_DECAY = 0.5


class Update(NamedTuple):
    """An update that is compared with torch's."""

    # Names of the model's parameters.
    names: Mapping[nn.Parameter, str]
    # Optimizer of the run. Its update is checked.
    optimizer: ExactAdamW
    recipe: Recipe
    # Learning rate of the schedule in this step.
    learning_rate: float
    # Number of updates that the run has made before this step.
    past_updates: int
    # Result of `expected_clipping`.
    clipping: Tensor | float


def checks_of(update: Update) -> list[TorchUpdate | TorchMatrix]:
    """Compute the expected values of an update, before the optimizer's step.

    Call this when the gradients are complete. After the step, `differences` of each check returns
    its faults. All ranks must call this function and `differences`.
    """
    checks: list[TorchUpdate | TorchMatrix] = [TorchUpdate(update)]
    optimizer = update.optimizer
    if isinstance(optimizer, Muon):
        checks.append(TorchMomentum(update))
        chosen = one_of_each_shape([*optimizer.matrix_weights.values()], update.past_updates)
        checks += [TorchMatrix(weight, update) for weight in chosen]
    return checks


def some_values(tensor: Tensor, updates: int = 0) -> Tensor:
    """Return at most VALUES evenly spaced values of this process's part of a tensor.

    The first value is at index `updates` modulo the spacing, so each update checks other values.
    """
    values = local_part(tensor).reshape(-1)
    stride = -(-values.numel() // VALUES) or 1
    return values[updates % stride :: stride]


# ── The rules of the recipe, derived a second time ──


@torch.no_grad()
def expected_clipping(model: nn.Module, limit: float | None) -> Tensor | float:
    """Return the factor of the gradients of `model` that clips their norm to `limit`.

    The clipping function of training is not called, because this check covers that function. If
    gradients are sharded, all ranks must call this function.
    """
    if limit is None:
        return 1.0
    norms = [
        full_tensor(vector_norm(gradient, dtype=torch.float32))
        for gradient in gradients_of(model).values()
    ]
    norm = vector_norm(torch.stack(norms))
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return True if weight decay applies to a parameter: to matrices and embeddings.

    The rule is derived from the name, because this check covers the optimizer's own rule.
    """
    # Some models have norms and biases that are matrices, such as the norms of each head.
    path, _, kind = name.rpartition(".")
    module = path.rpartition(".")[2]
    return parameter.dim() >= 2 and "norm" not in module and not kind.endswith("bias")


def adamw_options(update: Update) -> dict[str, Any]:
    """Return the arguments of torch.optim.AdamW in the step."""
    settings = update.recipe.optimizer
    return {
        "lr": update.learning_rate,
        "betas": tuple(settings.betas),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }


def muon_options(update: Update) -> dict[str, Any]:
    """Return the arguments of torch.optim.Muon in the step."""
    settings = update.recipe.optimizer
    peak = settings.muon.learning_rate or settings.learning_rate
    return {
        "lr": update.learning_rate * (peak / settings.learning_rate),
        "weight_decay": settings.weight_decay,
        "momentum": settings.muon.momentum,
        "adjust_lr_fn": settings.muon.adjust_lr_fn,
    }


# ── Samples of all parameters ──


class TorchUpdate:
    """The expected result of AdamW's update: torch.optim.AdamW on a sample of the values.

    Create the object when the gradients are complete, and call `differences` after the optimizer's
    step.
    """

    # Name of the algorithm, for messages.
    algorithm = "AdamW"
    # Names of the moments in the state of the parameters that are checked.
    moments: tuple[str, ...] = MOMENTS
    # Function that returns the arguments of torch's optimizer.
    options_of = staticmethod(adamw_options)

    def __init__(self, update: Update) -> None:
        """Compute the expected values. If gradients are sharded, all ranks must call this."""
        self._past_updates = update.past_updates
        self._options = self.options_of(update)
        self._wrong: set[str] = set()
        self._names: list[str] = []
        self._are_decayed: list[bool] = []
        # Map each kind of tensor ("weights", "gradients" and the names in the optimizer's state) to
        # the tensors of this kind, one for each name in `_names`.
        self._tensors: dict[str, list[Tensor]] = defaultdict(list)
        for group in update.optimizer.param_groups:
            for parameter in group["params"]:
                if update.optimizer.moments_of(parameter) == self.moments:
                    self._add(update, group, parameter)
        self._device = self._tensors["weights"][0].device
        recipe = update.recipe
        # Map the name of each kind of tensor to the recipe's name for its dtype.
        self._modes = {
            "gradients": recipe.gradients_kept_in,
            "weights": recipe.weights,
            **dict.fromkeys(self.moments, recipe.moments_kept_in),
        }
        self._check_dtypes()
        self._before = self._values()
        gradient = self._sampled("gradients").float() * update.clipping
        self._expected = self._updated_by_torch(gradient)

    def _add(self, update: Update, group: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Add a parameter of `group`, and check its settings, unless it has no gradient."""
        gradient = gradient_of(parameter)
        if gradient is None:
            return
        name = update.names[parameter]
        decays = is_decayed(name, parameter)
        self._names.append(name)
        self._are_decayed.append(decays)
        state = update.optimizer.state[parameter]
        for kind, tensor in {"weights": parameter, "gradients": gradient, **state}.items():
            self._tensors[kind].append(tensor)
        expected = self._options | {"weight_decay": self._options["weight_decay"] * decays}
        for key, value in expected.items():
            if group[key] != value:
                self._wrong.add(f"{self.algorithm}'s {key} is {group[key]}, not {value}")

    def _check_dtypes(self) -> None:
        """Check that the tensors of each kind have the dtype of the recipe."""
        for kind, mode in self._modes.items():
            dtypes = {dtype_name(tensor.dtype) for tensor in self._tensors[kind]}
            for wrong in dtypes - {WEIGHT_DTYPES[mode]}:
                self._wrong.add(f"{kind} are {wrong}, not {WEIGHT_DTYPES[mode]}")

    def differences(self) -> list[str]:
        """Return one line of text for each kind of fault in the optimizer's step."""
        lines = [*self._wrong]
        after = self._values()
        for kind, expected in self._expected.items():
            is_off = self._is_off(kind, after[kind], expected).any(1)
            if names := [*compress(self._names, is_off.tolist())]:
                lines.append(
                    f"{kind} of {len(names)} of {len(self._names)} parameters: {some_of(names)}"
                )
        number = self._past_updates + 1
        for counted in {*map(int, self._tensors["step"])} - {number}:
            lines.append(
                f"the optimizer has counted {counted} updates, but this is update {number}"
            )
        return lines

    def _sampled(self, kind: str) -> Tensor:
        """Return a row of sampled values for each tensor of a kind, [parameters, values].

        Short rows are padded with zeros.
        """
        rows = [some_values(tensor, self._past_updates) for tensor in self._tensors[kind]]
        # The state may be in host memory (`optimizer.offload`).
        return pad_sequence(rows, batch_first=True).to(self._device)

    def _values(self) -> dict[str, Tensor]:
        """Map "weights" and each moment to its sampled values, FP32 [parameters, values].

        Exact BF16 weights include their lower 16 bits.
        """
        values = {kind: self._sampled(kind) for kind in ("weights", *self.moments)}
        if "remainder" in self._tensors:
            values["weights"] = master_of(values["weights"], self._sampled("remainder"))
        return {kind: tensor.float() for kind, tensor in values.items()}

    def _updated_by_torch(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the values that torch's optimizer computes from the values before the update.

        gradient: the sampled gradients after clipping, FP32.

        The result has the keys and shapes of `_values`.
        """
        decays = torch.tensor(self._are_decayed, device=self._device).unsqueeze(1)
        # AdamW first multiplies the decayed weights by this factor. The tensor contains all sampled
        # parameters, and not all of them are decayed, so torch's optimizer has no decay.
        kept = 1 - self._options["lr"] * self._options["weight_decay"] * decays
        weight = nn.Parameter(self._before["weights"] * kept)
        weight.grad = gradient
        reference = torch.optim.AdamW([weight], **self._options | {"weight_decay": 0.0})
        moments = {name: self._before[name].clone() for name in MOMENTS}
        reference.state[weight] = {"step": torch.tensor(float(self._past_updates)), **moments}
        reference.step()
        return {"weights": weight.detach(), **moments}

    def _is_off(self, kind: str, actual: Tensor, expected: Tensor) -> Tensor:
        """Return a bool tensor: True for each value that differs from its expected value.

        NaN always differs.
        """
        change = (expected - self._before[kind]).abs()
        sizes = [[len(some_values(tensor))] for tensor in self._tensors[kind]]
        counts = torch.tensor(sizes, device=self._device).clamp(min=1)
        mean_square = change.square().sum(1, keepdim=True) / counts
        tolerance = RELATIVE * torch.maximum(change, mean_square.sqrt()) + ROUNDING * expected.abs()
        bounds = torch.stack([expected - tolerance, expected + tolerance])
        if self._modes[kind] == "bf16":
            # The stored values are rounded, so the limits are rounded too.
            bounds = bounds.bfloat16().float()
        lowest, highest = bounds
        return ~((lowest <= actual) & (actual <= highest))


class TorchMomentum(TorchUpdate):
    """The expected momentum of all parameters that Muon updates, for a sample of their values."""

    algorithm = "Muon"
    moments = (MOMENTUM,)
    options_of = staticmethod(muon_options)

    def _updated_by_torch(self, gradient: Tensor) -> dict[str, Tensor]:
        momentum = self._before[MOMENTUM]
        return {MOMENTUM: momentum.lerp(gradient, 1 - self._options[MOMENTUM])}


# ── Matrices of Muon ──


def one_of_each_shape(weights: Sequence[MatrixWeight], past_updates: int) -> list[MatrixWeight]:
    """Return a random weight of each shape. All ranks choose the same weights.

    past_updates: the seed of the choice.
    """
    shuffled = Random(past_updates).sample(weights, len(weights))
    return list({weight.shape: weight for weight in shuffled}.values())


class TorchMatrix:
    """The expected result of Muon's update: torch.optim.Muon on one random matrix of a weight.

    Create the object when the gradients are complete, and call `differences` after the optimizer's
    step.
    """

    def __init__(self, weight: MatrixWeight, update: Update) -> None:
        """Compute the expected matrix. All ranks must call this."""
        self._weight = weight
        self._name = update.names[weight.parameter]
        self._state = update.optimizer.state[weight.parameter]
        # Index of the checked matrix in the weight, which may have several. It is the same on all
        # ranks.
        self._number = Random(update.past_updates).randrange(weight.shape[0])
        self._options = muon_options(update)
        self._before = self._values()
        # The reference updates this momentum in place.
        self._momentum = self._matrix(self._state[MOMENTUM]).float().clone()
        gradient: Any = gradient_of(weight.parameter)
        copy = nn.Parameter(self._before.clone())
        copy.grad = self._matrix(gradient).float() * update.clipping
        reference = torch.optim.Muon([copy], **self._options)
        reference.state[copy] = {"momentum_buffer": self._momentum}
        reference.step()
        exact = copy.detach()
        self._expected = exact.bfloat16().float() if update.recipe.weights == "bf16" else exact
        # The rounding to the stored dtype, and that of FP32 operations.
        self._rounding = self._expected - exact + ROUNDING * exact

    def differences(self) -> list[str]:
        """Return a line if the matrix is wrong, and one if its decay is. All ranks must call it."""
        change = self._expected - self._before
        error = self._values() - self._expected
        decay = self._options["lr"] * self._options["weight_decay"]
        matrices = (self._before, change, error, self._rounding)
        wrong = wrong_parts(decay, *(_weighted(x, self._momentum) for x in matrices))
        return [f"{part} of a matrix in {self._name}" for part in wrong]

    def _values(self) -> Tensor:
        """Return a copy of the matrix with its remainders, FP32."""
        remainder = self._state.get("remainder")
        # Ranks cannot gather int16.
        bits = None if remainder is None else self._matrix(remainder.int())
        return master_of(self._matrix(self._weight.parameter), bits).clone()

    def _matrix(self, tensor: Tensor) -> Tensor:
        """Return the matrix in a tensor with the shape of its parameter, over all shards."""
        return self._weight.split(full_tensor(tensor.detach()))[self._number]


def _weighted(values: Tensor, momentum: Tensor) -> Tensor:
    """Return a matrix, multiplied by the momentum along the longer side, as an FP64 vector.

    The comment on MUON_RELATIVE gives the reason for the multiplication.
    """
    rows, columns = values.shape
    product = values @ momentum.mT if rows < columns else values.mT @ momentum
    return product.flatten().double()


def wrong_parts(
    decay: float, before: Tensor, change: Tensor, error: Tensor, rounding: Tensor
) -> Iterator[str]:
    """Yield "weights" if an update by Muon is wrong, and "weight decay" if its decay is wrong.

    All tensors are results of `_weighted`, FP64 vectors.

    decay: the share of the weights that the update subtracts.
    before: the weights before the update.
    change: the expected change of the weights.
    error: the updated weights minus the expected weights.
    rounding: the allowed error by rounding.
    """
    # Both the updated and the expected weights are rounded.
    limit = MUON_RELATIVE * change.norm() + 2 * rounding.norm()
    # NaN is always a fault.
    if not error.norm() <= limit:
        yield "weights"
    # A wrong decay is an error along the weights. The scale of the update without decay may be off
    # too, so compare only the components that are orthogonal to this update.
    update = change + decay * before
    direction = update / update.norm()
    weights = before - direction * (before @ direction)
    residual = error - direction * (error @ direction)
    # Both limits must be exceeded: the tolerance of the decay, and that of the cosine (MUON_DECAY).
    decay_limit = (MUON_DECAY * decay + ROUNDING) * (weights @ weights)
    cosine_limit = MUON_DECAY * weights.norm() * residual.norm()
    if (weights @ residual).abs() > torch.maximum(decay_limit, cosine_limit):
        yield "weight decay"
