"""Deliberate faults in a small run, which the audit and parity have to catch.

Every fault reproduces a mistake that happened in some training code. A fault is entered around a
run that has been built and undone on exit. `applies` says whether a run can have the fault. Most
faults replace a text in the source of a module, and others patch the run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import getattr_static
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.metrics.health import TrainingHalted
from pretrain.model import attention, experts, gradients, packed
from pretrain.model.loss import head as loss_head
from pretrain.optimizer import adamw, muon
from pretrain.precision import delayed_state, emulation, gemm, product
from pretrain.precision.formats import definition
from pretrain.precision.quantizers import blocks, tensor
from pretrain.run import evaluate
from pretrain.settings.recipe import LossSettings
from tests.pretrain.verify.small_runs import SmallRun

Patch = pytest.MonkeyPatch
Make = Callable[[SmallRun, Patch], None]  # changes a run or patches the code behind it
Applies = Callable[[SmallRun], bool]
PENALIZED = LossSettings(chunk=256, penalty="non_max_sum", penalty_weight=0.1)


@dataclass(frozen=True)
class Fault:
    """A deliberate fault, with the options of the run that it is made in.

    `what` is the row of the fault in docs/developers/faults.md. `make` introduces the fault.
    `weights` lists the ways of storing weights to try. `options` are arguments of `build_run`.
    """

    what: str
    make: Make
    applies: Applies
    weights: Sequence[str]
    options: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Architecture of the model."""
        return self.options.get("kind", "qwen3")

    @contextmanager
    def entered(self, run: SmallRun) -> Iterator[None]:
        """Introduce the fault into `run` and undo it on exit."""
        with pytest.MonkeyPatch.context() as patch:
            self.make(run, patch)
            yield


def caught_by(
    run: SmallRun,
    fault: Fault | None = None,
    *,
    confirms: bool = True,
    anywhere: Callable[[bool], bool] = bool,
) -> tuple[str, ...]:
    """Return which of "audit", "parity" and "update" reject the run.

    If the audit and parity accept the run, it trains two steps, which the update check or the audit
    may reject. ("torch",) means that torch's activation checkpointing rejected the recomputation,
    and ("guard",) that a product refused to read a freed weight.

    confirms: True if the audit includes the gradients of two steps.
    anywhere: Returns True if its argument is true on any rank. All ranks run the same checks.
    """
    objecting = []
    entries = []

    def check(name: str, objects: Callable[[], object]) -> None:
        try:
            is_rejected = bool(objects())
        except InputError as error:
            is_rejected = True
            name = name if isinstance(error, TrainingHalted) else "audit"
        if anywhere(is_rejected):
            objecting.append(name)

    def audit() -> None:
        entries.extend(run.audit())
        if confirms:
            run.confirm(entries)

    with fault.entered(run) if fault else nullcontext():
        try:
            check("audit", audit)
        # A recomputation whose tensors differ from the first pass in number or shape.
        except (RuntimeError, IndexError) as error:
            if "reads a gathered weight that was freed" in str(error):
                return ("guard",)
            if not (fault and "recompute" in fault.options):
                raise
            return ("torch",)
        check("parity", lambda: run.parity().failures)
        if not objecting:
            check("update", lambda: run.train(entries))
    return tuple(objecting)


FAULTS: list[Fault] = []


def fault(
    what: str,
    applies: Applies = lambda run: True,
    *,
    weights: Sequence[str] = ("fp32",),
    registry: list[Fault] = FAULTS,
    **options: Any,
) -> Callable[[Make], Make]:
    """Return a decorator that appends a fault to `registry`."""

    def register(make: Make) -> Make:
        registry.append(Fault(what, make, applies, weights, options))
        return make

    return register


def faults_in(
    module: ModuleType, applies: Applies = lambda run: True, *, after: str = "", **options: Any
) -> Callable[[str], None]:
    """Return a function that appends faults in the source of a module, by their diffs.

    A diff has the name of a fault in one line. A line of the source, which occurs once, and its
    replacement follow, with "- " and "+ " in front. A replacement without a line is inserted behind
    the line `after`.
    """

    def register(diffs: str) -> None:
        for diff in re.split(r"\n(?![-+])", diffs.strip()):
            what, *lines = diff.split("\n")
            edits: list[tuple[str, list[str]]] = []
            if not lines[0].startswith("-"):
                # The lines of the diff follow the line `after`, which stays.
                edits.append((after, [after]))
            for line in lines:
                if line.startswith("-"):
                    edits.append((line[2:], []))
                else:
                    edits[-1][1].append(line[2:])
            fault(what, applies, **options)(replacing(module, edits))

    return register


Edits = Sequence[tuple[str, Sequence[str]]]


def replacing(module: ModuleType, edits: Edits) -> Make:
    """Return a fault that replaces lines in the source of a module, see `replace_lines`."""

    def make(run: SmallRun, patch: Patch) -> None:
        replace_lines(module, edits, patch)
        forget_quantizers(run)

    return make


def replace_lines(module: ModuleType, edits: Edits, patch: Patch) -> None:
    """Give the functions of a module the code of its source with replaced lines.

    edits: a line of the source, which occurs once, and the lines that replace it.
    """
    source = inspect.getsource(module).split("\n")
    for old, new in edits:
        (place,) = (number for number, line in enumerate(source) if line.strip() == old)
        indent = source[place].removesuffix(old)
        source[place] = "\n".join(indent + line for line in new or ["pass"])
    changed = compile("\n".join(source), str(module.__file__), "exec")
    codes = {code.co_qualname: code for code in codes_in(changed)}
    for function in functions_in(module, module):
        patch.setattr(function, "__code__", codes[function.__qualname__])


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the codes of all functions and classes in `code`."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def functions_in(owner: Any, module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods in the source of `module` that `owner` has."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from functions_in(value, module)
        for attribute in ("__func__", "fget", "func"):
            value = getattr(value, attribute, value)
        function = inspect.unwrap(value) if callable(value) else None
        if isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__:
            yield function


def patching(owner: Any, name: str) -> Callable[[Callable[..., Any]], Make]:
    """Return a decorator for the replacement of the function `owner.name`.

    The decorated function is called with the run, the replaced function and the arguments of a
    call. `owner` may be a function that returns the owner in a run.
    """

    def decorate(change: Callable[..., Any]) -> Make:
        def make(run: SmallRun, patch: Patch) -> None:
            target = owner(run) if isinstance(owner, FunctionType) else owner
            real = getattr(target, name)

            def changed(*args: Any, **options: Any) -> Any:
                return change(run, real, *args, **options)

            is_static = isinstance(getattr_static(target, name), staticmethod)
            patch.setattr(target, name, staticmethod(changed) if is_static else changed)
            forget_quantizers(run)

        return make

    return decorate


def forget_quantizers(run: SmallRun) -> None:
    """Forget the functions that quantize, which the emulation caches."""
    if emulated(run):
        run.packed.context.engine.operand_quantizer.cache_clear()


def quantized(run: SmallRun) -> bool:
    return run.active.precision.quantized


def emulated(run: SmallRun) -> bool:
    return run.active.engine == "emulation"


def in_blocks(run: SmallRun) -> bool:
    return emulated(run) and run.active.precision.block_scaled


def scaled_by_blocks_only(run: SmallRun) -> bool:
    return in_blocks(run) and not run.active.precision.tensor_scaled


def scaled_by_tensors(run: SmallRun) -> bool:
    return emulated(run) and run.active.precision.tensor_scaled


def delayed(run: SmallRun) -> bool:
    return emulated(run) and run.active.precision.keeps_history


def in_bf16_on_a_cpu(run: SmallRun) -> bool:
    """Return whether the run computes in BF16 on a CPU. A GPU's kernel splits weights itself."""
    return (
        run.accelerator.device.type == "cpu" and run.packed.context.compute_dtype == torch.bfloat16
    )


def transforms(run: SmallRun) -> bool:
    return emulated(run) and run.active.settings.disable_rht is False


def stochastic(run: SmallRun) -> bool:
    return emulated(run) and run.active.settings.disable_stochastic_rounding is False


# ── Inputs of the model ─────────────────────────────────────────────────────────────────

faults_in(packed, after="tokens = input_ids.shape[1]")("""
documents of a pack attend to each other
+ cu_seqlens = cu_seqlens.new_tensor(range(0, tokens + 1, max_seqlen))
every second boundary between documents is lost
+ cu_seqlens = torch.cat([cu_seqlens.unique()[:-1:2], cu_seqlens[-1:]])
the first boundary between documents is lost
+ ends = cu_seqlens.unique()
+ cu_seqlens = torch.cat([ends[:1], ends[1 + (len(ends) > 2) :]])
the last boundary between documents is lost
+ ends = cu_seqlens.unique()
+ cu_seqlens = torch.cat([ends[: max(len(ends) - 2, 1)], ends[-1:]])
in an evaluation, documents attend to each other
+ if not self.training:
+     ends = cu_seqlens.unique()
+     cu_seqlens = torch.cat([ends[:1], ends[1 + (len(ends) > 2) :]])
a document's last token is trained to predict the next document's first
+ is_last = (labels == -100) & (labels.roll(1, 1) != -100)
+ labels = torch.where(is_last, input_ids.roll(-1, 1), labels)
labels are shifted twice
+ labels = labels.roll(-1, 1)
the labels of one document are shifted twice
+ end = cu_seqlens.unique()[1]
+ labels = torch.cat([labels[:, :end].roll(-1, 1), labels[:, end:]], 1)
the tokens at a microbatch's end are dropped
+ labels = labels.clone()
+ labels[:, -tokens // 2 :] = -100
positions continue across the documents of a pack
+ # RoPE depends on differences of positions only, so that a constant offset would change nothing.
+ # Halving the positions changes the differences too.
+ position_ids = torch.arange(tokens, device=input_ids.device)[None] % max_seqlen // 2
positions restart at half a pack
+ position_ids = position_ids % (max_seqlen // 2)
""")
faults_in(packed, after="tokens = input_ids.shape[1]", kind="gpt2")("""
the positions of one document do not restart
+ ends = cu_seqlens.unique().tolist()
+ position_ids = position_ids.clone()
+ if len(ends) > 3:
+     position_ids[:, ends[1] : ends[2]] += ends[1]
""")

# ── Attention ───────────────────────────────────────────────────────────────────────────

faults_in(attention)("""
a token does not attend to itself
- return (document[..., :, None] == document[..., None, :]).tril_()
+ mask = (document[..., :, None] == document[..., None, :]).tril_()
+ # A document's first token keeps itself. It has nothing else to attend to.
+ first = mask.sum(-1, keepdim=True) == 1
+ return mask & (first | ~torch.eye(max_seqlen, dtype=torch.bool, device=mask.device))
no token attends further back than half a pack
- return (document[..., :, None] == document[..., None, :]).tril_()
+ mask = (document[..., :, None] == document[..., None, :]).tril_()
+ return mask.triu_(1 - max_seqlen // 2)
""")
faults_in(attention, kind="mistral")("""
the sliding window is ignored
- mask = mask.triu(1 - packed.window)
the sliding window is one key too wide
- mask = mask.triu(1 - packed.window)
+ mask = mask.triu(-packed.window)
""")

# ── Loss and gradients ──────────────────────────────────────────────────────────────────

faults_in(packed)("""
the gradient is halved
- accelerator.backward(loss_sum * scale)
+ accelerator.backward(loss_sum * scale / 2)
a microbatch's gradient is lost
- accelerator.backward(loss_sum * scale)
+ accelerator.backward(loss_sum * scale * model.context.first_microbatch)
the loss is averaged over microbatches, not over tokens
- total += run(model, accelerator, microbatch, 1 / tokens, sums)
+ share = 1 / max(microbatch.valid_tokens, 1) / len(batches.microbatches)
+ total += run(model, accelerator, microbatch, share, sums)
""")
faults_in(loss_head)("""
the head's gradient contains only the last chunk of tokens
- add_product_(d_weight, logits.t(), hidden, overwrite=first)
+ add_product_(d_weight, logits.t(), hidden, overwrite=True)
""")
faults_in(loss_head, loss=PENALIZED)("""
the penalty's gradient is lost
- return penalty.gradient_(logits, labels, change)
+ losses = penalty.gradient_(logits.clone(), labels, change)
+ Penalty().gradient_(logits, labels, change)
+ return losses
the held-out loss includes the penalty
- return trained if self.training else cross_entropy
+ return trained
the loss of earlier steps is added to the loss that is logged
- self._parts.zero_()
""")
faults_in(packed, loss=PENALIZED)("""
the loss that is logged includes the penalty twice
- return losses | balance
+ losses["loss"] = losses["loss"] + 0.1 * losses["penalty"]
+ return losses | balance
""")
faults_in(evaluate)("""
the last microbatch of an evaluation is dropped
- for batch in batches:
+ for batch in list(batches)[:-1]:
the held-out loss is divided by all tokens, not by the labels
- total[1] += batch.valid_tokens
+ total[1] += batch.labels.numel()
""")

# ── Low-precision heads, in all chunks of tokens but the first ──────────────────────────

# With three packs in a microbatch, the head computes three chunks.
HEAD = {"packs_a_microbatch": 3, "scope": "linear+head"}
faults_in(loss_head, quantized, **HEAD)("""
the labels are shifted in later chunks of a quantized head
- chunk_losses = chunk_loss(
+ shift = -1 if low and rows.start else 0
+ labels = torch.cat([labels[: rows.start], labels[rows].roll(shift), labels[rows.stop :]])
+ chunk_losses = chunk_loss(
the input's gradient is halved in later chunks of a quantized head
- ctx.gradients = (d_hidden, d_weight, d_bias)
+ first_chunk = next(chunks(len(hidden), head.chunk, low_precision=True))
+ d_hidden[first_chunk.stop :] /= 2 if low else 1
+ ctx.gradients = (d_hidden, d_weight, d_bias)
the gradient of a quantized head contains only the last chunk
- first=rows.start == 0,
+ first=rows.start == 0 or bool(low),
the loss is halved in later chunks of a quantized head
- losses[:, rows] = chunk_losses
+ losses[:, rows] = chunk_losses / (2 if low and rows.start else 1)
""")
faults_in(loss_head, emulated, **HEAD)("""
the logits are 10 % too large in later chunks of a quantized head
- losses = token_losses(logits, labels, head.penalty, head.change, with_gradient=True)
+ logits.mul_(1.1 if low and not first else 1)
+ losses = token_losses(logits, labels, head.penalty, head.change, with_gradient=True)
""")

# ── Low-precision products ──────────────────────────────────────────────────────────────

faults_in(packed, quantized)("""
no forward enters low precision
- with self.context.forward(training=self.training):
+ with self.context.forward(training=False):
""")
faults_in(packed, emulated)("""
nothing is quantized from the second microbatch of a step on
- with self.context.forward(training=self.training):
+ with self.context.forward(training=self.training and self.context.first_microbatch):
""")
faults_in(emulation, emulated, after="a, b = self.factors(kind, left, right)")("""
the rows of the transposed weight are shifted
+ if kind == "dgrad" and ".1." in self.name:
+     b = b._replace(values=b.values.roll(1, 0))
the tokens of the transposed input are shifted
+ if kind == "wgrad" and ".1." in self.name:
+     b = b._replace(values=b.values.roll(1, 1))
the input's gradient is 25 % too large
+ if kind == "dgrad" and ".1." in self.name:
+     a = a._replace(values=1.25 * a.values)
a weight's gradient uses every second token, doubled
+ if kind == "wgrad" and ".1." in self.name:
+     tokens = torch.arange(a.values.shape[1], device=a.values.device)
+     a = a._replace(values=a.values * 2 * (tokens % 2 == 0))
output gradients are not quantized
- return Operand(*operand)
+ if role == "grad_output":
+     operand = [x.float() if along == "features" else x.t().float(), None]
+ return Operand(*operand)
""")
faults_in(gemm, emulated)("""
a quantized weight keeps only the last microbatch's gradient
- total.copy_(gradient) if overwrite else total.add_(gradient)
+ total.copy_(gradient)
""")
# Code that infers the layout from the shape would transpose the sums of square weights.
faults_in(product, emulated)("""
a square weight's gradient is accumulated transposed
- ctx.main_gradient = getattr(weight, "main_grad", None)
+ main = getattr(weight, "main_grad", None)
+ is_square = main is not None and main.shape[0] == main.shape[1]
+ ctx.main_gradient = main.t() if is_square else main
""")
faults_in(emulation, emulated, kind="gpt2")("""
a quantized linear drops its bias
- y = multiply(a, b, dtype, bias)
+ y = multiply(a, b, dtype)
a quantized linear adds its bias twice
- y = multiply(a, b, dtype, bias)
+ y = multiply(a, b, dtype, None if bias is None else 2 * bias)
""")
faults_in(product, emulated, kind="gpt2")("""
the bias of a quantized linear has no gradient
- return dx, dw, db, None
+ is_changed = db is not None and ctx.linear_pass.gemm.quantizes
+ return dx, dw, 0 * db if is_changed else db, None
the gradient of a quantized linear's bias is doubled
- return dx, dw, db, None
+ is_changed = db is not None and ctx.linear_pass.gemm.quantizes
+ return dx, dw, 2 * db if is_changed else db, None
""")

faults_in(product, quantized, recompute=True)("""
a layer is recomputed outside low precision
- overridden, self, low_precision=self.low_precision, first_microbatch=False
+ overridden, self, low_precision=False, first_microbatch=False
""")
faults_in(experts, after="gate_up, down = self.stacks.values()", kind="qwen3_moe")("""
one token in 64 gets zero weights for its experts
+ weights = weights.clone()
+ weights[::64] = 0
one token in 64 is routed to the next experts
+ chosen = chosen.clone()
+ chosen[::64] = (chosen[::64] + 1) % len(self.down_proj)
one token in 64 is computed by the next experts
- groups = arrange(chosen, len(self.down_proj), max(multiples, default=ROW_MULTIPLE))
+ others = chosen.clone()
+ others[::64] = (others[::64] + 1) % len(self.down_proj)
+ groups = arrange(others, len(self.down_proj), max(multiples, default=ROW_MULTIPLE))
""")

# ── Rounding and formats ────────────────────────────────────────────────────────────────

faults_in(tensor, emulated)("""
values are truncated, not rounded
- return torch.round(x * per_quantum) * quantum
+ return torch.trunc(x * per_quantum) * quantum
- rounded = lower + (uniform < magnitude - lower).float()
+ rounded = lower
values are rounded down by a quarter of a quantum
- return torch.round(x * per_quantum) * quantum
+ return torch.round(x * per_quantum - 0.25) * quantum
- return torch.copysign(rounded * quantum, x)
+ return torch.round(x * per_quantum - 0.25) * quantum
quantization leaves values unrounded
- return torch.round(x * per_quantum) * quantum
+ return x
- return torch.copysign(rounded * quantum, x)
+ return x
codes have one mantissa bit too few
- quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
+ quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0 ** (1 - grid.mantissa_bits)
codes have one mantissa bit too many
- quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
+ quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0 ** (-1 - grid.mantissa_bits)
E5M2 replaces E4M3, and E4M3 replaces E5M2 and E2M1
- quantum = power.clamp(min=2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits
+ # The scale remains that of the replaced format.
+ bits, exponent = {3: (2, -14), 2: (3, -6), 1: (3, -6)}[grid.mantissa_bits]
+ quantum = power.clamp(min=2.0**exponent) * 2.0**-bits
""")
faults_in(tensor, stochastic)("""
stochastic rounding always rounds up
- rounded = lower + (uniform < magnitude - lower).float()
+ rounded = magnitude.ceil()
stochastic rounding rounds up too often, by 3 % of a quantum
- rounded = lower + (uniform < magnitude - lower).float()
+ rounded = lower + (uniform - 0.03 < magnitude - lower).float()
""")
faults_in(tensor, in_blocks)("""
ties are rounded away from zero
- return torch.round(x * per_quantum) * quantum
+ return torch.copysign((x.abs() * per_quantum + 0.5).floor() * quantum, x)
""")
faults_in(tensor, scaled_by_tensors)("""
the tensor scale is doubled, so that values saturate
- return scale.masked_fill(~(amax.isfinite() & (amax > 0)), 1)
+ return 2 * scale.masked_fill(~(amax.isfinite() & (amax > 0)), 1)
""")
faults_in(tensor, scaled_by_blocks_only)("""
a block's scale is computed from half of its values
- return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float()
+ x = x.narrow(dim[-1], 0, x.shape[dim[-1]] // 2) if keepdim else x
+ return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float()
a block's scale is half as large as needed
- return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float()
+ return x.abs().nan_to_num(0.0, torch.inf).amax(dim, keepdim).float() / (1 + keepdim)
""")
faults_in(blocks, in_blocks)("""
a block is decoded with its neighbour's scale
- codes = (
+ axis = 0 if self.two_dimensional or self.transposed else -2
+ scale = scale.roll(1, 2 if self.two_dimensional and scale.shape[2] > 1 else axis)
+ codes = (
""")
faults_in(definition, in_blocks)("""
one scale per tensor instead of one per block
- return quantized
+ return lambda x, scale, amax: tensor.quantize_by_amax(x, amax, grid)
""")
faults_in(definition, transforms)("""
the Hadamard transform is applied to one operand only
- return hadamard if self.settings.disable_rht is False and role != "weight" else None
+ return hadamard if role == "input" else None
the Hadamard transform is skipped
- return hadamard if self.settings.disable_rht is False and role != "weight" else None
+ return None
""")
faults_in(definition, stochastic)("""
gradients are rounded to nearest, not stochastically
- return self.settings.disable_stochastic_rounding is False and role == "grad_output"
+ return False
""")

# ── Delayed scaling ─────────────────────────────────────────────────────────────────────

faults_in(delayed_state, delayed)("""
a scale is never updated
- if dist.is_initialized():
+ return
+ if dist.is_initialized():
the gradients' scales are never updated
- self._update("backward")
the amax histories of weights contain half of the amax
- newest = self._state_of(direction).amax_history[0, module, slot]
+ amax = amax / 2 if role == "weight" else amax
+ newest = self._state_of(direction).amax_history[0, module, slot]
the amax histories of gradients contain half of the amax
- newest = self._state_of(direction).amax_history[0, module, slot]
+ amax = amax / 2 if role == "grad_output" else amax
+ newest = self._state_of(direction).amax_history[0, module, slot]
a linear uses its neighbour's scale
- return self._state_of(direction).scale[module, slot]
+ return self._state_of(direction).scale[(module + 1) % len(self._modules), slot]
- return self.forward_scales[module, slot]
+ return self.forward_scales[(module + 1) % len(self._modules), slot]
scales are computed from the newest amax, not from the largest
- updated = update_scale(*state, grid.maximum, settings.margin, settings.amax_compute_algo)
+ updated = update_scale(*state, grid.maximum, settings.margin, "most_recent")
an amax history drops its newest amax
- for live, new in zip(state, updated, strict=True):
+ updated[0][-1] = updated[0][-2]
+ for live, new in zip(state, updated, strict=True):
""")
faults_in(emulation, delayed)("""
amax histories record only a quarter of the tokens
- amax = absolute_maximum(x) if records_amax else None
+ amax = absolute_maximum(x[: len(x) // 4]) if records_amax else None
""")

# ── The update ──────────────────────────────────────────────────────────────────────────

WEIGHTS = ("fp32", "bf16", "bf16_exact")
faults_in(adamw, weights=WEIGHTS)("""
the norm is not clipped
- return None if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)
+ return None
each update is applied twice
- self.prepare(clip_coefficient=clip_coefficient)()
+ self.prepare(clip_coefficient=clip_coefficient)()
+ self.prepare()()
the second moment is not corrected for bias
- return math.sqrt(1 - self.beta2**self.step)
+ return 1.0
""")
faults_in(adamw, in_bf16_on_a_cpu, weights=("bf16_exact",))("""
an exact weight's low bits are dropped
- rounded, remainder_bits = split(master)
+ rounded, remainder_bits = split(master)
+ remainder_bits.zero_()
""")
faults_in(adamw, weights=("fp32", "bf16_exact"))("""
moments are BF16, not FP32
- default = torch.float32 if self.exact else parameter.dtype
+ default = torch.bfloat16
""")
faults_in(gradients, lambda run: not run.accelerator.is_fsdp2, weights=WEIGHTS)("""
a tenth of each gradient remains after a step
- memory.fill_(-0.0)
+ memory.mul_(0.1)
""")
faults_in(muon, optimizer="muon")("""
Muon's update is 8 % too large
- scale = SCALES[group["adjust_lr_fn"]](outputs, inputs)
+ scale = 1.08 * SCALES[group["adjust_lr_fn"]](outputs, inputs)
Muon's weight decay is omitted
- return Hyperparameters(group["lr"], group["weight_decay"], scale=scale)
+ return Hyperparameters(group["lr"], 0.0, scale=scale)
Muon's weight decay is multiplied by the scale of the update
- return Hyperparameters(group["lr"], group["weight_decay"], scale=scale)
+ return Hyperparameters(group["lr"], scale * group["weight_decay"], scale=scale)
""")
