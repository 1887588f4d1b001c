"""Optimizer state in pinned host memory, streamed through the update in pieces.

AdamW's moments take 8 bytes per parameter in FP32 and are used only once a step. With
`optimizer.offload` they stay in host memory. The update copies them to the GPU in pieces, updates
each piece, and copies it back. AdamW updates each value independently of all others, so the results
are the same bits as without offloading.

Three streams work at the same time: one copies pieces to the GPU, one updates them, and one copies
them back. The two directions of a PCIe link are independent, so an update takes about as long as
the copies in one direction: 60 GiB for 8 B parameters, more than a second over PCIe 5.0.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundation.errors import InputError
from foundation.units import bytes_text
from pretrain.model.gradients import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
# Map the values of `optimizer.offload` to the names of the state tensors in host memory.
OFFLOADED = {"none": (), "moments": MOMENTS, "state": (*MOMENTS, "remainder")}
# Maximum number of values in a piece, 32 MiB of an FP32 tensor. The copy of such a piece takes
# longer than the host needs to start the copies and the update of the next piece.
PIECE = 1 << 23
# Number of pieces that have memory on the GPU. One piece is copied in, one piece is updated, and
# one piece is copied back. The fourth piece is needed because the update makes small copies too,
# which delay the large copies of the pieces.
SLOTS = 4


def pinned_zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros in pinned host memory, with the shape and the sharding of `parameter`.

    This process's part of `parameter` must not be empty. Raise InputError if CUDA cannot pin the
    memory.
    """
    part = local_part(parameter)
    # Allocate memory pages for this tensor alone. CUDA refuses to pin a page twice, so two tensors
    # must not share a page. New pages contain zeros.
    pages = mmap.mmap(-1, part.numel() * dtype.itemsize)
    zeros = torch.frombuffer(pages, dtype=dtype).view(part.shape)
    if not pin(zeros):
        raise InputError(
            f"`optimizer.offload`: CUDA cannot pin {bytes_text(zeros.nbytes)} of host memory; "
            "either free host memory, or set `optimizer.offload: none`"
        )
    if isinstance(parameter, DTensor):
        return DTensor(zeros, parameter._spec, requires_grad=False)
    return zeros


def pin(buffer: Tensor) -> bool:
    """Pin `buffer` in host memory until it is freed, and return True if CUDA has pinned it.

    torch's allocator of pinned memory is not used, because it rounds sizes up to a power of two and
    would allocate 32 GiB for 20 GiB.
    """
    cudart = torch.cuda.cudart()
    address = buffer.data_ptr()
    # The flag 1 is cudaHostRegisterPortable: the memory is pinned for all CUDA contexts.
    if int(cudart.cudaHostRegister(address, buffer.nbytes, 1)) != 0:
        return False
    finalizer = weakref.finalize(buffer, cudart.cudaHostUnregister, address)
    finalizer.atexit = False  # CUDA may already be shut down when the process exits
    return True


def update_in_pieces(
    pieces: Iterable[Any], names: Sequence[str], update: Callable[[Any], Tensor]
) -> Tensor:
    """Update parameters whose state is in host memory, and return the number of lost updates.

    The host waits until the updated state is in host memory.

    Args:
        pieces: Pairs of `ParameterTensors` and `Hyperparameters`, with 1-D tensors of at most
            PIECE values. There must be at least one pair.
        names: Names of the tensors in host memory. All other tensors are on the device.
        update: Function that updates such a pair on the device in place, and returns the number of
            lost updates.
    """
    pieces = list(pieces)
    device = pieces[0][0].weight.device
    backend = torch.get_device_module(device)
    computing = backend.current_stream(device)
    incoming = backend.Stream(device)
    outgoing = backend.Stream(device)
    # Four bytes for each value, because FP32 is the largest dtype of the state.
    size = 4 * max(tensors.weight.numel() for tensors, _ in pieces)
    slots = torch.empty(SLOTS, len(names), size, dtype=torch.uint8, device=device)
    # One event for each slot. The memory of the slot may be overwritten after the event.
    emptied = [computing.record_event()] * SLOTS
    lost = []
    for number, (tensors, hyper) in enumerate(pieces):
        slot = number % SLOTS
        on_host = {
            name: tensor
            for name, tensor in tensors._asdict().items()
            if name in names and tensor is not None
        }
        # Not all names have a tensor, so the last parts of the slot may be unused.
        copies = {
            name: part[: tensor.nbytes].view(tensor.dtype)
            for part, (name, tensor) in zip(slots[slot], on_host.items(), strict=False)
        }
        host_tensors = list(on_host.values())
        device_tensors = list(copies.values())
        # Copy to the device, update, and copy back, each on its own stream.
        incoming.wait_event(emptied[slot])
        with backend.stream(incoming):
            torch._foreach_copy_(device_tensors, host_tensors, non_blocking=True)
        computing.wait_stream(incoming)
        lost.append(update((tensors._replace(**copies), hyper)))
        outgoing.wait_stream(computing)
        with backend.stream(outgoing):
            torch._foreach_copy_(host_tensors, device_tensors, non_blocking=True)
        emptied[slot] = outgoing.record_event()
    backend.synchronize(device)
    return torch.stack(lost).sum()
