"""The repository as a whole: shipped recipes are valid, versions are pinned, and folders and modules depend one way."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

ROOT = Path(__file__).parents[1]
PRODUCT = ("foundation", "packing", "pretrain", "demo", "benchmarks")
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
MOST_STATEMENTS = 350  # of a file: a whole subject, which one reader can hold

# From the ground up: a room imports only rooms that stand before it.
ROOMS = [
    "foundation",
    "packing",
    "pretrain/precision",
    "pretrain/settings",
    "pretrain/model",
    "pretrain/optimizer",
]
ROOMS += [
    "pretrain/checkpoint",
    "pretrain/metrics",
    "pretrain/plan",
    "pretrain/observe",
    "pretrain/verify",
    "pretrain/compare",
    "pretrain/run",
]
ROOMS += ["train_accelerate.py", "pretrain/__main__.py", "demo", "benchmarks"]


def python_files(*folders: str) -> list[Path]:
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "work" not in path.relative_to(ROOT).parts
    ]
    return sorted([*files, *ROOT.glob("*.py")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The dotted names that `path` imports, wherever in the file: inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


# Recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_and_named_after_its_file(path: Path):
    recipe = load_recipe(path)
    assert isinstance(recipe, Recipe) and recipe.name == path.stem
    assert recipe.batch.tokens % recipe.data.length == 0
    said = path.read_text(encoding="utf-8")
    assert "627B" not in said or "data.streaming.disk_gb=" in said, (
        "all packs of it before the run would take 2.5 TB"
    )
    assert recipe.evaluate.every is None or recipe.data.held_out > 0 or recipe.data.validation, (
        "nothing to evaluate on"
    )


# Versions


def requirements(name: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {requirement.name.lower(): requirement for requirement in parsed}


PINNED = [
    "requirements.txt",
    "requirements-dev.txt",
    "requirements-cuda.txt",
    "requirements-measured.txt",
]


@pytest.mark.parametrize("name", PINNED)
def test_every_requirement_is_pinned_to_one_version(name: str):
    for requirement in requirements(name).values():
        assert [clause.operator for clause in requirement.specifier] == ["=="], (
            f"{name}: {requirement}"
        )


def versions_in(name: str) -> dict[str, str]:
    return {
        package: next(iter(pin.specifier)).version for package, pin in requirements(name).items()
    }


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-measured.txt"])
def test_the_pinned_versions_lie_in_the_ranges_that_the_project_states(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {
        requirement.name.lower(): requirement.specifier
        for requirement in map(Requirement, project["dependencies"])
    }
    pins = versions_in(name)
    assert ranges.keys() == pins.keys()
    assert {name: version for name, version in pins.items() if version not in ranges[name]} == {}


def test_the_measured_versions_are_those_of_the_result_files():
    recorded = json.loads((ROOT / "benchmarks/results/speed/h200_shapes.json").read_text())
    packages = recorded["environment"]["packages"]
    pins = versions_in("requirements.txt") | versions_in("requirements-measured.txt")
    pins |= versions_in("requirements-cuda.txt")
    assert {name: pins[name] for name in packages.keys() & pins.keys()}.items() <= packages.items()
    assert packages.keys() - pins.keys() == {"triton", "torchao", "liger-kernel"}
    unrecorded = versions_in("requirements-measured.txt").items() - packages.items()
    assert unrecorded <= versions_in("requirements.txt").items()


@pytest.mark.parametrize("name", ["cluster/Dockerfile", "cluster/sky.yaml", "docs/b200.md"])
def test_gpu_machines_install_the_measured_versions(name: str):
    installing = [line for line in (ROOT / name).read_text().splitlines() if "pip install" in line]
    assert not any(re.search(r"-r requirements\.txt", line) for line in installing)
    for needed in ("-r requirements-measured.txt", "-c requirements-measured.txt"):
        assert any(needed in line for line in installing)


def test_every_third_party_import_of_the_product_is_a_stated_requirement():
    stated = {
        *requirements("requirements.txt"),
        *requirements("requirements-dev.txt"),
        *requirements("requirements-cuda.txt"),
    }
    distributions = {
        "yaml": "pyyaml",
        "transformer_engine": "transformer-engine",
        "flash_attn": "flash-attn-4",
    }
    distributions |= {
        "cut_cross_entropy": "cut-cross-entropy",
        "transformer_engine_torch": "transformer-engine",
    }
    distributions |= {"mlflow": "mlflow-skinny"}
    ours = {*PRODUCT, "tests", *(path.stem for path in ROOT.glob("*.py"))}
    for path in python_files("packing", "pretrain", "demo"):
        roots = (
            {name.partition(".")[0] for name in imports_of(path)} - ours - sys.stdlib_module_names
        )
        unstated = {
            name for name in roots if distributions.get(name, name) not in stated
        } - DEPENDENCIES_OF_DEPENDENCIES
        assert not unstated, f"{relative(path)} imports {unstated}"


# Parts of stated requirements: these come with them and their versions are theirs to choose.
DEPENDENCIES_OF_DEPENDENCIES = {"huggingface_hub", "triton"}


# Modules


def test_no_file_is_longer_than_a_reader_can_hold():
    sizes = {
        relative(path): sum(
            isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text()))
        )
        for path in python_files(*PRODUCT, "tests")
    }
    assert {path: size for path, size in sizes.items() if size > MOST_STATEMENTS} == {}


# What imports what

MODULES = {
    relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
    for path in python_files(*PRODUCT)
}


@cache
def modules_used(path: Path) -> frozenset[str]:
    """Our modules that `path` imports: `pretrain.model.packed` for `from pretrain.model.packed import forward_backward`."""
    names = imports_of(path) & MODULES.keys()
    # `from pretrain.model import packed` names the package on the way to the module.
    return frozenset(
        name for name in names if not any(other.startswith(f"{name}.") for other in names)
    )


@cache
def room_of(path: Path) -> str | None:
    """The deepest of ROOMS that `path` lies in; None for the empty `__init__` above rooms and for programs beside ours."""
    rooms = [
        room for room in ROOMS if relative(path) == room or relative(path).startswith(f"{room}/")
    ]
    return max(rooms, key=len, default=None)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str):
    allowed = ROOMS[: ROOMS.index(room) + 1]
    upward = {
        f"{relative(path)} imports {used}"
        for path in MODULES.values()
        if room_of(path) == room
        for used in modules_used(path)
        if room_of(MODULES[used]) not in allowed
    }
    assert upward == set()


def test_the_product_imports_nothing_of_the_tests():
    outside = {
        path: {name for name in imports_of(path) if name.partition(".")[0] == "tests"}
        for path in MODULES.values()
    }
    assert {relative(path): names for path, names in outside.items() if names} == {}


def test_the_product_calls_each_of_its_kernels():
    """One that nobody imports any more would cost its speed in silence: a CPU runs none of them."""
    used = frozenset().union(*(modules_used(path) for path in MODULES.values()))
    assert {name for name in MODULES if name.endswith("_kernel")} <= used


ROOMS_WITHOUT_TORCH = ("foundation", "packing", "pretrain/settings", "pretrain/compare")
MODULES_WITHOUT_TORCH = {"pretrain.precision.settings", "pretrain.plan.checks"}
WITH_TORCH = {"packing.batch"}  # which makes tensors


def test_settings_packing_and_comparing_do_without_torch():
    """Each takes a second where it would take ten, and works on a machine that has no torch; nor does any draw when imported."""
    rooms = {name for name, path in MODULES.items() if room_of(path) in ROOMS_WITHOUT_TORCH}
    names = sorted((rooms | MODULES_WITHOUT_TORCH) - WITH_TORCH)
    program = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    )
    program += (
        "    if found := {'torch', 'transformers', 'matplotlib', 'plotly'} & sys.modules.keys():\n"
    )
    program += "        sys.exit(f'{name} imports {found}')"
    done = subprocess.run(
        [sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# `tokenizers` raises plain Exception, nothing narrower; catching it is fair where every subclass is raised again at once.
BROAD_EXCEPT = r"except Exception\b.*\n(?!\s+if type\(\w+\) is not Exception:.*\n\s+raise\n)"
# A tracking service raises classes of its own, and none of them may end a training.
MAY_CATCH_ALL = {"pretrain/metrics/trackers.py"}


@pytest.mark.parametrize(
    "unsafe",
    [
        r"\btrust_remote_code=True",
        r"weights_only=False",
        r"\bpickle\.loads?\(",
        BROAD_EXCEPT,
        r"except:",
    ],
)
def test_nothing_loads_code_unasked_or_swallows_every_error(unsafe: str):
    texts = {relative(path): path.read_text(encoding="utf-8") for path in python_files(*PRODUCT)}
    found = {path for path, text in texts.items() if re.search(unsafe, text)}
    assert found - (MAY_CATCH_ALL if unsafe == BROAD_EXCEPT else set()) == set()
