"""Comparisons over seeds: groups, verdicts, and runs that do not count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from lab.compare.comparison import compare, group_names, notes_on
from lab.compare.report import Report
from lab.compare.seed_groups import SeedComparison
from pretrain.metrics.run_record import RunRecord, read_run
from tests.lab.made_runs import append, make_run, rows_of, trained


def seeded(
    path: Path, seed: int, above: float, *settings: str, steps: int = 100, **keywords: Any
) -> Path:
    """Write a run of 100 steps that is evaluated every 10 steps.

    Its held-out loss ends `above` the baseline's loss of 2 + seed / 100.
    """
    overrides = (f"seed={seed}", "train.steps=100", *settings)
    make_run(path, [3.0] * steps, *overrides, held_out=False, **keywords)
    packs = {"held_out_packs": 3 if "evaluate.packs=3" in settings else 4}
    for step in range(10, steps + 1, 10):
        loss = 2 + seed / 100 + above + (0.3 if step < 100 else 0.0)
        losses = {"held_out_loss": loss, "held_out_perplexity": math.exp(loss)}
        append(path, {"step": step, "event": "evaluation"} | losses | packs)
    return path


# Nats above the baseline by seed.
SERVED = {"long": 1.0, "short": 1.5}
ABOVE = {1: 0.001, 2: 0.002, 3: 0.002, 4: 0.001}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Four seeds of BF16, FP8 and emulated NVFP4, and a repeated BF16 run.

    FP8 ends a little above BF16, and NVFP4 far above it.
    """
    runs = [seeded(tmp_path / f"bf16-seed={seed}", seed, 0.0) for seed in ABOVE]
    for name, far, audit in (
        ("delayed", 0.0, None),
        ("nvfp4", 0.1, {"backend": "emulation", "effective": "nvfp4"}),
    ):
        for seed, above in ABOVE.items():
            path = tmp_path / f"{name}-seed={seed}"
            runs.append(seeded(path, seed, far + above, f"precision={name}", audit=audit))
    return [*runs, seeded(tmp_path / "bf16_again-seed=2", 2, -0.0005)]


def over(folders: list[Path]) -> SeedComparison:
    return SeedComparison.over(compare([read_run(path) for path in folders]))


def test_the_engine_and_options_of_a_precision_separate_groups(tmp_path: Path):
    """BF16 ignores options of FP8, and the fingerprint identifies packs."""

    def run(name: str, *settings: str, **keywords: Any) -> RunRecord:
        return trained(tmp_path / name, (3.0,) * 4, *settings, **keywords)

    runs = [run(f"{name}-seed1", "seed=1", "precision=delayed") for name in "abc"]
    runs[1] = run("b2-seed1", "seed=1", "precision=delayed", "fp8_config.margin=1")
    runs[2] = run("c2-seed1", "seed=1", "precision=delayed", audit={"backend": "emulation"})
    assert group_names(runs) == ["a", "b2", "c2"]
    settings = ((1, "fp8_config.margin=1"), (2, "data.packs=elsewhere"))
    plain = [run(f"run-seed{seed}", f"seed={seed}", setting) for seed, setting in settings]
    assert len(set(group_names(plain))) == 1


def test_the_answer_over_seeds_has_a_difference_an_interval_and_a_verdict(folders: list[Path]):
    report = Report.over([read_run(path) for path in folders])
    answer, *tables = report.tables()
    for text in (
        "delayed (+0.0015 over 4 seeds, equivalent)",
        "nvfp4 (+0.1015 over 4 seeds, worse by more than the margin)",
        "bf16_again (−0.0005 over 1 seed, no verdict",
    ):
        assert text in " ".join(answer.split())
    text = "\n\n".join(tables)
    assert "equivalent (no difference is shown" in text and "cannot tell (" not in text
    assert all(len(line) <= 100 for line in [*answer.splitlines(), *text.splitlines()])
    rows = rows_of(text)
    # At the ends of the interval, the statistic of the sequential test is 1 / error, with one of
    # three errors that sum up to 5 %.
    assert (rows["bf16"][0][0], rows["bf16"][1]) == ("4", ["2.0250 (sd 0.0129)"])
    half = float(rows["delayed"][0][2])
    squares = 4 * 0.0005**2
    shift = 4 * half**2
    ratio = (squares + shift) / (squares + shift / 41)
    assert 41**-0.5 * ratio**2 == pytest.approx(3 / 0.05, rel=0.05)
    assert rows["delayed"][0][1:] == ["+0.0015", f"{half:.4f}", "+0.07", "equivalent"]
    assert rows["nvfp4"][0][1:4] == ["+0.1015", f"{half:.4f}", "+5.01"]


def test_runs_without_a_valid_end_do_not_count_and_are_noted(folders: list[Path], tmp_path: Path):
    unfinished = seeded(tmp_path / "current-seed=1", 1, 0.0, "precision=current", steps=50)
    failed = make_run(
        tmp_path / "mxfp8-seed=1", [3.0, None], "seed=1", "train.steps=100", "precision=mxfp8"
    )
    sound = seeded(tmp_path / "mxfp8-seed=2", 2, -1.0, "precision=mxfp8")
    late = seeded(tmp_path / "late-seed=1", 1, 0.0, "precision=block")
    lines = (late / "metrics.jsonl").read_text().splitlines()
    # Remove the evaluation of the last step.
    (late / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    other = seeded(tmp_path / "other-seed=1", 1, 0.0, "precision=block", "evaluate.packs=3")
    comparison = over([*folders, unfinished, failed, sound, late, other])
    verdicts = {group.name: group.verdict for group in comparison.results}
    assert verdicts["current"] == verdicts["late"] == verdicts["other"] == "not compared"
    assert verdicts["mxfp8"] == "broke off: 1 run of 2" and verdicts["delayed"] == "equivalent"
    assert comparison.results[5].difference is None, "no mean without the failed run"

    unfinished_note, late_note, other_note = comparison.notes
    assert "have not finished: current-seed=1, mxfp8-seed=1." in unfinished_note
    assert "not evaluated" in late_note and late_note.endswith(": late-seed=1.")
    assert "other data" in other_note and other_note.endswith(": other-seed=1.")


def test_without_held_out_losses_the_last_training_losses_are_compared(tmp_path: Path):
    """If losses fall, a branch of few steps must not seem better than the run it branched from."""
    falling = [4.0 - step / 100 for step in range(100)]
    branches = [loss + 0.5 for loss in falling[70:]]

    def run(name: str, losses: list[float], *settings: str, **keywords: Any) -> RunRecord:
        return trained(tmp_path / name, losses, *settings, held_out=False, **keywords)

    seeds = (1, 2, 3)
    runs = [run(f"bf16-seed{seed}", falling, f"seed={seed}") for seed in seeds]
    for seed in seeds:
        settings = (f"seed={seed}", "precision=delayed")
        runs.append(run(f"delayed-seed{seed}", branches, *settings, first_step=71))
    comparison = SeedComparison.over(compare(runs))
    assert comparison.loss_key == "loss_at_end"
    assert comparison.results[1].difference.by_seed == pytest.approx({1: 0.5, 2: 0.5, 3: 0.5})
    other = run("other", [2.0] * 4, "seed=1", "precision=delayed", fingerprint="ef56")
    compared_runs = compare([*runs[:3], *runs[4:], other])
    assert SeedComparison.over(compared_runs).results[2].verdict == "not compared"
    note, *_ = notes_on(compared_runs)
    assert "other is not paired with bf16-seed1" in note and "`data.fingerprint`: ab12" in note


def test_losses_as_served_are_compared_if_all_runs_have_them(folders: list[Path], tmp_path: Path):
    def served(name: str, seed: int, loss: float, precision: str = "nvfp4") -> Path:
        settings = (f"evaluate.served={precision}", f"schedule.decay={loss / 10}")
        path = seeded(tmp_path / "served" / f"{name}-seed={seed}", seed, loss, *settings)
        line = {"step": 100, "event": "served", "served_loss": 4 - loss, "served_precision": "x"}
        append(path, line)
        return path

    runs = [served(name, seed, loss) for name, loss in SERVED.items() for seed in (1, 2, 3)]
    comparison = over(runs)
    assert comparison.results[1].difference.mean == pytest.approx(-0.5)
    assert "held-out loss as served" in [column.title for column in comparison.columns()]
    # The served losses of one run are in another precision, or missing.
    for other in (served("other", 3, 1.5, "mxfp8"), folders[2]):
        assert over([*runs[:5], other]).loss_key == "held_out_loss"


def test_seeds_are_compared_if_the_baseline_has_several(folders: list[Path]):
    """A repeated run is a group of its own."""
    runs = [read_run(path) for path in folders]
    groups = [name for name in ("bf16", "delayed", "nvfp4") for _ in range(4)]
    assert group_names(runs) == [*groups, "bf16_again"]
    assert "over 1 seed, no verdict: 3 seeds" in Report.over([runs[0], runs[4]]).seeds.answer()
    text = "".join(Report.over([*runs[:2], runs[4]], ["seed"]).tables())
    assert "* minus bf16: " in text and "half-width" not in text, "no interval is shown"
    assert Report.over(runs[:4], ["seed"]).seeds.answer() == "bf16"
    with pytest.raises(InputError, match="seed"):
        Report.over(runs[:4])
    folder = folders[0].parent / "rate-seed=1"
    other_rate = read_run(seeded(folder, 1, 0.0, "optimizer.learning_rate=0.5"))
    with pytest.raises(InputError, match=r"optimizer\.learning_rate"):
        Report.over([*runs, other_rate])


def test_a_branch_without_a_step_of_the_baseline_has_no_difference(tmp_path: Path):
    runs = []
    for seed in (0, 1):
        settings = (f"seed={seed}", "train.steps=100")
        runs.append(make_run(tmp_path / f"a{seed}", [2.0] * 100, *settings, held_out=False))
        settings = (f"seed={seed}", "train.steps=300", "train.begin_with=x")
        path = tmp_path / f"b{seed}"
        runs.append(make_run(path, [2.0] * 100, *settings, held_out=False, first_step=201))
    assert [group.verdict for group in over(runs).results] == ["baseline", "not compared"]
