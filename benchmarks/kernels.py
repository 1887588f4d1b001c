"""Measure each kernel between the GEMMs of a step, and compare its speed with that of a copy.

    python -m benchmarks.kernels --out FILE

For each model, the command prints the time of a kernel, the bytes that it must move, and the share
of the copy bandwidth that it reaches. A kernel must read each of its inputs once and write each of
its results once. A kernel that reads a value twice therefore has a smaller share. The copy of a
large tensor is measured in the same call. Attention of long documents is limited by its matrix
products and not by memory.

Each kernel is replayed as a CUDA graph, so the time of the host is not measured. Documents have the
lengths of `benchmarks.speed.generated_packs`, with four means, and attention is computed by the
kernels that the launcher selects. Transformer Engine computes norms that quantize, and quantizes
operands that no kernel of ours writes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import measured_on
from benchmarks.speed.generated_packs import SEED, document_lengths
from benchmarks.speed.limits import median_seconds
from foundation.command import run_command
from foundation.files import write_json
from foundation.units import TERA
from packing.arrow import IGNORE
from packing.batch import OFFSETS_MULTIPLE
from pretrain.model import attention, attention_backends
from pretrain.model.fused.formulas import HeadNorms, Heads
from pretrain.model.fused.fp8_tile import TensorScaled
from pretrain.optimizer.adamw import Hyperparameters, ParameterTensors
from pretrain.precision import transformer_engine

BF16 = torch.bfloat16
FP32 = torch.float32
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
EPS = 1e-6
# Bytes of the tensor whose copy is measured.
COPIED = 2**32
# Number of tokens whose logits exist at once.
CHUNK = 4096
# Length of a pack, and the longest document.
PACK = 4096
# Map the mean length of documents in packs of PACK tokens to the `log_mean` of their lengths. With
# None, each pack is one document.
LOG_MEANS = {180: 4.7, 500: 5.83, 1000: 6.73, PACK: None}
# Precisions with one scale for a tensor. In "delayed", the scale is known before the values of the
# tensor are computed, and in "current" afterwards.
TENSOR_SCALED = ("delayed", "current")


class Model(NamedTuple):
    """Sizes of the layers of a model.

    A model with `is_gpt2` has LayerNorms, GELU, biases and no rotation. All others have RMSNorms,
    SwiGLU and a rotation.
    """

    hidden: int
    width: int
    vocabulary: int
    heads: Heads
    has_head_norms: bool = False
    is_gpt2: bool = False


MODELS = {
    "Qwen3-1.7B": Model(2048, 6144, 151_936, Heads(16, 8, 128), has_head_norms=True),
    "Llama-3.1-8B": Model(4096, 14_336, 128_256, Heads(32, 8, 128)),
    "GPT-2 124M": Model(768, 3072, 50_304, Heads(12, 12, 64), is_gpt2=True),
}


class Kernel(NamedTuple):
    """A kernel with its arguments.

    Attributes:
        name: Name of the kernel in the table.
        call: Compute the kernel.
        more: Bytes that it moves besides its arguments and results. Below 0 if it does not read all
            values of its arguments.
        columns: More columns of the kernel's row in the file.
    """

    name: str
    call: partial[Any]
    more: int = 0
    columns: Mapping[str, Any] = {}


class Inputs:
    """Random inputs on a device, from a seed."""

    def __init__(self, device: str, tokens: int) -> None:
        self.device = device
        self.tokens = tokens
        self.generator = torch.Generator(device).manual_seed(SEED)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def rows(self, width: int) -> Tensor:
        """Return activations [tokens, width]."""
        return self.normal(self.tokens, width)

    def codes(self, width: int, fp8: torch.dtype, precision: str, kept: str) -> TensorScaled:
        """Return buffers for the FP8 codes of activations [tokens, width].

        `fp8` is the dtype of the codes, and `precision` is "delayed" or "current". `kept` has the
        words "rows", for codes by rows, and "columns", for transposed codes.
        """
        shapes = {"rows": (self.tokens, width), "columns": (width, self.tokens)}
        buffers = {
            name: torch.empty(shape, dtype=torch.uint8, device=self.device)
            for name, shape in shapes.items()
            if name in kept
        }
        scale, scale_inv, amax, applied_scale = (
            torch.ones(1, device=self.device) for _ in range(4)
        )
        return TensorScaled(
            fp8,
            buffers.get("rows"),
            buffers.get("columns"),
            scale_inv,
            scale if precision == "delayed" else None,
            amax,
            applied_scale,
        )


def norms(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the kernels of the norm before a GEMM."""
    from pretrain.model.fused import norm_kernel

    x, dy, residual = (inputs.rows(model.hidden) for _ in range(3))
    weight = inputs.normal(model.hidden)
    bias = weight if model.is_gpt2 else None
    yield Kernel("norm", partial(norm_kernel.norm, x, weight, bias, EPS))
    _, rstd, mean = norm_kernel.norm(x, weight, bias, EPS)
    statistics = (dy, x, rstd, mean, weight, residual)
    yield Kernel("norm, backward", partial(norm_kernel.norm_backward, *statistics, summed=False))
    if transformer_engine.unmet_need():
        return
    import transformer_engine_torch as tex

    if not model.is_gpt2:
        arguments = (dy, x, residual, rstd, weight, 0, False)
        yield Kernel("norm, backward, by the library", partial(tex.rmsnorm_bwd_add, *arguments))
    function = tex.layernorm_fwd if model.is_gpt2 else tex.rmsnorm_fwd
    parameters = [weight] * (1 + model.is_gpt2)
    for precision, quantizer in quantizers(E4M3).items():
        options = (EPS, None, quantizer, tex.DType.kBFloat16, 0, False)
        yield Kernel(f"norm into {precision}", partial(function, x, *parameters, *options))


def rotations(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the kernels of the rotation and the norms of queries and keys.

    The gradients of keys and values have one part per query head, as from FlashAttention-4.
    """
    from pretrain.model.fused import rotary_kernel

    heads = model.heads
    qkv = inputs.rows(heads.width)
    weight = inputs.normal(heads.dim)
    head_norms = HeadNorms(weight, weight, EPS) if model.has_head_norms else None
    tables = [None if model.is_gpt2 else inputs.rows(heads.dim) for _ in range(2)]
    # Both halves of a table are equal, and only the first half is read.
    unread = 0 if model.is_gpt2 else -inputs.tokens * heads.dim * 2
    group = heads.query // heads.kv
    shape = (inputs.tokens, heads.kv, *[group] * (group > 1), heads.dim)
    gradients = [inputs.normal(inputs.tokens, heads.query, heads.dim)]
    gradients += [inputs.normal(*shape) for _ in range(2)]
    layout = (*tables, heads, head_norms)
    if not model.is_gpt2:
        yield Kernel("rotation", partial(rotary_kernel.rotate, qkv, *layout), unread)
    if model.has_head_norms:  # The values are not normalized.
        unread -= inputs.tokens * heads.kv * heads.dim * 2
    arguments = (*gradients, qkv if model.has_head_norms else None, *layout)
    backward = partial(rotary_kernel.rotate_backward, *arguments, summed=model.is_gpt2)
    yield Kernel("rotation, backward", backward, unread)
    codes = inputs.codes(heads.width, E5M2, "delayed", "rows and columns")
    # The result is `codes.rows`, which is an argument too.
    yield Kernel(
        "rotation, backward into delayed", partial(backward, codes), unread - qkv.nbytes // 2
    )


def activations(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the kernels of SwiGLU or GELU."""
    from pretrain.model.fused import activation_kernel

    gated = not model.is_gpt2
    options = {"gated": gated}
    sums = {**options, "summed": model.is_gpt2}
    input_width = model.width * (1 + gated)
    hidden = inputs.rows(input_width)
    gradient = inputs.rows(model.width)
    yield Kernel("activation", partial(activation_kernel.activate, hidden, **options))
    backward = activation_kernel.activate_backward
    yield Kernel("activation, backward", partial(backward, gradient, hidden, **sums))
    # The scale of the values that backward recomputes is known.
    recomputed = inputs.codes(model.width, E4M3, "delayed", "columns")
    for precision in TENSOR_SCALED:
        activated = inputs.codes(model.width, E4M3, precision, "rows")
        forward = partial(activation_kernel.write_activated, hidden, activated, **options)
        yield Kernel(f"activation into {precision}", forward)
        d_hidden = inputs.codes(input_width, E5M2, precision, "rows and columns")
        arguments = (gradient, hidden, d_hidden, recomputed)
        backward = partial(activation_kernel.write_activate_backward, *arguments, **sums)
        yield Kernel(f"activation, backward into {precision}", backward)


def casts(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the kernels that quantize a gradient by rows and transposed."""
    if transformer_engine.unmet_need():
        return
    gradient = inputs.rows(model.hidden)
    for precision, quantizer in quantizers(E5M2).items():
        yield Kernel(f"quantize in {precision}", partial(quantizer, gradient))


def losses(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the kernels of the loss of CHUNK tokens, or of all tokens if they are fewer."""
    from pretrain.model.loss.softmax_kernel import quantized_softmax_gradient, softmax_loss

    count = min(CHUNK, inputs.tokens)
    logits = inputs.normal(count, model.vocabulary)
    labels = torch.arange(count, device=inputs.device)
    loss = partial(softmax_loss, logits, labels, IGNORE)
    yield Kernel("loss", loss)
    # The gradient overwrites the logits.
    yield Kernel("loss and gradient", partial(loss, with_gradient=True), logits.nbytes)
    amax = torch.zeros(1, device=inputs.device)
    arguments = (logits, labels, IGNORE, E5M2, amax)
    for name, scale in (("delayed", torch.ones(1, device=inputs.device)), ("current", None)):
        call = partial(quantized_softmax_gradient, *arguments, scale)
        yield Kernel(f"loss and gradient into {name}", call)


def updates(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the exact update of a matrix of the MLP."""
    from pretrain.optimizer.adamw_kernel import prepare_update

    shape = (model.width, model.hidden)
    weight = inputs.normal(*shape)
    gradient, first_moment, second_moment = (inputs.normal(*shape, dtype=FP32) for _ in range(3))
    remainder = torch.zeros_like(weight, dtype=torch.int16)
    parameter = ParameterTensors(weight, remainder, gradient, first_moment, second_moment.square_())
    update = prepare_update([(parameter, Hyperparameters(1e-3, 0.1, 0.9, 0.95, 1e-8))], None)
    # All tensors but the gradient are read and written.
    moved = 2 * sum(tensor.nbytes for tensor in parameter) - gradient.nbytes
    yield Kernel("optimizer", partial(update), moved)


def attentions(model: Model, inputs: Inputs) -> Iterator[Kernel]:
    """Return the attention that the launcher selects, for each mean length of documents."""
    heads = model.heads
    q, k, v = (tensor.contiguous() for tensor in heads.split(inputs.rows(heads.width)))
    d_output = torch.randn_like(q)
    case = attention_backends.Case(inputs.device, heads.dim, BF16)
    for mean, log_mean in LOG_MEANS.items():
        sizes = document_sizes(inputs.tokens, log_mean)
        weighted_mean = float(np.square(sizes).sum() / inputs.tokens)
        name = attention_backends.choose("auto", case, weighted_mean).name
        documents = attention.documents_for(name, ends_of(sizes, inputs), PACK, inputs.tokens)
        rest = (documents, PACK, heads.dim**-0.5)
        columns = {"attention": name, "documents": len(sizes), "weighted_mean": weighted_mean}
        forward, backward = attention.ATTENTION_KERNELS[name]
        call = partial(forward, q, k, v, *rest)
        yield Kernel(f"attention, {mean} tokens", call, columns=columns)
        call = partial(backward, d_output, q, k, v, *call(), *rest)
        yield Kernel(f"attention, {mean} tokens, backward", call, columns=columns)


def ends_of(sizes: np.ndarray, inputs: Inputs) -> Tensor:
    """Return the offsets of documents as a microbatch has them, int32."""
    offsets = np.append(0, np.cumsum(sizes))
    padded = np.pad(offsets, (0, -len(offsets) % OFFSETS_MULTIPLE), mode="edge")
    return torch.tensor(padded, dtype=torch.int32, device=inputs.device)


FAMILIES = (norms, rotations, activations, casts, losses, updates, attentions)


def quantizers(fp8: torch.dtype) -> dict[str, Any]:
    """Return Transformer Engine's quantizers of inputs or gradients, by precision.

    They write codes by rows and transposed. `fp8` is E4M3 for inputs, or E5M2 for gradients.
    """
    te = transformer_engine.library()
    dtype = te.DType.kFloat8E4M3 if fp8 == E4M3 else te.DType.kFloat8E5M2
    device = torch.device("cuda")
    made = {
        "delayed": te.Float8Quantizer(*torch.ones(2, 1, device=device), dtype),
        "current": te.Float8CurrentScalingQuantizer(dtype, device),
        "block": te.Float8BlockQuantizer(
            dtype, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=1
        ),
    }
    for quantizer in made.values():
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantizer.internal = True
        quantizer.optimize_for_gemm = True
    return made


def document_sizes(tokens: int, log_mean: float | None) -> np.ndarray:
    """Return the lengths of the documents in packs, int64. LOG_MEANS describes `log_mean`."""
    draw = np.random.default_rng(SEED)
    packs = tokens // PACK
    if log_mean is None:
        return np.full(packs, PACK)
    sizes = [document_lengths(PACK, draw, log_mean) for _ in range(packs)]
    return np.concatenate(sizes, dtype=np.int64)


def moved(kernel: Kernel, result: Any) -> int:
    """Return the bytes that a kernel must read and write. `result` is what its call returns."""
    operands = [*kernel.call.args, *kernel.call.keywords.values(), result]
    return sum(tensor.nbytes for tensor in tensors_in(operands)) + kernel.more


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in an argument or a result of a kernel."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))
    elif hasattr(value, "get_data_tensors"):
        yield from tensors_in(value.get_data_tensors())


def measure(kernel: Kernel, bandwidth: float) -> dict[str, Any]:
    """Return the row of a kernel. `bandwidth` is that of a copy, in bytes per second."""
    # The first call compiles the kernel.
    size = moved(kernel, kernel.call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.call()
    seconds = median_seconds(graph.replay, torch.device("cuda"))
    return {
        "kernel": kernel.name,
        "microseconds": seconds * 1e6,
        "bytes": size,
        "share_of_copy": size / seconds / bandwidth,
        **kernel.columns,
    }


def copy_bandwidth() -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    seconds = median_seconds(partial(torch.empty_like(source).copy_, source), source.device)
    return 2 * COPIED / seconds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    arguments = parser.parse_args()
    # Transformer Engine must be imported before torch uses cuDNN.
    transformer_engine.unmet_need()
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / TERA:.2f} TB/s")
    result = {
        **measured_on(),
        "tokens": arguments.tokens,
        "copy_bytes_per_second": bandwidth,
        "kernels": [],
    }
    for family in FAMILIES:
        for name, model in MODELS.items():
            for kernel in family(model, Inputs("cuda", arguments.tokens)):
                row = {"model": name, **measure(kernel, bandwidth)}
                result["kernels"].append(row)
                write_json(arguments.out, result)
                print(
                    f"{name:13} {row['kernel']:34} {row['microseconds']:8.1f} µs "
                    f"{row['bytes'] / 1e6:8.1f} MB {row['share_of_copy']:6.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(run_command(main))
