"""`python -m pretrain doctor` on a machine without a GPU: its table, its file, and what fails while it looks."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator

from foundation.errors import InputError
from pretrain import __main__ as commands
from pretrain.precision.emulation import EmulatedProduct
from pretrain.run import doctor, trial
from pretrain.run.doctor import parse
from pretrain.run.examination import DoctorReport, audit_finding, examine_fully, parity_finding, resume_finding
from pretrain.run.processes import Finding, Process, WorkerPool
from pretrain.run.trial import FAILED, NOT_HERE, PASSED, DoctorSetup, describe, machine, measure
from pretrain.verify.kernels import Verdict
from tests.pretrain.verify.small_runs import build_run

SOME = ["--cpu", "--tokens", "128"]


def row_of(table: str, precision: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {precision} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_precision_asked_for_has_a_row_with_its_speed_and_what_the_device_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", *SOME, "--precisions", "bf16,nvfp4"]) == 0
    table = capsys.readouterr().out
    bf16, nvfp4 = row_of(table, "bf16"), row_of(table, "nvfp4")
    assert bf16[1] == f"torch {torch.__version__}" and nvfp4[1] == "emulation"
    assert bf16[-1] == "" and "compute capability 10.0 or higher" in nvfp4[-1] and "this run is on cpu" in nvfp4[-1]
    assert all(float(row[2]) > 0 and int(row[3].replace(",", "")) > 0 for row in (bf16, nvfp4))
    assert float(bf16[5].rstrip("%")) < 3 < float(nvfp4[5].rstrip("%"))


def test_a_slow_layer_s_milliseconds_have_three_digits_that_say_something() -> None:
    shown = []
    for ms in (2412.12, 47.53, 0.4123):
        timed = {"part": "speed of a layer", "status": PASSED, "said": "", "ms": ms, "tokens_per_second": 53.0}
        shown.append(doctor.Row("bf16", findings=(timed,)).cells()[2])
    assert shown == ["2412", "47.5", "0.412"]


def test_a_row_counts_the_kernels_that_agree_by_their_verdicts_and_not_by_their_words() -> None:
    verdicts = [Verdict("a", "its formula, which fails here", {"dq": error}, {"dq": 0.1}, 1.0) for error in (0.05, 0.2)]
    findings = [{"part": "a", "status": PASSED, "said": str(verdict), "agrees": verdict.agrees} for verdict in verdicts]
    assert doctor.Row("bf16", findings=tuple(findings)).cells()[4] == "1 of 2 kernels"


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert commands.main(["doctor", *SOME, "--precisions", "fp32,mxfp8"]) == 0
    row = capsys.readouterr().out.partition("\nfp32\n")[2]
    assert row.startswith("  computes on          torch ") and "\nmxfp8\n" in row and max(map(len, row.splitlines())) <= 60


def test_a_recipes_layers_are_those_that_are_tried(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small_recipe))
    assert commands.main(["doctor", *SOME, "--recipe", str(path), "--precisions", "fp32"]) == 0
    assert "hidden 32, feed-forward 64, 4 query and 2 KV heads of 8; 128 tokens in packs of 32" in capsys.readouterr().out


def test_a_model_that_a_precision_cannot_take_is_a_row_with_the_reason(
    small_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small_recipe))
    assert commands.main(["doctor", *SOME, "--recipe", str(path), "--precisions", "block"]) == 1
    assert "takes linears whose features are multiples of 128" in row_of(capsys.readouterr().out, "block")[-1]


def test_a_process_of_its_own_is_told_to_examine_the_same(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small_recipe))
    for asked in (SOME, ["--cpu", "--recipe", str(path)]):
        setup = DoctorSetup.of(parse(asked))
        assert DoctorSetup.of(parse(setup.arguments)) == setup


def test_a_process_that_tries_a_precision_has_no_word_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctor.md").write_text("# Of an older version\n")
    monkeypatch.chdir(tmp_path)
    assert parse(["--tokens", "256", "--try", "bf16", "torch", "--full"]).full


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precisions", "bf16,fp9"], "--precisions: no fp9 among fp32, bf16"),
        (["--tokens", "0"], "--tokens: 0: a whole number of 1 or more"),
    ],
)
def test_a_mistyped_option_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_says_that_it_is_available_and_fails_is_a_line_and_emulation_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in TransformerEngine#2956. The library that cannot even be imported here stands for a GEMM that fails."""
    monkeypatch.setattr(trial, "missing_on", lambda device: lambda precision: None)
    assert commands.main(["doctor", *SOME, "--precisions", "mxfp8"]) == 0
    row = row_of(capsys.readouterr().out, "mxfp8")
    assert row[1] == "emulation" and row[-1].startswith("transformer_engine fails: ")


def test_a_product_that_fails_takes_nothing_else_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **options: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

    monkeypatch.setattr(EmulatedProduct, "multiply", fails)
    assert commands.main(["doctor", *SOME, "--precisions", "current,fp32"]) == 1
    said = capsys.readouterr()
    assert row_of(said.out, "current")[1] == "nothing" and "CUBLAS_STATUS_NOT_SUPPORTED when calling" in said.out
    assert row_of(said.out, "fp32")[1].startswith("torch") and "Traceback" not in said.out + said.err


# ── Processes of its own ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def processes_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let this shell script run in the place of Python."""

    def run(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return run


FOUND = 'echo noise; echo \'DOCTOR {"part": "first"}\''


@pytest.mark.parametrize(
    ("then", "ended"),
    [
        ("exit 0", None),
        ("echo CUDA error: an illegal memory access >&2; exit 1", "ended with status 1: CUDA error: an illegal memory access"),
        ("echo error: fp9 >&2; echo more; exit 2", "ended with status 2: error: fp9"),
        ("printf 'DOCTOR {\"half'; kill -9 $$", 'ended with status -9: DOCTOR {"half'),
    ],
)
def test_what_a_process_found_before_it_ended_is_kept(then: str, ended: str | None, processes_run: Callable) -> None:
    processes_run(f"{FOUND}; {then}")
    found: list[Finding] = []
    assert Process(cpu=True).tell([], 60, found.append) == ended and found == [{"part": "first"}]


def test_a_process_that_hangs_is_ended(processes_run: Callable) -> None:
    processes_run(f"{FOUND}; exec sleep 600")
    assert Process(cpu=True).tell([], 0.3) == "took longer than 0 s"


MEASURES = """
read order
echo DOCTOR WAITS
read go
test -e "$0.alone" && echo "not alone" >&2 && exit 1
touch "$0.alone"
sleep 0.05
rm "$0.alone"
"""


@pytest.mark.parametrize(
    ("breaks", "ended"),
    [(":", None), ("exit 7", "ended with status 7: it said nothing"), ("exec sleep 600", "took longer than 0 s")],
)
def test_one_measures_at_a_time_and_the_dead_and_the_hanging_pass_the_turn_on(
    breaks: str, ended: str | None, processes_run: Callable
) -> None:
    processes_run(MEASURES.replace("read go", f"read go\ncase $order in *broken*) {breaks};; esac"))
    names, said, checked = ["broken", *"abcdefg"], {}, []
    with WorkerPool(gpu=True) as pool:

        def work(name: str) -> None:
            process = pool.start()
            assert process.tell([name], 60) is None and process.waits
            checked.append(name)
            with pool.alone():
                said[name] = process.tell([], 0.3 if name == "broken" and "sleep" in breaks else 60)

        pool.each(work, names)
    assert said == dict.fromkeys(names) | {"broken": ended} and sorted(checked) == sorted(names)


@pytest.mark.parametrize(("dies", "ended"), [("", None), ("exit 7", "ended with status 7: noise")])
def test_what_a_process_measures_is_found_and_so_is_its_death(dies: str, ended: str | None, processes_run: Callable) -> None:
    processes_run(f"read order; echo DOCTOR WAITS; read go; {FOUND}; {dies}")
    found: list[Finding] = []
    with WorkerPool(gpu=True) as pool:
        process = pool.start()
        trial.check(DoctorSetup.of(parse(SOME)), "fp32", "torch", process, full=False, found=found.append)
        assert found == [] and process.waits
        pool.each(lambda _: measure(pool, process, found.append), ["fp32"])
    assert found[0] == {"part": "first"} and [each["said"] for each in found[1:]] == ([ended] if ended else [])


def test_what_breaks_an_examination_off_ends_all_of_its_processes(processes_run: Callable) -> None:
    processes_run("exec sleep 600")
    with pytest.raises(InputError, match="no place"), WorkerPool(gpu=True) as pool:
        others = [pool.start(), pool.start()]

        def work(name: str) -> None:
            if name == "fails":
                raise InputError("no place")
            others[int(name)].tell([], 60, pytest.fail)

        pool.each(work, ["0", "1", "fails"])
    assert all(each._process.wait() == -9 for each in others)


def test_a_process_that_waits_trains_when_it_is_told_to(tmp_path: Path) -> None:
    """The whole way that a GPU takes too: imports, the order, the launcher, how it ended."""
    with WorkerPool(gpu=False) as pool:
        said = pool.start().tell(["--train", str(tmp_path / "none.yaml")], 120)
    assert said.startswith("ended with status 2: error: ") and "none.yaml" in said


# ── The whole examination ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, list[Finding]]]]:
    """Examine on this CPU: the status, the file, and its findings by precision."""

    def run(start: Callable[..., Any], *precisions: str) -> tuple[int, str, dict[str, list[Finding]]]:
        out = tmp_path / "doctor.md"
        with WorkerPool(gpu=False) as pool:
            setup = DoctorSetup.of(parse(SOME))
            report = DoctorReport.of(setup, machine("cpu"), out, time.monotonic())
            status = examine_fully(report, setup, pool, dict.fromkeys(precisions), start)
        text = out.read_text()
        return status, text, figures_of(text)["findings"]

    return run


def figures_of(text: str) -> dict[str, Any]:
    return json.loads(text.partition("```json\n")[2].partition("```")[0])


def verdicts(found: Sequence[Finding]) -> dict[str, str]:
    return {finding["part"]: finding["status"] for finding in found}


def test_on_a_cpu_it_does_what_can_be_done_in_small(examine: Callable, launcher_here: Callable) -> None:
    def start(arguments: Sequence[str]) -> Callable[[float], str | None]:
        def train(seconds: float) -> str | None:
            status, out, err = launcher_here(*arguments)
            return out + err if status else None

        return train

    status, text, found = examine(start, "bf16")
    assert status == 0, text
    parts = ("attention packed_documents", "against FP32", "speed of a layer", "parity at step 0", "audit", "resuming")
    expected = dict.fromkeys(parts, PASSED)
    assert verdicts(found["bf16"]) == expected | {"ten steps": NOT_HERE}
    assert "steps 4 to 6 repeat bit for bit" in text and "Finished: 6 passed, 0 failed, 1 not here; " in text
    figures = figures_of(text)
    assert 0 < sum(each["seconds"] for each in found["bf16"]) <= figures["seconds"] + 1
    assert (
        figures["finished"]
        and figures["environment"]["packages"]["torch"]
        and figures["command"]
        and "git" in figures["environment"]
    )


def test_whatever_fails_the_file_has_what_was_found_before_it(examine: Callable, tmp_path: Path) -> None:
    seen = []

    def start(arguments: Sequence[str]) -> Callable[[float], str | None]:
        def train(seconds: float) -> str | None:
            seen.append((tmp_path / "doctor.md").read_text())
            return f"took longer than {seconds:.0f} s" if "current" in arguments[0] else "status 3: halted: parity"

        return train

    status, text, found = examine(start, "fp32", "current")
    assert (
        status == 1
        and "**Not finished" in seen[0]
        and verdicts(figures_of(seen[0])["findings"]["fp32"])["against FP32"] == PASSED
    )
    assert {each["said"] for each in found["fp32"] if each["status"] == FAILED} == {"status 3: halted: parity"}
    assert {each["said"] for each in found["current"] if each["status"] == FAILED} == {"took longer than 120 s"}
    assert verdicts(found["current"])["hardware"] == NOT_HERE and "| resuming " in text


def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--out .*: there is no folder"):
        DoctorReport.of(DoctorSetup.of(parse(SOME)), machine("cpu"), tmp_path / "none" / "doctor.md", 0.0)
    with pytest.raises(InputError, match=r"--out doctor\.md: is the file of --full; add that, or leave it out"):
        parse(["--out", "doctor.md"])


def metrics(folder: Path, losses: dict[int, float]) -> Path:
    folder.mkdir()
    same = {"tokens": 256, "epoch": 0.1, "gradient_norm": 1.0, "step_ms": 10.0}
    lines = [json.dumps({"step": step, "loss": loss} | same) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("again", "status", "said"),
    [
        ({4: 2.0, 5: 1.5, 6: 1.0}, PASSED, "repeat bit for bit"),
        ({4: 2.0, 5: 1.5, 6: 1.001}, PASSED, "differ by 1.0e-03 at most"),
        ({4: 2.0, 5: 1.5, 6: 1.1}, FAILED, "differ by 1.0e-01 at most"),
        ({4: 2.0, 5: 1.5}, FAILED, "the runs did steps"),
    ],
)
def test_a_resumed_run_is_held_against_the_one_that_went_on(
    again: dict[int, float], status: str, said: str, tmp_path: Path
) -> None:
    alone = metrics(tmp_path / "alone", {3: 3.0, 4: 2.0, 5: 1.5, 6: 1.0})
    finding = resume_finding(alone, metrics(tmp_path / "again", again))
    assert finding["status"] == status and said in finding["said"]


def test_an_audit_passes_only_where_all_computed_as_asked_and_the_first_step_agreed() -> None:
    audit = dict.fromkeys(("backend", "computed_by", "fused", "loss"), "x") | {"attention": {"kind": "packed_sdpa"}}
    audit |= {"products": [{"name": "a", "requested": "current", "effective": "current"}], "confirmed_in_step": 1}
    judge = partial(audit_finding, quantized=True)
    assert judge(audit)["status"] == PASSED and "not confirmed" not in judge(audit)["said"]
    unconfirmed = judge({key: value for key, value in audit.items() if key != "confirmed_in_step"})
    assert unconfirmed["status"] == FAILED and unconfirmed["said"].endswith("; not confirmed in step 1")
    assert judge(audit | {"products": [{"name": "a", "requested": "current", "effective": "bf16"}]})["status"] == FAILED


def test_the_librarys_version_is_in_its_row(processes_run: Callable) -> None:
    processes_run("read order; echo DOCTOR WAITS; read go")
    found = machine("cpu") | {"missing": {}}
    found["environment"]["packages"]["transformer-engine"] = "2.20.2"
    rows = []
    with WorkerPool(gpu=True) as pool:
        pool.each(
            lambda name: rows.append(doctor.row_of(DoctorSetup.of(parse(SOME)), pool, name, pool.start(), found)), ["current"]
        )
    assert rows[0].on == "hardware (TE 2.20.2)" and "Transformer Engine 2.20.2" in describe(DoctorSetup.of(parse(SOME)), found)[0]


def test_parity_fails_where_the_audit_says_so_and_shows_both_sides(accelerator: Accelerator) -> None:
    record = json.loads(json.dumps(build_run(accelerator, "current", layers=1).parity().record()))
    found = parity_finding(record)
    plain, quantized = record["plain"], record["quantized"]
    assert found["status"] == PASSED and found["said"] == (
        f"plain loss {plain['loss']:.4f}; plain reference loss {plain['reference_loss']:.4f}; "
        f"plain least cosine {plain['least_cosine']:.4f}; quantized loss {quantized['loss']:.4f}; "
        f"quantized reference loss {plain['loss']:.4f}; quantized least cosine {quantized['least_cosine']:.4f}"
    )
    found = parity_finding(record | {"failures": ["the loss is off"]})
    assert found["status"] == FAILED and found["said"].startswith("the loss is off; plain loss ")


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # while it looks
        time.sleep(60)

    monkeypatch.setattr(doctor, "check", interrupted)
    assert commands.main(["doctor", *SOME, "--precisions", "bf16"]) == 130
    assert capsys.readouterr().err.splitlines() == ["", "stopped by Ctrl-C"]


def test_numbers_that_json_has_not_are_text_in_the_file(tmp_path: Path) -> None:
    report = DoctorReport(tmp_path / "doctor.md", {}, [])
    report.add("bf16", {"part": "a | b", "status": FAILED, "said": "one\ntwo | three", "errors": {"dq": float("nan")}})
    text = report.out.read_text()
    assert figures_of(text)["findings"]["bf16"][0]["errors"] == {"dq": "NaN"} and "one two \\| three" in text
