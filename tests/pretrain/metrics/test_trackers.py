from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer import event_file_writer

from foundation.errors import InputError
from foundation.reading import read_regular
from pretrain.metrics import tracked_run
from pretrain.metrics.delivered import _steps_in
from pretrain.metrics.services import check_services
from pretrain.metrics.trackers import JsonlTracker, Trackers, cut_back
from pretrain.metrics.trackers import resolve as resolve_settings
from pretrain.settings.recipe import LogSettings
from tests.moments import fork_context

CONFIG = {"name": "demo", "seed": 42, "optimizer": {"betas": [0.9, 0.95], "clip": None}, "data": {"mask_boundaries": True}}


def resolve(names: list[str], *, project: str = "p", **options) -> Trackers:
    return resolve_settings(LogSettings(trackers=names, project=project), **options)


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
    path.write_bytes(b'{"step": 1}\n{"loss": 2}\n{"step": 2, "lo\n\0\0\0}\n{"step": 2}\r\n{"step": 3}\n{"step": 3, "loss": 1.0}')
    cut_back(path, 3)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\r\n{"step": 3}\n'
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
        resolve(["jsonl", "tensorbord"], run_dir=tmp_path)


def test_a_tracker_whose_package_is_missing_is_refused_on_every_process_and_the_package_named(tmp_path):
    for main_process in (True, False):
        with pytest.raises(InputError, match=r"'comet_ml'.*pip install comet-ml"):
            resolve(["comet_ml"], run_dir=tmp_path, main_process=main_process)


FOLDERS = """
from foundation.errors import InputError
from pretrain.metrics.services import check_installed
for name in ("aim", "swanlab"):
    try:
        check_installed(name)
    except InputError as error:
        print(error)
"""


def test_a_folder_called_like_a_trackers_package_does_not_pass_for_it(tmp_path):
    for name in ("aim", "swanlab"):
        (tmp_path / name).mkdir()
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", FOLDERS], check=True, env=environment, capture_output=True, text=True)
    for name, said in zip(("aim", "swanlab"), done.stdout.splitlines(), strict=True):
        assert f"`log.trackers`: '{name}' needs a package that is not installed; `pip install {name}`" in said


def test_resolving_writes_nothing_and_other_processes_have_no_trackers(tmp_path):
    assert [each.name for each in resolve(["jsonl", "tensorboard"], run_dir=tmp_path).others] == ["tensorboard"]
    others = resolve(["jsonl", "tensorboard"], run_dir=tmp_path, main_process=False)
    others.start(CONFIG)
    others.log(record(1))
    others.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def accelerate_state(monkeypatch):
    # TensorBoard counts a process's files of events, and reads those of one second in the order of their names: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    yield PartialState(cpu=True)
    PartialState._reset_state()


@pytest.mark.usefixtures("accelerate_state")
def test_tensorboard_holds_every_scalar_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(steps, resumed_step, loss):
        trackers = resolve(["tensorboard"], run_dir=tmp_path, resumed_step=resumed_step)
        trackers.start(CONFIG)
        for step in steps:
            trackers.log({**record(step, loss), "skipped": False, "mfu_bf16_peak": None})
        trackers.log(evaluation(steps[-1]))
        trackers.finish()

    run(range(1, 8), 0, loss=3.0)
    run(range(6, 11), 5, loss=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = ["held_out_loss", "held_out_perplexity", "loss", "throughput_per_sec", "tokens_per_second"]
    assert sorted(events.Tags()["scalars"]) == names
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert len(events.Scalars("loss")) == 10 and losses == {step: 3.0 if step <= 5 else 2.0 for step in range(1, 11)}
    hparams = next((tmp_path / "tensorboard").rglob("hparams.yml")).read_text()
    assert "optimizer.betas: '[0.9, 0.95]'" in hparams and "seed: 42" in hparams


@pytest.mark.usefixtures("accelerate_state")
def test_tensorboard_gets_the_steps_during_which_it_was_not_named_or_had_failed(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(names, steps, resumed_step):
        trackers = resolve(names, run_dir=tmp_path, resumed_step=resumed_step)
        trackers.start(CONFIG)
        for step in steps:
            trackers.log(record(step))
        trackers.finish()

    run(["tensorboard"], range(1, 4), 0)  # which is killed, and has saved nothing
    run(["tensorboard"], range(1, 5), 0)
    run(["jsonl"], range(5, 9), 4)
    with monkeypatch.context() as patch:
        tracker = LOGGER_TYPE_TO_CLASS["tensorboard"]
        log = tracker.log
        fails = {11: OSError(28, "No space left on device")}

        def log_or_fail(self, values, step, **options):
            if step in fails:
                raise fails[step]
            log(self, values, step=step, **options)

        patch.setattr(tracker, "log", log_or_fail)
        run(["tensorboard"], range(9, 14), 8)
    run(["tensorboard"], range(13, 15), 12)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(event.step for event in events.Scalars("loss")) == list(range(1, 15))


@pytest.mark.usefixtures("accelerate_state")
def test_a_disk_that_is_full_for_tensorboard_is_one_warning_and_ends_no_run(tmp_path, monkeypatch, caplog):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def refuse(self, data):
        raise OSError(28, "No space left on device")

    tracebacks = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)  # which would print them
    trackers = resolve(["tensorboard"], run_dir=tmp_path)
    trackers.start(CONFIG)
    trackers.log(record(1))
    monkeypatch.setattr(RecordWriter, "write", refuse)
    trackers.others[0]._tracker.tracker.add_scalar("loss", 2.0, 2)  # as a picture is given, with no wait for the disk
    trackers.finish()
    assert caplog.text.count("tensorboard has failed") == 1 and tracebacks == []
    assert json.loads((tmp_path / "trackers.json").read_text())["tensorboard"]["complete"] is False


# ── One run over all starts ───────────────────────────────────────────────────────────────────────────────────────────────────


def run_elsewhere(program: str, arguments: list[str], environment: dict[str, str], wait: float = 100) -> int:
    """Run `program` with these arguments in a process of its own, forked from one that has imported torch and accelerate, which
    takes longer than all that is told to a service; returns its exit status, or minus the signal that killed it. TimeoutError
    where it has not ended after `wait` seconds."""
    begin = f"import os, sys\nos.environ |= {environment!r}\nsys.argv[1:] = {arguments!r}\n"
    process = fork_context.Process(target=exec, args=(begin + program, {"__name__": "__main__"}))
    process.start()
    process.join(wait)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"still running after {wait:g} s")
    return process.exitcode


# A start that is killed after step 3, and one that goes on from the checkpoint of step 2. Trackers that start services and read
# their environment once run in a process of their own.
PROGRAM = """
import gc, sys
from pathlib import Path
if __name__ == "__main__":
    gc.disable()
import matplotlib.image
import numpy
from accelerate import PartialState
from pretrain.metrics.trackers import resolve
from pretrain.settings.recipe import LogSettings

def run(name, run_dir, resumed_step, steps, loss):
    log = LogSettings(trackers=[name], project="pretraining-tests")
    trackers = resolve(log, run_dir=run_dir, resumed_step=resumed_step)
    trackers.start({"optimizer": {"learning_rate": 0.125, "betas": [0.9, 0.95]}, "log": {"every": resumed_step}})
    for step in steps:
        trackers.log({"step": step, "loss": loss * step, "gradient_norm": 0.25, "tflops": None, "skipped": False})
    sample = {"prompt": "Once upon", "text": " a time"}
    trackers.log({"step": steps[-1], "event": "samples", "samples": [sample]})
    trackers.picture(run_dir.parent / "loss.png", steps[-1])
    trackers.finish()

PartialState(cpu=True)
if __name__ == "__main__":
    for start in ((0, (1, 2, 3), 0.5), (2, (3, 4), 1234.5)):  # of all, so that none resumes the latest of its name
        for name, run_dir in zip(sys.argv[1::2], map(Path, sys.argv[2::2])):
            matplotlib.image.imsave(run_dir.parent / "loss.png", numpy.zeros((8, 8, 3)))
            run(name, run_dir, *start)
    sys.exit(0)
"""


@pytest.fixture(scope="module")
def tracked_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folders of both starts by tracker, which one process has told, as it imports for longer than it tells."""
    folders = {name: tmp_path_factory.mktemp(name) / "run-1" for name in ("wandb", "trackio")}
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folders["trackio"].parent)}
    folders["trackio of an equal name"] = folders["trackio"].parent / "elsewhere" / folders["trackio"].name
    folders["trackio of an equal name"].parent.mkdir()
    told = [str(each) for name, folder in folders.items() for each in (name.split()[0], folder)]
    assert run_elsewhere(PROGRAM, told, environment) == 0
    return folders


def test_wandb_runs_offline_as_one_run_that_has_each_step_once(tracked_elsewhere):
    run_dir = tracked_elsewhere["wandb"]
    kept = json.loads((run_dir / "trackers.json").read_text())["wandb"]
    first, second = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    assert first.name == second.name == f"run-{kept['id']}.wandb" and kept["seen"] == {"step": 4, "samples": 4}
    content = first.read_bytes()
    for expected in (b"optimizer.learning_rate", b"0.125", b"pretraining-tests", b"grad_norm", b"1.5", b"small", b"table-file"):
        assert expected in content
    assert b"tflops" not in content
    again = second.read_bytes()
    assert b"4938" in again and b"3703.5" not in again, "step 3 is there already"
    assert list(run_dir.rglob("media/images/loss_picture*.png")), "the picture"


def test_of_a_torn_file_of_wandb_the_steps_before_the_tear_are_read(tracked_elsewhere, tmp_path):
    files = (tracked_elsewhere["wandb"] / "wandb").glob("offline-run-*/run-*.wandb")  # one of each start, in any order
    whole = next(file.read_bytes() for file in files if next(_steps_in(file)) == 1)
    found = []
    for end in (*range(0, len(whole), 97), len(whole)):
        (tmp_path / "torn").write_bytes(whole[:end] + b"\0\xa5junk" * (end % 3))
        found.append(list(_steps_in(tmp_path / "torn")))
    assert found[0] == [] and found[-1][:3] == [1, 2, 3]
    assert all(each == found[-1][: len(each)] for each in found)


def test_trackio_has_both_starts_in_one_run_and_a_folder_of_equal_name_in_another(tracked_elsewhere):
    with closing(sqlite3.connect(tracked_elsewhere["trackio"].parent / "pretraining-tests.db")) as database:
        history = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
        configs = database.execute("select config from configs").fetchall()
    folders = [folder for name, folder in tracked_elsewhere.items() if "trackio" in name]
    names = [json.loads((folder / "trackers.json").read_text())["trackio"]["id"] for folder in folders]
    assert {name for name, *_ in history} == set(names) and all(name.startswith("run-1-") for name in names)
    assert len(set(names)) == len(names) == 2, "folders of one name are two runs"
    for each in names:
        records = [(step, json.loads(values)) for name, step, values in history if name == each]
        losses = [(step, values["loss"], values["grad_norm"]) for step, values in records if "loss" in values]
        assert losses == [(1, 0.5, 0.25), (2, 1.0, 0.25), (3, 1.5, 0.25), (4, 4938.0, 0.25)]
        assert [step for step, values in records if "samples" in values] == [3, 4]
    assert json.loads(configs[-1][0])["optimizer.learning_rate"] == 0.125


KILLED = """
import os, signal, sys, time
from pathlib import Path
from accelerate import PartialState
from pretrain.metrics.trackers import resolve
from pretrain.settings.recipe import LogSettings

if __name__ == "__main__":
    PartialState(cpu=True)
    resumed, last, names = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    trackers = resolve(LogSettings(trackers=names, project="p"), run_dir=Path(sys.argv[1]), resumed_step=resumed)
    trackers.start({"seed": 1})
    for step in range(resumed + 1, last + 1):
        trackers.log({"step": step, "loss": float(step)} | {f"number_{index}": step / 3 for index in range(60)})
        if step % 10 == 0:
            trackers.sync()
            trackers.log({"step": step, "event": "evaluation", "held_out_loss": 1.5})
            time.sleep(0.2)
    if last < 100:
        os.kill(os.getpid(), signal.SIGKILL)
    trackers.finish()
    sys.exit(0)
"""


def test_after_a_kill_every_service_has_each_step_and_evaluation_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, store = tmp_path / "run", f"file:{tmp_path}/store"
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path)}
    environment |= {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    from mlflow import MlflowClient

    for resumed, last in (0, 45), (40, 100):
        arguments = [run_dir, resumed, last, "tensorboard", "wandb", "mlflow", "trackio"]
        status = run_elsewhere(KILLED, list(map(str, arguments)), environment)
        kept = json.loads((run_dir / "trackers.json").read_text())
        assert (status, {entry["complete"] for entry in kept.values()}) == ((0, {True}) if last == 100 else (-9, {False}))
    steps, evaluations = list(range(1, 101)), list(range(10, 101, 10))
    files = (run_dir / "wandb").glob(f"offline-run-*/run-{kept['wandb']['id']}.wandb")
    assert sorted(step for file in files for step in _steps_in(file)) == steps, "wandb"
    with closing(sqlite3.connect(tmp_path / "p.db")) as database:
        rows = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics order by id")]
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    client = MlflowClient(store)
    for key, expected in ("loss", steps), ("held_out_loss", evaluations):
        assert [step for step, values in rows if key in values] == expected, "trackio"
        assert [event.step for event in events.Scalars(key)] == expected, "tensorboard"
        assert sorted(each.step for each in client.get_metric_history(kept["mlflow"]["id"], key)) == expected, "mlflow"


@pytest.mark.usefixtures("accelerate_state")
def test_mlflow_has_one_run_with_each_step_once_samples_and_picture(tmp_path, monkeypatch):
    for name, value in {
        "TRACKING_URI": f"file:{tmp_path}/store",
        "ALLOW_FILE_STORE": "true",
        "DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    import mlflow

    program: dict = {"__name__": "program"}
    exec(PROGRAM, program)  # in this process: mlflow needs no service of its own
    (tmp_path / "loss.png").write_bytes(b"picture")
    for resumed_step, steps, loss in ((0, (1, 2, 3), 0.5), (2, (3, 4), 1234.5)):
        program["run"]("mlflow", tmp_path / "run-1", resumed_step, steps, loss)
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'pretraining-tests'")
    (found,) = client.search_runs([experiment.experiment_id])
    history = {(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, "loss")}
    assert history == {(1, 0.5), (2, 1.0), (3, 1.5), (4, 4938.0)} and found.data.metrics["grad_norm"] == 0.25
    assert (found.data.params["optimizer.learning_rate"], found.data.params["log.every"]) == ("0.125", "0"), "what was first"
    assert found.info.run_name == "run-1" and found.info.status == "FINISHED"
    assert {each.path for each in client.list_artifacts(found.info.run_id)} == {"loss.png", "samples"}


class FailingTracker:
    """A service that is there at the start, and away at step 2 of its first start."""

    requires_logging_directory = False
    given: ClassVar[list[int]] = []
    starts = 0

    def __init__(self, project: str, **_: object) -> None: ...

    def start(self) -> None:
        type(self).starts += 1

    def store_init_configuration(self, values: dict) -> None: ...

    def log(self, values: dict, step: int) -> None:
        if step == 2 and self.starts == 1:
            raise ConnectionError("the server is away")
        self.given.append(step)

    def finish(self) -> None: ...


def test_a_tracker_that_fails_costs_no_training_and_gets_what_it_missed_at_the_next_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", FailingTracker)
    monkeypatch.setattr(tracked_run, "last_delivered", lambda *_: {"step": FailingTracker.given[-1]})
    for resumed_step, steps in ((0, (1, 2, 3, 4)), (3, (4, 5))):
        trackers = resolve(["trackio"], run_dir=tmp_path / "run", resumed_step=resumed_step)
        trackers.start(CONFIG)
        for step in steps:
            trackers.log(record(step))
        if resumed_step:
            trackers.finish()  # the first start is killed
    assert FailingTracker.given == [1, 2, 3, 4, 5]
    assert caplog.text.count("trackio has failed and gets nothing more of this run: the server is away") == 1


def test_a_tracker_that_is_named_later_gets_the_steps_before(tmp_path, monkeypatch):
    class LaterTracker(FailingTracker):
        given: ClassVar[list[int]] = []
        starts = 1

    monkeypatch.setattr(read_regular, "__defaults__", (250,))  # of a JSON document; lines of metrics may be any number
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", LaterTracker)
    monkeypatch.setattr(tracked_run, "last_delivered", lambda *_: {"step": LaterTracker.given[-1]})
    for resumed_step, steps, names in ((0, (1, 2, 3), []), (2, (3, 4), ["trackio"]), (4, (5, 6), []), (6, (7,), ["trackio"])):
        trackers = resolve(names, run_dir=tmp_path / "run", resumed_step=resumed_step)
        trackers.start(CONFIG)
        for step in steps:
            trackers.log(record(step))
        trackers.finish()
    assert LaterTracker.given == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 350


def test_a_tracker_that_does_not_start_and_a_damaged_trackers_file_are_one_message_each(tmp_path, monkeypatch):
    def refuse(tracker: object) -> None:
        raise ConnectionError("no such\n  project")

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", type("RefusingTracker", (FailingTracker,), {"start": refuse}))
    with pytest.raises(InputError, match=r"`log.trackers`: trackio does not start: no such project; mend that, or take it out$"):
        resolve(["trackio"], run_dir=tmp_path).start(CONFIG)
    for damaged in (
        '{"trackio": 3}',
        '{"trackio": {"seen": {"step": "x"}, "complete": true}}',
        '{"trackio": {"seen": {}}}',
        "[]",
        "{",
    ):
        (tmp_path / "trackers.json").write_text(damaged)
        with pytest.raises(InputError, match=r"trackers.json: .*remove it, and trackers begin another run"):
            resolve(["trackio"], run_dir=tmp_path)


# ── Before any work ───────────────────────────────────────────────────────────────────────────────────────────────────────────

CHECKS = """
import os, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # which answers everything by an error
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
threading.Thread(target=server.serve_forever, daemon=True).start()
from foundation.errors import InputError
from pretrain.metrics.services import check_services
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


def test_mlflow_without_a_server_or_with_a_store_that_cannot_be_used_is_one_message_each(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(
        InputError, match=r"mlflow's server http://127.0.0.1:9 cannot be reached within 5 s .*MLFLOW_TRACKING_URI"
    ):
        check_services(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    with pytest.raises(InputError, match=r"mlflow cannot use MLFLOW_TRACKING_URI nonsense://x: .*unsupported URI"):
        check_services(["mlflow"])
