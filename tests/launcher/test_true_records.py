"""What a run folder says of its run stays true, whatever the run is started again with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packing.arrow import Pack, PackWriter
from packing.settings import DataSettings
from packing.store import open_packs
from tests.bad_input.conftest import contents
from tests.bad_input.test_bad_data import write_tokenizer
from tests.conftest import PACK_LENGTH, VOCABULARY, over

QUICK = ("train.steps=4", "evaluate.every=2", "checkpoint.every=2", "parity=off")


@pytest.fixture(scope="session")
def other_text(small_packs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An argument that trains on the same packs and evaluates on others, of as many tokens with a label."""
    folder, settings = tmp_path_factory.mktemp("packs") / "other", DataSettings(packs=small_packs, length=PACK_LENGTH)
    with PackWriter(folder, PACK_LENGTH) as writer:
        for split in ("train", "held_out"):
            for pack in open_packs(settings, split):
                tokens = pack.input_ids if split == "train" else (pack.input_ids + 7 * np.arange(PACK_LENGTH)) % VOCABULARY
                writer.add(split, Pack(tokens.astype(np.uint32), pack.lengths))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return f"data.packs={folder}"


def environment_of(run: Any) -> dict[str, Any]:
    return json.loads((run.run_dir / "environment.json").read_text())


def test_a_finished_run_stays_as_it_was_evaluated(train_here: Callable, other_text: str) -> None:
    run = train_here(*QUICK)
    assert run.status == 0, run.output
    before = contents(run.run_dir)
    for change, told in {
        other_text: "held_out_fingerprint: saved ",
        "evaluate.packs=3": "evaluate.packs: saved null, now 3",
        "fp8_config.use_autocast_during_eval=true": "fp8_config.use_autocast_during_eval: saved ",
    }.items():
        again = train_here(*QUICK, change)
        assert again.status == 0 and told in again.out, again.output
        assert "the run has finished and stays as it was evaluated" in again.out and "`--eval-only`" in again.out
        assert contents(run.run_dir) == before
    same = train_here(*QUICK)
    assert same.status == 0 and "stays as it was evaluated" not in same.out and contents(run.run_dir) == before


def test_a_finished_run_that_was_never_evaluated_is_once_there_is_text(train_here: Callable, small_packs: Path) -> None:
    folder = train_here(*QUICK).run_dir
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if "evaluation" not in line))
    (folder / "environment.json").write_text("{}")
    again = train_here(*QUICK)
    assert again.status == 0 and "held-out loss" in again.out and "stays as it was evaluated" not in again.out
    assert environment_of(again)["held_out_fingerprint"] and again.records()[-1]["event"] == "evaluation"


@pytest.mark.parametrize("more", [(), ("train.steps=6", "--accept-changes")])
def test_packs_of_token_ids_do_not_let_a_run_go_on_with_another_tokenizer(
    more: tuple[str, ...], train_here: Callable, tmp_path: Path
) -> None:
    named, other = (write_tokenizer(tmp_path / name, words).parent for name, words in (("named", "a b c"), ("other", "c b a")))
    run = train_here(*QUICK, f"data.tokenizer={named}")
    assert run.status == 0 and environment_of(run)["tokenizer_fingerprint"], run.output
    before = contents(run.run_dir)
    for start in ((f"data.tokenizer={other}",), (f"data.tokenizer={other}", "--plan"), ("--accept-changes",)):
        refused = train_here(*over(QUICK, *more, *start))
        assert refused.status == 2 and contents(run.run_dir) == before, refused.output
        assert "step-00000004: its tokenizer is another now: " in refused.err and "put that one back" in refused.err
    same = train_here(*over(QUICK, *more, f"data.tokenizer={named}"))
    assert same.status == 0, same.output
