"""Check the token counts and gradients of a step, and compare its update with torch's optimizers.

The parity check covers forward and backward, and the audit covers matrix products. This check
covers the rest of a step. It runs in the first two steps after a start, a rollback or a change of
the precision (`Step.is_new`), and every `log.fp8_statistics` steps. AdamW updates each value
independently of all others, so it is enough to check a sample of the values. Only clipping depends
on all gradients: their norm is recomputed from all values. Muon updates a matrix as a whole, so
each check compares one complete matrix of each shape with torch.optim.Muon, and checks of later
steps take other matrices. docs/developers/verification.md lists everything that is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from random import Random
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.metrics.health import TrainingHalted, some_of
from pretrain.model.distributed import from_all_ranks, largest_over_ranks
from pretrain.model.gradients import gathered, gradient_of, gradients_of, local_part
from pretrain.model.packed import PackedLanguageModel
from pretrain.observe.observers import Observer, Step, is_due
from pretrain.optimizer import muon
from pretrain.optimizer.adamw import MOMENTS, ExactAdamW
from pretrain.optimizer.exact_weights import join
from pretrain.optimizer.muon import MOMENTUM, Hidden, Muon
from pretrain.precision.gemm import Gemm, Operand
from pretrain.precision.observed import dtype_name
from pretrain.precision.product import Probe
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
# Gradients must be summed over microbatches in FP32. If BF16 can store more than this share of the
# nonzero sums without rounding, the check concludes that the sums were rounded to BF16.
BF16_VALUED = 0.9
# Relative difference of the mean losses of two microbatches with the same tokens, whose losses may
# be summed in another order.
EQUAL_LOSSES = 1e-6
# Relative tolerance of a step's loss, which is an FP32 sum over the microbatches.
LOSS_TOLERANCE = 1e-4


def some_values(tensor: Tensor, updates: int = 0) -> Tensor:
    """Return at most VALUES evenly spaced values of this process's part of a tensor.

    The first value is at index `updates` modulo the spacing, so each update checks other values.
    """
    values = local_part(tensor).reshape(-1)
    stride = -(-values.numel() // VALUES) or 1
    return values[updates % stride :: stride]


def checksum(codes: Tensor) -> Tensor:
    """Return a checksum of `codes` [..., rows, features], which changes if rows are moved."""
    rows = codes.contiguous().view(torch.uint8).flatten(0, -2).sum(1)
    return (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()


class StepCheck(Observer):
    """Check the forward and backward passes and the update of a step.

    Raises TrainingHalted after the update if the step or the update is wrong.
    """

    def __init__(
        self,
        packed: PackedLanguageModel,
        optimizer: ExactAdamW,
        recipe: Recipe,
        accelerator: Accelerator,
    ) -> None:
        self._packed = packed
        self._optimizer = optimizer
        self._recipe = recipe
        self._accelerator = accelerator
        self._wrong: list[str] = []
        # Mean loss that the step minimizes, computed from the losses of the microbatches.
        self._loss = 0.0

    def due(self, step: Step) -> bool:
        """Return True if `Step.is_new` is set, and in every n-th step (`log.fp8_statistics`)."""
        return step.is_new or is_due(step.number, self._recipe.log.fp8_statistics)

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Find faults in the forward and backward passes of the step. `update` reports the faults.

        All ranks must call this method.

        place: the position, in the order of packs, of the first pack that the step must use.
        """
        # For each microbatch whose backward has begun, FP64 [3]: the number of labels, the summed
        # loss, and the factor by which this loss is multiplied before backward.
        seen: list[Tensor] = []
        # Results of `_fit_bf16`, bool scalars: after each of the first two microbatches, and after
        # the last one.
        sums_fit_bf16: list[Tensor] = []
        # Number of gradients that are not zero before the first microbatch. The number is read only
        # after `yield`, so the host does not wait for the device here. The norm is the sum of
        # magnitudes, because the squares of small values underflow to zero.
        left_over = torch.stack(
            torch._foreach_norm(self._gradients(), 1, dtype=torch.float32)
        ).count_nonzero()
        sharding = self._packed.sharding
        # True if each microbatch's gradients are summed over ranks before they are accumulated.
        is_reduced = bool(sharding and not sharding.once_a_step)
        not_gathered = sharding.stale_weights() if sharding else []
        cached_weights = CachedWeights()

        def after_forward(
            module: nn.Module, args: Any, inputs: dict[str, Any], loss: Tensor
        ) -> None:
            figures = [(inputs["labels"] != IGNORE).sum(), loss.detach()]
            loss.register_hook(
                lambda gradient: seen.append(
                    torch.stack([figure.double() for figure in (*figures, gradient.detach())])
                )
            )
            # Check the first sums before the next microbatch is added. With more microbatches, the
            # sums have more bits, and the check could not find that earlier sums were rounded.
            if len(seen) in (1, 2):
                sums_fit_bf16.append(self._fit_bf16(seen, over_ranks=is_reduced))

        with (
            self._packed.register_forward_hook(after_forward, with_kwargs=True),
            self._packed.context.probing(cached_weights),
        ):
            yield
        sums_fit_bf16.append(self._fit_bf16(seen, over_ranks=True))
        labels, losses, factors = torch.stack(seen).unbind(1)
        sums = torch.stack([labels.sum(), losses.sum()])
        total, loss = self._accelerator.reduce(sums, reduction="sum").tolist()
        counted = batches.valid_tokens
        self._loss = loss / max(counted, 1)
        factors = factors * max(counted, 1)
        named = {
            "modules are in evaluation mode": [
                name for name, module in self._packed.named_modules() if not module.training
            ],
            "products use weights from before the last update": cached_weights.stale,
            "products use another quantized weight in another process": (
                cached_weights.differing_over_ranks()
            ),
            "weights were not gathered after the last update": not_gathered,
        }
        start = batches.places.start
        # Map each line of the message to True if it applies.
        faults = {
            f"the step's packs begin at position {start:,} in the order of packs, not at "
            f"{place:,}": start != place,
            f"{int(left_over)} gradients were not cleared before the step": left_over,
            f"{total:,.0f} labels were trained on, but the step counts {counted:,}": (
                total != counted
            ),
            f"a token's loss is not divided by the step's {counted:,} labels": (
                not ((factors - 1).abs() <= 1e-5).all()
            ),
            "gradients are added up in BF16, not in FP32: their sums fit into BF16": (
                any(sums_fit_bf16)
            ),
        }
        self._wrong = [line for line, is_true in faults.items() if is_true]
        self._wrong += [
            f"{len(names)} {what}: {some_of(names)}" for what, names in named.items() if names
        ]

    @contextmanager
    def update(
        self, step: Step, learning_rate: float, updates: int, losses: Mapping[str, float]
    ) -> Iterator[None]:
        """Compare the update with torch's, and `losses` with the losses of the microbatches.

        All ranks must call this method. Raises TrainingHalted on all processes if any process has
        found a fault in the step or in the update.
        """
        hf, optimizer = self._packed.hf, self._optimizer
        names = {parameter: name for name, parameter in hf.named_parameters()}
        clipping = expected_clipping(hf, self._recipe.optimizer.clip)
        arguments = (names, optimizer, self._recipe, learning_rate, updates, clipping)
        by_torch: list[TorchUpdate | TorchMuonUpdate] = [TorchUpdate(*arguments)]
        split: dict[str, int] = {}
        if isinstance(optimizer, Muon):
            split = {names[p]: item.shape[0] for p, item in optimizer.hidden.items()}
            by_torch.append(TorchMomentum(*arguments))
            by_torch += [
                TorchMuonUpdate(item, *arguments)
                for item in one_of_each_shape([*optimizer.hidden.values()], updates)
            ]
        expected = muon_matrices(hf) if self._recipe.optimizer.name == "muon" else {}
        if wrong_names := sorted(dict(split.items() ^ expected.items())):
            self._wrong.append(
                f"Muon updates {len(wrong_names)} parameters as other matrices than those of the "
                f"model's layers: {some_of(wrong_names)}"
            )
        yield
        weights = {
            "loss": 1.0,
            "penalty": self._recipe.loss.penalty_weight,
            "router_loss": self._packed.routing.coefficient,
        }
        logged = sum(weight * losses[name] for name, weight in weights.items() if weight)
        if abs(logged - self._loss) > LOSS_TOLERANCE * abs(self._loss):
            self._wrong.append(
                f"the losses to be logged add up to {logged:.6f}, those of the microbatches to "
                f"{self._loss:.6f}"
            )
        differences = {line for update in by_torch for line in update.differences()}
        wrong = [*self._wrong, *sorted(differences)]
        if largest_over_ranks(self._accelerator, len(wrong)):
            lines = "\n".join(
                f"  {line}" for line in (wrong or ["see the message of another process"])
            )
            raise TrainingHalted(
                step.number,
                "the step or its update is wrong. The update is compared with those of "
                f"torch.optim:\n{lines}\nThe step is not saved. The fault lies in the code or in "
                "the device, not in the recipe",
            )

    def _gradients(self) -> list[Tensor]:
        """Return a list of an empty tensor, followed by this process's part of each gradient.

        The empty tensor keeps the list from being empty if no parameter has a gradient.
        """
        parts = map(local_part, gradients_of(self._packed).values())
        return [torch.zeros(0, device=self._packed.hf.device), *parts]

    def _fit_bf16(self, seen: list[Tensor], *, over_ranks: bool) -> Tensor:
        """Return a bool scalar: True if BF16 can store almost all sampled gradient sums exactly.

        The samples are `some_values` of each FP32 sum. Zeros are not counted. The gradients of one
        microbatch may be BF16 values, and so may their sum with equal gradients. Therefore return
        False unless two microbatches in the sums have different mean losses. A microbatch without
        labels has no gradients.

        seen: for each microbatch in the sums, a tensor that begins with the number of its labels
            and its summed loss.
        over_ranks: True for sums over all ranks. Then all ranks must call this method.
        """
        values = torch.cat(
            [some_values(sums) for sums in self._gradients() if sums.dtype == torch.float32]
        )
        fits = (values.view(torch.int32) & 0xFFFF == 0) & (values != 0)
        labels, losses, _ = torch.stack(seen).unbind(1)
        means = losses / labels
        if over_ranks:
            means = self._accelerator.gather(means)
        # A microbatch without labels has the mean NaN, which differs from nothing.
        mean = means.nanmean()
        differ = ((means - mean).abs() > EQUAL_LOSSES * mean.abs()).any()
        return differ & (fits.sum() > BF16_VALUED * (values != 0).sum())


class CachedWeights(Probe):
    """Probe that compares cached quantized weights with two references.

    The first reference is the present weight, quantized again. The second is the cached weight of
    other ranks.
    """

    def __init__(self) -> None:
        # Map (name of the product, id of the cached weight) to a bool scalar: True if the cached
        # weight differs from the present weight.
        self._are_stale: dict[tuple[str, int], Tensor] = {}
        # Map the name of a product to a checksum of its codes.
        self._checksums: dict[str, Tensor] = {}

    @property
    def stale(self) -> list[str]:
        """Return the sorted names of products that used a stale weight. Waits for the device."""
        return sorted({name for (name, _), is_stale in self._are_stale.items() if is_stale})

    def differing_over_ranks(self) -> list[str]:
        """Return the sorted names of products whose codes differ between two ranks.

        The host waits for the device. All ranks must call this method.
        """
        of_rank = {name: int(value) for name, value in self._checksums.items()}
        of_ranks = from_all_ranks(of_rank)
        # A rank may have computed no product with an expert.
        return sorted(
            name
            for name, value in of_rank.items()
            if any(other.get(name, value) != value for other in of_ranks)
        )

    @torch.no_grad()
    def weight(self, gemm: Gemm, operand: Operand, matrix: Callable[[], Tensor]) -> None:
        """Compare a cached weight in the first microbatch that uses it.

        Under delayed scaling, later microbatches have other scales than the cached weight.
        """
        codes = gemm.codes(operand)
        key = (gemm.name, id(codes))
        if key not in self._are_stale:
            requantized = gemm.quantize("weight", matrix(), both=False)
            self._are_stale[key] = (codes != gemm.codes(requantized)).any()
            self._checksums[gemm.name] = checksum(codes)


@torch.no_grad()
def expected_clipping(model: nn.Module, limit: float | None) -> Tensor | float:
    """Return the factor of the gradients of `model` that clips their norm to `limit`.

    The clipping function of training is not called, because this check covers that function. If
    gradients are sharded, all ranks must call this function.
    """
    norms = [
        gathered(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        for gradient in gradients_of(model).values()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return 1.0 if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return True if weight decay applies to a parameter: to matrices and embeddings.

    The rule is derived from the name, because this check covers the optimizer's own rule.
    """
    module = name.rpartition(".")[0].rpartition(".")[2]
    return parameter.dim() >= 2 and "norm" not in module and not name.endswith("bias")


def muon_matrices(model: nn.Module) -> dict[str, int]:
    """Map the name of each parameter that Muon must update to its number of matrices.

    These are the matrices in the layers, except for routers. The rule is derived from names and
    numbers of values, because this check covers the optimizer's own rule: for an expert, a
    parameter has as many matrices as it has values for each value of the second largest parameter
    of its module.
    """
    modules: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight").split(".")
        is_router = any(part == "gate" or part.startswith("router") for part in path)
        is_in_layer = any(map(str.isdigit, path))
        is_matrix = is_decayed(name, parameter) and min(parameter.shape[-2:]) > 1
        if is_in_layer and is_matrix and not is_router:
            modules.setdefault(".".join(path[:-1]), {})[name] = parameter
    matrices = {}
    for parameters in modules.values():
        largest = sorted(map(torch.numel, parameters.values()))[-2:]
        for name, parameter in parameters.items():
            stacked = max(parameter.numel() // largest[0], 1)
            if parameter.requires_grad:
                matrices[name] = stacked * math.prod(parameter.shape[:-2])
    return matrices


def adamw_options(recipe: Recipe, learning_rate: float) -> dict[str, Any]:
    """Return the arguments of torch.optim.AdamW in a step with this learning rate."""
    settings = recipe.optimizer
    return {
        "lr": learning_rate,
        "betas": tuple(settings.betas),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }


def muon_options(recipe: Recipe, learning_rate: float) -> dict[str, Any]:
    """Return the arguments of torch.optim.Muon in a step.

    learning_rate: the learning rate of AdamW in the step.
    """
    settings = recipe.optimizer
    peak = settings.muon.learning_rate or settings.learning_rate
    return {
        "lr": learning_rate * (peak / settings.learning_rate),
        "weight_decay": settings.weight_decay,
        "momentum": settings.muon.momentum,
        "adjust_lr_fn": settings.muon.adjust_lr_fn,
    }


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

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        optimizer: ExactAdamW,
        recipe: Recipe,
        learning_rate: float,
        updates: int,
        clipping: Tensor | float,
    ) -> None:
        """Compute the expected values before the optimizer's step.

        names: map the parameters of the model to their names.
        optimizer: the run's optimizer, whose update is checked.
        learning_rate: the learning rate that the schedule gives this step.
        updates: the number of updates that the run has made before this step.
        clipping: the factor of `expected_clipping`.

        If gradients are sharded, all ranks must call this method.
        """
        self._optimizer = optimizer
        self._updates = updates
        self._options = self.options_of(recipe, learning_rate)
        # Map the name of each kind of tensor to the recipe's name for its dtype.
        self._modes = {
            "gradients": recipe.gradients_kept_in,
            "weights": recipe.weights,
            **dict.fromkeys(self.moments, recipe.moments_kept_in),
        }
        trained = [
            (names[parameter], parameter, gradient, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if optimizer.moments_of(parameter) == self.moments
            and (gradient := gradient_of(parameter)) is not None
        ]
        self._names, self._parameters, gradients, groups = zip(*trained, strict=True)
        self._device = self._parameters[0].device
        self._are_decayed = [*map(is_decayed, self._names, self._parameters)]
        self._wrong = {*self._wrong_settings(groups), *self._wrong_dtypes(gradients)}
        sizes = [[len(some_values(gradient, updates))] for gradient in gradients]
        self._sizes = torch.tensor(sizes, device=self._device).clamp(min=1)
        self._before = self._values()
        self._expected = self._updated_by_torch(self._sampled(gradients).float() * clipping)

    def differences(self) -> list[str]:
        """Return one line of text for each kind of fault in the optimizer's step."""
        lines = sorted(self._wrong)
        after = self._values()
        for kind, expected in self._expected.items():
            is_in_bf16 = self._modes[kind] == "bf16"
            is_off = self._is_off(after[kind], expected, self._before[kind], in_bf16=is_in_bf16)
            if names := [*compress(self._names, is_off.any(1).tolist())]:
                lines.append(
                    f"{kind} of {len(names)} of {len(self._names)} parameters: {some_of(names)}"
                )
        update = self._updates + 1
        counted = {int(self._optimizer.state[parameter]["step"]) for parameter in self._parameters}
        if wrong := sorted(counted - {update}):
            lines.append(
                f"the optimizer has counted {wrong[0]} updates, but this is update {update}"
            )
        return lines

    def _wrong_settings(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield a text such as "AdamW's lr is 0.1, not 0.2" for each wrong setting of a parameter.

        groups: the parameter group of each parameter.
        """
        for group, decays in zip(groups, self._are_decayed, strict=True):
            expected = self._options | {"weight_decay": self._options["weight_decay"] * decays}
            for key, value in expected.items():
                if group[key] != value:
                    yield f"{self.algorithm}'s {key} is {group[key]}, not {value}"

    def _wrong_dtypes(self, gradients: Sequence[Tensor]) -> Iterator[str]:
        """Yield a text for each tensor that is not stored in the dtype of the recipe."""
        stored = {"gradients": gradients, **self._stored()}
        for kind, mode in self._modes.items():
            for actual in {dtype_name(tensor.dtype) for tensor in stored[kind]}:
                if actual != WEIGHT_DTYPES[mode]:
                    yield f"{kind} are {actual}, not {WEIGHT_DTYPES[mode]}"

    def _stored(self) -> dict[str, Sequence[Tensor]]:
        """Map "weights" to the parameters, and each name in their state to its tensors."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        in_state = {key: [state[key] for state in states] for key in states[0] if key != "step"}
        return {"weights": self._parameters, **in_state}

    def _sampled(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return a row of sampled values for each tensor, [parameters, values].

        Short rows are padded with zeros.
        """
        rows = [some_values(tensor, self._updates) for tensor in tensors]
        # The state may be in host memory (`optimizer.offload`).
        return pad_sequence(rows, batch_first=True).to(self._device)

    def _values(self) -> dict[str, Tensor]:
        """Return the sampled values of all tensors in `_stored`, FP32 [parameters, values].

        Exact BF16 weights include their lower 16 bits.
        """
        values = {kind: self._sampled(tensors) for kind, tensors in self._stored().items()}
        if "remainder" in values:
            values["weights"] = join(values["weights"], values.pop("remainder"))
        return {kind: tensor.float() for kind, tensor in values.items()}

    def _updated_by_torch(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the values that torch's optimizer computes from the values before the update.

        gradient: the sampled gradients after clipping, FP32.

        The result has the keys and shapes of `_values`.
        """
        decays = torch.tensor(self._are_decayed, device=self._device).unsqueeze(1)
        # AdamW first multiplies the decayed weights by this factor.
        kept = 1 - self._options["lr"] * self._options["weight_decay"] * decays
        weight = nn.Parameter(self._before["weights"] * kept)
        weight.grad = gradient
        reference = torch.optim.AdamW([weight], **self._options | {"weight_decay": 0.0})
        moments = {name: self._before[name].clone() for name in MOMENTS}
        reference.state[weight] = {"step": torch.tensor(float(self._updates)), **moments}
        reference.step()
        return {"weights": weight.detach(), **moments}

    def _is_off(self, actual: Tensor, expected: Tensor, before: Tensor, *, in_bf16: bool) -> Tensor:
        """Return a bool tensor: True for each value that differs from its expected value.

        NaN always differs.

        before: the values before the update. They determine the tolerance.
        in_bf16: True if `actual` is stored in BF16. Then the limits of the tolerance are rounded to
            BF16 too.
        """
        change = (expected - before).abs()
        mean_square = change.square().sum(1, keepdim=True) / self._sizes
        tolerance = RELATIVE * torch.maximum(change, mean_square.sqrt()) + ROUNDING * expected.abs()
        bounds = torch.stack([expected - tolerance, expected + tolerance])
        lowest, highest = bounds.bfloat16().float() if in_bf16 else bounds
        return ~((lowest <= actual) & (actual <= highest))


class TorchMomentum(TorchUpdate):
    """The expected momentum of all parameters that Muon updates, for a sample of their values."""

    algorithm = "Muon"
    moments = (MOMENTUM,)
    options_of = staticmethod(muon_options)

    def _updated_by_torch(self, gradient: Tensor) -> dict[str, Tensor]:
        momentum = self._before[MOMENTUM]
        return {MOMENTUM: momentum.lerp(gradient, 1 - self._options[MOMENTUM])}


def one_of_each_shape(hidden: Sequence[Hidden], updates: int) -> list[Hidden]:
    """Return a random parameter of each shape. All ranks choose the same parameters.

    updates: the number of past updates. It is the seed of the choice.
    """
    shuffled = Random(updates).sample(hidden, len(hidden))
    return list({item.shape: item for item in shuffled}.values())


class TorchMuonUpdate:
    """The expected result of Muon's update: torch.optim.Muon on one matrix of a parameter.

    Create the object when the gradients are complete, and call `differences` after the optimizer's
    step. All ranks must call both.
    """

    def __init__(
        self,
        item: Hidden,
        names: Mapping[nn.Parameter, str],
        optimizer: ExactAdamW,
        recipe: Recipe,
        learning_rate: float,
        updates: int,
        clipping: Tensor | float,
    ) -> None:
        """Compute the expected values before the optimizer's step, as `TorchUpdate` does.

        item: the parameter.
        """
        self._item = item
        self._name = names[item.parameter]
        self._number = Random(updates).randrange(item.shape[0])
        self._state = optimizer.state[item.parameter]
        options = muon_options(recipe, learning_rate)
        self._decay = options["lr"] * options["weight_decay"]
        self._before = self._values()
        self._momentum = self._matrix(self._state[MOMENTUM]).float().clone()
        weight = nn.Parameter(self._before.clone())
        weight.grad = self._matrix(cast(Tensor, gradient_of(item.parameter))).float() * clipping
        reference = torch.optim.Muon([weight], **options)
        reference.state[weight] = {"momentum_buffer": self._momentum}
        reference.step()
        defaults = reference.defaults
        self._polynomial = (defaults["ns_coefficients"], defaults["ns_steps"])
        exact = weight.detach()
        self._expected = exact.bfloat16().float() if recipe.weights == "bf16" else exact
        self._rounding = self._expected - exact + ROUNDING * exact

    def differences(self) -> list[str]:
        """Return one line of text for each kind of fault in the update."""
        before = self._weighted(self._before)
        change = self._weighted(self._expected - self._before)
        error = self._weighted(self._values() - self._expected)
        limit = MUON_RELATIVE * change.norm() + 2 * self._weighted(self._rounding).norm()
        lines = []
        # The tolerance of the weights is too large for the coefficients.
        if self._polynomial != (muon.COEFFICIENTS, muon.STEPS):
            lines.append(f"Muon's polynomial is {muon.COEFFICIENTS}, not {self._polynomial[0]}")
        # NaN is always a fault.
        if not error.norm() <= limit:
            lines.append(f"weights of a matrix in {self._name}")
        # Remove the components along the update, whose scale may be off too.
        update = change + self._decay * before
        before, error = (
            vector - update * (vector @ update) / (update @ update) for vector in (before, error)
        )
        smallest = (MUON_DECAY * self._decay + ROUNDING) * (before @ before)
        noise = MUON_DECAY * before.norm() * error.norm()
        if (before @ error).abs() > torch.maximum(smallest, noise):
            lines.append(f"weight decay of a matrix in {self._name}")
        return lines

    def _weighted(self, values: Tensor) -> Tensor:
        """Return a matrix, multiplied by the momentum along the longer side, as an FP64 vector."""
        rows, columns = values.shape
        product = values @ self._momentum.mT if rows < columns else values.mT @ self._momentum
        return product.flatten().double()

    def _values(self) -> Tensor:
        """Return a copy of the matrix with its remainders, FP32."""
        weight = self._matrix(self._item.parameter)
        if "remainder" in self._state:
            # Ranks cannot gather int16.
            return join(weight, self._matrix(self._state["remainder"].int()))
        return weight.to(torch.float32, copy=True)

    def _matrix(self, tensor: Tensor) -> Tensor:
        """Return the matrix in a tensor with the shape of its parameter, over all shards."""
        return self._item.split(gathered(tensor.detach()))[self._number]
