"""Runs that may be compared, and single runs compared with a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.errors import InputError
from lab.compare.columns import columns_for
from lab.compare.comparison import compare, notes_on
from lab.compare.fairness import (
    check_comparable,
    distinguishing_keys,
    loss_differences,
    same_held_out,
    why_not_paired,
)
from pretrain.metrics.run_record import RunRecord, read_run
from tests.lab.made_runs import append, make_run, noisy, note, trained

# Settings of a second run, and the values of the two runs that make their comparison unfair.
UNFAIR = {
    "seed=7": {"seed": "42 and 7"},
    "model.config.head_dim=8": {"model.config.head_dim": "not set and 8"},
    "evaluate.packs=3": {"evaluate.packs": "not set and 3"},
    "optimizer.name=muon optimizer.muon.momentum=0.9": {
        "optimizer.muon.momentum": "0.95 and 0.9",
        "optimizer.name": "adamw and muon",
    },
    "optimizer.learning_rate=0.5 train.steps=5": {
        "optimizer.learning_rate": "0.0003 and 0.5",
        "train.steps": "4 and 5",
    },
}


@pytest.mark.parametrize(("settings", "values"), UNFAIR.items())
def test_settings_of_the_training_may_differ_if_they_are_varied(settings, values, tmp_path):
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b", (4.0, 3.0), *settings.split())]
    assert distinguishing_keys(runs) == [*values]
    check_comparable(runs, [*values])
    check_comparable(runs, [key.partition(".")[0] for key in values])
    for key, text in values.items():
        with pytest.raises(InputError, match=r"add\s+`--vary\s+KEY`") as refused:
            check_comparable(runs, [*(values.keys() - {key})])
        message = str(refused.value)
        assert f"`{key}`: {text};" in " ".join(message.split()) and message.count(key) == 1
        assert max(map(len, message.splitlines()[1:])) <= 100


def test_runs_may_differ_in_precision_and_in_how_they_were_run(tmp_path):
    settings = "precision=delayed weights=bf16_exact fp8_config.scope=linear+head"
    settings += " fp8_config.margin=1 batch.microbatch=4 model.compile=none log.every=7"
    second = trained(tmp_path / "second", (4.0, 3.0), *settings.split(), "data.packs=x")
    check_comparable([trained(tmp_path / "first"), second], ())


def with_past(path: Path, **past: object) -> RunRecord:
    (path / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12", "past": past}))
    return read_run(path)


def test_other_data_and_settings_changed_by_a_resume_are_refused(tmp_path):
    changes = [{"step": 2, "was": {"precision": "delayed"}}]
    changed = with_past(make_run(tmp_path / "changed"), changed=changes)
    plain = trained(tmp_path / "plain")
    for run, message in (
        (changed, "`precision`: bf16 and delayed to step 2, then bf16"),
        (trained(tmp_path / "other", fingerprint="cd34"), "`data.fingerprint`: ab12 and cd34"),
        (trained(tmp_path / "unknown", fingerprint=None), "`data_fingerprint`"),
    ):
        with pytest.raises(InputError, match=message):
            check_comparable([plain, run], ())
    assert "delayed to step 2" in changed.changed_settings["precision"]
    assert not plain.changed_settings


def test_only_runs_that_see_the_same_data_in_each_step_are_paired(tmp_path):
    def rolled_back(name: str, step: int, left_out: int, past: int = 0) -> RunRecord:
        """Return a run with a rollback at `step`, of which `left_out` counts skipped steps."""
        folder = make_run(tmp_path / name)
        before, after = (folder / "metrics.jsonl").read_text().split('{"step": 3')
        event = {"step": step, "event": "rollback", "resumed_from": step - 1, "rollbacks": 1}
        line = json.dumps(event | {"left_out": left_out})
        (folder / "metrics.jsonl").write_text(f'{before}{line}\n{{"step": 3{after}')
        return with_past(folder, left_out=past)

    plain = trained(tmp_path / "plain")
    other_rate = trained(tmp_path / "rate", (4.0, 3.0), "optimizer.learning_rate=0.5")
    assert why_not_paired(plain, other_rate) is None
    other_seed = trained(tmp_path / "seed", (4.0, 3.0), "seed=7")
    assert "`seed`: 42 and 7" in why_not_paired(plain, other_seed)
    assert "no step" in why_not_paired(plain, trained(tmp_path / "nothing", [None, None]))
    first = rolled_back("first", 3, 2)
    assert "a rollback" in why_not_paired(plain, first)
    assert why_not_paired(first, rolled_back("same", 3, 2)) is None
    assert "a rollback" in why_not_paired(first, rolled_back("branch", 3, 2, past=2))
    assert "a rollback" in why_not_paired(first, rolled_back("further", 3, 1))


def test_held_out_losses_are_compared_only_on_the_same_packs(tmp_path):
    def evaluated_on(fingerprint: str, held_out: str, packs: int = 4, labels: int = 9) -> RunRecord:
        name = f"{fingerprint}-{held_out}-{packs}-{labels}"
        path = make_run(tmp_path / name, fingerprint=fingerprint, held_out=False)
        evaluated = {"held_out_fingerprint": held_out, "held_out_packs": packs}
        evaluated |= {"held_out_loss": 2.0, "held_out_tokens": labels}
        append(path, {"step": 4, "event": "evaluation"} | evaluated)
        return read_run(path)

    base = evaluated_on("ab12", "ef56")
    assert same_held_out(base, evaluated_on("cd34", "ef56")), "training data may differ"
    assert not same_held_out(base, evaluated_on("ab12", "gh78"))
    assert not same_held_out(base, evaluated_on("ab12", "ef56", packs=1))
    assert not same_held_out(base, evaluated_on("ab12", "ef56", labels=10))


def test_the_difference_covers_common_steps_with_finite_losses(tmp_path):
    first = trained(tmp_path / "first", [4.0, 3.0, None, 2.0, 2.0])
    second = make_run(tmp_path / "second", [4.5, 3.1, 2.5, 2.3])
    lines = (second / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Lines occur twice if copies of a folder were merged.
    for content in (lines, [*lines, *lines]):
        (second / "metrics.jsonl").write_text("".join(content))
        steps, differences = loss_differences(first, read_run(second))
        assert steps.tolist() == [1, 2, 4] and differences == pytest.approx([0.5, 0.1, 0.3])


# ── Compared with a baseline ──────────────────────────────────────────────────────────────────────


def test_the_difference_at_the_end_is_of_steps_that_both_runs_have(tmp_path):
    base = noisy(3.0, 1)
    runs = [
        trained(tmp_path / "base", base),
        trained(tmp_path / "lower", [x - 0.0118 for x in base]),
        trained(tmp_path / "late", [*base[:-1], base[-1] + 0.8]),
        trained(tmp_path / "short", [*base[:236], *(x + 0.3 for x in base[236:300])]),
        trained(tmp_path / "long", [x + 0.1 for x in base] + [9.0] * 100),
        trained(tmp_path / "other", base, fingerprint="cd34"),
    ]
    compared_runs = compare(runs)
    columns = {column.title: column for column in columns_for(compared_runs)}
    differences = [columns["loss − baseline"].text(row) for row in compared_runs]
    # The end of 400 steps has 80 steps, and the end of 300 steps 64.
    assert differences == ["–", "−0.01180", "+0.01000", "+0.30000", "+0.10000", "–"]
    ends = [columns["loss at the end"].text(row).partition(" (")[2] for row in compared_runs]
    of_400 = "steps 321 to 400)"
    assert ends == [*[of_400] * 3, "steps 237 to 300)", "steps 401 to 500)", of_400]
    of_one_length = compare(runs[:2])
    columns = {column.title: column for column in columns_for(of_one_length)}
    assert "steps" not in columns["loss at the end"].text(of_one_length[0])
    (note,) = (note for note in notes_on(compared_runs) if "paired" in note)
    assert "other is not paired with base" in note and "cd34" in note


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


def test_every_run_has_its_own_label_and_line(tmp_path):
    runs = [trained(tmp_path / f"{i}" / "run", (3.0, 2.0), f"seed={i}") for i in range(12)]
    compared_runs = compare(runs)
    assert len({(compared.colour, compared.dash) for compared in compared_runs}) == 12
    assert len({compared.label for compared in compared_runs}) == 12


def test_a_run_is_compared_with_the_baseline_run_of_its_seed(tmp_path):
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
