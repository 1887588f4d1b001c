"""The figures of the studies of Muon and of served models are those of their result files."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

MATRICES = ROOT / "benchmarks/evidence/matrices"

MUON_TABLE = ("held_out_loss", "training_loss")
SIZES = ("14m", "35m")


@pytest.mark.parametrize("key", MUON_TABLE)
def test_costs_under_muon_are_those_of_their_result_files(key: str):
    page = (ROOT / "docs/muon.md").read_text(encoding="utf-8")
    table = page.partition("| **held-out")[2].split("| **")[MUON_TABLE.index(key)]
    for precision, label in (
        ("delayed", "FP8, delayed scaling"),
        ("block", "FP8, blocks"),
        ("nvfp4", "NVFP4 in every linear"),
    ):
        cells = []
        for size in SIZES:
            costs = [
                [
                    100 * (loss / base - 1)
                    for loss, base in losses_of_muon(size, name, precision, key)
                ]
                for name in ("adamw", "muon")
            ]
            differences = [muon - adamw for adamw, muon in zip(*costs, strict=True)]
            cells += [mean_of_five(values, 2) for values in (*costs, differences)]
            if key == "held_out_loss" and precision != "nvfp4":
                assert all(
                    statistics.mean(values) + half_width_of_five(values) < 0.3 for values in costs
                )
        assert f"| {label} | {' | '.join(cells)} |" in table
    if key == "held_out_loss":
        text = " ".join(page.split())
        # The cells of the last precision, NVFP4, with 35 million parameters.
        adamw, muon, difference = (cell.lstrip("+") for cell in cells[3:])
        means = " instead of ".join(f"{cell.split()[0]} %" for cell in (muon, adamw))
        assert f"{means}, a difference of {difference} %" in text


def test_nats_that_nvfp4_costs_under_muon_are_those_of_the_result_files():
    text = " ".join((ROOT / "docs/muon.md").read_text(encoding="utf-8").split())
    cells, differences = [], []
    for size in SIZES:
        costs = [
            [loss - base for loss, base in losses_of_muon(size, name, "nvfp4", "held_out_loss")]
            for name in ("adamw", "muon")
        ]
        cells += [mean_of_five(values, 4).lstrip("+") for values in costs]
        more = [muon - adamw for adamw, muon in zip(*costs, strict=True)]
        differences.append(mean_of_five(more, 4))
    assert f"by {cells[0]} (AdamW) and {cells[1]} (Muon)" in text
    assert f"with 35 million by {cells[2]} and {cells[3]}." in text
    assert f"The differences are {' and '.join(differences)}." in text


def test_losses_of_muon_in_the_text_are_those_of_the_result_files():
    text = " ".join((ROOT / "docs/muon.md").read_text(encoding="utf-8").split())
    means = []
    for size in SIZES:
        of_seeds = [bf16_losses_of_muon(size, optimizer) for optimizer in ("adamw", "muon")]
        means.append([statistics.mean(losses) for losses in of_seeds])
        if size == "14m":
            spread = [statistics.stdev(losses) for losses in of_seeds]
            assert f"{spread[0]:.3f} (AdamW) and {spread[1]:.3f} nats (Muon)" in text
    cells = " | | ".join(f"{adamw:.4f} | {muon:.4f}" for adamw, muon in means)
    assert f"in nats | {cells} | |" in text
    small, large = (f"{adamw - muon:.2f}" for adamw, muon in means)
    assert f"The {small} and {large} nats" in text


def test_predictions_for_muon_are_those_of_the_result_files():
    text = " ".join((ROOT / "docs/muon.md").read_text(encoding="utf-8").split())
    small, large = (predictions_of_muon(size) for size in SIZES)
    for predictions, costs in (
        (small, "+{delayed} (delayed), +{block} (blocks) and +{nvfp4} % (NVFP4, {low} to {high})"),
        (large, "+{delayed}, +{block} and +{nvfp4} % ({low} to {high}) under both"),
    ):
        low, high = predictions["nvfp4_interval"]
        assert costs.format(**predictions, low=low, high=high) in text
    key = "probability_that_nvfp4_costs_more_under_muon"
    assert f"probability of {100 * small[key]:g} % and {100 * large[key]:g} %" in text


def test_rates_of_muon_are_those_of_the_search():
    rows = [
        row
        for row in read_lines("h200_muon_14m")
        if row["matrix"] == "muon_rates_14m" and "run" in row
    ]
    text = " ".join((ROOT / "docs/muon.md").read_text(encoding="utf-8").split())
    lower = {}
    for optimizer in ("adamw", "muon"):
        runs = [row for row in rows if row["optimizer"] == optimizer]
        chosen = min(
            (run for run in runs if run["session"] == 1), key=lambda run: run["held_out_loss"]
        )
        best = min(runs, key=lambda run: run["held_out_loss"])
        lower[optimizer] = (chosen, best, chosen["held_out_loss"] - best["held_out_loss"])
    chosen, best, gain = lower["adamw"]
    assert (chosen["learning_rate"], best["learning_rate"]) == (1.0e-3, 1.4e-3)
    assert f"1.4e-3 for AdamW by {gain:.3f} nats" in text
    chosen, best, gain = lower["muon"]
    assert (chosen["learning_rate"], chosen["muon_learning_rate"]) == (4.0e-3, 4.0e-3)
    assert (best["learning_rate"], best["muon_learning_rate"]) == (8.0e-3, 4.0e-3)
    assert f"8.0e-3 for Muon's AdamW part by {gain:.3f}." in text
    study = yaml.safe_load((MATRICES / "muon_14m.yaml").read_text(encoding="utf-8"))["cells"]
    assert study["adamw-bf16-seed=1"]["optimizer"] == {"learning_rate": 1.0e-3}
    rates = {"name": "muon", "learning_rate": 4.0e-3, "muon": {"learning_rate": 4.0e-3}}
    assert study["muon-nvfp4-seed=5"]["optimizer"] == rates
    search = yaml.safe_load((MATRICES / "muon_rates_14m.yaml").read_text(encoding="utf-8"))["cells"]
    assert search.keys() == {row["run"] for row in rows}


def losses_of_muon(
    size: str, optimizer: str, precision: str, key: str
) -> list[tuple[float, float]]:
    """Return the loss of each of five seeds in a precision, and that of the run it branches from.

    The BF16 runs of two seeds were trained twice. A run branches from the one of its session.
    """
    losses = {
        (row["precision"], row["seed"], row["session"]): row[key]
        for row in runs_of_muon(size)
        if row["optimizer"] == optimizer
    }
    pairs = {
        seed: (loss, losses["bf16", seed, session])
        for (name, seed, session), loss in losses.items()
        if name == precision
    }
    return [pairs[seed] for seed in range(1, 6)]


def bf16_losses_of_muon(size: str, optimizer: str) -> list[float]:
    """Return the held-out loss of the first BF16 run of each of the five seeds."""
    by_seed: dict[int, float] = {}
    for row in runs_of_muon(size):
        if (row["optimizer"], row["precision"]) == (optimizer, "bf16"):
            by_seed.setdefault(row["seed"], row["held_out_loss"])
    return [by_seed[seed] for seed in range(1, 6)]


def runs_of_muon(size: str) -> list[dict[str, Any]]:
    """Return the runs of the study of Muon, without those of its search."""
    return [
        row
        for row in read_lines(f"h200_muon_{size}")
        if row["matrix"] == f"muon_{size}" and "run" in row
    ]


def predictions_of_muon(size: str) -> dict[str, Any]:
    """Return the predictions that were written before the study of Muon."""
    (predictions,) = [
        row["predictions"] for row in read_lines(f"h200_muon_{size}") if "predictions" in row
    ]
    return predictions


def half_width_of_five(values: list[float]) -> float:
    """Return half of the 95 % t interval of the mean of five values."""
    assert len(values) == 5
    return 2.776 * statistics.stdev(values) / math.sqrt(5)


def mean_of_five(values: list[float], digits: int) -> str:
    """Return the mean of five values with its 95 % interval."""
    mean = f"{statistics.mean(values):+.{digits}f}".replace("-", "−")
    return f"{mean} ± {half_width_of_five(values):.{digits}f}"


SERVED_TABLE = (
    ("decay over 5 %", "decay-0.05"),
    ("decay over 50 %", "decay-0.5"),
    ("decay as 1-sqrt", "decay-0.2-sqrt"),
    ("decay to a tenth of the rate", "decay-0.2-to-tenth"),
    ("mean of the last 4 checkpoints", "decay-0.2-mean-4"),
    ("constant rate, mean of the last 8", "constant-mean-8"),
    ("last 1 % in the served precision", "tail-0.01"),
    ("last 2 %", "tail-0.02"),
    ("last 5 %", "tail-0.05"),
    ("last 5 %, decay to a tenth of the rate", "tail-0.05-to-tenth"),
    ("all after the first fifth", "block"),
)


@pytest.mark.parametrize(("label", "cell"), SERVED_TABLE)
def test_losses_of_served_models_are_those_of_their_result_files(label: str, cell: str):
    cells = []
    for size in ("14m", "35m"):
        header, *runs = read_lines(f"h200_served_decay_{size}")
        predicted = header["predictions"]["nvfp4"].get(cell, "")
        if predicted:
            predicted = f"{predicted:+}".replace("-", "−")
        cells += [cost_of_served(runs, "nvfp4", cell), str(predicted)]
        if size == "14m":
            cells.append(cost_of_served(runs, "block", cell))
    row = f"| {label} |" + "".join(f" {text} |" if text else " |" for text in cells)
    assert row in (ROOT / "docs/evidence.md").read_text(encoding="utf-8"), row


def cost_of_served(runs: list[dict[str, Any]], served: str, cell: str) -> str:
    """Return the served loss of a cell above that of the baseline in percent, as in the table.

    Return "" for a cell that was not trained for this served precision.
    """
    baseline = served_losses(runs, f"{served}-baseline", "served_loss")
    losses = served_losses(runs, f"{served}-{cell}", "served_loss")
    if not losses:
        return ""
    pairs = zip(losses, baseline, strict=True)
    return mean_of_five([100 * (loss / base - 1) for loss, base in pairs], 2)


def test_costs_of_quantization_are_those_of_the_studies_of_served_models():
    text = " ".join((ROOT / "docs/evidence.md").read_text(encoding="utf-8").split())
    tail = cost_of_served(read_lines("h200_served_decay_35m")[1:], "block", "tail-0.05")
    assert f"at 35 million: {tail} %" in text
    for size, millions in (("14m", "14 million"), ("35m", "35 million")):
        runs = read_lines(f"h200_served_decay_{size}")[1:]
        tail, baseline = (cost_of_quantization(runs, cell) for cell in ("tail-0.05", "baseline"))
        assert f"{tail:.2f} % instead of {baseline:.2f} % at {millions}" in text
    runs = read_lines("h200_served_decay_14m")[1:]
    costs = [cost_of_quantization(runs, cell) for cell in ("decay-0.05", "baseline", "decay-0.5")]
    assert "{:.2f}, {:.2f} and {:.2f} % after 5, 20 and 50 %".format(*costs) in text
    headers = [read_lines(f"h200_served_decay_{size}")[0] for size in ("14m", "35m")]
    lengths = [header["tokens"] / header["parameters"] for header in headers]
    assert "{:.1f} and {:.1f} tokens per parameter".format(*lengths) in text


def cost_of_quantization(runs: list[dict[str, Any]], cell: str) -> float:
    """Return the mean loss in NVFP4 above the loss in BF16 in percent."""
    served, bf16 = (
        served_losses(runs, f"nvfp4-{cell}", key) for key in ("served_loss", "held_out_loss")
    )
    return 100 * statistics.mean(low / high - 1 for low, high in zip(served, bf16, strict=True))


def test_the_time_to_equal_loss_is_that_of_the_result_file():
    lines = read_lines("h200_muon_gpt2")
    runs = {line["run"]: line for line in lines if "run" in line}
    search = [line for line in runs.values() if line["matrix"] == "muon_rates_gpt2"]
    best_of_search = min(search, key=lambda line: line["held_out_loss"])
    text = " ".join((ROOT / "docs/muon.md").read_text(encoding="utf-8").split())
    shares = []
    # The search trained the 200 steps of the first seed.
    for seed in (1, 2, 3):
        long = best_of_search if seed == 1 else runs[f"muon-delayed-200-seed={seed}"]
        adamw, short = runs[f"adamw-bf16-seed={seed}"], runs[f"muon-delayed-160-seed={seed}"]
        target = adamw["held_out_loss"]
        share = (short["held_out_loss"] - target) / (short["held_out_loss"] - long["held_out_loss"])
        steps = short["steps"] + share * (long["steps"] - short["steps"])
        seconds = [adamw["steps"] * adamw["step_ms"] / 1e3, steps * short["step_ms"] / 1e3]
        shares.append(seconds[1] / seconds[0])
        if seed == 1:
            for figure in (
                f"{target:.3f} nats after {adamw['steps']} steps of 131,072 tokens in "
                f"{seconds[0]:.1f} s",
                f"{short['held_out_loss']:.3f} after {short['steps']} steps",
                f"{long['held_out_loss']:.3f} after {long['steps']}",
                f"about {steps:.0f} steps, or {seconds[1]:.1f} s",
            ):
                assert figure in text, figure
    assert "in {:.2f}, {:.2f} and {:.2f} of the time".format(*shares) in text
    short, long = runs["muon-delayed-160-seed=1"], best_of_search
    study = yaml.safe_load((MATRICES / "muon_gpt2.yaml").read_text(encoding="utf-8"))["cells"]
    chosen = study["muon-delayed-200-seed=3"]["optimizer"]
    rates = (chosen["learning_rate"], chosen["muon"]["learning_rate"])
    assert rates == (long["learning_rate"], long["muon_learning_rate"])
    assert rates == (short["learning_rate"], short["muon_learning_rate"])
    best = min(
        (line for line in search if line["optimizer"] == "adamw"),
        key=lambda line: line["held_out_loss"],
    )
    assert study["adamw-bf16-seed=1"]["optimizer"]["learning_rate"] == best["learning_rate"]


def test_rates_of_muon_at_35_million_are_those_of_the_search():
    lines = [line for line in read_lines("h200_muon_35m") if "run" in line]
    study = yaml.safe_load((MATRICES / "muon_35m.yaml").read_text(encoding="utf-8"))["cells"]
    for optimizer in ("adamw", "muon"):
        search = [
            line
            for line in lines
            if line["matrix"] == "muon_rates_35m" and line["optimizer"] == optimizer
        ]
        best = min(search, key=lambda line: line["held_out_loss"])
        chosen = study[f"{optimizer}-nvfp4-seed=5"]["optimizer"]
        assert chosen["learning_rate"] == best["learning_rate"]
        assert chosen.get("muon", {}).get("learning_rate") == best.get("muon_learning_rate")


def read_lines(name: str) -> list[dict[str, Any]]:
    """Return the objects of a result file with one object per line."""
    file = ROOT / f"benchmarks/results/loss/{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def served_losses(runs: list[dict[str, Any]], name: str, key: str) -> list[float]:
    """Return the losses of a cell of the study of served models, in the order of the seeds."""
    return [run[key] for run in runs if run["run"].rpartition("-seed=")[0] == name]
