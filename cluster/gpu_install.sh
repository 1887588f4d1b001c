#!/usr/bin/env bash
# Install the measured versions on a machine with NVIDIA GPUs, and check each precision. `make gpu`
# runs this script in the repository's root folder. It needs Python 3.12 with its headers, a C++
# compiler and a driver for CUDA 13, but no CUDA toolkit: Transformer Engine's extension for torch is
# C++ without kernels, and NVIDIA's wheels contain the headers. The kernels for all GPUs are in the
# wheel transformer_engine_cu13.
#
#   --dry-run       print the commands, and install nothing
#   --without-gpu   for images: skip the check of the driver and the doctor
#
# Environment:
#   PYTHON        interpreter (python3.12)
#   VENV          folder of the environment (.venv)
#   WHEELS        folder with all packages. If it is set, no network is used
#   WHEEL_CACHE   folder for the compiled extension (~/.cache/low-precision-pretraining). A second
#                 machine with the same versions takes the extension from it, instead of compiling
set -euo pipefail

python="${PYTHON:-python3.12}"
venv="${VENV:-.venv}"
wheels="${WHEELS:-}"
cache="${WHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/low-precision-pretraining}"
oldest_driver=580 # of CUDA 13
dry_run=""
without_gpu=""
clear="" # option of venv that deletes an environment with another Python
for option in "$@"; do
    case "$option" in
        --dry-run) dry_run=yes ;;
        --without-gpu) without_gpu=yes ;;
        *) echo "error: unknown option $option; choose --dry-run or --without-gpu" >&2 && exit 2 ;;
    esac
done

fail() {
    echo "error: $1; nothing was installed" >&2
    exit 2
}

run() {
    echo "+ $*"
    [[ -n "$dry_run" ]] || "$@"
}

check_driver() {
    local driver
    command -v nvidia-smi >/dev/null ||
        fail "nvidia-smi is missing: install NVIDIA's driver $oldest_driver or newer, or start the container with --gpus all"
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)" ||
        fail "nvidia-smi reports no GPU: $driver"
    ((${driver%%.*} >= oldest_driver)) ||
        fail "the driver is $driver, and CUDA 13 needs $oldest_driver or newer: update the driver"
    nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader
}

is_measured_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'
}

check_python() {
    # Replace an environment of the Makefile with another Python, such as that of `make demo`.
    if [[ -e "$venv/.installed" ]] && ! is_measured_python "$venv/bin/python"; then
        clear=--clear
    elif [[ -e "$venv/bin/python" ]]; then
        python="$venv/bin/python"
    fi
    if [[ "$python" != "$venv/bin/python" ]]; then
        command -v "$python" >/dev/null ||
            fail "$python is missing: install Python 3.12 (Ubuntu 24.04: apt-get install python3.12-venv python3.12-dev), or set PYTHON"
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python has no venv: install it (Ubuntu: apt-get install python3.12-venv)"
    fi
    is_measured_python "$python" ||
        fail "$python is $("$python" --version), and the measured versions are for Python 3.12: set PYTHON, or remove an older $venv"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null ||
        fail "the headers of $python are missing: install them (Ubuntu: apt-get install python3.12-dev)"
}

# Print the number of parallel compilers: one per core, and at most one per 3 GiB of free memory.
parallel_jobs() {
    local cores memory
    cores="$(nproc)"
    memory="$(awk '/^MemAvailable/ {print int($2 / 3145728)}' /proc/meminfo)"
    echo "$((memory < 1 ? 1 : memory < cores ? memory : cores))"
}

# Compile Transformer Engine's extension for torch into the folder $extension, unless this folder or
# $wheels has it.
compile_extension() {
    local name="transformer_engine_torch-$version-*.whl" headers build
    if compgen -G "$extension/$name" || compgen -G "${wheels:-$extension}/$name"; then
        return
    fi
    run "$bin/python" -m pip install ninja packaging setuptools wheel
    # The environment may see the packages of the system, so NVIDIA's headers are in several folders.
    headers="$(ask 'import glob, nvidia
print(":".join(folder for root in nvidia.__path__ for folder in glob.glob(root + "/*/include")))')"
    build="$extension.$$"
    # NCCL_EP: expert parallelism, which this launcher does not use. FORCE_BUILD: do not look for a
    # wheel on GitHub, because the releases have none for this torch and CUDA.
    run env NVTE_BUILD_USE_NVIDIA_WHEELS=1 CPATH="$headers" NVTE_WITH_NCCL_EP=0 NVTE_PYTORCH_FORCE_BUILD=TRUE \
        NVTE_NO_LOCAL_VERSION=1 MAX_JOBS="${MAX_JOBS:-$(parallel_jobs)}" \
        "$bin/python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$build" "transformer-engine-torch==$version"
    # Other machines that share the folder never see an incomplete wheel.
    run mkdir -p "$extension"
    run mv "$build"/*.whl "$extension/"
    run rmdir "$build"
}

# Print the answer of a Python program in the new environment, or dots in a dry run.
ask() {
    if [[ -n "$dry_run" ]]; then
        echo "..."
    else
        "$bin/python" -c "$1"
    fi
}

[[ -f requirements-measured.txt ]] || fail "run this script in the repository's root folder"
[[ -n "$without_gpu" ]] || check_driver
check_python
command -v c++ >/dev/null || fail "c++ is missing: install a C++ compiler (Ubuntu: apt-get install build-essential)"
[[ -z "$wheels" || -d "$wheels" ]] || fail "WHEELS: there is no folder $wheels"

bin="$venv/bin"
version="$(sed -n 's/^transformer-engine\[pytorch\]==//p' requirements-cuda.txt)"
# Compile the bytecode below with all cores, instead of with one core in pip.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_COMPILE=0
if [[ -n "$wheels" ]]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels"
fi

[[ "$python" == "$bin/python" ]] || run "$python" -m venv "$venv" $clear
# torch requires an exact version of cuda-toolkit. Its extras add the headers that torch does not need.
run "$bin/python" -m pip install -r requirements-measured.txt "cuda-toolkit[cccl,crt]"
# The extension fits one version of Transformer Engine, torch, CUDA, Python and the C library.
extension="$cache/$version-$(ask 'import platform, sys, torch
libc = "-".join(platform.libc_ver())
print(f"torch{torch.__version__}-cu{torch.version.cuda}-{sys.implementation.cache_tag}-{libc}-{platform.machine()}")')"
compile_extension
run "$bin/python" -m pip install --find-links "$extension" -r requirements-cuda.txt -c requirements-measured.txt
run "$bin/python" -m compileall -qq -j 0 "$venv/lib" || true # packages have templates that are no Python
# Keep `make test` and other targets from installing the versions of requirements.txt.
run touch "$venv/.gpu" "$venv/.installed"
[[ -n "$without_gpu" ]] || run "$bin/python" -m pretrain doctor
echo "done in $SECONDS s; next: $bin/python -m pretrain train my.yaml --config fp8_delayed"
