from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.metrics.trackers import JsonlTracker, cut_back, resolve

CONFIG = {"name": "demo", "seed": 42, "optimizer": {"betas": [0.9, 0.95], "clip": None}, "data": {"mask_boundaries": True}}


def record(step: int, loss: float = 2.0) -> dict:
    return {"step": step, "loss": loss, "tokens_per_second": 1000.0 + step}


def evaluation(step: int) -> dict:
    return {"step": step, "event": "evaluation", "held_out_loss": 1.5, "held_out_perplexity": 4.48}


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


numbers = st.floats() | st.integers(-(2**53), 2**53) | st.none() | st.booleans() | st.text()


@given(records=st.lists(st.dictionaries(st.text(min_size=1), numbers | st.lists(numbers) | st.dictionaries(st.text(), numbers))))
def test_what_is_logged_is_read_back_with_null_for_what_is_no_number(records, tmp_path_factory):
    def expected(value):
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: expected(item) for key, item in value.items()}
        return [expected(item) for item in value] if isinstance(value, list) else value

    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.start()
    for values in records:
        tracker.log(values)
    # Before `finish`: a kill must not lose a line that was logged. Only line feeds end a line, whatever the strings hold.
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == [expected(values) for values in records]
    tracker.finish()


@given(steps=st.integers(1, 30), resumed=st.integers(0, 30), cut=st.integers(0, 60))
def test_a_killed_run_that_resumes_ends_with_every_step_exactly_once(steps, resumed, cut, tmp_path_factory):
    resumed = min(resumed, steps)
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    whole = [item for step in range(1, 31) for item in ([record(step), evaluation(step)] if step % 5 == 0 else [record(step)])]

    def run(records, resumed_step):
        tracker = JsonlTracker(path, resumed_step)
        tracker.start()
        for item in records:
            tracker.log(item)
        tracker.finish()

    run([item for item in whole if item["step"] <= steps], 0)
    # The kill falls inside the line of the next step, or at most back to the last line the checkpoint needs.
    with path.open("ab") as file:
        file.write((json.dumps(record(steps + 1)) + "\n").encode()[:cut])
    run([item for item in whole if item["step"] > resumed], resumed)
    assert lines(path) == whole


def test_cutting_back_drops_half_lines_zeros_and_lines_without_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"loss": 2}\n{"step": 2, "lo\n\0\0\0}\n{"step": 3}\n{"step": 3, "loss": 1.0}')
    cut_back(path, 3)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cutting_back_leaves_a_file_with_nothing_to_cut_untouched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    before = path.stat()
    cut_back(path, 1)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_a_disk_failure_while_cutting_back_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        cut_back(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(InputError, match=r"'tensorbord'.*did you mean 'tensorboard'"):
        resolve(["jsonl", "tensorbord"], run_dir=tmp_path, project="p")


def test_a_tracker_whose_package_is_missing_is_refused_on_every_process_and_the_package_named(tmp_path):
    for main_process in (True, False):
        with pytest.raises(InputError, match=r"'comet_ml'.*pip install comet-ml"):
            resolve(["comet_ml"], run_dir=tmp_path, project="p", main_process=main_process)


def test_resolving_writes_nothing_and_other_processes_have_no_trackers(tmp_path):
    assert len(resolve(["jsonl", "tensorboard"], run_dir=tmp_path, project="p").trackers) == 2
    others = resolve(["jsonl", "tensorboard"], run_dir=tmp_path, project="p", main_process=False)
    others.start(CONFIG)
    others.log(record(1))
    others.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def accelerate_state():
    yield PartialState(cpu=True)
    PartialState._reset_state()


@pytest.mark.usefixtures("accelerate_state")
def test_tensorboard_holds_every_scalar_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(steps, resumed_step, loss):
        trackers = resolve(["tensorboard"], run_dir=tmp_path, project="p", resumed_step=resumed_step)
        trackers.start(CONFIG)
        for step in steps:
            trackers.log({**record(step, loss), "skipped": False, "mfu_bf16_peak": None})
        trackers.log(evaluation(steps[-1]))
        trackers.finish()

    run(range(1, 8), 0, loss=3.0)
    run(range(6, 11), 5, loss=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["held_out_loss", "held_out_perplexity", "loss", "tokens_per_second"]
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert len(events.Scalars("loss")) == 10 and losses == {step: 3.0 if step <= 5 else 2.0 for step in range(1, 11)}
    hparams = next((tmp_path / "tensorboard").rglob("hparams.yml")).read_text()
    assert "optimizer.betas: '[0.9, 0.95]'" in hparams and "seed: 42" in hparams


# Trackers that start services and read their environment once run in a process of their own.
PROGRAM = """
import sys
from pathlib import Path
from accelerate import PartialState
from pretrain.metrics.trackers import resolve
PartialState(cpu=True)
trackers = resolve([sys.argv[1]], run_dir=Path(sys.argv[2]), project="pretraining-tests")
trackers.start({"optimizer": {"learning_rate": 0.125, "betas": [0.9, 0.95]}})
for step in (1, 2, 3):
    trackers.log({"step": step, "loss": 0.5 * step, "event": "none", "tflops": None})
trackers.finish()
"""


def track_elsewhere(name: str, run_dir: Path, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(run_dir)], check=True, env={**os.environ, **environment}, timeout=100
    )


def test_wandb_runs_offline_and_its_record_holds_config_and_history(tmp_path):
    track_elsewhere("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    for expected in (b"optimizer.learning_rate", b"0.125", b"pretraining-tests", b"loss", b"1.5"):
        assert expected in content
    assert b"tflops" not in content


CHECKS = """
import os, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # which answers everything by an error
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
threading.Thread(target=server.serve_forever, daemon=True).start()
from foundation.errors import InputError
from pretrain.metrics.trackers import check_services
for _ in range(2):
    try:
        check_services(["jsonl", "wandb"])
    except InputError as error:
        print(error)
    server.shutdown()
    server.server_close()
"""


def test_wandb_without_a_key_or_a_server_is_one_message_each_before_any_work(tmp_path):
    environment = {key: value for key, value in os.environ.items() if "wandb" not in key.lower()}
    environment |= {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", CHECKS]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=100)
    no_key, no_server = done.stdout.splitlines()
    assert re.search(r"wandb has no key for http://127.0.0.1:\d+; run `wandb login` or set WANDB_API_KEY", no_key)
    assert re.search(r"wandb's server http://127.0.0.1:\d+ cannot be reached within 5 s .*refused", no_server)
    assert "WANDB_MODE=offline" in no_key and "WANDB_MODE=offline" in no_server


def test_trackio_stores_config_and_history_in_its_local_database(tmp_path):
    track_elsewhere("trackio", tmp_path / "run-1", TRACKIO_DIR=str(tmp_path))
    with closing(sqlite3.connect(tmp_path / "pretraining-tests.db")) as database:
        history = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert [(name, step, json.loads(values)) for name, step, values in history] == [
        ("run-1", step, {"loss": 0.5 * step}) for step in (1, 2, 3)
    ]
    assert json.loads(config)["optimizer.learning_rate"] == 0.125
