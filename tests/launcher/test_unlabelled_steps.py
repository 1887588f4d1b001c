"""Steps of which no token has a label: they have no loss, and nothing that goes by losses counts them."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from packing.arrow import Pack, PackWriter
from pretrain.metrics.run_record import read_run
from tests.conftest import PACK_LENGTH, VOCABULARY


def write_packs(folder: Path, labelled: Container[int]) -> Path:
    """Packs of which all but those `labelled` hold documents of one token, after which nothing is to be predicted."""
    with PackWriter(folder, PACK_LENGTH) as writer:
        for number in range(40):
            tokens = (number + np.arange(PACK_LENGTH)) % VOCABULARY
            lengths = [PACK_LENGTH] if number in labelled else [1] * PACK_LENGTH
            writer.add("train", Pack(tokens.astype(np.uint32), np.array(lengths, dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return folder


def test_a_step_without_labels_has_no_loss_and_a_resumed_run_goes_on_over_it(
    train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small_recipe | {"batch": {"tokens": PACK_LENGTH, "microbatch": 1}, "evaluate": {}, "parity": "off"}
    recipe |= {"loss": {"penalty": "non_max_sum", "penalty_weight": 0.1}}
    recipe |= {
        "data": {"packs": str(write_packs(tmp_path / "packs", range(1, 40, 2))), "length": PACK_LENGTH},
        "log": {"every": 1},
    }
    run = train_here(recipe=recipe)
    assert run.status == 0, run.output
    blank = [record for record in run.records() if record.get("unlabelled")]
    labelled = [record for record in run.records() if "unlabelled" not in record]
    assert len(blank) > 2 and len(labelled) > 2 and all(record["loss"] is None for record in blank)
    assert all(record["loss"] > 1 and record["gradient_norm"] > 0 for record in labelled)
    read = read_run(run.run_dir)
    assert read.summary["loss_last_50"] == fmean(record["loss"] for record in labelled) and not read.diverged
    said = [line for line in run.out.splitlines() if line.split()[:1] == ["step"]]
    assert sum("loss       –" in line for line in said) == len(blank) and " nan " not in run.out
    assert run.output.count("has a label, so it has no loss") == 1
    assert all(record["penalty"] is None for record in blank) and all(0 < record["penalty"] < 1 for record in labelled)
    assert sum("penalty       –" in line for line in said) == len(blank)

    step = blank[1]["step"]  # saved just after a step without labels, and gone on from in a folder that has its curve
    whole = {"run_dir": str(tmp_path / "other"), "checkpoint": {"every": step, "keep": 99}}
    other = train_here(recipe=recipe | whole)
    saved = Path(whole["run_dir"]) / "checkpoints" / f"step-{step:08d}"
    back = train_here("--resume", str(saved), recipe=recipe)
    assert back.status == 0 and other.losses() == back.losses() == run.losses(), back.output


def test_a_run_whose_last_steps_have_no_label_ends_with_a_card_that_names_no_loss(
    train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small_recipe | {"batch": {"tokens": PACK_LENGTH}, "train": {"steps": 2}, "schedule": {}, "evaluate": {}}
    recipe |= {"data": {"packs": str(write_packs(tmp_path / "packs", [7])), "length": PACK_LENGTH}, "parity": "off"}
    run = train_here(recipe=recipe)
    assert run.status == 0, run.output
    assert all(record["unlabelled"] for record in run.records())
    card = (run.run_dir / "final" / "README.md").read_text()
    assert "\n| precision |" in card and "\n| loss |" not in card
