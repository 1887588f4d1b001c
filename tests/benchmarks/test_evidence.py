"""The evidence's driver and its endpoints: against documents one by one, greedy generation, and what the runs say themselves."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import evidence, evidence_endpoints
from benchmarks.evidence_endpoints import HeldOut, batched, divergence, is_ready, last_words, losses
from benchmarks.evidence_read import Scale
from benchmarks.evidence_results import Results, check_named, key_of
from foundation.errors import InputError
from pretrain.compare.matrix_file import Matrix, load_matrix
from pretrain.metrics.run_record import read_run
from pretrain.settings.config import resolved
from tests.pretrain.compare.made_runs import make_run

ROOT = Path(__file__).parents[2]
KINDS = ("code", "prose")
TOKENS = ["<end>", "\u0120word", "\u0120other", "ly", ".", "!\u0120x", "1", "\u01202"]  # as a byte-level tokenizer names them


@pytest.fixture(scope="module")
def models() -> list[Qwen3ForCausalLM]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=len(TOKENS), num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.5, **sizes)
    return [Qwen3ForCausalLM(config).eval() for _ in range(2)]


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(len(TOKENS), size=length) for length in (5, 200, 90, 2, 130, 128)]


@pytest.fixture(scope="module")
def held_out(documents: list[np.ndarray]) -> HeldOut:
    kinds, tokenizer = [0, 1, 1, 0, 0, 1], Tokenizer()
    words = last_words(documents, kinds, KINDS, tokenizer)
    assert sum(map(len, words.values())) > 3
    batches = tuple(batched(documents, kinds, words, range(6), torch.device("cpu")))
    return HeldOut(KINDS, batches, batches, sum(map(len, words.values())))


class Tokenizer:
    def __len__(self) -> int:
        return len(TOKENS)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [TOKENS[index] for index in ids]


def test_the_last_words_are_letters_after_a_blank_at_the_end_of_a_sentence_of_prose(documents):
    words = last_words(documents, [0, 1, 1, 0, 0, 1], KINDS, Tokenizer())
    assert set(words) <= {1, 2, 5}
    for number, places in words.items():
        text = [TOKENS[token] for token in documents[number]]
        for first, end in places:
            assert first >= evidence_endpoints.CONTEXT and text[first].startswith("\u0120")
            assert text[end] == "!\u0120x" or (text[end] == "." and text[end + 1].startswith("\u0120"))
            assert "".join(text[first:end]).removeprefix("\u0120").isalpha()
    assert last_words(documents, [0] * 6, ("code",), Tokenizer()) == {}


@torch.no_grad()
def test_losses_and_distances_are_those_of_documents_one_by_one(models, documents, held_out, monkeypatch):
    monkeypatch.setattr(evidence_endpoints, "_CHUNK", 37)
    ours, theirs = models
    by_kind: dict[str, list[float]] = {"code": [], "prose": []}
    distances: list[float] = []
    for document, kind in zip(documents, [0, 1, 1, 0, 0, 1], strict=True):
        ids = torch.from_numpy(document)[None]
        p, q = (model(ids).logits[0, :-1].log_softmax(-1) for model in models)
        by_kind[KINDS[kind]] += functional.nll_loss(p, ids[0, 1:], reduction="none").tolist()
        distances += functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).tolist()
    found = losses(ours, held_out)
    assert found["held_out_loss"] == pytest.approx(np.mean(by_kind["code"] + by_kind["prose"]), rel=1e-5)
    for kind, each in by_kind.items():
        assert found[f"held_out_loss/{kind}"] == pytest.approx(np.mean(each), rel=1e-5)
    assert divergence(ours, theirs, held_out) == pytest.approx(np.mean(distances), rel=1e-4)
    assert divergence(ours, ours, held_out) == 0


def test_a_last_word_counts_where_greedy_generation_writes_it(models, documents, held_out):
    words = last_words(documents, [0, 1, 1, 0, 0, 1], KINDS, Tokenizer())
    written = []
    for number, places in words.items():
        for first, end in places:
            prompt = torch.from_numpy(documents[number][:first])[None]
            made = models[0].generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=end - first, do_sample=False)
            written.append(made[0, first:].tolist() == documents[number][first:end].tolist())
    assert losses(models[0], held_out)["last_word_accuracy"] == pytest.approx(np.mean(written))


# ── The whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def matrix_file(low_precision_recipe: dict[str, Any], tmp_path: Path) -> Path:
    recipe = low_precision_recipe | {"precision": "bf16", "weights": "bf16_exact", "parity": "off"}
    recipe |= {"schedule": {"kind": "wsd", "decay": 0.5}, "train": {"steps": 4}, "checkpoint": {"every": 2, "keep": 1}}
    recipe |= {"batch": {"tokens": 256, "microbatch": 2}}
    recipe["model"]["config"]["num_hidden_layers"] = 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"evaluate": {"every": 2, "packs": 7}}))
    groups = [
        {"axes": {"seed": [1, 2]}, "cells": {"bf16": {"precision": "bf16"}}},
        {"axes": {"seed": [1]}, "cells": {"again": {"precision": "bf16", "name": "again"}, "current": {"precision": "current"}}},
    ]
    values = {"name": "m", "recipe": str(tmp_path / "recipe.yaml"), "accelerate": str(ROOT / "accelerate_configs/cpu.yaml")}
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(values | {"groups": groups, "run_dir": f"{tmp_path}/runs/{{cell}}"}))
    return path


def test_what_ends_is_measured_once_and_not_trained_again(
    matrix_file: Path, launcher_here: Callable[..., tuple[int, str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, matrix = tmp_path / "out.json", load_matrix(matrix_file)
    ran = {key_of(run): run for run in matrix.runs}
    again = ["--scale", "tiny", "--matrix", str(matrix_file), "--out", str(out)]
    assert list(ran) == ["bf16-seed1", "bf16-seed2", "again-seed1", "current-seed1"]

    def train(*keys: str) -> None:
        for key in keys:
            status, said, wrong = launcher_here(str(tmp_path / "recipe.yaml"), *ran[key].overrides)
            assert status == 0, said + wrong

    def measure() -> dict[str, Any]:
        command = [str(matrix_file), "--out", str(out), "--scale", "tiny", "--command", "made by"]
        assert evidence_endpoints.main(command, wait=lambda: None) == 0
        return json.loads(out.read_text())

    train("current-seed1")
    assert measure()["runs"]["current-seed1"]["endpoints"]["final"]["kl_to_baseline"] is None  # its baseline may come later
    train("bf16-seed1", "bf16-seed2", "again-seed1")
    found = measure()
    assert (found["scale"], found["command"], found["tokens"]) == ("tiny", "made by", 4 * 256)
    assert list(found["runs"]) == list(ran) and found["settings"]["weights"] == "bf16_exact"
    ends = {key: run["endpoints"]["final"] for key, run in found["runs"].items()}
    assert ends["bf16-seed1"]["kl_to_baseline"] is None and ends["again-seed1"]["kl_to_baseline"] == 0
    assert ends["current-seed1"]["kl_to_baseline"] > 0
    assert [pair["seeds"] for pair in found["between_baseline_seeds"]] == [[1, 2]]
    assert found["between_baseline_seeds"][0]["kl"] > ends["current-seed1"]["kl_to_baseline"]
    for run in found["runs"].values():
        *_, before, last = run["evaluations"]
        assert (before["step"], last["step"], len(run["losses"])) == (2, 4, 4)
        assert run["endpoints"]["before_decay"]["held_out_loss"] == pytest.approx(before["held_out_loss"], rel=1e-3)
        assert run["endpoints"]["final"]["held_out_loss"] == pytest.approx(last["held_out_loss"], rel=1e-3)
    kept = out.read_bytes()
    measure()
    assert out.read_bytes() == kept
    results, baseline = Results(out), ran["bf16-seed1"]
    with pytest.raises(InputError, match="measured on other held-out text; name another file"):
        results.check_fits(baseline, "of other text")
    results.check_fits(baseline, found["held_out"])
    assert found["held_out"] == read_run(baseline.run_dir).environment["held_out_fingerprint"]
    fewer = load_matrix(matrix_file, ["evaluate.packs=5"]).runs[0]
    assert not is_ready(fewer), "the same training, evaluated otherwise"
    with pytest.raises(InputError, match=r"was trained with other settings .*: `evaluate\.packs`: 5 and 7; set them back"):
        results.check_fits(fewer, found["held_out"])
    halted, folder = {key: run for key, run in found["runs"].items() if key != "current-seed1"}, ran["current-seed1"].run_dir
    out.write_text(json.dumps(found | {"runs": halted}))
    (folder / "summary.json").unlink()
    *steps, last, _ = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*steps, json.dumps(json.loads(last) | {"halted": "it broke"})]) + "\n")
    halted = measure()["runs"]["current-seed1"]
    assert halted["summary"]["halted"] == "it broke" and halted["endpoints"]["final"]["held_out_loss"] is None
    assert Scale.read(out).broken_off("current") == ["current-seed1"] and Scale.read(out).difference("current") is None
    first = found["runs"]["bf16-seed1"]
    standing = {
        "bf16-seed1": first | {"summary": first["summary"] | {"halted": "it broke"}},
        "bf16-seed2": found["runs"]["bf16-seed2"],
    }
    out.write_text(json.dumps(found | {"runs": standing}))
    elsewhere = load_matrix(matrix_file, [], run_dir=f"{tmp_path}/elsewhere/{{cell}}")  # no folder is here
    baseline, _, once_more, _ = elsewhere.runs
    assert evidence.with_baselines(elsewhere, [once_more], Results(out)) == [once_more]
    assert "bf16-seed1 stands in" in (said := capsys.readouterr().out) and "as halted, so it is not trained again" in said
    standing["bf16-seed1"] = first
    out.write_text(json.dumps(found | {"runs": standing}))
    assert evidence.with_baselines(elsewhere, [once_more], Results(out)) == [baseline, once_more]
    out.write_bytes(kept)
    shutil.rmtree(tmp_path / "runs")  # on another machine
    for change in ("optimizer.learning_rate=0.5", "schedule.warmup=1", "evaluate.packs=5", "train.steps=6", "weights=bf16"):
        assert evidence.main([*again, change]) == 2
        wrong = capsys.readouterr().err
        assert f"bf16-seed1 was trained otherwise than {matrix_file} says now" in wrong and change.partition("=")[0] in wrong
    assert evidence.main(["--scale", "large", *again[2:]]) == 2
    assert "is of the scale tiny, not of large; name another file" in capsys.readouterr().err
    assert evidence.main(again) == 0
    assert "4 of 4 runs stand in" in capsys.readouterr().out and out.read_bytes() == kept and not (tmp_path / "runs").exists()
    assert not Results(out).lacking(matrix.runs)


def test_a_branch_is_held_against_the_very_run_that_it_left(
    matrix_file: Path, launcher_here: Callable[..., tuple[int, str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    values = yaml.safe_load(matrix_file.read_text())
    begin = f"{tmp_path}/runs/bf16-seed={{seed}}/checkpoints/step-00000002"
    branch = {"axes": {"seed": [1]}, "cells": {"current_branch": {"precision": "current", "train.begin_with": begin}}}
    matrix_file.write_text(yaml.safe_dump(values | {"groups": [{**values["groups"][0], "axes": {"seed": [1]}}, branch]}))
    out, matrix = tmp_path / "out.json", load_matrix(matrix_file)
    again = ["--scale", "tiny", "--matrix", str(matrix_file), "--out", str(out)]
    assert evidence.main([*again, "--only", "cell=current_branch"]) == 2
    assert "current_branch-seed1: the checkpoints that they begin with are not here" in capsys.readouterr().err
    baseline, branch = matrix.runs
    assert evidence.that_can_begin([baseline, branch], Results(out)) == [baseline, branch]
    elsewhere = load_matrix(matrix_file, ["train.begin_with=null"]).runs[:1]
    assert evidence.that_can_begin([branch, *elsewhere], Results(out)) == [branch, *elsewhere], "the same folder"
    for run in matrix.runs:
        assert launcher_here(str(tmp_path / "recipe.yaml"), *run.overrides)[0] == 0
    assert evidence_endpoints.main([str(matrix_file), "--out", str(out), "--scale", "tiny"], wait=lambda: None) == 0
    scale = Scale.read(out)
    baseline, found = (scale.content["runs"][name] for name in ("bf16-seed1", "current_branch-seed1"))
    assert found["began_with"] == baseline["checkpoints"]["step-00000002"] and baseline["began_with"] is None
    assert scale.record("current_branch").curve("loss")[0].tolist() == [3, 4]
    assert scale.unlike("current_branch") is None and "train.begin_with" not in scale.settings("current_branch")
    difference = found["endpoints"]["final"]["held_out_loss"] - baseline["endpoints"]["final"]["held_out_loss"]
    assert scale.difference("current_branch").mean == pytest.approx(difference) != 0
    baseline["checkpoints"]["step-00000002"] = "0" * 64  # it was trained once more
    out.write_text(json.dumps(scale.content))
    with pytest.raises(InputError, match="current_branch-seed1 began with a checkpoint that is none of bf16-seed1's"):
        Scale.read(out)
    found["began_with"] = None
    out.write_text(json.dumps(scale.content))
    with pytest.raises(InputError, match="current_branch-seed1 is a branch and tells of no checkpoint"):
        Scale.read(out)


def test_baselines_that_are_gone_are_trained_again_where_others_are_compared_with_them(matrix_file: Path):
    matrix, results = load_matrix(matrix_file), Results(matrix_file.with_name("none.json"))
    first, second, again, current = matrix.runs
    assert evidence.with_baselines(matrix, [again, current], results) == [first, again, current]
    assert evidence.with_baselines(matrix, [first, second], results) == [first, second]


def test_what_waits_for_its_baseline_is_measured_at_the_end_at_the_latest(matrix_file: Path, tmp_path: Path):
    matrix, results = load_matrix(matrix_file), Results(tmp_path / "none.json")
    measuring = evidence_endpoints.Measuring(matrix, results, scale="", command="", device=torch.device("cpu"))
    baseline, _, _, current = matrix.runs
    assert not is_ready(baseline)
    assert not measuring.is_due(current, last=False) and measuring.is_due(current, last=True)
    results.runs["bf16-seed1"] = {}  # measured elsewhere: its model will not come
    assert measuring.is_due(current, last=False)


def test_two_at_once_never_write_one_file(matrix_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["--scale", "tiny", "--matrix", str(matrix_file), "--out", str(tmp_path / "out.json")]
    lock = Results(tmp_path / "out.json").locked()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
    lock._file.close()  # as where its holder is killed: what measures has it still
    assert evidence.main(command) == 2 and "is being written by process" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*/config.yaml")), "nothing was trained"
    child.communicate(b"\n")
    Results(tmp_path / "out.json").locked().release()


@pytest.mark.parametrize(
    "content", [{}, {"runs": {}}, {"scale": "tiny", "settings": {}, "runs": {"bf16-seed1": {"cell": "bf16", "seed": 1}}}]
)
def test_a_file_of_something_else_is_never_written_over(content: dict[str, Any], matrix_file: Path, tmp_path: Path, capsys):
    out = tmp_path / "out.json"
    out.write_text(json.dumps(content))
    assert evidence.main(["--scale", "tiny", "--matrix", str(matrix_file), "--out", str(out)]) == 2
    assert "name another file, or move it away" in capsys.readouterr().err and json.loads(out.read_text()) == content


def test_a_run_that_keeps_no_model_is_refused_and_one_whose_model_is_gone_is_named(matrix_file: Path, tmp_path: Path, capsys):
    command = ["--scale", "tiny", "--matrix", str(matrix_file), "--out", str(tmp_path / "out.json")]
    assert evidence.main([*command, "checkpoint.at_end=false"]) == 2
    assert "`checkpoint.at_end: false` leaves no model behind" in capsys.readouterr().err and not (tmp_path / "runs").exists()

    matrix, stop = load_matrix(matrix_file), SimpleNamespace(requested=0)
    make_run(matrix.runs[0].run_dir, [3.0] * 4, fingerprint=None)
    (matrix.runs[0].run_dir / "config.yaml").write_text(yaml.safe_dump(resolved(matrix.runs[0].recipe)))
    (matrix.runs[0].run_dir / "summary.json").write_text(json.dumps({"steps": 4}))
    assert evidence.report_outcome([], matrix.runs[:1], Results(tmp_path / "none.json"), stop, failed=False) == 1
    assert f"without a model in `final`: {matrix.runs[0].name}; remove" in capsys.readouterr().err


@pytest.mark.parametrize("hours", ["0", "-1", "nan"])
def test_hours_that_are_none_are_refused_before_anything_is_trained(hours: str, matrix_file: Path, tmp_path: Path, capsys):
    command = ["--scale", "tiny", "--matrix", str(matrix_file), "--out", str(tmp_path / "out.json"), "--max-hours", hours]
    assert evidence.main(command) == 2 and f"--max-hours {hours}: hours are wanted" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_where_the_file_cannot_be_written_that_is_said_and_the_rest_goes_on(matrix_file: Path, tmp_path: Path, capsys):
    matrix, results = load_matrix(matrix_file), Results(tmp_path / "none.json")
    measuring = evidence_endpoints.Measuring(matrix, results, scale="", command="", device=torch.device("cpu"))

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    measuring.attempt("bf16-seed1", full)
    assert measuring.failed and "bf16-seed1: cannot be measured: [Errno 28] No space left" in capsys.readouterr().err


def test_cells_without_names_and_two_of_one_name_are_refused(matrix_file: Path):
    matrix = load_matrix(matrix_file)
    first = matrix.runs[0]
    unnamed = SimpleNamespace(path=Path("m.yaml"), runs=[SimpleNamespace(name="bf16", values={"precision": "bf16"})])
    with pytest.raises(InputError, match=r"m\.yaml: bf16 has no name; list the cells in `groups`"):
        check_named(unnamed)
    with pytest.raises(InputError, match="there are two bf16-seed1"):
        check_named(Matrix(matrix.path, matrix.settings, (first, first), first, matrix.launch))


@pytest.mark.parametrize("scale", ["14m", "35m", "35m_once", "111m", "continued"])
def test_the_shipped_scales_have_a_baseline_for_every_seed(scale: str):
    matrix = load_matrix(ROOT / f"recipes/matrices/evidence_{scale}.yaml")
    check_named(matrix)
    baselines = {run.recipe.seed for run in matrix.runs if run.values["cell"] == "bf16"}
    assert {run.recipe.seed for run in matrix.runs} == baselines and matrix.runs[0] is matrix.baseline
