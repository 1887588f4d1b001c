"""Test the installation on a machine with NVIDIA GPUs, with stand-ins for Python and nvidia-smi.

The stand-ins record their command lines, so nothing is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

SCRIPT = ROOT / "cluster/gpu_install.sh"
WHEEL = "transformer_engine_torch-2.20.2-cp312-cp312-linux_x86_64.whl"
NVIDIA_SMI = """#!/bin/sh
[ -n "$DRIVER" ] || { echo "No devices were found"; exit 6; }
echo "$DRIVER"
"""
# `python -m venv FOLDER` copies the stand-in, and `pip wheel` makes an empty wheel.
PYTHON = f"""#!/bin/sh
echo "PIP_NO_INDEX=$PIP_NO_INDEX CPATH=$CPATH $*" >>"$LOG"
case "$*" in
    --version) echo Python 3.11.7 ;;
    *"$LACKS"*) exit 1 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"import glob, nvidia"*) echo /headers ;;
    *"import platform"*) echo torch2.11.0-cu13.0-cpython-312 ;;
    "-m pip wheel "*) mkdir -p "$7" && touch "$7/{WHEEL}" ;;
esac
"""


class Machine:
    """A machine with a driver and Python 3.12, both of which are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name, text in (("nvidia-smi", NVIDIA_SMI), ("python3.12", PYTHON)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def install(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script, and return its exit status and output."""
        environment = {
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "LOG": str(self.log),
            "LACKS": "nothing",
            "DRIVER": "580.95.05",
            "HOME": str(self.folder),
            "VENV": str(self.folder / "venv"),
            "WHEEL_CACHE": str(self.folder / "cache"),
        }
        self.log.unlink(missing_ok=True)
        command = ["bash", str(SCRIPT), *options]
        return subprocess.run(
            command, cwd=ROOT, env=environment | variables, capture_output=True, text=True
        )

    def pip(self) -> list[str]:
        """Return the arguments of the calls of pip in the last installation."""
        return re.findall(r" -m pip (.*)", self.log.read_text())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_second_installation_compiles_nothing(machine: Machine):
    first = machine.install()
    assert first.returncode == 0, first.stderr
    assert [call for call in machine.pip() if call.startswith("wheel")]
    assert "CPATH=/headers -m pip wheel " in machine.log.read_text()
    (wheel,) = (machine.folder / "cache").rglob("*.whl")
    assert wheel.parent.name == "2.20.2-torch2.11.0-cu13.0-cpython-312"
    assert int(re.search(r"MAX_JOBS=(\d+)", first.stdout)[1]) >= 1
    assert (machine.folder / "venv/.installed").exists()
    second = machine.install()
    measured, packages = machine.pip()
    assert measured == "install -r requirements-measured.txt cuda-toolkit[cccl,crt]"
    options = f"--find-links {wheel.parent} -r requirements-cuda.txt -c requirements-measured.txt"
    assert packages == f"install {options}"
    assert machine.log.read_text().splitlines()[-1].endswith("-m pretrain doctor")
    assert second.stdout.splitlines()[-1].endswith("-m pretrain train my.yaml --config fp8_delayed")


def test_a_folder_of_wheels_replaces_the_network_and_compiler(machine: Machine):
    wheels = machine.folder / "wheels"
    wheels.mkdir()
    (wheels / WHEEL).touch()
    done = machine.install("--without-gpu", WHEELS=str(wheels), DRIVER="")
    assert done.returncode == 0, done.stderr
    calls = [line for line in machine.log.read_text().splitlines() if "-m pip" in line]
    assert len(calls) == 2 and all("PIP_NO_INDEX=1 " in call for call in calls)
    assert "doctor" not in machine.log.read_text()


def test_a_dry_run_installs_nothing(machine: Machine):
    done = machine.install("--dry-run")
    assert done.returncode == 0, done.stderr
    assert "-m pip install -r requirements-measured.txt" in done.stdout
    assert "transformer-engine-torch==2.20.2" in done.stdout
    assert not (machine.folder / "venv").exists() and not (machine.folder / "cache").exists()
    assert "-m" not in machine.log.read_text()


def test_an_environment_of_the_makefile_with_another_python_is_replaced(machine: Machine):
    other = machine.folder / "venv/bin/python"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    refused = machine.install()
    assert refused.returncode == 2 and "set PYTHON, or remove an older" in refused.stderr
    (machine.folder / "venv/.installed").touch()
    assert machine.install().returncode == 0
    assert f"-m venv {machine.folder}/venv --clear\n" in machine.log.read_text()


REFUSED = {
    "the driver is 570.86.15, and CUDA 13 needs 580 or newer": {"DRIVER": "570.86.15"},
    "nvidia-smi reports no GPU: No devices were found": {"DRIVER": ""},
    "no-python is missing": {"PYTHON": "no-python"},
    "the measured versions are for Python 3.12": {"LACKS": "version_info"},
    "has no venv": {"LACKS": "ensurepip"},
    "the headers of python3.12 are missing": {"LACKS": "Python.h"},
    "WHEELS: there is no folder nowhere": {"WHEELS": "nowhere"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_unfit_machine_is_refused_before_the_installation(machine: Machine, message: str):
    done = machine.install(**REFUSED[message])
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("error: ") == 1
    assert done.stderr.endswith("nothing was installed\n")
    assert not (machine.folder / "venv").exists()


@pytest.mark.parametrize("name", ["Makefile", "cluster/Dockerfile", "cluster/sky.yaml"])
def test_gpu_machines_install_with_one_script(name: str):
    commands = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert any("bash cluster/gpu_install.sh" in line for line in commands)


def test_the_jobset_starts_all_processes_of_its_machines():
    """The manifest was compared with JobSet's schema, which is not part of this repository."""
    manifest = yaml.safe_load((ROOT / "cluster/jobset.yaml").read_text(encoding="utf-8"))
    (group,) = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    machines = job["completions"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["parallelism"] == machines
    assert f"--num_machines {machines} " in command
    assert f"--num_processes {machines * gpus} " in command
    first = f"{manifest['metadata']['name']}-{group['name']}-0-0.{manifest['metadata']['name']}"
    assert f"--main_process_ip {first} " in command
    for path in re.findall(r"/opt/pretrain/(\S+)", command):
        assert (ROOT / path).is_file()
    # torchrun kills its processes before Kubernetes kills torchrun.
    (timeout,) = (
        int(variable["value"])
        for variable in container["env"]
        if variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    )
    assert timeout < pod["terminationGracePeriodSeconds"]
