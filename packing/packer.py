"""Make the packs of a stream, part by part, until the run that reads the stream has ended.

A run starts its packer as `python -m packing.packer SETTINGS PROCESS`. SETTINGS is a JSON file with
the run's DataSettings. PROCESS is the id of the run's process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from foundation.command import run_command
from foundation.progress import say
from packing.follow import follow
from packing.prepare import prepare
from packing.settings import DataSettings


def make_packs(settings: DataSettings, parent: int | None = None) -> None:
    """Make the first part if it is missing, and then parts ahead of the run.

    `parent` is the id of the run's process if the run has started this packer, else None.
    """
    prepare(settings)
    say(f"{settings.packs}: making parts ahead of the run that reads them")
    follow(settings, parent)
    say(f"{settings.packs}: the run has ended")


if __name__ == "__main__":
    file, process = sys.argv[1:]
    settings = DataSettings.model_validate(json.loads(Path(file).read_bytes()))
    sys.exit(run_command(lambda: make_packs(settings, int(process))))
