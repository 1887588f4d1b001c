"""Commands that the docs and comments print are accepted as they stand, and fit on their cards.

A command that trains is parsed, and its recipe is checked for the configuration and the number of
processes in the command. Matrices print their commands (--dry-run). Other commands are
parsed. Files that a page tells the user to write have small stand-ins.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from transformers import PreTrainedModel

from docs.recipes_page import FOLDER
from foundation.units import GIB
from lab.experiments.matrix_file import load_matrix
from lab.speed.targets import devices_called, plan_on
from pretrain.__main__ import main as pretrain
from pretrain.launch.environment import with_precision
from pretrain.launch.launcher import find_configuration
from pretrain.optimizer.schedule import fit_to_command_line
from pretrain.plan.checks import check_launch, steps_of
from pretrain.plan.plan import Training
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.selection import select_precision
from pretrain.run.job import training_elsewhere
from pretrain.settings import commands
from pretrain.settings.config import load_data, load_recipe
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
COMMENTED = sorted([*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("accelerate_configs/*.yaml")])
SETTING = rf"(?:{'|'.join(Recipe.model_fields)})[\w.]*=[^\s`]+"
FILE = r"(?:recipes|accelerate_configs|benchmarks)/[\w/]+\.yaml"
# Programs of this project, or that start it. Other lines of a block are output or shell commands.
PROGRAM = re.compile(r"(?:\w+=\S+ )*(accelerate launch|(?:\S*/)?python -m|torchrun|make|sbatch) ")
# A command with words for the user to replace, such as RUN or `...`.
TEMPLATE = re.compile(r"\.\.\.|key=value|(?<![\w=/.\"])[A-Z_]{2,}(?![\w=.])|\bN\b")
# Matrices that a page tells the user to write.
MATRICES = ("my_matrix.yaml", "tune.yaml")


def comment_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#") for line in lines if line.startswith("#")]


def joined(text: str) -> list[str]:
    """Return the lines of a text, joined over their backslashes."""
    return re.sub(r"\\\n\s*", " ", text).splitlines()


def commands_of(path: Path) -> list[str]:
    """Return the commands of a page, or of the comment of a YAML file."""
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL))
        inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        # The name of a command alone is no command to run.
        quoted = [" ".join(text.split()) for text in inline if len(text.split()) > 4]
        lines = [*joined(blocks), *quoted]
    else:
        lines = joined("\n".join(line for line in comment_of(path) if line.startswith("   ")))
    found = [line.partition("  #")[0].strip() for line in lines if PROGRAM.match(line.strip())]
    return [line for line in found if not TEMPLATE.search(line)]


def quoted_settings(text: str) -> list[str]:
    return re.findall(rf"`((?:{SETTING}\s*)+)`", text)


def environment_of(configuration: str | None, overrides: Sequence[str]) -> dict[str, str]:
    """Return accelerate's variables for a configuration file.

    Without one, those for FP8 if the overrides set fp8_config, or else for BF16.
    """
    if configuration is None:
        is_fp8 = any(setting.startswith("fp8_config.") for setting in overrides)
        return {"ACCELERATE_MIXED_PRECISION": "fp8" if is_fp8 else "bf16"}
    config = yaml.safe_load(find_configuration(configuration).read_text(encoding="utf-8"))
    environment = {"ACCELERATE_MIXED_PRECISION": str(config["mixed_precision"])}
    if "fp8_config" in config:
        environment["ACCELERATE_FP8_RECIPE"] = config["fp8_config"]["recipe"]
    return environment


def check(
    recipe: Path,
    overrides: Sequence[str],
    configuration: str | None = None,
    processes: int | None = None,
) -> None:
    """Check a recipe as the launcher does before it looks at the device, the model and the data."""
    loaded = load_recipe(recipe, overrides)
    if loaded.train.epochs is None:
        steps = steps_of(loaded.train, loaded.batch.tokens, 0, loaded.data.length)
        loaded, _ = fit_to_command_line(loaded, overrides, steps)
    environment = environment_of(configuration, overrides)
    check_launch(with_precision(loaded, environment), processes, ())


def check_command(command: str) -> None:
    """Parse a command, and check the recipe of a training."""
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    program, *arguments = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in arguments), command
    elif program == "sbatch":
        check_job(arguments)
    elif program == "accelerate":
        launch = launch_command_parser().parse_args(arguments[1:])
        is_module = launch.training_script == "pretrain"
        options = ["pretrain"] if launch.module else []
        assert is_module == bool(options) or launch.training_script == "train_accelerate.py"
        processes = launch.num_processes
        if processes is None and launch.config_file:
            config = yaml.safe_load((ROOT / launch.config_file).read_text(encoding="utf-8"))
            processes = config.get("num_processes", 1)
        check_training(launch.training_script_args, launch.config_file, processes)
    elif program == "torchrun":
        launch = get_args_parser().parse_args(arguments)
        check_training(launch.training_script_args, None, int(launch.nproc_per_node))
    else:
        check_module(*arguments[1:])


def check_training(
    arguments: Sequence[str], configuration: str | None, processes: int | None
) -> None:
    if arguments[0] == "evaluate":
        check_module("pretrain", *arguments)
        return
    options = commands.read("train", arguments)
    check(options.recipe, options.overrides, configuration, processes)


def check_job(arguments: Sequence[str]) -> None:
    """Check the arguments of `sbatch`: options of SLURM, a script, arguments of the script."""
    index = next(i for i, text in enumerate(arguments) if text.startswith("cluster/"))
    assert (ROOT / arguments[index]).is_file()
    (exported,) = (text for text in arguments[:index] if text.startswith("--export="))
    values = dict(pair.split("=") for pair in exported.split(",") if pair.count("=") == 1)
    if "RECIPE" in values:
        check(Path(values["RECIPE"]), arguments[index + 1 :], values["CONFIG"], 8)


def check_module(package: str, *arguments: str) -> None:
    """Check `python -m package` with arguments."""
    name = arguments[0] if arguments else ""
    if package != "pretrain":
        assert importlib.util.find_spec(package), package
    elif name == "matrix":
        assert pretrain([*arguments, *({"--dry-run"} - {*arguments})]) == 0, arguments
    elif name:
        options = commands.read(name, arguments[1:])
        if name == "prepare":
            load_data(options.recipe)
        elif name in ("train", "plan"):
            check(options.recipe, options.overrides, getattr(options, "config", None))
        elif name == "evaluate" and options.recipe.suffix == ".yaml":
            load_recipe(options.recipe, options.overrides)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the repository's folders and with the files that the user writes."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", "packs"):
            (tmp_path / path.name).symlink_to(path)
    page = (ROOT / "docs/quick_start.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(# my\.yaml\n.*?)```", page, re.DOTALL)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    for name in MATRICES:
        (tmp_path / name).symlink_to(ROOT / "recipes/matrices/smoke.yaml")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", [*PAGES, *COMMENTED], ids=lambda path: path.name)
def test_the_commands_of_a_page_are_accepted(path: Path, stand_ins: None) -> None:
    for command in commands_of(path):
        try:
            check_command(command)
        except Exception as error:
            error.add_note(f"in {path.name}: {command}")
            raise


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_settings_in_a_recipes_comment_are_accepted(path: Path) -> None:
    lines = comment_of(path)
    for name in re.findall(FILE, " ".join(lines)):
        assert (ROOT / name).is_file()
    assert any("accelerate launch" in command for command in commands_of(path))
    partial = [line for line in joined("\n".join(lines)) if line.strip().startswith("... ")]
    for settings in [*partial, *quoted_settings(" ".join(lines))]:
        check(path, re.findall(SETTING, settings))


def test_the_settings_of_the_quick_start_are_accepted(stand_ins: None) -> None:
    """A row of the page's table names a configuration, or is for any device."""
    page = (ROOT / "docs/quick_start.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\|.*(=|--config)", line)]
    assert len(rows) >= 3
    for row in rows:
        named = re.search(r"accelerate_configs/(\w+)|--config (\w+)", row)
        config = named[1] or named[2] if named else "bf16"
        check(Path("my.yaml"), re.findall(SETTING, row), config)


def test_settings_in_coming_from_are_accepted_by_a_guides_recipe() -> None:
    """Among them is a smoke test of ten steps, which the recipe's schedule is shortened to."""
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    guides = page.partition("## The guides behind the recipes")[2].partition("\n## ")[0]
    assert len(quoted_settings(guides)) >= 2
    for text in quoted_settings(guides):
        check(FOLDER / "qwen3_slimpajama.yaml", re.findall(SETTING, text))


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────

# Cards of files that name none, and of those that name others. A file without a model for a GPU is
# trained on a CPU.
USUAL = "H100"
ON = {
    **dict.fromkeys(["smoke", "tinyshakespeare", "mxfp4", "cpu"], None),
    **dict.fromkeys(["llama3_1_8b_openmath", "qwen2_5_14b_openmath"], "H200"),
    **dict.fromkeys(["nvfp4", "mxfp8", "ddp_mxfp8", "fsdp2_mxfp8"], "B200"),
    **dict.fromkeys(["b200_speed", "qwen3_slimpajama_speed", "openmath"], "B200"),
    **dict.fromkeys(["small_malaysian_lm", "small_malaysian_lm_scopes"], "B200"),
}
LLAMA = yaml.safe_load((ROOT / "benchmarks/llama_3_1_8b.yaml").read_text())["model"]["config"]
# Configurations of models on the hub, as far as the memory depends on them.
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": LLAMA,
    "meta-llama/Llama-3.2-3B": LLAMA
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    | {"num_attention_heads": 24, "tie_word_embeddings": True},
    "meta-llama/Llama-3.2-1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"head_dim": 64, "tie_word_embeddings": True},
} | {
    source: yaml.safe_load((ROOT / f"benchmarks/{name}.yaml").read_text())["model"]["config"]
    for source, name in (
        ("Qwen/Qwen2.5-14B", "qwen2_5_14b"),
        ("Qwen/Qwen3-1.7B-Base", "qwen3_1_7b"),
    )
}

PLANNED: dict[str, tuple[Training, PreTrainedModel]] = {}


def check_fit(recipe: Recipe, on: str, topology: str | None = None) -> None:
    """Assert that a recipe fits on devices, with memory to spare."""
    if config := CONFIGS.get(recipe.model.source or ""):
        model = recipe.model.model_copy(update={"source": None, "config": config})
        recipe = recipe.model_copy(update={"model": model})
    if recipe.train.epochs:
        # The number of packs is not known.
        train = recipe.train.model_copy(update={"epochs": None, "steps": 1000})
        recipe = recipe.model_copy(update={"train": train})
    # Building a model takes most of the time.
    key = f"{recipe.model} {recipe.optimizer.name}"
    if key not in PLANNED:
        PLANNED[key] = training_elsewhere(recipe, [], None)
    training, shapes = PLANNED[key]
    active = select_precision(str(recipe.precision), recipe.fp8_config, lambda _: None)
    schedule = PrecisionSchedule([(None, active)], training.steps)
    training = replace(training, recipe=recipe, schedule=schedule)
    plan = plan_on(devices_called(on), training, shapes, topology)
    needed = plan.needed_memory(plan.expected_microbatch)
    assert needed <= plan.devices.memory, f"{needed / GIB:.1f} GiB do not fit"


def topology_of(configuration: dict[str, Any]) -> str | None:
    """Return the topology of an Accelerate configuration, as `--config` of `plan` names it."""
    if configuration["distributed_type"] == "FSDP":
        gathers_often = configuration["fsdp_config"]["fsdp_reshard_after_forward"]
        return "fsdp2" if gathers_often else "zero"
    return "ddp" if configuration.get("num_processes", 1) > 1 else None


def check_fits(words: Sequence[str], card: str) -> None:
    """Plan the training that `accelerate launch` starts."""
    file = words[words.index("--config_file") + 1]
    configuration = yaml.safe_load((ROOT / file).read_text())
    processes = configuration.get("num_processes", 1)
    if "--num_processes" in words:
        processes = int(words[words.index("--num_processes") + 1])
    path, *overrides = words[words.index("train_accelerate.py") + 1 :]
    machines = configuration.get("num_machines", 1)
    recipe = with_precision(load_recipe(ROOT / path, overrides), environment_of(file, overrides))
    # Only the memory of one device is checked, so one machine stands for all.
    check_fit(recipe, f"{processes // machines}x{card}", topology_of(configuration))


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: path.stem)
def test_the_trainings_in_a_comment_fit_on_its_card(path: Path) -> None:
    card = ON.get(path.stem, USUAL)
    if path.parent.name == "matrices":
        matrix = load_matrix(path, ())
        settings = [cell.recipe for cell in matrix.cells]
        for recipe in [] if matrix.on_cpu else settings:
            topology = "ddp" if matrix.processes > 1 else None
            check_fit(recipe, f"{matrix.processes}x{card}", topology)
        return
    for command in commands_of(path) if card else ():
        words = shlex.split(command)
        if words[0] == "accelerate" and "fp8_config.on_unsupported=emulate" not in words:
            check_fits(words, card)
