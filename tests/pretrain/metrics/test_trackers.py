"""`metrics.jsonl` has every step once, and failing trackers do not end a training."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.metrics.trackers import JsonlTracker, Trackers, check_trackers
from pretrain.settings.recipe import LogSettings

CONFIG = {"name": "demo", "seed": 42, "data": {"mask_boundaries": True}}
CONFIG |= {"optimizer": {"betas": [0.9, 0.95], "clip": None}}


def trackers_of(names: list[str], run_dir: Path, resumed_step: int = 0) -> Trackers:
    return Trackers(LogSettings(trackers=names, project="p"), run_dir, resumed_step)


def record(step: int, loss: float = 2.0) -> dict:
    return {"step": step, "loss": loss, "tokens_per_second": 1000.0 + step}


def evaluation(step: int) -> dict:
    return {"step": step, "event": "evaluation", "held_out_loss": 1.5, "held_out_perplexity": 4.48}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


numbers = st.floats() | st.integers(-(2**53), 2**53) | st.none() | st.booleans() | st.text()
values = numbers | st.lists(numbers) | st.dictionaries(st.text(), numbers)


@given(records=st.lists(st.dictionaries(st.text(min_size=1), values)))
def test_logged_values_are_read_back_with_null_for_nan_and_infinity(records, tmp_path_factory):
    def expected(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: expected(item) for key, item in value.items()}
        if isinstance(value, list):
            return [expected(item) for item in value]
        return value

    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    tracker = JsonlTracker(path, 0)
    tracker.start()
    for values in records:
        tracker.log(values)
    # Read before `finish`, because a kill must not lose a logged line. Only line feeds end a line,
    # whatever the strings contain.
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == [
        expected(values) for values in records
    ]
    tracker.finish()


@given(steps=st.integers(1, 30), resumed=st.integers(0, 30), cut=st.integers(0, 60))
def test_a_killed_and_resumed_run_has_every_step_once(steps, resumed, cut, tmp_path_factory):
    resumed = min(resumed, steps)
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    complete = [
        item
        for step in range(1, 31)
        for item in ([record(step), evaluation(step)] if step % 5 == 0 else [record(step)])
    ]

    def run(records: list[dict[str, Any]], resumed_step: int) -> None:
        tracker = JsonlTracker(path, resumed_step)
        tracker.start()
        for item in records:
            tracker.log(item)
        tracker.finish()

    run([item for item in complete if item["step"] <= steps], 0)
    # The kill interrupts the line of the next step.
    with path.open("ab") as file:
        file.write((json.dumps(record(steps + 1)) + "\n").encode()[:cut])
    run([item for item in complete if item["step"] > resumed], resumed)
    assert lines(path) == complete


def test_a_missing_package_of_a_tracker_is_named():
    with pytest.raises(InputError, match=r"'comet_ml'.*pip install comet-ml"):
        check_trackers(LogSettings(trackers=["comet_ml"]))


@pytest.fixture
def state() -> None:
    PartialState()  # accelerate's trackers ask it whether this is the main process


def test_tensorboard_gets_numbers_and_samples(tmp_path, state):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = trackers_of(["tensorboard"], tmp_path)
    trackers.start(CONFIG)
    for step in (1, 2):
        trackers.log(record(step, 3.0 - step))
    trackers.log(evaluation(2))
    trackers.log({"step": 2, "event": "samples", "samples": [{"prompt": "The ", "text": "end"}]})
    trackers.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert events.Scalars("tokens_per_second")[0].value == 1001.0
    assert events.Scalars("held_out_loss")[0].step == 2
    assert any("samples" in tag for tag in events.Tags()["tensors"])
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 2, 2]


@pytest.mark.nightly
def test_wandb_resumes_its_run(tmp_path, state, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb  # slow, and only this test needs it

    ids = []
    for resumed_step in (0, 2):
        trackers = trackers_of(["wandb"], tmp_path, resumed_step)
        trackers.start(CONFIG)
        ids.append(trackers.services["wandb"].tracker.id)
        for step in (1, 2):
            trackers.log(record(resumed_step + step))
        trackers.finish()
    # Otherwise the next run in this process inherits the environment of this one.
    wandb.teardown()
    assert ids[0] == ids[1] == json.loads((tmp_path / "trackers.json").read_text())["run"]
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))) == 2
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.nightly
def test_mlflow_writes_into_the_folder_of_the_environment_variable(tmp_path, state, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trackers = trackers_of(["mlflow"], tmp_path)
    trackers.start(CONFIG)
    trackers.log(record(1))
    trackers.finish()
    (losses,) = tmp_path.glob("mlruns/*/*/metrics/loss")
    assert losses.read_text().split()[1:] == ["2.0", "1"]


class Failing(GeneralTracker):
    """A tracker that fails from the second step on."""

    name = "failing"
    requires_logging_directory = False
    tracker = None

    def __init__(self, project: str) -> None:
        super().__init__()

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict) -> None:
        assert values["optimizer.betas"] == "[0.9, 0.95]", "only scalars"

    error: Exception

    def log(self, values: dict, step: int) -> None:
        if step > 1:
            raise self.error


SECRETS = "no route to http://us:secret@host/api?token=secret&run=1 (Caused by x)"


@pytest.mark.parametrize("error", [ConnectionError, KeyError])
def test_a_failing_tracker_causes_one_warning(error, tmp_path, state, monkeypatch, caplog):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "failing", Failing)
    monkeypatch.setattr(Failing, "error", error(SECRETS), raising=False)
    trackers = trackers_of(["failing"], tmp_path)
    trackers.start(CONFIG)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log(record(step))
        trackers.finish()
    assert caplog.text.count("no route to http://host/api (Caused by x)") == 1
    assert "secret" not in caplog.text
    assert "failing" in caplog.text and error.__name__ in caplog.text
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_tracker_that_does_not_start_is_named(tmp_path, state, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "failing", Failing)
    trackers = trackers_of(["failing"], tmp_path)
    with pytest.raises(InputError, match="failing does not start: AssertionError: only scalars"):
        trackers.start({"optimizer": {"betas": 0.9}})
