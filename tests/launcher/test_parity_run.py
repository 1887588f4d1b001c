"""`parity` end to end: the launcher holds its step 0 against plain transformers, writes it down, and trains or stops."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from packing.arrow import Pack, PackWriter
from pretrain.compare.comparison import RunComparison
from pretrain.compare.page_differences import audits
from pretrain.metrics.run_record import read_run
from pretrain.settings.config import load_recipe
from tests.conftest import PACK_LENGTH, VOCABULARY, over

ROOT = Path(__file__).parents[2]

# Plain under eager attention; under any other, one layer's output is half as large again. So would a wrong kernel be.
BROKEN_UNLESS_PLAIN = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        if config._attn_implementation != "eager":
            self.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
"""


@pytest.fixture
def short_recipe(small_recipe: dict[str, Any]) -> dict[str, Any]:
    return small_recipe | {"train": {"steps": 2}, "schedule": {}, "evaluate": {}, "checkpoint": {"at_end": False}}


@pytest.fixture
def launch(train_here: Callable, short_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., tuple[str, Path]]:
    """Run the launcher in the run folder `name`; what it printed, and that folder."""

    def run(name: str, *arguments: str, status: int = 0) -> tuple[str, Path]:
        finished = train_here(*arguments, recipe=short_recipe | {"run_dir": str(tmp_path / name)})
        assert finished.status == status, finished.output
        return finished.output, finished.run_dir

    return run


def parity_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "audit.json").read_text())["parity"]


def losses_of(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def test_a_run_that_agrees_writes_it_down_and_trains_as_it_would_have_unchecked(launch: Callable) -> None:
    (said_nothing, unchecked), (said, checked) = launch("unchecked", "parity=off"), launch("checked", "parity=on")
    assert "parity with plain transformers" in said and "parity" not in said_nothing
    assert "parity" not in json.loads((unchecked / "audit.json").read_text())
    found = parity_of(checked)
    assert found["failures"] == [] and found["source"] == "this run"
    assert abs(found["plain"]["loss"] - found["plain"]["reference_loss"]) < 1e-5 and found["plain"]["least_cosine"] > 1 - 1e-6
    assert len(losses_of(checked)) == 2 and losses_of(checked) == losses_of(unchecked)


def test_an_emulated_precision_is_checked_product_by_product_and_keeps_its_scales(launch: Callable) -> None:
    emulated = ["precision=delayed", "fp8_config.on_unsupported=emulate", "model.config.vocab_size=64"]
    (_, unchecked), (_, checked) = launch("unchecked", *emulated, "parity=off"), launch("checked", *emulated, "parity=on")
    found = parity_of(checked)
    assert found["failures"] == [] and found["products"]["compared"] == 2 * 7 * 3
    assert found["plain"]["least_cosine"] > 0.995 > found["quantized"]["least_cosine"], "each has what it can bear"
    assert losses_of(checked) == losses_of(unchecked), "the check leaves no trace in scales and history"


def test_auto_leaves_a_short_run_alone_and_says_so_in_one_line(launch: Callable) -> None:
    said, run_dir = launch("short", "model.config.intermediate_size=80")
    (line,) = [line for line in said.splitlines() if "parity" in line]
    assert re.search(r"parity left out: it would cost \d+% of this short run; `parity=on` checks it all the same", line)
    assert parity_of(run_dir)["left_out"] in line


def test_auto_checks_once_and_the_next_run_takes_what_was_kept(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.run.parity.SMALL_SHARE", 1e9)
    changed = ["model.config.intermediate_size=96"]  # of a shape that no other test has checked
    (said, first), (said_again, second) = launch("first", *changed), launch("second", *changed)
    assert "parity with plain transformers" in said and parity_of(first)["source"] == "this run"
    assert "parity left out: the same code has passed on this device before" in said_again
    found = parity_of(second)
    assert found["source"].startswith("kept from ") and found["plain"] == parity_of(first)["plain"]
    assert losses_of(first) == losses_of(second)
    shown = [each.rows["parity"] for each in audits(RunComparison.over([read_run(first), read_run(second)]))]
    assert shown == ["passed, this run", f"passed, {found['source']}"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_text_in_which_a_fault_would_not_show_says_nothing_of_others(
    alone: bool, launch: Callable, short_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents alone in their packs, and the same token everywhere."""
    monkeypatch.setattr("pretrain.run.parity.SMALL_SHARE", 1e9)
    with PackWriter(tmp_path / "packs", PACK_LENGTH) as writer:
        for number in range(16):
            tokens = (number + np.arange(PACK_LENGTH)) % VOCABULARY if alone else np.zeros(PACK_LENGTH)
            lengths = [PACK_LENGTH] if alone else [PACK_LENGTH // 2] * 2
            writer.add("train", Pack(tokens.astype(np.uint32), np.array(lengths, dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    short_recipe["data"] = short_recipe["data"] | {"packs": str(tmp_path / "packs")}
    for name in ("first", "second"):
        said, run_dir = launch(name, f"model.config.intermediate_size={112 + 8 * alone}")
        assert "parity with plain transformers" in said and parity_of(run_dir)["source"] == "this run"


def test_a_first_step_without_labels_is_said_to_be_nothing_to_compare(
    launch: Callable, short_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with PackWriter(tmp_path / "packs", PACK_LENGTH) as writer:
        for number in range(16):
            tokens = (number + np.arange(PACK_LENGTH)) % VOCABULARY
            lengths = np.ones(PACK_LENGTH) if number else [PACK_LENGTH]  # all are documents of one token but the first
            writer.add("train", Pack(tokens.astype(np.uint32), np.array(lengths, dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    short_recipe["data"] = short_recipe["data"] | {"packs": str(tmp_path / "packs")}
    said, run_dir = launch(
        "single", "parity=on", "precision=delayed", "fp8_config.on_unsupported=emulate", "model.config.vocab_size=64"
    )
    assert "nothing to compare" in said and parity_of(run_dir)["compared"]["tokens"] == 0


@pytest.mark.parametrize(("old", "meaning"), [("true", "on"), ("false", "off")])
def test_true_and_false_of_older_recipes_mean_on_and_off(old: str, meaning: str) -> None:
    assert load_recipe(ROOT / "recipes" / "smoke.yaml", [f"parity={old}"]).parity == meaning
    assert load_recipe(ROOT / "recipes" / "smoke.yaml", [f"parity={meaning}"]).parity == meaning


def test_a_run_that_would_train_something_else_stops_before_its_first_step(
    launch: Callable, short_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "with_code"
    shape = dict(short_recipe["model"]["config"])
    AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape)).save_pretrained(folder)
    (folder / "modeling_own.py").write_text(BROKEN_UNLESS_PLAIN)
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    short_recipe["model"] = {"source": str(folder), "trust_remote_code": True}

    said, run_dir = launch("broken", "parity=on", status=3)
    assert "halted: step 0: parity" in said
    assert "model.layers.1.mlp." in said, "the table names what lies in the broken layer"
    assert parity_of(run_dir)["failures"], "and the audit keeps it"
    metrics = run_dir / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""


def keys_of(found: object, at: str = "") -> set[str]:
    """The dotted keys of objects in objects, lists left out."""
    return {at}.union(*(keys_of(value, f"{at}.{key}") for key, value in found.items())) if isinstance(found, dict) else {at}


def test_a_run_that_goes_on_keeps_what_its_fresh_start_found_and_says_so(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["parity=on", "train.steps=3", "checkpoint.every=1", "precision=current", "fp8_config.on_unsupported=emulate"]
    _, run_dir = launch("run", *arguments)
    fresh = json.loads((run_dir / "audit.json").read_text())
    for step in (2, 1):  # once more, from what the first resume wrote
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step + 1:08}", ignore_errors=True)
        (run_dir / "summary.json").unlink()  # as before its end
        said, _ = launch("run", *arguments)
        assert f"at step {step}" in said and "parity with plain transformers" not in said
        found = json.loads((run_dir / "audit.json").read_text())
        when = f"before the run's first step; its start from step {step} did not look again"
        assert found["parity"] == fresh["parity"] | {"when": when} and fresh["parity"]["failures"] == []
        assert keys_of(found) - keys_of(fresh) == {".parity.when"} and keys_of(fresh) <= keys_of(found)
        assert found["confirmed_in_step"] == step + 1
    for _ in range(2):  # the second is as if the first was killed in its export: no step is left, which would confirm it again
        (run_dir / "summary.json").unlink()
        launch("run", *arguments, "checkpoint.at_end=true")
        assert json.loads((run_dir / "audit.json").read_text())["confirmed_in_step"] == 3
    monkeypatch.chdir(run_dir / "checkpoints")
    launch("run", *arguments, "--resume", "step-00000001")
    assert parity_of(run_dir) == found["parity"]


@pytest.mark.parametrize(
    "audit", [None, "{", '{"parity": 3, "effective": "fp32"}', '{"effective": "bf16", "parity": {"failures": []}}']
)
def test_a_run_that_goes_on_without_a_record_of_its_parity_says_so(audit: str | None, launch: Callable) -> None:
    """None, damaged, strange, and that of another precision."""
    arguments = ["train.steps=2", "checkpoint.every=1", "parity=off"]
    _, run_dir = launch("run", *arguments)
    (run_dir / "audit.json").write_text(audit) if audit else (run_dir / "audit.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "step-00000002", ignore_errors=True)
    (run_dir / "summary.json").unlink()  # as before its end
    launch("run", *arguments[:2], "parity=on")
    why = f"it is checked before a run's first step only, and {run_dir}/audit.json has no record of that for fp32"
    assert parity_of(run_dir) == {"source": "this run", "left_out": why}


def test_a_branch_is_said_not_to_be_held_unless_the_same_code_was(launch: Callable, tmp_path: Path) -> None:
    changed = ["model.config.intermediate_size=136", "train.steps=3"]  # of a shape that no other test has checked
    launch("first", *changed, "parity=off", "checkpoint.every=2")
    begins = [*changed, f"train.begin_with={tmp_path}/first/checkpoints/step-00000002"]
    for parity in ("auto", "on"):
        said, run_dir = launch(f"second-{parity}", *begins, f"parity={parity}")
        (line,) = [line for line in said.splitlines() if line.startswith("parity")]
        said = "parity left out: it is checked at step 0 only, and this run begins with the weights of step 2; to check the same"
        assert line.startswith(said) and "`parity=on`, `train.steps=1` and another `run_dir`" in line
        assert parity_of(run_dir) == {"source": "this run", "left_out": line.removeprefix("parity left out: ")}
    launch("alone", *over(changed, "parity=on", "train.steps=1"))  # which is what the line tells to do
    said, run_dir = launch("third", *begins, "parity=on")
    assert "parity left out: the same code has passed on this device before" in said
    assert parity_of(run_dir)["source"].startswith("kept from ") and parity_of(run_dir)["failures"] == []
    said, run_dir = launch("none", *begins, "parity=off")
    assert "parity" not in said and "parity" not in json.loads((run_dir / "audit.json").read_text())


def test_a_mixture_whose_layers_are_all_dense_trains_whatever_experts_it_names(launch: Callable) -> None:
    experts = ["model.config.model_type=qwen3_moe", "model.config.num_experts=4", "model.config.decoder_sparse_step=1"]
    _, run_dir = launch("dense", *experts, "model.config.mlp_only_layers=[0, 1]", "parity=on", "checkpoint.at_end=true")
    assert parity_of(run_dir)["failures"] == [] and np.isfinite(losses_of(run_dir)).all()
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final")
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (4, 8)
    assert not any("expert" in name for name, _ in model.named_parameters())
