"""`deterministic: true`: on a GPU too, the same bits from every run of one recipe, stopped and resumed or not.

Attention takes a kernel with a fixed order (`attention.choose`), torch its deterministic algorithms, cuBLAS one workspace, NCCL
no sums in switches; tables' gradients, searched products and compiled reductions ask whether that is so. What a step draws is
seeded by its number, and a checkpoint holds the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch

from foundation.errors import InputError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # those that torch takes; the first is as large as what it takes by itself on Hopper
_NO_FIXED_ORDER = re.compile(r"(\S+) does not have a deterministic implementation")  # torch's words


def begin(environ: MutableMapping[str, str]) -> None:
    """Let everything in this process be computed in a fixed order. Before anything is on a GPU, as cuBLAS reads `environ` then.

    Raises InputError where `environ` says another cuBLAS workspace.
    """
    workspace = environ.setdefault(WORKSPACE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise InputError(
            f"environment: {WORKSPACE}={workspace} and `deterministic: true` contradict each other; unset it, or set it to "
            f"{' or '.join(WORKSPACES)}"
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a pass over all new memory, and here all is written


def describe(device_type: str, environ: MutableMapping[str, str]) -> str:
    """What is in force, for the audit."""
    if not torch.are_deterministic_algorithms_enabled():
        return "no"
    if device_type != "cuda":
        return f"yes: torch's deterministic algorithms; on a {device_type.upper()} sums have a fixed order in any case"
    return (
        f"yes: torch's deterministic algorithms, {WORKSPACE}={environ.get(WORKSPACE)}, attention's backward in a fixed order, "
        "compiled reductions cut by rule"
    )


@contextmanager
def explaining() -> Iterator[None]:
    """InputError in place of torch's error for an operation that has no deterministic form."""
    try:
        yield
    except RuntimeError as error:
        found = _NO_FIXED_ORDER.search(str(error))
        if found is None:
            raise
        raise InputError(
            f"`deterministic: true`: torch's {found[1]} has no deterministic form on this device, and the run needs it; set "
            "`deterministic: false`, or what needs it (the model, most likely) to something else"
        ) from None


@contextmanager
def any_order() -> Iterator[None]:
    """Allows operations without a deterministic form while entered: for what is no part of training, as generation (`cumsum`)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
