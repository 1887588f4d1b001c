"""Run the packer of a stream beside a training, and report why it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from foundation.errors import InputError
from foundation.files import is_locked, locked, replace_file, write_json
from packing.settings import DataSettings
from packing.stream import POSITION, RUN_LOCK, check_disk

LOG = "packer.log"
_RECIPE = "packer.yaml"
# Variables that make the processes of a launcher report their end.
_OF_THE_LAUNCHER = ("TORCHELASTIC_ERROR_FILE", "PRETRAIN_STATUS_FILE")


class PackerProcess(ExitStack):
    """A process of `python -m packing follow` beside the run that reads its parts.

    It ends with the run, however that ends. If another process makes the parts already, it takes
    over when that one ends.
    """

    def __init__(self, settings: DataSettings, position: dict[str, Any]) -> None:
        """Start to make parts from `position` on.

        Raises InputError if another run reads the stream, or if the disk is too small.
        """
        super().__init__()
        self._packs = settings.packs
        self.enter_context(locked(self._packs / RUN_LOCK, self._refuse))
        check_disk(settings)
        self._write(position)
        recipe = self._packs / _RECIPE
        values = {"data": settings.model_dump(mode="json")}
        replace_file(recipe, yaml.safe_dump(values, allow_unicode=True).encode())
        # Python's -P keeps it from importing modules of the current folder.
        command = [sys.executable, "-P", "-m", "packing", "follow", str(recipe)]
        environment = {
            name: value for name, value in os.environ.items() if name not in _OF_THE_LAUNCHER
        }
        search_path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
        with open(self._packs / LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which ends the packer.
            )
        self.callback(self.process.wait)
        self.callback(self.process.kill)  # which comes first, in the midst of its work

    def _refuse(self, holder: str) -> None:
        time.sleep(0.1)
        if is_locked(self._packs / RUN_LOCK):  # and not only looked at by a packer
            raise InputError(
                f"{self._packs}: another run, {holder}, trains on this stream; "
                "wait, or set another data.packs"
            )

    def publish(self, position: dict[str, Any], *, waits: bool) -> None:
        """Write the position if the packer needs it: a part is passed, or the run `waits`."""
        if position["starts"] != self._written["starts"] or (waits and position != self._written):
            self._write(position)

    def _write(self, position: dict[str, Any]) -> None:
        write_json(self._packs / POSITION, position)
        self._written = position

    def check(self) -> None:
        """Raise InputError with the error of the packer if it has ended."""
        status = self.process.poll()
        if status is None:
            return
        log = self._packs / LOG
        _, has_error, message = f"\n{log.read_text(errors='replace')}".rpartition("\nerror: ")
        if has_error:
            raise InputError(message.strip())
        why = f"status {status}; {log} says why"
        if status < 0:
            why = f"signal {-status}: if memory ran out, set a smaller data.streaming.window"
        raise InputError(
            f"{self._packs}: the packer of the stream has ended with {why}. "
            "Start the same command again"
        )
