"""Does the fast path train what plain transformers trains? Packs of the run's own step 0, three times over.

Two comparisons, since they can bear two tolerances.

* The whole packed path with its quantization off, as it is assembled, wrapped and fused, against plain transformers: eager, in
  FP32, one document at a time. Documents that leak, wrong targets, lost microbatches, wrong factors show here in every precision,
  because here only the compute dtype rounds. How much that may be is measured: plain transformers in BF16 against itself in FP32,
  on the same documents, tensor by tensor. Gradients add up where quantized products add theirs.
* The quantized path against the unquantized one. Each product by itself (pretrain.verify.probe): its error must be what the
  format's quantizer makes. And the gradient's norm must stay within a factor of the unquantized one's.

A few whole documents (or beginnings of long ones: a token sees none after it) from all over the microbatches are compared, and
the labels of all others are masked in the fast path. So the plain side stays cheap, while the fast path computes whole
microbatches of the run's own packs. Every label, position and offset of the step is compared as well. Documents leak at their
boundaries only: microbatches with boundaries inside of packs come first, and where step 0 has none its packs are cut.

Both sides have to predict other tokens than the text's. Where weights predict it, its loss and gradients are the exponentials of
distances between logits: they vanish, and what rounds a logit by a tenth changes them by a tenth of themselves, most of it in a
few tokens, which no measure of half of the documents foretells. Of a token that is not foreseen the loss is such a distance
itself, and its gradient is about 1. So an error of a logit counts as it is, whatever the weights were trained to.

Before each pass a microbatch is run with all parameters negated, and they are negated back: a cast or quantized copy of a weight
that is not made again in the pass is then one of the negated weight. Real text is needed: where all tokens are the same,
attention averages equal values whichever it sees. Dropout is off on both sides.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from foundation.attributes import holding
from foundation.errors import InputError
from foundation.progress import advance
from packing.arrow import IGNORE, Pack
from packing.batch import Microbatch, StepBatches, build_microbatch
from pretrain.metrics.health import TrainingHalted
from pretrain.model.distributed import local_part
from pretrain.model.gradients import gradient_of
from pretrain.model.packed import PackedLanguageModel, forward_backward
from pretrain.optimizer.adamw import clear_gradients
from pretrain.plan.remedies import is_out_of_memory
from pretrain.precision.settings import ActivePrecision
from pretrain.verify.comparison import (
    LEEWAY,
    Comparison,
    Distance,
    QuantizedParity,
    RoundingTolerance,
    aligned,
    distances,
    mixtures_in,
    total_norm,
    with_total,
)
from pretrain.verify.probe import SHOWN, ProductParity, ProductProbe, record_of
from pretrain.verify.reference_model import (
    Document,
    Pass,
    differences,
    documents_in,
    in_bf16,
    reference_model,
    reference_pass,
    release,
    valid_tokens_of,
    whole,
)

MICROBATCHES = 2  # of each rank: the first quantizes the weights, and the second takes its copies
TOKENS, DOCUMENTS = 2048, 6  # of each rank, at most, that the plain side computes
PLAIN_BYTES = 16  # a parameter: plain weights, their gradient, one to compare with, and sums of products, in FP32
LONGEST = TOKENS // 2  # what is taken of one document
DIFFERENT = 16  # tokens, at least, that a text has whose parity says something of every other text
NOISES = ("jitter_noise", "input_jitter_noise")  # on what a mixture's experts and router take in training, as modules call it
TAUGHT = 2  # passes in which delayed scaling sees the gradients of other labels: in each, what scales cut reaches less far
ROUTED = (
    " The model chooses experts for each token: rounding in BF16 may choose others, and many such tokens are more than is "
    "tolerated with nothing wrong. `precision=fp32 weights=fp32` compares without, if no router draws by chance: its jitter is 0."
)
FP32_OF_BF16 = 2.0**-8  # FP32 rounds 2^16 times finer than the BF16 that is measured; the rest is for another order of sums

Labels = TypeVar("Labels", np.ndarray, Tensor)


@dataclass(frozen=True)
class Text:
    """What was compared, over all ranks but for `different`, which is a rank's least."""

    tokens: int  # that have a label
    documents: int
    inside: int  # documents that begin inside of a pack, where another could leak into them
    different: int  # tokens


@dataclass(frozen=True)
class Parity:
    """What was found. `quantized` and the rest after it are None or empty where nothing is quantized."""

    batch: tuple[str, ...]  # in what the microbatches are not the packs of step 0
    plain: Comparison
    products: tuple[ProductParity, ...] = ()
    elsewhere: bool = False  # a product of another process is off
    histories: tuple[str, ...] = ()
    quantized: QuantizedParity | None = None
    seconds: Mapping[str, float] | None = None
    text: Text = field(default_factory=lambda: Text(0, 0, 0, 0))
    mixture: bool = False  # the model chooses experts for each token

    @property
    def failures(self) -> list[str]:
        lines = [f"batch: {line}" for line in self.batch] + self.plain.failures
        if self.text.tokens and not self.text.inside:
            lines.append("no boundary between documents was looked at: packs are too short to hold two")
        if wrong := [each for each in self.products if each.excess > 1]:
            lines.append(
                f"{len(wrong)} of {len(self.products)} low-precision products: {wrong[0].name} ({wrong[0].gemm}) worst, "
                f"{wrong[0].error:.2%} off where the format is {wrong[0].least:.2%} to {wrong[0].most:.2%}"
            )
        elif self.elsewhere:
            lines.append("low-precision products of another process")
        if self.histories:
            lines.append(f"delayed scaling: scale or history of {len(self.histories)} operands, {self.histories[0]} among them")
        return lines + (self.quantized.failures if self.quantized else [])

    def table(self) -> str:
        """The worst of what is off."""
        parts = [self.plain.table()] if self.plain.failures else []
        if wrong := [each.cells() for each in self.products if each.excess > 1]:
            parts.append(aligned([("product", "error", "of the format", "likeness"), *wrong[:SHOWN]]))
        return "\n".join(parts)

    def summary(self) -> str:
        """Says in one line how far apart the sides are."""
        loss = f"loss {self.plain.loss - self.plain.reference_loss:+.1e}"
        if not self.text.tokens:
            return "parity with plain transformers: nothing to compare, as no document of the first microbatches has a label"
        text = f"parity with plain transformers: {loss}, gradients at {worst_of(self.plain):.0%} of what is tolerated at worst"
        if self.text.different < DIFFERENT:
            text += f"; the text has {self.text.different} different tokens, which tell little"
        if self.quantized and self.products:
            ratio = self.quantized.norm_ratio
            text += f"; quantized: {len(self.products)} products at {self.products[0].excess:.0%}, gradient's norm x {ratio:.2f}"
        return text

    def record(self) -> dict[str, Any]:
        """Returns what audit.json says: the figures, the worst tensors, what was tolerated and what failed."""
        found: dict[str, Any] = {"failures": self.failures, "plain": self.plain.record(), "seconds": self.seconds}
        found["compared"] = asdict(self.text)
        if self.quantized:
            found |= {"quantized": asdict(self.quantized), "products": record_of(self.products)}
        return found

    def require(self) -> None:
        """TrainingHalted with what differs, the worst of it and what to try, unless all is within the tolerance."""
        if not self.failures:
            return
        listed = "".join(f"\n  {line}" for line in self.failures)
        raise TrainingHalted(
            0,
            f"parity: this run would not train what plain transformers trains:{listed}\n{self.table()}\n"
            "Nothing has been trained. `precision=bf16`, `model.compile=none`, `model.fused=off` and `model.attention=sdpa`, one "
            f"by one, tell what is at fault; `parity=off` trains all the same.{ROUTED if self.mixture else ''}",
        )


def worst_of(comparison: Comparison) -> float:
    return comparison.tensors[0].excess if comparison.tensors else 0.0


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
    """Compare `step`, whose packs on all ranks are `packs`: what its microbatches hold, losses and gradients of the first ones.
    Collective, with one verdict on all ranks.

    `model` is the prepared one. Gradients are cleared afterwards; weights, random numbers, modes of modules, histories and scales
    are as before. InputError where the plain model does not fit into memory beside the run.
    """
    device, check = accelerator.device, _Check(model, optimizer, active, accelerator)
    collected = gc.isenabled()
    gc.disable()  # a collection among all modules of a model takes as long as a pass, and nothing large is left to it
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), check.context.preserving_state():
            found = check.run(step, packs, mask_boundaries)
            return replace(found, mixture=check.mixture)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "`parity`: the plain FP32 model does not fit into the device's memory beside the run "
            f"({PLAIN_BYTES} bytes a parameter, and eager attention of one layer over {LONGEST:,} tokens); set `parity: off`"
        ) from None
    finally:
        clear_gradients(optimizer, model)
        if collected:
            gc.enable()
        check.forget_copies()  # of the unquantized path, which training may never take
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # the peak that a run reports is training's


class _Check:
    """One check of one model."""

    def __init__(
        self, model: PackedLanguageModel, optimizer: torch.optim.Optimizer, active: ActivePrecision, accelerator: Accelerator
    ) -> None:
        self.packed, self.optimizer, self.active, self.accelerator = model, optimizer, active, accelerator
        self.hf, self.context = model.hf, model.context
        self.mixture = bool(mixtures_in(name for name, _ in self.hf.named_parameters()))
        self.seconds: dict[str, float] = {}

    def run(self, step: StepBatches, packs: Sequence[Pack], mask_boundaries: bool) -> Parity:
        documents = documents_in(step.microbatches, packs, mask_boundaries=mask_boundaries)
        valid_tokens = sum(valid_tokens_of(pack, mask_boundaries=mask_boundaries) for pack in packs)
        batch = self._wrong_in(step, documents, packs, valid_tokens)
        length = step.microbatches[0].max_seqlen
        microbatches, documents = with_boundaries(step.microbatches, documents, length, mask_boundaries=mask_boundaries)
        chosen = chosen_of(documents, length)
        step = replace(step, microbatches=[labelled(*each) for each in zip(microbatches, chosen, strict=True)])
        step = replace(step, microbatches=[replace(each, labels=self._others(each.labels)) for each in step.microbatches])
        compared = [replace(document, targets=self._others(document.targets)) for of_batch in chosen for document in of_batch]

        with self._timed("plain"):
            reference, noise, loss_noise = self._plain_passes(compared, max(valid_tokens, 1))
        tokens = self._summed(sum(document.valid_tokens for document in compared))
        text = self._text(compared, int(tokens), length)
        share = max(tokens, 1) / max(valid_tokens, 1)

        with training_without_dropout(self.packed), self._loss_in_chunks(step):
            with self._timed("unquantized"), holding(self.context, quantizing=False):
                if self.packed.fused:
                    self._spoil_copies(step)
                fast = self._pass(step)
            found = distances(fast.gradients, reference.gradients)
            dtypes = {self.context.compute_dtype, *(g.dtype for g in fast.gradients.values() if g is not None)}
            resolution = FP32_OF_BF16 if dtypes == {torch.float32} else 1.0  # gradients may add up in BF16
            tolerance = RoundingTolerance(noise, resolution, tokens)
            tensors = [tolerance.allow(name, each) for name, each in with_total(found)]
            plain = Comparison(
                "the packed path" if not self.active.precision.quantized else "the packed path, unquantized,",
                "plain transformers",
                fast.loss / share,
                reference.loss / share,
                loss_noise * resolution * (1.0 if text.different >= DIFFERENT else LEEWAY),  # equal tokens err alike
                total_norm(found, "measured"),
                total_norm(found),
                tuple(sorted(tensors, key=lambda tensor: tensor.excess, reverse=True)),
            )
            # Rounding equal rows by chance errs alike in all of them, and then a sample says nothing.
            if not self.active.precision.quantized or text.different < DIFFERENT:
                return Parity(tuple(batch), plain, seconds=self.seconds, text=text)
            del reference
            gradients = {n: None if g is None else g.detach().clone() for n, g in fast.gradients.items()}
            return replace(self._quantized(step, Pass(fast.loss, gradients), share, batch, plain), text=text)

    def _quantized(self, step: StepBatches, unquantized: Pass, share: float, batch: list[str], plain: Comparison) -> Parity:
        with self._timed("quantized"):
            for _ in range(TAUGHT if self.context.state() else 0):
                self._pass(step)
            self._spoil_copies(step)
            probe = ProductProbe(self.packed, self.active)
            with probe.watching():
                fast = self._pass(step)
            found = distances(fast.gradients, unquantized.gradients)
            histories = probe.wrong_histories(self.accelerator)
            products = probe.found()
        cosines = [each.cosine for each in found.values() if each.cosine is not None]
        losses = fast.loss / share, unquantized.loss / share
        norms = total_norm(found, "measured"), total_norm(found)
        quantized = QuantizedParity(*losses, *norms, min(cosines, default=None))
        worst = self._largest(products[0].excess if products else 0.0)
        return Parity(tuple(batch), plain, tuple(products), worst > 1, tuple(histories), quantized, self.seconds)

    def _wrong_in(
        self, step: StepBatches, documents: list[list[Document]], packs: Sequence[Pack], valid_tokens: int
    ) -> list[str]:
        lines = []
        for number, (batch, of_batch) in enumerate(zip(step.microbatches, documents, strict=True)):
            if wrong := differences(batch, of_batch):
                lines.append(f"{', '.join(wrong)} of microbatch {number} are not those of the packs of step 0")
        if step.valid_tokens != valid_tokens:
            lines.append(f"{step.valid_tokens} tokens of step 0 have a label, and its packs have {valid_tokens}")
        if step.tokens != sum(len(pack.input_ids) for pack in packs):
            lines.append(f"step 0 counts {step.tokens} tokens, and its packs hold {sum(len(p.input_ids) for p in packs)}")
        elsewhere = self._summed(len(lines)) > 0
        return lines or (["microbatches of another process"] if elsewhere else [])

    def _text(self, compared: list[Document], tokens: int, length: int) -> Text:
        inside = sum(document.begin % length > 0 for document in compared)
        different = len(np.unique(np.concatenate([document.tokens for document in compared]))) if compared else 0
        return Text(tokens, int(self._summed(len(compared))), int(self._summed(inside)), -int(self._largest(-different)))

    def _plain_passes(self, documents: list[Document], valid_tokens: int) -> tuple[Pass, dict[str, Distance], float]:
        """Plain transformers in FP32; how far BF16 takes each of its gradients, and the loss of a token (root mean square).

        What BF16 does is measured on half of the documents, and is that much more on all as their gradient is larger; of a
        mixture of experts on all of them, as it sends a few tokens to other experts, which may lie in either half."""
        plain = reference_model(self.hf, self.accelerator.device)
        measured = len(documents) if self.mixture else -(-len(documents) // 2)
        loss = self.hf.get_output_embeddings().settings
        first = reference_pass(plain, documents[:measured], valid_tokens, loss)
        of_first = self._over_ranks(Pass(first.loss, {n: g.clone() for n, g in first.gradients.items()}, first.token_losses))
        rest = reference_pass(plain, documents[measured:], valid_tokens, loss)  # adds to the gradients of the first
        reference = self._over_ranks(Pass(first.loss + rest.loss, rest.gradients))
        rounded = self._over_ranks(reference_pass(in_bf16(plain), documents[:measured], valid_tokens, loss))
        release(plain)
        squares = (rounded.token_losses - of_first.token_losses).double().square().sum().item()
        loss_noise = math.sqrt(self._summed(squares) / max(self._summed(of_first.token_losses.numel()), 1))
        noise = distances(rounded.gradients, of_first.gradients)
        norms = [whole(gradient).norm(dtype=torch.float64) for gradient in reference.gradients.values()]
        larger = torch.stack(norms).norm().item() / (total_norm(noise) or 1.0)
        noise = {
            name: Distance(*(larger * norm for norm in astuple(each)[:3]), each.values, larger**2 * each.product)
            for name, each in noise.items()
        }
        return reference, dict(with_total(noise)), loss_noise

    def _others(self, labels: Labels) -> Labels:
        return other_labels(labels, self.hf.config.get_text_config().vocab_size)

    def _pass(self, step: StepBatches) -> Pass:
        """Forward and backward as a training step does them. The gradients stay where they add up until the next pass."""
        clear_gradients(self.optimizer, self.packed)
        loss = forward_backward(self.packed, step, self.accelerator).item()
        return Pass(loss, {name: gradient_of(parameter) for name, parameter in self.hf.named_parameters()})

    def _spoil_copies(self, step: StepBatches) -> None:
        """Let whatever is kept of a weight for a step's later microbatches be that of the negated weight. Histories and scales
        are as before: the negated model's values are others."""
        self.forget_copies()
        state = {name: tensor.clone() for name, tensor in self.context.state().items()}
        with self._negated():
            self._pass(replace(step, microbatches=step.microbatches[:1]))
        for name, tensor in self.context.state().items():
            tensor.copy_(state[name])

    def forget_copies(self) -> None:
        with self.context.preserving_state():  # quantized ones are forgotten as this is left
            pass
        for product in self.packed.fused.products if self.packed.fused else ():
            product.weights.forget_copy()

    @contextmanager
    def _negated(self) -> Iterator[None]:
        parameters = [local_part(parameter).detach() for parameter in self.hf.parameters()]
        try:
            for parameter in parameters:
                parameter.neg_()
            yield
        finally:
            for parameter in parameters:
                parameter.neg_()

    def _over_ranks(self, own: Pass) -> Pass:
        """The sum over ranks of plain passes over each rank's own packs; the fast path's backward has made it already."""
        if self.accelerator.num_processes == 1:
            return own
        gradients = {name: self.accelerator.reduce(gradient, reduction="sum") for name, gradient in own.gradients.items()}
        return Pass(self._summed(own.loss), gradients, own.token_losses)

    def _summed(self, value: float) -> float:
        return sum(self._of_ranks(value))

    def _largest(self, value: float) -> float:
        return max(self._of_ranks(value))

    def _of_ranks(self, value: float) -> list[float]:
        if self.accelerator.num_processes == 1:
            return [value]
        own = torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.gather(own).tolist()

    def _loss_in_chunks(self, step: StepBatches) -> AbstractContextManager[None]:
        """The loss of a microbatch in two chunks at least, as of training's microbatches, which may be larger."""
        head = self.hf.get_output_embeddings()
        half = -(-step.microbatches[0].input_ids.shape[1] // 2)
        return holding(head, settings=head.settings.model_copy(update={"chunk": min(head.settings.tokens_at_once, half)}))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        advance(detail=what)
        began = time.perf_counter()
        yield
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        self.seconds[what] = round(time.perf_counter() - began, 3)


# ── What is compared ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_boundaries(
    microbatches: Sequence[Microbatch], documents: Sequence[list[Document]], length: int, *, mask_boundaries: bool
) -> tuple[list[Microbatch], list[list[Document]]]:
    """Chooses MICROBATCHES of a step, and their documents: those in which most documents begin inside of a pack of `length`.
    Where none does, the first one's packs are cut into quarters, which are documents of their own then."""
    inside = [sum(each.begin % length > 0 for each in of_batch if each.valid_tokens) for of_batch in documents]
    places = sorted(sorted(range(len(inside)), key=lambda place: -inside[place])[:MICROBATCHES])
    batches, of_batches = [microbatches[place] for place in places], [documents[place] for place in places]
    if not any(inside) and any(each.valid_tokens for of_batch in of_batches for each in of_batch):
        packs = []
        for row in batches[0].input_ids[0].view(-1, length).numpy():
            ends = np.unique(np.arange(5) * length // 4)
            packs.append(Pack(row.astype(np.uint32), np.diff(ends).astype(np.int32)))
        batches[0] = build_microbatch(packs, mask_boundaries=mask_boundaries)
        of_batches[:1] = documents_in(batches[:1], packs, mask_boundaries=mask_boundaries)
    return batches, of_batches


def chosen_of(documents: Sequence[Sequence[Document]], length: int) -> list[list[Document]]:
    """Chooses the documents of each microbatch that are compared, in turns, from all over it: whole, or beginnings of long ones.

    Neighbours come together, since what leaks may leak over every second boundary. First come the last two of one microbatch and
    the first two of the next: what is lost is mostly lost at an end. One that begins inside of a pack of `length` tokens comes
    before all, as long ones may leave no room for more."""
    draw = np.random.default_rng(0)
    waiting = []
    for number, of_batch in enumerate(documents):
        trained = [document for document in of_batch if document.valid_tokens]
        ends, others = (trained[:2], trained[2:]) if number % 2 else (trained[:-3:-1], trained[:-2])
        pairs = draw.permutation(-(-len(others) // 2))
        in_turn = [*ends, *(document for pair in pairs for document in others[2 * pair : 2 * pair + 2])]
        first = next((document for document in in_turn if document.begin % length), None)
        waiting.append([*([first] if first else []), *(document for document in in_turn if document is not first)])
    chosen: list[list[Document]] = [[] for _ in documents]
    room, number = TOKENS, 0
    while room > 0 and sum(map(len, chosen)) < DOCUMENTS and any(waiting):
        if waiting[number % len(waiting)]:
            document = waiting[number % len(waiting)].pop(0)
            length = min(len(document.tokens), room, LONGEST)
            chosen[number % len(waiting)].append(
                replace(document, tokens=document.tokens[:length], targets=document.targets[:length])
            )
            room -= length
        number += 1
    return chosen


def labelled(batch: Microbatch, documents: Sequence[Document]) -> Microbatch:
    """`batch` with the labels that it has in these documents, and no others."""
    labels = torch.full_like(batch.labels, IGNORE)
    for document in documents:
        labels[:, document.begin : document.end] = batch.labels[:, document.begin : document.end]
    return replace(batch, labels=labels, valid_tokens=int((labels != IGNORE).sum()))


def other_labels(labels: Labels, vocabulary: int) -> Labels:
    """Returns labels of other tokens, each half of the vocabulary of `vocabulary` tokens away; what is ignored stays so."""
    ignored = labels == IGNORE
    return (labels + vocabulary // 2) % vocabulary * ~ignored + IGNORE * ignored


@contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """All of `model` in training mode, which low precision and recomputation go by, with every dropout rate at zero: of torch's
    own dropout, and of layers that call the function. So is the noise on what goes into a mixture's experts."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and ("drop" in name or name in NOISES or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
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
