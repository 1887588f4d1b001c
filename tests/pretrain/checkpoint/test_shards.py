"""Files of a checkpoint, and sharded checkpoints over any number of processes."""

from __future__ import annotations

import hashlib
import math
import tempfile
from pathlib import Path

import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pretrain.checkpoint.checkpoint import checksums
from pretrain.checkpoint.format import (
    DTYPE_NAMES,
    ShardBlock,
    block_of,
    lay_out,
    load_tensors,
    write_tensors,
)
from pretrain.model.gradients import local_part
from tests.ranks import in_ranks


def test_the_library_reads_what_is_written_and_the_hash_is_the_files(tmp_path):
    tensors = {
        str(dtype): (torch.randint(0, 2, (3, 5)) * 3 - 1).t().to(dtype) for dtype in DTYPE_NAMES
    }
    tensors |= {"scalar": torch.tensor(3), "empty": torch.ones(2, 0, 4), "one": torch.ones(7, 1, 2)}
    entry, written = write_tensors(tmp_path / "file", tensors), (tmp_path / "file").read_bytes()
    assert (entry.size, entry.hashes) == (
        len(written),
        {"sha256": hashlib.sha256(written).hexdigest()},
    )
    loaded = load_file(tmp_path / "file")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(
            loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=8), st.integers(1, 4))
def test_replicas_are_shared_out(shapes, ranks):
    offer = {
        f"t{n}": ShardBlock("F32", shape, (0, 0), shape, 4 * math.prod(shape))
        for n, shape in enumerate(shapes)
    }
    index = lay_out("model", [offer] * ranks, dict.fromkeys(offer))
    load = [0] * ranks
    for name, block in offer.items():
        pieces = index[name].pieces
        assert [piece.shape for piece in pieces if math.prod(piece.shape)] == [block.shape] * (
            block.bytes > 0
        )
        for piece in pieces:
            load[int(piece.file.split("-")[1])] += block.bytes
    assert max(load) - min(load) <= max((block.bytes for block in offer.values()), default=0)


# ── Any number of processes to any other, in this process ─────────────────────────────────────────────────────────────────────


def as_rank(
    rank: int, mesh_shape: tuple[int, ...], placements: list[Placement], tensor: torch.Tensor
) -> torch.Tensor:
    """`tensor` as torch distributes it to `rank` of a group of that shape; a group without the other processes is enough."""
    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=math.prod(mesh_shape), store=FakeStore()
    )
    try:
        mesh = init_device_mesh("cpu", mesh_shape)
        return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
    finally:
        torch.distributed.destroy_process_group()


@st.composite
def topologies(draw: st.DrawFn, dimensions: int) -> tuple[tuple[int, ...], list[Placement]]:
    """Shards, replicas, or replicas of shards, over up to six processes."""
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2)]))
    placement = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, dimensions - 1)))
    placements = [draw(placement) for _ in mesh_shape]
    if len(placements) == 2:  # as HSDP lays a mesh out
        placements[0] = Replicate()
    return mesh_shape, placements


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_number_of_processes_load_what_any_other_number_has_saved(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    tensor = torch.randn(shape, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    (saved_mesh, saved_placements), (mesh, placements) = (
        data.draw(topologies(len(shape))) for _ in range(2)
    )

    parts = [
        as_rank(rank, saved_mesh, saved_placements, tensor) for rank in range(math.prod(saved_mesh))
    ]
    index = lay_out("model", [{"t": block_of(part)} for part in parts], {"t": None})
    with tempfile.TemporaryDirectory() as folder:
        for piece in index["t"].pieces:
            write_tensors(
                Path(folder, piece.file), {"t": local_part(parts[int(piece.file.split("-")[1])])}
            )
        written = sum(math.prod(piece.shape) for piece in index["t"].pieces)
        assert written == tensor.numel(), "replicas are written once"
        for rank in range(math.prod(mesh)):
            wanted = as_rank(rank, mesh, placements, tensor)
            found = as_rank(rank, mesh, placements, torch.full_like(tensor, 7))
            load_tensors(Path(folder), index, {"t": found})
            assert torch.equal(local_part(found), local_part(wanted))


def checksums_in_ranks(rank: int) -> list[dict[str, int]]:
    """Return checksums of replicas, of shards, and of replicas that differ by one bit."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): torch.randn(5, 3, generator=generator).to(dtype)
        for dtype in DTYPE_NAMES  # more rows than ranks, and not a multiple
    }
    tensors |= {"scalar": torch.tensor(-1.5), "one": torch.randn(1, 7, generator=generator)}
    mesh = init_device_mesh("cpu", (2,))
    shards = {
        name: distribute_tensor(
            tensor,
            mesh,
            [Shard(0)],
            src_data_rank=None,
        )
        for name, tensor in tensors.items()
        if tensor.dim()
    }
    broken = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in broken.values():
        tensor.view(-1).view(torch.uint8)[0] ^= rank
    return [checksums(each) for each in (tensors, shards, broken)]


def test_the_checksum_of_a_tensor_is_the_same_in_shards_and_not_if_a_rank_differs():
    (whole, shards, broken), second = in_ranks(checksums_in_ranks)
    assert [whole, shards, broken] == second, "all ranks judge alike"
    assert shards.items() <= whole.items() and len(shards) == len(whole) - 1
    assert all(broken[name] != checksum for name, checksum in whole.items())
    assert whole["scalar"] == 2**64 - 2**30 - 2**22, "the bits of -1.5 as a negative integer"
