"""What the files of a run folder must look like where they are read by name, whatever version has written them.

A file that somebody edited, or another program wrote, is then one message with its key and no traceback in the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foundation.errors import InputError
from foundation.settings import first_mistake
from pretrain.checkpoint.state import Past


class RecordedAmounts(BaseModel):
    """What is read by name of `batch` and `train` in config.yaml."""

    model_config = ConfigDict(strict=True)
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None


class RecordedModel(BaseModel):
    model_config = ConfigDict(strict=True)
    source: str | None = None
    config: dict[str, Any] | None = None


class RecordedConfig(BaseModel):
    """What is read by name of config.yaml, whatever version wrote it."""

    model_config = ConfigDict(strict=True)
    precision: str | list[dict[str, Any]] | None = None  # a list: a schedule
    weights: str | None = None
    model: RecordedModel | None = None
    data: dict[str, Any] | None = None
    batch: RecordedAmounts = RecordedAmounts()
    train: RecordedAmounts | None = None
    optimizer: dict[str, Any] | None = None
    fp8_config: dict[str, Any] | None = None
    evaluate: dict[str, Any] | None = None


class RecordedLaunch(BaseModel):
    """What is read by name of `accelerate` in environment.json."""

    model_config = ConfigDict(strict=True)
    processes: int | None = None
    device: str | None = None


class RecordedEnvironment(BaseModel):
    """What is read by name of environment.json."""

    model_config = ConfigDict(strict=True)
    data_fingerprint: str | None = None
    held_out_fingerprint: str | None = None
    source_config: dict[str, Any] = {}
    tokenizer_fingerprint: str | None = None
    system: str | None = None
    packages: dict[str, str | None] | None = None
    gpus: list[str] | None = None
    accelerate: RecordedLaunch = RecordedLaunch()
    past: Past = Past()


class RecordedProduct(BaseModel):
    """A linear's entry in audit.json."""

    products: dict[str, Any] | None = None


class RecordedMemory(BaseModel):
    """Bytes by part: as the plan had reckoned for so many packs a microbatch, and as tensors lie there from step to step."""

    model_config = ConfigDict(strict=True)
    microbatch: int
    planned: dict[str, int]
    held: dict[str, int]


class RecordedFindings(BaseModel):
    """What audit.json has of one precision."""

    model_config = ConfigDict(strict=True)
    precision: str | None = None
    effective: str | None = None
    backend: str | None = None
    products: list[RecordedProduct] | None = None
    confirmed_in_step: int | None = None


class RecordedAudit(RecordedFindings):
    """What is read by name of audit.json."""

    schedule: str | None = None
    phases: dict[Annotated[str, Field(pattern=r"^[0-9]{1,15}$")], str] | None = None
    precisions: dict[str, RecordedFindings] | None = None
    kernels: list[Any] | None = None
    memory: RecordedMemory | None = None


class RecordedSummary(BaseModel):
    """What is read by name of summary.json; any other key is a figure."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float | None] = {}
    steps: int
    tokens: int
    tokens_per_step: int | None = None
    data_fingerprint: str | None = None
    halted: str | None = None
    frozen_most: dict[str, float] | None = None


SHAPES = {"config": RecordedConfig, "environment": RecordedEnvironment, "summary": RecordedSummary, "audit": RecordedAudit}


def check_shapes(contents: Mapping[str, Any], origins: Mapping[str, object]) -> None:
    """InputError naming the file and the key where something that is read by name is not what a run writes there.

    contents: of each of SHAPES what its file holds; origins: what to call it."""
    for name, shape in SHAPES.items():
        try:
            shape.model_validate(contents[name])
        except ValidationError as error:
            raise InputError(f"{origins[name]}: {first_mistake(error)}; this is not what a run writes there") from None
