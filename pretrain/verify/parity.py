"""Does the fast path train what plain transformers trains? Its step 0, beside an eager FP32 forward of each document alone.

The fast path is the assembled model as the launcher is about to train it: packed, compiled, sharded, in its precision. It may
differ from the plain one by what rounding explains, and how much that is depends on the precision: each recipe has a tolerance.

A loss alone would prove little: at the start it is near the logarithm of the vocabulary's size whatever the layers do. So the
direction and the length of every tensor's gradient are compared. Real text is needed, the beginning of the run's own step 0:
where all tokens are the same, attention averages equal values whichever it sees. Dropout is off on both sides.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from packing.batch import StepBatches
from pretrain.metrics.health import TrainingHalted
from pretrain.model.packed import forward_backward
from pretrain.model.wrapping import gradient_of
from pretrain.optimizer.adamw import clear_gradients
from pretrain.precision.formats.definition import Tolerance
from pretrain.verify.reference_model import Pass, reference_model, reference_pass, whole

MICROBATCHES = 2  # of each rank: the first quantizes the weights, and the second takes its copies
# Below this share of the whole gradient's norm a gradient is zero on paper (a key's bias where keys are not rotated), and what is
# there is rounding noise without a direction. Only one thing is asked: has the fast path made something of nothing?
NEGLIGIBLE = 1e-6
SHOWN = 10  # tensors in a table, the worst ones


@dataclass(frozen=True)
class TensorParity:
    """One tensor's gradient on both sides; its norms as shares of the plain gradient's norm over all tensors."""

    name: str
    cosine: float | None  # None: the plain gradient is negligible and has no direction
    share: float
    plain_share: float

    def excess(self, tolerance: Tolerance) -> float:
        """How many times over the tolerated the worst of it is; above 1 is a mismatch.

        An error of a share e of the gradient's norm lowers the cosine by e^2 / 2 where it stands across, and changes the norm by
        e where it lies along. So the e that the tolerated cosine allows is also what the norm may be off.
        """
        if self.cosine is None:
            excess = self.share / tolerance.gradient_norm
        else:
            off_length = abs(self.share / self.plain_share - 1) / math.sqrt(2 * (1 - tolerance.cosine))
            excess = max((1 - self.cosine) / (1 - tolerance.cosine), off_length)
        return excess if math.isfinite(excess) else math.inf

    def cells(self) -> tuple[str, str, str, str]:
        """Its row of a table: name, cosine, norm over the plain norm, share of the whole gradient's norm."""
        if self.cosine is None:
            return self.name, "-", "-", f"{self.share:.2e}"
        return self.name, f"{self.cosine:.6f}", f"{self.share / self.plain_share:.6f}", f"{self.plain_share:.2e}"


@dataclass(frozen=True)
class Parity:
    """Both sides' figures and what is tolerated between them. `tensors` begins with the worst."""

    loss: float  # nats per valid token of what was compared
    plain_loss: float
    gradient_norm: float  # of what was compared, in the size it has in its step
    plain_gradient_norm: float
    tensors: tuple[TensorParity, ...]
    tolerance: Tolerance

    @property
    def norm_ratio(self) -> float:
        return self.gradient_norm / self.plain_gradient_norm if self.plain_gradient_norm else math.nan

    @property
    def cosines(self) -> dict[str, float]:
        """Of the tensors whose plain gradient has a direction."""
        return {tensor.name: tensor.cosine for tensor in self.tensors if tensor.cosine is not None}

    @property
    def failures(self) -> list[str]:
        """A line for each figure that rounding does not explain; not-a-number is never tolerated."""
        tolerance, lines = self.tolerance, []
        if not abs(self.loss - self.plain_loss) <= tolerance.loss:
            lines.append(f"loss {self.loss:.6f}, plain {self.plain_loss:.6f}; tolerated is {tolerance.loss:g} apart")
        if not abs(self.norm_ratio - 1) <= tolerance.gradient_norm:
            lines.append(
                f"gradient norm {self.gradient_norm:.6g}, plain {self.plain_gradient_norm:.6g}; tolerated is a share of "
                f"{tolerance.gradient_norm:g} apart"
            )
        wrong = [tensor for tensor in self.tensors if tensor.excess(tolerance) > 1]
        if wrong:
            lines.append(
                f"gradients of {len(wrong)} of {len(self.tensors)} tensors, {wrong[0].name} worst; tolerated is a cosine of "
                f"{tolerance.cosine:g}, and a norm to match"
            )
        return lines

    def table(self, rows: int = SHOWN) -> str:
        """The worst `rows` tensors in aligned columns."""
        lines = [("tensor", "cosine", "norm / plain", "share of gradient"), *(t.cells() for t in self.tensors[:rows])]
        longest = max(len(line[0]) for line in lines)
        return "\n".join(f"{name:<{longest}}  {cosine:>8}  {norm:>12}  {share:>17}" for name, cosine, norm, share in lines)

    def summary(self) -> str:
        """In one line, how far apart the sides are."""
        apart = f"parity with plain FP32: loss {self.loss - self.plain_loss:+.1e}, gradient norm {self.norm_ratio - 1:+.3%}"
        if not self.cosines:
            return apart
        least = min(self.cosines, key=self.cosines.__getitem__)
        return f"{apart}, cosines of {len(self.cosines)} gradients {self.cosines[least]:.6f} ({least}) or more"

    def record(self) -> dict[str, Any]:
        """For audit.json: the figures, the worst tensors, what was tolerated and what failed."""
        cosines = self.cosines.values()
        return {
            "loss": self.loss,
            "plain_loss": self.plain_loss,
            "gradient_norm": self.gradient_norm,
            "plain_gradient_norm": self.plain_gradient_norm,
            "median_cosine": median(cosines) if cosines else None,
            "least_cosine": min(cosines, default=None),
            "worst_tensors": [asdict(tensor) for tensor in self.tensors[:SHOWN]],
            "tensors_compared": len(cosines),
            "tensors_with_negligible_gradient": len(self.tensors) - len(cosines),
            "tolerance": asdict(self.tolerance),
            "failures": self.failures,
        }

    def require(self) -> None:
        """TrainingHalted with what differs, the worst tensors and what to try, unless all is within the tolerance."""
        if not self.failures:
            return
        listed = "".join(f"\n  {line}" for line in self.failures)
        raise TrainingHalted(
            0,
            f"parity: this run would not train what plain FP32 transformers trains:{listed}\n{self.table()}\n"
            "Nothing has been trained. `precision=bf16`, `model.compile=none` and `model.attention=sdpa`, one by one, tell what "
            "is at fault; `parity=false` trains all the same.",
        )


def check_parity(
    model: nn.Module,
    hf: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: StepBatches,
    tolerance: Tolerance,
    accelerator: Accelerator,
    preserving: AbstractContextManager[Any] | None = None,
) -> Parity:
    """Compare the first microbatches of `step` on both sides; collective, with the same result on every rank.

    `model` is the prepared one, `hf` the transformers model inside. `preserving` is entered around the fast pass and keeps what a
    forward would change, such as the scales of delayed scaling. Gradients are cleared afterwards; weights, random numbers and
    modes of modules are as before. InputError where the plain model does not fit into memory beside the run.
    """
    device = accelerator.device
    # The step's count of tokens stays: gradients then have the size they have in training, for which delayed scales are made.
    step = replace(step, microbatches=step.microbatches[:MICROBATCHES])
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with preserving or nullcontext():
                fast = fast_pass(model, hf, step, accelerator)
            reference = reference_pass(reference_model(hf, device), step.microbatches, step.valid_tokens, device)
        return compare(fast, over_ranks(reference, accelerator), tolerance, valid_share(step, accelerator))
    except torch.OutOfMemoryError:
        raise InputError(
            "`parity`: the plain FP32 model does not fit into the device's memory beside the run (8 bytes a parameter, and eager "
            "attention of one layer); set a shorter `data.length`, or `parity: false`"
        ) from None
    finally:
        clear_gradients(optimizer, model)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # the peak that a run reports is training's


def valid_share(step: StepBatches, accelerator: Accelerator) -> float:
    """The share of the step's valid tokens that its microbatches, on all ranks together, hold."""
    valid_tokens = torch.tensor(sum(each.valid_tokens for each in step.microbatches), device=accelerator.device)
    return max(accelerator.reduce(valid_tokens, reduction="sum").item(), 1) / max(step.valid_tokens, 1)


def fast_pass(model: nn.Module, hf: PreTrainedModel, step: StepBatches, accelerator: Accelerator) -> Pass:
    """Forward and backward as a training step does them, without dropout. The gradients stay where they add up."""
    with training_without_dropout(model):
        loss = forward_backward(model, step, accelerator).item()
    return Pass(loss, {name: gradient_of(parameter) for name, parameter in hf.named_parameters()})


@contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """All of `model` in training mode, which low precision and recomputation go by, with every dropout rate at zero: of torch's
    own dropout, and of layers that call the function."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    ]
    model.train()
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
        for module, training in modes:
            module.training = training


def over_ranks(own: Pass, accelerator: Accelerator) -> Pass:
    """The sum over ranks of plain passes over each rank's own packs; the fast path's backward has made it already."""
    if accelerator.num_processes == 1:
        return own
    loss = accelerator.reduce(torch.tensor(own.loss, device=accelerator.device), reduction="sum").item()
    return Pass(loss, {name: accelerator.reduce(gradient, reduction="sum") for name, gradient in own.gradients.items()})


def compare(measured: Pass, plain: Pass, tolerance: Tolerance, share: float = 1.0) -> Parity:
    """`measured` against `plain`, tensor by tensor. Collective where gradients are sharded.

    `share` of the step's valid tokens is what both passes took. A parameter that only `measured` has (a head that came untied)
    counts as one whose plain gradient is zero.
    """
    names = [*plain.gradients, *(name for name in measured.gradients if name not in plain.gradients)]
    products = {name: _products(measured.gradients.get(name), plain.gradients.get(name)) for name in names}
    norm, plain_norm = (math.sqrt(sum(triple[side] for triple in products.values())) for side in (0, 1))
    tensors = [_tensor_parity(name, *triple, plain_norm) for name, triple in products.items()]
    worst_first = sorted(tensors, key=lambda tensor: tensor.excess(tolerance), reverse=True)
    return Parity(measured.loss / share, plain.loss / share, norm, plain_norm, tuple(worst_first), tolerance)


def _tensor_parity(name: str, squared: float, plain_squared: float, product: float, total: float) -> TensorParity:
    norm, plain_norm = math.sqrt(squared), math.sqrt(plain_squared)
    share, plain_share = (norm / total, plain_norm / total) if total else (norm, plain_norm)
    if plain_norm <= NEGLIGIBLE * total:
        return TensorParity(name, None, share, plain_share)
    return TensorParity(name, product / (norm * plain_norm) if norm else 0.0, share, plain_share)


def _products(measured: Tensor | None, plain: Tensor | None) -> tuple[float, float, float]:
    """|measured|^2, |plain|^2 and measured . plain: products in FP32, summed in FP64, as a cosine is read at its sixth digit."""
    a, b = (torch.zeros(()) if gradient is None else whole(gradient).float() for gradient in (measured, plain))
    return tuple((x * y).sum(dtype=torch.float64).item() for x, y in ((a, a), (b, b), (a, b)))
