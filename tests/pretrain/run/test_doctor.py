"""`python -m pretrain doctor` prints a table of precisions, and the rates of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from foundation.errors import InputError
from pretrain import __main__ as commands
from pretrain.metrics import card_rates
from pretrain.metrics.card_rates import CardRates, read_rates
from pretrain.run import doctor
from tests.pretrain.compare.made_runs import rows_of


@pytest.mark.long
def test_a_precision_has_a_line_with_its_engine_and_obstacle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trial is forked from a server that has imported the modules, as a user's is."""
    assert commands.main(["doctor", "--precisions", "nvfp4"]) == 0
    output = capsys.readouterr().out
    assert "card rates" not in output
    expected = "\nnvfp4: emulation; it needs a GPU of compute capability 10.0"
    assert expected in output


def test_a_failed_trial_has_a_line_with_its_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "STEPS", 0)
    assert commands.main(["doctor", "--precisions", "fp32"]) == 1
    assert "\nfp32: failed: error: " in capsys.readouterr().out


RATES = CardRates(
    device="NVIDIA H100 80GB HBM3",
    gemm={"bf16": 692.65e12, "delayed": 1286.35e12},
    bandwidth=2.9e12,
    launch=4e-6,
    nccl={"all_reduce 100000000": 3.55e11},
)


@pytest.fixture
def reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that returns the doctor's report of rates, with caches in `tmp_path`."""

    def report(result: CardRates | Exception) -> str:
        def measure() -> CardRates:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(doctor, "measure_rates", measure)
        doctor.report_rates()
        return capsys.readouterr().out

    monkeypatch.setattr(card_rates, "CACHE", tmp_path)
    return report


def test_rates_of_a_gpu_are_printed_and_stored(reported: Callable[..., str]) -> None:
    output = reported(RATES)
    rows = rows_of(output)
    assert rows["bf16 GEMMs"] == [["693 TFLOP/s", "70.0 % of bf16"]]
    assert rows["delayed GEMMs"] == [["1,286 TFLOP/s", "65.0 % of fp8"]]
    assert rows["memory"] == [["2,900 GB/s", "86.6 % of bandwidth"]]
    assert rows["kernel launches"] == [["250,000 a second", "–"]]
    assert rows["all_reduce 100000000 bytes"] == [["355 GB/s", "–"]]
    assert "Link between the GPUs: " in output
    assert str(card_rates.rates_file(RATES.device)) in output
    assert read_rates(RATES.device) == RATES


def test_rates_of_an_unknown_card_have_no_shares(reported: Callable[..., str]) -> None:
    rows = rows_of(reported(CardRates(**vars(RATES) | {"device": "NVIDIA X1"})))
    assert {row[1] for (row,) in rows.values() if row[0] != "rate"} == {"–"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InputError("the disk is full"), "the disk is full"),
        (
            ProcessRaisedException("\n\n-- Process 0\nTraceback\ntorch.E: no memory\n", 0, 7),
            "torch.E: no memory",
        ),
    ],
)
def test_rates_that_cannot_be_measured_are_not_stored(
    error: Exception, message: str, reported: Callable[..., str]
) -> None:
    assert reported(error) == f"No card rates are stored: {message}\n"
    assert read_rates(RATES.device) is None


def test_rates_are_printed_even_if_they_cannot_be_stored(
    reported: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "card_rates").touch()
    output = reported(RATES)
    assert "693 TFLOP/s" in output
    assert f"No card rates are stored: {tmp_path}" in output
