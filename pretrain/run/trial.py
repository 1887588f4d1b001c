"""One precision tried on this machine, alone: its operands, its kernels, one layer's agreement and speed.

On a GPU that happens in a process of its own (`pretrain.run.processes`). Whatever fails becomes a finding. `pretrain.run.doctor`
makes a table of them, and `pretrain.run.examination` a file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.reading import one_line
from foundation.units import GIB
from pretrain.metrics.flops import Shape
from pretrain.metrics.run_folder import describe_environment
from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.attention.heads import Heads
from pretrain.model.fused.layers import not_fused_because
from pretrain.precision.registry import PRECISIONS, UNQUANTIZED
from pretrain.precision.scope import check_shapes
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.run.processes import Finding, Process, WorkerPool
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import LossSettings, ModelSettings
from pretrain.verify.kernels import Verdict, choose, failures, relative_error, rounds_of
from pretrain.verify.one_layer import Situation, loss_and_gradients, microbatch_of, one_layer
from pretrain.verify.operands import compare_operands

QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SMALL = QWEN3_1_7B | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TIMEOUT = 150  # seconds for what one precision checks, and again for what it measures
Machine = dict[str, Any]  # environment: versions and devices; missing: by precision, what the device lacks or None
PASSED, FAILED, NOT_HERE = "passed", "failed", "not here"


@dataclass(frozen=True)
class DoctorSetup:
    """What is examined: layers of this shape, on this device."""

    device: torch.device
    config: dict[str, Any]  # of the model
    recipe: Path | None  # whose model it is
    length: int  # tokens of a pack
    tokens: int  # of a timed forward and backward

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> DoctorSetup:
        """Returns what the command's arguments ask for. InputError for a recipe that cannot be read."""
        gpu = torch.cuda.is_available() and not arguments.cpu
        device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        recipe = load_recipe(arguments.recipe) if arguments.recipe else None
        length = recipe.data.length if recipe else 4096 if gpu else 128
        tokens = arguments.tokens or max(length, 8192 if gpu else 256)
        return cls(device, QWEN3_1_7B if gpu else SMALL, arguments.recipe, length, tokens)

    @property
    def arguments(self) -> list[str]:
        """The arguments of the doctor's command in a process of its own, with which it examines the same."""
        recipe = ["--recipe", str(self.recipe.resolve())] if self.recipe else []
        return [*recipe, *(["--cpu"] if self.device.type == "cpu" else []), "--tokens", str(self.tokens)]

    @cached_property
    def hf(self) -> PreTrainedModel:
        """The model, on the meta device."""
        settings = load_recipe(self.recipe).model if self.recipe else ModelSettings(config=self.config)
        return model.build_on_meta(model.load_config(settings))

    def situation(self, active: ActivePrecision) -> tuple[Situation, attention.Choice]:
        """Returns the situation of a run with default settings before its kernels are tried, and its choice of attention."""
        hf = self.hf
        shape, dtype = Shape.of(hf), getattr(torch, active.precision.compute_dtype)
        heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
        check_shapes(hf, active)
        choice = attention.choose("auto", self.device.type, heads, dtype, self.length)
        run = Situation(
            device=self.device,
            hf=hf,
            length=self.length,
            active=active,
            attention=choice.name,
            fused=not_fused_because("auto", active, self.device.type, dtype) is None,
            loss=LossSettings(),
            weights="bf16_exact" if active.precision.compute_dtype == "bfloat16" else "fp32",
            gradients=torch.float32,
            moments=torch.float32,
        )
        return run, choice


# ── In the process that tries it ───────────────────────────────────────────────────────────────────────────────


def examine(
    setup: DoctorSetup, name: str, backend: str, *, full: bool, wait: Callable[[], None] = lambda: None
) -> Iterator[Finding]:
    """What works of precision `name` on `backend` (torch, transformer_engine, emulation); every failure is a finding.

    `wait` returns when nothing else computes on the device, so that speed can be measured.
    """
    precision = PRECISIONS[name]
    active = ActivePrecision(name, precision, backend, LowPrecisionSettings().resolved(name))
    if full and backend == "transformer_engine":
        yield from each_operand(active, setup.device)
    verdicts: list[Verdict] = []
    chosen, failure = None, None
    try:
        run, choice = setup.situation(active)
        chosen = choose(run, choice, "auto", "auto", verdicts=verdicts)
    except (InputError, *failures()) as error:
        failure = in_a_line(error)
    for verdict in verdicts:
        status = PASSED if verdict.agrees or verdict.instead else FAILED
        instead = f"; {verdict.instead} in its place" if verdict.instead else ""
        found = {"agrees": verdict.agrees, "errors": dict(verdict.errors)}
        yield {"part": verdict.kernel, "status": status, "said": f"{verdict}{instead}"} | found
    if chosen is None:
        yield {"part": "kernels", "status": FAILED, "said": failure}
        return
    yield tried("against FP32", lambda: agreement(chosen.situation))
    if backend == "emulation" and setup.device.type == "cuda":
        return  # it has no speed of interest, and what it compiles takes minutes
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    wait()
    yield tried("speed of a layer", lambda: speed(chosen.situation, setup.tokens))


def tried(part: str, examine_part: Callable[[], Finding]) -> Finding:
    """Returns the finding of `examine_part`, or the finding that it failed."""
    try:
        return examine_part()
    except (InputError, *failures()) as error:
        return {"part": part, "status": FAILED, "said": in_a_line(error)}


def each_operand(active: ActivePrecision, device: torch.device) -> Iterator[Finding]:
    """Yields a finding for each operand that hardware quantizes: whether it is the emulation's, bit for bit."""
    try:
        for operand, differs in compare_operands(active, device):
            said = differs or "the emulation's, bit for bit"
            yield {"part": f"operand: {operand}", "status": FAILED if differs else PASSED, "said": said}
    except (InputError, *failures()) as error:
        yield {"part": "operands", "status": FAILED, "said": in_a_line(error)}


def agreement(run: Situation) -> Finding:
    """The layer as it would train beside the same one in FP32: what is quantized is off by what quantization costs."""
    fp32 = ActivePrecision("fp32", UNQUANTIZED["float32"], "torch", LowPrecisionSettings().resolved("fp32"))
    plain = loss_and_gradients(one_layer(run, fp32, fused=False, backend="packed_sdpa", in_fp32=True), run)
    ours = loss_and_gradients(one_layer(run, run.active, fused=run.fused, backend=run.attention), run, rounds_of(run.active))
    whole, theirs = (torch.cat([found[name].flatten() for name in plain if name != "loss"]) for found in (ours, plain))
    off = relative_error(whole, theirs)
    finding = {"part": "against FP32", "gradient_error": off, "loss_error": (ours["loss"] - plain["loss"]).abs().item()}
    said = f"loss {finding['loss_error']:.2g} nats off, gradient {off:.1%} of its norm"
    return finding | {"status": PASSED if off < 0.75 else FAILED, "said": said}


def speed(run: Situation, tokens: int) -> Finding:
    """Forward and backward of one layer, without the optimizer; weights are quantized every time."""
    gpu = run.device.type == "cuda"
    compiled = gpu and not run.fused
    packed = one_layer(run, run.active, fused=run.fused, backend=run.attention, compiled=compiled)
    inputs = microbatch_of(run, tokens)
    count = inputs["input_ids"].numel()
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def pass_through() -> None:
        packed.zero_grad(set_to_none=True)
        (packed(**inputs) / count).backward()

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    for _ in range(3 if gpu else 1):
        pass_through()
    times = []
    for _ in range(7 if gpu else 2):
        wait()
        began = time.perf_counter()
        pass_through()
        wait()
        times.append(time.perf_counter() - began)
    seconds = sorted(times)[len(times) // 2]
    memory = torch.cuda.max_memory_allocated() / GIB if gpu else None
    finding = {
        "part": "speed of a layer",
        "status": PASSED,
        "ms": 1e3 * seconds,
        "tokens": count,
        "tokens_per_second": count / seconds,
    }
    peak = f", {memory:.2f} GiB at most" if memory else ""
    said = f"{1e3 * seconds:.2f} ms for {count:,} tokens, {count / seconds:,.0f} tokens/s{peak}"
    return finding | {"said": said}


def in_a_line(error: BaseException) -> str:
    """Returns a message to the user as it is, any other error cut to a line."""
    return str(error) if isinstance(error, InputError) else one_line(error, named=True)


# ── In the process that asks for it ──────────────────────────────────────────────────────────────────────────────────────────


def machine(device_type: str) -> Machine:
    """Describes this machine. Where a precision lacks nothing, its library may still fail."""
    missing = missing_on(device_type)
    quantized = [precision for precision in PRECISIONS.values() if precision.quantized]
    return {"environment": describe_environment({}), "missing": {each.name: missing(each) for each in quantized}}


def check(
    setup: DoctorSetup,
    name: str,
    backend: str,
    process: Process | None,
    *,
    full: bool,
    found: Callable[[Finding], None],
) -> None:
    """Findings of one precision, of `process` up to where it waits to measure; without one, all of them, of this process."""
    if process is None:
        for finding in examine(setup, name, backend, full=full):
            found(finding)
    elif ended := process.tell([*setup.arguments, "--try", name, backend, *(["--full"] if full else [])], TIMEOUT, found):
        found({"part": "process", "status": FAILED, "said": ended})


def measure(pool: WorkerPool, process: Process | None, found: Callable[[Finding], None]) -> None:
    """The findings of a process that waits for its turn."""
    if process and process.waits:
        with pool.alone():
            if ended := process.tell([], TIMEOUT, found):
                found({"part": "process", "status": FAILED, "said": ended})


def describe(setup: DoctorSetup, known: Machine) -> list[str]:
    """The machine and the layer, in two lines."""
    environment = known["environment"]
    packages = environment["packages"]
    library = f", Transformer Engine {packages['transformer-engine']}" if "transformer-engine" in packages else ""
    device = ", ".join(dict.fromkeys(environment["gpus"])) if setup.device.type == "cuda" else "CPU"
    versions = f"torch {packages.get('torch')}, CUDA {environment['cuda']}{library}"
    shape = Shape.of(setup.hf)
    heads = f"{shape.heads} query and {shape.kv_heads} KV heads of {shape.head_dim}"
    layer = f"{type(setup.hf).__name__}, hidden {shape.hidden}, feed-forward {shape.feed_forward}, {heads}"
    return [f"{device}; {versions}", f"one layer of {layer}; {setup.tokens:,} tokens in packs of {setup.length:,}"]


def plain(finding: Finding) -> Finding:
    """Returns the finding with text in place of numbers that JSON does not have."""
    return json.loads(json.dumps(finding), parse_constant=str)
