"""What a resumed run tells of a checkpoint: of a rate that has fallen already, and of the precisions around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.reading import read_regular
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.health import Health
from pretrain.metrics.run_record import read_run
from pretrain.metrics.trackers import cut_back, last_steps
from pretrain.run.changes import extending_a_decayed_run, precisions_around, rate_has_moved
from pretrain.run.resume import ResumePoint, keep_what_is_cut, renamed_source
from pretrain.settings.config import identity_of, load_recipe
from pretrain.settings.recipe import Recipe
from tests.pretrain.compare.made_runs import make_run

RECIPE = {
    "name": "tiny",
    "model": {"config": {"model_type": "llama"}},
    "data": {"packs": "packs", "length": 256},
    "batch": {"tokens": 1024},
    "optimizer": {"learning_rate": 3e-3},
}


def told(
    folder: Path, step: int, to: int, kept: list[int], horizons: dict[int, int] | None = None, **schedule: Any
) -> str | None:
    """Of a run of 100 steps at `step` that is to go on `to` a later one, with the checkpoints `kept`; `horizons`: those of the
    checkpoints that were saved before the run was prolonged to 100."""
    short, longer = (
        Recipe.model_validate(RECIPE | {"schedule": schedule, "train": {"steps": steps}, "precision": "fp32"})
        for steps in (100, to)
    )
    identity, health = identity_of(short, "fingerprint"), Health(short.health).state_dict()
    for each in kept:
        (folder / f"step-{each:08d}").mkdir()
        state = TrainState(steps=(horizons or {}).get(each, 100), step=each).record(identity)
        written = json.dumps(state | {"health": health, "microbatch": 1, "world_size": 1})
        (folder / f"step-{each:08d}" / "state.json").write_text(written)
    record = {"progress": {"step": step, "steps": 100}, "identity": identity}
    job = SimpleNamespace(recipe=longer, plan=SimpleNamespace(steps=to))
    return extending_a_decayed_run(folder / f"step-{step:08d}", record, job)


def test_the_newest_checkpoint_before_the_decay_is_named_with_how_to_go_on_from_it(tmp_path: Path) -> None:
    hint = told(tmp_path, 100, 120, [40, 60, 80, 100], kind="wsd", warmup=20, decay=0.4)
    assert "began after step 60" in hint
    assert "leap from 7.5e-05 to 0.00125" in hint  # 1 / 40 of the peak was left; of 120 steps the last 48 decay
    assert hint.endswith(f"--resume {tmp_path / 'step-00000060'} --accept-changes")


def test_a_checkpoint_from_an_earlier_decay_is_none_to_go_on_from(tmp_path: Path) -> None:
    hint = told(tmp_path, 100, 120, [20, 30, 40, 50, 100], dict.fromkeys((20, 30, 40, 50), 50), kind="wsd", warmup=2, decay=0.4)
    assert "began after step 60" in hint and f"--resume {tmp_path / 'step-00000030'} " in hint
    (tmp_path / "step-00000030" / "state.json").write_text("{")
    assert f"--resume {tmp_path / 'step-00000020'} " in told(tmp_path, 100, 120, [], kind="wsd", warmup=2, decay=0.4)


def test_where_none_is_kept_it_says_what_decides_that(tmp_path: Path) -> None:
    hint = told(tmp_path, 100, 120, [80, 100], kind="wsd", warmup=20, decay=0.4)
    assert "No checkpoint from before it is there" in hint and "checkpoint.every" in hint


def test_a_schedule_that_falls_all_the_way_has_no_better_place(tmp_path: Path) -> None:
    assert "train anew" in told(tmp_path, 100, 120, [40, 100], kind="cosine", warmup=20)


@pytest.mark.parametrize(
    ("step", "to", "schedule"),
    [
        (60, 120, {"kind": "wsd", "decay": 0.4}),
        (80, 100, {"kind": "wsd", "decay": 0.4}),
        (80, 90, {"kind": "wsd", "decay": 0.4}),
        (100, 120, {"kind": "constant"}),
        (61, 120, {"kind": "wsd", "decay": 0.4}),
        (100, 120, {"kind": "wsd", "decay": 0.4, "min_lr_ratio": 1.0}),
    ],
    ids=[
        "before the decay",
        "not prolonged",
        "shortened",
        "never decays",
        "its first step, at the whole rate",
        "falls by nothing",
    ],
)
def test_nothing_is_said_where_no_decay_is_undone(tmp_path: Path, step: int, to: int, schedule: dict) -> None:
    assert told(tmp_path, step, to, [40, step], **schedule) is None


def test_the_rate_that_a_checkpoint_would_have_had_is_of_its_own_largest_rate() -> None:
    was, now = (
        Recipe.model_validate(
            RECIPE | {"optimizer": {"learning_rate": rate}, "schedule": {"kind": "linear"}, "train": {"steps": n}}
        )
        for rate, n in ((0.01, 20), (0.03, 40))
    )
    record = {"progress": {"step": 10, "steps": 20}, "identity": identity_of(was, "fingerprint")}
    said = rate_has_moved(record, SimpleNamespace(recipe=now, plan=SimpleNamespace(steps=40)))
    assert said.startswith("the learning rate of step 11 is 0.0225, and the checkpoint's run would have had 0.005, because")


@pytest.mark.parametrize(
    ("step", "around"),
    [
        (0, ("nvfp4", "nvfp4")),
        (1, ("nvfp4", "nvfp4")),
        (7, ("nvfp4", "nvfp4")),
        (8, ("nvfp4", "mxfp8")),
        (15, ("mxfp8", "bf16")),
        (20, ("bf16", "bf16")),
        (25, ("bf16", "bf16")),
    ],
)
def test_the_precisions_around_a_checkpoint_are_those_of_its_own_schedule(step: int, around: tuple[str, str]) -> None:
    phases = [{"until": 0.4, "use": "nvfp4"}, {"until": 15, "use": "mxfp8"}, {"use": "bf16"}]
    record = {"identity": {"precision": phases}, "progress": {"step": step, "steps": 20}}
    assert precisions_around(record) == around


@pytest.mark.parametrize("precision", [None, "nvfp4", [{"until": 30, "use": "nvfp4"}, {"use": "bf16"}]], ids=str)
def test_without_a_schedule_that_fits_its_horizon_no_precision_is_said_to_be_around(precision: Any) -> None:
    record = {"identity": {"precision": precision}, "progress": {"step": 5, "steps": 20}}
    assert precisions_around(record) == (None, None)


@pytest.mark.parametrize(("last", "complete"), [(8, True), (4, True), (8, False), (4, False)])
def test_a_run_sent_back_names_the_tracker_that_keeps_the_steps_it_gives_up(last, complete, tmp_path: Path, caplog: Any):
    folder = make_run(tmp_path / "run", [3.0] * last, "log.trackers=[tensorboard,mlflow]")
    entry = {"id": None, "seen": {"step": last if complete else 2}, "complete": complete}
    (folder / "trackers.json").write_text(json.dumps(dict.fromkeys(("tensorboard", "mlflow", "wandb"), entry)))
    job = SimpleNamespace(run_dir=folder, recipe=load_recipe(folder / "config.yaml"))
    keep_what_is_cut(job, 4)
    told = [record.getMessage() for record in caplog.records if "`log.trackers`" in record.getMessage()]
    assert [text.split()[1] for text in told] == ["mlflow"] * (last > 4), "neither TensorBoard, nor one that is named no more"
    assert all(f"remove {folder / 'trackers.json'}" in text for text in told)


def test_metrics_longer_than_any_json_document_may_be_are_read_kept_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run of a million steps writes 800 MB of them."""
    monkeypatch.setattr(read_regular, "__defaults__", (1000,))
    folder = make_run(tmp_path / "run", [3.0] * 8)
    path, job = folder / "metrics.jsonl", SimpleNamespace(run_dir=folder, recipe=load_recipe(folder / "config.yaml"))
    whole = path.read_bytes()
    assert len(whole) > 2000 and read_run(folder).summary["steps"] == 8 and last_steps(path)["step"] == 8
    keep_what_is_cut(job, 4)
    cut_back(path, 4)
    assert (folder / "metrics.jsonl.replaced-1").read_bytes() == whole
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4]) and read_run(folder).summary["steps"] == 4


@pytest.mark.parametrize(
    ("place", "begins", "name"),
    [
        ("checkpoints/step-00000008.replaced-1", False, "step-00000008"),
        ("checkpoints/step-00000008.replaced-1", True, "step-00000008.replaced-1"),
        ("checkpoints/step-00000008", False, "step-00000008"),
        ("elsewhere/step-00000008.replaced-1", False, "step-00000008.replaced-1"),
    ],
    ids=["resumed", "begun with", "never set aside", "of another run"],
)
def test_only_a_checkpoint_of_its_own_that_a_run_resumes_gets_its_name_back(place, begins, name, tmp_path: Path):
    (tmp_path / place).mkdir(parents=True)
    source = ResumePoint(tmp_path / place, {"progress": {"step": 8}}, [], begins)
    found = renamed_source(source, Checkpoints(tmp_path / "checkpoints", keep=3)).path
    assert found == (tmp_path / place).with_name(name) and found.exists()
