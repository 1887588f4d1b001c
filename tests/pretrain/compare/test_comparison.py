"""What a comparison comes to: intervals, what is paired, the Pareto front, matched loss, the gate, and the answer in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare.appearance import colour_of, looks_of, shade
from pretrain.compare.comparison import RunComparison, hours_to_horizon, machine_of, match_losses, pareto_front, with_error
from pretrain.compare.fairness import Gap, check_comparable, loss_differences, varied_keys, why_not_paired
from pretrain.compare.page import render
from pretrain.compare.report import OTHER_TEXT, read_runs, tables
from pretrain.metrics.run_record import RunRecord, read_run
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.compare.made_runs import make_run, trained

pytestmark = pytest.mark.usefixtures("blank_curves")

LEVEL = (3.0, 3.0, 3.0, 3.0)


def noisy(level: float, seed: int, steps: int = 400) -> list[float]:
    """Losses that share their noise over seeds but for a small part of their own."""
    shared = np.random.default_rng(0).normal(0, 0.1, steps)
    return (level + shared + np.random.default_rng(seed).normal(0, 0.004, steps)).tolist()


def test_an_interval_covers_the_true_difference_as_often_as_it_says():
    rng, covered, wide = np.random.default_rng(1), 0, 0
    for _ in range(400):
        gap = Gap.of(rng.normal(0.5, 1.0, 400))
        assert gap.steps == 80, "a fifth"
        covered += abs(gap.mean - 0.5) <= gap.half_width
        wide += 1.96 * gap.half_width > 0
    assert 0.92 <= covered / 400 <= 0.98


@given(st.integers(1, 200))
def test_below_eight_batches_there_is_no_interval_and_above_it_the_last_64_steps_have_one(steps: int):
    gap = Gap.of(np.linspace(0.0, 1.0, steps))
    assert math.isfinite(gap.half_width) == (steps >= 64) and gap.steps == min(steps, 64)


@pytest.mark.parametrize(
    ("mean", "half", "place"),
    [
        (0.0004, 0.0002, "within"),
        (-0.0004, 0.0002, "within"),
        (0.01, math.nan, "within"),
        (0.0004, 0.0131, "unknown"),
        (0.0095, 0.001, "unknown"),
        (-0.0095, 0.001, "unknown"),
        (-0.0118, 0.0003, "below"),
        (-0.0118, math.nan, "below"),
        (0.3, 0.01, "above"),
        (0.0101, math.nan, "above"),
    ],
)
def test_an_end_is_within_a_tolerance_where_its_whole_interval_is(mean: float, half: float, place: str):
    assert Gap(mean, half, 64).place(0.01) == place


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_gap_and_its_mirror_image_have_places_that_are_mirror_images(mean: float, half: float, tolerance: float):
    mirrored = {"above": "below", "below": "above"}
    place = Gap(mean, half, 64).place(tolerance)
    assert Gap(-mean, half, 64).place(tolerance) == mirrored.get(place, place)


@given(st.floats(-10, 10), st.floats(0, 10))
def test_a_value_and_its_error_have_as_many_digits(nats: float, error: float):
    value, spread = with_error(nats, error)
    assert len(value.partition(".")[2]) == len(spread.partition(".")[2])
    assert float(value.replace("−", "-")) == pytest.approx(nats, abs=6e-5) and float(spread) == pytest.approx(error, abs=6e-5)


def test_a_small_error_and_its_value_are_shown_with_five_digits():
    assert with_error(0.00034, 0.00004) == ("+0.00034", "0.00004") and with_error(-0.3, 0.02) == ("−0.3000", "0.0200")
    assert with_error(0.0, 0.0) == ("0", "0") and with_error(-1e-7, 0.0002) == ("0.0000", "0.0002")


def test_a_varied_key_may_differ_and_what_else_differs_is_refused_with_the_word_for_it(tmp_path):
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b", (4.0, 3.0), "optimizer.learning_rate=0.5", "train.steps=5")]
    with pytest.raises(InputError, match=r"add --vary optimizer\.learning_rate --vary train\.steps$"):
        check_comparable(runs)
    with pytest.raises(InputError, match=r"add --vary train\.steps$"):
        check_comparable(runs, ["optimizer.learning_rate"])
    check_comparable(runs, ["optimizer", "train"])
    assert varied_keys(runs) == ["optimizer.learning_rate", "train.steps"]


def test_only_runs_whose_steps_see_the_same_text_are_paired(tmp_path):
    first = trained(tmp_path / "first")
    assert why_not_paired(first, trained(tmp_path / "rate", (4.0, 3.0), "optimizer.learning_rate=0.5")) is None
    assert "`seed`: 42 and 7" in why_not_paired(first, trained(tmp_path / "seed", (4.0, 3.0), "seed=7"))
    assert "`batch.tokens`" in why_not_paired(first, trained(tmp_path / "batch", (4.0, 3.0), "batch.tokens=8192"))
    assert "`data.fingerprint`" in why_not_paired(first, trained(tmp_path / "data", fingerprint="cd34"))
    assert "no step" in why_not_paired(first, trained(tmp_path / "nothing", [None, None]))


def test_runs_are_not_paired_where_a_rollback_of_one_has_passed_over_packs(tmp_path):
    def gone_back(name: str, step: int, left_out: int, past: int = 0) -> RunRecord:
        folder = make_run(tmp_path / name)
        before, after = (folder / "metrics.jsonl").read_text().split('{"step": 3')
        event = {"step": step, "event": "rollback", "resumed_from": step - 1, "rollbacks": 1, "left_out": left_out}
        (folder / "metrics.jsonl").write_text(f'{before}{json.dumps(event)}\n{{"step": 3{after}')
        (folder / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12", "past": {"left_out": past}}))
        return read_run(folder)

    plain, back = trained(tmp_path / "plain"), gone_back("back", 3, 2)
    assert "other text from step 3 on: a rollback has passed over packs" in why_not_paired(plain, back)
    assert why_not_paired(back, gone_back("alike", 3, 2)) is None
    assert "from step 1 on" in why_not_paired(back, gone_back("branch", 3, 2, past=2))


def test_a_step_that_stands_twice_in_the_metrics_is_paired_once(tmp_path):
    ours, theirs = make_run(tmp_path / "ours", (4.0, 3.0, 2.0)), make_run(tmp_path / "theirs", (4.5, 3.5, 2.5))
    lines = (theirs / "metrics.jsonl").read_text().splitlines(keepends=True)
    for doubled in ([*lines, *lines], [lines[0], *lines]):  # as after copies of a folder were put together
        (theirs / "metrics.jsonl").write_text("".join(doubled))
        for pair in ([read_run(ours), read_run(theirs)], [read_run(theirs), read_run(ours)]):
            steps, differences = loss_differences(*pair)
            assert steps.tolist() == [1, 2, 3] and set(abs(differences)) == {0.5} and why_not_paired(*pair) is None


def test_what_is_not_paired_is_drawn_and_said_and_has_no_difference(tmp_path, capsys):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b"), make_run(tmp_path / "other", (4.0, 3.5), fingerprint="cd34")]
    page = tmp_path / "report.html"
    assert main(["report", *map(str, paths), "--vary", "data.fingerprint", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "other is not paired with a: their steps see other text: `data.fingerprint`: ab12 and cd34" in said
    assert "| other " in said and "| b " in said.partition("minus a")[2] and "| other " not in said.partition("minus a")[2]
    assert main(["report", *map(str, paths), "--vary", "data.fingerprint", "--gate", "1", "--out", str(page)]) == 2
    assert "--gate: other cannot be held against a" in capsys.readouterr().err


def test_of_runs_in_folders_of_one_name_each_is_paired_or_not_by_itself(tmp_path):
    base, paired = trained(tmp_path / "base"), trained(tmp_path / "a" / "run")
    other = trained(tmp_path / "b" / "run", (4.0, 3.5), fingerprint="cd34")
    for runs in ([base, paired, other], [base, other, paired]):
        said = "\n\n".join(tables(runs))
        assert "b/run is not paired with base" in said and "| a/run " in said.partition("minus base")[2]
        assert "| b/run " not in said.partition("minus base")[2]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_the_front_is_what_no_other_run_beats_in_speed_and_loss(points):
    front = pareto_front(*map(list, zip(*points, strict=True)))
    for place, (speed, loss) in enumerate(points):
        beaten = any(s >= speed and x <= loss and (s, x) != (speed, loss) for s, x in points)
        assert (place in front) != beaten


def test_hours_to_a_matched_loss_are_those_of_the_steps_until_it_was_reached(tmp_path):
    falling = np.linspace(5.0, 3.0, 100)
    slow, fast = trained(tmp_path / "slow", falling.tolist()), trained(tmp_path / "fast", (falling - 1.0).tolist())
    branch = make_run(tmp_path / "branch", falling.tolist())
    lines = (branch / "metrics.jsonl").read_text().splitlines(keepends=True)
    (branch / "metrics.jsonl").write_text("".join(lines[50:]))
    assert match_losses([slow, fast, read_run(branch)])[1][2] is None, "it began where another run had come to in 50 steps"
    target, (slow_hours, fast_hours) = match_losses([slow, fast])
    assert target == pytest.approx(3.0, abs=0.2)
    assert slow_hours == pytest.approx(100 * 100.0 / 3.6e6, rel=0.12), "100 ms a step"
    assert fast_hours == pytest.approx(slow_hours / 2, rel=0.15), "a line that lies 1 lower is there half way"
    assert match_losses([slow, None]) == (None, [None, None])


def with_speed(path: Path, level: float, seed: int, speed: float, *settings: str, **keywords):
    run = trained(path, noisy(level, seed), *settings, **keywords)
    run.summary["tokens_per_second"] = speed
    return run


def test_the_answer_names_the_fastest_run_within_the_tolerance(tmp_path):
    base = with_speed(tmp_path / "base", 3.0, 1, 1000.0)
    runs = [base, with_speed(tmp_path / "good", 3.001, 2, 1360.0, "precision=delayed")]
    runs.append(with_speed(tmp_path / "far", 3.2, 3, 2000.0, "precision=nvfp4"))
    comparison = RunComparison.over(runs)
    assert comparison.answer().startswith("good: 1.36 × the speed of base, loss +0.00") and " ± " in comparison.answer()
    assert [each.look.label for each in comparison.over_the_gate()] == ["far"]
    assert "No run is both faster than base and within 0.01 nats" in RunComparison.over([base, runs[2]]).answer()


def test_the_answer_counts_where_there_are_no_speeds_and_says_what_those_beyond_share(tmp_path):
    runs = [trained(tmp_path / "base", noisy(3.0, 1), side_by_side=True)]
    runs.append(trained(tmp_path / "exact", noisy(3.0, 2), "weights=bf16_exact", side_by_side=True))
    runs.append(trained(tmp_path / "plain", noisy(3.4, 3), "weights=bf16", side_by_side=True))
    comparison = RunComparison.over(runs)
    answer = comparison.answer()
    assert answer.startswith("1 of 2 runs end within 0.01 nats of base; the one with weights bf16 ends 0.4")
    assert comparison.why_no_speed() == "They shared their machine, so their speeds are not compared."


def test_the_answer_counts_what_ends_below_and_of_what_it_cannot_be_told(tmp_path):
    """As two runs of a user: one 0.0118 below, the other +0.0004 ± 0.0131, of which none is known to be within 0.01."""
    rng, base = np.random.default_rng(0), noisy(3.0, 1)
    wide = np.repeat(rng.choice([-0.03, 0.03], 50), 8)
    runs = [trained(tmp_path / "base", base, side_by_side=True)]
    runs.append(trained(tmp_path / "lower", [x - 0.0118 for x in base], "precision=delayed", side_by_side=True))
    runs.append(trained(tmp_path / "wide", (np.array(base) + wide).tolist(), "precision=nvfp4", side_by_side=True))
    answer = RunComparison.over(runs).answer()
    assert answer == (
        "0 of 2 runs end within 0.01 nats of base; the one with precision delayed ends 0.0118 below it; of the one with "
        "precision nvfp4 it cannot be told (means of the last 80 steps with 95 % intervals)."
    )


def test_the_answer_names_a_few_runs_and_counts_more_and_says_where_there_is_no_interval(tmp_path):
    runs = [trained(tmp_path / "base", [3.0] * 20, side_by_side=True)]
    for place, loss in enumerate((3.1, 3.2, 3.3, 3.001, 3.4)):
        precision = ("precision=delayed", "precision=bf16")[place % 2]
        runs.append(
            trained(tmp_path / f"r{place}", [loss] * 20, precision, f"weights={('bf16', 'fp32')[place < 2]}", side_by_side=True)
        )
    assert RunComparison.over(runs[:5]).answer() == (
        "1 of 4 runs end within 0.01 nats of base; r0, r1 and r2 end 0.1000 to 0.3000 above it "
        "(means of the last 20 steps, too few for an interval)."
    )
    assert "; 4 others end 0.1000 to 0.4000 above it" in RunComparison.over(runs).answer()


def test_a_faster_run_that_may_end_higher_is_not_the_answer_and_one_that_ends_lower_is(tmp_path):
    base, rng = with_speed(tmp_path / "base", 3.0, 1, 1000.0), np.random.default_rng(0)
    wide = (np.array(noisy(3.0, 1)) + np.repeat(rng.choice([-0.03, 0.03], 50), 8)).tolist()
    unsure, lower = (
        trained(tmp_path / "unsure", wide, "precision=nvfp4"),
        with_speed(tmp_path / "lower", 2.9, 2, 1200.0, "weights=bf16"),
    )
    unsure.summary["tokens_per_second"] = 2000.0
    said = RunComparison.over([base, unsure]).answer()
    assert said.startswith("No run is both faster than base and surely within 0.01 nats of it. The fastest other, unsure,")
    assert RunComparison.over([base, unsure, lower]).answer().startswith("lower: 1.20 × the speed of base, loss −0.0999 ± 0.00")


def test_a_run_that_was_halted_has_no_gap_is_not_counted_and_is_named_with_its_step(tmp_path):
    base = noisy(3.0, 1)
    runs = [trained(tmp_path / "base", base, side_by_side=True)]
    runs += [trained(tmp_path / name, base, f"precision={name}", side_by_side=True) for name in ("delayed", "current")]
    cut = make_run(tmp_path / "cut", [base[0], base[1] + 0.0078], "precision=nvfp4", side_by_side=True)
    note(cut, halted="step 2: the gradient norm is nan")
    comparison = RunComparison.over([*runs, read_run(cut)])
    halted = comparison.standings[-1]
    assert (halted.gap, halted.not_paired) == (None, "it was halted at step 2")
    assert comparison.answer() == (
        "2 of 2 runs end within 0.01 nats of base (means of the last 80 steps with 95 % intervals). cut was halted at step 2."
    )
    assert "cut" in render(comparison).decode() and comparison.over_the_gate() == [halted]
    backwards = RunComparison.over([read_run(cut), *runs])
    assert not backwards.paired and "the baseline was halted at step 2" in backwards.standings[1].not_paired


def test_speeds_on_another_kind_of_machine_are_not_compared_and_both_are_named(tmp_path, capsys):
    h200, b200 = ({"gpus": [name], "accelerate": {"processes": 2}} for name in ("NVIDIA H200", "NVIDIA B200"))
    environments = {
        "a": h200 | {"packages": {"torch": "2.11"}},
        "newer": h200 | {"gpus": ["NVIDIA H200"] * 8, "packages": {"torch": "2.13"}},
        "other": b200,
        "more": h200 | {"accelerate": {"processes": 4}},
    }
    runs = []
    for name, environment in environments.items():
        path = make_run(tmp_path / name, audit={"backend": "torch"})
        (path / "environment.json").write_text(json.dumps(json.loads((path / "environment.json").read_text()) | environment))
        runs.append(path)
    comparison = RunComparison.over([read_run(path) for path in runs])
    assert [each.speedup for each in comparison.standings] == [None, 1.0, None, None], "versions and idle GPUs are no machine"
    assert [each.on_front for each in comparison.standings] == [True, True, False, False]
    assert all(each.speed for each in comparison.standings), "that it has one of its own is shown"
    note = "that of a: a, newer on 2 × NVIDIA H200; other on 2 × NVIDIA B200; more on 4 × NVIDIA H200."
    for out in ("report.html", "report.png"):
        assert main(["report", *map(str, runs), "--out", str(tmp_path / out)]) == 0
        assert capsys.readouterr().out.count(note) == 1
    assert (tmp_path / "report.html").read_text().count(note) == 1
    assert main(["report", *map(str, runs[:2]), "--out", str(tmp_path / "report.html")]) == 0
    assert "one kind of machine" not in capsys.readouterr().out + (tmp_path / "report.html").read_text()


def test_a_run_on_cpus_beside_gpus_is_one_of_cpus(tmp_path):
    run, beside = trained(tmp_path / "run"), {"gpus": ["NVIDIA H200"], "cpu_cores": 16}
    on_cpus, on_gpus = (beside | {"accelerate": {"processes": 1, "device": device}} for device in ("cpu", "cuda"))
    machines = [machine_of(replace(run, environment=each)) for each in (on_cpus, on_gpus, beside)]
    assert machines == ["16 CPU cores", "1 × NVIDIA H200", "1 × NVIDIA H200"], "older runs do not say where they trained"


def test_the_answer_to_a_sweep_is_the_lowest_loss(tmp_path):
    cells = (("a", 3.0, 1, 0.1), ("b", 2.9, 2, 0.2), ("c", 3.3, 3, 0.4))
    runs = [
        trained(tmp_path / name, noisy(level, seed), f"optimizer.learning_rate={rate}", held_out=False)
        for name, level, seed, rate in cells
    ]
    answer = RunComparison.over(runs).answer()
    assert answer.startswith("Lowest training loss: b (learning_rate 0.2) with 2.8") and answer.endswith("nats against a.")


def test_runs_are_ranked_by_held_out_loss_only_where_all_have_one(tmp_path):
    runs = [trained(tmp_path / "a", noisy(3.0, 1)), trained(tmp_path / "b", noisy(3.1, 2), "precision=delayed")]
    both = RunComparison.over(runs)
    assert both.by_held_out and [each.loss for each in both.standings] == [2.4, 2.4] and both.standings[1].held_out_gap == 0.0
    runs.append(trained(tmp_path / "c", noisy(2.9, 3), held_out=False))
    some = RunComparison.over(runs)
    assert not some.by_held_out and [round(each.loss, 1) for each in some.standings] == [3.0, 3.1, 2.9]
    assert [each.held_out_gap for each in some.standings] == [None, 0.0, None]


def test_the_gate_fails_with_1_where_a_loss_ends_higher_and_passes_where_it_ends_lower(tmp_path, capsys):
    base, same = make_run(tmp_path / "base", noisy(3.0, 1)), make_run(tmp_path / "same", noisy(3.002, 2), "precision=delayed")
    worse, better = make_run(tmp_path / "worse", noisy(3.05, 3)), make_run(tmp_path / "better", noisy(2.9, 4))
    command = ["report", "--gate", "0.01", "--out", str(tmp_path / "x.html")]
    assert main([*command, str(base), str(same), str(better)]) == 0
    assert capsys.readouterr().out.endswith("gate of 0.01 nats: passed\n")
    assert main([*command, str(base), str(same), str(worse)]) == 1
    assert "gate: worse ends +0.05" in capsys.readouterr().out
    diverged = make_run(tmp_path / "diverged", [noisy(3.0, 1)[0], *[None] * 399])
    assert main([*command, str(base), str(diverged)]) == 1, "although the step in common is equal"


@pytest.mark.parametrize("more", [["--out", "x.html"], ["--out", "x.png"], ["--out", "x.html", "--watch"]])
def test_the_gate_judges_the_very_steps_that_the_page_shows(more, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [make_run(Path(name), noisy(3.0, 1)) for name in ("base", "same")]
    for path in paths:
        (path / "summary.json").write_text(json.dumps({"steps": 400}))
    assert main(["report", *map(str, paths), *more, "--gate", "0.01"]) == 0
    assert capsys.readouterr().out.endswith("gate of 0.01 nats: passed\n")


def test_a_run_that_is_not_finished_fails_the_gate_and_is_no_baseline_of_one(tmp_path, capsys):
    base, short = (make_run(tmp_path / name, [2.0] * n, "train.steps=100") for name, n in (("base", 100), ("short", 70)))
    assert main(["report", str(short), str(base), "--gate", "0.01"]) == 2
    assert "short" in capsys.readouterr().err
    assert main(["report", str(base), str(short), "--gate", "0.01", "--out", str(tmp_path / "x.html")]) == 1
    said = "short has 70 steps and is not finished, base 100: what is compared ends with step 70"
    assert f"gate: {said}" in capsys.readouterr().out and said in (tmp_path / "x.html").read_text()


def test_the_gate_judges_the_whole_interval(tmp_path, capsys):
    """A mean below the tolerance passes only where the upper end of its interval is below it, too."""
    base, near = make_run(tmp_path / "base", noisy(3.0, 1)), make_run(tmp_path / "near", noisy(3.0, 2))
    gap = RunComparison.over(read_runs([base, near])).standings[1].gap
    assert gap.half_width > 0
    for tolerance, status in ((gap.mean + gap.half_width / 2, 1), (gap.mean + gap.half_width * 2, 0)):
        assert main(["report", str(base), str(near), "--gate", str(max(tolerance, 0.0))]) == status
    capsys.readouterr()


@pytest.mark.parametrize(("seeds", "above", "status"), [(3, 0.0, 0), (3, 0.5, 1), (2, 0.0, 1)])
def test_the_gate_judges_groups_of_seeds_by_their_interval(seeds, above, status, tmp_path, capsys):
    paths = [
        make_run(tmp_path / f"{name}-seed{seed}", noisy(3.0 + more + seed / 1e4, seed), *settings, f"seed={seed}", held_out=False)
        for name, more, settings in (("base", 0.0, ()), ("low", above, ("precision=delayed",)))
        for seed in range(seeds)
    ]
    assert main(["report", *map(str, paths), "--gate", "0.01"]) == status
    assert "over seeds" in capsys.readouterr().out


def test_table_answer_and_gate_take_the_end_from_the_same_steps(tmp_path, capsys):
    falling = [3.0 - step / 100 for step in range(80)]
    base = make_run(tmp_path / "base", falling)
    other = make_run(tmp_path / "other", [loss + step / 80 for step, loss in enumerate(falling)], "precision=delayed")
    assert main(["report", str(base), str(other), "--gate", "0.01"]) == 1
    shown = capsys.readouterr().out
    mean = f"+{sum(range(16, 80)) / 80 / 64:.4f}"
    assert shown.count(mean) >= 2, "in the table and in the gate"
    assert main(["report", str(base), str(other), "--out", str(tmp_path / "x.html")]) == 0
    assert mean in (tmp_path / "x.html").read_text()


def test_sixteen_steps_have_no_error_behind_a_plus_minus(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name, noisy(3.0, seed)[:16])) for seed, name in enumerate(("a", "b"))]
    assert main(["report", *runs]) == 0
    shown = capsys.readouterr().out
    assert "too few steps" in shown and "± 0" not in shown


def test_a_report_says_that_a_run_is_shorter_and_unfinished_without_a_gate_too(tmp_path, capsys):
    base, short = (make_run(tmp_path / name, [2.0] * n, "train.steps=100") for name, n in (("base", 100), ("short", 70)))
    said = "short has 70 steps and is not finished, base 100: what is compared ends with step 70"
    for runs in ((base, short), (short, base)):
        assert main(["report", *map(str, runs)]) == 0
        assert capsys.readouterr().out.count(said) == 1
    assert main(["report", str(base), str(short), "--out", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().out.count(said) == (tmp_path / "x.html").read_text().count(said) == 1
    assert main(["report", str(base), str(base), "--out", str(tmp_path / "same.png")]) == 0
    assert "what is compared ends" not in capsys.readouterr().out


def test_a_run_that_was_halted_fails_the_gate_and_a_run_beside_itself_passes_none(tmp_path, capsys):
    base, halted = (
        make_run(tmp_path / name, losses) for name, losses in (("base", noisy(3.0, 1)), ("halted", noisy(3.0, 1)[:2]))
    )
    note(halted, halted="step 2: the gradient norm is nan")
    assert main(["report", str(base), str(halted), "--gate", "0.01"]) == 1
    assert "gate: halted was halted" in capsys.readouterr().out
    assert main(["report", str(halted), str(base), "--gate", "0.01"]) == 2, (
        "two steps of a baseline are no end to be held against"
    )
    assert "the baseline halted came to no end" in capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(base)
    for alone in ([str(base), f"{base}/"], [str(base), "--baseline", str(base)], [str(base), str(link)]):
        assert main(["report", *alone, "--gate", "0.01"]) == 2
        assert "compared with nothing" in capsys.readouterr().err
    assert main(["report", str(base), "--baseline", str(link), "--gate", "0.01"]) == 2


def note(path: Path, **keys: object) -> None:
    """Over the last step's line of a run's metrics."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    next(line for line in reversed(lines) if "event" not in line).update(keys)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_was_broken_off_is_on_no_front_and_never_the_lowest(tmp_path):
    paths = [
        make_run(tmp_path / name, losses) for name, losses in (("base", noisy(3.0, 1)), ("lost", noisy(2.0, 2)), ("cut", [1.0]))
    ]
    note(paths[1], loss=None)
    note(paths[2], halted="step 1: the gradient norm is nan")
    comparison = RunComparison.over([read_run(path) for path in paths])
    assert [each.on_front for each in comparison.standings] == [True, False, False]
    answer = comparison.answer()
    assert answer.startswith("Lowest held-out loss: base with") and "next is" not in answer
    assert answer.endswith("The loss of lost ends as no number. cut was halted at step 1.")


def test_runs_with_the_same_lowest_loss_are_said_to_be_equal(tmp_path):
    runs = [trained(tmp_path / name, noisy(3.0, 1)) for name in ("a", "b")]
    runs.append(trained(tmp_path / "c", noisy(2.9, 2)))
    assert RunComparison.over(runs).answer() == "Lowest held-out loss: a, b and c, equal, with 2.4000."
    assert RunComparison.over(runs[:2]).answer() == "Lowest held-out loss: a and b, equal, with 2.4000."


def test_losses_of_different_text_rank_no_run_and_have_no_front(tmp_path):
    other = trained(tmp_path / "other", LEVEL, fingerprint="cd34")
    text = ("data.source=y.jsonl", "data.tokenizer=t", "data.length=8", "data.held_out=0")
    base = trained(tmp_path / "base", LEVEL, *text)
    validated = trained(tmp_path / "validated", LEVEL, *text, "data.validation.source=x.jsonl")
    for run in (other, validated):
        comparison = RunComparison.over([base, run])
        assert not comparison.same_text and not any(each.on_front for each in comparison.standings)
        assert comparison.standings[1].held_out_gap is None and "of different text" in comparison.answer()


def test_runs_trained_on_other_text_are_ranked_by_a_text_that_both_were_evaluated_on(tmp_path):
    def evaluated_on(name: str, fingerprint: str, held_out: str, *settings: str) -> RunRecord:
        path = make_run(tmp_path / name, LEVEL, *settings, fingerprint=fingerprint)
        told = {"data_fingerprint": fingerprint, "held_out_fingerprint": held_out}
        (path / "environment.json").write_text(json.dumps(told))
        return read_run(path)

    base = evaluated_on("base", "ab12", "ef56")
    comparison = RunComparison.over([base, evaluated_on("other", "cd34", "ef56")])
    assert comparison.same_text and comparison.standings[1].held_out_gap == 0
    assert OTHER_TEXT not in "".join(tables([each.run for each in comparison.standings]))
    for unlike in (evaluated_on("unlike", "cd34", "gh78"), evaluated_on("part", "cd34", "ef56", "evaluate.packs=1")):
        assert not RunComparison.over([base, unlike]).same_text
        assert OTHER_TEXT in "".join(tables([base, unlike]))


def test_held_out_losses_are_subtracted_in_the_last_step_that_both_were_evaluated_in(tmp_path):
    runs = []
    for name, evaluations in (("done", {0: 9.0, 2: 3.0, 4: 2.0}), ("going", {0: 9.0, 2: 3.25}), ("begun", {0: 9.0})):
        path = make_run(tmp_path / name, LEVEL, held_out=False)
        with (path / "metrics.jsonl").open("a") as file:
            for step, loss in evaluations.items():
                file.write(json.dumps({"step": step, "event": "evaluation", "held_out_loss": loss}) + "\n")
        runs.append(read_run(path))
    # The untrained models are equal, which says nothing of their trainings.
    assert [each.held_out_gap for each in RunComparison.over(runs).standings[1:]] == [0.25, None]


def test_the_hours_of_a_horizon_in_epochs_are_those_of_all_of_it(tmp_path):
    run = trained(tmp_path / "run", LEVEL, "train.epochs=3")  # one epoch so far
    assert hours_to_horizon(run, 4096.0) == pytest.approx(3 * len(LEVEL) / 3600)


def test_a_key_to_vary_that_no_recipe_has_is_refused(tmp_path):
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b")]
    with pytest.raises(InputError, match="--vary optimizr: no recipe"):
        check_comparable(runs, ["optimizr"])
    check_comparable(runs, ["optimizer", "model.config.hidden_size", "data.fingerprint"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "report.pdf"], "ends in none of .html, .png and .md"),
        (["--watch"], "add --out report.html"),
        (["--out", "x.html", "--watch", "--markdown", "x.md"], "leave --markdown out"),
        (["--out", "x.html", "--watch", "0"], "a number of 1 to 86400 is wanted"),
        (["--out", "x.html", "--watch", "inf"], "a number of 1 to 86400 is wanted"),
        (["--gate", "-1"], "0 or more"),
        (["--gate", "nan"], "0 or more"),
        (["--gate", "inf"], "0 or more"),
        (["--out", "x.md", "--markdown", "y.md"], "leave one of the two out"),
        (["--markdown", "metrics.jsonl"], "--markdown metrics.jsonl: the tables are written as .md"),
        (["--gate", "0.01"], "at least one other"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_written(arguments, said, tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["report", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.glob("*.png"))


def test_a_precision_has_one_colour_and_runs_that_share_it_are_told_apart(tmp_path):
    colours = [precision.colour for precision in PRECISIONS.values()]
    assert len(set(colours)) == len(colours)
    assert colour_of("nvfp4 (ran bf16)") == PRECISIONS["nvfp4"].colour and colour_of("unheard of") not in colours
    runs = [
        trained(tmp_path / f"{p}-{w}", (3.0, 2.0), f"precision={p}", f"weights={w}")
        for p in ("bf16", "mxfp8")
        for w in ("fp32", "bf16")
    ]
    looks = looks_of(runs)
    assert [look.colour for look in looks] == [colour_of(run.precision) for run in runs]
    assert looks[0].dash == looks[2].dash != looks[1].dash == looks[3].dash, "a line for each kind of weights"
    rates = [trained(tmp_path / f"rate{rate}", (3.0, 2.0), f"optimizer.learning_rate={rate}") for rate in (0.1, 0.2, 0.3)]
    assert len({look.colour for look in looks_of(rates)}) == 3 and shade("#1F77B4", 1, 3) == "#1F77B4"


def test_runs_of_one_folder_name_are_told_apart_by_their_parents(tmp_path):
    looks = looks_of([trained(tmp_path / "one" / "run"), trained(tmp_path / "two" / "run")])
    assert [look.label for look in looks] == ["one/run", "two/run"]
