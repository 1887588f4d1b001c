"""What a tracker's service has of a run. W&B and trackio hold back what they are given; a kill loses that."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

WRITTEN_THROUGH = ("tensorboard", "mlflow")  # which have a record as soon as it is logged
_NUMBER_OF = {"step": "loss", "evaluation": "held_out_loss"}  # by which each kind of record is known
_BLOCK = 32768  # bytes, of W&B's files; no header of a record goes over the end of one


def last_delivered(name: str, tracker: GeneralTracker, run_dir: Path, run_id: str) -> dict[str, int]:
    """Returns for each kind of record the last step that the service of the opened `tracker` has; empty where it cannot tell."""
    if name == "wandb":
        return _in_wandb(tracker, run_dir, run_id)
    if name == "trackio":
        return _in_trackio(tracker)
    return _in_mlflow(run_id) if name == "mlflow" else {}


def _in_wandb(tracker: GeneralTracker, run_dir: Path, run_id: str) -> dict[str, int]:
    """W&B writes a step, with all that was logged of it, when it gets the next one. Online it says how far the run had come."""
    offline = (run_dir / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    last = max([tracker.run.starting_step - 1, *(step for path in offline for step in _steps_in(path))])
    return dict.fromkeys((*_NUMBER_OF, "samples"), last) if last > 0 else {}


def _steps_in(path: Path) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records_in(path.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def _records_in(content: bytes) -> Iterator[bytes]:
    """The records that a file of W&B's holds whole. A log of LevelDB's: a record is one part, or a first, middle and last."""
    at, record = 7, b""  # after W&B's own header
    while at + 7 <= len(content):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        checksum, length, part = struct.unpack_from("<IHB", content, at)
        at += 7 + length
        if part == 0 or zlib.crc32(content[at - length - 1 : at]) != checksum:  # a kill or a power cut may leave anything there
            return
        record = (b"" if part in (1, 2) else record) + content[at - length : at]
        if part in (1, 4):
            yield record


def _in_trackio(tracker: GeneralTracker) -> dict[str, int]:
    """Trackio's database here has a row a record. Of a run that it sends elsewhere, it has those that are still to be sent."""
    from trackio.sqlite_storage import SQLiteStorage

    rows: list[dict[str, Any]] = SQLiteStorage.get_logs(tracker.run.project, tracker.run.name, run_id=tracker.run.id)
    steps = {kind: [row["step"] for row in rows if key in row] for kind, key in (_NUMBER_OF | {"samples": "samples"}).items()}
    return {kind: max(of_kind) for kind, of_kind in steps.items() if of_kind}


def _in_mlflow(run_id: str) -> dict[str, int]:
    """MLflow keeps samples as a file a step, and to give one again replaces it."""
    import mlflow

    client = mlflow.MlflowClient()
    steps = {kind: [each.step for each in client.get_metric_history(run_id, key)] for kind, key in _NUMBER_OF.items()}
    return {kind: max(of_kind) for kind, of_kind in steps.items() if of_kind}
