"""Compare the training path with plain transformers before the first step.

Both sides compute losses and gradients of random tokens in the shapes of step 0.
docs/verification.md explains the comparison, its tolerances, and why tokens are random.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from foundation.overrides import overridden
from foundation.progress import advance
from packing.arrow import IGNORE, Pack
from packing.batch import Microbatch, StepBatches, build_microbatch
from pretrain.metrics.health import TrainingHalted
from pretrain.model.distributed import from_all_ranks
from pretrain.model.experts import recording_choices
from pretrain.model.gradients import gradient_of, local_part
from pretrain.model.packed import PackedLanguageModel, forward_backward
from pretrain.observe.product_check import Compared, watching_products
from pretrain.optimizer.adamw import clear_gradients, gradient_norm
from pretrain.precision.settings import ActivePrecision
from pretrain.verify.reference_model import (
    Document,
    gathered,
    reference_model,
    reference_pass,
    wrong_batches,
)
from pretrain.verify.reference_quantizer import watching_quantizers

# A function that runs forward and backward of a step and returns the loss.
Pass = Callable[..., float]
# Ends of the documents in a drawn pack, in sevenths of its length. No kernel's block ends there.
SEVENTHS = (0, 1, 3, 5, 7)
DOCUMENTS = 3  # documents with labels in the first microbatch
LABELS = 341  # labels of a document, at most
# Tokens of the second microbatch's document that plain transformers computes at most, by device.
# Eager attention keeps heads x length^2 scores a layer.
LONGEST = {"cpu": 2048, "cuda": 4096}
# Bytes that the reference takes for a parameter: the weight, its gradient, a gradient to compare
# with and the sum of products, in FP32.
PLAIN_BYTES = 16
# Standard deviation of the noise on parameters whose values are all equal: relative to the value,
# and absolute for zeros. Larger biases would make the rows of a small model's attention nearly
# equal, and then their errors would be equal too.
NOISE = 0.1
NOISE_ON_ZEROS = 0.01
# Standard deviation of a fresh model's logits: some tokens are likely, and no single one is.
LOGITS = 3.0
# Tolerance of the norm of a gradient over several microbatches, relative to the norm of the sum of
# the microbatches' gradients.
SUMS_APART = 0.1
# Largest ratio of the norms of the quantized and the unquantized gradient. Healthy FP4 stays within
# 1.3.
NORM_RATIO = 2.0
# Share of BF16's measured error that FP32 may have. FP32 rounds 2^16 times more finely. The rest is
# for another order of sums.
FP32_OF_BF16 = 2.0**-8
# Attributes with the rate of a module's noise in training. `p` is that of torch's dropouts.
NOISES = re.compile("drop|jitter_noise|^p$")
SHOWN = 10  # worst entries of a table that are reported


@dataclass
class Parity:
    """The result of the comparison.

    Losses are means over the compared tokens (nats). Gradients are summed over these tokens and
    divided by the tokens of the step. The fields of quantized products are empty if nothing is
    quantized. All sequences begin with the worst entry.
    """

    failures: list[str]  # a line for each mismatch
    tokens: int  # compared tokens, which have a label, over all ranks
    loss: float  # of the packed path with its quantization off
    reference_loss: float  # of plain transformers
    loss_tolerated: float  # largest allowed difference of the two losses
    gradient_norm: float
    tensors: Sequence[Compared]
    products: Sequence[Compared] = ()
    codes: Sequence[Compared] = ()  # some operands, compared with the reference quantizer
    # Quantized gradients over all microbatches, compared with the sum of the microbatches'.
    sums: Sequence[Compared] = ()
    quantized_loss: float | None = None
    quantized_gradient_norm: float | None = None

    def summary(self) -> str:
        """Return the largest differences in one line."""
        text = (
            f"parity with plain transformers: loss {self.loss - self.reference_loss:+.1e}, "
            f"gradients differ by at most {self.tensors[0].excess:.0%} of the tolerance"
        )
        if self.products:
            worst = self.products[0].excess
            text += f", {len(self.products)} quantized products by at most {worst:.0%} of theirs"
        return text

    def record(self) -> dict[str, Any]:
        """Return the entry of audit.json: all figures, the worst entries, and their numbers."""
        counts = {"tensors_compared": len(self.tensors), "products_compared": len(self.products)}
        worst = {
            name: getattr(self, name)[:SHOWN] for name in ("tensors", "products", "codes", "sums")
        }
        return asdict(replace(self, **worst)) | counts

    def require(self) -> None:
        """Raise TrainingHalted with all failures and what to try, if there are any."""
        if not self.failures:
            return
        failures = "\n".join(f"  {line}" for line in self.failures)
        raise TrainingHalted(
            0,
            f"parity: this run would not train what plain transformers trains:\n{failures}\n"
            "Nothing has been trained; audit.json has all figures. To find the cause, set "
            "`precision=bf16`, `model.compile=none`, `model.fused=off` and `model.attention=sdpa` "
            "one by one. `parity=off` trains without this check.",
        )


def check_parity(
    model: PackedLanguageModel,
    optimizer: torch.optim.Optimizer,
    step: StepBatches,
    packs: Sequence[Pack],
    active: ActivePrecision,
    accelerator: Accelerator,
    *,
    mask_boundaries: bool = True,
) -> Parity:
    """Compare the microbatches of `step` with its packs, and the model with plain transformers.

    Gradients are cleared. Weights, random states, training modes, histories and scales are restored
    bit for bit. Collective. All ranks agree on whether there are failures.

    model: the prepared model.
    packs: the packs of `step` on all ranks.
    mask_boundaries: as in `packing.batch.build_microbatch`.
    """
    device = accelerator.device
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            model.context.preserving_state(),
        ):
            run_pass = partial(_run_pass, model, optimizer, accelerator)
            parity = _compare(model, run_pass, step, packs, active, accelerator, mask_boundaries)
        if any(from_all_ranks(bool(parity.failures))) and not parity.failures:
            parity.failures.append("another process found mismatches; see its message")
        return parity
    finally:
        clear_gradients(optimizer, model)
        for product in model.fused.products if model.fused else ():
            # The cached weight of the unquantized path, which training may never take.
            product.plain.weight = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            # A run reports the peak of training alone.
            torch.cuda.reset_peak_memory_stats(device)


def _compare(
    model: PackedLanguageModel,
    run_pass: Pass,
    step: StepBatches,
    packs: Sequence[Pack],
    active: ActivePrecision,
    accelerator: Accelerator,
    mask_boundaries: bool,
) -> Parity:
    """Compare as `check_parity` does. Leave gradients and the state of the model changed."""
    failures = list(wrong_batches(step.microbatches, packs, mask_boundaries=mask_boundaries))
    shapes = step.microbatches[0]
    vocabulary = len(model.hf.get_output_embeddings().weight)
    generator = np.random.default_rng(accelerator.process_index)
    drawn = [
        draw_microbatch(shapes, vocabulary, generator, longest)
        for longest in (None, LONGEST[accelerator.device.type])
    ]
    step = replace(step, microbatches=[batch for batch, _ in drawn])
    tokens = accelerator.num_processes * sum(batch.valid_tokens for batch, _ in drawn)
    # `forward_backward` divides losses by the tokens of the step, also of other microbatches.
    step_tokens = max(step.valid_tokens, 1)
    mean_over_compared = step_tokens / tokens
    with _comparable(model, shapes.input_ids.shape[1]) as head_factor:
        advance()
        with (
            overridden(model.context, quantizing=False),
            recording_choices(model) as choices,
        ):
            loss = run_pass(step) * mean_over_compared
        documents = _with_choices([documents for _, documents in drawn], choices)
        reference_loss, loss_noise, reference, noise = _reference(
            model, accelerator, documents, step_tokens, tokens, head_factor
        )
        gradients = _gradients(model)
        resolution = _resolution(model, gradients)
        parity = Parity(
            failures=failures,
            tokens=tokens,
            loss=loss,
            reference_loss=reference_loss,
            loss_tolerated=loss_noise * resolution,
            gradient_norm=gradient_norm(model.parameters()).item(),
            tensors=judge(distances(gradients, reference), noise, resolution),
        )
        # Written so that NaN fails.
        if not abs(loss - reference_loss) <= parity.loss_tolerated:
            failures.append(
                f"loss of the packed path {loss:.6f}, of plain transformers "
                f"{reference_loss:.6f}; they may differ by {parity.loss_tolerated:.2g}"
            )
        failures += worst_of(
            parity.tensors, "gradients", "the packed path differs from plain transformers"
        )
        if active.precision.quantized:
            del reference  # frees memory for the quantized passes
            failures += _compare_quantized(
                parity, model, run_pass, step, active, mean_over_compared
            )
    return parity


@contextmanager
def _comparable(model: PackedLanguageModel, tokens: int) -> Iterator[float]:
    """Prepare the model for the comparison. Yield a factor of the LM head's input.

    tokens: of a microbatch. The head then computes two chunks or more, as in training, where
    microbatches may be larger.

    The penalty of the loss has the weight 1.0 on both sides. The gradient of a small penalty
    would be lost in the rounding of the cross-entropy's gradient.
    """
    head = model.hf.get_output_embeddings()
    penalty = head.penalty
    if penalty:
        penalty = replace(penalty, weight=penalty.weight / (head.settings.penalty_weight or 1.0))
    with (
        training_without_dropout(model),
        overridden(head, chunk=min(head.chunk, -(-tokens // 2)), penalty=penalty),
        distinct_values(model) as factor,
        head.register_forward_pre_hook(lambda head, inputs: (factor * inputs[0], inputs[1])),
    ):
        yield factor


def _resolution(model: PackedLanguageModel, gradients: Mapping[str, Tensor | None]) -> float:
    """Return the allowed error relative to BF16's."""
    # Gradients may be summed in BF16 although the model computes in FP32.
    dtypes = {gradient.dtype for gradient in gradients.values() if gradient is not None}
    dtypes.add(model.context.compute_dtype)
    return FP32_OF_BF16 if dtypes == {torch.float32} else 1.0


def _reference(
    model: PackedLanguageModel,
    accelerator: Accelerator,
    microbatches: Sequence[Sequence[Document]],
    step_tokens: int,
    tokens: int,
    head_factor: float,
) -> tuple[float, float, dict[str, Tensor], dict[str, Distance]]:
    """Run plain transformers in FP32, then in BF16.

    Return the loss in FP32, the error that BF16 makes in it, the gradients in FP32, and the
    errors that BF16 makes in them. `tokens`: compared ones of all ranks.
    """
    advance()
    plain = reference_model(model.hf, accelerator.device)
    loss_settings = model.hf.get_output_embeddings().settings

    def computed() -> tuple[Tensor, dict[str, Tensor]]:
        losses, gradients = reference_pass(plain, microbatches, loss_settings, head_factor)
        # One by one, because the sum over ranks is a copy. The fast path's backward has summed
        # its own gradients.
        for name in gradients:
            gradients[name] = accelerator.reduce(gradients[name].div_(step_tokens), reduction="sum")
        return losses, gradients

    losses, gradients = computed()
    for parameter in plain.parameters():  # rotary frequencies are buffers and stay in FP32
        parameter.data = parameter.data.to(torch.bfloat16)
    rounded_losses, rounded = computed()
    # Free the weights now. A module whose forward was replaced is a reference cycle, which
    # waits for the garbage collector.
    plain.to("meta")  # type: ignore[arg-type]  # wrong in transformers
    squares = from_all_ranks((rounded_losses - losses).double().square().sum().item())
    loss_noise = math.sqrt(sum(squares) / tokens)
    loss = sum(from_all_ranks(losses.double().sum().item())) / tokens
    return loss, loss_noise, gradients, distances(rounded, gradients)


def _compare_quantized(
    parity: Parity,
    model: PackedLanguageModel,
    run_pass: Pass,
    step: StepBatches,
    active: ActivePrecision,
    mean_over_compared: float,
) -> list[str]:
    """Compare the quantized path with the unquantized one. Set the figures of `parity`.

    Return a line for each mismatch.
    """
    advance()
    # One pass first, so that delayed scaling has seen the gradients of these labels.
    if model.context.state():
        run_pass(step)
    parity.sums = _compare_sums(model, run_pass, step)
    with ExitStack() as watching:
        parity.products, wrong_histories = watching.enter_context(watching_products(model, active))
        parity.codes = watching.enter_context(watching_quantizers(model.context, active))
        loss = run_pass(step, watching) * mean_over_compared
    norm = gradient_norm(model.parameters()).item()
    parity.quantized_loss = loss
    parity.quantized_gradient_norm = norm
    tables = (
        (parity.products, "low-precision products", "they are not what the format makes"),
        (parity.codes, "codes of operands", "they are not the reference quantizer's"),
        (parity.sums, "gradients over two microbatches", "they are not the microbatches' sum"),
    )
    lines = [line for table in tables for line in worst_of(*table)]
    if wrong_histories:
        lines.append(
            f"delayed scaling: wrong scale or history of {len(wrong_histories)} operands, such "
            f"as {wrong_histories[0]}"
        )
    lowest = parity.gradient_norm / NORM_RATIO
    if not (math.isfinite(loss) and lowest <= norm <= parity.gradient_norm * NORM_RATIO):
        lines.append(
            f"quantized and unquantized path: loss {loss:.6f} and {parity.loss:.6f}, gradient "
            f"norm {norm:.4g} and {parity.gradient_norm:.4g}"
        )
    return lines


def _compare_sums(model: PackedLanguageModel, run_pass: Pass, step: StepBatches) -> list[Compared]:
    """Compare the gradients of a step with the sum of its microbatches' gradients.

    Return the worst comparison first. The norm of every matrix's gradient is compared. Both
    sides draw the same random numbers and begin with the same histories and scales. On a CPU
    the gradients are then equal to the bit. On a GPU an attention kernel sums in another order
    each time, and quantization amplifies the difference to the size of its own error, so only
    norms can be compared. Collective.
    """
    copies = model.context.copied_state()
    torch.manual_seed(0)
    run_pass(step)
    together = _norms(_gradients(model))
    model.context.go_back(copies)
    torch.manual_seed(0)
    summed: dict[str, Tensor] = {}
    for number in range(max(from_all_ranks(len(step.microbatches)))):
        run_pass(replace(step, microbatches=step.microbatches[number : number + 1]))
        for name, gradient in _gradients(model).items():
            if gradient is not None:
                summed[name] = gradient.float() + summed.get(name, 0.0)
    compared = []
    for name, norm in _norms(summed).items():
        error = abs(together[name] / norm - 1) if norm else together[name]
        compared.append(Compared.of(name, error, error / SUMS_APART))
    return worst_first(compared)


def _norms(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the norm of each matrix's gradient. Collective if gradients are sharded."""
    norms = {
        name: torch.linalg.vector_norm(gathered(gradient), dtype=torch.float64)
        for name, gradient in gradients.items()
        if gradient is not None and gradient.dim() > 1
    }
    return dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True))


def _gradients(model: PackedLanguageModel) -> dict[str, Tensor | None]:
    return {name: gradient_of(parameter) for name, parameter in model.hf.named_parameters()}


def _run_pass(
    model: PackedLanguageModel,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    step: StepBatches,
    around_first: AbstractContextManager[Any] | None = None,
) -> float:
    """Run forward and backward as a training step does, and return the loss.

    Gradients stay until the next pass clears them.
    """
    clear_gradients(optimizer, model)
    return forward_backward(model, step, accelerator, around_first).item()


def _with_choices(
    microbatches: Sequence[Sequence[Document]], choices: Sequence[Sequence[Tensor]]
) -> list[list[Document]]:
    """Return the documents with the experts that their tokens chose.

    choices: by layer and forward. A recomputed layer has two forwards a microbatch.
    """
    result = []
    for number, documents in enumerate(microbatches):
        by_layer = [layer[number * len(layer) // len(microbatches)] for layer in choices]
        result.append(
            [doc._replace(choices=[layer[doc.part] for layer in by_layer]) for doc in documents]
        )
    return result


def worst_first(compared: Sequence[Compared]) -> list[Compared]:
    """Sort comparisons by their excess, the largest first."""
    return sorted(compared, key=lambda comparison: comparison.excess, reverse=True)


def worst_of(compared: Sequence[Compared], subject: str, meaning: str) -> list[str]:
    """Return a line with the worst mismatches, or no line if there are none."""
    wrong = [f"{entry.name} ({entry.excess:.3g})" for entry in compared if entry.excess > 1]
    if not wrong:
        return []
    return [
        f"{subject}, {len(wrong)} of {len(compared)}: {meaning}; {', '.join(wrong[:SHOWN])} times "
        "the tolerance"
    ]


def draw_microbatch(
    shapes: Microbatch, vocabulary: int, generator: np.random.Generator, longest: int | None = None
) -> tuple[Microbatch, list[Document]]:
    """Draw random tokens in the shapes of a microbatch. Also return the documents with labels.

    A pack holds four documents, and the last three of the microbatch have labels: at most their
    first LABELS tokens. With `longest` a pack is one document, and at most LABELS of the first
    `longest` tokens of the first document have labels, evenly spaced. Labels are the next tokens.
    """
    size = shapes.input_ids.shape[1]
    length = shapes.max_seqlen
    ends = np.unique(length * np.array((0, 7) if longest else SEVENTHS, np.int32) // 7)
    rows = generator.integers(vocabulary, size=(size // length, length), dtype=np.uint32)
    batch = build_microbatch([Pack(row, np.diff(ends)) for row in rows], mask_boundaries=True)
    spans = list(pairwise(batch.cu_seqlens.unique().tolist()))
    labels = torch.full_like(batch.labels, IGNORE)
    documents = []
    for begin, end in spans[:1] if longest else spans[-DOCUMENTS:]:
        part = slice(begin, min(end, begin + (longest or LABELS)))
        # An odd distance meets every place in the blocks of a kernel.
        distance = -(-(part.stop - begin) // LABELS) | 1
        labelled = torch.arange(part.stop - 2, begin - 1, -distance)
        labels[0, labelled] = batch.labels[0, labelled]
        documents.append(Document(batch.input_ids[0, part], labels[0, part], part))
    return replace(batch, labels=labels, valid_tokens=int((labels != IGNORE).sum())), documents


# ── Distances of gradients, and their tolerances ──────────────────────────────────────────────────
#
# No fixed tolerance fits all models: the error of a gradient depends on how much cancels in its
# sum. So the tolerance of a tensor is the error that BF16 makes in it, and in tensors of its kind.

# A gradient whose norm is below this share of the norm of all gradients is zero on paper, such as
# that of a key's bias without rotary embeddings. Its values are rounding noise without a direction.
# The measured gradient must then be below this share too.
NEGLIGIBLE = 1e-6
TOTAL = "all of them together"
# Factor of a tensor's tolerance. The median of healthy tensors is at 1.
LEEWAY = 2.0
# BF16's error in a scalar may happen to be smaller than usual by this factor. With n values the
# effect is n times smaller.
FEW_VALUES = 9.0


class Distance(NamedTuple):
    """Norms of the reference's gradient of a tensor, and of its difference to the measured one."""

    reference: float
    difference: float
    values: int  # upper bound of the number of values that err independently


def distances(
    measured: Mapping[str, Tensor | None], reference: Mapping[str, Tensor]
) -> dict[str, Distance]:
    """Return the distance of each gradient by name, and that of all of them under TOTAL.

    A gradient that only one side has, such as that of a head that is no longer tied, is zero on the
    other side. If no side has it, it is skipped. Collective if gradients are sharded.
    """
    norms = []
    sizes = {}
    for name in dict.fromkeys([*reference, *measured]):
        sides = [gradients.get(name) for gradients in (reference, measured)]
        present = [gathered(gradient).float() for gradient in sides if gradient is not None]
        if not present:
            continue
        expected = torch.zeros_like(present[0]) if sides[0] is None else present[0]
        difference = present[1] - present[0] if len(present) == 2 else present[0]
        norms.append(
            torch.stack(
                [
                    torch.linalg.vector_norm(values, dtype=torch.float64)
                    for values in (expected, difference)
                ]
            )
        )
        # The one row of a gate errs in the direction that all tokens share, like a scalar.
        sizes[name] = 1 if expected.dim() > 1 and len(expected) == 1 else expected.numel()
    by_tensor = torch.stack(norms)
    total = torch.linalg.vector_norm(by_tensor, dim=0, keepdim=True)
    rows = torch.cat([by_tensor, total]).tolist()  # waits for the device once
    sizes[TOTAL] = sum(sizes.values())
    return {
        name: Distance(norm, difference, size)
        for (name, size), (norm, difference) in zip(sizes.items(), rows, strict=True)
    }


def judge(
    measured: Mapping[str, Distance], noise: Mapping[str, Distance], resolution: float
) -> list[Compared]:
    """Return each tensor's error with its tolerance, and that of all together, the worst first.

    noise: of plain transformers in BF16, relative to FP32.
    resolution: the allowed error relative to BF16's.

    The tolerance of a tensor is the error of BF16 in it, in the tensors of its kind in all layers,
    or in the median tensor. In a tensor of few values, or a small one where much cancels, BF16's
    error may happen to be small.
    """
    negligible = NEGLIGIBLE * noise[TOTAL].reference
    errors = {
        name: entry.difference / entry.reference
        for name, entry in noise.items()
        if entry.reference > negligible
    }
    typical = median([error for name, error in errors.items() if name != TOTAL] or [0.0])
    squares: dict[str, list[float]] = defaultdict(list)
    for name, error in errors.items():
        squares[_kind(name)].append(error**2)
    judged = []
    for name, entry in measured.items():
        usual = max(typical, math.sqrt(mean(squares.get(_kind(name), [0.0]))))
        bf16_error = noise[name].difference if name in noise else 0.0
        few_values = 1 + FEW_VALUES / entry.values  # large for a scalar only
        allowed = few_values * LEEWAY * resolution * max(bf16_error, usual * entry.reference)
        norm = max(entry.reference, negligible) or 1.0
        excess = entry.difference / (allowed + negligible) if entry.difference else 0.0
        judged.append(Compared.of(name, entry.difference / norm, excess))
    return worst_first(judged)


def _kind(name: str) -> str:
    """Return the name of a parameter without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name)


@contextmanager
def distinct_values(model: PackedLanguageModel) -> Iterator[float]:
    """Add noise to parameters whose values are all equal, such as fresh norms and biases.

    With equal values, a comparison would not notice that two norms are swapped. All values are
    restored bit for bit. Yield a factor for the head's inputs that makes a fresh model's logits
    vary, because flat logits hide most of the gradient of softmax and penalty. The factor is 1.0 if
    no parameter was changed. Draws random numbers. Collective.
    """
    torch.manual_seed(0)  # on all ranks
    before = []
    for parameter in model.parameters():
        values = local_part(parameter)
        if parameter.requires_grad and values.numel() > 1 and values.amin() == values.amax():
            before.append((values, values.clone()))
            size = torch.where(values == 0, NOISE_ON_ZEROS, NOISE * values.abs())
            values += size * torch.randn(values.shape).to(values.device)
    weight = model.hf.get_output_embeddings().weight.detach()
    norm = gathered(torch.linalg.vector_norm(weight, dtype=torch.float32)).item()
    try:
        changed = any(from_all_ranks(bool(before)))
        yield max(1.0, LOGITS * math.sqrt(len(weight)) / norm) if changed else 1.0
    finally:
        for values, original in before:
            values.copy_(original)


@contextmanager
def training_without_dropout(model: PackedLanguageModel) -> Iterator[None]:
    """Put `model` into training mode without noise.

    Low precision and recomputation depend on training mode. All dropout rates are zero, in torch's
    modules and in layers that call the function, and so is the noise on the inputs of experts.
    Routers are in evaluation mode: some draw their choices in training, and the rate of that noise
    decides which experts they consider.
    """
    routers = model.routing.routers if model.routing else ()
    with ExitStack() as changes:
        for module in model.modules():
            is_router = module in routers
            off = {
                attribute: 0.0
                for attribute, value in vars(module).items()
                if isinstance(value, float) and NOISES.search(attribute) and not is_router
            }
            changes.enter_context(overridden(module, training=not is_router, **off))
        yield
