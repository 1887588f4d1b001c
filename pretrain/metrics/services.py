"""Whether the services that trackers need can be used: asked before the model is built."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from urllib.error import HTTPError
from urllib.request import urlopen

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from foundation.errors import InputError
from foundation.reading import one_line

REACHED_WITHIN = 5  # seconds in which a hosted service must answer at the start


def check_installed(name: str) -> None:
    """InputError where accelerate knows no tracker of that name, or its package is not installed."""
    known = ["jsonl", *LOGGER_TYPE_TO_CLASS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known trackers: {', '.join(sorted(known))}"
        raise InputError(f"`log.trackers`: there is no tracker {name!r}; {hint}")
    if name != "jsonl" and name not in map(str, get_available_trackers()):
        package = name.replace("_", "-")
        raise InputError(
            f"`log.trackers`: {name!r} needs a package that is not installed; `pip install {package}`, or take it out"
        )


def errors_of(name: str) -> tuple[type[Exception], ...]:
    """What the tracker `name` raises where its service refuses or is away; most of it is OSError, as that of `requests` is."""
    if name == "wandb":
        import wandb

        return OSError, ValueError, RuntimeError, wandb.Error
    if name == "mlflow":
        from mlflow.exceptions import MlflowException

        return OSError, ValueError, RuntimeError, MlflowException
    return OSError, ValueError, RuntimeError


def check_services(names: Sequence[str]) -> None:
    """InputError where W&B or MLflow is wanted and has no key here, or cannot be reached, without asking the user anything."""
    if "wandb" in names:
        _check_wandb()
    if "mlflow" in names:
        _check_mlflow()


def _check_wandb() -> None:
    """wandb itself tries to reach its server for half a minute, and then raises."""
    import wandb

    settings = wandb.setup().settings
    if settings.mode not in ("online", "shared"):
        return
    offline = "WANDB_MODE=offline writes the run into its folder, for `wandb sync` later; or take wandb out of `log.trackers`"
    _reach("wandb", settings.base_url, offline)  # first: with a key, wandb's own check waits for the server
    try:
        known = wandb.login(prompt=False)
    except wandb.Error as error:
        raise InputError(f"`log.trackers`: wandb does not take the key that it finds: {error}; `wandb login` again") from None
    if not known:
        raise InputError(
            f"`log.trackers`: wandb has no key for {settings.base_url}; run `wandb login` or set WANDB_API_KEY. {offline}"
        )


def _check_mlflow() -> None:
    """mlflow itself tries seven times to reach its server, each for two minutes."""
    import mlflow

    uri = mlflow.get_tracking_uri()
    remedy = "set MLFLOW_TRACKING_URI to a server or database that is there, or take mlflow out of `log.trackers`"
    if uri.startswith(("http:", "https:")):
        _reach("mlflow", uri, remedy)
    try:
        mlflow.MlflowClient(uri)
    except errors_of("mlflow") as error:
        raise InputError(f"`log.trackers`: mlflow cannot use MLFLOW_TRACKING_URI {uri}: {one_line(error)}; {remedy}") from None


def _reach(name: str, address: str, remedy: str) -> None:
    try:
        with contextlib.suppress(HTTPError):  # an answer all the same
            urlopen(address, timeout=REACHED_WITHIN).close()
    except OSError as error:
        what = f"cannot be reached within {REACHED_WITHIN} s ({getattr(error, 'reason', error)})"
        raise InputError(f"`log.trackers`: {name}'s server {address} {what}. {remedy}") from None
