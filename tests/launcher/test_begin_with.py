"""`train.begin_with`: a run that begins with another run's checkpoint."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foundation.units import count
from pretrain.compare.fairness import why_not_paired
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.run_record import read_metrics, read_run
from pretrain.run.export import best_checkpoint
from tests.conftest import Finished, over

BEGIN = "runs-{seed}/first/checkpoints/step-00000004"


@pytest.fixture(scope="module")
def first_of_all(start_here: Callable, recipe_for: Callable, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("begins")
    finished = start_here(recipe_for(folder / "first"), folder, "seed=5")
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture
def first(first_of_all: Finished, tmp_path: Path) -> Finished:
    """A run of twelve steps with a checkpoint after the fourth, in a folder that names its seed: a copy of the test's own."""
    return replace(first_of_all, run_dir=shutil.copytree(first_of_all.run_dir, tmp_path / "runs-5" / "first"))


def last_checkpoint(run_dir: Path) -> dict[str, torch.Tensor]:
    files = sorted((run_dir / "checkpoints" / "step-00000012").glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def everything_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_it_goes_on_as_the_other_did_in_a_folder_of_its_own(first: Finished, train_here: Callable, tmp_path: Path) -> None:
    before = everything_in(first.run_dir)
    begins = ["seed=5", f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/{BEGIN}"]
    second = train_here(*begins)
    assert second.status == 0, second.output
    assert second.losses() == first.losses()[4:] and len(second.losses()) == 8
    ours, theirs = last_checkpoint(second.run_dir), last_checkpoint(first.run_dir)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert everything_in(first.run_dir) == before

    shutil.rmtree(first.run_dir)  # once it has checkpoints of its own, those are gone on from
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-00000012")
    again = train_here(*begins)
    assert again.status == 0 and "resumed from " + str(tmp_path / "second/checkpoints/step-00000008") in again.output
    assert again.losses() == second.losses()


def test_another_precision_and_other_settings_take_over_from_there(first: Finished, train_here: Callable, tmp_path: Path) -> None:
    begins = ["seed=5", f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/{BEGIN}"]
    changes = ["precision=delayed", "fp8_config.on_unsupported=emulate", "weights=bf16_exact", "parity=off"]
    planned = train_here(*begins, *changes, "--plan")
    assert planned.status == 0 and f"would resume from {tmp_path}/{BEGIN.format(seed=5)}" in planned.output
    second = train_here(*begins, *changes)
    assert second.status == 0, second.output
    assert 'precision: saved "fp32", now "delayed"' in second.output and "fp32 became bf16_exact" in second.output
    assert second.losses()[0] == pytest.approx(first.losses()[4], rel=0.02) and second.losses()[0] != first.losses()[4]


def test_what_a_branch_left_that_came_to_no_checkpoint_is_set_aside_by_another(
    first: Finished, train_here: Callable, tmp_path: Path
) -> None:
    begins = ["seed=5", f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/{BEGIN}", "parity=off"]
    begins.append("checkpoint={every: null, at_end: false}")
    second = train_here(*begins)
    assert second.status == 0, second.output
    written = (second.run_dir / "metrics.jsonl").read_bytes()
    (second.run_dir / "summary.json").unlink()  # as if it had been killed
    other = train_here(*begins, "optimizer.weight_decay=0.5")
    assert other.status == 0 and (second.run_dir / "metrics.jsonl.replaced-1").read_bytes() == written
    assert len(other.losses()) == 8, "steps 5 to 12"


@pytest.mark.parametrize(
    "before", ["precision=fp32", "precision=delayed", "precision=delayed fp8_config.keep_bf16_layers.last=1"]
)
def test_histories_that_the_checkpoint_lacks_begin_under_its_weights(before: str, train_here: Callable, tmp_path: Path) -> None:
    """The largest weights are known from the checkpoint, and all that is remembered of them, of eight packs and a step, must be
    these: nothing of the weights with which the model was built."""
    shared = ["seed=5", "fp8_config.on_unsupported=emulate", "parity=off", "evaluate.every=null", "train.steps=5"]
    shared += ["checkpoint={every: 4, keep: 9, at_end: true}", "optimizer.learning_rate=0.05"]
    assert train_here(*shared, *before.split(), f"run_dir={tmp_path}/runs-5/first").status == 0
    there = tmp_path / BEGIN.format(seed=5)
    second = train_here(*shared, "precision=delayed", f"run_dir={tmp_path}/second", f"train.begin_with={there}")
    assert second.status == 0, second.output

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

    origin, later = tensors(there), tensors(tmp_path / "second" / "checkpoints" / "step-00000005")
    histories = {name: tensor for name, tensor in later.items() if name.endswith("forward/amax_history")}
    assert len(histories) == 14
    for name, history in histories.items():
        if name in origin:  # gone on with: what was there, and a step
            assert torch.equal(history[:-1, 1], origin[name][1:, 1]) and history[-1, 1] > 0
            continue
        weight = origin[name.removeprefix("fp8/").removesuffix("/forward/amax_history") + ".weight"]
        remembered = history[:, 1][history[:, 1] > 0]
        assert len(remembered) == 9 and (remembered == weight.bfloat16().abs().max()).all(), name


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{seed}/step-00000004", "`train.begin_with`: 1337/step-00000004: no such checkpoint; name a step-* folder of another"),
        ("{sed}/step-00000004", "`train.begin_with`: '{sed}/step-00000004' cannot be filled in; did you mean {seed}?"),
        ("''", "`train.begin_with` is empty; name a folder"),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_anything_is_made(
    train_here: Callable, tmp_path: Path, path: str, says: str
) -> None:
    refused = train_here("seed=1337", f"train.begin_with={path}", f"run_dir={tmp_path}/second")
    assert refused.status == 2 and says in refused.output
    assert not list((tmp_path / "second").rglob("step-*"))


def test_what_lies_in_a_run_and_is_no_checkpoint_is_refused_with_those_there_are(first: Finished, train_here: Callable) -> None:
    there = f"{first.run_dir}/checkpoints holds step-00000012, step-00000008, step-00000004"
    for path in ("", "checkpoints", "final", "checkpoints/step-00000004/state.json"):
        refused = train_here(f"train.begin_with={first.run_dir / path}", "--plan").refusal
        assert refused.startswith(f"`train.begin_with`: {first.run_dir / path}: cannot be used: ") and "--resume" not in refused
        assert refused.endswith(there) or path.endswith("json")


def test_a_damaged_checkpoint_another_model_and_no_step_to_come_are_each_one_message(
    first: Finished, train_here: Callable, tmp_path: Path
) -> None:
    """Before the model is built."""
    path = first.run_dir / "checkpoints" / "step-00000004"
    begins = [f"train.begin_with={path}", f"run_dir={tmp_path}/second", "seed=5"]
    for horizon in ("steps=4", "tokens=700", "epochs=0.1"):
        refused = train_here(*begins, f"train.{horizon}").refusal
        assert refused.startswith(f"`train.begin_with`: {path}: is from step 4, and this run's horizon, `train.{horizon[:5]}")
    other = train_here(*begins, "model.config.hidden_size=64", "--plan").refusal
    assert other.startswith(
        f"`train.begin_with`: {path}: does not fit this run's model (model.config.hidden_size: saved 32, now 64)"
    )
    assert "embed_tokens.weight has shape [61, 32] there and [61, 64] here" in other and "more; name a checkpoint" in other
    file = next(path.glob("model-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    damaged = train_here(*begins).refusal
    assert damaged.startswith(f"`train.begin_with`: {path}: cannot be used: {file.name}: damaged")
    assert not (tmp_path / "second" / "metrics.jsonl").exists()


def test_where_the_rate_had_fallen_the_checkpoint_before_is_named_by_the_same_key(train_here: Callable, tmp_path: Path) -> None:
    decays = ["schedule={kind: wsd, decay: 0.5}", "parity=off"]
    assert train_here(*decays, f"run_dir={tmp_path}/first").status == 0
    there = f"train.begin_with={tmp_path}/first/checkpoints/step-000000"
    on = train_here(*decays, f"{there}12", "train.steps=20", "--plan")
    assert on.status == 0 and f"go on from there with {there}04" in on.output


def epochs(run: Callable) -> list[float]:
    return [record["epoch"] for record in run.records() if "loss" in record]


@pytest.mark.parametrize(("batch", "packs"), [(512, 16), (128, 4)])
def test_with_another_batch_the_text_goes_on_where_the_checkpoint_ended(
    first: Finished, train_here: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, packs: int
) -> None:
    """Of 120 packs 32 were trained on. So it does when it is resumed, and sent back before its first own checkpoint."""
    begins = [
        "seed=5",
        f"run_dir={tmp_path}/second",
        f"train.begin_with={tmp_path}/{BEGIN.format(seed=5)}",
        f"batch.tokens={batch}",
    ]
    second = train_here(*begins)
    assert second.status == 0, second.output
    assert f"a step takes {packs} packs now: the text goes on where the checkpoint's ended, after 32 packs" in second.output
    assert epochs(second) == [(32 + packs * n) / 120 for n in range(1, 9)]
    total = 4 * 256 + 8 * batch
    assert second.records()[-2]["tokens"] == total and f"the horizon of 12 is {count(total)} tokens in all" in second.output
    assert f"12 steps = {count(total)} tokens = " in second.output, "the plan counts the tokens that the steps took"
    assert "12 steps" in second.output and "(mean of the last 8 steps)" in second.output

    whole = train_here(f"run_dir={tmp_path}/whole", "seed=5", f"batch.tokens={batch}", "parity=off")
    found = why_not_paired(*(read_run(run.run_dir) for run in (whole, second)))
    assert found == "their steps see other text: one has gone on from a checkpoint of another `batch.tokens`"

    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-00000012")
    again = train_here(*begins)
    assert "at step 8" in again.output and again.losses() == second.losses() and "a step takes" not in again.output

    check, failed = Health.check, []

    def check_once(health: Health, step: int, loss: float, norm: float, **more: object) -> StepDecision:
        failed.append(step)
        return check(health, step, math.nan if failed == [5, 6] else loss, norm, **more)

    monkeypatch.setattr(Health, "check", check_once)
    back = train_here(f"run_dir={tmp_path}/third", *(each for each in begins if "run_dir" not in each), "health.on_nan=rollback")
    assert "Rollback 1 of 3" in back.output and epochs(back) == [(32 + packs * n) / 120 for n in range(3, 11)]


def test_other_packs_or_another_order_of_them_is_said(first: Finished, train_here: Callable, tmp_path: Path) -> None:
    begins = [f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/{BEGIN.format(seed=5)}", "--plan"]
    said = "the order of the packs is another than the checkpoint's (seed), and it goes on after the first 32 packs of it"
    assert said in train_here(*begins, "seed=6").output
    assert "the order of the packs" not in train_here(*begins, "seed=5").output


def test_a_folder_that_is_no_checkpoint_is_told_apart(train_here: Callable, tmp_path: Path) -> None:
    (tmp_path / "step-00000004").mkdir()
    refused = train_here(f"train.begin_with={tmp_path}/step-00000004", f"run_dir={tmp_path}/second")
    assert refused.status == 2 and str(tmp_path / "step-00000004") in refused.output


def test_rollbacks_of_the_other_run_are_none_of_its_own(
    train_here: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a budget of one each goes back once: the branch to the checkpoint of the other, and at its own step it halts."""
    check, broken = Health.check, []

    def broken_at(health: Health, step: int, loss: float, norm: float, **more: object) -> StepDecision:
        return check(health, step, math.nan if broken and step == broken[0] and broken.pop(0) else loss, norm, **more)

    monkeypatch.setattr(Health, "check", broken_at)
    once = ["seed=5", "health.on_nan=rollback", "health.max_rollbacks=1", "parity=off", "evaluate.every=null"]
    broken[:] = [6]
    first = train_here(*once, f"run_dir={tmp_path}/first")
    assert "Rollback 1 of 1" in first.output and read_run(first.run_dir).summary["rollbacks"] == 1
    broken[:] = [10, 11]
    begins = [*once, f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/first/checkpoints/step-00000008"]
    second = train_here(*begins)
    assert second.status == 3 and "step 10: the loss is nan. Rollback 1 of 1" in second.output, second.output
    assert "step 11: the loss is nan, and the run has gone back 1 times already" in second.output
    assert read_run(second.run_dir).summary["rollbacks"] == 1
    again = train_here(*over(begins, "health.on_nan=stop", "checkpoint.every=2"))
    assert again.status == 0 and "rollbacks" not in read_run(second.run_dir).summary, "the step that asked for it is gone"
    assert why_not_paired(read_run(first.run_dir), read_run(second.run_dir)) is None, "both have passed over the same packs"


def test_it_is_evaluated_before_its_own_first_step_once(train_here: Callable, tmp_path: Path) -> None:
    """With rates far too high what it begins with is the best of all, and no checkpoint of its own has it."""
    quick = ["seed=5", "parity=off", "train.steps=8", "schedule={kind: constant}"]
    assert train_here(*quick, "evaluate.every=4", f"run_dir={tmp_path}/first").status == 0
    begins = [
        f"run_dir={tmp_path}/second",
        f"train.begin_with={tmp_path}/first/checkpoints/step-00000004",
        "evaluate.at_start=true",
    ]
    best = ["checkpoint.best=true", "evaluate.every=1", "optimizer.learning_rate=0.9"]
    second = train_here(*quick, *best, *begins)
    assert second.status == 0, second.output

    def evaluations(finished: Finished) -> dict[int, float]:
        return {r["step"]: r["held_out_loss"] for r in finished.records() if r.get("event") == "evaluation"}

    losses = evaluations(second)
    assert list(losses) == [4, 5, 6, 7, 8] and min(losses, key=losses.get) == 4
    assert losses[4] == {r["step"]: r for r in read_metrics(tmp_path / "first") if r.get("event")}[4]["held_out_loss"]
    own = min(list(losses)[1:], key=losses.get)
    assert best_checkpoint(second.run_dir).name == f"step-0000000{own}"

    for folder in (second.run_dir / "checkpoints").glob("step-0000000[678]"):
        shutil.rmtree(folder)  # as after a kill
    resumed = train_here(*quick, *best, *begins)
    assert "at step 5" in resumed.output and evaluations(resumed) == losses


@pytest.mark.parametrize(("batch", "steps"), [(512, 8), (128, 20)])
def test_a_horizon_in_tokens_over_steps_of_two_sizes_is_refused_with_the_steps_that_it_is(
    first: Finished, train_here: Callable, tmp_path: Path, batch: int, steps: int
) -> None:
    """Of 3,072 tokens 1,024 are trained: it ended too soon, or too late."""
    there, ours = tmp_path / BEGIN.format(seed=5), ["seed=5", f"batch.tokens={batch}", "parity=off"]
    begins = [*ours, f"run_dir={tmp_path}/second", f"train.begin_with={there}"]
    refused = train_here(*begins, "train.tokens=3072", "--plan").refusal
    why = (
        "does not say at which step to end: this checkpoint's 4 steps took 1,024 tokens, and as many steps of `batch.tokens: "
        f"{batch}` take {4 * batch:,}; set `train.steps: {steps}` in its place, which ends the run after as many tokens"
    )
    assert refused == f"`train.begin_with`: {there}: `train.tokens: 3072` {why}"
    resumes = [*ours, f"run_dir={first.run_dir}", "--resume", str(there), "--accept-changes"]
    assert train_here(*resumes, "train.epochs=0.8").refusal.endswith(f": `train.epochs: 0.8` {why}")

    second = train_here(*begins, f"train.steps={steps}")
    assert second.status == 0 and read_run(second.run_dir).summary["tokens"] == 3072, second.output
    cosine, before = (0.005 * (1 + math.cos(math.pi * 2 / length)) for length in (steps - 2, 10))
    assert second.records()[0]["learning_rate"] == pytest.approx(cosine)
    moved = f"the learning rate of step 5 is {cosine:.3g}, and the checkpoint's run would have had {before:.3g}, because "
    assert moved in second.output and "would leap" not in second.output
    again = train_here(*begins, f"train.steps={steps}")
    assert again.status == 0 and "would have had" not in again.output
