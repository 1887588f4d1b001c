"""How long each kernel of the fused layers takes on this GPU, beside what it replaces and beside moving its bytes once.

    python -m benchmarks.fused_kernels --out benchmarks/results/h200_fused_kernels.json
    python -m benchmarks.fused_kernels --out /tmp/kernels.json --only rotary

Kernels of a decoder layer are bound by memory. The yardstick is therefore the bytes that a kernel must read and write, at the
bandwidth that copying 8 GiB on the same device has just shown. What it replaces is the same formulas under torch.compile, or
Transformer Engine's kernels.

A family of cases is a function that yields them, registered in FAMILIES. Its tensors live as long as its cases are measured.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_time import median_ms
from benchmarks.limits import COPIED
from benchmarks.machine import measured_on, write
from packing.arrow import IGNORE
from pretrain.metrics.profile import copy_bandwidth
from pretrain.model.attention.heads import HeadNorms, Heads
from pretrain.model.fused import rotary_kernel
from pretrain.model.fused.rotary import rotate, rotate_backward, rotate_backward_by_formula, rotate_by_formula
from pretrain.model.fused.rotary_kernel import BackwardTiling, ForwardTiling
from pretrain.model.loss import softmax_kernel
from pretrain.model.loss.softmax_kernel import quantized_softmax_gradient
from pretrain.model.table_kernel import add_rows_
from pretrain.precision.fp8_tile import TensorScaled
from pretrain.run.trial import QWEN3_1_7B

BF16 = torch.bfloat16
TOKENS = 32_768  # of a microbatch: 8 packs of 4,096


@dataclass(frozen=True)
class Case:
    """A kernel at one shape. Both calls take nothing and leave their inputs as they are, so that they can be repeated."""

    name: str
    bytes: int  # that must be read and written
    ours: Callable[[], object]
    replaced: Callable[[], object] | None = None


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    bandwidth = copy_bandwidth(torch.device("cuda"), COPIED)
    print(f"device copy: {bandwidth / 1e12:.2f} TB/s")
    results = []
    for family in arguments.only or FAMILIES:
        for case in FAMILIES[family]():
            results.append({"family": family, **measure(case, bandwidth, arguments.times)})
            print(line(results[-1]), flush=True)
        torch.cuda.empty_cache()
    report = {
        **measured_on(),
        "copy_bytes_per_second": bandwidth,
        "results": results,
    }
    write(arguments.out, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="timed runs of each kernel; the median counts")
    parser.add_argument("--only", action="append", choices=FAMILIES, help="families to measure, all by default")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def measure(case: Case, bandwidth: float, times: int) -> dict[str, Any]:
    """Microseconds by the device's clock; `share_of_copy` is 1 where the bytes move as fast as in a plain copy."""
    seconds = median_ms(case.ours, times) / 1e3
    result = {
        "name": case.name,
        "microseconds": seconds * 1e6,
        "bytes": case.bytes,
        "terabytes_per_second": case.bytes / seconds / 1e12,
        "share_of_copy": case.bytes / seconds / bandwidth,
    }
    if case.replaced is not None:
        result["replaced_microseconds"] = median_ms(case.replaced, times) * 1e3
    return result


def line(result: dict[str, Any]) -> str:
    text = "{name}: {microseconds:.1f} us, {terabytes_per_second:.2f} TB/s, {share_of_copy:.0%} of a copy".format(**result)
    replaced = result.get("replaced_microseconds")
    return text if replaced is None else f"{text}; what it replaces {replaced:.1f} us, {replaced / result['microseconds']:.2f} x"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for one shape, as a training step has it."""
    return torch.compile(function, fullgraph=True, dynamic=False)


# ── The rotation of queries and keys ──────────────────────────────────────────────────────────────────────────────────────────

HEADS_OF_QWEN3 = Heads(QWEN3_1_7B["num_attention_heads"], QWEN3_1_7B["num_key_value_heads"], QWEN3_1_7B["head_dim"])
ROTATIONS = {
    "Qwen3-1.7B": (HEADS_OF_QWEN3, True),
    "Llama-3.1-8B": (Heads(query=32, kv=8, dim=128), False),
    "Qwen2.5-0.5B": (Heads(query=14, kv=2, dim=64), False),
}
# What the chosen ones were chosen from.
FORWARD_TILINGS = [ForwardTiling(values, warps) for values, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8))]
BACKWARD_TILINGS = [
    BackwardTiling(tokens, warps, registers, programs, stages)
    for tokens, warps, registers, programs in (
        (16, 4, 80, 792),
        (32, 8, 80, 396),
        (32, 8, 80, 792),
        (32, 8, 112, 264),
        (32, 4, 168, 396),
        (64, 8, 128, 264),
        (64, 8, 168, 132),
        (64, 16, 80, 132),
    )
    for stages in (1, 2, 3)
]
BLOCKS_TILINGS = [
    BackwardTiling(128, warps, registers, programs, stages)
    for warps, registers in ((4, 255), (8, 128), (8, 255))
    for programs in (132, 264)
    for stages in (1, 2)
]


class Rotation:
    """The tensors of one microbatch's rotation, and the bytes that it must move. The gradients of keys and values are in parts,
    as FlashAttention-4's backward leaves them."""

    def __init__(self, heads: Heads, normed: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=BF16)

        self.qkv = normal(TOKENS, heads.width)
        parts = [normal(TOKENS, heads.kv, heads.query // heads.kv, heads.dim) for _ in range(2)]
        self.gradients = [normal(TOKENS, heads.query, heads.dim), *parts]
        self.angles = [normal(TOKENS, heads.dim // 2).repeat(1, 2) for _ in range(2)]
        norms = HeadNorms(normal(heads.dim), normal(heads.dim), 1e-6) if normed else None
        self.layout = (heads, norms)
        self.kept = self.qkv if normed else None  # for backward
        angles = sum(angle.nbytes for angle in self.angles) // 2  # of two equal halves one is read
        self.forward_bytes = 2 * self.qkv.nbytes + angles
        self.backward_bytes = self.qkv.nbytes + angles + sum(gradient.nbytes for gradient in self.gradients)
        self.backward_bytes += self.qkv.nbytes * heads.rotated // heads.count if normed else 0

    def forward(self, function: Callable[..., Any], **options: Any) -> Callable[[], object]:
        return lambda: function(self.qkv, *self.angles, *self.layout, **options)

    def backward(self, function: Callable[..., Any], *into: Any, **options: Any) -> Callable[[], object]:
        return lambda: function(*self.gradients, self.kept, *self.angles, *self.layout, *into, **options)


def rotary() -> Iterator[Case]:
    for model, (heads, normed) in ROTATIONS.items():
        r = Rotation(heads, normed)
        name = f"rotation{' with norms' if normed else ''}, {model}"
        yield Case(f"{name}, forward", r.forward_bytes, r.forward(rotate), r.forward(compiled(rotate_by_formula)))
        replaced = r.backward(compiled(rotate_backward_by_formula))
        yield Case(f"{name}, backward", r.backward_bytes, r.backward(rotate_backward), replaced)


def rotary_tilings() -> Iterator[Case]:
    r = Rotation(*ROTATIONS["Qwen3-1.7B"])
    for tiling in FORWARD_TILINGS:
        yield Case(f"forward, {tiling}", r.forward_bytes, r.forward(rotary_kernel.rotate, tiling=tiling))
    for tiling in BACKWARD_TILINGS:
        yield Case(f"backward, {tiling}", r.backward_bytes, r.backward(rotary_kernel.rotate_backward, tiling=tiling))


def rotary_codes() -> Iterator[Case]:
    """Backward into codes, beside writing BF16 that the library's quantizer reads. The bytes are those of a single pass."""
    from pretrain.model.fused.te_storage import allocate

    def in_two(r: Rotation, quantizer: Any) -> Callable[[], object]:
        return lambda: quantizer(r.backward(rotate_backward)()[0])

    def at_once(r: Rotation, quantizer: Any) -> object:
        _, written = allocate(quantizer, r.qkv.shape, r.qkv.device)
        return r.backward(rotary_kernel.rotate_backward_in_codes, written)()

    for model, (heads, normed) in ROTATIONS.items():
        r = Rotation(heads, normed)
        for recipe in ACTIVATION_RECIPES:
            if recipe == "block" and heads.dim != 128:
                continue
            q = quantizer_of(recipe, gradient=True)
            name = f"rotation{' with norms' if normed else ''}, {model}, backward into {recipe}"
            yield Case(name, r.backward_bytes, partial(at_once, r, q), in_two(r, q))


def rotary_codes_tilings() -> Iterator[Case]:
    from pretrain.model.fused.te_storage import allocate

    for model in ("Qwen3-1.7B", "Llama-3.1-8B"):
        r = Rotation(*ROTATIONS[model])
        for recipe, tilings in (("delayed", BACKWARD_TILINGS), ("block", BLOCKS_TILINGS)):
            _, written = allocate(quantizer_of(recipe, gradient=True), r.qkv.shape, r.qkv.device)
            for tiling in tilings if r.kept is not None else [each for each in tilings if each.stages == 1]:
                ours = r.backward(rotary_kernel.rotate_backward_in_codes, written, tiling=tiling)
                yield Case(f"{model}, into {recipe}, {tiling}", r.backward_bytes, ours)


# ── The softmax of the chunked loss ───────────────────────────────────────────────────────────────────────────────────────────

CHUNK, VOCABULARY = 4096, QWEN3_1_7B["vocab_size"]  # tokens whose logits exist at once, words of Qwen3
SOFTMAX_TILINGS = [
    softmax_kernel.SoftmaxTiling(block, warps) for block, warps in ((4096, 8), (8192, 8), (8192, 16), (16_384, 16))
]
# So few rows at once that the second pass finds them in the cache, or half of them.
SOFTMAX_TILINGS += [
    softmax_kernel.SoftmaxTiling(block, warps, programs)
    for block, warps in ((8192, 16), (16_384, 16), (16_384, 32), (32_768, 32))
    for programs in (132, 264)
]
QUANTIZED_TILES = [((64, 64), 4), ((64, 128), 8), ((128, 64), 8), ((128, 128), 8), ((32, 128), 4), ((64, 64), 8)]


class Logits:
    """A chunk's, with labels. A kernel may overwrite them: its time does not depend on what they are."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.logits = torch.randn(CHUNK, VOCABULARY, generator=generator, device="cuda", dtype=BF16)
        self.labels = torch.randint(VOCABULARY, (CHUNK,), generator=generator, device="cuda")
        self.amax = torch.zeros(1, device="cuda")

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], object]:
        return lambda: function(self.logits, self.labels, *arguments, **options)

    def quantized(self, **options: Any) -> Callable[[], object]:
        return self.call(quantized_softmax_gradient, IGNORE, torch.float8_e5m2, self.amax, None, **options)


def softmax_gradient_by_formula(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits.float()
    maximum = scores.amax(dim=-1, keepdim=True)
    log_total = maximum + (scores - maximum).exp().sum(dim=-1, keepdim=True).log()
    losses = log_total - scores.gather(1, labels[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    logits.copy_((scores - log_total).exp() - is_target.float())
    return losses


def softmax() -> Iterator[Case]:
    chunk = Logits()
    size = chunk.logits.nbytes
    ours = chunk.call(softmax_kernel.softmax_gradient_, IGNORE)
    yield Case("softmax gradient, BF16 in place", 3 * size, ours, chunk.call(compiled(softmax_gradient_by_formula)))
    yield Case("losses alone", size, chunk.call(softmax_kernel.token_losses, IGNORE))
    yield Case("softmax gradient, E5M2 in both layouts", 3 * size, chunk.quantized())


def softmax_tilings() -> Iterator[Case]:
    chunk = Logits()
    size = 3 * chunk.logits.nbytes
    for tiling in SOFTMAX_TILINGS:
        yield Case(f"BF16 in place, {tiling}", size, chunk.call(softmax_kernel.softmax_gradient_, IGNORE, tiling))
    for tile, warps in QUANTIZED_TILES:
        yield Case(f"E5M2 in both layouts, {tile}, {warps} warps", size, chunk.quantized(tile=tile, warps=warps))


# ── SwiGLU ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH = QWEN3_1_7B["intermediate_size"]  # of the activated values, in Qwen3-1.7B
# Rows, columns and warps of a tile, of 2,048 to 8,192 values; warps for the tiles of 128 x 128 that blocks need; and of SwiGLU's
# gradient in blocks the rows of a block that a program takes, or the columns, and warps.
ACTIVATION_TILES = [
    (64, 64, 4),
    (64, 64, 8),
    (128, 64, 8),
    (64, 128, 8),
    (32, 64, 4),
    (32, 128, 4),
    (32, 128, 8),
    (16, 128, 4),
    (32, 256, 8),
    (64, 128, 4),
    (16, 256, 4),
]
BLOCK_WARPS = (4, 8, 16)
BLOCK_TILES = [(32, 32, 4), (32, 32, 8), (16, 32, 4), (64, 32, 4), (32, 16, 4), (32, 64, 4)]
ACTIVATION_RECIPES = ("delayed", "current", "block")


def quantizer_of(recipe: str, *, gradient: bool = False) -> Any:
    """TE's, for an input or for the gradient of an output."""
    import transformer_engine.pytorch as te

    dtype = te.DType.kFloat8E5M2 if gradient and recipe != "block" else te.DType.kFloat8E4M3
    if recipe == "delayed":
        made = te.Float8Quantizer(torch.ones(1, device="cuda"), torch.zeros(1, device="cuda"), dtype)
    elif recipe == "current":
        made = te.Float8CurrentScalingQuantizer(dtype, torch.device("cuda"))
    else:
        made = te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=1)
    made.internal = True
    return made


class SwiGLU:
    """The activation of one microbatch."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.hidden = torch.randn(TOKENS, 2 * WIDTH, generator=generator, device="cuda", dtype=BF16)
        self.d_activated = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda", dtype=BF16)
        self.values = self.d_activated.numel()


def activation() -> Iterator[Case]:
    """Our kernels stand beside what LayerNormMLP calls: SwiGLU with a quantizer for both directions; the gradient in BF16, which
    is quantized afterwards.

    The bytes are those of a single pass. Current scaling reads its input twice.
    """
    import transformer_engine.pytorch  # noqa: F401  its kernels cannot be imported before
    import transformer_engine_torch as tex

    from pretrain.model.fused.activation import swiglu, swiglu_backward

    s = SwiGLU()
    hidden, d_activated = s.hidden, s.d_activated
    for recipe in ACTIVATION_RECIPES:
        q, g = quantizer_of(recipe), quantizer_of(recipe, gradient=True)
        kept = swiglu(hidden, q)[1]
        yield Case(f"SwiGLU {recipe}, forward", 5 * s.values, partial(swiglu, hidden, q), partial(tex.swiglu, hidden, q))
        replaced = partial(lambda g: g(tex.dswiglu(d_activated, hidden, None)), g)
        yield Case(
            f"SwiGLU {recipe}, backward", 11 * s.values, partial(swiglu_backward, d_activated, hidden, g, kept, q), replaced
        )
    again = partial(swiglu_backward, d_activated, hidden, None, None, None)
    yield Case("SwiGLU bf16, backward", 12 * s.values, again, partial(tex.dswiglu, d_activated, hidden, None))


def scaled(dtype: torch.dtype, columns: int) -> TensorScaled:
    """Room for a microbatch of FP8 codes, by rows and by columns."""
    codes = [torch.empty(shape, dtype=torch.uint8, device="cuda") for shape in ((TOKENS, columns), (columns, TOKENS))]
    return TensorScaled(dtype, *codes, *(torch.ones(1, device="cuda") for _ in range(3)))


def activation_tilings() -> Iterator[Case]:
    """The kernels take these tiles in place of their own."""
    from pretrain.model.fused import activation_kernel as kernel
    from pretrain.model.fused.activation_kernel import Tile
    from pretrain.precision.fp8_tile import BlockScaled

    s = SwiGLU()
    hidden, d_activated = s.hidden, s.d_activated

    def blocks(columns: int) -> BlockScaled:
        codes = [torch.empty(shape, dtype=torch.uint8, device="cuda") for shape in ((TOKENS, columns), (columns, TOKENS))]
        scales = [torch.empty(shape, device="cuda") for shape in ((columns // 128, TOKENS), (TOKENS // 128, columns))]
        return BlockScaled(torch.float8_e4m3fn, codes[0], scales[0], codes[1], scales[1])

    activated, d_hidden = scaled(torch.float8_e4m3fn, WIDTH), scaled(torch.float8_e5m2, 2 * WIDTH)
    again = replace(activated, rows=None, amax=None)
    for tile in (Tile(*each) for each in ACTIVATION_TILES):
        yield Case(f"delayed, forward, {tile}", 5 * s.values, partial(kernel.forward, hidden, activated, tile))
        ours = partial(kernel.backward, d_activated, hidden, d_hidden, again, tile)
        yield Case(f"delayed, backward, {tile}", 11 * s.values, ours)
    activated, d_hidden = blocks(WIDTH), blocks(2 * WIDTH)
    for rows in (16, 32, 64):
        ours = partial(kernel.forward_blocks, hidden, activated, Tile(rows, 128, 4))
        yield Case(f"block, forward, {rows} rows", 5 * s.values, ours)
    for tile in (Tile(*each) for each in BLOCK_TILES):
        ours = partial(kernel.backward_blocks, d_activated, hidden, d_hidden, activated, tile)
        yield Case(f"block, backward, {tile}", 11 * s.values, ours)


# ── RMSNorm ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────

HIDDEN = {"Qwen3-1.7B": (TOKENS, QWEN3_1_7B["hidden_size"]), "Llama-3.1-8B": (16_384, 4096), "Qwen2.5-14B": (8192, 5120)}
# Rows, columns, warps and loads ahead: of the kernel that writes a transpose, and of the one that writes rows at most.
NORM_TILINGS = [(16, 2048, 16), (16, 256, 4), (16, 512, 8), (16, 512, 8, 2), (16, 1024, 16), (32, 128, 8), (32, 256, 8)]
NORM_TILINGS += [(32, 256, 8, 2), (32, 256, 8, 3), (32, 512, 16), (32, 512, 16, 2), (64, 128, 8), (64, 256, 16), (64, 256, 16, 2)]
NORM_ROW_TILINGS = [(1, 8192, 4), (1, 8192, 8), (2, 2048, 4), (4, 2048, 8), (4, 1024, 4), (8, 512, 4), (8, 512, 4, 2)]
SECOND_TILES = [(64, 64, 4), (64, 128, 8), (128, 64, 8), (32, 128, 4)]


class Norms:
    """The norm of one microbatch after attention's output, and today's three kernels for it."""

    def __init__(self, tokens: int, hidden: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.x, self.residual = torch.randn(2, tokens, hidden, generator=generator, device="cuda", dtype=BF16)
        self.weight = torch.ones(hidden, device="cuda", dtype=BF16)
        self.values = self.x.numel()

    def replaced(self, quantizer: Any, residual: Tensor | None) -> object:
        """The sum in place, which grows with every call; its time does not depend on that."""
        import transformer_engine_torch as tex

        if residual is not None:
            self.x.add_(residual)
        return tex.rmsnorm_fwd(self.x, self.weight, 1e-6, None, quantizer, tex.DType.kBFloat16, 0, False)

    def scaled(self, recipe: str) -> Any:
        """Allocate what the norm's codes go to, in both layouts."""
        from pretrain.model.fused.te_storage import allocate

        return allocate(quantizer_of(recipe), self.x.shape, self.x.device)[1]


def norm() -> Iterator[Case]:
    """Our kernel stands beside torch's sum, Transformer Engine's norm with a quantizer for both directions, and its transposes.

    The bytes are those of a single pass: current scaling and blocks read the sum a second time.
    """
    import transformer_engine.pytorch  # noqa: F401  its kernels cannot be imported before

    from pretrain.model.fused.norm import rms_norm

    for model, shape in HIDDEN.items():
        n = Norms(*shape)
        for recipe in (*ACTIVATION_RECIPES, None):
            quantizer = quantizer_of(recipe) if recipe else None
            for residual, moved in ((n.residual, 8), (None, 4)):
                if quantizer is None and residual is None:
                    continue  # nothing is fused, and nothing of ours is called
                name = f"RMSNorm {recipe or 'bf16'}{'' if residual is None else ' with the sum'}, {model}"
                ours = partial(rms_norm, n.x, residual, n.weight, 1e-6, quantizer)
                yield Case(name, moved * n.values, ours, partial(n.replaced, quantizer, residual))


def norm_tilings() -> Iterator[Case]:
    import transformer_engine.pytorch  # noqa: F401

    from pretrain.model.fused import norm_kernel as kernel
    from pretrain.model.fused.norm_kernel import NormTiling

    tilings = [NormTiling(*each) for each in NORM_TILINGS]

    def one_scale(n: Norms, residual: Tensor | None, written: Any, *chosen: NormTiling, **options: Any) -> Callable[[], object]:
        return partial(kernel.rms_norm_scaled, n.x, residual, n.weight, 1e-6, written, *chosen, **options)

    for model in ("Qwen2.5-14B", "Llama-3.1-8B", "Qwen3-1.7B"):
        n = Norms(*HIDDEN[model])
        written = n.scaled("delayed")
        for tiling in tilings:
            yield Case(f"delayed with the sum, {model}, {tiling}", 8 * n.values, one_scale(n, n.residual, written, tiling))
    for tiling in tilings:
        yield Case(f"delayed, {model}, {tiling}", 4 * n.values, one_scale(n, None, written, tiling))
    for tiling in (NormTiling(*each) for each in NORM_ROW_TILINGS):
        ours = partial(kernel.rms_norm, n.x, n.residual, n.weight, 1e-6, tiling)
        yield Case(f"bf16 with the sum, {model}, {tiling}", 8 * n.values, ours)
    written, blocks = n.scaled("current"), n.scaled("block")
    for tile in (NormTiling(*each) for each in SECOND_TILES):
        ours = one_scale(n, n.residual, written, second=tile)
        yield Case(f"current with the sum, {model}, second kernel {tile}", 8 * n.values, ours)
    for warps in BLOCK_WARPS:
        ours = partial(kernel.rms_norm_blocks, n.x, n.residual, n.weight, 1e-6, blocks, NormTiling(128, 128, warps))
        yield Case(f"block with the sum, {model}, second kernel with {warps} warps", 8 * n.values, ours)


def bf16() -> Iterator[Case]:
    """What fused layers call in BF16 without Transformer Engine alone, beside its kernels where it is."""
    from pretrain.model.fused import activation_kernel, norm_kernel
    from pretrain.precision import transformer_engine

    tex = None if transformer_engine.missing() else importlib.import_module("transformer_engine_torch")
    for model, shape in HIDDEN.items():
        n = Norms(*shape)
        dy, (_, rstd) = torch.randn_like(n.x), norm_kernel.rms_norm(n.x, None, n.weight, 1e-6)
        ours = partial(norm_kernel.rms_norm_backward, dy, n.x, rstd, n.weight)
        behind = rstd, n.weight, 0, False
        theirs = tex and partial(tex.rmsnorm_bwd_add, dy, n.x, n.residual, *behind)
        yield Case(f"RMSNorm bf16, backward with the residual, {model}", 8 * n.values, partial(ours, n.residual), theirs)
        theirs = tex and partial(tex.rmsnorm_bwd, dy, n.x, *behind)
        yield Case(f"RMSNorm bf16, backward, {model}", 6 * n.values, partial(ours, None), theirs)
    s = SwiGLU()
    theirs = tex and partial(tex.swiglu, s.hidden, None)
    yield Case("SwiGLU bf16, forward", 6 * s.values, partial(activation_kernel.forward_bf16, s.hidden), theirs)


# ── The table of tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def table() -> Iterator[Case]:
    """The gradient of Qwen3-1.7B's table, in whose microbatch a twentieth of the tokens are one word. The bytes are those of the
    rows that come in, and of the sums they are added to, read and written, were each word's added once."""
    generator, (_, width) = torch.Generator("cuda").manual_seed(0), HIDDEN["Qwen3-1.7B"]
    ids = torch.empty(TOKENS, device="cuda").exponential_(generator=generator).mul_(8000).long() % VOCABULARY
    ids[::20] = 11
    gradient = torch.randn(TOKENS, width, generator=generator, device="cuda", dtype=BF16)
    total = torch.zeros(VOCABULARY, width, device="cuda")

    def by_torch() -> object:
        return total.add_(torch.ops.aten.embedding_dense_backward(gradient.float(), ids, VOCABULARY, -1, False))

    moved = gradient.nbytes + 2 * len(ids.unique()) * width * total.element_size()
    yield Case("gradient of a table of tokens", moved, partial(add_rows_, total, gradient, ids), by_torch)


# ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "rotary": rotary,
    "rotary_tilings": rotary_tilings,
    "rotary_codes": rotary_codes,
    "rotary_codes_tilings": rotary_codes_tilings,
    "softmax": softmax,
    "softmax_tilings": softmax_tilings,
    "activation": activation,
    "activation_tilings": activation_tilings,
    "norm": norm,
    "norm_tilings": norm_tilings,
    "bf16": bf16,
    "table": table,
}


if __name__ == "__main__":
    main()
