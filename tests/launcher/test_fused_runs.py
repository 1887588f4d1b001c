"""`model.fused` end to end, on the CPU: the same training as unfused, saved, resumed, exported, proven and refused alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.kill_resume import differences
from pretrain.model import huggingface as model
from pretrain.model.fused.arithmetic import StackedProduct
from pretrain.model.fused.layers import NormMLPAdd
from pretrain.optimizer.adamw import ExactAdamW
from tests.launcher.test_weights import masters

GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | dict.fromkeys(
    ("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0
)
GPT2 |= dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
OFF = "nothing: model.fused is off"


def audit_of(run: Any) -> dict[str, Any]:
    return json.loads((run.run_dir / "audit.json").read_text())


def norms_of(run: Any) -> list[float]:
    return [record["gradient_norm"] for record in run.records() if "loss" in record]


def held_out_of(run: Any) -> list[float]:
    return [record["held_out_loss"] for record in run.records() if "held_out_loss" in record]


def without_steps_after(step: int, run: Any, copy: Path) -> str:
    """A copy of a run as it was when its checkpoint of `step` was the newest, as the argument `run_dir`."""
    shutil.copytree(run.run_dir, copy)
    shutil.rmtree(copy / "final")
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return f"run_dir={copy}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused")


@pytest.fixture(scope="module")
def recipe_for(recipe_for: Callable) -> Callable[[Path], dict[str, Any]]:
    """The small recipe, its layers fused: on a CPU that is to be asked for."""

    def recipe(run_dir: Path) -> dict[str, Any]:
        plain = recipe_for(run_dir)
        return plain | {"model": plain["model"] | {"fused": "on"}}

    return recipe


@pytest.fixture(scope="module")
def launch(start_here: Callable, recipe_for: Callable, folder: Path) -> Callable[..., Any]:
    """Train in the run folder `name` and come to a good end."""

    def run(name: str, *arguments: str, **changes: Any) -> Any:
        finished = start_here(recipe_for(folder / name) | changes, folder, *arguments)
        assert finished.status == 0, finished.output
        return finished

    return run


@pytest.fixture(scope="module")
def fused(launch: Callable) -> Any:
    return launch("fused")


@pytest.fixture(scope="module")
def unfused(launch: Callable) -> Any:
    return launch("unfused", "model.fused=off")


@pytest.fixture(scope="module")
def in_bf16(launch: Callable) -> Any:
    """FP32 weights, whose working copies the microbatches of a step share."""
    return launch("in_bf16", "precision=bf16")


# ── The same training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fused_run_is_the_unfused_one_within_rounding(fused: Any, unfused: Any) -> None:
    assert audit_of(fused)["fused"] == "2 of 2 layers" and audit_of(unfused)["fused"] == OFF
    assert fused.losses() == pytest.approx(unfused.losses(), abs=1e-5)
    assert fused.losses()[-1] < 0.8 * fused.losses()[0]
    assert norms_of(fused) == pytest.approx(norms_of(unfused), rel=1e-5)
    assert len(held_out_of(fused)) == 3 and held_out_of(fused) == pytest.approx(held_out_of(unfused), abs=1e-5)


def test_the_exported_model_is_the_checkpoints_and_the_unfused_runs(fused: Any, unfused: Any) -> None:
    one, other = (AutoModelForCausalLM.from_pretrained(run.run_dir / "final", dtype=torch.float32) for run in (fused, unfused))
    saved = {
        name: tensor
        for file in (fused.run_dir / "checkpoints" / "step-00000012").glob("model-*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert saved.keys() == dict(one.named_parameters()).keys()
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, saved[name]), name
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_files_of_stacked_parameters_are_no_larger_than_those_of_lone_ones(fused: Any, unfused: Any) -> None:
    """A view saved with the whole storage behind it would come three times."""
    one, other = (
        {file.relative_to(run.run_dir): file.stat().st_size for file in run.run_dir.rglob("*.safetensors")}
        for run in (fused, unfused)
    )
    assert one == other and len(one) == 3 * 2 + 1  # three checkpoints and the exported model


def off_ties(master: Tensor) -> Tensor:
    """FP32 weights that do not lie halfway between two BF16 numbers: those are rounded to even for computing, and away from zero
    where they are exact BF16 weights."""
    bits = master.detach().view(torch.int32)
    return (bits + ((bits & 0xFFFF) == 0x8000)).view(torch.float32)


@pytest.fixture
def no_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are moved off ties as they are drawn and after each step."""
    build, step = model.build, ExactAdamW.step

    def build_off_ties(*args: Any, **options: Any) -> PreTrainedModel:
        hf = build(*args, **options)
        for parameter in hf.parameters():
            parameter.data = off_ties(parameter)
        return hf

    def step_off_ties(optimizer: ExactAdamW, *update: Any, **options: Any) -> None:
        step(optimizer, *update, **options)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            optimizer.set_master(parameter, off_ties(optimizer.master(parameter)))

    monkeypatch.setattr(model, "build", build_off_ties)
    monkeypatch.setattr(ExactAdamW, "step", step_off_ties)


@pytest.mark.usefixtures("no_ties")
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_fp32_and_exact_bf16_weights_walk_one_trajectory_bit_for_bit(kind: str, launch: Callable) -> None:
    """Four microbatches a step. Norms and biases soon leave one and zero, and are rounded for computing as all weights are."""
    changes = {"model": {"config": GPT2, "fused": "on"}} if kind == "gpt2" else {}
    one, other = (launch(f"{kind}-{w}", "precision=bf16", f"weights={w}", **changes) for w in ("fp32", "bf16_exact"))
    assert {audit_of(run)["fused"] for run in (one, other)} == {"2 of 2 layers"}
    assert one.losses() == other.losses() and len(one.losses()) == 12
    assert norms_of(one) == norms_of(other)
    assert held_out_of(one) == held_out_of(other)
    mine, theirs = masters(one.run_dir), masters(other.run_dir)
    assert mine.keys() == theirs.keys()
    for name, master in mine.items():
        assert torch.equal(master, theirs[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_neither_recomputation_nor_evaluation_changes_a_bit(precision: str, fused: Any, in_bf16: Any, launch: Callable) -> None:
    other = launch(
        f"recomputed-{precision}", f"precision={precision}", "model.gradient_checkpointing=full", "evaluate.every=null"
    )
    run = fused if precision == "fp32" else in_bf16
    assert audit_of(other)["fused"] == "2 of 2 layers"
    assert (other.losses(), norms_of(other)) == (run.losses(), norms_of(run))


def test_it_agrees_with_plain_transformers_and_checking_changes_nothing(fused: Any, launch: Callable) -> None:
    checked = launch("checked", "parity=on")
    found = audit_of(checked)["parity"]
    assert found["failures"] == [] and found["plain"]["least_cosine"] > 1 - 1e-6
    assert differences(fused.run_dir, checked.run_dir) == []


def test_samples_are_drawn_from_a_fused_model_as_from_an_unfused_one(
    launch: Callable, recipe_for: Callable, folder: Path
) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w60").save_pretrained(folder / "tokenizer")
    data = recipe_for(folder)["data"] | {"tokenizer": str(folder / "tokenizer")}
    changes = {"data": data, "train": {"steps": 2}, "evaluate": {"samples": ["w1 w2", ""], "sample_tokens": 8}}
    said = [launch(f"samples-{f}", f"model.fused={f}", **changes).output for f in ("on", "off")]
    samples = [each.partition("sample after")[2].partition("\n\n")[0] for each in said]
    assert samples[0].count("│ w") == 2 and samples[0] == samples[1]


def test_the_plan_on_a_cpu_does_not_depend_on_it(start_here: Callable, recipe_for: Callable, folder: Path) -> None:
    on, off = (start_here(recipe_for(folder / "planned"), folder, "--plan", f"model.fused={f}") for f in ("on", "off"))
    assert on == off and on.status == 0 and "12 steps" in on.output and not on.run_dir.exists()


# ── Resumed ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_run_resumed_in_the_middle_is_the_uninterrupted_one(
    precision: str, fused: Any, in_bf16: Any, launch: Callable, folder: Path
) -> None:
    run, copy = fused if precision == "fp32" else in_bf16, folder / f"resumed-{precision}"
    resumed = launch("resumed", without_steps_after(8, run, copy), f"precision={precision}")
    assert "at step 8" in resumed.output
    assert differences(run.run_dir, copy) == []


@pytest.mark.parametrize("then", ["on", "off"])
def test_a_checkpoint_of_a_fused_run_is_an_unfused_ones_and_the_other_way_round(
    then: str, fused: Any, unfused: Any, launch: Callable, folder: Path
) -> None:
    """What is fused is no part of a training's identity, as the kind of attention is not."""
    begun = unfused if then == "on" else fused
    continued = launch("either", without_steps_after(4, begun, folder / f"then_{then}"), f"model.fused={then}")
    assert "at step 4" in continued.output and "has changed" not in continued.output
    assert audit_of(continued)["fused"] == (OFF if then == "off" else "2 of 2 layers")
    assert continued.losses() == pytest.approx(unfused.losses(), abs=1e-5)


# ── What the audit says, and what it refuses ──────────────────────────────────────────────────────────────────────────────────


def test_the_audit_names_every_linear_and_the_product_that_it_is_part_of(fused: Any, unfused: Any) -> None:
    entries = {entry["name"]: entry for entry in audit_of(fused)["products"]}
    assert entries.keys() == {entry["name"] for entry in audit_of(unfused)["products"]}
    within = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    within |= {"up_proj": "gate_up_proj"}
    for name, entry in entries.items():
        stem, last = name.rpartition(".")[::2]
        assert (entry["requested"], entry["effective"]) == ("fp32", "fp32")
        if name == "lm_head":
            assert entry["module"] == "LossHead" and "part_of" not in entry
        else:
            assert entry["module"] == "fused Linear" and entry["part_of"] == f"{stem}.{within.get(last, last)}"


@pytest.mark.parametrize(("rate", "said"), [(0.0, "2 of 2 layers"), (0.1, "0 of 2 layers; 2 not: has dropout")])
def test_gpt2_is_fused_where_it_has_no_dropout(rate: float, said: str, launch: Callable) -> None:
    changes = {"model": {"config": GPT2 | {"resid_pdrop": rate}}, "train": {"steps": 4}}
    on, off = (launch(f"gpt2-{rate}-{f}", f"model.fused={f}", **changes) for f in ("on", "off"))
    assert audit_of(on)["fused"] == said and said in on.output
    assert on.losses() == (pytest.approx(off.losses(), abs=1e-5) if rate == 0 else off.losses())


def test_emulated_products_are_not_fused_whatever_is_kept_in_bf16(launch: Callable) -> None:
    emulated = ("precision=current", "fp8_config.on_unsupported=emulate", "fp8_config.keep_bf16_layers.first=1")
    run = launch("emulated", *emulated, "model.fused=auto", train={"steps": 1}, evaluate={}, schedule={})
    assert audit_of(run)["fused"] == "nothing: emulated products are computed one by one"


def test_what_cannot_be_fused_is_refused_where_it_is_asked_for(
    start_here: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    said = start_here(recipe_for(tmp_path / "run"), tmp_path, "precision=current", "fp8_config.on_unsupported=emulate")
    assert said.status == 2 and "`model.fused: on`: emulated products are computed one by one" in said.output


def test_a_cpu_fuses_nothing_by_itself(launch: Callable) -> None:
    run = launch("auto", "model.fused=auto", train={"steps": 1}, evaluate={}, schedule={})
    assert audit_of(run)["fused"] == "nothing: it gains nothing on a CPU; model.fused: on does it all the same"


def in_fp32(product: StackedProduct, x: Tensor, residual: Tensor | None = None) -> Tensor:
    weight = product.weights.matrix(torch.float32)
    y = (x.float() @ weight.t()).to(x.dtype)
    return y if residual is None else y + residual


def test_a_product_that_multiplies_in_another_dtype_is_refused(
    start_here: Callable, recipe_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackedProduct, "forward", in_fp32)
    said = start_here(recipe_for(tmp_path / "run"), tmp_path, "precision=bf16")
    assert said.status == 2 and "14 of 15 modules" in said.output
    assert "model.layers.0.self_attn.q_proj (bfloat16 x float32)" in said.output  # forward in one, backward in the other


def test_linears_that_a_fused_layer_leaves_out_are_refused(
    start_here: Callable, recipe_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        NormMLPAdd, "apply", staticmethod(lambda arithmetic, norm, below, kind, above, x, residual, *_: x + residual)
    )
    said = start_here(recipe_for(tmp_path / "run"), tmp_path)
    assert said.status == 2 and "6 of 15 modules" in said.output and "model.layers.0.mlp.gate_proj (not run)" in said.output
