"""Make the card of a machine, or check one.

    python -m benchmarks.card --card b200.json      # measure this machine (15 minutes on a GPU)
    python -m benchmarks.card --card b200.json --gpus 4       # one precision on each of four GPUs
    python -m benchmarks.card --check b200.json     # repeat the 50 steps and compare the losses

The GPUs of a host differ in speed. To compare precisions with each other, use one GPU.

A card is a JSON file with the results of every precision that the machine has. It is a result file
of `benchmarks.speed ways` with more keys, so that `benchmarks.speed report` shows it too:

    ways         speed of a training, and its share of the machine's `limits`
    losses       50 steps of a deterministic training, with its audit and its parity
    bits         operands of the hardware, compared with our quantizers (`benchmarks.operand_bits`)
    left_out     precisions that the hardware does not have, with the reason
    code         SHA-256 of the product's code
    sha256       SHA-256 of all other keys

Precisions are named as in `which`: `delayed+head` also quantizes the LM head.

On a CPU, a tiny model is trained, every low precision is emulated, and `bits` is empty. The check
trains the 50 steps again. On the same device, with the same versions and code, each loss must be
equal bit for bit. Otherwise each loss must be within TOLERANCE.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.machine import ROOT, command, environment_from_elsewhere, processor
from benchmarks.speed.bench import Bench, Settings
from benchmarks.speed.libraries.entries import CPU, GPU, Entry, ours
from foundation.command import CommandParser, run_command
from foundation.errors import InputError
from foundation.files import hash_file, hash_of, write_json
from foundation.reading import load_object
from foundation.units import markdown, or_dash, percent
from lab.experiments.which_trainings import HEAD
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.selection import support_check_on
from pretrain.precision.settings import PRECISIONS
from pretrain.settings.commands import count

# Allowed difference in nats between a step's loss and the loss in the card, if the device, the
# versions or the code differ. The losses of an H100 and an H200 are at most 0.011 apart in the 9
# steps of h100_throughput.json and h200_throughput.json. Audit and parity find smaller faults.
TOLERANCE = 0.05
# The speed is the median of TIMED steps after WARM_UP steps. The losses of STEPS steps are
# compared.
WARM_UP = 3
TIMED = 6
STEPS = 50
# Largest number of seconds of one training.
TIMEOUT = 300
# Least memory, in bytes, of a GPU on which microbatches of 8 packs fit.
LARGE = 120 * 2**30
# Note in the card of a CPU, which `benchmarks.speed report` prints.
CPU_NOTE = (
    "This is the card of a CPU: the model is tiny, and every low precision is emulated, so the "
    "speeds say nothing about a GPU."
)
HEADER = (
    "precision",
    "computes on",
    "tokens/s",
    "of the limit",
    "audit",
    "parity",
    "bits",
    "loss of step 1",
    f"of step {STEPS}",
)
Result = Mapping[str, Any]


def main() -> int:
    """Run the command. Return 1 if a precision failed or does not agree with the card, else 0."""
    parser = CommandParser("python -m benchmarks.card", __doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--card", type=Path, metavar="FILE", help="make a card")
    task.add_argument("--check", type=Path, metavar="FILE", help="check a card")
    parser.add_argument(
        "--precisions", type=lambda text: text.split(","), metavar="A,B", help="default: all"
    )
    parser.add_argument(
        "--gpus", type=count, default=1, metavar="N", help="number of GPUs to use; default: 1"
    )
    arguments = parser.read(sys.argv[1:])
    unknown = [
        name for name in arguments.precisions or () if name.removesuffix(HEAD) not in PRECISIONS
    ]
    if unknown:
        raise InputError(
            f"--precisions: {', '.join(unknown)}: unknown; choose from {', '.join(PRECISIONS)}"
        )
    if arguments.card:
        return make(arguments.card, arguments.precisions, arguments.gpus)
    return check(arguments.check, arguments.precisions, arguments.gpus)


# ── Machine and trainings ─────────────────────────────────────────────────────────────────────────


def describe_device() -> tuple[dict[str, str], int]:
    """Return a reason for each precision that the hardware lacks, and the GPU's memory in bytes.

    On a CPU, the memory is 0. On a GPU, call this function in a child process, because the function
    allocates GPU memory.
    """
    gpu = torch.cuda.is_available()
    unsupported_because = support_check_on("cuda" if gpu else "cpu")
    reasons = {
        name: unsupported_because(precision)
        for name, precision in PRECISIONS.items()
        if isinstance(precision, QuantizedPrecision)
    }
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else 0
    return {name: reason for name, reason in reasons.items() if reason}, memory


def describe_device_elsewhere() -> tuple[dict[str, str], int]:
    """Return `describe_device` from a child process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(describe_device).result()


def use_cpu() -> None:
    """Hide GPUs from all trainings, and use one thread, so that sums have a fixed order."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def settings_of_losses(gpu: bool) -> Settings:
    """Return the settings of the training whose losses are compared."""
    kind = "gpu" if gpu else "cpu"
    recipe = Path(f"benchmarks/card_{kind}.yaml")
    return Settings(
        f"card_{kind}", recipe, GPU if gpu else CPU, WARM_UP, STEPS - WARM_UP, timeout=TIMEOUT
    )


def settings_of_speed(gpu: bool, memory: int) -> Settings:
    """Return the settings of the timed trainings."""
    if not gpu:
        recipe = Path("benchmarks/card_cpu.yaml")
    elif memory >= LARGE:
        recipe = Path("benchmarks/qwen3_1_7b.yaml")
    else:
        recipe = Path("benchmarks/qwen3_1_7b_80gb.yaml")
    return Settings(recipe.stem, recipe, GPU if gpu else CPU, WARM_UP, TIMED, timeout=TIMEOUT)


def entry_of(name: str, missing: Mapping[str, str]) -> Entry:
    """Return the training in the precision `name`, with exact BF16 weights except in FP32.

    missing: the precisions that the hardware lacks. They are emulated.
    """
    precision = name.removesuffix(HEAD)
    options = [f"precision={precision}", f"weights={'fp32' if name == 'fp32' else 'bf16_exact'}"]
    if name.endswith(HEAD):
        options.append("fp8_config.scope=linear+head")
    if precision in missing:
        options.append("fp8_config.on_unsupported=emulate")
    (entry,) = ours({name: " ".join(options)})
    return entry


def train(
    settings: Settings, entries: Sequence[Entry], gpus: int, file: Path, *, brief: bool
) -> dict[str, Any]:
    """Train the entries, at most one on each of `gpus` GPUs at the same time. Return the result.

    Trainings that `file` already has are not repeated. Each training is written to `file` when it
    ends. `brief` skips limits, see `Bench`.
    """
    bench = Bench(settings, file, command(), go_on=True, brief=brief)
    # Measure the limits, and write the packs, before GPUs are busy.
    bench.run([])
    write_json(file, bench.result)
    missing = [entry for entry in entries if entry.name not in bench.result["ways"]]
    lock = Lock()

    def train_on(gpu: str, own: Sequence[Entry]) -> None:
        out = file.with_name(f"{file.stem}_gpu_{gpu}.json")
        shutil.copy(file, out)
        on_gpu = Bench(settings, out, command(), go_on=True, brief=brief, gpu=gpu)
        for entry in own:
            on_gpu.run([entry])
            with lock:
                bench.result["ways"][entry.name] = on_gpu.result["ways"][entry.name]
                write_json(file, bench.result)

    on_all_gpus(train_on, missing, gpus)
    return bench.result


def on_all_gpus(function: Callable, items: Sequence[Any], gpus: int) -> list[Any]:
    """Return the results of `function` for each of `gpus` GPUs and its part of the items.

    The first argument of `function` is the GPU for CUDA_VISIBLE_DEVICES. The functions run in
    threads.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else [*map(str, range(gpus))]
    parts = {name: items[index::gpus] for index, name in enumerate(names[:gpus])}
    with ThreadPoolExecutor(gpus) as pool:
        return [*pool.map(function, parts.keys(), parts.values())]


# ── Making a card ─────────────────────────────────────────────────────────────────────────────────


def make(out: Path, names: Iterable[str] | None, gpus: int = 1) -> int:
    """Measure the precisions `names` of this machine, and write the card to `out`.

    names: None for all precisions except FP32, and the first quantized one with its head.
    gpus: the number of GPUs that are used at the same time.

    If the command is interrupted, it continues with the parts in the folder OUT_parts.

    Returns 1 if a precision failed, else 0. Raises InputError if the hardware has none of `names`,
    or if `out` cannot be written.
    """
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise InputError(f"{out}: cannot be written; name a file in a writable folder")
    parts = out.with_name(f"{out.stem}_parts")
    parts.mkdir(exist_ok=True)
    gpu = torch.cuda.is_available()
    missing, memory = describe_device_elsewhere() if gpu else describe_device()
    if not gpu:
        use_cpu()
    names = [*dict.fromkeys(names or default_names())]
    reasons = {name: missing.get(name.removesuffix(HEAD)) for name in names}
    left_out = {name: reason for name, reason in reasons.items() if gpu and reason}
    entries = [entry_of(name, missing) for name in names if name not in left_out]
    if not entries:
        raise InputError("; ".join(f"{name} {reason}" for name, reason in left_out.items()))
    print("speed, and the limits of this machine:", flush=True)
    speeds = train(settings_of_speed(gpu, memory), entries, gpus, parts / "speed.json", brief=False)
    print(f"\nlosses of {STEPS} steps, deterministic:", flush=True)
    losses = train(settings_of_losses(gpu), entries, gpus, parts / "losses.json", brief=True)
    checker = Bench(settings_of_losses(gpu), parts / "bits.json", command(), brief=True)
    bits = {
        name: checker.worker(["benchmarks.operand_bits", name], {})
        for name in (entry.name for entry in entries if gpu and not entry.name.endswith(HEAD))
        if PRECISIONS[name].quantized
    }
    card = {**speeds, "losses": losses, "bits": bits, "left_out": left_out, "code": code()}
    if not gpu:
        card["note"] = CPU_NOTE
    write_json(out, signed(card))
    rows = [row(entry.name, card) for entry in entries]
    print("\n" + markdown(HEADER, rows, names=2))
    failed = {entry.name: failures(entry.name, card) for entry in entries}
    for name, reasons in {**failed, **{name: [left_out[name]] for name in left_out}}.items():
        for reason in reasons:
            print(f"{name}: {reason}")
    limits = speeds["limits"]
    if limits["status"] == "ok":
        failed_limits = limits["failed"]
    else:
        failed_limits = {"all precisions": limits["reason"]}
    for name, reason in failed_limits.items():
        print(f"limit of {name}: {reason}")
    print(f"the card is {out}")
    return int(any(failed.values()))


def default_names() -> list[str]:
    """Return all precisions except FP32, and the first quantized precision with its head."""
    names = [name for name in PRECISIONS if name != "fp32"]
    first = next(name for name in names if PRECISIONS[name].quantized)
    return [*names, f"{first}{HEAD}"]


def code() -> str:
    """Return the SHA-256 of the names and hashes of the product's Python files."""
    folders = ("foundation", "packing", "pretrain")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "train_accelerate.py")
    return hash_of({str(path.relative_to(ROOT)): hash_file(path) for path in files})


def signed(card: Result) -> dict[str, Any]:
    """Return the card with the hash of its content, as `read` expects it."""
    content = json.loads(json.dumps({key: card[key] for key in card if key != "sha256"}))
    return content | {"sha256": hash_of(content)}


def failures(name: str, card: Result) -> list[str]:
    """Return a reason for each of speed, losses and bits in which the precision `name` failed."""
    parts = {"speed": card["ways"][name], f"{STEPS} steps": card["losses"]["ways"][name]}
    if name in card["bits"]:
        parts["bits"] = card["bits"][name]
    reasons = [f"{part}: {run['reason']}" for part, run in parts.items() if run["status"] != "ok"]
    if card["bits"].get(name, {}).get("equal") is False:
        reasons.append("bits: the hardware's operands differ from those of our quantizers")
    return reasons


def row(name: str, card: Result) -> list[str]:
    """Return the row of a precision in the table that is printed."""
    timed = card["ways"][name]
    trained = card["losses"]["ways"][name]
    bits = card["bits"].get(name, {})
    speed = timed.get("tokens_per_second", {}).get("median")
    audit = trained.get("audit")
    ends = trained.get("losses", [None])
    return [
        name,
        audit["backend"] if audit else "failed",
        or_dash(speed, "{:,.0f}".format),
        or_dash(timed.get("share_of_limit"), percent),
        or_dash(audit and "passed"),
        or_dash(audit and parity_of(audit["parity"])),
        or_dash(bits.get("equal"), lambda equal: "equal" if equal else "differ"),
        *(or_dash(loss, "{:.4f}".format) for loss in (ends[0], ends[-1])),
    ]


def parity_of(parity: Result) -> str:
    """Return the largest difference that parity found, as a share of its tolerance."""
    if "left_out" in parity:
        return "skipped"
    # The first comparison of each kind is the worst one. Earlier cards have no kind "derived".
    names = ("tensors", "products", "codes", "derived", "sums")
    kinds = (parity.get(name) for name in names)
    return f"{percent(max(kind[0]['excess'] for kind in kinds if kind))} of the tolerance"


# ── Checking a card ───────────────────────────────────────────────────────────────────────────────


def check(path: Path, names: Iterable[str] | None, gpus: int = 1) -> int:
    """Train the steps of a card again, and print for each precision whether its losses agree.

    names: precisions to check. None for all precisions with losses in the card.
    gpus: the number of GPUs that are used at the same time.

    Returns 1 if a precision does not agree, else 0. Raises InputError if the card cannot be used.
    """
    card = read(path)
    gpu = bool(card["environment"]["gpus"])
    if not gpu:
        use_cpu()
    elif not torch.cuda.is_available():
        raise InputError(f"{path}: is of a GPU, and this machine has none; check the card on a GPU")
    settings = settings_of_losses(gpu)
    losses = card["losses"]
    if losses["settings"] != settings.record():
        commit = (card["environment"]["git"] or {}).get("commit")
        raise InputError(f"{path}: was made with another training; check out its commit {commit}")
    trained = {name: way for name, way in losses["ways"].items() if way["status"] == "ok"}
    names = [*dict.fromkeys(names or trained)]
    if not names or not trained.keys() >= {*names}:
        raise InputError(
            f"{path}: has no losses of {', '.join(names) or 'any precision'}; it has losses of "
            f"{', '.join(trained) or 'none'}"
        )
    missing, _ = describe_device_elsewhere() if gpu else describe_device()
    entries = [entry_of(name, missing) for name in names]
    with tempfile.TemporaryDirectory(prefix="card-") as folder:
        repeated = train(settings, entries, gpus, Path(folder, "losses.json"), brief=True)["ways"]
    differences = differing(card, environment_from_elsewhere() | {"processor": processor()})
    print()
    agreed = []
    for name in names:
        agrees, text = compare(repeated[name], trained[name], differences)
        print(f"{name}: {'agrees' if agrees else 'DISAGREES'}: {text}")
        agreed.append(agrees)
    return int(not all(agreed))


def read(path: Path) -> dict[str, Any]:
    """Read a card. Raises InputError if the file is not a card, or was changed."""
    card = load_object(path, "make a card with `python -m benchmarks.card --card`")
    if card.get("sha256") != signed(card)["sha256"]:
        raise InputError(
            f"{path}: its content does not have the hash in the file; it is no card, or was changed"
        )
    return card


def differing(card: Result, environment: Result) -> list[str]:
    """Return the names of the differences from the card: "device", "CUDA", "code", packages."""
    environments = (card["environment"], environment)
    named = {
        "device": [machine["gpus"][:1] or machine["processor"] for machine in environments],
        "CUDA": [machine["cuda"] for machine in environments],
        "code": [card["code"], code()],
    }
    for package in {**environments[0]["packages"], **environments[1]["packages"]}:
        named[package] = [machine["packages"].get(package) for machine in environments]
    return [name for name, (recorded, present) in named.items() if recorded != present]


def compare(repeated: Result, recorded: Result, differences: Sequence[str]) -> tuple[bool, str]:
    """Return True if the losses of two trainings agree, and a text about their difference.

    repeated: result of the training on this machine.
    recorded: result of the training in the card, which did not fail.
    differences: result of `differing`. Without a difference, losses must be equal bit for bit.
    """
    if repeated["status"] != "ok":
        return False, f"the training failed: {repeated['reason']}"
    pairs = zip(repeated["losses"], recorded["losses"], strict=True)
    apart = {step: abs(loss - other) for step, (loss, other) in enumerate(pairs, start=1)}
    unequal = [step for step, difference in apart.items() if difference]
    if not unequal:
        return True, f"all {len(apart)} losses are equal, bit for bit"
    worst = max(apart.values())
    text = (
        f"{len(unequal)} of {len(apart)} losses differ, the first in step {unequal[0]}, by at "
        f"most {worst:.2g} nats"
    )
    if not differences:
        return False, f"{text}; device, versions and code are the same, so none may differ"
    return worst <= TOLERANCE, (
        f"{text}; {TOLERANCE} nats are allowed, because these differ: {', '.join(differences)}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
