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

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
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
from pretrain.verify.comparison import LEEWAY, SHOWN, Comparison, Distance, distances, judge, mixtures_in, total_of
from pretrain.verify.probe import ProductParity, ProductProbe
from pretrain.verify.reference_model import (
    Document,
    Pass,
    differences,
    documents_in,
    documents_of,
    in_bf16,
    reference_model,
    reference_pass,
)

MICROBATCHES = 2  # of each rank: the first quantizes the weights, and the second takes its copies
TOKENS, DOCUMENTS = 2048, 6  # of each rank, at most, that the plain side computes
PLAIN_BYTES = 16  # a parameter: plain weights, their gradient, one to compare with, and sums of products, in FP32
LONGEST = TOKENS // 2  # of one document
DIFFERENT = 16  # tokens, at least, that a text has whose parity says something of every other text
NOISES = ("jitter_noise", "input_jitter_noise")  # on what a mixture's experts and router take in training, as modules call it
TAUGHT = 2  # passes in which delayed scaling sees the gradients of other labels: in each, what scales cut reaches less far
NORM_RATIO = 2.0  # by which the quantized gradient's norm may be off the unquantized one's; healthy FP4 stays within 1.3
FP32_OF_BF16 = 2.0**-8  # FP32 rounds 2^16 times finer than the BF16 that is measured; the rest is for another order of sums
ROUTED = (
    " The model chooses experts for each token: rounding in BF16 may choose others, and many such tokens are more than is "
    "tolerated with nothing wrong. `precision=fp32 weights=fp32` compares without, if no router draws by chance: its jitter is 0."
)

Labels = TypeVar("Labels", np.ndarray, Tensor)


@dataclass(frozen=True)
class Text:
    """What was compared, over all ranks but for `different`, which is a rank's least."""

    tokens: int  # that have a label
    documents: int
    inside: int  # documents that begin inside of a pack, where another could leak into them
    different: int  # tokens


@dataclass(frozen=True)
class QuantizedFigures:
    """Loss and gradient norm of the quantized path beside the unquantized one's."""

    loss: float
    reference_loss: float
    gradient_norm: float
    reference_norm: float

    @property
    def norm_ratio(self) -> float:
        return self.gradient_norm / self.reference_norm if self.reference_norm else 1.0 if not self.gradient_norm else math.inf


@dataclass(frozen=True)
class Parity:
    """What the comparison showed. `products` and what follows are empty where nothing is quantized."""

    batch: tuple[str, ...]  # in what the microbatches are not the packs of step 0
    text: Text
    plain: Comparison
    seconds: dict[str, float]
    mixture: bool  # the model chooses experts for each token
    products: tuple[ProductParity, ...] = ()  # the worst first
    histories: tuple[str, ...] = ()
    quantized: QuantizedFigures | None = None
    elsewhere: bool = False  # another process found a mismatch, and this one none

    @property
    def failures(self) -> list[str]:
        lines = [f"batch: {line}" for line in self.batch] + self.plain.failures
        if self.text.tokens and not self.text.inside:
            lines.append("no boundary between documents was looked at: packs are too short to hold two")
        if wrong := [each for each in self.products if each.excess > 1]:
            worst = ", ".join(f"{each.name} {each.gemm} ({each.excess:.3g})" for each in wrong[:SHOWN])
            lines.append(
                f"{len(wrong)} of {len(self.products)} low-precision products are not what the format makes; how many times over "
                f"what is tolerated: {worst}"
            )
        if self.histories:
            lines.append(f"delayed scaling: scale or history of {len(self.histories)} operands, {self.histories[0]} among them")
        if (q := self.quantized) and not (math.isfinite(q.loss) and 1 / NORM_RATIO <= q.norm_ratio <= NORM_RATIO):
            losses, norms = f"{q.loss:.6f} and {q.reference_loss:.6f}", f"{q.gradient_norm:.4g} and {q.reference_norm:.4g}"
            lines.append(f"quantized path and unquantized one: loss {losses}, gradient norm {norms}")
        return lines or (["of another process"] if self.elsewhere else [])

    def summary(self) -> str:
        """In one line how far apart the sides are."""
        if not self.text.tokens:
            return "parity with plain transformers: nothing to compare, as no document of the first microbatches has a label"
        loss, worst = self.plain.loss - self.plain.reference_loss, self.plain.tensors[0].excess
        text = f"parity with plain transformers: loss {loss:+.1e}, gradients at {worst:.0%} of what is tolerated at worst"
        if self.text.different < DIFFERENT:
            text += f"; the text has {self.text.different} different tokens, which tell little"
        if self.quantized and self.products:
            products = f"{len(self.products)} products at {self.products[0].excess:.0%}"
            text += f"; quantized: {products}, gradient's norm x {self.quantized.norm_ratio:.2f}"
        return text

    def record(self) -> dict[str, Any]:
        """What audit.json says: the figures, the worst tensors, what was tolerated and what failed."""
        record = {"failures": self.failures, "compared": asdict(self.text), "plain": self.plain.record(), "seconds": self.seconds}
        if self.quantized:
            products = {"compared": len(self.products), "worst": [asdict(each) for each in self.products[:SHOWN]]}
            record |= {"quantized": asdict(self.quantized), "products": products}
        return record

    def require(self) -> None:
        """TrainingHalted with what differs and what to try, unless all is within the tolerance."""
        if not self.failures:
            return
        lines = ["parity: this run would not train what plain transformers trains:", *(f"  {line}" for line in self.failures)]
        lines.append(
            "Nothing has been trained; audit.json has all figures. `precision=bf16`, `model.compile=none`, `model.fused=off` and "
            "`model.attention=sdpa`, one by one, tell what is at fault; `parity=off` trains all the same."
        )
        raise TrainingHalted(0, "\n".join(lines) + (ROUTED if self.mixture else ""))


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
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), check.context.preserving_state():
            parity = check.run(step, packs, mask_boundaries)
            return replace(parity, elsewhere=check.over_ranks(len(parity.failures)) > 0)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "`parity`: the plain FP32 model does not fit into the device's memory beside the run "
            f"({PLAIN_BYTES} bytes a parameter, and eager attention of one layer over {LONGEST:,} tokens); set `parity: off`"
        ) from None
    finally:
        clear_gradients(optimizer, model)
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
        of_packs = [document for pack in packs for document in documents_of(pack, mask_boundaries=mask_boundaries)]
        valid_tokens = sum(document.valid_tokens for document in of_packs)
        batch = self._wrong_in(step, documents, packs, valid_tokens)
        length = step.microbatches[0].max_seqlen
        microbatches, documents = with_boundaries(step.microbatches, documents, length, mask_boundaries=mask_boundaries)
        chosen = chosen_of(documents, length)
        microbatches = [labelled(*each) for each in zip(microbatches, chosen, strict=True)]
        others = partial(other_labels, vocabulary=self.hf.config.get_text_config().vocab_size)
        step = replace(step, microbatches=[replace(each, labels=others(each.labels)) for each in microbatches])
        compared = [replace(document, targets=others(document.targets)) for of_batch in chosen for document in of_batch]

        with self._timed("plain"):
            reference, noise, loss_noise = self._plain_passes(compared, max(valid_tokens, 1))
        tokens = self.over_ranks(sum(document.valid_tokens for document in compared))
        text = self._text(compared, int(tokens), length)
        share = max(tokens, 1) / max(valid_tokens, 1)

        with training_without_dropout(self.packed), self._loss_in_chunks(step):
            with self._timed("unquantized"), holding(self.context, quantizing=False):
                if self.packed.fused:
                    self._spoil_copies(step)
                unquantized = self._pass(step)
            apart = distances(unquantized.gradients, reference.gradients)
            dtypes = {self.context.compute_dtype, *(g.dtype for g in unquantized.gradients.values() if g is not None)}
            resolution = FP32_OF_BF16 if dtypes == {torch.float32} else 1.0  # gradients may add up in BF16
            plain = Comparison(
                loss=unquantized.loss / share,
                reference_loss=reference.loss / share,
                # Equal tokens err alike.
                loss_tolerated=loss_noise * resolution * (1.0 if text.different >= DIFFERENT else LEEWAY),
                gradient_norm=total_of(apart).measured,
                reference_norm=total_of(apart).reference,
                tensors=judge(apart, noise, resolution, tokens),
            )
            parity = Parity(tuple(batch), text, plain, self.seconds, self.mixture)
            # Rounding equal rows by chance errs alike in all of them, and then a sample says nothing.
            if not self.active.precision.quantized or text.different < DIFFERENT:
                return parity
            del reference
            kept = {name: None if g is None else g.detach().clone() for name, g in unquantized.gradients.items()}
            return self._quantized(parity, step, Pass(unquantized.loss, kept), share)

    def _quantized(self, parity: Parity, step: StepBatches, unquantized: Pass, share: float) -> Parity:
        with self._timed("quantized"):
            for _ in range(TAUGHT if self.context.state() else 0):
                self._pass(step)
            self._spoil_copies(step)
            probe = ProductProbe(self.packed, self.active)
            with probe.watching():
                quantized = self._pass(step)
            total = total_of(distances(quantized.gradients, unquantized.gradients))
        return replace(
            parity,
            products=tuple(probe.products()),
            histories=tuple(probe.wrong_histories),
            quantized=QuantizedFigures(quantized.loss / share, unquantized.loss / share, total.measured, total.reference),
        )

    def _wrong_in(
        self, step: StepBatches, documents: list[list[Document]], packs: Sequence[Pack], valid_tokens: int
    ) -> list[str]:
        lines = []
        for number, (batch, of_batch) in enumerate(zip(step.microbatches, documents, strict=True)):
            if wrong := differences(batch, of_batch):
                lines.append(f"{', '.join(wrong)} of microbatch {number} are not those of the packs of step 0")
        if step.valid_tokens != valid_tokens:
            lines.append(f"{step.valid_tokens} tokens of step 0 have a label, and its packs have {valid_tokens}")
        if step.tokens != (held := sum(len(pack.input_ids) for pack in packs)):
            lines.append(f"step 0 counts {step.tokens} tokens, and its packs hold {held}")
        return lines

    def _text(self, compared: list[Document], tokens: int, length: int) -> Text:
        inside = sum(document.begin % length > 0 for document in compared)
        different = len(np.unique(np.concatenate([document.tokens for document in compared]))) if compared else 0
        counts = (int(self.over_ranks(count)) for count in (len(compared), inside))
        return Text(tokens, *counts, int(self.over_ranks(different, min)))

    def _plain_passes(self, documents: list[Document], valid_tokens: int) -> tuple[Pass, dict[str, Distance], float]:
        """Plain transformers in FP32; how far BF16 takes each of its gradients, and the loss of a token (root mean square).

        What BF16 does is measured on half of the documents, and is that much more on all as their gradient is larger; of a
        mixture of experts on all of them, as it sends a few tokens to other experts, which may lie in either half."""
        plain = reference_model(self.hf, self.accelerator.device)
        measured = len(documents) if self.mixture else -(-len(documents) // 2)
        loss = self.hf.get_output_embeddings().settings
        first = self._summed(reference_pass(plain, documents[:measured], valid_tokens, loss))
        rest = self._summed(reference_pass(plain, documents[measured:], valid_tokens, loss))
        reference = Pass(first.loss + rest.loss, {name: rest.gradients[name].add_(g) for name, g in first.gradients.items()})
        rounded = self._summed(reference_pass(in_bf16(plain), documents[:measured], valid_tokens, loss))
        for parameter in plain.parameters():  # modules whose forward was replaced are cycles, which wait for the collector
            parameter.data = parameter.data.new_empty(0)
        squares = (rounded.token_losses - first.token_losses).double().square().sum().item()
        loss_noise = math.sqrt(self.over_ranks(squares) / max(self.over_ranks(first.token_losses.numel()), 1))
        noise = distances(rounded.gradients, first.gradients)
        norms = [gradient.norm(dtype=torch.float64) for gradient in reference.gradients.values()]
        larger = torch.stack(norms).norm().item() / (total_of(noise).reference or 1.0)
        return reference, {name: each.scaled(larger) for name, each in noise.items()}, loss_noise

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
        parameters = [local_part(parameter).detach() for parameter in self.hf.parameters()]
        torch._foreach_neg_(parameters)
        try:
            self._pass(replace(step, microbatches=step.microbatches[:1]))
        finally:
            torch._foreach_neg_(parameters)
        for name, tensor in self.context.state().items():
            tensor.copy_(state[name])

    def forget_copies(self) -> None:
        with self.context.preserving_state():  # quantized ones are forgotten as this is left
            pass
        for product in self.packed.fused.products if self.packed.fused else ():
            product.weights.forget_copy()

    def _summed(self, own: Pass) -> Pass:
        """The sum over ranks of plain passes over each rank's own packs; the fast path's backward has made it already."""
        if self.accelerator.num_processes == 1:
            return own
        gradients = {name: self.accelerator.reduce(gradient, reduction="sum") for name, gradient in own.gradients.items()}
        return Pass(self.over_ranks(own.loss), gradients, own.token_losses)

    def over_ranks(self, value: float, of: Any = sum) -> float:
        """The sum of the ranks' values, or another function `of` them."""
        if self.accelerator.num_processes == 1:
            return value
        return of(self.accelerator.gather(torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)).tolist())

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
    in_turn = []
    for number, of_batch in enumerate(documents):
        trained = [document for document in of_batch if document.valid_tokens]
        ends, others = (trained[:2], trained[2:]) if number % 2 else (trained[:-3:-1], trained[:-2])
        pairs = draw.permutation(-(-len(others) // 2))
        ends += [document for pair in pairs for document in others[2 * pair : 2 * pair + 2]]
        first = next((document for document in ends if document.begin % length), None)
        in_turn.append(sorted(ends, key=lambda document: document is not first))
    chosen: list[list[Document]] = [[] for _ in documents]
    room = TOKENS
    for turn in zip_longest(*in_turn):
        for of_batch, document in zip(chosen, turn, strict=True):
            if document and room and sum(map(len, chosen)) < DOCUMENTS:
                size = min(len(document.tokens), room, LONGEST)
                of_batch.append(replace(document, tokens=document.tokens[:size], targets=document.targets[:size]))
                room -= size
    return chosen


def labelled(batch: Microbatch, documents: Sequence[Document]) -> Microbatch:
    """`batch` with the labels that it has in these documents, and no others."""
    labels = torch.full_like(batch.labels, IGNORE)
    for document in documents:
        labels[:, document.span] = batch.labels[:, document.span]
    return replace(batch, labels=labels, valid_tokens=int((labels != IGNORE).sum()))


def other_labels(labels: Labels, vocabulary: int) -> Labels:
    """Returns labels of other tokens, each half of the vocabulary of `vocabulary` tokens away; what is ignored stays so."""
    ignored = labels == IGNORE
    return (labels + vocabulary // 2) % vocabulary * ~ignored + IGNORE * ignored


@contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """All of `model` in training mode, which low precision and recomputation go by, with every dropout rate at zero: of torch's
    own dropout, and of layers that call the function. So is the noise on what goes into a mixture's experts."""
    with ExitStack() as changes:
        for module in model.modules():
            rates = [name for name, value in vars(module).items() if isinstance(value, float) and _is_noise(module, name)]
            changes.enter_context(holding(module, training=True, **dict.fromkeys(rates, 0.0)))
        yield


def _is_noise(module: nn.Module, attribute: str) -> bool:
    if attribute == "p":
        return isinstance(module, nn.modules.dropout._DropoutNd)
    return "drop" in attribute or attribute in NOISES
