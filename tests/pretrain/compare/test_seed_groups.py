"""Runs of several seeds: which belong together, what the report and a matrix say of them, and what does not count."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare.comparison import RunComparison, hours_to_horizon
from pretrain.compare.matrix import main as matrix_main
from pretrain.compare.matrix_file import load_matrix
from pretrain.compare.page import render
from pretrain.compare.page_table import columns_of
from pretrain.compare.seed_groups import SeedComparison, grouped, share
from pretrain.metrics.run_record import RunRecord, read_run
from pretrain.settings.config import resolved
from tests.pretrain.compare.made_runs import make_run, trained

SLOPE, TOKENS = -0.2, 4096  # nats for each factor e of tokens, and tokens a step
ROOT = Path(__file__).parents[3]


def seeded(path: Path, seed: int, above: float, *settings: str, steps: int = 100, **keywords: Any) -> Path:
    """A run of 100 steps, 80 of them before the decay, that ends `above` the baseline's loss of 2 + seed / 100."""
    wsd = (f"seed={seed}", "train.steps=100", "schedule.kind=wsd", "schedule.decay=0.2")
    make_run(path, [3.0] * steps, *wsd, *settings, held_out=False, **keywords)
    lines = []
    for step in range(10, steps + 1, 10):
        loss = 2 + seed / 100 + above + (0.3 + SLOPE * math.log(step / 80) if step < 100 else 0.0)
        lines.append({"step": step, "event": "evaluation", "held_out_loss": loss, "held_out_perplexity": math.exp(loss)})
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


ABOVE = {1: 0.001, 2: 0.003, 3: 0.002}  # nats, by seed


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three seeds of BF16, of FP8 a little above it and of emulated NVFP4 far above it, and one BF16 run once more."""
    found = [seeded(tmp_path / f"bf16-seed={seed}", seed, 0.0) for seed in ABOVE]
    found += [seeded(tmp_path / f"delayed-seed={seed}", seed, above, "precision=delayed") for seed, above in ABOVE.items()]
    emulated = {"backend": "emulation", "effective": "nvfp4"}
    for seed, above in ABOVE.items():
        found.append(seeded(tmp_path / f"nvfp4-seed={seed}", seed, 0.1 + above, "precision=nvfp4", audit=emulated))
    return [*found, seeded(tmp_path / "bf16_again-seed=2", 2, -0.0005)]


def rows(text: str) -> dict[str, list[list[str]]]:
    """Rows of all tables in Markdown, by their first cell."""
    found: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(cells[0], []).append(cells[1:])
    return found


# ── Groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_that_differ_in_seed_and_names_alone_are_a_group_and_a_repeat_is_another(folders: list[Path]):
    groups = grouped([read_run(path) for path in folders])
    assert [(group.name, [*group.runs], group.repeats) for group in groups] == [
        ("bf16", [1, 2, 3], False),
        ("delayed", [1, 2, 3], False),
        ("nvfp4", [1, 2, 3], False),
        ("bf16_again", [2], True),
    ]


def test_groups_are_called_by_their_settings_where_folders_say_nothing(tmp_path: Path):
    runs = [
        trained(tmp_path / f"run{n}", (3.0,) * 4, f"seed={n % 2}", f"weights={w}")
        for n, w in enumerate(["fp32"] * 2 + ["bf16"] * 2)
    ]
    assert [group.name for group in grouped(runs)] == ["weights fp32", "weights bf16"]
    runs.append(trained(tmp_path / "x" / "run", (3.0,) * 4, "seed=1", "weights=fp32"))
    assert [(group.name, group.repeats) for group in grouped(runs)][-1] == ("run", True)


def test_the_same_folder_names_elsewhere_are_told_apart(tmp_path: Path):
    runs = [trained(tmp_path / place / f"a-seed{seed}", (3.0,) * 4, f"seed={seed}") for place in "xyz" for seed in (1, 2)]
    assert [(group.name, group.repeats) for group in grouped(runs)] == [("a", False), ("a again", True), ("a again 2", True)]


def test_what_computed_the_products_and_options_of_a_precision_make_other_groups(tmp_path: Path):
    delayed = [("a", ()), ("b", ("fp8_config.margin=1",))]
    runs = [trained(tmp_path / f"{n}-seed1", (3.0,) * 4, "seed=1", "precision=delayed", *more) for n, more in delayed]
    runs.append(trained(tmp_path / "c-seed1", (3.0,) * 4, "seed=1", "precision=delayed", audit={"backend": "emulation"}))
    assert [group.name for group in grouped(runs)] == ["a", "b", "c"] and not any(group.repeats for group in grouped(runs))
    others = [(1, "fp8_config.margin=1"), (2, "data.packs=elsewhere")]
    plain = [trained(tmp_path / "p" / f"run-seed{n}", (3.0,) * 4, f"seed={n}", other) for n, other in others]
    assert len(grouped(plain)) == 1, "BF16 has no use for options of FP8, and packs are what their fingerprint says"


# ── What is said ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_answers_over_seeds_before_it_shows_any_run(folders: list[Path], tmp_path: Path, capsys):
    page, tables = tmp_path / "out" / "report.html", tmp_path / "out" / "tables.md"
    command = ["report", *map(str, folders), "--markdown", str(tables), "--out"]
    assert main([*command, str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "Against bf16 over 3 seeds, within 0.3 %: equivalent: delayed; worse: nvfp4. "
        "No verdict yet against bf16: bf16_again (1 seed). A verdict needs 3 seeds."
    )
    found = rows(said)
    half = 4.303 * 0.001 / math.sqrt(3)  # Student's t of two degrees
    assert found["bf16"][0][:2] == ["3", "2.0200 (sd 0.0100)"]
    assert found["delayed"][0][2:6] == ["+0.0020", f"{half:.4f}", "+0.10 %", "equivalent"]
    assert found["nvfp4"][0][2:6] == ["+0.1020", f"{half:.4f}", "+5.05 %", "worse"]
    tokens = {"delayed": 0.002, "nvfp4": 0.102}
    assert all(
        found[name][0][6] == f"{100 * math.expm1(above / SLOPE):+.{2 if above < 0.01 else 0}f} %".replace("-", "−")
        for name, above in tokens.items()
    )
    assert found["delayed"][1] == ["+0.0010", "+0.0030", "+0.0020"], "seed by seed"
    assert "bf16_again repeats bf16" in said and "0.0005 nats (root mean square of 1)" in said
    assert "delayed-seed=1" not in said, "single runs are in the page and the file"
    assert "delayed-seed=1" in rows(tables.read_text()) and tables.read_text().startswith("Against bf16")
    text = page.read_text()
    assert text.index("Over seeds") < text.index("Speed against loss") and "+5.05 %" in text
    assert main([*command, str(tmp_path / "out" / "seeds.png")]) == 0
    assert (tmp_path / "out" / "seeds.png").read_bytes().startswith(b"\x89PNG") and "Differences: " in capsys.readouterr().out


def test_speeds_and_the_margin_can_be_given(folders: list[Path], tmp_path: Path, capsys):
    (tmp_path / "speeds.yaml").write_text("delayed: 1.25\nnvfp4: 2\n")
    command = ["report", *map(str, folders), "--out", str(tmp_path / "x.png")]
    assert main([*command, "--speedups", str(tmp_path / "speeds.yaml"), "--margin", "0.05"]) == 0
    found = rows(capsys.readouterr().out)
    assert (found["delayed"][0][5], found["nvfp4"][0][5]) == ("cannot tell", "worse")
    assert found["delayed"][0][7] == "1.25 ×"
    assert found["delayed"][0][8] == f"{0.002 + SLOPE * math.log(1.25):+.4f}".replace("-", "−")
    assert found["nvfp4"][0][8] == f"{0.102 + SLOPE * math.log(2):+.4f}".replace("-", "−")
    assert found["bf16_again"][0][7:9] == ["1.00 ×", "−0.0005"], "its own: it had its machine for itself"
    for content, named in (
        ("other: 1.5", "no group of runs is called 'other'"),
        ("delayed: fast", "no factor"),
        ("bf16: 1.5", "bf16 is the baseline"),
    ):
        (tmp_path / "speeds.yaml").write_text(content)
        assert main([*command, "--speedups", str(tmp_path / "speeds.yaml")]) == 2 and named in capsys.readouterr().err
    assert main([*command, "--margin", "0"]) == 2 and "--margin: 0: a number above 0" in capsys.readouterr().err
    alone = ["report", str(folders[0]), str(folders[3]), "--margin", "0.05", "--out", str(tmp_path / "c.png")]
    assert main(alone) == 2 and "--margin: is for a comparison over seeds" in capsys.readouterr().err


def test_a_speed_on_another_kind_of_machine_is_none(folders: list[Path]):
    assert SeedComparison.over([read_run(path) for path in folders]).results[1].speedup is not None
    path = folders[4] / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gpus": ["NVIDIA B200"]}))
    found = SeedComparison.over([read_run(path) for path in folders])
    assert [each.speedup is None for each in found.results] == [True, True, True, False]
    assert any(note.startswith("No speed of delayed: not all of") for note in found.notes())
    given = SeedComparison.over([read_run(path) for path in folders], speedups={"delayed": 1.2})
    assert given.results[1].speedup == 1.2 and not any("No speed" in note for note in given.notes())


def test_no_difference_has_no_sign():
    assert share(-0.0) == share(0.0) == "+0.00 %" and share(-0.012) == "−1.20 %"


def test_what_is_no_end_does_not_count_and_is_said(folders: list[Path], tmp_path: Path):
    unfinished = seeded(tmp_path / "current-seed=1", 1, 0.0, "precision=current", steps=50)
    lost = make_run(tmp_path / "mxfp8-seed=1", [3.0, None], "seed=1", "train.steps=100", "schedule.decay=0.2", "precision=mxfp8")
    sound = seeded(tmp_path / "mxfp8-seed=2", 2, -1.0, "precision=mxfp8")
    other = seeded(tmp_path / "block-seed=1", 1, 0.0, "precision=block")
    late = seeded(tmp_path / "late-seed=1", 1, 0.0, "precision=block")
    lines = (late / "metrics.jsonl").read_text().splitlines()
    (late / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # the last step is done, its evaluation is not
    texts = {folders[0]: "ef56", other: "gh78"}
    for path, text in texts.items():
        environment = path / "environment.json"
        environment.write_text(json.dumps(json.loads(environment.read_text()) | {"held_out_fingerprint": text}))
    found = SeedComparison.over([read_run(path) for path in [*folders, unfinished, lost, sound, late, other]])
    verdicts = {row[0]: (row[1], row[6]) for row in found.rows()}
    assert verdicts["current"] == verdicts["block"] == ("0", "no seed in common")
    assert verdicts["mxfp8"] == ("1", "broke off: 1 run of 2") and found.rows()[-2][3] == "–", "no mean without it"
    assert verdicts["delayed"] == ("3", "equivalent")
    assert found.left_out["not finished"] == ["current-seed=1"]
    assert found.left_out["not evaluated at its end yet"] == ["late-seed=1"]
    assert [names for why, names in found.left_out.items() if "other text" in why] == [["block-seed=1"]]


def test_a_run_that_lost_its_evaluations_does_not_count_and_is_said(folders: list[Path]):
    metrics = folders[1] / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    (folders[1] / "summary.json").write_text(json.dumps(read_run(folders[1]).summary))
    metrics.write_text("".join(f"{line}\n" for line in lines if "evaluation" not in line))
    found = SeedComparison.over([read_run(path) for path in folders])
    assert found.left_out["not evaluated at its end yet"] == [folders[1].name]


def test_a_run_whose_horizon_is_in_epochs_is_unfinished_too(tmp_path: Path):
    assert trained(tmp_path / "going", (3.0,) * 4, "train={epochs: 1.25}").is_unfinished, "four steps are an epoch"
    assert not trained(tmp_path / "done", (3.0,) * 5, "train={epochs: 1.25}").is_unfinished
    path = make_run(tmp_path / "back", (3.0,) * 4, "train={epochs: 1.25}")  # the packs of a fifth step were passed over
    *steps, evaluation = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rollback = {"step": 4, "event": "rollback", "rollbacks": 1, "left_out": 1}
    steps[3]["epoch"] = 1.25
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (*steps[:3], rollback, steps[3], evaluation)))
    back = read_run(path)
    assert back.is_unfinished and hours_to_horizon(back, 4096.0) == pytest.approx(5 / 3600)


def test_without_held_out_loss_the_last_training_losses_are_compared(tmp_path: Path):
    runs: list[RunRecord] = []
    for name, above, settings in (("bf16", 0.0, ()), ("delayed", 0.5, ("precision=delayed",))):
        for seed in (1, 2, 3):
            losses = [2.0 + above + seed / 100] * 4
            runs.append(trained(tmp_path / f"{name}-seed{seed}", losses, f"seed={seed}", *settings, held_out=False))
    found = SeedComparison.over(runs)
    assert not found.held_out and found.slope is None and "loss, last 50" in found.columns()
    assert found.results[1].difference.by_seed == pytest.approx({1: 0.5, 2: 0.5, 3: 0.5})
    other = trained(tmp_path / "other", [2.0] * 4, "seed=1", "precision=delayed", held_out=False, fingerprint="ef56")
    left_out = SeedComparison.over([*runs[:3], *runs[4:], other]).left_out
    assert left_out == {"trained on other text than the baseline's run of the seed": ["other"]}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("schedule.kind=cosine",), "its rate never stays constant (setting schedule.kind: cosine;"),
        (("model={source: SOURCE}",), "its weights are those of SOURCE, trained on tokens that are not in its count."),
        (("schedule.warmup=75",), "there are no 3 evaluations by which it falls (setting evaluate.every)."),
    ],
)
def test_why_no_tokens_are_told_is_said(settings: tuple[str, ...], why: str, tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 32}')
    settings = tuple(text.replace("SOURCE", str(tmp_path / "source")) for text in settings)
    runs = [read_run(seeded(tmp_path / f"c-seed{seed}", seed, 0.0, *settings)) for seed in (1, 2)]
    runs.append(read_run(seeded(tmp_path / "d-seed1", 1, 0.1, "precision=delayed", *settings)))
    [note] = [note for note in SeedComparison.over(runs).notes() if note.startswith("No tokens are told")]
    assert why.replace("SOURCE", str(tmp_path / "source")) in note


def test_a_cosine_has_no_rate_to_stay_at_so_no_tokens_are_told(tmp_path: Path):
    settings = ("schedule.kind=cosine", "schedule.warmup=100")  # evaluated often while the rate rises
    runs = [read_run(seeded(tmp_path / f"c-seed{seed}", seed, 0.0, *settings)) for seed in (1, 2)]
    runs.append(read_run(seeded(tmp_path / "d-seed1", 1, 0.1, "precision=delayed", *settings)))
    found = SeedComparison.over(runs)
    assert found.slope is None and "tokens" not in found.columns() and any("No tokens" in note for note in found.notes())
    assert not any("`" in note for note in found.notes()), "a page shows notes as they are"
    assert found.answer() == "No verdict yet against c: d (1 seed). A verdict needs 3 seeds."


def test_a_page_over_seeds_subtracts_no_other_seeds_loss_and_has_no_front_of_single_runs(folders: list[Path]):
    runs = [read_run(path) for path in folders]
    comparison = RunComparison.over(runs)
    page = render(comparison, seeds=SeedComparison.over(runs)).decode()
    assert any(each.on_front for each in comparison.standings) and 'class=" front"' not in page
    assert "baseline front" not in page and "No Pareto front" in page and "The line joins" not in page
    column = next(column for column in columns_of(comparison) if column.name == "held-out − baseline")
    cells = [column.cell(each) for each in comparison.standings]
    paired = [each.not_paired is None for each in comparison.standings]
    assert paired[1:] == [False, False, True, False, False, True, False, False, False]
    assert [cell.value is not None for cell in cells[1:]] == paired[1:]
    assert {cell.beside for cell in cells if cell.shown == "–"} == {"", "not paired"}


def test_one_seed_is_no_comparison_over_seeds_and_one_group_tells_its_spread(folders: list[Path], tmp_path: Path, capsys):
    assert SeedComparison.over([read_run(path) for path in (folders[0], folders[3], folders[4])]) is None
    curves = tmp_path / "c.png"
    assert main(["report", *map(str, folders[:3]), "--vary", "seed", "--out", str(curves)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("bf16 over 3 seeds: loss 2.0200 (sd 0.0100).") and "bf16-seed=3" in said and "Curves:" in said
    assert main(["report", *map(str, folders[:3]), "--out", str(curves)]) == 2 and "--vary seed" in capsys.readouterr().err


def test_what_else_differs_is_refused_all_the_same(folders: list[Path], tmp_path: Path):
    more = seeded(tmp_path / "rate-seed=1", 1, 0.0, "optimizer.learning_rate=0.5")
    assert main(["report", *map(str, [*folders, more]), "--out", str(tmp_path / "x.png")]) == 2
    assert main(["report", *map(str, [*folders, more]), "--vary", "optimizer", "--out", str(tmp_path / "x.png")]) == 0


# ── A matrix ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_matrix_with_seeds_as_an_axis_ends_with_their_comparison(small_recipe: dict[str, Any], tmp_path: Path, capsys):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small_recipe | {"precision": "bf16"}))
    content = {"name": "m", "recipe": str(tmp_path / "recipe.yaml"), "run_dir": f"{tmp_path}/runs/{{cell}}"}
    content |= {"accelerate": str(ROOT / "accelerate_configs/cpu.yaml"), "baseline": {"weights": "fp32"}}
    content |= {"axes": {"weights": ["bf16", "fp32"], "seed": [1, 2, 3]}}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    matrix = load_matrix(tmp_path / "m.yaml")
    assert matrix.baseline.name == "fp32-seed=1", "whichever seed: the baseline is all of them"
    for run in matrix.runs:
        make_run(run.run_dir, [3.0] * 12, fingerprint=None)
        loss = 2.0 + run.recipe.seed / 10 + (0.5 if run.recipe.weights == "bf16" else 0.0)
        lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
        evaluation = json.loads(lines[-1]) | {"held_out_loss": loss}
        (run.run_dir / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(evaluation)]) + "\n")
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(resolved(run.recipe)))
        (run.run_dir / "summary.json").write_text(json.dumps({"data_fingerprint": "ab12", "steps": 12}))
    assert matrix_main([str(tmp_path / "m.yaml")]) == 0
    said = capsys.readouterr().out
    assert "Against fp32 over 3 seeds, within 0.3 %: worse: bf16." in said and "Best first" not in said
    assert rows(said)["bf16"][0][1:4] == ["2.7000 (sd 0.1000)", "+0.5000", "0"]
    assert {"m.png", "m.md", "m.html"} <= {path.name for path in (tmp_path / "runs").iterdir()}


def test_a_baseline_that_fits_cells_of_other_settings_is_refused(small_recipe: dict[str, Any], tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small_recipe | {"precision": "bf16"}))
    content = {"name": "m", "recipe": str(tmp_path / "recipe.yaml"), "accelerate": str(ROOT / "accelerate_configs/cpu.yaml")}
    content |= {"axes": {"weights": ["bf16", "fp32"], "seed": [1, 2]}, "baseline": {"seed": 1}}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(InputError, match=r"`baseline`: \{seed: 1\} fits several cells"):
        load_matrix(tmp_path / "m.yaml")
