"""`deterministic: true`: on a GPU too, the same bits from every run of one recipe, stopped and resumed or not.

What else would add up in an order of its own, and what keeps it from that:

| | |
| --- | --- |
| attention's backward | a kernel with a fixed order; those that have none are passed over (`attention.choose`) |
| torch's own operations | its deterministic algorithms; one that has no such form raises, which is our message (`explaining`) |
| matrix products | cuBLAS takes one way for one shape and workspace; torch wants the workspace to be named in the environment |
| a table's gradient | torch's sum of rows, in place of a kernel whose programs add as they finish (`pretrain.model.gradients`) |
| searched products | no algorithm is chosen by what it takes (`pretrain.precision.products`) |
| compiled reductions | torch cuts them by rule and not by what it times, and by the shape that they have (`wrap_layers`) |
| sums over processes | torch keeps NCCL from adding in the switches (NCCL_ALGO=^NVLS), whose order is nobody's |
| the cut into microbatches | the recipe's number (`check_deterministic` refuses `auto`) |

Nothing else does: other blocks of our kernels, and of Transformer Engine's, have no sum in common but maxima, which have no
order. Its NVTE_ALLOW_NONDETERMINISTIC_ALGO is read by its own attention module, which nothing here calls, and its products bring
their own workspace. What a step draws is seeded by its number, and a checkpoint holds the rest: weights, remainders, moments,
histories and scales.
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
