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
    Piece,
    block_of,
    lay_out,
    load_tensors,
    write_tensors,
)
from pretrain.model.gradients import local_part
from tests.ranks import in_ranks


def test_safetensors_reads_the_files_and_their_hash_is_recorded(tmp_path):
    tensors = {
        str(dtype): (torch.randint(0, 2, (3, 5)) * 3 - 1).t().to(dtype) for dtype in DTYPE_NAMES
    }
    tensors |= {"scalar": torch.tensor(3), "empty": torch.ones(2, 0, 4), "one": torch.ones(7, 1, 2)}
    record = write_tensors(tmp_path / "file", tensors)
    written = (tmp_path / "file").read_bytes()
    assert record.size == len(written)
    assert record.hashes == {"sha256": hashlib.sha256(written).hexdigest()}
    loaded = load_file(tmp_path / "file")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(
            loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=8), st.integers(1, 4))
def test_replicas_share_the_writing_evenly(shapes, ranks):
    tensors = {f"t{n}": torch.empty(shape) for n, shape in enumerate(shapes)}
    offer = {name: Piece("", (0, 0), tuple(tensor.shape)) for name, tensor in tensors.items()}
    index = lay_out("model", tensors, [offer] * ranks, dict.fromkeys(offer))
    load = [0] * ranks
    for name, tensor in tensors.items():
        pieces = index[name].pieces
        assert [piece.shape for piece in pieces if math.prod(piece.shape)] == [tensor.shape] * (
            tensor.nbytes > 0
        )
        for piece in pieces:
            load[int(piece.file.split("-")[1])] += tensor.nbytes
    assert max(load) - min(load) <= max((tensor.nbytes for tensor in tensors.values()), default=0)


# ── From any number of processes to any other, simulated in this process ──


def as_rank(
    rank: int, mesh_shape: tuple[int, ...], placements: list[Placement], tensor: torch.Tensor
) -> torch.Tensor:
    """Return `tensor` as torch distributes it to `rank` of a mesh of this shape.

    A fake process group suffices, without the other processes.
    """
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
    """Draw shards, replicas, or replicas of shards, over up to six processes."""
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2)]))
    placement = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, dimensions - 1)))
    placements = [draw(placement) for _ in mesh_shape]
    if len(placements) == 2:  # the mesh of HSDP
        placements[0] = Replicate()
    return mesh_shape, placements


Topology = tuple[tuple[int, ...], list[Placement]]


def assert_loaded(tensor: torch.Tensor, saved: Topology, target: Topology) -> None:
    """Save `tensor` in one topology and assert that all ranks of another load their parts."""
    parts = [as_rank(rank, *saved, tensor) for rank in range(math.prod(saved[0]))]
    index = lay_out("model", {"t": tensor}, [{"t": block_of(part)} for part in parts], {"t": None})
    with tempfile.TemporaryDirectory() as folder:
        for piece in index["t"].pieces:
            part = local_part(parts[int(piece.file.split("-")[1])])
            write_tensors(Path(folder, piece.file), {"t": part})
        written = sum(math.prod(piece.shape) for piece in index["t"].pieces)
        assert written == tensor.numel(), "replicas are written once"
        for rank in range(math.prod(target[0])):
            expected = as_rank(rank, *target, tensor)
            loaded = as_rank(rank, *target, torch.full_like(tensor, 7))
            load_tensors(Path(folder), index, {"t": loaded})
            assert torch.equal(local_part(loaded), local_part(expected))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_checkpoint_is_loaded_by_any_number_of_processes(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    tensor = torch.randn(shape, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    assert_loaded(tensor, data.draw(topologies(len(shape))), data.draw(topologies(len(shape))))


def test_parts_before_those_of_a_rank_are_not_loaded():
    """The second of two ranks has rows 4 to 6, and the first of five has saved rows 0 and 1."""
    assert_loaded(torch.randn(7), ((5,), [Shard(0)]), ((2,), [Shard(0)]))


def checksums_in_ranks(rank: int) -> list[dict[str, int]]:
    """Return checksums of replicas, of shards, and of replicas that differ by one bit."""
    generator = torch.Generator().manual_seed(0)
    # The number of rows is larger than that of ranks, and not a multiple of it.
    tensors = {
        str(dtype): torch.randn(5, 3, generator=generator).to(dtype) for dtype in DTYPE_NAMES
    }
    tensors |= {"scalar": torch.tensor(-1.5), "one": torch.randn(1, 7, generator=generator)}
    mesh = init_device_mesh("cpu", (2,))
    shards = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in tensors.items()
        if tensor.dim()
    }
    broken = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in broken.values():
        tensor.view(-1).view(torch.uint8)[0] ^= rank
    return [checksums(tensors), checksums(shards), checksums(broken)]


def test_checksums_are_the_same_in_shards_and_differ_if_a_rank_differs():
    (replicas, shards, broken), second_rank = in_ranks(checksums_in_ranks)
    assert [replicas, shards, broken] == second_rank, "all ranks have the same checksums"
    assert shards.items() <= replicas.items()
    assert len(shards) == len(replicas) - 1
    assert all(broken[name] != checksum for name, checksum in replicas.items())
    assert replicas["scalar"] == 2**64 - 2**30 - 2**22, "the bits of -1.5 as a negative integer"


def test_checksums_differ_if_values_are_in_each_others_place(monkeypatch):
    tensor = torch.randn(6, 4)
    expected = checksums({"t": tensor})
    for moved in (tensor.roll(3, 0), tensor.roll(1), tensor.T.reshape(6, 4)):
        assert checksums({"t": moved}) != expected
    monkeypatch.setattr("pretrain.checkpoint.checkpoint.PIECE", 5)
    assert checksums({"t": tensor}) == expected
