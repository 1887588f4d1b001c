"""Runs that meet data which must not reach the weights: what is left is as if that data had never come."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_accelerate
from packing.batch import BatchStream
from pretrain.compare import report
from pretrain.metrics.run_record import is_step, read_metrics, read_run
from pretrain.model.packed import forward_backward

GIANT = 1e24  # finite in BF16 and FP32; its square is not, and so the gradient norm
OF_THE_MACHINE = {"step_ms", "data_wait_ms", "tokens_per_second", "samples_per_second", "tflops", "memory_gib", "recompiles"}


def data_step(batches: Any) -> int:
    """Which step of the stream of packs, counted from 0, these are: 2 of 120 packs each."""
    return round(batches.epoch * 120 / 2) - 1


@pytest.fixture
def giants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the gradients of these steps' data larger by GIANT, whenever that data comes."""

    def install(*data: int) -> None:
        def poisoned(model: Any, batches: Any, accelerator: Any, *around: Any) -> torch.Tensor:
            with monkeypatch.context() as patch:
                if data_step(batches) in data:
                    backward = accelerator.backward
                    patch.setattr(accelerator, "backward", lambda loss: backward(loss * GIANT))
                return forward_backward(model, batches, accelerator, *around)

        monkeypatch.setattr(train_accelerate, "forward_backward", poisoned)

    return install


@pytest.fixture
def delayed(low_precision_recipe: dict[str, Any]) -> dict[str, Any]:
    low_precision_recipe["model"]["config"]["num_hidden_layers"] = 1
    shorter = {"train": {"steps": 9}, "evaluate": {}, "batch": {"tokens": 2 * 128, "microbatch": 1}}
    precision = {"precision": "delayed", "fp8_config": {"on_unsupported": "emulate", "amax_history_len": 64}}
    return low_precision_recipe | shorter | precision


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """The figures of every step that do not depend on the machine."""
    steps = [record for record in read_metrics(run_dir) if is_step(record)]
    return [{key: value for key, value in step.items() if key not in OF_THE_MACHINE} for step in steps]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    files = (run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def state_of(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def assert_same_tensors(one: Path, other: Path, step: int = 9) -> None:
    ours, theirs = tensors(one, step), tensors(other, step)
    assert ours.keys() == theirs.keys() and [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_skipped_step_is_as_if_its_data_had_never_come(
    train_here: Callable, delayed: dict[str, Any], giants: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    giants(3)
    skipped = train_here("health.on_nan=skip", recipe=delayed | {"run_dir": str(tmp_path / "skipped")})
    assert skipped.status == 0 and "step 4 skipped: the gradient norm is inf" in skipped.output, skipped.output

    def never(model: Any, batches: Any, accelerator: Any, *around: Any) -> torch.Tensor:
        if data_step(batches) != 3:
            return forward_backward(model, batches, accelerator, *around)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        return torch.tensor(torch.nan)

    monkeypatch.setattr(train_accelerate, "forward_backward", never)
    without = train_here("health.on_nan=skip", recipe=delayed | {"run_dir": str(tmp_path / "without")})
    assert without.status == 0, without.output
    ours, theirs = trained(skipped.run_dir), trained(without.run_dir)
    assert ours[3]["skipped"] and ours[3]["gradient_norm"] is None
    assert ours[:3] + ours[4:] == theirs[:3] + theirs[4:]
    assert_same_tensors(skipped.run_dir, without.run_dir)
    assert any(name.startswith("fp8/") for name in tensors(skipped.run_dir, 9))


def test_a_rollback_is_as_if_the_data_since_the_checkpoint_had_never_come_and_resumes_so(
    train_here: Callable, delayed: dict[str, Any], giants: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    giants(5)
    recipe = delayed | {"run_dir": str(tmp_path / "back")}
    back = train_here("health.on_nan=rollback", recipe=recipe)
    assert back.status == 0 and "Traceback" not in back.output, back.output
    assert "step 6: the gradient norm is inf. Rollback 1 of 3 at most" in back.output and "at step 4" in back.output

    with monkeypatch.context() as patch:
        step = BatchStream.step
        patch.setattr(BatchStream, "step", lambda stream, number: step(stream, number if number < 4 else number + 2))
        without = train_here(recipe=delayed | {"run_dir": str(tmp_path / "without")})
    assert without.status == 0, without.output
    assert trained(back.run_dir) == trained(without.run_dir)
    assert_same_tensors(back.run_dir, without.run_dir)

    events = [record for record in read_metrics(back.run_dir) if record.get("event") == "rollback"]
    assert [(e["step"], e["resumed_from"], e["left_out"], e["rollbacks"]) for e in events] == [(5, 4, 2, 1)]
    assert [step["step"] for step in events[0]["abandoned"] if is_step(step)] == [5, 6]
    assert read_run(back.run_dir).summary["rollbacks"] == 1
    statistics = [json.loads(line)["step"] for line in (back.run_dir / "fp8_statistics.jsonl").read_text().splitlines()]
    assert statistics == [1, 5]

    assert state_of(back.run_dir, 4)["progress"].keys() == state_of(without.run_dir, 9)["progress"].keys()
    assert state_of(back.run_dir, 8)["progress"]["left_out"] == 2 and state_of(back.run_dir, 8)["health"]["rollbacks"] == 1
    before, last = trained(back.run_dir), tensors(back.run_dir, 9)
    for step in (8, 4):  # after the rollback; and from before it, from where the run meets the same data and goes back again
        again = train_here("health.on_nan=rollback", f"--resume={back.run_dir}/checkpoints/step-{step:08d}", recipe=recipe)
        assert again.status == 0, again.output
        assert trained(back.run_dir) == before
        assert all(torch.equal(last[name], tensor) for name, tensor in tensors(back.run_dir, 9).items())
        assert sum(record.get("event") == "rollback" for record in read_metrics(back.run_dir)) == 1


def test_steps_that_a_rollback_trains_anew_are_recorded_in_their_new_precision(
    train_here: Callable, delayed: dict[str, Any], giants: Callable
) -> None:
    plain = ("precision=bf16", "fp8_config.amax_history_len=null", "train.steps=5")
    begun = train_here(*plain, "checkpoint.every=2", recipe=delayed)
    assert begun.status == 0, begun.output
    giants(5, 6)  # the first failure goes back to step 5, the next to the checkpoint before that
    back = train_here("health.on_nan=rollback", "checkpoint.every=2", "--accept-changes", recipe=delayed)
    assert back.status == 0 and "Rollback 2 of 3" in back.output and "at step 4" in back.output, back.output
    audit = json.loads((back.run_dir / "audit.json").read_text())
    assert audit["phases"] == {"1": "bf16", "5": "delayed"}
    assert read_run(back.run_dir).precision == "delayed (ran bf16 to step 4, then delayed)"
    assert [change.step for change in read_run(back.run_dir).past.changed] == [4], "which the next resume goes by"


@pytest.mark.parametrize(("first", "then"), [("bf16", "delayed"), ("delayed", "bf16")])
def test_a_rollback_to_before_this_start_changes_and_confirms_the_precision_as_a_resume_does(
    first: str,
    then: str,
    train_here: Callable,
    delayed: dict[str, Any],
    giants: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint is of another schedule, so that the precision changes where no phase of the present one begins."""
    recipe = delayed | {"checkpoint": {"every": 2, "keep": 9}, "run_dir": str(tmp_path / "back")}
    alone = ["fp8_config.amax_history_len=null"] if first == "bf16" else []
    begun = train_here(f"precision={first}", *alone, "train.steps=5", recipe=recipe)
    assert begun.status == 0, begun.output
    shutil.copytree(begun.run_dir, other := tmp_path / "other")
    schedule = (f"precision=[{{until: 2, use: {first}}}, {{use: {then}}}]", "--accept-changes")
    giants(5, 6)  # the first failure goes back to step 5, the next to the checkpoint before that
    back = train_here(*schedule, "health.on_nan=rollback", recipe=recipe)
    assert back.status == 0 and "Rollback 2 of 3" in back.output and "at step 4" in back.output, back.output
    assert [step["precision"] for step in trained(back.run_dir)[4:]] == [then] * 5

    step = BatchStream.step
    monkeypatch.setattr(BatchStream, "step", lambda stream, number: step(stream, number + 3))
    resumed = train_here(*schedule, f"--resume={other}/checkpoints/step-00000004", recipe=recipe | {"run_dir": str(other)})
    assert resumed.status == 0, resumed.output
    assert trained(back.run_dir) == trained(other)
    assert_same_tensors(back.run_dir, other)
    written = [(folder / "audit.json").read_text().replace(str(folder), "") for folder in (back.run_dir, other)]
    ours, theirs = map(json.loads, written)
    for audit in (ours, theirs):
        del audit["kernels"]  # which say how long they took
        del audit["precisions"][first]["parity"]  # which says from which step the start went on
    assert ours == theirs and ours["effective"] == then
    assert ours.get("confirmed_in_step") == (5 if then == "delayed" else None)


def test_rollbacks_end_at_their_limit_and_the_step_that_halts_is_written_down(
    train_here: Callable, delayed: dict[str, Any], giants: Callable
) -> None:
    giants(5, 6, 7)
    run = train_here("health.on_nan=rollback", "health.max_rollbacks=2", "checkpoint.every=2", recipe=delayed)
    assert run.status == 3 and run.err.count("halted: ") == 1, run.output
    said = run.err.partition("halted: ")[2]
    assert said.startswith("step 3: the gradient norm is inf, and the run has gone back 2 times already")
    for remedy in ("optimizer.learning_rate", "fp8_config.margin", "precision=current", "keep_bf16_layers"):
        assert remedy in said
    events = [record for record in read_metrics(run.run_dir) if record.get("event") == "rollback"]
    assert [(e["resumed_from"], e["left_out"]) for e in events] == [(2, 5)], "step 4's weights failed twice, with other data"
    assert [(e["resumed_from"], e["left_out"]) for e in events[0]["abandoned"] if "resumed_from" in e] == [(4, 2)]

    said = report.write([run.run_dir])
    assert "| 3, halted |" in said and f"{run.run_dir.name} was halted at step 3: the gradient norm is inf" in said
    last = trained(run.run_dir)[-1]
    assert (last["step"], last["gradient_norm"]) == (3, None) and "gradient norm is inf" in last["halted"]
    assert [step["step"] for step in trained(run.run_dir)] == [1, 2, 3]
    assert "gradient norm" in read_run(run.run_dir).summary["halted"]
    assert not (run.run_dir / "summary.json").exists(), "which says of a run that it is finished"
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["step-00000002", "step-00000004.replaced-1"]


def test_weights_that_an_update_has_overflowed_are_never_saved(
    train_here: Callable, small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = train_accelerate.log

    def overflow(run: Any, figures: dict[str, Any], **more: Any) -> None:
        log(run, figures, **more)
        if figures["step"] == 8:
            run.assembly.hf.model.norm.weight.data[0] = torch.inf

    monkeypatch.setattr(train_accelerate, "log", overflow)
    run = train_here()
    assert run.status == 3 and "halted: step 8: the update has overflowed" in run.err and "model.norm.weight" in run.err
    assert [path.name for path in (run.run_dir / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the updates of these steps' data leave infinity in a weight, though their loss and gradient are finite."""

    def install(*data: int) -> None:
        def overflow(run: Any, batches: Any) -> Any:
            figures, decision = train_step(run, batches)
            if data_step(batches) in data:
                run.assembly.hf.model.norm.weight.data[0] = torch.inf
            return figures, decision

        monkeypatch.setattr(train_accelerate, "train_step", overflow)

    train_step = train_accelerate.train_step
    return install


@pytest.mark.parametrize("step", [8, 9])
def test_weights_that_an_update_has_overflowed_are_gone_back_from(
    step: int,
    train_here: Callable,
    delayed: dict[str, Any],
    overflowing: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a save between, and at the last one. What is left is as if the data since the checkpoint had never come."""
    overflowing(step - 1)
    back = train_here("health.on_nan=rollback", recipe=delayed | {"run_dir": str(tmp_path / "back")})
    assert back.status == 0 and "Traceback" not in back.output, back.output
    kept = 4 if step == 8 else 8
    said = f"step {step}: the update has overflowed, in model.norm.weight. Rollback 1 of 3 at most"
    assert said in back.output and f"at step {kept}" in back.output

    with monkeypatch.context() as patch:
        build, left_out = BatchStream.step, step - kept
        patch.setattr(BatchStream, "step", lambda stream, number: build(stream, number if number < kept else number + left_out))
        without = train_here(recipe=delayed | {"run_dir": str(tmp_path / "without")})
    assert without.status == 0, without.output
    assert trained(back.run_dir) == trained(without.run_dir)
    assert_same_tensors(back.run_dir, without.run_dir)
    assert read_run(back.run_dir).summary["rollbacks"] == 1 and "halted" not in read_run(back.run_dir).summary


@pytest.mark.usefixtures("blank_curves")  # of a halted run they are drawn above
@pytest.mark.parametrize(("setting", "why"), [("rollback", "no checkpoint yet"), ("skip", "the update has overflowed, and this")])
def test_a_run_whose_weights_cannot_be_saved_says_so_in_its_report(
    setting: str, why: str, train_here: Callable, delayed: dict[str, Any], overflowing: Callable
) -> None:
    overflowing(3)
    run = train_here(f"health.on_nan={setting}", recipe=delayed)
    assert run.status == 3 and "halted: step 4: the update has overflowed" in run.err and why in run.err, run.output
    *_, step, event = read_metrics(run.run_dir)
    assert step["step"] == 4 and not step["skipped"] and event["event"] == "halted" and "model.norm.weight" in event["reason"]
    assert not (run.run_dir / "checkpoints").exists()
    said = report.write([run.run_dir])
    assert "| 4, halted |" in said and f"{run.run_dir.name} was halted at step 4: the update has overflowed" in said

    again = train_here(recipe=delayed)  # on the same data, but for what broke it
    assert again.status == 3 and sum(record.get("event") == "halted" for record in read_metrics(run.run_dir)) == 1


def test_steps_skipped_after_an_overflow_save_nothing_over_what_is_kept(
    train_here: Callable, delayed: dict[str, Any], overflowing: Callable
) -> None:
    """The loss of every step after it is NaN: where such steps were saved, they would push out what there is to go back to."""
    overflowing(2)
    run = train_here("health.on_nan=skip", "checkpoint={every: 2, keep: 1}", "train.steps=6", recipe=delayed)
    assert run.status == 3 and "halted: step 4: the update has overflowed, and this step is not saved" in run.err, run.output
    assert [step["skipped"] for step in trained(run.run_dir)] == [False, False, False, True]
    assert [path.name for path in (run.run_dir / "checkpoints").iterdir()] == ["step-00000002"]
    assert not (run.run_dir / "final").exists()


def test_a_source_whose_weights_are_not_finite_is_named(train_here: Callable, small_recipe: dict[str, Any]) -> None:
    assert train_here("train.steps=1", "schedule.warmup=0").status == 0
    source = Path(small_recipe["run_dir"]) / "final"
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    recipe = small_recipe | {"model": {"source": str(source)}, "run_dir": f"{small_recipe['run_dir']}-2"}
    halt = train_here(recipe=recipe)
    assert halt.status == 3
    assert "hold infinity or NaN, in model.layers.1.mlp.up_proj.weight." in halt.err
    assert f"`model.source: {source}`" in halt.err and "optimizer.learning_rate" not in halt.err
