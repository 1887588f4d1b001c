"""Do the kernels of this run compute what they should, on this device, at its shapes? Each tries a small case at the start.

A library's kernel may be wrong for one shape and say nothing: cuDNN's dq was a third off for heads of 256. So every kernel that
the run has chosen computes a case of the run's heads, widths, dtypes and precision beside its plain form, forward and backward;
products and layers with as many tokens beyond whole tiles as its microbatches have, as other kernels may take those. One that
disagrees is not used, where something else is there: the next attention, layers as transformers has them, the update in torch.
Else the run stops. What is plain torch itself is not tried, so on a CPU there is next to nothing to do.

`TABLE` has the kernels, each with what makes its case. `choose_kernels` is for a run; `pretrain.run.doctor` tries the same table.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from foundation.errors import InputError
from foundation.progress import advance
from foundation.reading import one_line
from packing.arrow import IGNORE
from pretrain.metrics.flops import Shape
from pretrain.model.attention import backends as attention
from pretrain.model.attention import flash
from pretrain.model.attention.heads import HeadNorms
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.fused import rotary
from pretrain.model.fused.layers import not_fused_because
from pretrain.model.loss.chunk import softmax_gradient_
from pretrain.model.loss.head import cut_cross_entropy
from pretrain.optimizer.adamw_update import Hyperparameters, ParameterTensors, convert_weight, split, update_parameter
from pretrain.plan.preflight import Job
from pretrain.plan.remedies import is_out_of_memory
from pretrain.precision import products
from pretrain.precision.quantizers.block import BLOCK
from pretrain.precision.registry import WEIGHT_DTYPES
from pretrain.precision.scope import LINEARS, features_of
from pretrain.precision.selection import make_backend
from pretrain.precision.settings import ActivePrecision
from pretrain.precision.transformer_engine import library
from pretrain.settings.recipe import Attention, Switch
from pretrain.verify.one_layer import Situation, document_lengths, loss_and_gradients, one_layer, without_stochastic_rounding
from pretrain.verify.operands import read

# Of a pack, at most, in the case of attention. The CPU's kernel goes through 64 queries at a time: 256 show as much of it as 512,
# and their plain form in FP64 takes a quarter of the time.
TOKENS, TOKENS_ON_CPU = 512, 256
SAME_BITS = 2.0**-60  # a single value that is another number is more
# Relative errors that rounding explains, of a tensor's norm. Wrong kernels are off by a tenth and more.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 2**-6, torch.float16: 2**-6}
ROUNDING_IN_PRODUCT = 0.05  # sums come in another order, and FP8's forward ones in fewer bits
# Of a whole layer: a product's operand that lies between two codes may get the other one, after a rounding that was done apart.
ROUNDING_IN_LAYER = {"float32": 1e-3, "bfloat16": 0.1, "FP8": 0.3, "E2M1": 0.7}
NEGLIGIBLE = 1e-2  # a gradient this small beside the largest is the noise of all others
REHEARSALS = 4  # of delayed scaling, whose first scales are one


def rounds_of(active: ActivePrecision) -> int:
    """Forwards and backwards until a result is looked at."""
    return REHEARSALS if active.precision.quantized and active.precision.keeps_history else 1


Compared = Iterator[tuple[str, Tensor, Tensor, float]]  # name, by the kernel, by its plain form, relative error allowed


@dataclass(frozen=True)
class Kernel:
    """A row of the table."""

    name: str
    plain: str  # what it is held against
    used: Callable[[Situation], bool]
    case: Callable[[Situation], Compared]
    remedy: str = ""  # where nothing else computes the same, and the run stops


@dataclass(frozen=True)
class Verdict:
    """What came of a case. `failure`: how the kernel failed to run; None: it ran."""

    kernel: str
    plain: str
    errors: Mapping[str, float]  # relative, by tensor
    allowed: Mapping[str, float]
    seconds: float
    failure: str | None = None
    instead: str | None = None  # what the run uses in its place

    @property
    def worst(self) -> str | None:
        """The tensor that is nearest to what is allowed, or farthest beyond."""
        return max(self.errors, key=lambda name: self.errors[name] / self.allowed[name], default=None)

    @property
    def agrees(self) -> bool:
        return self.failure is None and all(error <= self.allowed[name] for name, error in self.errors.items())

    @property
    def sentence(self) -> str:
        """ "tried before training, the kernel `attention packed_cudnn` disagrees with its formula: ..."."""
        return f"tried before training, the kernel `{self.kernel}` {self}"

    def __str__(self) -> str:
        """ "disagrees with its formula: dq is 0.29 off where rounding explains 0.016"."""
        if self.failure:
            return f"fails here: {self.failure}"
        if self.worst is None:
            return "was not tried"
        error, allowed = self.errors[self.worst], self.allowed[self.worst]
        does = "agrees with" if self.agrees else "disagrees with"
        return f"{does} {self.plain}: {self.worst} is {error:.2g} off where rounding explains {allowed:.2g}"

    def record(self) -> dict[str, Any]:
        """Returns what audit.json says of it; numbers that are not finite as text."""
        errors = {name: error if math.isfinite(error) else str(error) for name, error in self.errors.items()}
        return {
            "kernel": self.kernel,
            "plain": self.plain,
            "agrees": self.agrees,
            "said": str(self),
            "errors": errors,
            "allowed": dict(self.allowed),
            "instead": self.instead,
            "seconds": round(self.seconds, 3),
        }


def try_kernel(kernel: Kernel, situation: Situation) -> Verdict:
    """Compute the case of `kernel` both ways. Whatever it raises is a verdict too, as a kernel that fails here is not used. Only
    memory that is full says nothing of the kernel, and is raised on."""
    began = time.perf_counter()
    errors: dict[str, float] = {}
    allowed: dict[str, float] = {}
    failure = None
    devices = [situation.device] if situation.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            for name, ours, plain, limit in kernel.case(situation):
                errors[name], allowed[name] = relative_error(ours, plain), limit
    except failures() as error:
        if is_out_of_memory(error):
            raise
        failure = one_line(error, named=True)
    named = f"attention {situation.attention}" if kernel.name == "attention" else kernel.name
    return Verdict(named, kernel.plain, errors, allowed, time.perf_counter() - began, failure)


def failures() -> tuple[type[Exception], ...]:
    """What kernels and libraries fail with. Asked for when something was raised, as Triton's errors have no other base."""
    known = (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        LookupError,
        ArithmeticError,
        OSError,
        ImportError,
    )
    triton = importlib.util.find_spec("triton")
    return (*known, importlib.import_module("triton.errors").TritonError) if triton else known


def relative_error(ours: Tensor, plain: Tensor) -> float:
    """Norm of the difference over that of `plain`; infinite where ours is not finite, or something where nothing should be."""
    if ours.shape != plain.shape:
        return math.inf
    difference, norm = (ours.double() - plain.double()).norm().item(), plain.double().norm().item()
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm if math.isfinite(difference) else math.inf


# ── The cases ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention(run: Situation) -> Compared:
    heads, length = run.heads, min(run.length, TOKENS_ON_CPU if run.device.type == "cpu" else TOKENS)
    sizes = [size for pack in document_lengths(length) for size in pack]
    ends = torch.tensor([0, *itertools.accumulate(sizes), *[2 * length] * 5], dtype=torch.int32, device=run.device)
    mask = attention.document_mask(ends, length, 2 * length)
    states = [run.draw(1, count, 2 * length, heads.dim, seed=n) for n, count in enumerate((heads.query, heads.kv, heads.kv))]
    gradient = run.draw(1, 2 * length, heads.query, heads.dim, seed=3)
    scale = heads.dim**-0.5

    leaves = [each.clone().requires_grad_() for each in states]
    kernel = getattr(attention, run.attention)
    options = {"cu_seqlens": ends, "max_seqlen": length, "document_mask": mask, "scaling": scale}
    output, _ = kernel(None, *leaves, None, **options)
    repeats = torch.are_deterministic_algorithms_enabled()
    ours = [output, *torch.autograd.grad(output, leaves, gradient, retain_graph=repeats)]

    exact = [each.double().requires_grad_() for each in states]
    q, k, v = (each[0].unflatten(1, (2, length)).transpose(0, 1) for each in exact)  # [packs, heads, length, dim]
    k, v = (each.repeat_interleave(heads.query // heads.kv, dim=1) for each in (k, v))
    weights = (scale * q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1)
    plain = (weights @ v).transpose(1, 2).flatten(0, 1)[None]
    found = [plain, *torch.autograd.grad(plain, exact, gradient.double())]
    for name, mine, theirs in zip(("output", "dq", "dk", "dv"), ours, found, strict=True):
        yield name, mine, theirs, ROUNDING[run.dtype]
    if repeats:
        again = torch.autograd.grad(output, leaves, gradient)
        for name, first, second in zip(("dq", "dk", "dv"), ours[1:], again, strict=True):
            yield f"{name} a second time", second, first, SAME_BITS
    group = heads.query // heads.kv
    here, there = (flash.heads_apart(group, *of) for of in ((states[0].shape[2], len(ends) - 1), (run.length, 1)))
    if run.attention == "packed_fa4" and group > 1 and here and not there:
        yield from _for_long_documents(states, gradient, ends, length, scale, found)


def _for_long_documents(
    states: Sequence[Tensor], gradient: Tensor, ends: Tensor, length: int, scale: float, expected: Sequence[Tensor]
) -> Compared:
    """FlashAttention-4's backward in one call, which a run takes where documents are longer than those of a case."""
    q, k, v, d_output = (each[0].transpose(0, 1).contiguous() for each in (*states, gradient.transpose(1, 2)))
    output, log_sums = flash.flash_forward(q, k, v, ends, length, scale)

    def differentiate() -> list[Tensor]:
        placed = (output, log_sums, ends, length, scale)
        return [each.transpose(0, 1)[None] for each in flash.flash_backward_in_parts(d_output, q, k, v, *placed, apart=False)]

    ours = differentiate()
    for name, mine, theirs in zip(("dq", "dk", "dv"), ours, expected[1:], strict=True):
        yield f"{name} in one call", mine, theirs, ROUNDING[q.dtype]
    if torch.are_deterministic_algorithms_enabled():
        for name, first, second in zip(("dq", "dk", "dv"), ours, differentiate(), strict=True):
            yield f"{name} in one call a second time", second, first, SAME_BITS


def _rotates_by_kernel(run: Situation) -> bool:
    rows = torch.empty(0, dtype=run.dtype, device=run.device)
    return run.parts is not None and rotary.has_kernel(rows, run.heads)


def _rotation(run: Situation) -> Compared:
    heads, tokens, parts = run.heads, 200, run.parts
    qkv = run.draw(tokens, heads.width)
    frequencies = 10_000 ** (-torch.arange(heads.dim // 2, device=run.device) / (heads.dim // 2))
    angles = (torch.arange(tokens, device=run.device) % 130)[:, None] * frequencies.repeat(2)
    cos, sin = angles.cos().to(run.dtype), angles.sin().to(run.dtype)
    gradients = [run.draw(tokens, count, heads.dim, seed=count) for count in (heads.query, heads.kv, heads.kv)]
    norms = exact_norms = None
    if parts.head_norms:
        weights = [1 + run.draw(heads.dim, seed=n) / 4 for n in range(2)]
        norms, exact_norms = HeadNorms(*weights, 1e-6), HeadNorms(*(weight.double() for weight in weights), 1e-6)

    ours = [*rotary.rotate(qkv, cos, sin, heads, norms)]
    ours += rotary.rotate_backward(*gradients, qkv if norms else None, cos, sin, heads, norms)
    qkv, cos, sin, *gradients = (each.double() for each in (qkv, cos, sin, *gradients))
    plain = [*rotary.rotate_by_formula(qkv, cos, sin, heads, exact_norms)]
    plain += rotary.rotate_backward_by_formula(*gradients, qkv, cos, sin, heads, exact_norms)
    names = ("queries", "keys", "values", "gradient", "query norm's gradient", "key norm's gradient")
    for name, mine, theirs in zip(names, ours, plain, strict=True):
        if theirs is not None:
            yield name, mine, theirs, ROUNDING[run.dtype]


def _multiplies_by_library(run: Situation) -> bool:
    return run.active.backend == "transformer_engine"


def _products(run: Situation) -> Compared:
    """Each shape of linear but the head, on the same operands: its output, and the gradients of input and weight."""
    head = run.hf.get_output_embeddings()
    linears = [module for module in run.hf.modules() if isinstance(module, LINEARS) and module is not head]
    for in_features, out_features in dict.fromkeys(map(features_of, linears)):
        if {in_features % run.active.precision.multiple_of, out_features % run.active.precision.multiple_of} != {0}:
            continue  # the run leaves it in BF16
        tokens = run.tokens_of_a_case(TOKENS)
        x, weight = run.draw(tokens, in_features), run.draw(out_features, in_features, seed=1) / 50
        gradient = run.draw(tokens, out_features, seed=2) / 1000
        ours, plain = (
            _multiplied(replace(run.active, backend=backend), run.device, x, weight, gradient)
            for backend in ("transformer_engine", "emulation")
        )
        for name, mine, theirs in zip(("output", "input gradient", "weight gradient"), ours, plain, strict=True):
            yield f"{name} of {in_features} to {out_features}", mine, theirs, ROUNDING_IN_PRODUCT
        if run.fused:
            yield from _searched_products(run, x, weight, f"{in_features} to {out_features}")


def _searched_products(run: Situation, x: Tensor, weight: Tensor, sizes: str) -> Compared:
    """Compares outputs as fused layers compute them, by the algorithm found for each where there is one; also with a residual."""
    block = run.active.precision.scaling(run.active.settings, "input").block
    if block not in (None, BLOCK):
        return
    te = library()

    def in_tensor(values: Tensor) -> tuple[Any, Tensor]:
        scale_inv = values.abs().amax().float().reshape(1) / torch.finfo(torch.float8_e4m3fn).max
        codes = (values.float() / scale_inv).to(torch.float8_e4m3fn)
        parts = {"data": codes.view(torch.uint8), "data_transpose": None, "fp8_scale_inv": scale_inv}
        operand = te.Float8TensorStorage(**parts, fp8_dtype=te.DType.kFloat8E4M3, fake_dtype=torch.bfloat16)
        return operand, codes.double() * scale_inv

    def in_blocks(values: Tensor, dimensions: int) -> Any:
        options = {"rowwise": True, "columnwise": False, "block_scaling_dim": dimensions}
        return te.Float8BlockQuantizer(te.DType.kFloat8E4M3, **options)(values.bfloat16())

    def exact(operand: Any) -> Tensor:
        codes, scales = read(te, operand, "features")
        return codes.double() * scales

    residual = run.draw(len(x), len(weight), dtype=torch.bfloat16, seed=3)
    if block is None:
        (left, exact_left), (right, exact_right) = in_tensor(weight), in_tensor(x)
    else:
        left, right = in_blocks(weight, 2), in_blocks(x, 1)
        exact_left, exact_right = exact(left), exact(right)
    plain = exact_right @ exact_left.t()
    for name, added, expected in (("output", None, plain), ("output and residual", residual, plain + residual)):
        y = products.multiply(left, right, fast_accumulation=True, residual=added)
        if y is not None:
            yield f"searched {name} of {sizes}", y, expected, ROUNDING_IN_PRODUCT


def _multiplied(active: ActivePrecision, device: torch.device, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    backend = make_backend(without_stochastic_rounding(active), device)
    product = backend.product("product", *reversed(weight.shape), bias=False)
    x, weight = (each.detach().requires_grad_() for each in (x, weight))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(rounds_of(active)):
            with backend.forward():
                y = product(x, weight, None, first_microbatch=True)
            found = torch.autograd.grad(y, (x, weight), gradient)
    return y.detach(), *found


def _multiplies_by_kernel(run: Situation) -> bool:
    return run.computes_by_kernels and (run.parts is not None or _multiplies_by_library(run))


def _layer(run: Situation) -> Compared:
    """Loss and gradients of a model of one layer: products, norms, and all that is between them."""
    precision, exact = run.active.precision, []
    plain_active = replace(run.active, backend="emulation" if precision.quantized else "torch")
    without_chance = without_stochastic_rounding(run.active), without_stochastic_rounding(plain_active)
    in_fp32 = not precision.quantized
    for active, fused, backend in ((without_chance[0], run.fused, run.attention), (without_chance[1], False, "packed_sdpa")):
        widen = in_fp32 and active is without_chance[1]
        packed = one_layer(run, active, fused=fused, backend=backend, in_fp32=widen)
        exact.append(loss_and_gradients(packed, run, rounds_of(run.active)))
    ours, plain = exact
    in_bf16 = torch.bfloat16 in (run.dtype, getattr(torch, WEIGHT_DTYPES[run.weights]))
    key = precision.format_name if precision.quantized else "bfloat16" if in_bf16 else "float32"
    largest = max(gradient.norm() for name, gradient in plain.items() if name != "loss")
    for name, theirs in plain.items():
        if name == "loss" or theirs.norm() > NEGLIGIBLE * largest:
            yield name, ours[name], theirs, ROUNDING_IN_LAYER[key]


def _computes_loss_by_kernel(run: Situation) -> bool:
    return run.device.type == "cuda" and run.loss.kind in ("chunked", "cce") and not run.loss.penalty


def _loss(run: Situation) -> Compared:
    """The softmax over the run's own vocabulary, or the package's whole loss over a part of it."""
    tokens, vocabulary = 64, run.hf.config.get_text_config().vocab_size
    if run.loss.kind == "cce":
        vocabulary, width = min(vocabulary, 8192), Shape.of(run.hf).hidden
        leaves = [run.draw(tokens, width), run.draw(vocabulary, width, seed=1) / 50]
        labels = _labels(tokens, vocabulary, run.device)
        operands = [each.clone().requires_grad_() for each in leaves]
        loss = cut_cross_entropy(*operands, labels)
        exact = [each.double().requires_grad_() for each in leaves]
        plain = F.cross_entropy(F.linear(*exact), labels, ignore_index=IGNORE, reduction="sum")
        ours = [loss.detach(), *torch.autograd.grad(loss, operands)]
        theirs = [plain.detach(), *torch.autograd.grad(plain, exact)]
        for name, mine, other in zip(("loss", "hidden gradient", "weight gradient"), ours, theirs, strict=True):
            yield name, mine, other, 4 * ROUNDING[run.dtype]
        return
    logits, labels = 3 * run.draw(tokens, vocabulary), _labels(tokens, vocabulary, run.device)
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=IGNORE, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    yield "losses", softmax_gradient_(logits, labels), losses.detach(), ROUNDING[torch.float32]
    yield "gradient", logits, gradient, ROUNDING[run.dtype]


def _labels(tokens: int, vocabulary: int, device: torch.device) -> Tensor:
    labels = torch.arange(tokens, device=device) * 7919 % vocabulary
    return labels.masked_fill(torch.arange(tokens, device=device) % 5 == 0, IGNORE)


def _optimizer(run: Situation) -> Compared:
    """Compares two updates of parameters as the run stores them; one of the parameters has no whole blocks."""
    from pretrain.optimizer.adamw_kernel import update_by_kernel

    sizes = (4096, 1001)
    before = [run.draw(size, dtype=torch.float32) for size in sizes]

    def parameters() -> list[ParameterTensors]:
        made = []
        for size, master in zip(sizes, before, strict=True):
            weight, remainder = split(master) if run.weights == "bf16_exact" else (master, None)
            weight = weight.to(getattr(torch, WEIGHT_DTYPES[run.weights]), copy=True)
            moments = (torch.zeros(size, dtype=run.moments, device=run.device) for _ in range(2))
            made.append(ParameterTensors(weight, remainder, run.draw(size, dtype=run.gradients, seed=9), *moments))
        return made

    ours, plain = parameters(), parameters()
    clip = torch.tensor(0.7, device=run.device)
    for step in (1, 2):
        hyper = Hyperparameters(0.05, 0.1, 0.9, 0.95, 1e-8, step)
        for each in ours:
            update_by_kernel(each, hyper, clip)
        for each in plain:
            update_parameter(each, hyper, clip)
    limit = 1e-2 if torch.bfloat16 in (run.moments, getattr(torch, WEIGHT_DTYPES[run.weights])) else 1e-4
    for size, mine, theirs, start in zip(sizes, ours, plain, before, strict=True):
        moved = [convert_weight(each.weight, each.remainder, "fp32")[0] - start for each in (mine, theirs)]
        yield f"update of {size} values", *moved, limit
        for name in ("exp_avg", "exp_avg_sq"):
            yield f"{name} of {size} values", getattr(mine, name), getattr(theirs, name), limit


_OTHER_PRODUCTS = "set `precision: bf16`, or `fp8_config.backend: emulation` for the same numbers, slowly"
TABLE = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "attention",
            "its formula in FP64",
            lambda run: run.device.type == "cuda" or run.attention != "packed_sdpa",
            _attention,
        ),
        Kernel("rotation", "its formula in FP64", _rotates_by_kernel, _rotation),
        Kernel("products", "emulated products", _multiplies_by_library, _products, _OTHER_PRODUCTS),
        Kernel("layer", "the same layer in plain torch", _multiplies_by_kernel, _layer, _OTHER_PRODUCTS),
        Kernel("loss", "cross-entropy in FP64", _computes_loss_by_kernel, _loss, "set `loss.kind: reference`"),
        Kernel("optimizer", "the update in torch", lambda run: run.device.type == "cuda", _optimizer),
    )
}
_OF_FUSED_LAYERS = ("rotation", "layer")


# ── For a run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Chosen:
    """The kernels that a run takes after all have been tried."""

    situation: Situation
    attention: attention.Choice
    not_fused: str | None  # why no layer is fused, though layers could be
    optimizer: bool  # whether its kernel may be used
    verdicts: tuple[Verdict, ...]


def situation_of(job: Job, accelerator: Accelerator) -> Situation:
    """Returns the situation in which this run's kernels are tried, as it was planned."""
    recipe, device = job.recipe, accelerator.device
    gradients = recipe.gradients_kept_in
    fused = not_fused_because(recipe.model.fused, job.active, device.type, job.compute_dtype) is None
    return Situation(
        device=device,
        hf=job.shapes,
        length=recipe.data.length,
        active=job.active,
        attention=job.attention.name,
        fused=fused,
        loss=recipe.loss,
        weights=recipe.weights,
        gradients=getattr(torch, WEIGHT_DTYPES[gradients]),
        moments=getattr(torch, WEIGHT_DTYPES[recipe.moments_kept_in]),
        tokens=job.plan.expected_microbatch * recipe.data.length,  # `auto` is found later, with what is chosen here
    )


def choose_kernels(job: Job, accelerator: Accelerator) -> Chosen:
    """`choose` for `job`, for each of its precisions in turn; every rank comes to the same."""
    asked, chosen = job.recipe.model, None
    situations = [situation_of(job.in_precision(active), accelerator) for active in job.plan.actives]
    fused = all(each.fused for each in situations)
    for situation in situations:
        known = () if chosen is None else chosen.verdicts
        attention_choice = job.attention if chosen is None else chosen.attention
        situation = replace(situation, fused=fused, attention=attention_choice.name)
        found = choose(situation, attention_choice, asked.attention, asked.fused, accelerator)
        not_fused, optimizer = found.not_fused, found.optimizer
        if chosen is not None:
            not_fused, optimizer = chosen.not_fused or not_fused, chosen.optimizer and optimizer
        chosen = replace(found, not_fused=not_fused, optimizer=optimizer, verdicts=(*known, *found.verdicts))
        fused = fused and not_fused is None
    return chosen


def choose(
    run: Situation,
    choice: attention.Choice,
    asked: Attention,
    fused: Switch,
    accelerator: Accelerator | None = None,
    verdicts: list[Verdict] | None = None,
) -> Chosen:
    """Try every kernel that `run` would take, attention by `choice`, and find what to take where one is wrong.

    `asked`, `fused`: the settings `model.attention` and `model.fused`. `verdicts`: a list that takes those that come. Raises
    InputError where a wrong one was asked for by name, or nothing else computes the same.
    """
    verdicts = [] if verdicts is None else verdicts

    def tried(name: str) -> Verdict | None:
        """The verdict, if it speaks against the kernel."""
        if not TABLE[name].used(run):
            return None
        advance(0, name)
        verdict = try_kernel(TABLE[name], run)
        if accelerator and largest_over_ranks(accelerator, int(not verdict.agrees)) and verdict.agrees:
            verdict = replace(verdict, failure="on another rank")
        verdicts.append(verdict)
        advance()
        return None if verdict.agrees else verdict

    advance(0, total=sum(kernel.used(run) for kernel in TABLE.values()))
    refused: dict[str, str] = {}
    while against := tried("attention"):
        refused[run.attention.removeprefix("packed_")] = str(against)
        choice = attention.choose(asked, run.device.type, run.heads, run.dtype, run.length, refused)
        verdicts[-1] = replace(against, instead=choice.name)
        run = replace(run, attention=choice.name)
    if against := tried("products"):
        raise _nothing_else(against)
    not_fused = None
    if run.parts is not None:
        for against in filter(None, map(tried, _OF_FUSED_LAYERS)):
            if fused == "on":
                raise InputError(f"`model.fused: on`: {against.sentence}; set `model.fused: auto`")
            verdicts[-1] = replace(against, instead="layers that are not fused")
            not_fused, run = f"nothing: {against.sentence}", replace(run, fused=False)
            break
    if run.parts is None and (against := tried("layer")):
        raise _nothing_else(against)
    if against := tried("loss"):
        raise _nothing_else(against)
    if against := tried("optimizer"):
        verdicts[-1] = replace(against, instead="the update in torch")
    if verdicts and run.device.type == "cuda":
        torch.cuda.empty_cache()
    return Chosen(run, choice, not_fused, optimizer=against is None, verdicts=tuple(verdicts))


def _nothing_else(verdict: Verdict) -> InputError:
    return InputError(f"{verdict.sentence}; {TABLE[verdict.kernel].remedy}")


def rows(found: Mapping[str, Any]) -> dict[str, str]:
    """The audit's `kernels` for people: one row."""
    records = found["kernels"]
    good = dict.fromkeys(record["kernel"] for record in records if record["agrees"])
    wrong = [
        f"NOT USED: the kernel `{each['kernel']}`, which {each['said']}; {each['instead']} in its place"
        for each in records
        if not each["agrees"]
    ]
    agreed = f"{', '.join(good)}: as their plain forms" if good else "plain torch"
    return {"kernels": "; ".join([*wrong, agreed])}
