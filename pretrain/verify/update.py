"""A step's update beside torch's own, and what the step says of itself beside what was seen of it: docs/verification.md has all.

Parity holds forward and backward, the audit products. How steps follow from one another is held here, in the first two that a
process makes and in every statistics step. AdamW treats each value by itself, so copies of some values see what copies of all
would. Only the gradients' norm is of all values, and is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foundation.overrides import overridden
from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.metrics.health import TrainingHalted, some_of
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.gradients import gradient_of, local_part
from pretrain.model.packed import PackedLanguageModel
from pretrain.optimizer.adamw import MOMENTS, ExactAdamW
from pretrain.optimizer.exact_weights import join
from pretrain.precision.observed import dtype_name
from pretrain.precision.product import Operand, Product
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.settings.recipe import Recipe

VALUES = 1024  # of each parameter, at most
# of a value's change, or of its tensor's usual one: norms that add up in another order are 1e-6
# apart
RELATIVE = 1e-4
ROUNDING = 2.0**-22  # of the value itself: FP32 rounds to 2^-24, a few times
# of FP32 sums over several microbatches, at most, that BF16 could hold as they are
BF16_VALUED = 0.9


def some_values(tensor: Tensor, updates: int = 0) -> Tensor:
    """Return at most VALUES evenly spaced values of this process's part of a tensor.

    Which values these are changes with the number of `updates`.
    """
    values = local_part(tensor).reshape(-1)
    stride = -(-values.numel() // VALUES) or 1
    return values[updates % stride :: stride]


class StepCheck:
    """One step of training, looked at: `passes` around its forward and backward, then `update` around the optimizer's step."""

    def __init__(
        self,
        packed: PackedLanguageModel,
        optimizer: ExactAdamW,
        recipe: Recipe,
        accelerator: Accelerator,
    ) -> None:
        self._packed, self._optimizer, self._recipe, self._accelerator = (
            packed,
            optimizer,
            recipe,
            accelerator,
        )
        self._wrong: list[str] = []
        # of a product and a copy of its weight, a bool
        self._are_old: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def passes(self, step: StepBatches, place: int = 0) -> Iterator[None]:
        """Observe the microbatches of `step`, whose packs must begin at `place` in the stream.

        Collective.
        """
        # of each whose backward has begun, its number of labels and the factor of its summed loss
        seen: list[Tensor] = []
        rounded: list[Tensor] = []  # a bool on the device: the sums of two microbatches fit BF16
        # The host does not wait for the device here. Sums of magnitudes, as squares may underflow.
        left_over = torch.stack(
            torch._foreach_norm(self._gradients(), 1, dtype=torch.float32),
        ).count_nonzero()

        def after_forward(
            module: nn.Module, args: Any, inputs: dict[str, Any], loss: Tensor
        ) -> None:
            labels = (inputs["labels"] != IGNORE).sum().double()
            loss.register_hook(
                lambda gradient: seen.append(torch.stack([labels, gradient.detach().double()]))
            )
            if len(seen) == 2:  # the third microbatch's bits would hide that a sum was rounded
                rounded.append(self._fit_bf16())

        with (
            self._packed.register_forward_hook(after_forward, with_kwargs=True),
            overridden(self._packed.context, weight_observers=[self._see_weight]),
        ):
            yield
        nothing = torch.zeros(0, 2, dtype=torch.float64, device=self._accelerator.device)
        labels, factors = (torch.stack(seen) if seen else nothing).unbind(1)
        total, counted = (
            int(self._accelerator.reduce(labels.sum(), reduction="sum")),
            step.valid_tokens,
        )
        old = sorted({name for (name, _), is_old in self._are_old.items() if is_old})
        evaluating = [name for name, module in self._packed.named_modules() if not module.training]
        claims = {  # lines of the message, and whether they are true
            f"its packs begin at place {step.places.start:,}, not {place:,}": (
                step.places.start != place  # in the stream
            ),
            f"{int(left_over)} gradients were not cleared before the step": left_over,
            f"{len(evaluating)} modules are in evaluation mode: {some_of(evaluating)}": evaluating,
            f"{len(old)} products use weights from before the last update: {some_of(old)}": old,
            f"{total:,} labels were trained on, and the step counts {counted:,}": total != counted,
            f"a token's loss is not divided by the step's {counted:,} labels": not torch.allclose(
                factors * max(counted, 1),
                torch.ones_like(factors),
                rtol=1e-5,
                atol=0,
            ),
            "gradients add up in BF16, not in FP32: their sums have no more bits": (
                any(rounded) or (len(seen) > 1 and self._fit_bf16())
            ),
        }
        self._wrong = [line for line, is_wrong in claims.items() if is_wrong]

    def _gradients(self) -> list[Tensor]:
        """Return this process's parts of all gradients, and first an empty tensor."""
        return [
            torch.zeros(0, device=self._packed.hf.device),  # there may be no gradient
            *(
                local_part(gradient)
                for parameter in self._packed.parameters()
                if (gradient := gradient_of(parameter)) is not None
            ),
        ]

    def _fit_bf16(self) -> Tensor:
        """Return whether some values of each FP32 sum of gradients fit BF16: a bool tensor."""
        values = torch.cat(
            [some_values(sums) for sums in self._gradients() if sums.dtype == torch.float32],
        )
        fits = (values.view(torch.int32) & 0xFFFF == 0) & (values != 0)
        return fits.sum() > BF16_VALUED * (values != 0).sum()

    @torch.no_grad()
    def _see_weight(self, product: Product, operand: Operand, matrix: Tensor) -> None:
        """Quantizes or casts the weight `matrix` anew, as it is now. A copy that serves several microbatches is looked at in the
        first, whose scale it has under delayed scaling."""
        codes = product.codes(operand)
        if (product.name, id(codes)) not in self._are_old:
            new = product.operand("weight", matrix, both=False)
            self._are_old[product.name, id(codes)] = (codes != product.codes(new)).any()

    @contextmanager
    def update(self, step: int, learning_rate: float, updates: int) -> Iterator[None]:
        """Sees the update of `step`, which comes after so many `updates`, at the schedule's `learning_rate`. Raises
        TrainingHalted, on all processes, where one of them has seen anything wrong. Collective."""
        by_torch = TorchUpdate(
            self._packed.hf,
            self._optimizer,
            self._recipe,
            learning_rate,
            updates,
        )
        yield
        wrong = [*self._wrong, *by_torch.differences()]
        if largest_over_ranks(self._accelerator, len(wrong)):
            lines = "\n".join(f"  {line}" for line in (wrong or ["what another process says"]))
            raise TrainingHalted(
                step,
                f"it is not what it should be, or its update not what torch.optim.AdamW makes of it:\n{lines}\nThe step is not "
                "saved. The fault lies in the code or in the device, not in the recipe",
            )


class TorchUpdate:
    """What torch makes of some values, when the gradients are whole."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: ExactAdamW,
        recipe: Recipe,
        learning_rate: float,
        updates: int,
    ) -> None:
        self._optimizer, self._recipe, self._updates = optimizer, recipe, updates
        trained = {
            n: p
            for n, p in model.named_parameters()
            if p.requires_grad and gradient_of(p) is not None
        }
        self._names, self._parameters = list(trained), list(trained.values())
        self._device = self._parameters[0].device
        self._claims = [*self._wrong_numbers(learning_rate), *self._wrong_dtypes()]

        gradients = [gradient_of(parameter) for parameter in self._parameters]
        # Not by the function that training clips by, which is held to it. Collective where gradients are sharded.
        norms = [torch.linalg.vector_norm(each.detach(), dtype=torch.float32) for each in gradients]
        norms = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
        limit, norm = recipe.optimizer.clip, torch.stack(norms).square().sum().sqrt()
        coefficient = 1.0 if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)
        picked = [some_values(gradient, updates) for gradient in gradients]
        self._sizes = torch.tensor([len(each) for each in picked], device=self._device)
        # of each value
        self._tensor_of = torch.arange(len(picked), device=self._device).repeat_interleave(
            self._sizes
        )
        gradient = torch.cat(picked).float()
        self._before = self._values()
        self._expected = self._updated_by_torch(gradient * coefficient, learning_rate)

    def differences(self) -> list[str]:
        """What the optimizer's step, done meanwhile, has made otherwise: a line for each thing, with the parameters."""
        lines, after, stored = list(self._claims), self._values(), self._recipe
        in_bf16 = {
            "weights": stored.weights == "bf16",
            **dict.fromkeys(MOMENTS, stored.moments_kept_in == "bf16"),
        }
        for what, expected in self._expected.items():
            off = self._off(after[what], expected, self._before[what], in_bf16=in_bf16[what])
            counts = self._by_tensor(off.float()).tolist()
            if names := [name for name, count in zip(self._names, counts, strict=True) if count]:
                lines.append(
                    f"{what} of {len(names)} of {len(self._names)} parameters: {some_of(names)}"
                )
        done = {int(self._optimizer.state[parameter]["step"]) for parameter in self._parameters}
        if done != {self._updates + 1}:
            lines.append(
                f"updates are counted as {', '.join(map(str, sorted(done)))}, and this was number {self._updates + 1}"
            )
        return lines

    def _wrong_numbers(self, learning_rate: float) -> list[str]:
        """Where the optimizer's numbers are not the recipe's."""
        settings, wrong = self._recipe.optimizer, set()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                decay = settings.weight_decay if parameter.dim() >= 2 else 0.0
                expected = {
                    "lr": learning_rate,
                    "betas": tuple(settings.betas),
                    "eps": settings.eps,
                    "weight_decay": decay,
                }
                wrong |= {
                    f"{key} is {group[key]}, not {value}"
                    for key, value in expected.items()
                    if group[key] != value
                }
        return sorted(wrong)

    def _wrong_dtypes(self) -> list[str]:
        """Where something is not stored as the recipe says."""
        recipe, wrong = self._recipe, set()
        expected = {
            "weights": WEIGHT_DTYPES[recipe.weights],
            "gradients": WEIGHT_DTYPES[recipe.gradients_kept_in],
            **dict.fromkeys(MOMENTS, WEIGHT_DTYPES[recipe.moments_kept_in]),
        }
        for parameter in self._parameters:
            state = self._optimizer.state[parameter]
            stored = {"weights": parameter, "gradients": gradient_of(parameter)} | {
                name: state[name] for name in MOMENTS
            }
            stored_in = {what: dtype_name(tensor.dtype) for what, tensor in stored.items()}
            wrong |= {
                f"{what} are {dtype}, not {expected[what]}"
                for what, dtype in stored_in.items()
                if dtype != expected[what]
            }
        return sorted(wrong)

    def _values(self) -> dict[str, Tensor]:
        """The picked values in FP32 of all parameters, one after another: weights that updates apply to, and moments."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        weights = torch.cat(
            [some_values(parameter, self._updates) for parameter in self._parameters],
        )
        if all("remainder" in state for state in states):
            weights = join(
                weights,
                torch.cat([some_values(state["remainder"], self._updates) for state in states]),
            )
        moments = {
            name: torch.cat(
                [some_values(state[name], self._updates) for state in states],
            ).float()
            for name in MOMENTS
        }
        return {"weights": weights.float()} | moments

    def _updated_by_torch(self, gradient: Tensor, learning_rate: float) -> dict[str, Tensor]:
        """What `_values` should be after the update."""
        settings = self._recipe.optimizer
        decays = torch.tensor(
            [parameter.dim() >= 2 for parameter in self._parameters], device=self._device
        )[self._tensor_of]
        expected = {name: torch.empty_like(value) for name, value in self._before.items()}
        for mask, decay in ((decays, settings.weight_decay), (~decays, 0.0)):
            weight = nn.Parameter(self._before["weights"][mask].clone())
            weight.grad = gradient[mask]
            reference = torch.optim.AdamW(
                [weight], learning_rate, settings.betas, settings.eps, decay
            )
            moments = {name: self._before[name][mask].clone() for name in MOMENTS}
            reference.state[weight] = {"step": torch.tensor(float(self._updates)), **moments}
            reference.step()
            for name, value in {"weights": weight.detach(), **moments}.items():
                expected[name][mask] = value
        return expected

    def _off(self, actual: Tensor, expected: Tensor, before: Tensor, *, in_bf16: bool) -> Tensor:
        """Which values are not what is expected, as FP32 or BF16 holds it; what is no number is one of them."""
        change = (expected - before).abs()
        usual = (self._by_tensor(change.square()) / self._sizes.clamp(min=1)).sqrt()[
            self._tensor_of
        ]
        tolerated = RELATIVE * torch.maximum(change, usual) + ROUNDING * expected.abs()
        held: Callable[[Tensor], Tensor] = (
            (lambda values: values.bfloat16().float()) if in_bf16 else (lambda values: values)
        )
        return ~((held(expected - tolerated) <= actual) & (actual <= held(expected + tolerated)))

    def _by_tensor(self, values: Tensor) -> Tensor:
        """The sum over the picked values of each parameter."""
        return torch.zeros(len(self._names), device=self._device).index_add_(
            0, self._tensor_of, values
        )
