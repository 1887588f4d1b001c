"""Test the gathers and reductions of a step of two ranks under FSDP2.

tests/golden and test_processes.py compare whole runs with one process.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from foundation.overrides import overridden
from foundation.units import GIB
from packing.batch import StepBatches
from pretrain.metrics.console import Console
from pretrain.model import graphs, sharding
from pretrain.model.distributed import complete_topology, shard
from pretrain.model.gradients import gradient_of, local_part
from pretrain.model.graphs import MicrobatchGraphs
from pretrain.model.packed import compute_microbatch, forward_backward, inputs_of
from pretrain.observe.observers import Step
from pretrain.observe.profile import TABLE_FILE, StepProfile
from pretrain.observe.step_check import CachedWeights
from pretrain.optimizer import adamw
from tests.pretrain.conftest import active_everywhere
from tests.pretrain.model.fused import fused_models, test_blackwell
from tests.pretrain.model.test_graphs import Recorded
from tests.pretrain.verify.small_runs import (
    HIDDEN,
    VOCABULARY,
    SmallRun,
    build_run,
    random_packs,
    step_of,
)
from tests.ranks import print_found, printed_by_ranks
from tests.te_on_a_cpu import transformer_engine_on_a_cpu

pytestmark = pytest.mark.multi

MICROBATCHES = 2
# Bytes of the gathered parameters of the tied run at the loss of the last microbatch: the table,
# the final norm, and the norms of two layers, in BF16.
RESIDENT = 2 * (VOCABULARY * HIDDEN + HIDDEN + 2 * (2 * HIDDEN + 2 * 32))
RUNS: dict[str, dict[str, Any]] = {
    "tied": {"precision": "delayed", "weights": "bf16_exact"},
    "untied": {
        "precision": "nvfp4",
        "kind": "llama",
        "scope": "linear+head",
        "keep_bf16_layers": {"first": 1, "last": 0},
        "recompute": True,
    },
    # Conv1D has a transposed weight.
    "transposed": {"precision": "current", "kind": "gpt2", "layers": 1},
}


@contextmanager
def counting_collectives() -> Iterator[dict[str, Counter[str]]]:
    """Yield the number of gathers and of reductions of FSDP2, by the kind of shard group."""
    counts: dict[str, Counter[str]] = {"foreach_all_gather": Counter(), "foreach_reduce": Counter()}

    def counted(name: str) -> Any:
        collective = getattr(_fsdp_param_group, name)

        def call(params: Sequence[Any], *arguments: Any) -> Any:
            parameter = params[0]._param_fqn
            kind = "layer" if re.search(r"\.\d+\.", parameter) else parameter.split(".")[-2]
            counts[name][kind] += 1
            return collective(params, *arguments)

        return call

    with overridden(_fsdp_param_group, **{name: counted(name) for name in counts}):
        yield counts


def step_for(accelerator: Accelerator, microbatches: int) -> StepBatches:
    ranks = accelerator.num_processes
    return step_of(random_packs(microbatches * ranks), 1, accelerator.process_index, ranks)


def gradients(run: SmallRun) -> list[Tensor]:
    found = map(gradient_of, run.model.parameters())
    return [local_part(gradient).clone() for gradient in found if gradient is not None]


def gathered_bytes(run: SmallRun) -> int:
    """Return the bytes of memory of the gathered parameters."""
    params = [param for group in run.packed.sharding._groups for param in group.fsdp.fsdp_params]
    return sum(param.unsharded_param.untyped_storage().nbytes() for param in params)


def train(accelerator: Accelerator, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Train two steps, and run other passes before each step and after it.

    Returns all losses, gradients and weights. Of the second step, also returns the collectives and
    the bytes of gathered parameters at the loss of the last microbatch.
    """
    run = build_run(accelerator, **options)
    step = step_for(accelerator, MICROBATCHES)
    inputs = [inputs_of(batch, accelerator.device) for batch in step.microbatches]
    run.optimizer.materialise()
    adamw.set_learning_rate(run.optimizer, 1e-3)
    seen = []
    resident: list[int] = []
    for _ in range(2):
        with run.packed.sharding.accumulating():
            # As a measurement of the gap to BF16 does.
            with overridden(run.packed.context, quantizing=False):
                accelerator.backward(run.model(**inputs[0]))
            seen += gradients(run)
            adamw.clear_gradients(run.optimizer, run.packed)
            # As the search for the largest microbatch does: both passes quantize the weights.
            accelerator.backward(run.model(**inputs[1]))
            accelerator.backward(run.model(**inputs[0]))
        seen += gradients(run)
        adamw.clear_gradients(run.optimizer, run.packed)
        weights = CachedWeights()
        with (
            counting_collectives() as counts,
            run.packed.context.probing(weights),
            run.model.register_forward_hook(lambda *_: resident.append(gathered_bytes(run))),
        ):
            seen.append(forward_backward(run.model, step, accelerator))
        assert not weights.stale
        seen += gradients(run)
        run.optimizer.step()
        adamw.clear_gradients(run.optimizer, run.packed)
        with torch.no_grad():
            seen.append(run.model.eval()(**inputs[1]))
        run.model.train()
    seen += [local_part(weight) for weight in run.model.parameters()]
    return seen, {**counts, "resident": resident[-1]}


def train_fused(accelerator: Accelerator, references: Path) -> list[Tensor]:
    """Return the loss and the gradients of a step of fused layers on Transformer Engine."""
    with (
        transformer_engine_on_a_cpu(references),
        # Sharding allocates the main gradients.
        # Sharding allocates the main gradients.
        overridden(fused_models, attach_main_gradients=lambda *_: None),
    ):
        active = active_everywhere("mxfp8", "transformer_engine")
        packed = test_blackwell.assemble(active, fused=True)
        shard(accelerator, packed, torch.bfloat16, once_a_step=False)
        packed.sharding = sharding.Sharding(
            packed, torch.float32, packed.fused.stacks, once_a_step=False
        )
        step = step_for(accelerator, MICROBATCHES)
        with counting_collectives() as counts:
            loss = forward_backward(packed, step, accelerator)
        keeps_codes = sharding.QUANTIZED_SHARE < 1
        assert counts["foreach_all_gather"]["layer"] == (2 if keeps_codes else 4 * MICROBATCHES)
        return [loss, *(local_part(parameter.grad) for parameter in packed.parameters())]


def train_with_graphs(accelerator: Accelerator) -> None:
    """Compare three steps with and without graphs, which give the same losses and gradients."""
    seen: list[list[Tensor]] = [[], []]
    recorded = []

    def capture(function: Callable[[], Tensor], _: Any) -> tuple[Recorded, Tensor]:
        recorded.append(Recorded(function))
        return recorded[-1], recorded[-1].loss

    memory = overridden(torch.cuda, mem_get_info=lambda: (80 * GIB, 80 * GIB))
    with memory, overridden(graphs, capture=capture):
        computes = (compute_microbatch, MicrobatchGraphs("on", print).compute)
        for results, compute in zip(seen, computes, strict=True):
            run = build_run(accelerator, fused=True, weights="bf16_exact")
            step = step_for(accelerator, 5)
            run.optimizer.materialise()
            adamw.set_learning_rate(run.optimizer, 1e-3)
            for _ in range(3):
                results.append(forward_backward(run.model, step, accelerator, compute=compute))
                results += gradients(run)
                run.optimizer.step()
                adamw.clear_gradients(run.optimizer, run.packed)
                with torch.no_grad():
                    run.model.eval()(**inputs_of(step.microbatches[0], accelerator.device))
                run.model.train()
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    # FSDP2 gathers weights in the first of five microbatches, and reduces gradients in the last.
    assert sum(graph.runs for graph in recorded) == 3 * (3 if accelerator.is_fsdp2 else 5)
    if accelerator.is_fsdp2:
        # Gathered parameters keep their memory, which a graph on a GPU reads at fixed addresses.
        assert gathered_bytes(run) == sum(2 * weight.numel() for weight in run.model.parameters())


def turn_graphs_off(accelerator: Accelerator) -> None:
    """Check that a rank without memory, or whose capture fails, turns graphs off on all ranks."""

    def capture(function: Callable[[], Tensor], _: Any) -> tuple[Recorded, Tensor]:
        if accelerator.process_index == 1:
            raise RuntimeError("refused")
        recorded = Recorded(function)
        return recorded, recorded.loss

    run = build_run(accelerator, fused=True, weights="bf16_exact")
    step = step_for(accelerator, 5)
    statuses = []
    for free in (80, 80 - 79 * accelerator.process_index):
        decisions = MicrobatchGraphs("auto", print)
        memory = overridden(torch.cuda, mem_get_info=lambda free=free: (free * GIB, 80 * GIB))
        with memory, overridden(graphs, capture=capture):
            forward_backward(run.model, step, accelerator, compute=decisions.compute)
        adamw.clear_gradients(run.optimizer, run.packed)
        assert not decisions.captured
        statuses.append(decisions.status)
    assert statuses[0].startswith("off: refused")
    assert statuses[1].startswith("off: 0 MiB are available")


def profile_a_step(accelerator: Accelerator, folder: Path) -> None:
    """Check that all ranks run the profiled step without graphs, and that the first one records."""
    folder /= str(accelerator.process_index)
    folder.mkdir()
    observer = StepProfile(folder, accelerator, 0, 5, Console(5, enabled=False))
    step = Step(5, is_quantized=False, is_new=False, measures_operands=False)
    assert observer.due(step) and observer.observes_passes
    with observer.whole_step(step):
        torch.ones(2).sum()
    assert (folder / TABLE_FILE).exists() == accelerator.is_main_process


def main() -> None:
    """Print the collectives of a run, and the number of tensors that differ if none is freed."""
    accelerator = Accelerator(mixed_precision="no")
    complete_topology(accelerator, 1)
    seen, found = train(accelerator, RUNS[sys.argv[1]])
    with overridden(sharding, QUANTIZED_SHARE=2.0):
        expected, _ = train(accelerator, RUNS[sys.argv[1]])
    found["differ"] = sum(not torch.equal(*pair) for pair in zip(seen, expected, strict=True))
    print_found(accelerator, found)


def main_graphs() -> None:
    accelerator = Accelerator(mixed_precision="no")
    complete_topology(accelerator, 1)
    train_with_graphs(accelerator)
    turn_graphs_off(accelerator)
    profile_a_step(accelerator, Path(sys.argv[1]))
    accelerator.end_training()


def main_fused() -> None:
    """Compare fused layers that keep codes with fused layers that are gathered for each use."""
    accelerator = Accelerator(mixed_precision="no")
    complete_topology(accelerator, 1)
    seen = train_fused(accelerator, Path(sys.argv[1]))
    with overridden(sharding, QUANTIZED_SHARE=2.0):
        expected = train_fused(accelerator, Path(sys.argv[1]))
    assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))
    accelerator.end_training()


ONCE = {"layer": 2, "embed_tokens": 1, "norm": 1}
# By topology and run: gathers of a step with two microbatches, and reductions.
COLLECTIVES: dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]] = {
    ("zero", "tied"): (ONCE, ONCE),
    ("fsdp2", "tied"): (ONCE, ONCE | {"layer": 2 * MICROBATCHES}),
    # One layer is quantized. The other one is gathered for forward and for backward. The backward
    # of an embedding needs no gather.
    ("fsdp2", "untied"): (
        {"layer": 1 + 2 * MICROBATCHES, "lm_head": 1, "embed_tokens": MICROBATCHES},
        {},
    ),
    ("fsdp2", "transposed"): ({"layer": 2 * MICROBATCHES}, {}),
}


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        pytest.param(*key, marks=[] if key == ("fsdp2", "tied") else pytest.mark.nightly)
        for key in COLLECTIVES
    ],
)
def test_quantized_weights_are_gathered_once_a_step(topology: str, name: str) -> None:
    found, other = printed_by_ranks(main, topology, [name])
    assert found == other
    gathers, reductions = COLLECTIVES[topology, name]
    assert gathers.items() <= found["foreach_all_gather"].items()
    assert reductions.items() <= found["foreach_reduce"].items()
    assert found["differ"] == 0
    if name == "tied":
        assert found["resident"] == RESIDENT


def test_fused_layers_read_no_freed_weight(references: Path) -> None:
    """References are the published packages, among them Transformer Engine's Python."""
    printed_by_ranks(main_fused, "fsdp2", [str(references)])


@pytest.mark.parametrize("topology", [pytest.param("ddp", marks=pytest.mark.nightly), "zero"])
def test_microbatches_run_as_graphs(topology: str, tmp_path: Path) -> None:
    printed_by_ranks(main_graphs, topology, [str(tmp_path)])
