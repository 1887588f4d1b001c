"""`python -m pretrain train` chooses a configuration, and passes on signals and exit statuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from foundation.settings import parse
from foundation.signals import IF_NOT_IGNORED, SIGNALS
from pretrain.__main__ import main
from pretrain.launch import launcher
from pretrain.settings import commands
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT, write_recipe
from tests.forked_commands import forking


def start(folder: Path, recipe: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
    """Start `python -m pretrain train` on the CPU in the repository's root folder."""
    command = [sys.executable, "-m", "pretrain", "train", str(write_recipe(recipe, folder))]
    environment = forking() | {"ACCELERATE_USE_CPU": "true"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, **pipes)


def start_endless(folder: Path, recipe: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
    """Start a training without an end, and return after its first step."""
    endless = recipe | {"train": {"steps": 10**6}, "evaluate": {}, "log": {"every": 1}}
    process = start(folder, endless, *arguments)
    metrics = Path(recipe["run_dir"]) / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository's root folder."""
    env = forking() | environment
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )


def test_train_prints_the_command_and_trains(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    out, err = start(tmp_path, small_recipe, "train.steps=3").communicate()
    command, *_ = out.splitlines()
    assert shlex.split(command) == [
        *("accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml"),
        *("train_accelerate.py", str(tmp_path / "recipe.yaml"), "train.steps=3"),
    ]
    summary = json.loads((Path(small_recipe["run_dir"]) / "summary.json").read_text())
    assert summary["steps"] == 3, err


@pytest.mark.multi
def test_a_mistake_that_two_processes_find_is_one_message(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    heads = "model.config.num_attention_heads=3"
    process = start(tmp_path, small_recipe, heads, "--config", "ddp", "--processes", "2")
    out, err = process.communicate()
    assert process.returncode == 2
    assert "--num_processes 2 train_accelerate.py" in out
    assert err.startswith("error: ")
    assert "`num_attention_heads: 3`" in err
    assert err.count("\n") == 1


@pytest.mark.multi
def test_accelerate_launch_ends_with_the_message_of_one_rank(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml"]
    recipe = str(write_recipe(small_recipe, tmp_path))
    script = ["train_accelerate.py", recipe, "model.config.num_attention_heads=3"]
    done = run(*launch, "--num_processes", "2", *script, ACCELERATE_USE_CPU="true")
    assert done.returncode == 1
    assert done.stderr.count("`num_attention_heads: 3`") == 1
    message, border = done.stderr.rstrip("\n").splitlines()[-2:]
    assert "`num_attention_heads: 3`" in message
    assert set(border) == {"="}
    assert "foundation/command.py" not in done.stderr


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.multi)])
def test_a_signal_lets_the_training_save_and_is_the_exit_status(
    several: bool, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    processes = ["--config=ddp", "--processes=2"] if several else []
    process = start_endless(tmp_path, small_recipe, "checkpoint.every=null", *processes)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in out + err
    assert "Traceback" not in err
    assert len(list((Path(small_recipe["run_dir"]) / "checkpoints").glob("step-*"))) == 1


@pytest.mark.multi
def test_a_killed_rank_is_one_message(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    process = start_endless(tmp_path, small_recipe, "--config=ddp", "--processes=2")
    # The launcher has started this process. The rank forked for it ends with it.
    next(
        rank
        for rank in psutil.process_iter(["cmdline", "environ"])
        if str(tmp_path / "recipe.yaml") in (rank.info["cmdline"] or ())
        and (rank.info["environ"] or {}).get("RANK") == "1"
    ).kill()
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    # torchrun sends SIGTERM to rank 0, which announces it unless the lost connection came first.
    err = err.removeprefix("\nSIGTERM: finishing this step, then saving\n")
    assert err.startswith("rank 1 was ended by SIGKILL; the same command continues")
    assert err.count("\n") == 1


@pytest.mark.parametrize("package", ["pydantic", "accelerate"])
def test_ctrl_c_during_imports_prints_no_traceback(
    package: str, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == {package!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
""")
    command = [sys.executable, "-m", "pretrain", "train", str(write_recipe(small_recipe, tmp_path))]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_configuration_with_hosts_of_mpirun_is_refused(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\necho "Open MPI"\n')
    mpirun.chmod(0o755)
    cpu = (ROOT / "accelerate_configs/cpu.yaml").read_text().replace("'NO'", "MULTI_CPU")
    hosts = f"mpirun_config: {{mpirun_hostfile: {tmp_path}/hosts, mpirun_ccl: '1'}}\n"
    (tmp_path / "mpi.yaml").write_text(f"{cpu}num_processes: 2\n{hosts}")
    recipe = str(write_recipe(small_recipe, tmp_path))
    command = ("-m", "pretrain", "train", recipe, f"--config={tmp_path}/mpi.yaml")
    done = run(*command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2, done.stderr
    assert "because of `distributed_type: NO`, `distributed_type: MULTI_CPU`" in done.stderr


def test_an_fp8_launch_is_planned_without_an_fp8_library(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = str(write_recipe(small_recipe, tmp_path))
    command = ("-m", "pretrain", "train", recipe, "--config=fp8_delayed.yaml")
    planned, refused = run(*command, "--plan"), run(*command)
    assert planned.returncode == 0, planned.stderr
    assert "delayed compute, emulated" in planned.stdout
    assert "`precision: delayed` needs a GPU of compute capability 8.9" in planned.stdout
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
    assert "`precision: delayed` needs a GPU" in refused.stderr


def test_a_training_that_a_signal_ends_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a training by its signal until the loop can save, for example during packing."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    preamble = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    done = subprocess.run([sys.executable, "-c", preamble + code])
    assert launcher.reported_status(done.returncode) == 130
    message = capsys.readouterr().err
    assert message.startswith("the training was ended by SIGINT; the same command continues")
    assert launcher.reported_status(2) == 2
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "processes", "name", "started"),
    [
        (0, None, "cpu", None),
        (0, 2, "ddp", 2),
        (1, None, "bf16", None),
        (8, None, "ddp", 8),
        (8, 1, "bf16", None),
        # A step of the recipe has 8 packs.
        (16, None, "ddp", 8),
    ],
)
def test_the_configuration_fits_the_machine(
    gpus: int,
    processes: int | None,
    name: str,
    started: int | None,
    small_recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of GPUs is replaced. tests/foundation/test_gpus.py compares it with NVML."""
    monkeypatch.setattr(launcher, "visible_gpus", lambda: gpus * ["GPU"])
    monkeypatch.setattr(launcher, "version", lambda package: "2.13.0")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    recipe = parse(Recipe, small_recipe, "recipe.yaml")
    path, number = launcher.choose_configuration(recipe, None, processes)
    assert (path, number) == (ROOT / f"accelerate_configs/{name}.yaml", started)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launcher.choose_configuration(recipe, None, 1)[0].stem == "cpu"


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the handlers of signals, which the launcher sets."""
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, *IF_NOT_IGNORED)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


DDP = (ROOT / "accelerate_configs/ddp.yaml").read_text()


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "one of these"),
        ("compute_environment: LOCAL_MACHINE\n", "`distributed_type` must be specified"),
        (f"{DDP}num_machines: 2\n", "`main_process_port: 0` is another free port"),
        ("distributed_type: DEEPSPEED\n", "is not supported; to shard the model, choose"),
        (
            "distributed_type: 'NO'\nmixed_precision: yes\n",
            "own.yaml: accelerate does not accept this configuration",
        ),
    ],
)
def test_a_configuration_that_is_refused_is_one_message(
    content: str | None,
    words: str,
    small_recipe: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "own.yaml"
    if content:
        file.write_text(content)
    assert main(["train", str(write_recipe(small_recipe, tmp_path)), "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and words in message and message.count("\n") == 1


@pytest.mark.usefixtures("signals")
def test_mixed_precision_no_needs_no_quotation_marks(
    small_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training itself is replaced, as it would end this process."""
    started: list[str] = []

    def train(command: list[str], environment: dict[str, str]) -> None:
        started.append(environment["ACCELERATE_MIXED_PRECISION"])

    monkeypatch.setattr(launcher, "_train_here", train)
    recipe = str(write_recipe(small_recipe, tmp_path))
    for value in ("no", "'no'", "bf16"):
        text = f"distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: {value}\n"
        (tmp_path / "own.yaml").write_text(text)
        assert main(["train", recipe, "--config", str(tmp_path / "own.yaml")]) == 0
    assert started == ["no", "no", "bf16"]


def test_the_options_of_the_script_are_passed_on() -> None:
    given = ["my.yaml", "seed=1", "--accept-changes", "--plan", "--resume", "step-1"]
    assert launcher.training_arguments(commands.read("train", given)) == given
    with_setting = commands.read("train", ["--profile", "my.yaml", "--seed=1"])
    assert launcher.training_arguments(with_setting) == ["my.yaml", "seed=1", "--profile"]
