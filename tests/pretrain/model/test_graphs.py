"""Test CUDA graphs of microbatches, with a substitute of a graph that runs on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_accelerate
from foundation.errors import InputError
from foundation.units import GIB
from packing.arrow import Pack
from packing.batch import StepBatches, build_microbatch
from pretrain.model import graphs as graphs_module
from pretrain.model.gradients import clear_main_gradients, gradient_of
from pretrain.model.graphs import SPARE, MicrobatchGraphs
from pretrain.model.packed import PackedLanguageModel, compute_microbatch, forward_backward
from pretrain.settings.recipe import LossSettings
from tests.pretrain.conftest import active_in
from tests.pretrain.model.fused import fused_models
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, LENGTH, VOCABULARY

# Numbers of documents in the packs of a microbatch. `cu_seqlens` has 16 or 32 entries.
STEPS = [[3, 20, 4], [3, 4, 20], [20, 3, 20]]
# GiB that stay free on a device with 80 GiB.
RESERVE = 80 * SPARE


class Recorded(TorchDispatchMode):
    """Substitute of a CUDA graph: it repeats the recorded operations of torch in the same memory.

    As in a CUDA graph, the recording changes no tensor, and a repetition runs no Python code.
    """

    def __init__(self, function: Callable[[], Tensor]) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.runs = 0
        with self:
            self.loss = function()
        with torch.no_grad():
            for tensor, values in reversed(self.before):
                tensor.copy_(values)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert operation is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        for argument, value in zip(operation._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(part, part.clone()) for part in tree_leaves(value)]
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        self.runs += 1
        for operation, args, kwargs, result in self.operations:
            again = operation(*args, **kwargs)
            if operation is torch.ops.c10d.allreduce_.default:
                dist.Work.unbox(again[1]).wait()
            for before, after in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(before, Tensor) and before.data_ptr() != after.data_ptr():
                    before.copy_(after)

    def pool(self) -> str:
        return "pool"


def record(function: Callable[[], Tensor], pool: str | None) -> tuple[Recorded, Tensor]:
    graph = Recorded(function)
    return graph, graph.loss


Make = Callable[..., MicrobatchGraphs]


@pytest.fixture
def make_graphs(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes graphs of a device with 80 GiB, of which `free` are free."""

    def make(
        status: str,
        report: Callable[[str], None],
        record: Callable[..., Any] = record,
        *,
        free: int = 80 * GIB,
    ) -> MicrobatchGraphs:
        monkeypatch.setattr(graphs_module, "capture", record)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
        return MicrobatchGraphs(status, report)

    return make


def assemble(kind: str, penalty: str | None = None) -> PackedLanguageModel:
    """Build a fused model with FP32 weights that computes in BF16."""
    loss = LossSettings(chunk=32, penalty=penalty, penalty_weight=0.1 if penalty else None)
    active = active_in("bf16", "torch")
    options = {"weights": torch.float32, "loss": loss}
    return fused_models.assemble(ARCHITECTURES[kind], active, fused=True, **options)


def batches_of(documents: list[int], seed: int) -> StepBatches:
    draw = np.random.default_rng(seed)
    microbatches = []
    for count in documents:
        cuts = np.sort(draw.choice(np.arange(1, LENGTH), count - 1, replace=False))
        lengths = np.diff([0, *cuts, LENGTH]).astype(np.int32)
        pack = Pack(draw.integers(VOCABULARY, size=LENGTH).astype(np.uint32), lengths)
        microbatches.append(build_microbatch([pack], mask_boundaries=True))
    valid_tokens = sum(microbatch.valid_tokens for microbatch in microbatches)
    return StepBatches(microbatches, LENGTH * len(documents), valid_tokens, 0)


def trained(
    packed: PackedLanguageModel, accelerator: Accelerator, compute: Callable[..., Tensor]
) -> list[Any]:
    """Train a few steps, and return the losses, the sums of the loss and the final gradients."""
    results: list[Any] = []
    for seed, documents in enumerate(STEPS):
        clear_main_gradients(packed.parameters())
        step = batches_of(documents, seed)
        results.append(forward_backward(packed, step, accelerator, compute=compute).item())
        results += [sums.item() for sums in packed.take_sums().values()]
        with torch.no_grad():
            for parameter in packed.parameters():
                parameter -= 0.05 * gradient_of(parameter)
    return results + [gradient_of(parameter).clone() for parameter in packed.parameters()]


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), index


@pytest.mark.parametrize(("kind", "penalty"), [("gpt2", None), ("qwen3", "non_max_sum")])
def test_steps_with_graphs_equal_other_steps_bit_for_bit(
    make_graphs: Make, kind: str, penalty: str | None, accelerator: Accelerator
) -> None:
    expected = trained(assemble(kind, penalty), accelerator, compute_microbatch)
    packed = assemble(kind, penalty)
    # The first steps of a run are observed, and have no graphs.
    forward_backward(packed, batches_of([3], 0), accelerator)
    graphs = make_graphs("on", pytest.fail)
    actual = trained(packed, accelerator, graphs.compute)
    assert_equal(actual, expected)
    assert len(graphs.captured) == 4, "one graph for first microbatches, and for each length"
    assert sum(graph.runs for graph, *_ in graphs.captured.values()) == 9


def test_captured_weights_stay_at_their_addresses_after_a_reset(
    make_graphs: Make, accelerator: Accelerator
) -> None:
    packed = assemble("qwen3")
    graphs = make_graphs("on", pytest.fail)
    forward_backward(packed, batches_of([3], 0), accelerator, compute=graphs.compute)
    assert packed.fused.layers
    addresses = [product.plain.weight.data_ptr() for product in packed.fused.products]
    packed.context.go_back(packed.context.copied_state())
    for product in packed.fused.products:
        product.plain.drop_weight()
    with torch.no_grad():
        packed.fused.products[0].weights[0].fill_(0.5)
    forward_backward(packed, batches_of([3], 1), accelerator)  # as in an observed step
    assert addresses == [product.plain.weight.data_ptr() for product in packed.fused.products]
    assert packed.fused.products[0].plain.weight[0, 0] == 0.5


def test_dropped_graphs_and_weights_are_made_again(
    make_graphs: Make, accelerator: Accelerator
) -> None:
    """A run drops its graphs when its precision changes."""
    plain = assemble("qwen3")
    expected = trained(plain, accelerator, compute_microbatch)
    expected += trained(plain, accelerator, compute_microbatch)
    packed = assemble("qwen3")
    forward_backward(packed, batches_of([3], 0), accelerator)
    reports: list[str] = []
    graphs = make_graphs("auto", reports.append)
    actual = trained(packed, accelerator, graphs.compute)
    graphs.drop()
    assert not graphs.captured
    assert packed.fused.layers
    for product in packed.fused.products:
        product.plain.drop_weight()
        assert product.plain.weight is None
    actual += trained(packed, accelerator, graphs.compute)
    assert_equal(actual, expected)
    assert len(graphs.captured) == 4
    assert len(reports) == 2, "the memory is measured again"


@pytest.mark.parametrize(
    ("status", "free", "expected"),
    [
        ("auto", 4.5 + RESERVE, "on: 4.5 GiB are available, and the activations of a second"),
        ("auto", 3.5 + RESERVE, "off: 3.5 GiB are available, and the activations of a second"),
        ("auto", RESERVE - 2.0, "off: 0 MiB are available"),
        ("on", 4.0, "on"),
        ("on", 3.0, "impossible in this run: 3.0 GiB are available, and"),
    ],
)
def test_graphs_need_memory_for_a_second_microbatch(
    make_graphs: Make,
    status: str,
    free: float,
    expected: str,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `auto`, a tenth of the memory stays free. A CPU has no peak, so it is replaced."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * GIB)
    reports: list[str] = []
    graphs = make_graphs(status, reports.append, free=int(free * GIB))
    packed = assemble("gpt2")
    if expected.startswith("impossible"):
        with pytest.raises(InputError, match=re.escape(expected)):
            forward_backward(packed, batches_of([3], 0), accelerator, compute=graphs.compute)
        return
    for seed in range(2):
        forward_backward(packed, batches_of([3], seed), accelerator, compute=graphs.compute)
    assert reports == ([graphs.status] if status == "auto" else [])
    assert graphs.status.startswith(expected)
    assert len(graphs.captured) == expected.startswith("on")


def test_without_a_capture_auto_continues_and_on_stops(
    make_graphs: Make, accelerator: Accelerator
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    step = batches_of([3, 4], 0)
    expected = forward_backward(assemble("gpt2"), step, accelerator)
    reports: list[str] = []
    graphs = make_graphs("auto", reports.append, fail)
    packed = assemble("gpt2")
    actual = forward_backward(packed, step, accelerator, compute=graphs.compute)
    assert actual == expected
    assert [report[:5] for report in reports] == ["on: 7", "off: "]
    assert graphs.status == reports[-1] == "off: operation not permitted when stream is capturing"
    assert packed.gemms and not any(gemm.overwrites_weight for gemm in packed.gemms)
    required = make_graphs("on", pytest.fail, fail)
    with pytest.raises(InputError, match=r"`model\.cuda_graphs: on` is impossible.* not permitted"):
        forward_backward(assemble("gpt2"), step, accelerator, compute=required.compute)


def test_an_error_of_a_captured_graph_is_raised(
    make_graphs: Make, accelerator: Accelerator
) -> None:
    """The process must not continue without graphs, because the other ranks use theirs."""

    class Failing(Recorded):
        def replay(self) -> None:
            raise RuntimeError("out of memory")

    def fail_later(function: Callable[[], Tensor], _: str | None) -> tuple[Recorded, Tensor]:
        graph = Failing(function)
        return graph, graph.loss

    graphs = make_graphs("auto", lambda _: None, fail_later)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward_backward(assemble("gpt2"), batches_of([3], 0), accelerator, compute=graphs.compute)
    assert graphs.status.startswith("on")


def test_a_run_with_graphs_logs_the_figures_of_a_run_without(
    make_graphs: Make,
    train_here: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ["precision=bf16", "model.fused=on", "model.attention=sdpa", "train.steps=6"]
    settings += ["loss.penalty=neg_entropy", "loss.penalty_weight=0.1"]
    compared = re.compile("step$|.*loss|penalty|grad_norm")

    def figures(name: str) -> list[dict[str, Any]]:
        finished = train_here(f"run_dir={tmp_path / name}", *settings)
        assert finished.status == 0, finished.output
        return [
            {key: value for key, value in record.items() if compared.match(key)}
            for record in finished.records()
        ]

    expected = figures("plain")
    graphs: list[Recorded] = []

    def record_and_keep(*arguments: Any) -> tuple[Recorded, Tensor]:
        graph, loss = record(*arguments)
        graphs.append(graph)
        return graph, loss

    def make(_: str, report: Callable[[str], None]) -> MicrobatchGraphs:
        return make_graphs("on", report, record_and_keep)

    monkeypatch.setattr(train_accelerate, "MicrobatchGraphs", make)
    assert figures("graphs") == expected
    # The first two of 6 steps are observed. A step has two microbatches.
    assert sum(graph.runs for graph in graphs) == 8
