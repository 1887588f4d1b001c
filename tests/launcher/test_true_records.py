"""What a run folder says of its run stays true, whatever the run is started again with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bad_input.test_bad_data import write_tokenizer

from foundation.errors import InputError
from packing.arrow import Pack, PackWriter
from packing.settings import DataSettings
from packing.store import open_packs
from pretrain.__main__ import main
from pretrain.compare.comparison import (
    RunComparison,
    held_out_difference,
    machine_of,
    on_one_kind_of_machine,
    other_machines,
)
from pretrain.compare.fairness import same_held_out
from pretrain.compare.page import about
from pretrain.metrics import run_folder
from pretrain.metrics.run_record import MEASURE, read_run
from pretrain.plan.targets import MeasuredRun
from tests.conftest import PACK_LENGTH, VOCABULARY, contents, over

QUICK = ("train.steps=4", "evaluate.every=2", "checkpoint.every=2", "parity=off")
DDP = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]


@pytest.fixture(scope="session")
def other_text(small_packs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An argument that trains on the same packs and evaluates on others, of as many tokens with a label."""
    folder, settings = tmp_path_factory.mktemp("packs") / "other", DataSettings(packs=small_packs, length=PACK_LENGTH)
    with PackWriter(folder, PACK_LENGTH) as writer:
        for split in ("train", "held_out"):
            for pack in open_packs(settings, split):
                tokens = pack.input_ids if split == "train" else (pack.input_ids + 7 * np.arange(PACK_LENGTH)) % VOCABULARY
                writer.add(split, Pack(tokens.astype(np.uint32), pack.lengths))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return f"data.packs={folder}"


def environment_of(run: Any) -> dict[str, Any]:
    return json.loads((run.run_dir / "environment.json").read_text())


def test_a_finished_run_stays_as_it_was_evaluated(train_here: Callable, other_text: str) -> None:
    run = train_here(*QUICK)
    assert run.status == 0, run.output
    before = contents(run.run_dir)
    for change, told in {
        other_text: "held_out_fingerprint: saved ",
        "evaluate.packs=3": "evaluate.packs: saved null, now 3",
        "fp8_config.use_autocast_during_eval=true": "fp8_config.use_autocast_during_eval: saved ",
    }.items():
        again = train_here(*QUICK, change)
        assert again.status == 0 and told in again.out, again.output
        assert "the run has finished and stays as it was evaluated" in again.out and "`--eval-only`" in again.out
        assert contents(run.run_dir) == before
    same = train_here(*QUICK)
    assert same.status == 0 and "stays as it was evaluated" not in same.out and contents(run.run_dir) == before


def test_a_finished_run_that_was_never_evaluated_is_once_there_is_text(train_here: Callable, small_packs: Path) -> None:
    folder = train_here(*QUICK).run_dir
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if "evaluation" not in line))
    (folder / "environment.json").write_text("{}")
    again = train_here(*QUICK)
    assert again.status == 0 and "held-out loss" in again.out and "stays as it was evaluated" not in again.out
    assert environment_of(again)["held_out_fingerprint"] and again.records()[-1]["event"] == "evaluation"


@pytest.mark.parametrize("more", [(), ("train.steps=6", "--accept-changes")])
def test_packs_of_token_ids_do_not_let_a_run_go_on_with_another_tokenizer(
    more: tuple[str, ...], train_here: Callable, tmp_path: Path
) -> None:
    named, other = (write_tokenizer(tmp_path / name, words).parent for name, words in (("named", "a b c"), ("other", "c b a")))
    run = train_here(*QUICK, f"data.tokenizer={named}")
    assert run.status == 0 and environment_of(run)["tokenizer_fingerprint"], run.output
    before = contents(run.run_dir)
    for start in ((f"data.tokenizer={other}",), (f"data.tokenizer={other}", "--plan"), ("--accept-changes",)):
        refused = train_here(*over(QUICK, *more, *start))
        assert refused.status == 2 and contents(run.run_dir) == before, refused.output
        assert "step-00000004: its tokenizer is another now: " in refused.err and "put that one back" in refused.err
    same = train_here(*over(QUICK, *more, f"data.tokenizer={named}"))
    assert same.status == 0, same.output


LONGER = ("train.steps=8", "schedule.kind=constant", "checkpoint.best=true", "checkpoint.keep=1", "--accept-changes")


def test_a_resume_on_other_held_out_text_begins_the_best_anew(
    train_here: Callable, other_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, other = tmp_path / "changed", tmp_path / "other"
    first = train_here(*over(QUICK, "schedule.kind=constant", "checkpoint.best=true", f"run_dir={changed}"))
    assert first.status == 0, first.output
    second = train_here(*over(QUICK, *LONGER, other_text, f"run_dir={changed}"))
    alone = train_here(*over(QUICK, *LONGER, other_text, f"run_dir={other}"))
    assert second.status == alone.status == 0, second.output + alone.output
    assert "the best evaluation so far, after step 4, is on other packs" in second.out and "begins anew" not in alone.out
    lines = [line for line in second.records() if line.get("event") == "evaluation"]
    fingerprints = [line["held_out_fingerprint"] for line in lines]
    assert len(set(fingerprints[:2])) == len(set(fingerprints[2:])) == 1 and fingerprints[1] != fingerprints[2]
    assert environment_of(second)["held_out_fingerprint"].startswith(fingerprints[2])
    assert {(line["held_out_packs"], line["held_out_precision"]) for line in lines} == {(10, "fp32")}
    losses = {line["step"]: line["held_out_loss"] for line in lines}
    assert losses[4] < min(losses[6], losses[8]), "what was evaluated on the text before has the lowest"
    assert main(["export", str(changed), str(tmp_path / "out"), "--best"]) == 0
    best = min((6, 8), key=losses.get)
    assert f"step-0000000{best} is exported" in capsys.readouterr().out

    runs = [read_run(folder) for folder in (other, changed)]
    assert runs[1].held_out_curve()[0].tolist() == [6, 8] and runs[0].held_out_curve()[0].tolist() == [2, 4, 6, 8]
    assert same_held_out(*runs) and held_out_difference(*runs) == losses[8] - runs[0].summary["held_out_loss"]


def test_what_an_evaluation_says_of_itself_is_believed_and_of_older_runs_the_environment(
    train_here: Callable, other_text: str, tmp_path: Path
) -> None:
    ours, theirs = (train_here(*QUICK, f"run_dir={tmp_path / name}", *more) for name, more in (("a", ()), ("b", [other_text])))
    told = environment_of(theirs)["held_out_fingerprint"]
    (ours.run_dir / "environment.json").write_text(json.dumps(environment_of(ours) | {"held_out_fingerprint": told}))
    assert not same_held_out(*(read_run(run.run_dir) for run in (ours, theirs)))
    for run in (ours, theirs):  # as of a version that wrote of an evaluation how many tokens it was over, and no more
        lines = [
            {key: line[key] for key in line.keys() - {*MEASURE} | {"held_out_tokens"} & line.keys()} for line in run.records()
        ]
        (run.run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert same_held_out(*(read_run(run.run_dir) for run in (ours, theirs)))
    assert train_here(*QUICK, f"run_dir={ours.run_dir}").status == 0 and len(read_run(ours.run_dir).evaluations) == 2


def test_an_evaluation_says_what_it_computed_in(train_here: Callable, low_precision_recipe: dict[str, Any]) -> None:
    for setting, named in (("false", "bf16"), ("true", "current")):
        quick = ("train.steps=2", "batch.tokens=256", "parity=off", f"name={named}")
        quick += (f"fp8_config.use_autocast_during_eval={setting}",)
        run = train_here(*quick, f"run_dir={low_precision_recipe['run_dir']}-{named}", recipe=low_precision_recipe)
        assert run.status == 0 and run.records()[-1]["held_out_precision"] == named, run.output


def test_a_runs_machines_are_those_that_trained_its_steps(
    train_here: Callable, train_as_ranks: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = over(QUICK, "schedule.kind=constant")
    both = train_as_ranks(*quick, launch=DDP)
    assert both.status == 0, both.output
    card = both.run_dir / "final" / "README.md"
    again = train_here(*quick)  # one process, which trains nothing
    assert again.status == 0 and "| computed on | 2 x CPU, " in card.read_text(), again.output
    assert machine_of(read_run(both.run_dir)).startswith("2 processes, ")

    longer = train_here(*over(quick, "train.steps=8"), "--accept-changes")
    assert longer.status == 0 and "| computed on | 2 x CPU, then 1 x CPU, " in card.read_text(), longer.output
    run, alone = read_run(both.run_dir), train_here(*over(quick, "train.steps=8", f"run_dir={tmp_path / 'alone'}"))
    assert [*run.starts] == [1, 5] and [found["accelerate"]["processes"] for found in run.timed_on] == [2, 1]
    assert main(["export", str(both.run_dir / "checkpoints" / "step-00000004"), str(tmp_path / "out")]) == 0
    assert "| computed on | 2 x CPU, " in (tmp_path / "out" / "README.md").read_text()
    comparison = RunComparison.over([read_run(alone.run_dir), run])
    assert comparison.standings[1].speed and comparison.standings[1].speedup is None and not comparison.standings[1].on_front
    capsys.readouterr()
    assert main(["report", str(alone.run_dir), str(both.run_dir), "--out", str(tmp_path / "report.md")]) == 0
    assert f"alone on {machine_of(comparison.baseline.run)}; run on 2 processes, " in (tmp_path / "report.md").read_text()
    backwards = RunComparison.over([run, comparison.baseline.run])
    assert backwards.standings[1].speedup is None and "and run has had several" in other_machines([run])
    with pytest.raises(InputError, match="it was computed on 2 x CPU, then 1 x CPU, so its speed is that of none of them"):
        MeasuredRun.of(run)


def test_where_all_timed_steps_are_of_one_machine_their_speed_is_taken(train_here: Callable, train_as_ranks: Callable) -> None:
    first = train_as_ranks(*over(QUICK, "train.steps=2", "schedule.kind=constant"), launch=DDP)
    second = train_here(*over(QUICK, "train.steps=6", "schedule.kind=constant"), "--accept-changes")
    assert first.status == second.status == 0, first.output + second.output
    run = read_run(second.run_dir)
    assert [*run.starts] == [1, 3] and [found["accelerate"]["processes"] for found in run.timed_on] == [1]
    assert on_one_kind_of_machine([run]) and "processes" not in machine_of(run)
    older = {key: value for key, value in run.environment.items() if key != "past"}
    (run.path / "environment.json").write_text(json.dumps(older))
    assert read_run(run.path).starts == {1: older}


def test_steps_that_other_packages_have_computed_say_so(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick = over(QUICK, "schedule.kind=constant")
    with monkeypatch.context() as patch:
        version_of = run_folder.version_of
        patch.setattr(run_folder, "version_of", lambda package: "2.0.1" if package == "torch" else version_of(package))
        assert train_here(*quick).status == 0
    longer = train_here(*over(quick, "train.steps=6"), "--accept-changes")
    run, now = read_run(longer.run_dir), run_folder.version_of("torch")
    assert longer.status == 0 and [*run.starts] == [1, 5] and on_one_kind_of_machine([run]), longer.output
    assert f"| software | torch 2.0.1, then {now}, transformers " in (run.path / "final" / "README.md").read_text()
    assert main(["export", str(run.path / "checkpoints" / "step-00000004"), str(tmp_path / "out")]) == 0
    assert "| software | torch 2.0.1, transformers " in (tmp_path / "out" / "README.md").read_text()
    assert about(RunComparison.over([run])).endswith(f" · torch 2.0.1, then {now}")


def test_a_card_says_where_the_code_had_changes_that_its_commit_has_not(train_here: Callable, tmp_path: Path) -> None:
    run_dir = train_here(*over(QUICK, "train.steps=2")).run_dir
    written = json.loads((run_dir / "environment.json").read_text())
    for dirty, said in ((True, f"launcher commit {'a' * 12} with changes |"), (False, f"launcher commit {'a' * 12} |")):
        (run_dir / "environment.json").write_text(json.dumps(written | {"git": {"commit": "a" * 40, "dirty": dirty}}))
        assert main(["export", str(run_dir), str(tmp_path / str(dirty))]) == 0
        assert said in (tmp_path / str(dirty) / "README.md").read_text()
