"""One of two real processes dies, stops, hangs, fails or lags: the other ends within seconds, with one message that names it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import train_accelerate
from foundation.errors import InputError
from packing.arrow import DiskFull
from packing.batch import BatchStream
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.metrics.run_record import read_metrics
from pretrain.model.loss.head import LossHead
from pretrain.run import ranks
from pretrain.run.ranks import LOST, Beat, OwnTime, hanging, lagging
from tests.conftest import write_recipe
from tests.moments import LauncherProcess, Moment

pytestmark = pytest.mark.multi

DDP = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
SHORT = "train.rank_timeout=2"
STEP = 7  # after the checkpoint of step 4, and when all have compiled what they compile


# ── What happens to the second rank ───────────────────────────────────────────────────────────────────────────────────────────


def in_forward(happens: Callable[[], Any], rank: int, *, who: int = 1) -> None:
    """In one process, where the forward and backward passes of step STEP begin."""
    compute = train_accelerate.forward_backward
    steps = iter(range(1, 100))

    def compute_or_not(*arguments: Any) -> Any:
        if next(steps) == STEP:
            happens()
        return compute(*arguments)

    if rank == who:
        train_accelerate.forward_backward = compute_or_not


def in_data(happens: Callable[[], Any], rank: int) -> None:
    """In the second process, where a thread reads what step STEP trains on."""
    read = BatchStream.step

    def read_or_not(stream: BatchStream, number: int) -> Any:
        if number == STEP - 1:
            happens()
        return read(stream, number)

    if rank == 1:
        BatchStream.step = read_or_not


def in_save(happens: Callable[[], Any], rank: int) -> None:
    """In the second process, when it is to save step 8."""
    write = Checkpoints.begin

    def write_or_not(checkpoints: Checkpoints, step: int, *arguments: Any, **options: Any) -> Any:
        if step == 8:
            happens()
        return write(checkpoints, step, *arguments, **options)

    if rank == 1:
        Checkpoints.begin = write_or_not


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise InputError("what only this rank has found")


def fill_disk() -> None:
    raise DiskFull("what only this rank has found")


def in_the_first(happens: Callable[[], Any], rank: int) -> None:
    """As `in_forward`, in the first process; the second one writes down its exit status."""
    in_forward(happens, rank, who=0)
    leave = os._exit

    def tell_and_leave(status: int) -> None:
        os.write(2, f"\nthe other ends with {status}\n".encode())
        leave(status)

    if rank == 1:
        os._exit = tell_and_leave


def bug() -> None:
    raise ValueError("a bug of this rank")


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (partial(in_forward, die), f"is gone since step {STEP}, without a word"),
        (partial(in_save, die), "is gone since step 8, without a word"),
        (partial(in_forward, stop), f"has not been heard of since step {STEP}, 2."),
        (partial(in_data, hang), f"hangs in step {STEP}, waiting for its data (packing/batch.py:"),
    ],
    ids=["killed", "killed in a save", "stopped", "asleep in data loading"],
)
def test_a_rank_that_is_lost_ends_the_run_with_one_message(
    before: Callable[[int], None], says: str, train_as_ranks: Callable, small_recipe: dict[str, Any]
) -> None:
    limit = [] if before.args == (die,) else [SHORT]  # a death needs none
    run = train_as_ranks(*limit, "parity=off", launch=DDP, before=before)
    assert run.status == LOST, run.output
    assert run.err.count("lost: rank 1 on ") == 1 and "Traceback" not in run.err, run.err
    assert says in run.err and f"{Path(small_recipe['run_dir'])}/checkpoints/step-00000004: start the same" in run.err
    (event,) = [line for line in read_metrics(run.run_dir) if line.get("event") == "lost_rank"]
    assert event["ranks"] == [1] and event["reason"] in run.err


def test_without_a_launcher_the_death_of_the_first_rank_is_noticed_as_well(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """The store, in which ranks leave signs of life, dies with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments, logs = [str(write_recipe(small_recipe, tmp_path)), "parity=off"], [tmp_path / f"{rank}.log" for rank in range(2)]
    moments = [Moment("logged", "^6$", signal.SIGKILL)], []
    started = [
        LauncherProcess(arguments, log, *when, **together, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank, (log, when) in enumerate(zip(logs, moments, strict=True))
    ]
    assert [process.end() for process in started] == [-signal.SIGKILL, LOST], logs[1].read_text()
    said = logs[1].read_text()
    assert said.count("lost: rank 0 on ") == 1 and "the last checkpoint is" in said and "Traceback" not in said, said


@pytest.mark.parametrize(
    ("happens", "status", "says"),
    [(fail, 2, "error: what only this"), (fill_disk, 2, "error: what only this"), (bug, 1, "ValueError: a bug of this")],
)
def test_a_rank_that_fails_by_itself_has_the_word_and_the_other_ends_with_its_status(
    happens: Callable[[], None], status: int, says: str, train_as_ranks: Callable
) -> None:
    run = train_as_ranks("parity=off", launch=DDP, before=partial(in_the_first, happens))
    assert run.status == status and says in run.err, run.output
    assert f"the other ends with {status}" in run.err, run.output
    assert "lost:" not in run.err and "gloo" not in run.err and run.err.count("Traceback") == (happens is bug)


def test_packs_that_one_rank_cannot_read_end_all_with_the_step_before_them_saved(train_as_ranks: Callable) -> None:
    run = train_as_ranks("parity=off", launch=DDP, before=partial(in_data, fail))
    assert run.status == 2 and f"what only this rank has found. Step {STEP - 1} is saved" in run.err, run.output
    assert (run.run_dir / "checkpoints" / f"step-{STEP - 1:08d}").is_dir() and "Traceback" not in run.err, run.output


def slow(rank: int) -> None:
    """The second process takes long for each forward pass, and ranks are compared sooner than they would be."""
    ranks.LAG_EVERY, ranks.LAG_STEPS, ranks.BEAT = 7, 4, 0.2
    compute = LossHead.forward

    def compute_slowly(*arguments: Any) -> Any:
        time.sleep(0.15)
        return compute(*arguments)

    if rank == 1:
        LossHead.forward = compute_slowly


def test_a_rank_that_lags_is_named_once_though_all_exchange_scales_after_each_pass(train_as_ranks: Callable) -> None:
    """Delayed scaling's largest values are compared between two passes, where all wait for the slowest rank."""
    overrides = ["precision=delayed", "fp8_config.backend=emulation", "parity=off", "train.steps=10", "evaluate.every=null"]
    run = train_as_ranks(*overrides, launch=DDP, before=slow)
    assert run.status == 0 and run.out.count("WARNING  rank 1 on ") == 1 and "lags: its forward passes" in run.out, run.output
    (event,) = [line for line in read_metrics(run.run_dir) if line.get("event") == "straggler"]
    assert event["rank"] == 1 and event["own_ms"] > event["median_ms"] + 200


def test_a_ranks_own_time_is_that_of_its_forward_passes_without_what_comes_between() -> None:
    own = OwnTime(torch.device("cpu"))
    assert own.milliseconds() is None
    for begins, seconds in ((True, 0.02), (False, 0.2), (True, 0.02), (False, 0.0), (True, 0.0)):
        own.mark(begins=begins)
        time.sleep(seconds)
    assert 40 <= own.milliseconds() < 200
    own.clear()
    assert own.milliseconds() is None


# ── Who is named ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def at(step: int, order: int, seconds: float = 40.0, **more: Any) -> Beat:
    return Beat(1, step, order, "computing", **{"patient": False} | more, seconds=seconds)


def test_the_rank_behind_is_the_one_that_hangs_once_all_stand_still_for_longer_than_the_limit() -> None:
    assert hanging({0: at(12, 4), 1: at(12, 3), 2: at(12, 4), 3: at(12, 1)}, 30) == [3]
    assert hanging({0: at(12, 4), 1: at(12, 3, seconds=29)}, 30) == []
    assert hanging({0: at(12, 4, seconds=29), 1: at(12, 3)}, 30) == []
    assert hanging({0: at(12, 4), 1: at(12, 3, left=True)}, 30) == []


def test_long_steps_compiling_saving_and_equal_places_are_not_hanging() -> None:
    assert hanging({0: at(12, 4, usual=20.0), 1: at(12, 3)}, 30) == []
    assert hanging({0: at(12, 4), 1: at(12, 3, compiles=True)}, 30) == []
    assert hanging({0: at(12, 4, waits=True), 1: at(12, 4, patient=True)}, 30) == []
    assert hanging({0: at(13, 4, patient=True), 1: at(12, 3)}, 30) == [], "the one ahead may be at work"
    assert hanging({0: at(12, 4), 1: at(12, 4)}, 30) == []


def test_of_ranks_at_one_place_the_one_that_waits_for_nobody_hangs() -> None:
    assert hanging({0: at(12, 4, waits=True), 1: at(12, 4)}, 30) == [1]


def test_a_rank_lags_by_more_than_a_third_of_the_median_rank_and_a_share_of_the_step() -> None:
    fast = {rank: at(200, 4, own_ms=100.0, usual=0.2) for rank in range(3)}
    assert lagging(fast | {3: at(200, 4, own_ms=135.0, usual=0.2)}) == {3: 100.0}
    assert lagging(fast | {3: at(200, 4, own_ms=125.0, usual=0.2)}) == {}
    assert lagging(fast | {3: at(200, 4, own_ms=135.0, usual=1.0)}) == {}
    assert lagging(fast | {3: at(200, 4)}) == {}, "not known yet"
