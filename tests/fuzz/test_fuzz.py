"""1,000 bad inputs, and all that ever failed: one message each, no traceback, no hang, no memory, nothing missing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from tests.fuzz.harness import AcceptedWrongly, Kind, corpus, drawn, run_all, table
from tests.fuzz.kinds import CORPUS, kinds_in


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Kind]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield kinds_in(tmp_path_factory.mktemp("fuzz"))


def test_a_thousand_bad_inputs_and_all_that_once_failed_end_as_they_should(kinds):
    outcomes = list(run_all([*corpus(CORPUS, kinds), *drawn(kinds, 1000, seed=0)]))
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join([table(outcomes), *(f"{each.kind}: {each.ending}: {each.spec}\n{each.detail}" for each in wrong)])
    assert len(outcomes) >= 1000
    for kind in kinds:
        assert {outcome.ending for outcome in outcomes if outcome.kind == kind.name} & {"message"}, kind.name


WHOLE: dict[str, dict[str, Any]] = {
    "text sources": {"how": "nothing", "at": 0.5, "name": "a.jsonl.zst", "part": 0, "skip": False},
    "Arrow packs, damaged": {"how": "nothing", "at": 0.5, "file": 0.5},
    "MDS, damaged": {"how": "nothing", "at": 0.5, "file": 0.5},
    ".bin, meta.json, meta.pkl": {"how": "nothing", "at": 0.5, "file": "meta.pkl"},
    "checkpoints, damaged": {"how": "nothing", "at": 0.5, "file": 0.5},
    "run folders": {"damage": {"how": "nothing", "at": 0.5, "file": 0.5}},
    "key=value, options": {"arguments": ["weights=fp32", "run_dir=here"]},
    "recipe keys x values": {"key": "train.steps", "value": "13"},
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_damaged_is_accepted(name: str, kinds):
    (kind,) = (kind for kind in kinds if kind.name == name)
    (outcome,) = run_all([(kind, WHOLE[name])])
    assert outcome.ending == "accepted", outcome


def misbehave(spec: dict[str, Any], folder: Path) -> None:
    match spec["how"]:
        case "refuse":
            raise InputError("x.yaml: is not ours; move it away")
        case "say nothing":
            raise InputError(" ")
        case "raise":
            raise KeyError("x")
        case "wait":
            os.mkfifo(folder / "fifo")
            (folder / "fifo").read_bytes()
        case "take memory":
            bytearray(2**32)
        case "die":
            os._exit(3)
        case "lose text":
            raise AcceptedWrongly("half of it")


@pytest.mark.parametrize(
    "how, ending",
    [
        *[("accept", "accepted"), ("refuse", "message"), ("say nothing", "traceback"), ("raise", "traceback"), ("wait", "hang")],
        *[("take memory", "memory"), ("die", "died"), ("lose text", "accepted wrongly")],
    ],
)
def test_whatever_a_case_does_is_told_and_the_next_one_runs(how: str, ending: str):
    kind = Kind("misbehaving", 1, lambda rng: {}, misbehave)
    began = time.monotonic()
    outcomes = list(run_all([(kind, {"how": how}), (kind, {"how": "accept"})], hang_seconds=0.5 if how == "wait" else 60))
    assert [outcome.ending for outcome in outcomes] == [ending, "accepted"], outcomes
    assert time.monotonic() - began < 60


def test_the_same_seed_draws_the_same_cases(kinds):
    def specs(seed: int) -> list[tuple[str, dict]]:
        return [(kind.name, spec) for kind, spec in drawn(kinds, 200, seed)]

    assert specs(3) == specs(3) != specs(4)
