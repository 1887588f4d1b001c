"""Where runs stand beside the baseline: verdicts, losses, speeds, looks, and what is noted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pretrain.compare.comparison import RunComparison
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run, noisy, note, trained


def test_a_run_has_its_verdict_by_where_its_whole_interval_lies(tmp_path):
    base, rng = noisy(3.0, 1), np.random.default_rng(0)
    wide = (np.array(base) + np.repeat(rng.choice([-0.03, 0.03], 50), 8)).tolist()
    ends = {
        "near": noisy(3.001, 2),
        "lower": [x - 0.0118 for x in base],
        "higher": [x + 0.3 for x in base],
        "wide": wide,
    }
    runs = [
        trained(tmp_path / "base", base),
        *(trained(tmp_path / name, losses) for name, losses in ends.items()),
    ]
    runs.append(trained(tmp_path / "other", base, fingerprint="cd34"))
    comparison = RunComparison.over(runs)
    verdicts = [each.verdict for each in comparison.standings]
    assert verdicts == ["baseline", "within", "below", "above", "cannot tell", "not paired"]
    assert "below: lower; above: higher" in comparison.answer()
    assert any(
        "other is not paired with base" in each and "cd34" in each for each in comparison.notes()
    )


def test_a_run_that_was_broken_off_has_no_end_and_is_named(tmp_path):
    base = noisy(3.0, 1)
    paths = [
        make_run(tmp_path / "base", base),
        make_run(tmp_path / "cut", [base[0], 1.0]),
        make_run(tmp_path / "lost", base),
    ]
    note(paths[1], halted="step 2: the gradient norm is nan")
    note(paths[2], loss=None)
    runs = [read_run(path) for path in paths]
    comparison, backwards = RunComparison.over(runs), RunComparison.over(runs[::-1])
    _, cut, lost = comparison.standings
    assert (cut.gap, cut.verdict) == (
        None,
        "was halted at step 2",
    ) and "no finite loss from step 400" in lost.verdict
    assert "the gradient norm is nan" in " ".join(comparison.notes())
    assert "the baseline has no finite loss" in backwards.standings[2].not_paired


def test_held_out_losses_are_subtracted_where_both_were_evaluated_last_in_one_step(tmp_path):
    runs = []
    for name, evaluations in (
        ("done", {2: 3.0, 4: 2.0}),
        ("also", {4: 2.25}),
        ("going", {2: 3.25}),
    ):
        path = make_run(tmp_path / name, (3.0,) * 4, held_out=False)
        with (path / "metrics.jsonl").open("a") as file:
            for step, loss in evaluations.items():
                file.write(
                    json.dumps({"step": step, "event": "evaluation", "held_out_loss": loss}) + "\n"
                )
        runs.append(read_run(path))
    assert [each.held_out_gap for each in RunComparison.over(runs).standings[1:]] == [0.25, None]


def test_speeds_are_divided_on_one_kind_of_machine_and_of_hardware_alone(tmp_path):
    h200 = {"gpus": ["NVIDIA H200"], "accelerate": {"processes": 2, "device": "cuda"}}
    environments = {
        "a": h200 | {"packages": {"torch": "2.11"}},
        "newer": h200 | {"packages": {"torch": "2.13"}},
        "other": h200 | {"gpus": ["NVIDIA B200"]},
        "more": h200 | {"accelerate": {"processes": 4, "device": "cuda"}},
        "emulated": h200,
    }
    runs = []
    for name, environment in environments.items():
        path = make_run(
            tmp_path / name, audit={"backend": "emulation" if name == "emulated" else "torch"}
        )
        (path / "environment.json").write_text(
            json.dumps({"data_fingerprint": "ab12"} | environment)
        )
        runs.append(read_run(path))
    comparison = RunComparison.over(runs)
    assert [each.speedup for each in comparison.standings] == [None, 1.0, None, None, None], (
        "versions are no machine"
    )


def test_no_two_runs_look_or_are_called_alike(tmp_path: Path):
    runs = [
        trained(tmp_path / f"{place}" / "run", (3.0, 2.0), f"seed={place}") for place in range(12)
    ]
    standings = RunComparison.over(runs).standings
    assert (
        len({(each.colour, each.dash) for each in standings})
        == len({each.label for each in standings})
        == 12
    )
