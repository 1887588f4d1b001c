"""Rules for comparing and pairing runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.errors import InputError
from lab.compare.fairness import (
    check_comparable,
    distinguishing_keys,
    loss_differences,
    same_held_out,
    why_not_paired,
)
from pretrain.metrics.run_record import RunRecord, read_run
from tests.lab.made_runs import append, make_run, trained


def with_past(path: Path, **past: object) -> RunRecord:
    (path / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12", "past": past}))
    return read_run(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=7", "`seed`: 42 and 7"),
        ("model.config.head_dim=8", "`model.config.head_dim`: not set and 8"),
        ("evaluate.packs=3", "`evaluate.packs`: not set and 3"),
    ],
)
def test_different_trainings_are_refused_with_key_and_values(setting, message, tmp_path):
    runs = [trained(tmp_path / "first"), trained(tmp_path / "second", (4.0, 3.0), setting)]
    with pytest.raises(InputError) as refused:
        check_comparable(runs)
    assert message in str(refused.value)
    assert f"--vary {setting.partition('=')[0]}" in str(refused.value)


def test_runs_on_other_or_unknown_data_are_refused(tmp_path):
    base = trained(tmp_path / "base")
    for fingerprint, message in (
        ("cd34", "`data.fingerprint`: ab12 and cd34"),
        (None, "`data_fingerprint`"),
    ):
        run = trained(tmp_path / f"x{fingerprint}", fingerprint=fingerprint)
        with pytest.raises(InputError, match=message):
            check_comparable([base, run])


def test_runs_may_differ_in_precision_and_in_how_they_were_run(tmp_path):
    settings = (
        "precision=delayed weights=bf16_exact fp8_config.scope=linear+head fp8_config.margin=1"
    )
    settings += " batch.microbatch=4 model.compile=none log.every=7 data.packs=x"
    second = trained(tmp_path / "second", (4.0, 3.0), *settings.split())
    check_comparable([trained(tmp_path / "first"), second])


def test_adamw_and_muon_differ_in_the_settings_that_differ(tmp_path):
    muon = ("optimizer.name=muon", "optimizer.muon.momentum=0.9")
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b", (4.0, 3.0), *muon)]
    keys = ["optimizer.muon.momentum", "optimizer.name"]
    assert distinguishing_keys(runs) == keys
    check_comparable(runs, keys)


def test_varied_keys_and_sections_may_differ(tmp_path):
    runs = [
        trained(tmp_path / "a"),
        trained(tmp_path / "b", (4.0, 3.0), "optimizer.learning_rate=0.5", "train.steps=5"),
    ]
    with pytest.raises(InputError, match=r"add --vary train\.steps$"):
        check_comparable(runs, ["optimizer.learning_rate"])
    check_comparable(runs, ["optimizer", "train"])
    assert distinguishing_keys(runs) == ["optimizer.learning_rate", "train.steps"]


def test_settings_changed_by_a_resume_make_another_training(tmp_path):
    plain = trained(tmp_path / "plain")
    changes = [{"step": 2, "was": {"precision": "delayed"}}]
    changed = with_past(make_run(tmp_path / "changed"), changed=changes)
    with pytest.raises(InputError, match="`precision`: bf16 and delayed to step 2, then bf16"):
        check_comparable([plain, changed])
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


def test_held_out_losses_are_compared_only_on_the_same_packs(tmp_path):
    def evaluated_on(
        name: str, fingerprint: str, held_out: str, packs: int = 4, labels: int = 900
    ) -> RunRecord:
        path = make_run(tmp_path / name, fingerprint=fingerprint, held_out=False)
        evaluated = {"held_out_fingerprint": held_out, "held_out_packs": packs}
        evaluated |= {"held_out_loss": 2.0, "held_out_tokens": labels}
        append(path, {"step": 4, "event": "evaluation"} | evaluated)
        return read_run(path)

    base = evaluated_on("base", "ab12", "ef56")
    other_training = evaluated_on("other", "cd34", "ef56")
    assert same_held_out(base, other_training), "training data may differ"
    assert not same_held_out(base, evaluated_on("unlike", "ab12", "gh78"))
    assert not same_held_out(base, evaluated_on("part", "ab12", "ef56", packs=1))
    assert not same_held_out(base, evaluated_on("boundaries", "ab12", "ef56", labels=910))


def test_the_difference_covers_common_steps_with_finite_losses(tmp_path):
    first = trained(tmp_path / "first", [4.0, 3.0, None, 2.0, 2.0])
    second = make_run(tmp_path / "second", [4.5, 3.1, 2.5, 2.3])
    lines = (second / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Lines occur twice if copies of a folder were merged.
    for content in (lines, [*lines, *lines]):
        (second / "metrics.jsonl").write_text("".join(content))
        steps, differences = loss_differences(first, read_run(second))
        assert steps.tolist() == [1, 2, 4] and differences == pytest.approx([0.5, 0.1, 0.3])
