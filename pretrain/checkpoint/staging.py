"""Host memory that a checkpoint is copied into before it is written, so that training goes on while the disk is busy."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from foundation.memory import free_memory
from foundation.units import GIB, memory

ALIGNMENT = 64  # bytes; a view in any dtype needs its width at most
SHARE = 0.8  # of the memory that is free: the rest is for who else works on the machine
Files = Mapping[str, Mapping[str, Tensor]]  # by file: the tensors in it by name, this process's part of each
_log = logging.getLogger(__name__)


def bytes_staged(files: Files) -> int:
    """Bytes of host memory that a copy of these tensors takes."""
    return sum(_rounded(tensor.nbytes) for tensors in files.values() for tensor in tensors.values())


def room_for(needed: int) -> bool:
    """Whether every process of this machine may take `needed` bytes of its memory."""
    return needed * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= SHARE * free_memory()


def gpu_of(files: Files) -> torch.device | None:
    """The device that these tensors lie on; None for a CPU's."""
    return next((tensor.device for group in files.values() for tensor in group.values() if tensor.is_cuda), None)


class Staging:
    """A copy of one checkpoint's tensors at a time, in memory that is kept and used again: to get it takes eight times as long as
    to copy into it. For tensors of a GPU it is pinned."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def reserve(self, needed: int, device: torch.device | None) -> bool:
        """Take `needed` bytes, for tensors of that GPU if it is given, ahead of the first copy; from any thread, while nobody
        copies. Returns whether they are there: a limit of the process (`ulimit -v`) may leave it less than is free."""
        if self.holds(needed):
            return True
        self._memory = None  # gives it back first
        try:
            if device is None:
                self._memory = torch.zeros(needed, dtype=torch.uint8)  # written to, so that the pages are there
            else:
                with torch.cuda.device(device):  # threads start on device 0: pinning there opens a context on another rank's
                    self._memory = _pinned(needed)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
        return self.holds(needed)

    def holds(self, needed: int) -> bool:
        """Whether a copy of `needed` bytes takes no memory more."""
        return self._memory is not None and self._memory.numel() >= needed

    def copy(self, files: Files) -> dict[str, dict[str, Tensor]]:
        """The tensors as they are now, on the host; valid until the next copy."""
        device = gpu_of(files)
        self.reserve(bytes_staged(files), device)
        copies: dict[str, dict[str, Tensor]] = {}
        start = 0
        for file, group in files.items():
            for name, tensor in group.items():
                place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies.setdefault(file, {})[name] = place.copy_(tensor.detach(), non_blocking=True)
                start += _rounded(tensor.nbytes)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _rounded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pinned(count: int) -> Tensor:
    """`count` bytes, pinned. Registered and not taken from torch's allocator, which rounds 20 GiB up to 32."""
    buffer = torch.zeros(count, dtype=torch.uint8)  # written to: CUDA, which others wait for meanwhile, finds the pages there
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    if count and int(cudart.cudaHostRegister(address, count, 1)) != 0:
        _log.warning("%s of host memory cannot be pinned; a save stops training for longer", memory(count / GIB))
    elif count:
        weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False  # CUDA may be gone by then
    return buffer
