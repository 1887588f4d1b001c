"""`python -m benchmarks.card --card` and `--check` on a CPU, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card, throughput_report
from benchmarks.machine import without_padding
from foundation.errors import InputError
from foundation.files import write_json
from tests.conftest import ROOT
from tests.forked_commands import forking
from tests.lab.made_runs import rows_of

pytestmark = pytest.mark.long
PRECISIONS = ("bf16", "delayed+head")
ALL = ",".join(PRECISIONS)


def start(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.card", *options],
        cwd=ROOT,
        env=forking() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("card") / "cpu.json"


@pytest.fixture(scope="module")
def output(path: Path) -> str:
    """Output of the command that writes the card. It continues with the parts of an earlier one."""
    done = [start("--card", str(path), "--precisions", names) for names in ("bf16", ALL)]
    assert [process.returncode for process in done] == [0, 0], done[-1].stderr
    assert [process.stdout.count("bf16 ...") for process in done] == [2, 0]
    assert done[-1].stdout.count("delayed+head ...") == 2
    return done[-1].stdout


@pytest.fixture
def made(path: Path, output: str) -> dict[str, Any]:
    return card.read(path)


def test_a_card_has_speed_audit_parity_and_losses(output: str, made: dict[str, Any]):
    rows = rows_of(output)
    for name, engine in zip(PRECISIONS, ("torch", "emulation"), strict=True):
        ((computes_on, speed, _, audit, parity, bits, first, last),) = rows[name]
        assert (computes_on, audit, bits) == (engine, "passed", "–")
        assert int(speed.replace(",", "")) > 0
        assert 0 < float(parity.removesuffix(" % of the tolerance")) < 100
        trained = made["losses"]["ways"][name]
        losses = trained["losses"]
        assert len(losses) == card.STEPS and losses[-1] < losses[0] - 1
        assert [first, last] == [f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]
        assert trained["audit"]["effective"] == name.removesuffix("+head")
        assert trained["audit"]["parity"]["failures"] == []
    assert made["limits"]["floors"]["fp32"] > 0
    assert made["environment"]["git"]["commit"] and made["environment"]["packages"]["torch"]
    assert made["code"] == card.code()
    assert "emulated" in made["note"] and "tiny" in made["note"]


def test_the_check_finds_a_loss_that_was_changed(made: dict[str, Any], tmp_path: Path):
    made["losses"]["ways"]["delayed+head"]["losses"][17] += 1e-6
    changed = tmp_path / "changed.json"
    write_json(changed, card.signed(made))
    done = start("--check", str(changed))
    assert done.returncode == 1, done.stderr
    bf16, delayed = done.stdout.splitlines()[-2:]
    assert bf16 == "bf16: agrees: all 50 losses are equal, bit for bit"
    assert delayed.startswith(
        "delayed+head: DISAGREES: 1 of 50 losses differ, the first in step 18"
    )


def test_losses_of_other_versions_may_differ_within_the_tolerance(made: dict[str, Any]):
    environment = made["environment"]
    assert card.differing(made, environment) == []
    newer = environment | {"packages": environment["packages"] | {"torch": "2.99"}}
    assert card.differing(made, newer) == ["torch"]
    assert card.differing(made | {"code": "0"}, environment | {"gpus": ["B200"]}) == [
        "device",
        "code",
    ]
    recorded = made["losses"]["ways"]["bf16"]
    for factor, agrees in ((0.9, True), (1.1, False)):
        losses = [loss + factor * card.TOLERANCE for loss in recorded["losses"]]
        result, text = card.compare(recorded | {"losses": losses}, recorded, ["torch"])
        assert result is agrees and text.endswith("because these differ: torch")
    failed = {"status": "failed", "reason": "halted: no"}
    assert card.compare(failed, recorded, []) == (False, "the training failed: halted: no")


def test_a_precision_that_failed_is_a_result(made: dict[str, Any]):
    assert card.failures("delayed+head", made) == []
    failed = {"status": "failed", "reason": "halted: step 1"}
    made["losses"]["ways"]["delayed+head"] = made["ways"]["delayed+head"] = failed
    made["bits"]["delayed+head"] = {"status": "ok", "equal": False, "operands": []}
    assert card.row("delayed+head", made) == [
        "delayed+head",
        "failed",
        *["–"] * 4,
        "differ",
        "–",
        "–",
    ]
    assert [line.partition(":")[0] for line in card.failures("delayed+head", made)] == [
        "speed",
        "50 steps",
        "bits",
    ]


def test_the_tables_of_speeds_show_a_card(path: Path, output: str):
    text = without_padding(throughput_report.tables([path]))
    assert "This is the card of a CPU" in " ".join(text.split())
    assert "**ours, delayed, scope=linear+head, on_unsupported=emulate**" in rows_of(text)


def test_a_card_that_cannot_be_checked_is_refused(
    made: dict[str, Any], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    # `check` sets variables of the trainings.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    changed = tmp_path / "changed.json"
    changed.write_text(path.read_text().replace("delayed+head", "mxfp8+head"))
    with pytest.raises(InputError, match="does not have the hash in the file"):
        card.check(changed, None)
    with pytest.raises(InputError, match="has no losses of mxfp8; it has losses of bf16, delayed"):
        card.check(path, ["mxfp8"])
    made["losses"]["settings"]["recipe_text"] += "weights: fp32"
    write_json(changed, card.signed(made))
    with pytest.raises(InputError, match="another training; check out its commit"):
        card.check(changed, None)
    made["environment"]["gpus"] = ["NVIDIA B200"]
    write_json(changed, card.signed(made))
    with pytest.raises(InputError, match="is of a GPU, and this machine has none"):
        card.check(changed, None)
    with pytest.raises(InputError, match="cannot be written"):
        card.make(tmp_path, None)


def test_making_and_checking_a_card_at_once_is_refused():
    done = start("--card", "a.json", "--check", "b.json")
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert message.startswith("error: ") and "not allowed with argument --card" in message


def test_an_unknown_precision_is_refused_before_a_training(tmp_path: Path):
    done = start("--card", str(tmp_path / "card.json"), "--precisions", "bf16,fp16")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --precisions: fp16: unknown; choose")
