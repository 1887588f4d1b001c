"""Runs compared with a baseline: verdicts, losses, speeds, colours and notes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pretrain.compare.columns import figures_of
from pretrain.compare.comparison import answer_of, compare, notes_on
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run, noisy, note, trained


def test_the_position_of_the_interval_decides_the_verdict(tmp_path):
    base = noisy(3.0, 1)
    rng = np.random.default_rng(0)
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
    compared_runs = compare(runs)
    verdicts = [compared.verdict for compared in compared_runs]
    assert verdicts == ["baseline", "within", "below", "above", "cannot tell", "not paired"]
    assert "lower (below); higher (above)" in answer_of(compared_runs)
    notes = notes_on(compared_runs, over_seeds=False)
    assert any("other is not paired with base" in note and "cd34" in note for note in notes)


def test_without_an_interval_there_is_no_verdict(tmp_path):
    base = noisy(3.0, 1)
    runs = [trained(tmp_path / "base", base[:63]), trained(tmp_path / "b", base[:63])]
    assert answer_of(compare(runs)).endswith("nats: b (too few steps to say).")
    longer = [trained(tmp_path / "longer", base[:64]), trained(tmp_path / "c", base[:64])]
    assert compare(longer)[1].verdict == "within"


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
    assert cut.gap is None and cut.verdict == "was halted at step 2"
    assert "no finite loss from step 400" in failed.verdict
    assert "the gradient norm is nan" in " ".join(notes_on(compared_runs, over_seeds=False))
    assert "the baseline has no finite loss" in compare(runs[::-1])[2].not_paired


def test_held_out_losses_of_the_same_last_step_are_subtracted(tmp_path):
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
    compared_runs = compare(runs)
    assert [compared.held_out_gap for compared in compared_runs[1:]] == [0.25, None]


def test_only_speeds_of_hardware_on_equal_machines_are_compared(tmp_path):
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
    speedups = [compared.speedup for compared in compare(runs)]
    assert speedups == [None, 1.0, None, None, None], "software versions may differ"


def test_every_run_has_its_own_label_and_line(tmp_path: Path):
    runs = [
        trained(tmp_path / f"{place}" / "run", (3.0, 2.0), f"seed={place}") for place in range(12)
    ]
    compared_runs = compare(runs)
    assert len({(compared.colour, compared.dash) for compared in compared_runs}) == 12
    assert len({compared.label for compared in compared_runs}) == 12
