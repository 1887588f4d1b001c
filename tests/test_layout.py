"""The repository as a whole: shipped recipes are valid, versions are pinned, and modules stay small and depend one way."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from demo.parts import RECIPE
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

ROOT = Path(__file__).parents[1]
PRODUCT = ("foundation", "packing", "pretrain", "demo", "benchmarks")
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
MOST_LINES = 600


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "work" not in path.relative_to(ROOT).parts]
    return sorted([*files, *ROOT.glob("*.py")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """The dotted names that `path` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# Recipes


def test_both_recipes_are_shipped():
    assert {"smoke", "small_malaysian_lm"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_and_named_after_its_file(path: Path):
    recipe = load_recipe(path)
    assert isinstance(recipe, Recipe) and recipe.name == path.stem
    assert recipe.batch.tokens % recipe.data.length == 0
    assert recipe.evaluate.every is None or recipe.data.held_out > 0, "there would be nothing to evaluate on"


def test_the_demos_recipe_fits_its_tokenizer_and_its_pack_length():
    recipe = load_recipe(ROOT / RECIPE)
    assert recipe.model.config["vocab_size"] >= 257, "256 bytes and the end-of-text token"
    assert recipe.model.config["max_position_embeddings"] >= recipe.data.length
    assert recipe.data.source and recipe.data.tokenizer
    assert str(recipe.data.packs).startswith("demo/work/"), "what `make clean` removes"
    assert recipe.run_dir.format(name=recipe.name) == "runs/smoke", "what `make clean` removes"


def test_the_reference_recipe_trains_the_reference_number_of_tokens():
    recipe = load_recipe(ROOT / "recipes/small_malaysian_lm.yaml")
    packs_a_step = recipe.batch.tokens // recipe.data.length
    assert (packs_a_step, recipe.train.steps * packs_a_step) == (32, 88_832)
    assert round(recipe.train.steps * packs_a_step / 22_206) == 4


# Versions


def requirements(name: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {requirement.name.lower(): requirement for requirement in parsed}


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt", "requirements-cuda.txt"])
def test_every_requirement_is_pinned_to_one_version(name: str):
    for requirement in requirements(name).values():
        assert [clause.operator for clause in requirement.specifier] == ["=="], f"{name}: {requirement}"


def test_a_package_has_the_same_version_wherever_it_is_pinned():
    cuda, dev = requirements("requirements-cuda.txt"), requirements("requirements-dev.txt")
    for name in cuda.keys() & dev.keys():
        assert cuda[name].specifier == dev[name].specifier


def test_the_pinned_versions_lie_in_the_ranges_that_the_project_states():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {requirement.name.lower(): requirement.specifier for requirement in map(Requirement, project["dependencies"])}
    pins = {name: next(iter(pin.specifier)).version for name, pin in requirements("requirements.txt").items()}
    assert ranges.keys() == pins.keys()
    assert {name: version for name, version in pins.items() if version not in ranges[name]} == {}


def test_every_third_party_import_of_the_product_is_a_stated_requirement():
    stated = {*requirements("requirements.txt"), *requirements("requirements-dev.txt"), *requirements("requirements-cuda.txt")}
    distributions = {"yaml": "pyyaml", "transformer_engine": "transformer-engine", "flash_attn": "flash-attn"}
    distributions |= {"cut_cross_entropy": "cut-cross-entropy", "transformer_engine_torch": "transformer-engine"}
    ours = {*PRODUCT, "tests", *(path.stem for path in ROOT.glob("*.py"))}
    for path in python_files("packing", "pretrain", "demo"):
        roots = {name.partition(".")[0] for name in imports_of(path)} - ours - sys.stdlib_module_names
        unstated = {name for name in roots if distributions.get(name, name) not in stated} - DEPENDENCIES_OF_DEPENDENCIES
        assert not unstated, f"{relative(path)} imports {unstated}"


# Parts of stated requirements: these come with them and their versions are theirs to choose.
DEPENDENCIES_OF_DEPENDENCIES = {"huggingface_hub", "triton"}


# Modules


@pytest.mark.parametrize("path", python_files(*PRODUCT, "tests"), ids=relative)
def test_no_file_is_longer_than_a_reader_can_hold(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_no_module_and_no_class_is_named_after_nothing():
    modules = {path.stem for path in python_files(*PRODUCT)} | {path.parent.name for path in python_files(*PRODUCT)}
    assert modules.isdisjoint({"utils", "util", "common", "helpers", "helper", "misc", "trainer", "manager"})
    for path in python_files(*PRODUCT):
        classes = re.findall(r"^\s*class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not [name for name in classes if name.endswith(("Manager", "Trainer", "Helper"))], relative(path)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("foundation", {"foundation"}),
        ("packing", {"foundation", "packing"}),
        ("pretrain", {"foundation", "packing", "pretrain"}),
        ("demo", {"foundation", "packing", "pretrain", "demo"}),
    ],
)
def test_packages_import_downward_only(package: str, allowed: set[str]):
    ours = {*PRODUCT, "tests", "train_accelerate"}
    for path in (ROOT / package).rglob("*.py"):
        used = {name.partition(".")[0] for name in imports_of(path)} & ours
        assert used <= allowed, f"{relative(path)} imports {used - allowed}"


def test_no_modules_import_each_other_in_a_circle():
    paths = {
        relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in python_files(*PRODUCT)
    }
    graph = {name: (imports_of(path) & paths.keys()) - {name} for name, path in paths.items()}
    # A package's __init__ and its modules may name each other; only circles between modules are mistakes.
    packages = {name for name, path in paths.items() if path.name == "__init__.py"}
    graph = {name: imported - packages for name, imported in graph.items() if name not in packages}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


WITHOUT_TORCH = (
    "packing.settings",
    "packing.pack",
    "pretrain.settings.recipe",
    "pretrain.settings.config",
    "pretrain.compare.report",
    "pretrain.compare.matrix",
)
WITHOUT_TORCH += ("pretrain.compare.matrix_file", "pretrain.precision.settings", "pretrain.precision.registry")


def test_settings_reports_and_the_matrix_do_without_torch():
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    'torch' in sys.modules and sys.exit(f'{name} imports torch')"
    done = subprocess.run([sys.executable, "-c", program, *WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# `tokenizers` raises plain Exception, nothing narrower; catching it is fair where every subclass is raised again at once.
BROAD_EXCEPT = r"except Exception\b.*\n(?!\s+if type\(\w+\) is not Exception:.*\n\s+raise\n)"


@pytest.mark.parametrize(
    "unsafe", [r"\btrust_remote_code=True", r"weights_only=False", r"\bpickle\.loads?\(", BROAD_EXCEPT, r"except:"]
)
def test_nothing_loads_code_unasked_or_swallows_every_error(unsafe: str):
    found = [relative(path) for path in python_files(*PRODUCT) if re.search(unsafe, path.read_text(encoding="utf-8"))]
    assert found == []
