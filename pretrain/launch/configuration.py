"""Find an Accelerate configuration, and describe the launch of a training with it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InputError
from foundation.reading import load_yaml

_ROOT = Path(__file__).resolve().parents[2]
# Folder of the configurations, in the checkout or beside the installed packages.
CONFIGURATIONS = _ROOT / "accelerate_configs"
# Script that trains, in the folder of the checkout or of the installed packages.
SCRIPT = _ROOT / "train_accelerate.py"


def find_configuration(name: str) -> Path:
    """Return the path of an Accelerate configuration, which is readable YAML.

    `name` is a path, or the name of a file in accelerate_configs/, with or without `.yaml`. Raises
    InputError if there is no such file, or if its machines would not find each other.
    """
    shipped = CONFIGURATIONS / f"{name.removesuffix('.yaml')}.yaml"
    path = next(filter(Path.is_file, (Path(name).expanduser(), shipped)), None)
    if path is None:
        raise InputError(
            f"--config {name}: there is no such file; name a path, or one of these configurations: "
            + ", ".join(sorted(file.stem for file in CONFIGURATIONS.glob("*.yaml")))
        )
    settings = load_yaml(path)
    if settings.get("num_machines") not in (None, 0, 1) and settings.get("main_process_port") == 0:
        raise InputError(
            f"{path}: `main_process_port: 0` is another free port on each machine, so the machines "
            "would not find each other; set the same port in the file of every machine"
        )
    return path


@dataclass(frozen=True)
class Launch:
    """A training as `accelerate launch` starts it."""

    # The Accelerate configuration.
    configuration: Path
    # Arguments of the script: the recipe, settings that override it as key=value, and options.
    script_arguments: tuple[str, ...]
    # Number of processes. None if the configuration sets the number.
    processes: int | None = None

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `accelerate launch`."""
        options = ["--config_file", os.path.relpath(self.configuration)]
        if self.processes is not None:
            options += ["--num_processes", str(self.processes)]
        if load_yaml(self.configuration).get("mixed_precision") is False:
            # YAML reads `no` without quotation marks as false, which accelerate does not accept.
            options += ["--mixed_precision", "no"]
        return [*options, os.path.relpath(SCRIPT), *self.script_arguments]

    @property
    def command(self) -> list[str]:
        """Return the complete command, which a user can type too.

        `--quiet` suppresses the traceback that accelerate prints after the training's own error
        message.
        """
        return [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *self.arguments]
