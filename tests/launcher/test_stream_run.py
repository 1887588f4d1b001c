"""A run on packs that are made while it trains: the same curve when it goes on, on empty disks."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.conftest import over, write_recipe
from tests.moments import LauncherProcess

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "into", "the", "green", "wood"]
STEPS = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    texts = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(i % 40 + 5)) for i in range(330)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False, **special))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def recipe(folder: Path, recipe_for: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    small = recipe_for(folder / "run")
    config = {key: value for key, value in small["model"]["config"].items() if key != "vocab_size"}
    data = {"source": str(folder / "texts.jsonl"), "tokenizer": str(folder / "tokenizer.json"), "packs": str(folder / "packs")}
    streaming = {"disk_gb": 0.0003, "window": 3000}
    return small | {
        "model": {"config": config},
        "data": data | {"length": 32, "held_out": 0.05, "processes": 1, "streaming": streaming},
        "train": {"steps": STEPS},
        "evaluate": {"every": 30},
        "checkpoint": {"every": 15},
        "parity": "off",
    }


def losses(run: Any) -> list[float]:
    return [record["loss"] for record in run.records() if "loss" in record]


def wait_and_end(recipe: dict[str, Any], folder: Path, settings: list[str], end: Callable[..., None]) -> tuple[int, str, int]:
    """A run that waits as nobody makes packs any more, and nothing says so: the process that made them stands still. `end` is
    given both. The run's exit status, what it said, and its last step, of which it has the one checkpoint."""
    run_dir, log = folder / "run", folder / "run.log"
    run = LauncherProcess([str(write_recipe(recipe, folder)), *settings, "train.steps=100000", "checkpoint.every=null"], log)
    packer = None
    try:
        run.wait_until(lambda: (run_dir / "metrics.jsonl").exists())
        packer = next(each for each in psutil.Process(run.pid).children() if "packing.packer" in " ".join(each.cmdline()))
        packer.suspend()
        before, looked = -1, 0.0
        while (size := (run_dir / "metrics.jsonl").stat().st_size) > before or time.monotonic() < looked + 1:
            looked = time.monotonic() if size > before else looked
            before = size
            time.sleep(0.1)
        end(run, packer)
        status = run.end()
    except BaseException:  # a Ctrl-C as well, of which a process that stands still learns nothing
        if packer is not None and packer.is_running():
            packer.kill()
        run.send_signal(signal.SIGKILL)
        raise
    steps = len((run_dir / "metrics.jsonl").read_text().splitlines())
    assert [each.name for each in (run_dir / "checkpoints").iterdir()] == [f"step-{steps:08d}"], log.read_text()
    assert not packer.is_running()
    return status, log.read_text(), steps


def test_a_run_that_waits_for_packs_saves_and_ends_when_it_is_told_to(recipe: dict[str, Any], tmp_path: Path) -> None:
    waits = ["data.streaming.repeat=true", f"run_dir={tmp_path}/run", f"data.packs={tmp_path}/packs"]
    status, said, steps = wait_and_end(recipe, tmp_path, waits, lambda run, packer: run.send_signal(signal.SIGTERM))
    assert status == 128 + signal.SIGTERM and f"stopped by SIGTERM after step {steps}" in said, said


def test_a_run_whose_packer_dies_while_it_waits_saves_its_last_step_and_goes_on_from_it(
    recipe: dict[str, Any], tmp_path: Path, start_here: Callable
) -> None:
    waits = ["data.streaming.repeat=true", f"run_dir={tmp_path}/run", f"data.packs={tmp_path}/packs"]
    status, said, steps = wait_and_end(recipe, tmp_path, waits, lambda run, packer: packer.kill())
    assert status == 2 and said.count("error: ") == 1 and "Traceback" not in said, said
    assert "has ended with signal 9; if memory ran out, set a smaller data.processes" in said and f"Step {steps} is saved" in said
    again = start_here(recipe, tmp_path, *waits, f"train.steps={steps + 20}", "--accept-changes")
    assert again.status == 0 and f"at step {steps}" in again.output, again.output
    assert [record["step"] for record in again.records() if "loss" in record] == list(range(1, steps + 21))


def test_a_document_that_goes_on_too_far_in_a_later_part_is_refused_before_the_model_sees_it(
    recipe: dict[str, Any], tmp_path: Path, start_here: Callable
) -> None:
    texts = ["the quick brown fox"] * 900 + ["the quick brown fox " * 40]
    (tmp_path / "late.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = recipe["model"]["config"] | {"max_position_embeddings": 32}
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    late = [
        f"data.source={tmp_path}/late.jsonl",
        "data.positions=continue",
        f"run_dir={tmp_path}/run",
        f"data.packs={tmp_path}/packs",
    ]
    run = start_here(recipe | {"model": {"config": config}}, tmp_path, *late, "evaluate.every=null")
    assert run.status == 2 and "Traceback" not in run.output, run.output
    assert "a document goes on from another pack to position" in run.output and "on the model rotates a whole batch" in run.output


def test_a_run_begins_with_a_checkpoint_of_another_text_or_of_other_steps(
    recipe: dict[str, Any], folder: Path, start_here: Callable
) -> None:
    changes = ["train.steps=20", "evaluate.every=null", "schedule.kind=constant"]
    first = start_here(recipe, folder, *changes, f"run_dir={folder}/first", f"data.packs={folder}/first-packs")
    assert first.status == 0, first.output
    begins = [*changes, f"train.begin_with={folder}/first/checkpoints/step-00000015", f"data.packs={folder}/first-packs"]
    wider = start_here(recipe, folder, *over(begins, "batch.tokens=512", "train.steps=18"), f"run_dir={folder}/wider")
    assert wider.status == 0 and "the checkpoint's ended, after 120 packs" in wider.output, wider.output
    # Its first two steps read the packs of which the other's next four did, so they end in the same part.
    places = [{record["step"]: record["packed_tokens"] for record in run.records() if "loss" in record} for run in (first, wider)]
    assert places[1][16] == places[0][17] and places[1][17] == places[0][19]

    texts = (folder / "texts.jsonl").read_text().splitlines()
    (folder / "others.jsonl").write_text("\n".join(reversed(texts)) + "\n")
    other = [f"data.source={folder}/others.jsonl", f"data.packs={folder}/other-packs", f"run_dir={folder}/second"]
    second = start_here(recipe, folder, *begins[:-1], *other)
    assert second.status == 0 and "this stream begins at its first pack" in second.output, second.output
    assert second.records()[0]["step"] == 16 and second.records()[0]["part"] == 0
    refused = start_here(recipe, folder, *changes, *other[:-1], f"run_dir={folder}/first", "--accept-changes")
    assert refused.status == 2 and "has no place in it; set another `run_dir`, and `train.begin_with: " in refused.err, (
        refused.output
    )


def test_a_start_whose_packer_fails_before_its_first_step_leaves_no_checkpoint(
    recipe: dict[str, Any], tmp_path: Path, folder: Path, start_here: Callable
) -> None:
    """What it begins with is another run's, and was not trained on here."""
    changes = ["train.steps=20", "evaluate.every=null", "schedule.kind=constant"]
    first = start_here(recipe, tmp_path, *changes, f"run_dir={tmp_path}/first", f"data.packs={tmp_path}/packs")
    assert first.status == 0, first.output
    texts = (folder / "texts.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*texts[:150], '{"text": ', *texts[150:]]) + "\n")  # in the part it begins in
    begins = [*changes, f"train.begin_with={tmp_path}/first/checkpoints/step-00000015", f"run_dir={tmp_path}/second"]
    second = start_here(recipe, tmp_path, *begins, f"data.source={tmp_path}/bad.jsonl", f"data.packs={tmp_path}/bad-packs")
    assert second.status == 2 and "is saved" not in second.output, second.output
    stopped = start_here(recipe, tmp_path, *begins, "train.max_hours=1e-9", f"data.packs={tmp_path}/packs")
    assert stopped.status == 128 + signal.SIGUSR1 and "after step 15; start the run again" in stopped.output, stopped.output
    assert not list((tmp_path / "second").glob("checkpoints/step-*"))


@pytest.mark.multi
def test_a_streamed_run_goes_on_with_the_same_curve_on_two_machines_with_empty_disks(
    recipe: dict[str, Any], folder: Path, start_here: Callable, start_as_ranks: Callable
) -> None:
    planned = start_here(recipe, folder, "--plan")
    assert planned.status == 0 and "packed as it comes: 3.00k tokens at a time, 0.0003 GB on disk" in planned.out
    assert not (folder / "packs").exists()
    alone = start_here(recipe, folder)  # until the text is over
    assert alone.status == 2 and "text has come to its end, and the run wants more" in alone.err, alone.output
    unbroken, run_dir = losses(alone), alone.run_dir
    assert f"begin the text again, or `train.steps: {len(unbroken)}` with --accept-changes, for which it is enough" in alone.err
    assert 30 < len(unbroken) < STEPS and f"saved {run_dir / 'checkpoints'}/step-{len(unbroken):08}" in alone.out
    last = [record for record in alone.records() if "loss" in record][-1]
    assert last["part"] > 2 and last["packed_tokens"] >= len(unbroken) * 8 * 30
    assert sum(path.stat().st_size for path in (folder / "packs").rglob("*") if path.is_file()) <= 300_000

    for checkpoint in sorted((run_dir / "checkpoints").glob("step-*"))[-2:]:  # as if it had been killed before
        shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "packs")
    machines = [folder / "one", folder / "other"]
    for machine in machines:
        machine.mkdir()
    ddp = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
    changes = ["data.streaming.repeat=true", "data.packs=packs"]
    resumed = start_as_ranks(recipe, folder, *changes, launch=ddp, machines=machines, ACCELERATE_USE_CPU="true")
    assert resumed.status == 0 and "resumed from" in resumed.output, resumed.output
    assert losses(resumed)[: len(unbroken)] == pytest.approx(unbroken, rel=1e-5) and len(losses(resumed)) == STEPS
    assert resumed.records()[-2]["epoch"] == 1.0
    assert all(sorted((machine / "packs").glob("part-*")) for machine in machines)
