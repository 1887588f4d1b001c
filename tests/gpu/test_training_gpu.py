"""Training on CUDA: packed and compiled in BF16 against plain transformers in FP32, the memory search, and the launcher."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

from packing.arrow import Pack
from packing.batch import BatchStream, Microbatch, build_microbatch
from packing.order import Mixture, Order
from packing.settings import DataSettings
from packing.store import open_packs
from pretrain.model import gpu_attention
from pretrain.model import huggingface as model
from pretrain.model.packed import PackedLanguageModel, forward_backward, inputs_of
from pretrain.model.wrapping import wrap_layers
from pretrain.optimizer.adamw import build_optimizer, clip_coefficient, gradient_norm, named_state
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.run.trials import largest_that_fits
from pretrain.settings.recipe import LossSettings, ModelSettings, OptimizerSettings
from pretrain.verify import audit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH, VOCABULARY = 256, 503
QWEN3 = {"model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
SETTINGS = ModelSettings(config=QWEN3 | HEADS)
DEVICE = torch.device("cuda")


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="no")
    AcceleratorState._reset_state(reset_partial_state=True)


def build(*, compile_layers: bool) -> PackedLanguageModel:
    """FP32 weights under BF16 working copies, attention by torch's variable-length kernel."""
    torch._dynamo.reset()
    config = model.load_config(SETTINGS)
    hf = model.build(SETTINGS, config, weights=torch.float32, seed=1, device=DEVICE, backend="packed_varlen")
    packed = PackedLanguageModel(hf, "packed_varlen", LossSettings(chunk=512))
    wrap_layers(packed, SETTINGS, cast_to=torch.bfloat16, compile_layers=compile_layers)
    return packed


@pytest.fixture
def compiled() -> PackedLanguageModel:
    return build(compile_layers=True)


@pytest.fixture
def packed() -> PackedLanguageModel:
    return build(compile_layers=False)


def pack_of(documents: int, seed: int) -> Pack:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), documents - 1, replace=False))
    lengths = np.diff([0, *cuts, LENGTH]).astype(np.int32)
    return Pack(rng.integers(VOCABULARY, size=LENGTH).astype(np.uint32), lengths)


def microbatch_of(*packs: Pack) -> Microbatch:
    return build_microbatch(packs, mask_boundaries=True)


def plain_loss(plain: PreTrainedModel, packs: list[Pack]) -> torch.Tensor:
    """Summed next-token loss of the unmodified FP32 forward, one document at a time."""
    total = torch.zeros((), device=DEVICE)
    for pack in packs:
        for piece in np.split(pack.input_ids.astype(np.int64), np.cumsum(pack.lengths)[:-1]):
            if len(piece) > 1:
                ids = torch.from_numpy(piece).to(DEVICE)[None]
                total = total + torch.nn.functional.cross_entropy(
                    plain(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"
                )
    return total


def test_packed_compiled_bf16_agrees_with_plain_fp32_on_separate_documents(compiled: PackedLanguageModel) -> None:
    packs = [pack_of(documents, seed=documents) for documents in (1, 7, 20)]
    loss = compiled(**inputs_of(microbatch_of(*packs), DEVICE))
    loss.backward()
    plain = AutoModelForCausalLM.from_config(compiled.hf.config, attn_implementation="eager", dtype=torch.float32).to(DEVICE)
    plain.load_state_dict(compiled.hf.state_dict())
    expected = plain_loss(plain, packs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    for (name, ours), reference in zip(compiled.hf.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        if ours.dim() == 2:
            assert torch.cosine_similarity(ours.grad.flatten(), reference.grad.flatten(), dim=0) > 0.99, name


def test_nothing_is_compiled_after_the_second_batch_however_many_documents_come(compiled: PackedLanguageModel) -> None:
    counters.clear()
    graphs = []
    for documents in (3, 40, 1, 90, 17, 200):
        compiled(**inputs_of(microbatch_of(pack_of(documents, seed=documents)), DEVICE)).backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1:] == [graphs[1]] * 5


def test_the_audit_sees_bf16_in_every_linear_from_fp32_weights(compiled: PackedLanguageModel) -> None:
    inputs = inputs_of(microbatch_of(pack_of(5, seed=5)), DEVICE)
    active = ActivePrecision("bf16", PRECISIONS["bf16"], "torch", LowPrecisionSettings())
    entries = audit.observe(compiled, lambda: compiled(**inputs), active, {})
    assert len(entries) == 2 * 7 + 1
    assert {(entry["stored"], entry["effective"]) for entry in entries} == {("float32", "bf16")}


@pytest.fixture
def memory_for() -> Iterator[Callable[[int], None]]:
    """Let this process have as many bytes as it holds now and so many more."""

    def limit(further: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + further) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def trial(packs: int) -> Microbatch:
    return microbatch_of(*[pack_of(4, seed) for seed in range(packs)])


def largest(packed: PackedLanguageModel, accelerator: Accelerator, sizes: list[int], further: int = 2**33) -> int | None:
    """Of `sizes`, in so many bytes beside those that this process holds."""
    options = {"usable": torch.cuda.memory_reserved() + further, "most_reserved": torch.cuda.max_memory_reserved}
    return largest_that_fits(packed, accelerator, sizes, trial, multiple_of=1, **options)


def test_the_largest_microbatch_is_found_in_the_memory_that_there_is(
    packed: PackedLanguageModel, accelerator: Accelerator, memory_for: Callable
) -> None:
    assert largest(packed, accelerator, [1, 4]) == 4
    memory_for(256 * 2**20)
    # 1,024 packs hold 0.5 GiB in each norm's input alone
    assert largest(packed, accelerator, [1, 4, 512, 1024], 256 * 2**20) == 4
    assert all(not parameter.grad.any() for parameter in packed.parameters())
    packed(**inputs_of(trial(4), DEVICE)).backward()  # what was found runs, with nothing left over from what failed


def test_a_model_for_which_there_is_no_memory_is_refused(
    packed: PackedLanguageModel, accelerator: Accelerator, memory_for: Callable
) -> None:
    memory_for(32 * 2**20)
    assert largest(packed, accelerator, [1024], 32 * 2**20) is None


def test_pinned_batches_train_the_model_with_fused_adamw(
    packed: PackedLanguageModel, accelerator: Accelerator, small_packs: Path
) -> None:
    """Ten steps over packs in which each document counts upwards: learnt at once, if data and updates arrive whole."""
    packs = open_packs(DataSettings(packs=small_packs, length=32), "train")
    order = Order(Mixture.alone(len(packs)), 16, seed=1)
    stream = BatchStream(packs, order, microbatch=8, rank=0, world_size=1, mask_boundaries=True, pin_memory=True)
    unpinned = BatchStream(packs, order, microbatch=8, rank=0, world_size=1, mask_boundaries=True).step(0)
    adamw = build_optimizer(packed, OptimizerSettings(learning_rate=3e-3), exact=False)
    adamw.materialise()
    moments = named_state(adamw, packed.hf)
    assert {tensor.device.type for tensor in moments.values()} == {"cuda"}
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    losses = []
    with stream.steps(0, 10) as steps:
        for number, batches in enumerate(steps):
            assert all(each.input_ids.is_pinned() and each.cu_seqlens.is_pinned() for each in batches.microbatches)
            if number == 0:
                pairs = zip(batches.microbatches, unpinned.microbatches, strict=True)
                assert all(torch.equal(a.labels.to(DEVICE, non_blocking=True).cpu(), b.labels) for a, b in pairs)
            losses.append(forward_backward(packed, batches, accelerator).item())
            adamw.step(clip_coefficient=clip_coefficient(gradient_norm(packed.parameters()), 1.0))
            adamw.zero_grad(set_to_none=True)
    assert losses[-1] < 0.8 * losses[0]
    assert all(state["step"] == 10 for state in adamw.state.values())
    assert all(tensor.isfinite().all() and tensor.any() for tensor in moments.values())


def test_the_launcher_trains_on_a_gpu_in_bf16_without_recompiling(train: Callable, small_recipe: dict[str, Any]) -> None:
    recipe = small_recipe | {"batch": {"tokens": 256, "microbatch": "auto"}}
    recipe["model"]["config"] |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    finished = train(recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"])
    assert finished.status == 0, finished.output
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["recompiles"] == 0
    assert summary["held_out_loss"] < finished.losses()[0]
    found = json.loads((finished.run_dir / "audit.json").read_text())
    library = importlib.util.find_spec("transformer_engine") is not None
    alone = "packed_cudnn" if library else "packed_varlen"
    kind = alone if gpu_attention.flash_obstacle(64) else "packed_fa4"
    assert (found["precision"], found["attention"]["kind"], found["compiled"]) == ("bf16", kind, "nothing")
    assert found["fused"].startswith("2 of 2 layers")
    assert {(each["stored"], each["effective"]) for each in found["products"]} == {("float32", "bf16")}


@pytest.mark.parametrize("precision", [name for name, recipe in PRECISIONS.items() if recipe.quantized])
def test_the_launcher_trains_in_low_precision(precision: str, train: Callable, low_precision_recipe: dict[str, Any]) -> None:
    """On Transformer Engine where the GPU has the recipe, else emulated; in pieces, layers recomputed, and the head."""
    low_precision_recipe["model"]["gradient_checkpointing"] = 2
    recipe = low_precision_recipe | {"parity": "on", "precision": precision}
    finished = train("fp8_config.scope=linear+head", recipe=recipe, launch=["--config_file", "accelerate_configs/bf16.yaml"])
    assert finished.status == 0, finished.output
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["recompiles"] == 0 and summary["held_out_loss"] < finished.losses()[0]
    found = json.loads((finished.run_dir / "audit.json").read_text())
    assert found["backend"] in ("transformer_engine", "emulation") and not found["parity"]["failures"]
    assert found["parity"]["products_compared"] >= 3 * 2 * 4, "every product of every layer, stacked or not"
    assert {each["effective"] for each in found["products"]} == {precision}


@pytest.mark.parametrize(
    ("before", "after", "keep"), [("delayed", "bf16", "[]"), ("bf16", "delayed", "[down_proj]"), ("current", "delayed", "[]")]
)
def test_the_launcher_changes_its_precision_on_the_way(
    before: str, after: str, keep: str, train: Callable, low_precision_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Fused on Transformer Engine; the whole run and one that is resumed at the switch agree as far as a GPU repeats itself."""
    schedule = f"precision=[{{until: 0.5, use: {before}}}, {{use: {after}}}]"
    recipe = low_precision_recipe | {"parity": "on", "weights": "bf16_exact", "checkpoint": {"every": 6, "keep": 3}}
    launch = ["--config_file", "accelerate_configs/bf16.yaml"]
    options = (schedule, f"fp8_config.keep_bf16={keep}")
    whole = train(*options, recipe=recipe, launch=launch)
    assert whole.status == 0, whole.output
    assert [step["precision"] for step in whole.records() if "loss" in step] == [before] * 6 + [after] * 6
    assert whole.losses()[-1] < 0.5 * whole.losses()[0]
    found = json.loads((whole.run_dir / "audit.json").read_text())
    assert found["fused"] == "2 of 2 layers" and found["effective"] == after
    for name, precision in found["precisions"].items():
        assert (
            precision["backend"] == ("torch" if name == "bf16" else "transformer_engine") and not precision["parity"]["failures"]
        )
        low = {each["name"].rpartition(".")[2] for each in precision["products"] if each["effective"] == name != "bf16"}
        assert ("down_proj" in low) == (name != "bf16" and keep == "[]"), name
    checkpoint = whole.run_dir / "checkpoints" / "step-00000006"
    again = train(*options, f"run_dir={tmp_path / 'again'}", "--resume", str(checkpoint), recipe=recipe, launch=launch)
    assert again.status == 0, again.output
    assert again.losses() == pytest.approx(whole.losses()[6:], rel=2e-2)
