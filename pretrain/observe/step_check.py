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
from random import Random
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.metrics.health import TrainingHalted, some_of
from pretrain.model.distributed import from_all_ranks, largest_over_ranks
from pretrain.model.gradients import gathered, gradient_of, gradients_of, local_part
from pretrain.model.packed import PackedLanguageModel
from pretrain.observe.observers import Observer, Step, is_due
from pretrain.optimizer import muon
from pretrain.optimizer.adamw import MOMENTS, ExactAdamW
from pretrain.optimizer.exact_weights import join, master_of
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
        stale = cached_weights.stale
        differing = cached_weights.differing_over_ranks()
        evaluating = [name for name, module in self._packed.named_modules() if not module.training]
        # Map each line of the message to True if it applies.
        faults = {
            f"the step's packs begin at position {batches.places.start:,} in the order of packs, "
            f"not at {place:,}": batches.places.start != place,
            f"{int(left_over)} gradients were not cleared before the step": left_over,
            f"{len(evaluating)} modules are in evaluation mode: {some_of(evaluating)}": evaluating,
            f"{len(stale)} products use weights from before the last update: {some_of(stale)}": (
                stale
            ),
            f"{len(differing)} products use another quantized weight in another process: "
            f"{some_of(differing)}": differing,
            f"{len(not_gathered)} weights were not gathered after the last update: "
            f"{some_of(not_gathered)}": not_gathered,
            f"{total:,.0f} labels were trained on, but the step counts {counted:,}": total
            != counted,
            f"a token's loss is not divided by the step's {counted:,} labels": not torch.allclose(
                factors, torch.ones_like(factors), rtol=1e-5, atol=0
            ),
            "gradients are added up in BF16, not in FP32: their sums fit into BF16": (
                any(sums_fit_bf16)
            ),
        }
        self._wrong = [line for line, is_true in faults.items() if is_true]

    @contextmanager
    def update(
        self, step: Step, learning_rate: float, updates: int, losses: Mapping[str, float]
    ) -> Iterator[None]:
        """Compare the update with torch's, and `losses` with the losses of the microbatches.

        All ranks must call this method. Raises TrainingHalted on all processes if any process has
        found a fault in the step or in the update.
        """
        clipping = expected_clipping(self._packed.hf, self._recipe.optimizer.clip)
        arguments = (self._recipe, learning_rate, updates, clipping)
        hf, optimizer = self._packed.hf, self._optimizer
        by_torch: list[TorchUpdate | TorchMuonUpdate] = [TorchUpdate(hf, optimizer, *arguments)]
        split: dict[str, int] = {}
        if isinstance(optimizer, Muon):
            names = {parameter: name for name, parameter in hf.named_parameters()}
            split = {names[item.parameter]: item.shape[0] for item in optimizer.hidden.values()}
            by_torch.append(TorchMomentum(hf, optimizer, *arguments))
            by_torch += [
                TorchMuonUpdate(item, names[item.parameter], optimizer, *arguments)
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
        # NaN for a microbatch without labels.
        means = losses / labels
        if over_ranks:
            means = self._accelerator.gather(means)
        lowest = means.nan_to_num(nan=math.inf).amin()
        highest = means.nan_to_num(nan=-math.inf).amax()
        differ = highest - lowest > EQUAL_LOSSES * highest.abs()
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
    numbers of values, because this check covers the optimizer's own rule: a parameter has as many
    matrices for an expert as it has values for each value of the largest other matrix of its
    module.
    """
    modules: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight").split(".")
        is_router = any(part == "gate" or part.startswith("router") for part in path)
        is_in_layer = any(part.isdigit() for part in path)
        is_matrix = is_decayed(name, parameter) and min(parameter.shape[-2:]) > 1
        if is_in_layer and is_matrix and not is_router:
            modules.setdefault(".".join(path[:-1]), {})[name] = parameter
    matrices = {}
    for parameters in modules.values():
        for name, parameter in parameters.items():
            others = [other.numel() for key, other in parameters.items() if key != name]
            stacked = parameter.numel() // max(others, default=parameter.numel())
            experts = len(parameter) if parameter.dim() == 3 else 1
            if parameter.requires_grad:
                matrices[name] = experts * max(stacked, 1)
    return matrices


class TorchUpdate:
    """The expected result of AdamW's update: torch.optim.AdamW on a sample of the values.

    Create the object when the gradients are complete, and call `differences` after the optimizer's
    step.
    """

    # Names of the moments in the state of a parameter.
    moments: Sequence[str] = MOMENTS

    def __init__(
        self,
        model: nn.Module,
        optimizer: ExactAdamW,
        recipe: Recipe,
        learning_rate: float,
        updates: int,
        clipping: Tensor | float,
    ) -> None:
        """Compute the expected values before the optimizer's step.

        optimizer: the run's optimizer, whose update is checked.
        learning_rate: the learning rate that the schedule gives this step.
        updates: the number of updates that the run has made before this step.
        clipping: the factor of `expected_clipping`.

        If gradients are sharded, all ranks must call this method.
        """
        self._optimizer = optimizer
        self._recipe = recipe
        self._updates = updates
        updated = {p for group in self._groups() for p in group["params"]}
        trained = [
            (name, parameter, gradient)
            for name, parameter in model.named_parameters()
            if parameter in updated and (gradient := gradient_of(parameter)) is not None
        ]
        self._names, self._parameters, self._gradients = zip(*trained, strict=True)
        self._device = self._parameters[0].device
        self._wrong_settings = {
            f"{what} {actual}, not {expected}"
            for what, actual, expected in (*self._settings(learning_rate), *self._dtypes())
            if actual != expected
        }
        picked = [some_values(gradient, updates) for gradient in self._gradients]
        self._sizes = torch.tensor([len(values) for values in picked], device=self._device)
        # The index of the parameter that each sampled value belongs to.
        self._parameter_of = torch.arange(len(picked), device=self._device).repeat_interleave(
            self._sizes
        )
        gradient = torch.cat(picked).float() * clipping
        self._before = self._values()
        self._expected = self._updated_by_torch(gradient, learning_rate)

    def differences(self) -> list[str]:
        """Return one line of text for each kind of fault in the optimizer's step."""
        lines = sorted(self._wrong_settings)
        after = self._values()
        in_bf16 = {
            "weights": self._recipe.weights == "bf16",
            **dict.fromkeys(self.moments, self._recipe.moments_kept_in == "bf16"),
        }
        for kind, expected in self._expected.items():
            is_off = self._is_off(after[kind], expected, self._before[kind], in_bf16=in_bf16[kind])
            counts = self._by_parameter(is_off.float()).tolist()
            names = [name for name, count in zip(self._names, counts, strict=True) if count]
            if names:
                lines.append(
                    f"{kind} of {len(names)} of {len(self._names)} parameters: {some_of(names)}"
                )
        counted = {int(self._optimizer.state[parameter]["step"]) for parameter in self._parameters}
        if counted != {self._updates + 1}:
            lines.append(
                f"the optimizer has counted {', '.join(map(str, sorted(counted)))} updates, but "
                f"this is update {self._updates + 1}"
            )
        return lines

    def _groups(self) -> Sequence[dict[str, Any]]:
        """Return the parameter groups whose update is checked."""
        return self._optimizer.adamw_groups

    def _settings(self, learning_rate: float) -> Iterator[tuple[str, Any, Any]]:
        """Yield a tuple (text, present value, expected value) for each hyperparameter of a group.

        `text` is the beginning of an error message, such as "lr is".
        """
        settings = self._recipe.optimizer
        names = dict(zip(self._parameters, self._names, strict=True))
        for group in self._groups():
            yield "lr is", group["lr"], learning_rate
            yield "betas is", group["betas"], tuple(settings.betas)
            yield "eps is", group["eps"], settings.eps
            for parameter in names.keys() & {*group["params"]}:
                decays = is_decayed(names[parameter], parameter)
                yield "weight_decay is", group["weight_decay"], settings.weight_decay * decays

    def _dtypes(self) -> Iterator[tuple[str, str, str]]:
        """Yield a tuple as `_settings` for the dtypes of weights, gradients and moments."""
        recipe = self._recipe
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            state = self._optimizer.state[parameter]
            stored = (
                ("weights", parameter, recipe.weights),
                ("gradients", gradient, recipe.gradients_kept_in),
                *((name, state[name], recipe.moments_kept_in) for name in self.moments),
            )
            for kind, tensor, mode in stored:
                yield f"{kind} are", dtype_name(tensor.dtype), WEIGHT_DTYPES[mode]

    def _values(self) -> dict[str, Tensor]:
        """Return the sampled values of all parameters, concatenated, FP32.

        Map "weights" to the sampled weights, and the name of each moment to its sampled values.
        Exact BF16 weights include their lower 16 bits.
        """
        states = [self._optimizer.state[parameter] for parameter in self._parameters]

        def picked(tensors: Iterable[Tensor]) -> Tensor:
            # The state may be in host memory (`optimizer.offload`).
            values = [some_values(tensor, self._updates) for tensor in tensors]
            return torch.cat(values).to(self._device)

        weights = picked(self._parameters)
        if all("remainder" in state for state in states):
            weights = join(weights, picked([state["remainder"] for state in states]))
        return {"weights": weights.float()} | {
            name: picked([state[name] for state in states]).float() for name in self.moments
        }

    def _updated_by_torch(self, gradient: Tensor, learning_rate: float) -> dict[str, Tensor]:
        """Return the values that torch.optim.AdamW computes from the values before the update.

        gradient: the sampled gradients after clipping, FP32.

        The result has the keys and shapes of `_values`.
        """
        settings = self._recipe.optimizer
        are_decayed = [*map(is_decayed, self._names, self._parameters)]
        decays = torch.tensor(are_decayed, device=self._device)[self._parameter_of]
        # AdamW first multiplies the decayed weights by this factor.
        kept = 1 - learning_rate * settings.weight_decay * decays
        weight = nn.Parameter(self._before["weights"] * kept)
        weight.grad = gradient
        beta1, beta2 = settings.betas
        reference = torch.optim.AdamW([weight], learning_rate, (beta1, beta2), settings.eps, 0.0)
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
        mean_square = self._by_parameter(change.square()) / self._sizes.clamp(min=1)
        usual = mean_square.sqrt()[self._parameter_of]
        tolerance = RELATIVE * torch.maximum(change, usual) + ROUNDING * expected.abs()
        bounds = torch.stack([expected - tolerance, expected + tolerance])
        lowest, highest = bounds.bfloat16().float() if in_bf16 else bounds
        return ~((lowest <= actual) & (actual <= highest))

    def _by_parameter(self, values: Tensor) -> Tensor:
        """Return the sum of the sampled `values` of each parameter, [parameters]."""
        return torch.zeros(len(self._names), device=self._device).index_add_(
            0, self._parameter_of, values
        )


class TorchMomentum(TorchUpdate):
    """The expected momentum of all parameters that Muon updates, for a sample of their values."""

    moments = (MOMENTUM,)

    def _groups(self) -> Sequence[dict[str, Any]]:
        return self._optimizer.param_groups[-1:]

    def _settings(self, learning_rate: float) -> Iterator[tuple[str, Any, Any]]:
        """Yield the hyperparameters of Muon, and its polynomial, which torch's Muon has too."""
        (group,) = self._groups()
        options = muon_options(self._recipe, learning_rate)
        yield from ((f"Muon's {key} is", group[key], value) for key, value in options.items())
        defaults = torch.optim.Muon([torch.zeros(1, 1)]).defaults
        yield "Muon's polynomial is", muon.COEFFICIENTS, defaults["ns_coefficients"]
        yield "Muon's number of steps is", muon.STEPS, defaults["ns_steps"]

    def _updated_by_torch(self, gradient: Tensor, learning_rate: float) -> dict[str, Tensor]:
        beta = self._recipe.optimizer.muon.momentum
        return {MOMENTUM: torch.lerp(self._before[MOMENTUM], gradient, 1 - beta)}


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
        name: str,
        optimizer: Muon,
        recipe: Recipe,
        learning_rate: float,
        updates: int,
        clipping: Tensor | float,
    ) -> None:
        """Compute the expected values before the optimizer's step, as `TorchUpdate` does.

        item: the parameter.
        name: the name of the parameter.
        """
        self._item = item
        self._name = name
        self._number = Random(updates).randrange(item.shape[0])
        self._state = optimizer.state[item.parameter]
        options = muon_options(recipe, learning_rate)
        self._decay = options["lr"] * options["weight_decay"]
        self._before = self._values()
        weight = nn.Parameter(self._before.clone())
        gradient = self._matrix(cast(Tensor, gradient_of(item.parameter))).float()
        weight.grad = gradient * clipping
        self._momentum = self._matrix(self._state[MOMENTUM]).float().clone()
        reference = torch.optim.Muon([weight], **options)
        reference.state[weight] = {"momentum_buffer": self._momentum}
        reference.step()
        self._expected = weight.detach()
        self._rounding = ROUNDING * self._expected
        if recipe.weights == "bf16":
            self._expected = weight.detach().bfloat16().float()
            self._rounding = self._expected - weight.detach()

    def differences(self) -> list[str]:
        """Return one line of text for each kind of fault in the update."""
        before = self._weighted(self._before)
        change = self._weighted(self._expected - self._before)
        error = self._weighted(self._values() - self._expected)
        limit = MUON_RELATIVE * change.norm() + 2 * self._weighted(self._rounding).norm()
        lines = []
        # NaN is always a fault.
        if not error.norm() <= limit:
            lines.append(f"weights of a matrix in {self._name}")
        # Remove the components along the update, whose scale may be off too.
        update = change + self._decay * before
        before, error = (
            vector - update * (vector @ update) / (update @ update) for vector in (before, error)
        )
        product = (before @ error).abs()
        if (
            product > (MUON_DECAY * self._decay + ROUNDING) * (before @ before)
            and product > MUON_DECAY * before.norm() * error.norm()
        ):
            lines.append(f"weight decay of a matrix in {self._name}")
        return lines

    def _weighted(self, values: Tensor) -> Tensor:
        """Return a matrix, multiplied by the momentum along the longer side, as an FP64 vector."""
        rows, columns = values.shape
        product = values @ self._momentum.mT if rows < columns else values.mT @ self._momentum
        return product.flatten().double()

    def _values(self) -> Tensor:
        """Return the matrix with its remainders, FP32."""
        parameter = self._item.parameter
        remainder = self._state.get("remainder")
        # Join the local parts, because ranks cannot gather int16 remainders.
        master = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        local_part(master).copy_(
            master_of(local_part(parameter), None if remainder is None else local_part(remainder))
        )
        return self._matrix(master)

    def _matrix(self, tensor: Tensor) -> Tensor:
        """Return the matrix in a tensor with the shape of its parameter, over all shards."""
        return self._item.split(gathered(tensor))[self._number]
