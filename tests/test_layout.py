"""The repository as a whole: valid recipes, pinned versions, one-way imports, sizes of files."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT, run_command

PRODUCT = ("foundation", "packing", "pretrain", "lab", "demo", "benchmarks", "examples")
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
MAX_STATEMENTS = 350  # of a file

# A package imports only from packages before it in this list.
PACKAGES = [
    "foundation",
    "packing",
    "pretrain/precision",
    "pretrain/settings",
    "pretrain/launch",
    "pretrain/model",
    "pretrain/optimizer",
    "pretrain/checkpoint",
    "pretrain/metrics",
    "pretrain/plan",
    "pretrain/observe",
    "pretrain/verify",
    "pretrain/run",
    "pretrain/api.py",
    "train_accelerate.py",
    "pretrain/__main__.py",
    "lab/compare",
    "lab/experiments",
    "lab/speed",
    "lab/doctor.py",
    "demo",
    "benchmarks",
    "examples",
]


def python_files(*folders: str) -> list[Path]:
    """Return the Python files in `folders` and at the top of the repository."""
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
    """Return the dotted names that a file imports, also inside functions."""
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
    text = path.read_text(encoding="utf-8")
    assert "627B" not in text or "data.streaming.disk_gb=" in text, (
        "packs of the complete corpus would take 2.5 TB"
    )
    assert recipe.evaluate.every is None or recipe.data.held_out > 0 or recipe.data.validation, (
        "the recipe evaluates but has no held-out data"
    )


# Versions


def requirements(name: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {requirement.name.lower(): requirement for requirement in parsed}


def versions_in(name: str) -> dict[str, str]:
    """Return the versions of requirements, each of which must be pinned to one version."""
    versions = {}
    for package, requirement in requirements(name).items():
        (clause,) = requirement.specifier
        assert clause.operator == "==", f"{name}: {requirement}"
        versions[package] = clause.version
    return versions


def ranges_of_the_project() -> dict[str, SpecifierSet]:
    """Return the ranges of versions in pyproject.toml, also those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranged = sum(project["optional-dependencies"].values(), project["dependencies"])
    return {
        requirement.name.lower(): requirement.specifier for requirement in map(Requirement, ranged)
    }


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-measured.txt"])
def test_pinned_versions_are_in_the_ranges_of_the_project(name: str):
    ranges = ranges_of_the_project()
    pins = versions_in(name)
    assert ranges.keys() - {"low-precision-pretraining", "s3fs"} == pins.keys()
    assert {name: version for name, version in pins.items() if version not in ranges[name]} == {}


def test_the_lock_has_the_pinned_versions_from_public_addresses():
    text = (ROOT / "uv.lock").read_text()
    assert {*re.findall(r"\w+://[^/\"]+", text)} == {
        "https://pypi.org",
        "https://files.pythonhosted.org",
    }
    lock = tomllib.loads(text)
    packages = {package["name"]: package for package in lock["package"]}
    (ours,) = (package for package in lock["package"] if "metadata" in package)
    locked = {
        required["name"]: SpecifierSet(required.get("specifier", ""))
        for required in ours["metadata"]["requires-dist"]
    }
    assert locked == ranges_of_the_project(), "run `uv lock`"
    dev = {required["name"].replace("-", "_") for required in ours["dev-dependencies"]["dev"]}
    pins = versions_in("requirements-dev.txt")
    pins = {name: pins[name] for name in pins if name.replace("-", "_") in dev}
    pins |= versions_in("requirements.txt")
    versions = {name: packages[name.replace("_", "-")]["version"] for name in pins}
    assert versions == pins


def test_the_measured_versions_are_those_of_the_result_files():
    results = json.loads((ROOT / "benchmarks/results/speed/h200_peers_fa4.json").read_text())
    of_tests = versions_in("requirements.txt")
    packages = results["environment"]["packages"]
    pins = of_tests | versions_in("requirements-measured.txt")
    pins |= versions_in("requirements-cuda.txt")
    assert {name: pins[name] for name in packages.keys() & pins.keys()}.items() <= packages.items()
    assert packages.keys() - pins.keys() == {"triton", "torchao", "liger-kernel"}
    unrecorded = versions_in("requirements-measured.txt").items() - packages.items()
    assert unrecorded <= of_tests.items()


# Names of distributions that differ from the name of their package.
DISTRIBUTIONS = {
    "cut_cross_entropy": "cut-cross-entropy",
    "fla": "fla-core",
    "flash_attn": "flash-attn-4",
    "mlflow": "mlflow-skinny",
    "transformer_engine": "transformer-engine",
    "transformer_engine_torch": "transformer-engine",
    "yaml": "pyyaml",
}
# Dependencies of requirements, which choose the versions of these packages.
DEPENDENCIES_OF_DEPENDENCIES = {"huggingface_hub", "triton"}


def test_every_third_party_import_of_the_product_is_a_requirement():
    required = {
        *requirements("requirements.txt"),
        *requirements("requirements-dev.txt"),
        *requirements("requirements-cuda.txt"),
    }
    first_party = {*PRODUCT, "tests", *(path.stem for path in ROOT.glob("*.py"))}
    for path in python_files("packing", "pretrain", "lab", "demo"):
        imported = {name.partition(".")[0] for name in imports_of(path)}
        third_party = imported - first_party - sys.stdlib_module_names
        missing = {
            name for name in third_party if DISTRIBUTIONS.get(name, name) not in required
        } - DEPENDENCIES_OF_DEPENDENCIES
        assert not missing, f"{relative(path)} imports {missing}"


# Files and imports


def test_examples_use_only_the_public_interface():
    examples = {path for path in MODULES.values() if package_of(path) == "examples"}
    assert {name for path in examples for name in modules_used(path)} == {"pretrain.api"}


def test_no_file_has_too_many_statements():
    """`ruff format` allows one statement in a line, so only long files are parsed."""
    texts = {relative(path): path.read_text() for path in python_files(*PRODUCT, "tests")}
    sizes = {
        path: sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
        for path, text in texts.items()
        if text.count("\n") > MAX_STATEMENTS
    }
    assert {path: size for path, size in sizes.items() if size > MAX_STATEMENTS} == {}


MODULES = {
    relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
    for path in python_files(*PRODUCT)
}


@cache
def modules_used(path: Path) -> frozenset[str]:
    """Return the names of the product's modules that a file imports."""
    names = imports_of(path) & MODULES.keys()
    # `from pretrain.model import packed` also names the package pretrain.model.
    return frozenset(
        name for name in names if not any(longer.startswith(f"{name}.") for longer in names)
    )


@cache
def package_of(path: Path) -> str | None:
    """Return the innermost of PACKAGES that contains a file.

    None for the empty `__init__.py` above packages and for programs beside the product.
    """
    name = relative(path)
    packages = [
        package for package in PACKAGES if name == package or name.startswith(f"{package}/")
    ]
    return max(packages, key=len, default=None)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_before_it(package: str):
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    forbidden = {
        f"{relative(path)} imports {used}"
        for path in MODULES.values()
        if package_of(path) == package
        for used in modules_used(path)
        if package_of(MODULES[used]) not in allowed
    }
    assert forbidden == set()


def test_the_product_imports_nothing_of_the_tests():
    tests = {
        name: path
        for name, path in MODULES.items()
        if any(imported.partition(".")[0] == "tests" for imported in imports_of(path))
    }
    assert tests == {}


def test_the_product_calls_each_of_its_kernels():
    """A kernel that is no longer imported would cost speed without an error on a CPU."""
    used = frozenset().union(*(modules_used(path) for path in MODULES.values()))
    assert {name for name in MODULES if name.endswith("_kernel")} <= used


PACKAGES_WITHOUT_TORCH = (
    "foundation",
    "packing",
    "pretrain/settings",
    "pretrain/launch",
    "lab/compare",
    "lab/experiments",
)
MODULES_WITHOUT_TORCH = {"pretrain.precision.settings", "pretrain.plan.checks"}
MODULES_WITH_TORCH = {"packing.batch", "pretrain.launch.preloaded"}
IMPORT_WITHOUT_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if slow := {'torch', 'transformers', 'plotly'} & sys.modules.keys():
        sys.exit(f'{name} imports {slow}')
"""


def test_settings_packing_and_compare_import_no_torch():
    """They start in one second instead of ten, and work on a machine without torch.

    None of them imports a plotting library at its start either.
    """
    modules = {name for name, path in MODULES.items() if package_of(path) in PACKAGES_WITHOUT_TORCH}
    names = sorted((modules | MODULES_WITHOUT_TORCH) - MODULES_WITH_TORCH)
    run_command([sys.executable, "-c", IMPORT_WITHOUT_TORCH, *names])


# `tokenizers` raises plain Exception. Code may catch it if it raises every subclass again at once.
BROAD_EXCEPT = r"except Exception\b.*\n(?!\s+if type\(\w+\) is not Exception:.*\n\s+raise\n)"
# Tracking services raise their own classes of exceptions, which must not end a training.
# Every tracker, and every file system of fsspec, has exception classes of its own.
MAY_CATCH_ALL = {"foundation/storage.py", "pretrain/metrics/trackers.py"}


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
def test_no_code_is_loaded_unasked_and_no_error_is_swallowed(unsafe: str):
    texts = {relative(path): path.read_text(encoding="utf-8") for path in python_files(*PRODUCT)}
    matching = {path for path, text in texts.items() if re.search(unsafe, text)}
    assert matching - (MAY_CATCH_ALL if unsafe == BROAD_EXCEPT else set()) == set()


# Names with an underscore that are documented.
PUBLIC_NAMES = {"_asdict", "_exit", "_fields", "_replace"}


def test_every_private_name_of_another_package_is_listed():
    """docs/developers/private_names.md gives the reason for each name."""
    files = python_files("foundation", "packing", "pretrain", "lab")
    texts = [path.read_text(encoding="utf-8") for path in files]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                defined.add(node.attr)
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    private = {name for name in used if re.match("_[A-Za-z]", name)}
    page = (ROOT / "docs/developers/private_names.md").read_text(encoding="utf-8")
    listed = {*re.findall(r"`(?:[\w.]*\.)?(_[A-Za-z]\w*)`", page)}
    assert private - defined - PUBLIC_NAMES <= listed
    assert {name for name in listed if not any(name in text for text in texts)} == set()
