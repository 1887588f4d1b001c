"""Compare the training path with plain transformers before the first step.

The packed model of the run and plain transformers compute the losses and gradients of the same
tokens. The tokens are random, in the shapes of step 0. docs/developers/checks.md explains the
comparison, its tolerances, and the reason for random tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.checkpoint import checkpoint

from foundation.overrides import overridden
from packing.arrow import Pack
from packing.batch import Microbatch, StepBatches
from pretrain.metrics.health import TrainingHalted
from pretrain.model.distributed import from_all_ranks
from pretrain.model.experts import recording_choices
from pretrain.model.gradients import full_tensor, gradients_of, local_part
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, forward_backward
from pretrain.observe.history_check import watching_histories
from pretrain.observe.product_check import Compared, ProductCheck, worst_first
from pretrain.optimizer.adamw import clear_gradients, gradient_norm
from pretrain.precision.settings import ActivePrecision
from pretrain.verify.gradient_errors import (
    Distance,
    distances,
    judge,
    judge_sums,
    resolution_of,
)
from pretrain.verify.head_check import HeadCheck, compare_values
from pretrain.verify.isolation import leaks
from pretrain.verify.random_documents import LONGEST, draw_documents, draw_long_document
from pretrain.verify.reference_model import (
    Documents,
    reference_model,
    reference_pass,
    wrong_batches,
)
from pretrain.verify.reference_quantizer import compare_codes

# Bytes per parameter that the reference needs: the weight, its gradient, the sum of its gradients,
# and the run's gradient that is compared with this sum, all in FP32.
PLAIN_BYTES = 16
# Standard deviations of the noise that is added to parameters whose values are all equal. NOISE is
# relative to the value. NOISE_ON_ZEROS is absolute, for values of zero. With more noise on biases,
# all rows of a small model's attention would have nearly the same scores, and thus the same errors.
NOISE = 0.1
NOISE_ON_ZEROS = 0.01
# Standard deviation to which the logits of a new model are scaled. With this value some tokens are
# likely, but no single token is certain.
LOGITS = 3.0
# Largest allowed ratio of the norms of the quantized and the unquantized gradient. The ratio of
# correct FP4 runs is at most 1.3.
NORM_RATIO = 2.0
# Allowed error of the mean penalty and router loss of all tokens. MEAN_ERROR is a multiple of the
# mean's standard deviation, as if the errors of all tokens were independent. COMMON_ERROR is a
# share of the error of a single loss. It allows for the part that is common to all tokens. In small
# correct models, this part is at most 0.1 of the error.
MEAN_ERROR = 6.0
COMMON_ERROR = 0.3
# Smallest number of chunks in which the head computes a microbatch, before the size is rounded up.
CHUNKS = 4
# Passes after which the histories of delayed scaling have the amaxes of gradients that saturated.
PASSES_FOR_HISTORIES = 2
# Pattern for the attributes in which modules store the rate of dropout, or of other noise, in
# training. The attribute `p` is the rate of torch's dropout modules.
NOISES = re.compile("drop|jitter_noise|^p$")
# Number of the worst entries of a table that are reported.
SHOWN = 10


@dataclass
class Parity:
    """Result of the comparison.

    Losses are means over the compared tokens, in nats per token. Gradients are sums over the
    compared tokens, divided by the number of labels in the training step. All sequences of
    comparisons begin with the worst comparison. The fields after `tensors` have their defaults if
    the precision does not quantize.
    """

    # One line for each mismatch.
    failures: list[str]
    # Number of compared tokens over all ranks. All compared tokens have a label.
    tokens: int
    # Loss of the packed path without quantization.
    loss: float
    # Loss of plain transformers.
    reference_loss: float
    # Largest allowed difference between `loss` and `reference_loss`.
    loss_tolerated: float
    # Gradient norm of the packed path without quantization.
    gradient_norm: float
    # Comparisons of the gradients of all parameters with the gradients of plain transformers.
    tensors: Sequence[Compared]
    # Comparisons of the quantized products with the unquantized products.
    products: Sequence[Compared] = ()
    # Comparisons of the codes of some operands with the codes of the reference quantizers.
    codes: Sequence[Compared] = ()
    # Comparisons of losses, of gradients of logits and hidden states, and of gradients of biases
    # with those that follow from the observed products.
    derived: Sequence[Compared] = ()
    # Comparisons of gradients with quantization: one pass over all microbatches is compared with
    # the sum of one pass per microbatch.
    sums: Sequence[Compared] = ()
    # Loss of the packed path with quantization.
    quantized_loss: float | None = None
    # Gradient norm of the packed path with quantization.
    quantized_gradient_norm: float | None = None

    def summary(self) -> str:
        """Return one line with the largest differences."""
        verdict = "failed" if self.failures else "passed"
        difference = self.loss - self.reference_loss
        worst = 100 * self.tensors[0].excess
        text = (
            f"parity with plain transformers {verdict}: the loss differs by {difference:+.1e} "
            f"nats, gradients by at most {worst:.0f} % of the tolerance"
        )
        if self.products:
            worst = 100 * self.products[0].excess
            text += f", quantized products by at most {worst:.0f} % of it"
        return text

    def record(self) -> dict[str, Any]:
        """Return the entry of audit.json.

        The entry has all figures, the SHOWN worst comparisons of each kind, and the number of
        compared tensors and products.
        """
        counts = {"tensors_compared": len(self.tensors), "products_compared": len(self.products)}
        tables = ("tensors", "products", "codes", "derived", "sums")
        worst = {name: getattr(self, name)[:SHOWN] for name in tables}
        return asdict(replace(self, **worst)) | counts

    def require(self) -> None:
        """Raise TrainingHalted if there are failures. The message lists failures and remedies."""
        if not self.failures:
            return
        failures = "\n".join(f"  {line}" for line in self.failures)
        raise TrainingHalted(
            0,
            f"parity: this run would not train like plain transformers:\n{failures}\n"
            "Nothing has been trained. audit.json has all figures. To find the cause, set "
            "`precision=bf16`, `model.compile=none`, `model.fused=off` and `model.attention=sdpa` "
            "one after the other. To train without this check, set `parity=off`.",
        )


def check_parity(
    model: PackedLanguageModel,
    optimizer: torch.optim.Optimizer,
    step: StepBatches,
    packs: Sequence[Pack],
    active: ActivePrecision,
    accelerator: Accelerator,
    *,
    held_out_loss: Callable[[Sequence[Microbatch]], float],
    mask_boundaries: bool,
) -> Parity:
    """Compare the microbatches of `step` with its packs, and the model with plain transformers.

    Gradients are cleared. Weights, random states, training modes, histories and scales are restored
    bit for bit. If one rank has failures, the result of every rank has failures. All ranks must
    call this function.

    Args:
        model: Model that Accelerate has prepared.
        optimizer: Optimizer of the model's parameters.
        step: Microbatches of this rank.
        packs: Packs of `step` on all ranks.
        active: Precision of the step.
        accelerator: Accelerator of the run.
        held_out_loss: Function that evaluates the model on microbatches, as on held-out packs, and
            returns the mean loss over all ranks.
        mask_boundaries: True if the last token of a document has no label (see
            `packing.batch.build_microbatch`).
    """
    device = accelerator.device
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            model.context.preserving_state(),
        ):
            path = _PackedPath(model, optimizer, accelerator)
            parity = _compare(path, step, packs, active, held_out_loss, mask_boundaries)
        if any(from_all_ranks(bool(parity.failures))) and not parity.failures:
            parity.failures.append(
                "another process has found mismatches; read the message of that process"
            )
        return parity
    finally:
        clear_gradients(optimizer, model)
        # Free the cached weights of the unquantized path of fused layers, because it is possible
        # that training never uses this path.
        for product in model.fused.products:
            product.plain.drop_weight()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            # The peak memory that the run reports must not include this comparison.
            torch.cuda.reset_peak_memory_stats(device)


class _PackedPath(NamedTuple):
    """The path of training: the packed model of the run, and what computes its gradients."""

    model: PackedLanguageModel
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator

    def run(
        self, step: StepBatches, around_first: AbstractContextManager[Any] | None = None
    ) -> float:
        """Run forward and backward as a training step does, and return the loss.

        Old gradients are cleared first. The gradients of this pass are not cleared.

        around_first: context manager that observes the first microbatch, or None.
        """
        clear_gradients(self.optimizer, self.model)
        return forward_backward(self.model, step, self.accelerator, around_first).item()


def _compare(
    path: _PackedPath,
    step: StepBatches,
    packs: Sequence[Pack],
    active: ActivePrecision,
    held_out_loss: Callable[[Sequence[Microbatch]], float],
    mask_boundaries: bool,
) -> Parity:
    """Return the result of `check_parity`, without clearing gradients or restoring the state."""
    model = path.model
    failures = list(wrong_batches(step.microbatches, packs, mask_boundaries=mask_boundaries))
    # The passes use random tokens instead of the tokens of the packs.
    microbatches, documents = _random_batches(model, step.microbatches[0], path.accelerator)
    step = replace(step, microbatches=microbatches)
    tokens = path.accelerator.num_processes * sum(batch.valid_tokens for batch in microbatches)
    # `forward_backward` divides the sum of the losses by the number of labelled tokens in the
    # training step. This factor converts the result to the mean over the compared tokens.
    step_tokens = max(step.valid_tokens, 1)
    loss_factor = step_tokens / tokens
    # The model multiplies the input of its LM head by `head_factor`, and so must the reference.
    with _comparable(model, microbatches[0].input_ids.shape[1]) as head_factor:
        # Run the packed path without quantization, and then plain transformers.
        with overridden(model.context, quantizing=False):
            with recording_choices(model) as choices:
                loss = path.run(step) * loss_factor
            held_out = held_out_loss(microbatches)
            failures += leaks(model, microbatches[0], held_out_loss)
        documents = _with_choices(documents, choices)
        reference = _reference(model, path.accelerator, documents, step_tokens, tokens, head_factor)
        # Derive the tolerances from the errors of plain transformers in BF16.
        gradients = gradients_of(model.hf)
        resolution = resolution_of(
            model.context.compute_dtype, *(gradient.dtype for gradient in gradients.values())
        )
        errors = distances(gradients, reference.gradients)
        parity = Parity(
            failures=failures,
            tokens=tokens,
            loss=loss,
            reference_loss=reference.loss,
            loss_tolerated=reference.loss_noise * resolution,
            gradient_norm=gradient_norm(model.parameters()).item(),
            tensors=judge(errors, reference.noise, resolution),
        )
        failures += _loss_failures(parity, held_out, reference.held_out_loss)
        failures += worst_of(
            parity.tensors, "gradients", "the packed path differs from plain transformers"
        )
        if active.precision.quantized:
            # Free memory for the quantized passes.
            del reference
            parity = _with_quantized_path(parity, path, step, active, loss_factor)
    return parity


def _loss_failures(parity: Parity, held_out: float, reference_held_out: float) -> list[str]:
    """Return one line for each loss that differs too much from the loss of plain transformers.

    held_out, reference_held_out: the losses without penalty and router loss, of the packed path and
        of plain transformers.
    """
    failures = too_far("loss", parity.loss, parity.reference_loss, parity.loss_tolerated)
    # `loss_tolerated` allows for the error of a single token's loss. The error of a mean over all
    # tokens is smaller, so only a share of it is allowed below.
    share = max(MEAN_ERROR / math.sqrt(parity.tokens), COMMON_ERROR)
    # The differences are the penalty and the router loss. They are zero without them.
    failures += too_far(
        "loss minus held-out loss",
        parity.loss - held_out,
        parity.reference_loss - reference_held_out,
        share * parity.loss_tolerated,
    )
    return failures


def _random_batches(
    model: PackedLanguageModel, shapes: Microbatch, accelerator: Accelerator
) -> tuple[list[Microbatch], list[Documents]]:
    """Return two random microbatches of this rank, and the documents of each."""
    vocabulary = len(model.hf.get_output_embeddings().weight)
    generator = np.random.default_rng(accelerator.process_index)
    longest = LONGEST[accelerator.device.type]
    batch, documents = draw_documents(shapes, vocabulary, generator)
    long_batch, long_document = draw_long_document(shapes, vocabulary, generator, longest)
    return [batch, long_batch], [documents, long_document]


@contextmanager
def _comparable(model: PackedLanguageModel, tokens: int) -> Iterator[float]:
    """Context manager that prepares the model for the comparison, and restores it afterwards.

    Dropout is off, and equal values are made distinct. Yield the factor of the LM head's input (see
    `distinct_values`).

    The LM head computes the loss in chunks of tokens. The chunks are made smaller, so that the
    microbatch has several of them, as in training. A low precision may round their size up, but a
    microbatch of 384 tokens or more has at least three chunks. The penalty of the loss has the
    weight 1.0 in the model and in the reference, because rounding of the cross-entropy's gradient
    would hide the gradient of a small penalty.

    Args:
        model: Model that is compared.
        tokens: Number of tokens of a microbatch.
    """
    head = model.hf.get_output_embeddings()
    penalty = head.penalty
    if penalty:
        # Divide by the recipe's weight. If the model has another weight, the result is not 1.0, and
        # the comparison finds the difference.
        penalty = replace(penalty, weight=penalty.weight / (head.settings.penalty_weight or 1.0))
    with (
        training_without_dropout(model, model.routing.routers),
        overridden(head, chunk=min(head.chunk, -(-tokens // CHUNKS)), penalty=penalty),
        distinct_values(model) as factor,
        head.register_forward_pre_hook(lambda head, inputs: (factor * inputs[0], inputs[1])),
    ):
        yield factor


class Reference(NamedTuple):
    """Results of plain transformers."""

    # Mean loss in FP32, and mean cross-entropy in FP32.
    loss: float
    held_out_loss: float
    # Root mean square of BF16's errors in the losses of the tokens.
    loss_noise: float
    # Gradients in FP32, by parameter name.
    gradients: dict[str, Tensor]
    # Distances of the gradients in BF16 from the gradients in FP32.
    noise: dict[str, Distance]


def _reference(
    model: PackedLanguageModel,
    accelerator: Accelerator,
    microbatches: Sequence[Documents],
    step_tokens: int,
    tokens: int,
    head_factor: float,
) -> Reference:
    """Run plain transformers in FP32, and then in BF16 to measure the errors of BF16.

    If the model computes in BF16 on a GPU, the GEMMs of the FP32 model round their operands to
    TF32. TF32 rounds 8 times more finely than BF16, and is several times as fast as FP32.

    Args:
        model: Model that is compared.
        accelerator: Accelerator of the run.
        microbatches: Documents of each microbatch of this rank.
        step_tokens: Number of tokens with a label in the training step. Gradients are divided by
            this number.
        tokens: Number of compared tokens over all ranks.
        head_factor: Factor of the input of the LM head.
    """
    plain = reference_model(model.hf, accelerator.device)
    for layer in decoder_layers(plain).values():
        # Recompute layers in backward, because eager attention stores heads x length^2 scores per
        # layer. The recomputation repeats the same operations, so the gradients do not change.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    loss_settings = model.hf.get_output_embeddings().settings

    def computed() -> tuple[Tensor, dict[str, Tensor]]:
        losses, gradients = reference_pass(plain, microbatches, loss_settings, head_factor)
        # Sum one gradient at a time over ranks, because each sum needs memory for a copy of the
        # gradient. The backward of the packed path has already summed its own gradients over ranks.
        for name in gradients:
            gradients[name] = accelerator.reduce(gradients[name].div_(step_tokens), reduction="sum")
        return losses, gradients

    gemms = "ieee" if model.context.compute_dtype == torch.float32 else "tf32"
    with overridden(torch.backends.cuda.matmul, fp32_precision=gemms):
        losses, gradients = computed()
    # Rotary frequencies stay in FP32, because they are buffers and not parameters.
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    rounded_losses, rounded = computed()
    # Free the memory of the weights now. A module with a replaced forward is part of a reference
    # cycle, so the memory would otherwise stay in use until the next garbage collection.
    plain.to("meta")  # type: ignore[arg-type]  # transformers annotates the argument wrongly
    squared_errors = (rounded_losses - losses)[:1].double().square()
    # Three rows with a value for each token: the loss, the held-out loss, and BF16's squared error.
    rows = torch.cat([losses.double(), squared_errors])
    sums_of_ranks = from_all_ranks(rows.sum(1).tolist())
    loss, held_out_loss, mean_square = (np.sum(sums_of_ranks, axis=0) / tokens).tolist()
    return Reference(
        loss=loss,
        held_out_loss=held_out_loss,
        loss_noise=math.sqrt(mean_square),
        gradients=gradients,
        noise=distances(rounded, gradients),
    )


def _with_quantized_path(
    parity: Parity,
    path: _PackedPath,
    step: StepBatches,
    active: ActivePrecision,
    loss_factor: float,
) -> Parity:
    """Return `parity` with the figures and the mismatches of the quantized path.

    Three passes start with equal histories, scales and random numbers. The first one computes the
    gradients of `step` as in training. The second one computes each microbatch alone. The third one
    repeats the first one with probes, which compare the products and the histories. Only the loss
    and the gradient norm are compared with the unquantized path.

    The gradients and the state of the third pass remain. `check_parity` clears and restores them.

    Args:
        parity: Result of the unquantized path. Its list of failures is extended.
        path: Path of training.
        step: Random microbatches.
        active: Precision of the quantized path.
        loss_factor: Factor that converts the loss of a pass to the mean over the compared tokens.
    """
    model = path.model
    context = model.context
    # Fill the histories of delayed scaling with the amaxes of the gradients of these labels. While
    # the gradients of one layer saturate, the amaxes of the layers before it are too small.
    if context.state():
        for _ in range(PASSES_FOR_HISTORIES):
            path.run(step)
    state = context.copied_state()

    def start_again() -> None:
        """Restore histories, scales and random numbers."""
        context.go_back(state)
        torch.manual_seed(0)

    start_again()
    path.run(step)
    together = {name: gradient.clone() for name, gradient in gradients_of(model.hf).items()}
    start_again()
    summed = _sum_over_microbatches(path, step)
    start_again()
    products = ProductCheck(context, active)
    head = HeadCheck(model, step)
    wrong_histories: list[str] = []
    histories = watching_histories(context, active, wrong_histories)
    with context.probing(products), head.observing():
        loss = path.run(step, around_first=histories) * loss_factor
    norm = gradient_norm(model.parameters()).item()
    bias_gradients = _bias_gradients(model, products, path.accelerator)
    result = replace(
        parity,
        quantized_loss=loss,
        quantized_gradient_norm=norm,
        products=products.compared(),
        codes=compare_codes(products, active),
        derived=worst_first([*head.compared, *bias_gradients]),
        sums=judge_sums(together, summed, gradients_of(model.hf)),
    )
    result.failures += _quantized_mismatches(result, loss, norm, wrong_histories)
    return result


def _sum_over_microbatches(path: _PackedPath, step: StepBatches) -> dict[str, Tensor]:
    """Run each microbatch of `step` alone, and return the sums of their gradients in FP32."""
    sums: dict[str, Tensor] = {}
    for microbatch in step.microbatches:
        path.run(replace(step, microbatches=[microbatch]))
        for name, gradient in gradients_of(path.model.hf).items():
            sums[name] = gradient.float() + sums.get(name, 0.0)
    return sums


def _quantized_mismatches(
    parity: Parity, loss: float, norm: float, wrong_histories: Sequence[str]
) -> list[str]:
    """Return one line for each mismatch of the quantized path, whose figures are in `parity`.

    loss, norm: the loss and the gradient norm of the quantized path.
    wrong_histories: names of operands whose scale or history is wrong.
    """
    lines = worst_of(
        parity.products, "low-precision products", "their errors are not those of the format"
    )
    lines += worst_of(
        parity.codes, "codes of operands", "they differ from the reference quantizer's codes"
    )
    lines += worst_of(
        parity.derived, "losses and gradients", "they do not follow from the quantized products"
    )
    lines += worst_of(
        parity.sums,
        "gradients over two microbatches",
        "they differ from the sum of the gradients of the two microbatches",
    )
    if wrong_histories:
        lines.append(
            f"delayed scaling: the scale or the history of {len(wrong_histories)} operands is "
            f"wrong, for example of {wrong_histories[0]}"
        )
    plain_norm = parity.gradient_norm
    is_near = plain_norm / NORM_RATIO <= norm <= plain_norm * NORM_RATIO
    if not (math.isfinite(loss) and is_near):
        lines.append(
            "the quantized and the unquantized path differ too much: the losses are "
            f"{loss:.6f} and {parity.loss:.6f}, the gradient norms are {norm:.4g} and "
            f"{plain_norm:.4g}"
        )
    return lines


def _bias_gradients(
    model: PackedLanguageModel, products: ProductCheck, accelerator: Accelerator
) -> Iterator[Compared]:
    """Compare the gradient of each bias of a quantized linear with its expected value.

    The expected value is the gradient of the linear's output, summed over tokens and ranks. The LM
    head is skipped, because the observed gradient of its output is not multiplied by the factor of
    the loss. All ranks must call this function.
    """
    gradients = gradients_of(model.hf)
    engine: Any = model.context.engine
    head = model.hf.get_output_embeddings().state.name
    for name, total in products.token_sums.items():
        keys = [f"{member}.bias" for member in engine.gemms[name].members]
        biases = [full_tensor(gradients[key]) for key in keys if key in gradients]
        if biases and name != head:
            expected = accelerator.reduce(total, reduction="sum")
            yield compare_values(f"{name}: gradient of the bias", torch.cat(biases), expected)


def _with_choices(
    microbatches: Sequence[Documents], choices: Sequence[Sequence[Tensor]]
) -> list[Documents]:
    """Return copies of the documents, with the experts that their tokens have chosen.

    The experts are stored in the field `choices` of a copy.

    Args:
        microbatches: Documents of each microbatch.
        choices: For each layer, a list with one tensor for each of its forwards. The tensor has the
            experts that the tokens of a microbatch have chosen. A layer that is recomputed in
            backward has two forwards per microbatch.
    """
    result = []
    for number, documents in enumerate(microbatches):
        indices = documents.indices.flatten()
        document_choices = []
        for layer_choices in choices:
            forwards_per_microbatch = len(layer_choices) // len(microbatches)
            first_forward = layer_choices[number * forwards_per_microbatch]
            document_choices.append(first_forward[indices])
        result.append(documents._replace(choices=document_choices))
    return result


def too_far(name: str, actual: float, expected: float, tolerated: float) -> list[str]:
    """Return a list with one line if two losses differ by more than `tolerated`, else no line."""
    # `<=` is false for NaN, so NaN is a failure.
    if abs(actual - expected) <= tolerated:
        return []
    return [
        f"{name} of the packed path: {actual:.6f}, loss of plain transformers: {expected:.6f}, "
        f"allowed difference: {tolerated:.2g}"
    ]


def worst_of(compared: Sequence[Compared], subject: str, meaning: str) -> list[str]:
    """Return a list with one line about the worst mismatches. The list is empty if there are none.

    Args:
        compared: Comparisons, the worst one first.
        subject: Name of the compared values, in the plural.
        meaning: Clause with the meaning of a mismatch.
    """
    wrong = [entry for entry in compared if entry.excess > 1]
    if not wrong:
        return []
    worst = ", ".join(f"{entry.name} ({entry.excess:.3g})" for entry in wrong[:SHOWN])
    return [
        f"{subject}, {len(wrong)} of {len(compared)}: {meaning}. The largest errors, in multiples "
        f"of the tolerance: {worst}"
    ]


@contextmanager
def distinct_values(model: PackedLanguageModel) -> Iterator[float]:
    """Context manager that adds noise to parameters whose values are all equal.

    The parameters of new norms and biases have equal values. Without noise, the comparison could
    not detect that two norms are swapped. When the caller's `with` statement ends, all values are
    restored bit for bit.

    Yield a factor for the inputs of the LM head. The factor gives the logits of a new model a
    standard deviation of LOGITS. Without the factor, the logits of a new model would be nearly
    equal, and an error in the gradient of softmax or penalty would be too small to detect. The
    factor is 1.0 if no parameter was changed.

    Draws random numbers. All ranks must call this function.
    """
    # All ranks use the same seed.
    torch.manual_seed(0)
    before = []
    for parameter in model.parameters():
        values = local_part(parameter)
        if parameter.requires_grad and values.numel() > 1 and values.amin() == values.amax():
            before.append((values, values.clone()))
            size = torch.where(values == 0, NOISE_ON_ZEROS, NOISE * values.abs())
            values += size * torch.randn(values.shape).to(values.device)
    head = model.hf.get_output_embeddings()
    norm = full_tensor(vector_norm(head.weight.detach(), dtype=torch.float32)).item()
    try:
        changed = any(from_all_ranks(bool(before)))
        # The inputs are normalised, so norm / sqrt(vocabulary) is the logits' standard deviation.
        factor = LOGITS * math.sqrt(len(head.weight)) / (norm * head.change.factor)
        yield max(1.0, factor) if changed else 1.0
    finally:
        for values, original in before:
            values.copy_(original)


@contextmanager
def training_without_dropout(
    model: nn.Module, routers: Container[nn.Module] = ()
) -> Iterator[None]:
    """Put `model` into training mode, without dropout and other noise, and restore it afterwards.

    Training mode is needed, because low precision and recomputation depend on it. All dropout rates
    are zero, in torch's dropout modules and in layers that call the dropout function. The noise on
    the inputs of experts is zero too. `routers` are in evaluation mode, because some routers choose
    experts randomly in training mode. The attributes of routers are not changed, because the noise
    rate of a router also determines which experts the router considers.
    """
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
