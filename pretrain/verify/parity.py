"""Does the fast path train what plain transformers trains? Random tokens in step 0's shapes.

docs/verification.md says what is compared, how far each may be off, and why tokens are random.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    reference_model,
    reference_pass,
    whole,
    wrong_batches,
)
from pretrain.verify.reference_quantizer import watching_quantizers

# of a pack, where its documents begin and end: no block of a kernel ends there
SEVENTHS = (0, 1, 3, 5, 7)
DOCUMENTS = 3  # of the first microbatch that have labels
LABELS = 341  # of a document, at most
# Tokens of the second microbatch's document that the plain side computes at most, by device. Eager
# attention keeps heads x length^2 scores of a layer.
LONGEST = {"cpu": 2048, "cuda": 4096}
# Bytes that the plain side takes. A parameter: weights, their gradient, one to compare with, and
# sums of products, in FP32. An attention score of a layer: four copies in FP32.
PLAIN_BYTES = 16
# Standard deviations of the noise on values that are all the same: relative to them, and on zeros.
# Larger biases would make the rows of a small model's attention nearly equal, and so their errors.
NOISE, NOISE_ON_ZEROS = 0.1, 0.01
LOGITS = 3.0  # standard deviation of a fresh model's logits: some tokens are likely, and none alone
# of the norm of a gradient over several microbatches, from that of the sum of theirs
SUMS_APART = 0.1
# by which the quantized gradient's norm may be off the unquantized one's; healthy FP4 stays within
# 1.3
NORM_RATIO = 2.0
# FP32 rounds 2^16 times finer than the BF16 that is measured; the rest is for another order of sums
FP32_OF_BF16 = 2.0**-8
SHOWN = 10  # the worst of a table


@dataclass
class Parity:
    """What the comparison showed. Losses are means over the tokens compared (nats), gradient norms those of their sum over the
    step's tokens. What belongs to quantized products is empty where nothing is quantized."""

    failures: list[str]  # a line for each mismatch
    tokens: int  # compared, over all ranks: those that have a label
    loss: float  # of the packed path with its quantization off
    reference_loss: float  # of plain transformers
    loss_tolerated: float  # how far the two may be apart
    gradient_norm: float
    tensors: Sequence[Compared]  # the worst first
    products: Sequence[Compared] = ()  # the worst first
    # of some operands, with the reference quantizer's; the worst first
    codes: Sequence[Compared] = ()
    # quantized gradients over all microbatches, with the sum of each one's; the worst first
    sums: Sequence[Compared] = ()
    quantized_loss: float | None = None
    quantized_gradient_norm: float | None = None

    def summary(self) -> str:
        """In one line how far apart the sides are."""
        loss, worst = self.loss - self.reference_loss, self.tensors[0].excess
        text = f"parity with plain transformers: loss {loss:+.1e}, gradients differ by at most {worst:.0%} of the tolerance"
        if self.products:
            text += f", {len(self.products)} quantized products by at most {self.products[0].excess:.0%} of theirs"
        return text

    def record(self) -> dict[str, Any]:
        """What audit.json says: the figures, the worst tensors and products, and how many there were."""
        counts = {"tensors_compared": len(self.tensors), "products_compared": len(self.products)}
        worst = {
            name: getattr(self, name)[:SHOWN] for name in ("tensors", "products", "codes", "sums")
        }
        return asdict(replace(self, **worst)) | counts

    def require(self) -> None:
        """TrainingHalted with what differs and what to try, unless all is within the tolerance."""
        if not self.failures:
            return
        lines = [
            "parity: this run would not train what plain transformers trains:",
            *(f"  {line}" for line in self.failures),
        ]
        lines.append(
            "Nothing has been trained; audit.json has all figures. `precision=bf16`, `model.compile=none`, `model.fused=off` and "
            "`model.attention=sdpa`, one by one, show what is at fault; `parity=off` trains without this check."
        )
        raise TrainingHalted(0, "\n".join(lines))


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
    are as before.
    """
    device, check = accelerator.device, _Check(model, optimizer, active, accelerator)
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            model.context.preserving_state(),
        ):
            parity = check.run(step, packs, mask_boundaries)
        if sum(from_all_ranks(len(parity.failures))) and not parity.failures:
            parity.failures.append("of another process")
        return parity
    finally:
        clear_gradients(optimizer, model)
        for product in model.fused.products if model.fused else ():
            product.plain.weight = None  # of the unquantized path, which training may never take
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # the peak that a run reports is training's


@dataclass(frozen=True)
class _Check:
    """One check of one model."""

    model: PackedLanguageModel
    optimizer: torch.optim.Optimizer
    active: ActivePrecision
    accelerator: Accelerator

    def run(self, step: StepBatches, packs: Sequence[Pack], mask_boundaries: bool) -> Parity:
        failures = list(wrong_batches(step.microbatches, packs, mask_boundaries=mask_boundaries))
        head, like = self.model.hf.get_output_embeddings(), step.microbatches[0]
        draw = np.random.default_rng(self.accelerator.process_index)
        drawn = [
            draw_microbatch(like, len(head.weight), draw),
            draw_microbatch(like, len(head.weight), draw, LONGEST[self.accelerator.device.type]),
        ]
        step = replace(step, microbatches=[batch for batch, _ in drawn])
        tokens = self.accelerator.num_processes * sum(batch.valid_tokens for batch, _ in drawn)
        valid_tokens = max(step.valid_tokens, 1)  # all of the step's, over which a loss is a mean
        mean_over = valid_tokens / tokens

        # A penalty has the weight 1.0 on both sides: beside the cross-entropy's gradient, that of a
        # small penalty would be lost in rounding.
        penalty = head.penalty and replace(
            head.penalty,
            weight=head.penalty.weight / (head.settings.penalty_weight or 1.0),
        )
        with (
            training_without_dropout(self.model),
            overridden(
                head,
                # In two chunks at least, as of training's microbatches, which may be larger.
                chunk=min(head.chunk, -(-like.input_ids.shape[1] // 2)),
                penalty=penalty,
            ),
            distinct_values(self.model) as sharper,
            head.register_forward_pre_hook(lambda head, inputs: (sharper * inputs[0], inputs[1])),
        ):
            advance()
            with (
                overridden(self.model.context, quantizing=False),
                recording_choices(self.model) as chosen,
            ):
                loss = self._pass(step) * mean_over
            losses, reference, loss_noise, noise = self._plain(
                _as_chosen([documents for _, documents in drawn], chosen),
                valid_tokens,
                tokens,
                sharper,
            )
            gradients = self._gradients()
            dtypes = {
                self.model.context.compute_dtype,
                *(each.dtype for each in gradients.values() if each is not None),
            }
            # gradients may add up in BF16
            resolution = FP32_OF_BF16 if dtypes == {torch.float32} else 1.0
            parity = Parity(
                failures=failures,
                tokens=tokens,
                loss=loss,
                reference_loss=sum(from_all_ranks(losses.double().sum().item())) / tokens,
                loss_tolerated=loss_noise * resolution,
                gradient_norm=gradient_norm(self.model.parameters()).item(),
                tensors=judge(distances(gradients, reference), noise, resolution),
            )
            # not-a-number is never tolerated
            if not abs(loss - parity.reference_loss) <= parity.loss_tolerated:
                losses_of_both = f"{loss:.6f}, of plain transformers {parity.reference_loss:.6f}"
                failures.append(
                    f"loss of the packed path {losses_of_both}; tolerated is {parity.loss_tolerated:.2g} apart"
                )
            failures += worst_of(
                parity.tensors, "gradients", "the packed path is not plain transformers"
            )
            if self.active.precision.quantized:
                del reference
                failures += self._quantized(parity, step, mean_over)
        return parity

    def _plain(
        self,
        microbatches: Sequence[Sequence[Document]],
        valid_tokens: int,
        tokens: int,
        sharper: float,
    ) -> tuple[Tensor, dict[str, Tensor], float, dict[str, Distance]]:
        """Losses and gradients of plain transformers; and how far BF16 takes each from itself.

        `tokens`: compared, of all ranks.
        """
        advance()
        plain = reference_model(self.model.hf, self.accelerator.device)
        losses, reference = self._plain_pass(plain, microbatches, valid_tokens, sharper)
        for parameter in plain.parameters():  # rotary frequencies are buffers and stay in FP32
            parameter.data = parameter.data.to(torch.bfloat16)
        rounded_losses, rounded = self._plain_pass(plain, microbatches, valid_tokens, sharper)
        # modules whose forward was replaced are cycles, which wait for the collector
        for parameter in plain.parameters():
            parameter.data = parameter.data.new_empty(0)
        loss_noise = math.sqrt(
            sum(from_all_ranks((rounded_losses - losses).double().square().sum().item())) / tokens
        )
        return losses, reference, loss_noise, distances(rounded, reference)

    def _plain_pass(
        self,
        plain: PreTrainedModel,
        microbatches: Sequence[Sequence[Document]],
        valid_tokens: int,
        sharper: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of this rank's tokens, and the gradient of all ranks' losses, divided by the step's tokens."""
        losses, gradients = reference_pass(
            plain,
            microbatches,
            self.model.hf.get_output_embeddings().settings,
            sharper,
        )
        # one by one, as a sum over ranks is a copy; the fast path's backward has made its own
        for name in gradients:
            gradients[name] = self.accelerator.reduce(
                gradients[name].div_(valid_tokens), reduction="sum"
            )
        return losses, gradients

    def _quantized(self, parity: Parity, step: StepBatches, mean_over: float) -> list[str]:
        """Compares the quantized path with the unquantized one of `parity`, which gets the figures; returns what is wrong."""
        advance()
        # delayed scaling sees the gradients of other labels, here and in the passes that follow
        if self.model.context.state():
            self._pass(step)
        parity.sums = self._compare_sums(step)
        with ExitStack() as watching:
            parity.products, histories = watching.enter_context(
                watching_products(self.model, self.active)
            )
            parity.codes = watching.enter_context(
                watching_quantizers(self.model.context, self.active)
            )
            parity.quantized_loss = self._pass(step, watching) * mean_over
        parity.quantized_gradient_norm = gradient_norm(self.model.parameters()).item()
        lines = worst_of(
            parity.products, "low-precision products", "they are not what the format makes"
        )
        lines += worst_of(
            parity.codes,
            "codes of operands",
            "the format's quantizer is not the reference quantizer",
        )
        lines += worst_of(
            parity.sums, "gradients over two microbatches", "they are not the sum of each one's"
        )
        if histories:
            lines.append(
                f"delayed scaling: scale or history of {len(histories)} operands, {histories[0]} among them"
            )
        loss, norm = parity.quantized_loss, parity.quantized_gradient_norm
        if not (
            math.isfinite(loss)
            and parity.gradient_norm / NORM_RATIO <= norm <= parity.gradient_norm * NORM_RATIO
        ):
            losses, norms = (
                f"{loss:.6f} and {parity.loss:.6f}",
                f"{norm:.4g} and {parity.gradient_norm:.4g}",
            )
            lines.append(
                f"quantized path and unquantized one: loss {losses}, gradient norm {norms}"
            )
        return lines

    def _compare_sums(self, step: StepBatches) -> list[Compared]:
        """Compare the gradients of a quantized pass with the sum of those of a pass over each microbatch alone.

        The norm of every matrix's gradient is compared. Both sides draw the same random numbers and
        begin with the same histories and scales. On a CPU the gradients are then equal to the bit; on
        a GPU an attention kernel adds up in another order each time, and quantization amplifies that
        to the size of its own error, which leaves norms alone. Returns the worst first. Collective.
        """
        copies = self.model.context.copied_state()
        torch.manual_seed(0)
        self._pass(step)
        together = self._norms(self._gradients())
        self.model.context.go_back(copies)
        torch.manual_seed(0)
        summed: dict[str, Tensor] = {}
        for number in range(max(from_all_ranks(len(step.microbatches)))):
            self._pass(replace(step, microbatches=step.microbatches[number : number + 1]))
            for name, gradient in self._gradients().items():
                if gradient is not None:
                    summed[name] = gradient.float() + summed.get(name, 0.0)
        compared = []
        for name, norm in self._norms(summed).items():
            apart = abs(together[name] / norm - 1) if norm else together[name]
            compared.append(Compared.of(name, apart, apart / SUMS_APART))
        return sorted(compared, key=lambda tensor: tensor.excess, reverse=True)

    @staticmethod
    def _norms(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
        """Return the norm of each matrix's gradient. Collective where gradients are sharded."""
        norms = {
            name: torch.linalg.vector_norm(whole(gradient), dtype=torch.float64)
            for name, gradient in gradients.items()
            if gradient is not None and gradient.dim() > 1
        }
        return dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True))

    def _gradients(self) -> dict[str, Tensor | None]:
        return {
            name: gradient_of(parameter) for name, parameter in self.model.hf.named_parameters()
        }

    def _pass(
        self, step: StepBatches, around_first: AbstractContextManager[Any] | None = None
    ) -> float:
        """Forward and backward as in a training step; returns the loss. The next pass clears the gradients left here."""
        clear_gradients(self.optimizer, self.model)
        return forward_backward(self.model, step, self.accelerator, around_first).item()


def _as_chosen(
    microbatches: Sequence[Sequence[Document]], chosen: Sequence[Sequence[Tensor]]
) -> list[list[Document]]:
    """The documents with the experts that their tokens went to: `chosen` by layer and forward, of which a layer that is
    recomputed has two a microbatch."""
    return [
        [
            each._replace(
                chosen=[layer[n * len(layer) // len(microbatches)][each.part] for layer in chosen]
            )
            for each in documents
        ]
        for n, documents in enumerate(microbatches)
    ]


def worst_of(compared: Sequence[Compared], what: str, meaning: str) -> list[str]:
    """A line with the worst mismatches of `compared`, if there are any."""
    wrong = [f"{each.name} ({each.excess:.3g})" for each in compared if each.excess > 1]
    listed = f"{', '.join(wrong[:SHOWN])} times what is tolerated"
    return [f"{what}, {len(wrong)} of {len(compared)}: {meaning}; {listed}"] if wrong else []


def draw_microbatch(
    like: Microbatch, vocabulary: int, draw: np.random.Generator, longest: int | None = None
) -> tuple[Microbatch, list[Document]]:
    """Draw random tokens in the shape of a microbatch. Return the documents with labels too.

    Each pack holds four documents, and the last three of the microbatch have labels: at most their
    first LABELS tokens. With `longest` each pack is one document, and at most LABELS of the first
    `longest` tokens of the first document have labels, evenly spaced. Labels are the next tokens.
    """
    size, length = like.input_ids.shape[1], like.max_seqlen
    ends = np.unique(length * np.array((0, 7) if longest else SEVENTHS, np.int32) // 7)
    rows = draw.integers(vocabulary, size=(size // length, length), dtype=np.uint32)
    batch = build_microbatch([Pack(row, np.diff(ends)) for row in rows], mask_boundaries=True)
    spans = list(pairwise(batch.cu_seqlens.unique().tolist()))
    labels, documents = torch.full_like(batch.labels, IGNORE), []
    for begin, end in spans[:1] if longest else spans[-DOCUMENTS:]:
        part = slice(begin, min(end, begin + (longest or LABELS)))
        # An odd distance meets each place in the blocks of a kernel.
        distance = -(-(part.stop - begin) // LABELS) | 1
        labelled = torch.arange(part.stop - 2, begin - 1, -distance)
        labels[0, labelled] = batch.labels[0, labelled]
        documents.append(Document(batch.input_ids[0, part], labels[0, part], part))
    return replace(batch, labels=labels, valid_tokens=int((labels != IGNORE).sum())), documents


# ── How far apart gradients are, and may be ────────────────────────────────────────────────────────────────────────────────────
#
# A fixed tolerance would fit no model: how far rounding takes a gradient depends on how much cancels in it. So each tensor is
# held to how far BF16 took it by itself, and took others of its kind.

# Below this share of the whole gradient's norm a gradient is zero on paper (a key's bias where keys are not rotated), and what is
# there is rounding noise without a direction. Only one thing is asked: has the measured side made something of nothing?
NEGLIGIBLE = 1e-6
TOTAL = "all of them together"
# how many times its measure a tensor may be off: the median of healthy tensors is at 1
LEEWAY = 2.0
# a scalar's draw may be this many times smaller than usual, one of n values n times less often
FEW_VALUES = 9.0


class Distance(NamedTuple):
    """Norms of a tensor's gradient, on the reference's side, and of its difference to the measured.

    `values`: the number of values that err independently, at most.
    """

    reference: float
    apart: float
    values: int

    @property
    def error(self) -> float:
        """The norm of the difference, relative to the reference's."""
        return self.apart / self.reference if self.reference else math.inf if self.apart else 0.0


def distances(
    measured: Mapping[str, Tensor | None], reference: Mapping[str, Tensor]
) -> dict[str, Distance]:
    """How far apart each gradient is, by name, and all as one under TOTAL. Collective where gradients are sharded. A parameter
    that only one side has, such as a head that came untied, counts as zero on the other; one that neither has is left out."""
    norms: list[Tensor] = []
    sizes: dict[str, int] = {}
    for name in dict.fromkeys([*reference, *measured]):
        a, b = (
            None if each is None else whole(each).float()
            for each in (measured.get(name), reference.get(name))
        )
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        norms.append(
            torch.stack(
                [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (b, a - b)]
            )
        )
        # A gate's only row errs in the one direction that tokens share, like a scalar.
        sizes[name] = 1 if a.dim() > 1 and len(a) == 1 else a.numel()
    of_all = torch.stack(norms)
    # waits for the device once
    of_all = torch.cat([of_all, torch.linalg.vector_norm(of_all, dim=0, keepdim=True)]).tolist()
    sizes[TOTAL] = sum(sizes.values())
    return {
        name: Distance(*row, size) for (name, size), row in zip(sizes.items(), of_all, strict=True)
    }


def judge(
    apart: Mapping[str, Distance],
    noise: Mapping[str, Distance],
    resolution: float,
) -> list[Compared]:
    """Each tensor, and all as one, with what it may be off; the worst first.

    `noise`: of plain transformers in BF16 to itself in FP32. A tensor may be as far off as BF16 took itself, those of its kind in
    all layers, or the median one: for a tensor of few values, or one that is small because much cancels in it, its own draw may
    be small by chance. `resolution`: how coarsely what is judged rounds; 1.0 is BF16.
    """
    total = noise[TOTAL].reference
    negligible = NEGLIGIBLE * total
    known = {name: each for name, each in noise.items() if each.reference > negligible}
    typical = median([each.error for name, each in known.items() if name != TOTAL] or [0.0])
    # what tensors of one name in all layers share
    kinds = {name: re.sub(r"\.\d+\.", ".", name) for name in {*noise, *apart}}
    squares: dict[str, list[float]] = defaultdict(list)
    for name, each in known.items():
        squares[kinds[name]].append(each.error**2)
    judged = []
    for name, each in apart.items():
        own = noise[name].apart if name in noise else 0.0
        usual = max(typical, math.sqrt(mean(squares.get(kinds[name], [0.0]))))
        few = 1 + FEW_VALUES / each.values  # large for a scalar only
        allowed = few * LEEWAY * resolution * max(own, usual * each.reference)
        norm = max(each.reference, negligible) or 1.0
        judged.append(
            Compared.of(
                name, each.apart / norm, each.apart / (allowed + negligible) if each.apart else 0.0
            )
        )
    return sorted(judged, key=lambda tensor: tensor.excess, reverse=True)


@contextmanager
def distinct_values(model: PackedLanguageModel) -> Iterator[float]:
    """Add noise to each parameter whose values are all the same, such as a fresh norm or bias.

    Equal values look the same in every place, so that swapped norms would pass. Afterwards all
    values are as before, bit for bit. Yields a factor for the head's inputs that makes a fresh
    model's logits vary: flat logits hide most of the gradient of softmax and penalty. The factor is
    1.0 if no parameter was changed. Draws random numbers. Collective.
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
    norm = whole(torch.linalg.vector_norm(weight, dtype=torch.float32)).item()
    try:
        changed = any(from_all_ranks(bool(before)))
        yield max(1.0, LOGITS * math.sqrt(len(weight)) / norm) if changed else 1.0
    finally:
        for values, original in before:
            values.copy_(original)


@contextmanager
def training_without_dropout(model: PackedLanguageModel) -> Iterator[None]:
    """Keep `model` in training mode, which low precision and recomputation go by, without noise.

    Every dropout rate is zero, of torch's own dropout and of layers that call the function. So is
    the noise on what goes into a mixture's experts. Routers are in evaluation mode: some draw their
    choices in training, and the rate of that noise decides which experts they consider.
    """
    routers = model.routing.routers if model.routing else ()
    with ExitStack() as changes:
        for module in model.modules():
            noises = (
                "drop",
                "jitter_noise",
                *(["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []),
            )
            rates = [
                name
                for name, value in vars(module).items()
                if isinstance(value, float) and any(n in name for n in noises)
            ]
            off = {} if module in routers else dict.fromkeys(rates, 0.0)
            changes.enter_context(overridden(module, training=module not in routers, **off))
        yield
