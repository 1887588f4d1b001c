"""`doctor --full`: everything that can be proven on this machine, in one file that can be sent or committed (docs/b200.md).

The file is Markdown with its figures as JSON at the end. It is written anew after every finding, so whatever fails, or is killed,
leaves what was found before it. Each finding is `passed`, `failed: why` or `not here: what the device lacks`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foundation.errors import InputError
from foundation.files import replace_file
from packing.arrow import Pack, PackWriter
from pretrain.compare.report import markdown
from pretrain.metrics.run_record import read_metrics
from pretrain.precision.registry import PRECISIONS
from pretrain.run.trial import (
    FAILED,
    NOT_HERE,
    PASSED,
    QWEN3_1_7B,
    ROOT,
    SMALL,
    Finding,
    Patient,
    collect,
    describe,
    in_a_line,
    plain,
    tried,
)

SMALL_STEPS, SAVED_AT, TIMED_STEPS = 6, 3, 10
SMALL_LENGTH, LENGTH = 128, 4096
SMALL_TIMEOUT, TIMEOUT = 120, 150  # seconds of one start of the launcher
AT_ONCE = 4  # small trainings, which nothing is timed in
# A resumed step may differ in its last bits on a GPU, where attention adds to dq in the order in which blocks finish.
RESUMED_WITHIN = 2e-3

# (arguments of the launcher, seconds) -> its exit status, or None after that time, and the end of what it said.
Launch = Callable[[Sequence[str], float], tuple[int | None, str]]


@dataclass
class Examination:
    """What was found so far; `add` writes it to `out`."""

    out: Path
    head: dict[str, Any]  # machine, versions, commit, command
    lines: list[str]  # the machine and the layer, for people
    findings: dict[str, list[Finding]] = field(default_factory=dict)  # by precision
    finished: bool = False
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def add(self, precision: str, finding: Finding) -> None:
        with self._writing:
            self.findings.setdefault(precision, []).append(plain(finding))
            print(f"{precision}: {finding['part']}: {finding['status']}: {finding['said']}", flush=True)
            self._write()

    def finish(self) -> None:
        with self._writing:
            self.finished = True
            self._write()

    @property
    def counts(self) -> Counter[str]:
        return Counter(finding["status"] for found in self.findings.values() for finding in found)

    def render(self) -> str:
        """The file's text."""
        counts = ", ".join(f"{self.counts[status]} {status}" for status in (PASSED, FAILED, NOT_HERE))
        state = "Finished" if self.finished else "**Not finished: still going on, or ended before its time**"
        text = ["# Doctor's findings", "", *(f"* {line}" for line in self.lines), "", f"{state}: {counts}.", ""]
        for precision, found in self.findings.items():
            table = [[each["part"], each["status"], " ".join(each["said"].split()).replace("|", "/")] for each in found]
            text += [f"## {precision}", "", markdown(("part", "verdict", "found"), table, names=3), ""]
        figures = self.head | {"finished": self.finished, "findings": self.findings}
        return "\n".join([*text, "## Figures", "", "```json", json.dumps(figures, indent=1), "```", ""])

    def _write(self) -> None:
        try:
            replace_file(self.out, self.render().encode())
        except OSError as error:
            raise InputError(f"{self.out}: cannot be written: {error.strerror}; name another place with --out") from None


def examine_fully(
    patient: Patient,
    precisions: Sequence[str],
    machine: Finding,
    arguments: Sequence[str],
    out: Path,
    launch: Launch | None = None,
) -> int:
    """Examine `precisions` and write `out`; returns 1 where something failed, else 0. `arguments`: for processes of the doctor.
    `launch`: in place of starting the launcher with `accelerate launch`."""
    gpu = patient.device.type == "cuda"
    command = shlex.join(["python", "-m", "pretrain", *sys.argv[1:]])
    head = {"command": command, "date": time.strftime("%Y-%m-%d %H:%M"), **machine}
    commit = (machine["environment"]["git"] or {}).get("commit", "unknown")
    lines = [*describe(patient, machine), f"commit {commit}, {head['date']}", f"`{command}`"]
    if not out.resolve().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    examination = Examination(out, head, lines)
    launch = launch or partial(by_accelerate, gpu=gpu)

    works = []
    for name in precisions:
        lacks = machine["missing"].get(name)
        if gpu and lacks:
            examination.add(name, {"part": "all", "status": NOT_HERE, "said": lacks})
            continue
        backend = "torch" if not PRECISIONS[name].quantized else "emulation" if lacks else "transformer_engine"
        if lacks:
            examination.add(name, {"part": "hardware", "status": NOT_HERE, "said": lacks})
        collect(patient, name, backend, arguments, full=True, found=partial(examination.add, name))
        works.append(name)
    with tempfile.TemporaryDirectory(prefix="doctor-") as kept:
        folder = Path(kept)
        write_packs(folder / "small", SMALL_LENGTH, SMALL["vocab_size"], packs=8 * SMALL_STEPS)
        trained = partial(train_small, folder=folder, launch=launch, found=examination.add)
        if gpu:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(trained, works))
        else:
            list(map(trained, works))
        timed = [name for name in works if PRECISIONS[name].compute_dtype == "bfloat16"]
        if gpu:
            write_packs(folder / "packs", LENGTH, QWEN3_1_7B["vocab_size"], packs=16 * TIMED_STEPS)
        for name in timed:
            if gpu:
                examination.add(name, tried("ten steps", partial(ten_steps, name, folder, launch)))
            else:
                examination.add(name, {"part": "ten steps", "status": NOT_HERE, "said": "Qwen3-1.7B's shape needs a GPU"})
    examination.finish()
    print(f"{out}: {dict(examination.counts)}")
    return int(examination.counts[FAILED] > 0)


# ── Trainings ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_packs(folder: Path, length: int, vocabulary: int, packs: int) -> None:
    """Random tokens, in documents of all lengths; and a few held-out packs."""
    draw = np.random.default_rng(0)
    with PackWriter(folder, length) as writer:
        for split, count in (("train", packs), ("held_out", 2)):
            for _ in range(count):
                cuts = np.sort(draw.choice(np.arange(1, length), 3, replace=False))
                lengths = np.diff([0, *cuts, length]).astype(np.int32)
                writer.add(split, Pack(draw.integers(vocabulary, size=length).astype(np.uint32), lengths))
        writer.finish(settings={}, statistics={}, tokenizer=None)


def recipe_of(name: str, config: dict[str, Any], packs: Path, length: int, **others: Any) -> dict[str, Any]:
    """A recipe in precision `name`, from scratch."""
    return {
        "name": f"doctor-{name}",
        "precision": name,
        "weights": "bf16_exact" if PRECISIONS[name].compute_dtype == "bfloat16" else "fp32",
        "fp8_config": {"on_unsupported": "emulate"} if PRECISIONS[name].quantized else {},
        "model": {"config": config},
        "data": {"packs": str(packs), "length": length},
        "run_dir": str(packs.parent / name),
        **others,
    }


def train_small(name: str, folder: Path, launch: Launch, found: Callable[[str, Finding], None]) -> None:
    """A small model: step 0 beside plain transformers, the audit of its first step, and again from its first checkpoint."""
    settings = {
        "parity": True,
        "batch": {"tokens": 8 * SMALL_LENGTH, "microbatch": 2},
        "train": {"steps": SMALL_STEPS},
        "checkpoint": {"every": SAVED_AT},
    }
    recipe = recipe_of(name, SMALL, folder / "small", SMALL_LENGTH, **settings)
    path, run_dir, again = folder / f"{name}.yaml", folder / name, folder / f"{name}-again"
    path.write_text(yaml.safe_dump(recipe))
    if failure := _started(launch, [str(path)], SMALL_TIMEOUT):
        for part in ("parity at step 0", "audit", "resuming"):
            found(name, {"part": part, "status": FAILED, "said": failure})
        return
    try:
        audit = json.loads((run_dir / "audit.json").read_text())
    except (OSError, ValueError) as error:
        found(name, {"part": "audit", "status": FAILED, "said": in_a_line(error)})
        return
    found(name, tried("parity at step 0", lambda: parity_finding(audit["parity"])))
    found(name, tried("audit", lambda: audit_finding(audit, quantized=PRECISIONS[name].quantized)))
    shutil.copytree(run_dir, again)
    for checkpoint in (again / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > SAVED_AT:
            shutil.rmtree(checkpoint)
    shutil.rmtree(again / "final", ignore_errors=True)
    failure = _started(launch, [str(path), f"run_dir={again}"], SMALL_TIMEOUT)
    if failure:
        found(name, {"part": "resuming", "status": FAILED, "said": failure})
    else:
        found(name, tried("resuming", lambda: resume_finding(run_dir, again)))


def _started(launch: Launch, arguments: Sequence[str], timeout: float) -> str | None:
    """How the launcher failed; None: it came to its end."""
    status, said = launch(arguments, timeout)
    if status == 0:
        return None
    return f"took longer than {timeout:.0f} s" if status is None else f"status {status}: {said}"


def parity_finding(parity: dict[str, Any]) -> Finding:
    """From what the audit says of it."""
    failures = parity["failures"]
    parts = {"": parity} | {f"{key} ": part for key, part in parity.items() if isinstance(part, dict)}
    figures = [
        f"{name}{key.replace('_', ' ')} {part[key]:.4f}"
        for name, part in parts.items()
        for key in ("loss", "plain_loss", "least_cosine")
        if isinstance(part.get(key), float)
    ]
    said = "; ".join([*map(str, failures), *figures])
    return {"part": "parity at step 0", "status": FAILED if failures else PASSED, "said": said, "parity": parity}


def audit_finding(audit: dict[str, Any], *, quantized: bool) -> Finding:
    """Whether every module computed as asked, and the first step confirmed it."""
    wrong = [entry["name"] for entry in audit["products"] if entry["effective"] != entry["requested"]]
    confirmed = "" if audit.get("confirmed_in_step") == 1 or not quantized else "; not confirmed in step 1"
    said = f"{len(audit['products']) - len(wrong)} of {len(audit['products'])} modules as asked, by {audit['computed_by']}"
    said += f"; fused: {audit['fused']}; attention {audit['attention']['kind']}" + (
        "" if confirmed else "; not confirmed in step 1"
    )
    kept = {key: audit[key] for key in ("backend", "computed_by", "attention", "fused", "loss")}
    return {"part": "audit", "status": FAILED if confirmed or wrong else PASSED, "said": said, "audit": kept}


def resume_finding(run_dir: Path, again: Path) -> Finding:
    """The steps after the checkpoint, of the run that went on and of the one that was resumed."""
    curves = []
    for folder in (run_dir, again):
        records = [record for record in read_metrics(folder) if "loss" in record and record["step"] > SAVED_AT]
        curves.append({record["step"]: (record["loss"], record["gradient_norm"]) for record in records})
    finding = {"part": "resuming", "steps": {str(step): [*curves[0][step], *curves[1].get(step, ())] for step in curves[0]}}
    steps = f"steps {SAVED_AT + 1} to {SMALL_STEPS}"
    if curves[0].keys() != curves[1].keys() or len(curves[0]) != SMALL_STEPS - SAVED_AT:
        return finding | {"status": FAILED, "said": f"{steps}: the runs did steps {[*curves[0]]} and {[*curves[1]]}"}
    if curves[0] == curves[1]:
        return finding | {"status": PASSED, "said": f"{steps} repeat bit for bit"}
    off = max(abs(a - b) / abs(a) for step in curves[0] for a, b in zip(curves[0][step], curves[1][step], strict=True))
    said = f"{steps} differ by {off:.1e} at most, in loss or gradient norm; {RESUMED_WITHIN:g} is allowed"
    return finding | {"status": PASSED if off <= RESUMED_WITHIN else FAILED, "said": said}


def ten_steps(name: str, folder: Path, launch: Launch) -> Finding:
    """Speed and memory of training Qwen3-1.7B's shape."""
    settings = {
        "parity": False,  # the small model's business
        "batch": {"tokens": 16 * LENGTH, "microbatch": 4},
        "optimizer": {"learning_rate": 2e-5},
        "train": {"steps": TIMED_STEPS},
        "checkpoint": {"every": None, "at_end": False},
        "evaluate": {"packs": 1},
        "run_dir": str(folder / f"{name}-timed"),
    }
    recipe = recipe_of(name, QWEN3_1_7B, folder / "packs", LENGTH) | settings
    path = folder / f"{name}-timed.yaml"
    path.write_text(yaml.safe_dump(recipe))
    finding: Finding = {"part": "ten steps"}
    if failure := _started(launch, [str(path)], TIMEOUT):
        return finding | {"status": FAILED, "said": failure}
    summary = json.loads((Path(recipe["run_dir"]) / "summary.json").read_text())
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['memory_gib']:.1f} GiB at most"
    first = f"first step {summary['first_step_seconds']:.1f} s, {summary['recompiles']} recompiles, loss {summary['loss']:.3f}"
    kept = ("tokens_per_second", "step_ms", "memory_gib", "first_step_seconds", "recompiles", "loss", "mfu_bf16_peak")
    return finding | {"status": PASSED, "said": f"{speed}, {first}"} | {key: summary[key] for key in kept if key in summary}


def by_accelerate(arguments: Sequence[str], timeout: float, *, gpu: bool) -> tuple[int | None, str]:
    """A `Launch` as a user starts it."""
    configuration = ROOT / "accelerate_configs" / ("bf16.yaml" if gpu else "cpu.yaml")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--quiet",
        "--config_file",
        str(configuration),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, str(ROOT / "train_accelerate.py"), *arguments],
            **{"cwd": ROOT, "env": environment, "stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True},
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:  # its training process would outlive it, and keep the device
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        lines = [line.strip() for line in said if line.strip()]
    own = [line for line in lines if line.startswith(("error: ", "halted: "))]
    errors = [line for line in lines if "Error" in line]
    return status, next(iter([*own[-1:], *errors[-1:], *lines[-1:]]), "it said nothing")[:400]
