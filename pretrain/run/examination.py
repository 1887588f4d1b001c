"""`doctor --full`: everything that can be proven on this machine, in one file that can be sent or committed (docs/b200.md).

The file is Markdown with its figures as JSON at the end. It is written anew after every finding, so whatever fails, or is killed,
leaves what was found before it. Each finding is `passed`, `failed: why` or `not here: what the device lacks`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foundation.errors import InputError
from foundation.files import MARKDOWN_MARK, save_file
from foundation.tables import markdown
from packing.arrow import Pack, PackWriter
from pretrain.metrics.run_record import read_metrics
from pretrain.precision.registry import PRECISIONS
from pretrain.run.processes import Finding, Process, WorkerPool
from pretrain.run.trial import (
    FAILED,
    NOT_HERE,
    PASSED,
    QWEN3_1_7B,
    SMALL,
    DoctorSetup,
    Machine,
    check,
    describe,
    in_a_line,
    measure,
    plain,
    tried,
)

SMALL_STEPS, SAVED_AT, TIMED_STEPS = 6, 3, 10
SMALL_LENGTH, LENGTH, PACKS = 128, 4096, 4  # the timed training's step is of so many packs, one microbatch
SMALL_TIMEOUT, TIMEOUT = 120, 150  # seconds of one start of the launcher
# A resumed step may differ in its last bits on a GPU, where attention adds to dq in the order in which blocks finish.
RESUMED_WITHIN = 2e-3

# Starts the launcher with arguments. What it returns lets it train, for some seconds at most: how it failed, None if it did not.
Start = Callable[[Sequence[str]], Callable[[float], str | None]]


@dataclass
class DoctorReport:
    """What was found so far; `add` writes it to `out`."""

    out: Path
    head: dict[str, Any]  # the machine, when, and by which command
    lines: list[str]  # the machine and the layer, for people
    began: float = field(default_factory=time.monotonic)
    findings: dict[str, list[Finding]] = field(default_factory=dict)  # by precision
    finished: bool = False
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, setup: DoctorSetup, known: Machine, out: Path, began: float) -> DoctorReport:
        """Begins the report on a machine that is `known`, with no findings yet. InputError where `out` has no folder."""
        if not out.resolve().parent.is_dir():
            raise InputError(f"--out {out}: there is no folder {out.parent}")
        command = shlex.join(["python", "-m", "pretrain", *sys.argv[1:]])
        head = {"command": command, "date": time.strftime("%Y-%m-%d %H:%M"), **known}
        commit = (known["environment"]["git"] or {}).get("commit", "unknown")
        return cls(out, head, [*describe(setup, known), f"commit {commit}, {head['date']}", f"`{command}`"], began)

    def lacks(self, precision: str) -> str | None:
        """Returns what the device lacks for the precision; None where it lacks nothing."""
        return self.head["missing"].get(precision)

    def add(self, precision: str, finding: Finding) -> None:
        """`finding` of `precision`, with the seconds since the one before it, waiting for its turn among them."""
        with self._writing:
            found, now = self.findings.setdefault(precision, []), self.seconds
            before = sum(each["seconds"] for each in found)
            found.append(plain(finding | {"seconds": round(max(now - before, 0.0), 1)}))
            print(f"{now:4.0f} s  {precision}: {finding['part']}: {finding['status']}: {finding['said']}", flush=True)
            self._write()

    def finish(self) -> None:
        with self._writing:
            self.finished = True
            self._write()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def counts(self) -> Counter[str]:
        return Counter(finding["status"] for found in self.findings.values() for finding in found)

    def render(self) -> str:
        """The file's text."""
        counts = ", ".join(f"{self.counts[status]} {status}" for status in (PASSED, FAILED, NOT_HERE))
        state = "Finished" if self.finished else "**Not finished: still going on, or ended before its time**"
        text = [
            "# Doctor's findings",
            MARKDOWN_MARK,
            "",
            *(f"* {line}" for line in self.lines),
            "",
            f"{state}: {counts}; {self.seconds:.0f} s.",
            "",
        ]
        for precision, found in self.findings.items():
            table = [[each["part"], each["status"], " ".join(each["said"].split())] for each in found]
            text += [f"## {precision}", "", markdown(("part", "verdict", "found"), table, names=3), ""]
        figures = self.head | {"seconds": round(self.seconds, 1), "finished": self.finished, "findings": self.findings}
        return "\n".join([*text, "## Figures", "", "```json", json.dumps(figures, indent=1), "```", ""])

    def _write(self) -> None:
        save_file(self.out, self.render().encode(), "name another place with --out", asked_for=True)


def examine_fully(
    report: DoctorReport,
    setup: DoctorSetup,
    pool: WorkerPool,
    processes: Mapping[str, Process | None],
    start: Start | None = None,
) -> int:
    """Examine each precision of `processes`, in the process that waits for that, or with None in this one; returns 1 where
    something failed, else 0. `start`: in place of the launcher in a process of its own."""
    start = start or partial(in_process, pool)

    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as kept:
        folder = Path(kept)
        write_packs(folder / "small", SMALL_LENGTH, SMALL["vocab_size"], packs=8 * SMALL_STEPS)
        if pool.gpu:
            write_packs(folder / "packs", LENGTH, QWEN3_1_7B["vocab_size"], packs=PACKS * TIMED_STEPS)

        def look(name: str) -> None:
            found, process, lacks = partial(report.add, name), processes[name], report.lacks(name)
            if lacks:
                found({"part": "all" if pool.gpu else "hardware", "status": NOT_HERE, "said": lacks})
            if lacks and process:
                process.end()
                return
            backend = "torch" if not PRECISIONS[name].quantized else "emulation" if lacks else "transformer_engine"
            small = train_small(name, folder, start) if process else None  # imports meanwhile; on a CPU that would be in the way
            check(setup, name, backend, process, full=True, found=found)
            timed = PRECISIONS[name].compute_dtype == "bfloat16"
            ten = ten_steps(name, folder, start) if timed and pool.gpu else None  # imports while the small model trains
            for finding in small or train_small(name, folder, start):
                found(finding)
            measure(pool, process, found)
            if ten:
                with pool.alone():
                    found(tried("ten steps", ten))
            elif timed:
                found({"part": "ten steps", "status": NOT_HERE, "said": "Qwen3-1.7B's shape needs a GPU"})

        pool.each(look, processes)
    report.finish()
    print(f"{report.out}: {dict(report.counts)} in {report.seconds:.0f} s")
    return int(report.counts[FAILED] > 0)


def in_process(pool: WorkerPool, arguments: Sequence[str]) -> Callable[[float], str | None]:
    """Starts the launcher in a process of its own; a `Start`."""
    process = pool.start()
    return lambda seconds: process.tell(["--train", *arguments], seconds)


# ── Trainings ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_packs(folder: Path, length: int, vocabulary: int, packs: int) -> None:
    """Random tokens, in documents of all lengths."""
    draw = np.random.default_rng(0)
    with PackWriter(folder, length) as writer:
        for _ in range(packs):
            cuts = np.sort(draw.choice(np.arange(1, length), 3, replace=False))
            lengths = np.diff([0, *cuts, length]).astype(np.int32)
            writer.add("train", Pack(draw.integers(vocabulary, size=length).astype(np.uint32), lengths))
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


def train_small(name: str, folder: Path, start: Start) -> Iterator[Finding]:
    """A small model: step 0 beside plain transformers, the audit of its first step, and again from its first checkpoint. Both
    trainings are started at once, the second one waits; what is returned trains."""
    settings = {
        "parity": "on",
        "batch": {"tokens": 8 * SMALL_LENGTH, "microbatch": 2},
        "train": {"steps": SMALL_STEPS},
        "checkpoint": {"every": SAVED_AT},
    }
    recipe = recipe_of(name, SMALL, folder / "small", SMALL_LENGTH, **settings)
    path, run_dir, again = folder / f"{name}.yaml", folder / name, folder / f"{name}-again"
    path.write_text(yaml.safe_dump(recipe))
    return _small_findings(name, run_dir, again, start([str(path)]), start([str(path), f"run_dir={again}"]))


def _small_findings(
    name: str, run_dir: Path, again: Path, train: Callable[[float], str | None], resume: Callable[[float], str | None]
) -> Iterator[Finding]:
    if failure := train(SMALL_TIMEOUT):
        for part in ("parity at step 0", "audit", "resuming"):
            yield {"part": part, "status": FAILED, "said": failure}
        return
    try:
        audit = json.loads((run_dir / "audit.json").read_text())
    except (OSError, ValueError) as error:
        yield {"part": "audit", "status": FAILED, "said": in_a_line(error)}
        return
    yield tried("parity at step 0", lambda: parity_finding(audit["parity"]))
    yield tried("audit", lambda: audit_finding(audit, quantized=PRECISIONS[name].quantized))

    def resumed() -> Finding:
        shutil.copytree(run_dir, again)
        for checkpoint in (again / "checkpoints").glob("step-*"):
            if int(checkpoint.name.removeprefix("step-")) > SAVED_AT:
                shutil.rmtree(checkpoint)
        shutil.rmtree(again / "final", ignore_errors=True)
        if failure := resume(SMALL_TIMEOUT):
            return {"part": "resuming", "status": FAILED, "said": failure}
        return resume_finding(run_dir, again)

    yield tried("resuming", resumed)


def parity_finding(parity: dict[str, Any]) -> Finding:
    """Returns the finding about parity, from what the audit says of it."""
    failures = parity["failures"]
    figures = [
        f"{name} {key.replace('_', ' ')} {parity[name][key]:.4f}"
        for name in ("plain", "quantized")
        if name in parity
        for key in ("loss", "reference_loss", "least_cosine")
        if parity[name][key] is not None
    ]
    said = "; ".join([*map(str, failures), *figures])
    return {"part": "parity at step 0", "status": FAILED if failures else PASSED, "said": said, "parity": parity}


def audit_finding(audit: dict[str, Any], *, quantized: bool) -> Finding:
    """Whether every module computed as asked, and the first step confirmed it."""
    wrong = [entry["name"] for entry in audit["products"] if entry["effective"] != entry["requested"]]
    unconfirmed = "" if audit.get("confirmed_in_step") == 1 or not quantized else "; not confirmed in step 1"
    said = f"{len(audit['products']) - len(wrong)} of {len(audit['products'])} modules as asked, by {audit['computed_by']}"
    said += f"; fused: {audit['fused']}; attention {audit['attention']['kind']}{unconfirmed}"
    kept = {key: audit[key] for key in ("backend", "computed_by", "attention", "fused", "loss")}
    return {"part": "audit", "status": FAILED if unconfirmed or wrong else PASSED, "said": said, "audit": kept}


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


def ten_steps(name: str, folder: Path, start: Start) -> Callable[[], Finding]:
    """Speed and memory of training Qwen3-1.7B's shape: it is started, and what is returned trains."""
    settings = {
        "parity": "off",  # the small model's business
        "batch": {"tokens": PACKS * LENGTH, "microbatch": PACKS},
        "optimizer": {"learning_rate": 2e-5},
        "train": {"steps": TIMED_STEPS},
        "checkpoint": {"every": None, "at_end": False},
        "run_dir": str(folder / f"{name}-timed"),
    }
    recipe = recipe_of(name, QWEN3_1_7B, folder / "packs", LENGTH) | settings
    path = folder / f"{name}-timed.yaml"
    path.write_text(yaml.safe_dump(recipe))
    train = start([str(path)])

    def finding() -> Finding:
        if failure := train(TIMEOUT):
            return {"part": "ten steps", "status": FAILED, "said": failure}
        summary = json.loads((Path(recipe["run_dir"]) / "summary.json").read_text())
        speed = f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['memory_gib']:.1f} GiB at most"
        first = (
            f"first step {summary['first_step_seconds']:.1f} s, {summary['recompiles']} recompiles, loss {summary['loss']:.3f}"
        )
        kept = ("tokens_per_second", "step_ms", "memory_gib", "first_step_seconds", "recompiles", "loss", "mfu_bf16_peak")
        figures = {key: summary[key] for key in kept if key in summary}
        return {"part": "ten steps", "status": PASSED, "said": f"{speed}, {first}"} | figures

    return finding
