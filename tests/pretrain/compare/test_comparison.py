"""Where runs stand beside the baseline: verdicts, losses, speeds, looks, and what is noted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pretrain.compare.comparison import RunComparison
from pretrain.compare.figures import colour_of
from pretrain.metrics.run_record import read_run
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.compare.made_runs import make_run, noisy, note, trained


def test_a_run_has_its_verdict_by_where_its_whole_interval_lies(tmp_path):
    base, rng = noisy(3.0, 1), np.random.default_rng(0)
    wide = (np.array(base) + np.repeat(rng.choice([-0.03, 0.03], 50), 8)).tolist()
    ends = {"near": noisy(3.001, 2), "lower": [x - 0.0118 for x in base], "higher": [x + 0.3 for x in base], "wide": wide}
    runs = [trained(tmp_path / "base", base), *(trained(tmp_path / name, losses) for name, losses in ends.items())]
    runs.append(trained(tmp_path / "other", base, fingerprint="cd34"))
    comparison = RunComparison.over(runs)
    verdicts = [each.verdict for each in comparison.standings]
    assert verdicts == ["baseline", "within", "below", "above", "cannot tell", "not paired"]
    assert "below: lower; above: higher" in comparison.answer()
    assert any("other is not paired with base" in each and "cd34" in each for each in comparison.notes())


def test_a_run_that_was_broken_off_has_no_end_and_is_named(tmp_path):
    base = noisy(3.0, 1)
    paths = [make_run(tmp_path / "base", base), make_run(tmp_path / "cut", [base[0], 1.0]), make_run(tmp_path / "lost", base)]
    note(paths[1], halted="step 2: the gradient norm is nan")
    note(paths[2], loss=None)
    comparison = RunComparison.over([read_run(path) for path in paths])
    _, cut, lost = comparison.standings
    assert (cut.gap, cut.verdict) == (None, "was halted at step 2")
    assert lost.gap is None and "no finite loss from step 400" in lost.verdict
    assert "the gradient norm is nan" in " ".join(comparison.notes())
    assert comparison.answer().endswith("Lowest held-out loss: base, 2.4000.")
    backwards = RunComparison.over([read_run(path) for path in reversed(paths)])
    assert not backwards.paired and "the baseline has no finite loss" in backwards.standings[2].not_paired


def test_runs_are_ranked_by_held_out_loss_only_where_all_have_one_of_the_same_text(tmp_path):
    runs = [trained(tmp_path / "a", noisy(3.0, 1)), trained(tmp_path / "b", noisy(3.1, 2), "precision=delayed")]
    both = RunComparison.over(runs)
    assert both.by_held_out and [each.loss for each in both.standings] == [2.4, 2.4] and both.standings[1].held_out_gap == 0.0
    some = RunComparison.over([*runs, trained(tmp_path / "c", noisy(2.9, 3), held_out=False)])
    assert not some.by_held_out and [round(each.loss, 1) for each in some.standings] == [3.0, 3.1, 2.9]
    assert "Lowest training loss: c" in some.answer()
    other = RunComparison.over([runs[0], trained(tmp_path / "other", noisy(2.0, 2), fingerprint="cd34")])
    assert not other.same_text and "Lowest" not in other.answer()
    assert any("different text" in each for each in other.notes())


def test_held_out_losses_are_subtracted_where_both_were_evaluated_last_in_one_step(tmp_path):
    runs = []
    for name, evaluations in (("done", {2: 3.0, 4: 2.0}), ("also", {4: 2.25}), ("going", {2: 3.25})):
        path = make_run(tmp_path / name, (3.0,) * 4, held_out=False)
        with (path / "metrics.jsonl").open("a") as file:
            for step, loss in evaluations.items():
                file.write(json.dumps({"step": step, "event": "evaluation", "held_out_loss": loss}) + "\n")
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
        path = make_run(tmp_path / name, audit={"backend": "emulation" if name == "emulated" else "torch"})
        (path / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12"} | environment))
        runs.append(read_run(path))
    comparison = RunComparison.over(runs)
    assert [each.speedup for each in comparison.standings] == [None, 1.0, None, None, None], "versions are no machine"
    assert RunComparison.over([trained(tmp_path / "shared", side_by_side=True)]).baseline.shown_speed is None


def test_a_precision_has_one_colour_and_runs_that_share_it_are_told_apart(tmp_path: Path):
    colours = [precision.colour for precision in PRECISIONS.values()]
    assert len(set(colours)) == len(colours)
    assert colour_of("nvfp4 (ran bf16)") == PRECISIONS["nvfp4"].colour and colour_of("unheard of") not in colours
    assert colour_of("delayed to 75 %, then bf16") == colour_of("delayed")
    kinds = [(p, w) for p in ("bf16", "mxfp8") for w in ("fp32", "bf16")]
    runs = [trained(tmp_path / f"{p}-{w}", (3.0, 2.0), f"precision={p}", f"weights={w}") for p, w in kinds]
    standings = RunComparison.over(runs).standings
    assert [each.colour for each in standings] == [colour_of(run.precision) for run in runs]
    assert [each.kind for each in standings] == [0, 1, 0, 1], "a line for each kind of weights"
    scopes = [trained(tmp_path / s, (3.0, 2.0), "precision=delayed", f"fp8_config.scope={s}") for s in ("linear", "linear+head")]
    assert [each.kind for each in RunComparison.over(scopes).standings] == [0, 1], "and for each option of a precision"
    rates = [trained(tmp_path / f"rate{rate}", (3.0, 2.0), f"optimizer.learning_rate={rate}") for rate in (0.1, 0.2, 0.3)]
    assert len({each.colour for each in RunComparison.over(rates).standings}) == 3
    alike = RunComparison.over([trained(tmp_path / "one" / "run"), trained(tmp_path / "two" / "run")])
    assert len({each.label for each in alike.standings}) == 2
