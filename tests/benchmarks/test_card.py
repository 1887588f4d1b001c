"""`python -m benchmarks.card`: a card is made, checked, compared and shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card
from benchmarks.machine import without_padding
from benchmarks.speed.__main__ import tables
from foundation.errors import InputError
from foundation.files import write_json
from tests.conftest import ROOT
from tests.forked_commands import forking
from tests.lab.made_runs import rows_of

PATH = ROOT / "benchmarks/results/cards/h200.json"


@pytest.fixture
def made() -> dict[str, Any]:
    """The card of an H200."""
    return card.read(PATH)


def start(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.card", *options],
        cwd=ROOT,
        env=forking() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly
def test_the_check_of_a_new_card_finds_a_changed_loss(tmp_path: Path):
    """The second command continues with the parts of the first one."""
    path = tmp_path / "cpu.json"
    both = "bf16,delayed+head"
    done = [start("--card", str(path), "--precisions", names) for names in ("bf16", both)]
    assert [process.returncode for process in done] == [0, 0], done[-1].stderr
    assert [process.stdout.count("bf16 ...") for process in done] == [2, 0]
    content = card.read(path)
    rows = rows_of(done[-1].stdout)
    for name, engine in (("bf16", "torch"), ("delayed+head", "emulation")):
        ((computes_on, speed, _, audit, parity, bits, first, last),) = rows[name]
        assert (computes_on, audit, bits) == (engine, "passed", "–")
        assert int(speed.replace(",", "")) > 0
        assert 0 < float(parity.removesuffix(" % of the tolerance")) < 100
        losses = content["losses"]["ways"][name]["losses"]
        assert len(losses) == card.STEPS and losses[-1] < losses[0] - 1
        assert [first, last] == [f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]
    assert content["limits"]["floors"]["fp32"] > 0 and content["code"] == card.code()
    assert "This is the card of a CPU" in " ".join(tables([path]).split())

    content["losses"]["ways"]["delayed+head"]["losses"][17] += 1e-6
    write_json(path, card.signed(content))
    checked = start("--check", str(path))
    assert checked.returncode == 1, checked.stderr
    bf16, delayed = checked.stdout.splitlines()[-2:]
    assert bf16 == "bf16: agrees: all 50 losses are equal, bit for bit"
    assert "+head: DISAGREES: 1 of 50 losses differ, the first in step 18" in delayed
    content["losses"]["settings"]["recipe_text"] += "weights: fp32"
    write_json(path, card.signed(content))
    assert "another training; check out its commit" in start("--check", str(path)).stderr


def test_losses_of_other_versions_may_differ_within_the_tolerance(made: dict[str, Any]):
    made["code"] = card.code()
    environment = made["environment"]
    assert card.differing(made, environment) == []
    newer = environment | {"packages": environment["packages"] | {"torch": "2.99"}}
    assert card.differing(made, newer) == ["torch"]
    other = environment | {"gpus": ["B200"]}
    assert card.differing(made | {"code": "0"}, other) == ["device", "code"]
    recorded = made["losses"]["ways"]["bf16"]
    assert card.compare(recorded, recorded, [])[0]
    for factor, differences, agrees in ((0.9, ["torch"], True), (1.1, ["torch"], False)):
        losses = [loss + factor * card.TOLERANCE for loss in recorded["losses"]]
        result, text = card.compare(recorded | {"losses": losses}, recorded, differences)
        assert result is agrees and text.endswith("because these differ: torch")
    assert not card.compare(recorded | {"losses": losses}, recorded, [])[0]
    failed = {"status": "failed", "reason": "halted: no"}
    assert card.compare(failed, recorded, []) == (False, "the training failed: halted: no")


def test_a_precision_that_failed_is_a_result(made: dict[str, Any]):
    failed = {"status": "failed", "reason": "halted: step 1"}
    made["losses"]["ways"]["delayed"] = made["ways"]["delayed"] = failed
    made["bits"]["delayed"] = {"status": "ok", "equal": False, "operands": []}
    row = ["delayed", "failed", *["–"] * 4, "differ", "–", "–"]
    assert card.row("delayed", made) == row
    reasons = [line.partition(":")[0] for line in card.failures("delayed", made)]
    assert reasons == ["speed", "50 steps", "bits"]


def test_the_tables_of_speeds_show_a_card():
    rows = rows_of(without_padding(tables([PATH])))
    assert "**ours, delayed, scope=linear+head**" in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--card a.json --check b.json", "not allowed with argument --card"),
        ("--card a.json --precisions bf16,fp16", "--precisions: fp16: unknown"),
        (f"--check {PATH}", "is of a GPU, and this machine has none"),
        ("--check changed.json", "does not have the hash in the file"),
        ("--card .", "cannot be written"),
    ],
)
def test_a_mistake_is_refused_before_a_training(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # The command sets it.
    Path("changed.json").write_text(PATH.read_text().replace("delayed+head", "mxfp8+head"))
    monkeypatch.setattr(sys, "argv", ["card", *arguments.split()])
    with pytest.raises(InputError, match=message):
        card.main()
