"""Runs compared with a baseline: losses, speeds, colours and notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.compare.columns import figures_of
from lab.compare.comparison import compare, notes_on
from pretrain.metrics.run_record import read_run
from tests.lab.made_runs import make_run, noisy, note, trained


def test_the_difference_at_the_end_is_of_steps_that_both_runs_have(tmp_path):
    base = noisy(3.0, 1)
    runs = [
        trained(tmp_path / "base", base),
        trained(tmp_path / "lower", [x - 0.0118 for x in base]),
        trained(tmp_path / "late", [*base[:-1], base[-1] + 0.8]),
        trained(tmp_path / "short", [x + 0.3 for x in base[:300]]),
        trained(tmp_path / "other", base, fingerprint="cd34"),
    ]
    compared_runs = compare(runs)
    columns = {column.title: column for column in figures_of(compared_runs)}
    differences = [columns["loss − baseline"].text(row) for row in compared_runs]
    # The end of 400 steps has 80 steps.
    assert differences == ["–", "−0.01180", "+0.01000", "+0.30000", "–"]
    (note,) = (note for note in notes_on(compared_runs) if "paired" in note)
    assert "other is not paired with base" in note and "cd34" in note


def test_runs_of_different_length_show_their_averaged_steps(tmp_path):
    losses = [4.0 - 0.01 * step for step in range(300)]
    runs = [trained(tmp_path / "base", losses), trained(tmp_path / "short", losses[:100])]
    compared_runs = compare(runs)
    columns = {column.title: column for column in figures_of(compared_runs)}
    ends = [columns["loss at the end"].text(row) for row in compared_runs]
    assert ends == ["1.3250 (steps 237 to 300)", "3.3250 (steps 37 to 100)"]
    of_one_length = figures_of(compare([runs[0], trained(tmp_path / "same", losses)]))
    assert of_one_length[6].text(compared_runs[0]) == "1.3250"


def test_a_failed_run_has_no_difference_and_is_named(tmp_path):
    base = noisy(3.0, 1)
    paths = [
        make_run(tmp_path / "base", base),
        make_run(tmp_path / "cut", [base[0], 1.0]),
        make_run(tmp_path / "failed", base),
    ]
    note(paths[1], halted="step 2: the gradient norm is nan")
    note(paths[2], loss=None)
    runs = [read_run(path) for path in paths]
    compared_runs = compare(runs)
    _, cut, failed = compared_runs
    assert cut.loss_gap is None and cut.not_paired == "it was halted at step 2"
    assert "no finite loss from step 400" in failed.not_paired
    assert "the gradient norm is nan" in " ".join(notes_on(compared_runs))
    assert "the baseline has no finite loss" in compare(runs[::-1])[2].not_paired


def test_only_speeds_of_hardware_on_equal_machines_are_compared(tmp_path):
    """Software versions may differ."""
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
        engine = "emulation" if name == "emulated" else "torch"
        path = make_run(tmp_path / name, audit={"backend": engine})
        text = json.dumps({"data_fingerprint": "ab12"} | environment)
        (path / "environment.json").write_text(text)
        runs.append(read_run(path))
    assert [compared.speedup for compared in compare(runs)] == [None, 1.0, None, None, None]


def test_every_run_has_its_own_label_and_line(tmp_path: Path):
    runs = [trained(tmp_path / f"{i}" / "run", (3.0, 2.0), f"seed={i}") for i in range(12)]
    compared_runs = compare(runs)
    assert len({(compared.colour, compared.dash) for compared in compared_runs}) == 12
    assert len({compared.label for compared in compared_runs}) == 12


def test_a_run_is_compared_with_the_baseline_run_of_its_seed(tmp_path: Path):
    levels = {("bf16", 1): 3.0, ("bf16", 2): 4.0, ("delayed", 1): 3.1, ("delayed", 2): 4.2}
    runs = []
    for (precision, seed), level in levels.items():
        settings = (f"seed={seed}", f"precision={precision}")
        runs.append(trained(tmp_path / f"{precision}-seed={seed}", [level] * 4, *settings))
    compared_runs = compare(runs)
    assert [compared.is_baseline for compared in compared_runs] == [True, True, False, False]
    assert [compared.loss_gap for compared in compared_runs[2:]] == pytest.approx([0.1, 0.2])
    speedups = [compared.speedup for compared in compared_runs]
    assert speedups == [None, None, 1.0, 1.0] and notes_on(compared_runs)[1:] == []
