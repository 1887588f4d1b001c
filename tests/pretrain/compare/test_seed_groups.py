"""Runs of several seeds: which belong together, what the report and a matrix say of them, and what does not count."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare.report import Report
from pretrain.compare.seed_groups import SeedComparison, grouped
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run, rows_of, trained


def seeded(
    path: Path, seed: int, above: float, *settings: str, steps: int = 100, **keywords: Any
) -> Path:
    """A run of 100 steps, evaluated every 10, that ends `above` the baseline's loss of 2 + seed / 100."""
    make_run(
        path,
        [3.0] * steps,
        f"seed={seed}",
        "train.steps=100",
        *settings,
        held_out=False,
        **keywords,
    )
    lines, packs = [], {"held_out_packs": 3 if "evaluate.packs=3" in settings else 4}
    for step in range(10, steps + 1, 10):
        loss = 2 + seed / 100 + above + (0.3 if step < 100 else 0.0)
        lines.append(
            {
                "step": step,
                "event": "evaluation",
                "held_out_loss": loss,
                "held_out_perplexity": math.exp(loss),
            }
            | packs
        )
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


ABOVE = {1: 0.001, 2: 0.003, 3: 0.002}  # nats, by seed


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three seeds of BF16, of FP8 a little above it and of emulated NVFP4 far above it, and one BF16 run once more."""
    runs = [seeded(tmp_path / f"bf16-seed={seed}", seed, 0.0) for seed in ABOVE]
    runs += [
        seeded(tmp_path / f"delayed-seed={seed}", seed, above, "precision=delayed")
        for seed, above in ABOVE.items()
    ]
    emulated = {"backend": "emulation", "effective": "nvfp4"}
    for seed, above in ABOVE.items():
        runs.append(
            seeded(
                tmp_path / f"nvfp4-seed={seed}",
                seed,
                0.1 + above,
                "precision=nvfp4",
                audit=emulated,
            )
        )
    return [*runs, seeded(tmp_path / "bf16_again-seed=2", 2, -0.0005)]


def over(folders: list[Path], **how: Any) -> SeedComparison:
    return SeedComparison.over([read_run(path) for path in folders], **how)


def test_runs_that_differ_in_seed_and_names_alone_are_a_group_and_a_repeat_is_another(
    folders: list[Path],
):
    groups = {name: [*runs] for name, runs in grouped([read_run(path) for path in folders]).items()}
    three = [1, 2, 3]
    assert groups == {"bf16": three, "delayed": three, "nvfp4": three, "bf16_again": [2]}


def test_what_computed_the_products_and_options_of_a_precision_make_other_groups(tmp_path: Path):
    delayed = [("a", ()), ("b", ("fp8_config.margin=1",))]
    runs = [
        trained(tmp_path / f"{n}-seed1", (3.0,) * 4, "seed=1", "precision=delayed", *more)
        for n, more in delayed
    ]
    runs.append(
        trained(
            tmp_path / "c-seed1",
            (3.0,) * 4,
            "seed=1",
            "precision=delayed",
            audit={"backend": "emulation"},
        )
    )
    assert [*grouped(runs)] == ["a", "b", "c"]
    others = [(1, "fp8_config.margin=1"), (2, "data.packs=elsewhere")]
    plain = [
        trained(tmp_path / "p" / f"run-seed{n}", (3.0,) * 4, f"seed={n}", other)
        for n, other in others
    ]
    assert len(grouped(plain)) == 1, (
        "BF16 has no use for options of FP8, and packs are what their fingerprint says"
    )


def test_the_report_answers_over_seeds_before_it_shows_any_run(
    folders: list[Path], tmp_path: Path, capsys
):
    page = tmp_path / "out" / "report.html"
    assert main(["report", *map(str, folders), "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    verdicts = "equivalent: delayed; worse by more than the margin: nvfp4; 1 seed: no interval"
    assert printed.startswith(f"Against bf16 over 3 seeds, within 0.3 %: {verdicts}")
    rows, half = rows_of(printed), 4.303 * 0.001 / math.sqrt(3)  # Student's t of two degrees
    assert rows["bf16"][0][:2] == ["3", "2.0200 (sd 0.0100)"]
    assert rows["delayed"][0][2:6] == ["+0.0020", f"{half:.4f}", "+0.10%", "equivalent"]
    assert rows["nvfp4"][0][2:5] == ["+0.1020", f"{half:.4f}", "+5.05%"]
    assert rows["delayed"][1] == ["+0.0010", "+0.0030", "+0.0020"], "seed by seed"
    assert "delayed-seed=1" in rows
    assert (
        page.read_text().index("Over seeds") < page.read_text().index("All figures")
        and "+5.05%" in page.read_text()
    )


def test_what_is_no_end_does_not_count_and_is_noted(folders: list[Path], tmp_path: Path):
    unfinished = seeded(tmp_path / "current-seed=1", 1, 0.0, "precision=current", steps=50)
    lost = make_run(
        tmp_path / "mxfp8-seed=1", [3.0, None], "seed=1", "train.steps=100", "precision=mxfp8"
    )
    sound = seeded(tmp_path / "mxfp8-seed=2", 2, -1.0, "precision=mxfp8")
    late = seeded(tmp_path / "late-seed=1", 1, 0.0, "precision=block")
    lines = (late / "metrics.jsonl").read_text().splitlines()
    # the last step is done, its evaluation is not
    (late / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    other = seeded(tmp_path / "other-seed=1", 1, 0.0, "precision=block", "evaluate.packs=3")
    compared = over([*folders, unfinished, lost, sound, late, other])
    verdicts = {each.name: each.verdict for each in compared.results}
    assert verdicts["current"] == verdicts["late"] == verdicts["other"] == "no seed in common"
    assert verdicts["mxfp8"] == "broke off: 1 run of 2" and verdicts["delayed"] == "equivalent"
    assert compared.results[5].difference is None, "no mean without the run that broke off"
    assert {"current-seed=1", "mxfp8-seed=1"} <= {
        name for why, names in compared.left_out.items() for name in names if "no end" in why
    }
    assert [names for why, names in compared.left_out.items() if "not evaluated" in why] == [
        ["late-seed=1"]
    ]
    assert [names for why, names in compared.left_out.items() if "other text" in why] == [
        ["other-seed=1"]
    ]


def test_without_held_out_loss_the_last_training_losses_are_compared(tmp_path: Path):
    """Where losses fall, a branch of few steps must not seem better than the run that it left."""
    falling = [4.0 - step / 100 for step in range(100)]
    runs = [
        trained(
            tmp_path / f"{name}-seed{seed}",
            losses,
            f"seed={seed}",
            f"precision={name}",
            held_out=False,
            begins=first,
        )
        for name, losses, first in (
            ("bf16", falling, 0),
            ("delayed", [loss + 0.5 for loss in falling[70:]], 70),
        )
        for seed in (1, 2, 3)
    ]
    compared = SeedComparison.over(runs)
    assert not compared.held_out
    assert compared.results[1].difference.by_seed == pytest.approx({1: 0.5, 2: 0.5, 3: 0.5})
    rows = rows_of("\n".join(Report.over(runs).tables()))
    assert any("(last 64)" in text for text in rows["bf16-seed1"][0]), (
        "and it says of how many steps a loss is"
    )
    other = trained(
        tmp_path / "other",
        [2.0] * 4,
        "seed=1",
        "precision=delayed",
        held_out=False,
        fingerprint="ef56",
    )
    [(why, names)] = SeedComparison.over([*runs[:3], *runs[4:], other]).left_out.items()
    assert "other text" in why and names == ["other"]


def test_seeds_are_compared_where_the_baseline_has_several_and_other_groups_stand_beside_it(
    folders: list[Path],
):
    runs = [read_run(path) for path in folders]
    assert (
        Report.over([runs[0], runs[3]]).seeds is None
        and Report.over(runs[:3], ["seed"]).seeds is None
    )
    with pytest.raises(InputError, match=r"optimizer\.learning_rate"):
        Report.over(
            [
                *runs,
                read_run(
                    seeded(folders[0].parent / "rate-seed=1", 1, 0.0, "optimizer.learning_rate=0.5")
                ),
            ]
        )


def test_a_branch_without_a_step_of_the_baseline_has_no_difference(tmp_path: Path):
    settings = (("train.steps=100",), ("train.steps=300", "train.begin_with=x")) * 2
    runs = [
        make_run(
            tmp_path / f"{n}", [2.0] * 100, f"seed={n // 2}", *s, held_out=False, begins=n % 2 * 200
        )
        for n, s in enumerate(settings)
    ]
    assert [each.verdict for each in over(runs).results] == ["baseline", "no step in common"]
