"""Nothing that is not ours is written over or deleted, and what is no file of ours is refused before a model is built."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foundation.errors import InputError
from packing.arrow import PackWriter
from pretrain.model.huggingface import check_export, export
from tests.bad_input.conftest import contents
from tests.fuzz.damage import STAND_INS, stand_in


def write_thesis(folder: Path) -> None:
    """Somebody's folder, with names in it that a run uses too."""
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "thesis.tex").write_text("years of work")
    (folder / ".download.partial").write_text("hours of waiting")
    (folder / "metrics.jsonl").write_text('{"mine": 1}\n')


@pytest.mark.parametrize("plan", [["--plan"], []])
def test_a_run_folder_that_is_somebody_elses_is_refused_and_left_as_it_is(plan, small_recipe, refusal):
    folder = Path(small_recipe["run_dir"])
    write_thesis(folder)
    said = refusal(*plan)
    assert re.search(r"run: holds .* and is no run folder: it has no config.yaml of a run; set another `run_dir`", said)
    (folder / "config.yaml").write_text("name: another program's\nmodel: {}\n")
    assert "its config.yaml is not a run's" in refusal(*plan)
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")
    assert "config.yaml: is no file, which a run would write there" in refusal(*plan)
    assert not (folder / ".lock").exists()


def test_an_empty_run_dir_and_the_current_folder_are_refused(refusal, small_recipe, monkeypatch):
    assert all("`run_dir=` is empty; write a value" in refusal(given) for given in ("run_dir=", "run_dir= "))
    named = small_recipe["run_dir"]
    small_recipe["run_dir"] = " "
    assert "`run_dir` is empty; name a folder" in refusal()
    small_recipe["run_dir"] = named
    monkeypatch.chdir(Path(__file__).parent)
    assert re.search(r"^\.: holds .* and is no run folder", refusal("run_dir=."))


def test_a_leftover_of_a_killed_run_goes_and_a_folder_of_that_name_blocks_nothing(launch, small_recipe):
    folder = Path(small_recipe["run_dir"])
    (folder / ".config.yaml.17.partial").mkdir(parents=True)
    (folder / ".summary.json.17.partial").write_text("half of it")
    (folder / "matrix.json").write_text("{}")
    small_recipe["train"]["steps"] = 3
    assert launch("checkpoint.at_end=false", "evaluate.every=null").status == 0
    assert (folder / ".config.yaml.17.partial").is_dir() and not (folder / ".summary.json.17.partial").exists()
    assert launch("--plan", "checkpoint.at_end=false", "evaluate.every=null").status == 0, "it is a run's now"


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_recipe_that_is_no_file_is_refused(kind, launcher_here, tmp_path):
    stand_in(tmp_path / "recipe.yaml", kind)
    status, out, said = launcher_here(str(tmp_path / "recipe.yaml"), "--plan")
    assert status == 2 and out == "" and said.count("error: ") == 1 and said.count("\n") == 1
    assert re.search(r"recipe.yaml: (cannot be read|no such file)", said)


def test_an_unfinished_folder_of_packs_that_is_somebody_elses_is_refused_and_kept(tmp_path):
    hidden = tmp_path / ".packs.partial"
    hidden.mkdir()
    (hidden / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"\.packs\.partial: .*thesis\.tex is not ours; move it away"):
        PackWriter(tmp_path / "packs", 32)
    assert contents(hidden) == {"thesis.tex": b"years of work"}


# ── What a finished run exports ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    from transformers import AutoConfig

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen3", **sizes, num_key_value_heads=2, head_dim=4)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def word_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))


def test_an_export_keeps_what_somebody_has_put_beside_the_model(tiny_model, tmp_path):
    final = tmp_path / "final"
    for _ in range(2):
        export(tiny_model, tiny_model.state_dict().__getitem__, None, final)
    assert os.listdir(tmp_path) == ["final"], "what we wrote ourselves is replaced"
    for number in (1, 2):
        (final / "thesis.tex").write_text(f"year {number}")
        export(tiny_model, tiny_model.state_dict().__getitem__, None, final)
        assert not (final / "thesis.tex").exists()
        assert (tmp_path / f"final.replaced-{number}" / "thesis.tex").read_text() == f"year {number}"
        assert (tmp_path / f"final.replaced-{number}" / "model.safetensors").is_file()
    (final / "config.json").write_text((final / "config.json").read_text() + " ")
    export(tiny_model, tiny_model.state_dict().__getitem__, None, final)
    assert (tmp_path / "final.replaced-3" / "config.json").read_text().endswith(" "), "a file of ours that somebody has changed"


@pytest.mark.parametrize("name", [".final.writing", ".final.previous"])
def test_an_export_deletes_no_folder_of_somebody_else_that_stands_where_it_writes(name, tiny_model, tmp_path):
    hidden = tmp_path / name
    hidden.mkdir()
    (hidden / "config.json").write_text("years of work")
    with pytest.raises(InputError, match=rf"{re.escape(str(hidden))}: .*config\.json is not ours; move it away"):
        export(tiny_model, tiny_model.state_dict().__getitem__, None, tmp_path / "final")
    assert os.listdir(tmp_path) == [name] and contents(hidden) == {"config.json": b"years of work"}
    shutil.rmtree(hidden)
    hidden.symlink_to(tmp_path)
    with pytest.raises(InputError, match="move it away"):
        export(tiny_model, tiny_model.state_dict().__getitem__, None, tmp_path / "final")


@pytest.mark.parametrize("moment", ["save_file", "fsync_tree", "os.replace", "fsync", "shutil.rmtree"])
def test_what_a_killed_export_leaves_does_not_hinder_the_next(moment, tiny_model, tmp_path, monkeypatch):
    final = tmp_path / "final"

    def write():
        export(tiny_model, tiny_model.state_dict().__getitem__, None, final)

    def killed(*arguments, **options):
        raise KeyboardInterrupt  # which nothing in an export catches

    write()
    whole = contents(final)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"pretrain.model.huggingface.{moment}", killed)
        write()
    assert len(os.listdir(tmp_path)) == 2, "one of them is unfinished"
    write()
    assert os.listdir(tmp_path) == ["final"] and contents(final) == whole


@pytest.mark.parametrize("mask, mode", [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_of_an_exported_model_have_the_modes_that_the_umask_leaves(mask, mode, tiny_model, word_tokenizer, tmp_path):
    word_tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}  # several are a folder
    before = os.umask(mask)
    try:
        export(tiny_model, tiny_model.state_dict().__getitem__, word_tokenizer, tmp_path / "final")
    finally:
        os.umask(before)
    written = [*(tmp_path / "final").rglob("*")]
    [folder] = filter(Path.is_dir, written)
    assert {path.stat().st_mode & 0o777 for path in written if path != folder} == {mode}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask, "a folder without x cannot be entered"


@pytest.mark.parametrize(
    "raised",
    [
        Exception("No space left on device (os error 28)"),  # as the library of tokenizers says it
        TypeError("a set is not JSON"),
        StrictDataclassClassValidationError("a config", ValueError("of odd values")),
        torch.OutOfMemoryError("too large"),
    ],
    ids=lambda raised: type(raised).__name__,
)
def test_whatever_an_export_meets_is_one_message_that_leaves_what_was_there(raised, tiny_model, tmp_path):
    class Unwritable:
        def save_pretrained(self, folder):
            raise raised

    final = tmp_path / "final"
    export(tiny_model, tiny_model.state_dict().__getitem__, None, final)
    before, said = contents(tmp_path), r"final: the trained model cannot be written: .*\. The checkpoints hold it; mend this and"
    with pytest.raises(InputError, match=said):
        export(tiny_model, tiny_model.state_dict().__getitem__, Unwritable(), final)
    assert contents(tmp_path) == before


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_anything_is_trained(tiny_model, word_tokenizer):
    config = tiny_model.config.to_dict()
    check_export(tiny_model, word_tokenizer)
    word_tokenizer.init_kwargs["odd"] = {1, 2}
    with pytest.raises(InputError, match=r"`data\.tokenizer`: .*set is not JSON serializable; change it"):
        check_export(tiny_model, word_tokenizer)
    assert tiny_model.config.to_dict() == config


# ── Models that others wrote ──────────────────────────────────────────────────────────────────────────────────────────────────


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_weights_that_are_a_malicious_pickle_or_no_weights_are_refused(small_recipe, launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_recipe["model"]["config"] | {"architectures": ["Qwen3ForCausalLM"]}))
    small_recipe["model"] = {"source": str(folder)}
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    assert re.search(r"`model.source`: .*model: weights cannot be loaded: ", launch().refusal)
    torch.save({"x": Malicious()}, folder / "pytorch_model.bin")
    assert re.search(r"`model.source`: .*model: weights cannot be loaded: ", launch().refusal)
    (folder / "pytorch_model.bin").unlink()
    save_file({"x": torch.ones(3)}, folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert re.search(r"`model.source`: .*model: weights cannot be loaded: ", launch().refusal)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_config_json_that_is_no_file_is_refused(kind, small_recipe, refusal, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    stand_in(folder / "config.json", kind)
    small_recipe["model"] = {"source": str(folder)}
    assert re.search(r"`model.source`: .*model is no folder with a config.json", refusal("--plan"))


def test_a_config_json_of_a_hundred_thousand_layers_or_brackets_is_refused(small_recipe, refusal, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = small_recipe["model"]["config"]
    small_recipe["model"] = {"source": str(folder)}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 100_000}))
    assert re.search(r"config.json: `num_hidden_layers: 100000`: a model of more than 1024 layers", refusal("--plan"))
    (folder / "config.json").write_text("[" * 100_000)
    assert re.search(r"config.json: cannot be read: nested deeper than 64", refusal("--plan"))


@pytest.mark.parametrize(
    ("written", "why"), [("{nope", "cannot be read: Expecting"), ("[]", "a JSON object is wanted, here is list")]
)
def test_a_generation_config_that_transformers_would_pass_over_is_refused(written, why, small_recipe, refusal, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_recipe["model"]["config"] | {"architectures": ["Qwen3ForCausalLM"]}))
    (folder / "generation_config.json").write_text(written)
    small_recipe["model"] = {"source": str(folder)}
    said = refusal("--plan")
    assert f"{folder}/generation_config.json: {why}" in said and said.endswith("; mend it, or remove it")


# ── Run folders ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def trained(launch: Callable, small_recipe: dict[str, Any]) -> Path:
    """A run of 4 steps with a checkpoint at its end."""
    small_recipe["train"]["steps"] = 4
    small_recipe["evaluate"] = {}
    assert launch().status == 0
    return Path(small_recipe["run_dir"])


def test_a_plan_says_what_a_run_would_resume_and_refuses_what_it_would_refuse(trained, launch, refusal):
    newest = trained / "checkpoints" / "step-00000004"
    before = contents(trained)
    assert f"would resume from {newest}" in launch("--plan").out
    assert f"would resume from {newest}" in launch("--plan", "--resume", str(newest)).out
    assert "--resume nowhere: no such checkpoint" in refusal("--plan", "--resume", "nowhere")
    assert "made by another recipe" in refusal("--plan", "optimizer.learning_rate=0.5")
    accepted = launch("--plan", "optimizer.learning_rate=0.5", "--accept-changes")
    assert accepted.status == 0 and "the recipe has changed: optimizer.learning_rate: saved 0.01, now 0.5" in accepted.out
    assert contents(trained) == before
    weights = next(newest.glob("model-*"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "every checkpoint is damaged" in refusal("--plan")


def test_a_metrics_file_with_odd_lines_does_not_stop_a_resume(trained, launch, small_recipe):
    metrics = trained / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    odd = ['{"step": "two", "loss": 1.0}', '{"step": null}', '{"step": true}', "[" * 5000 + "}", '"}']
    metrics.write_text("\n".join([lines[0], *odd, *lines[1:]]) + "\n")
    assert launch("--plan").status == 0
    assert launch("train.steps=6", "--accept-changes").status == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4, 5, 6}


def test_a_finished_run_without_its_checkpoints_is_not_trained_anew_over_its_model(trained, launch, refusal, tmp_path):
    kept = (trained / "checkpoints").rename(tmp_path / "kept")  # removed to free space, say
    said = refusal()
    assert f"{trained / 'final'}: is the model of a finished run, of which {trained / 'checkpoints'} has no checkpoint" in said
    assert said.endswith(f"set another `run_dir`, or move {trained} away")
    assert refusal("--plan") == said == refusal(f"train.begin_with={kept / 'step-00000004'}", "train.steps=6")
    longer = launch(f"--resume={kept / 'step-00000004'}", "train.steps=6", "--accept-changes")  # its own, from where it was kept
    assert longer.status == 0, longer.output


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "final", "checkpoints"])
def test_what_stands_where_a_run_would_write_is_refused_before_a_model_is_built(kind, name, small_recipe, refusal):
    Path(small_recipe["run_dir"]).mkdir()
    stand_in(Path(small_recipe["run_dir"]) / name, kind)
    if name == "metrics.jsonl" or kind != "folder":
        wanted = "file" if name == "metrics.jsonl" else "folder"
        assert re.search(rf"run/{name}: is no {wanted}, which a run would write there; move it away", refusal())
