"""Sources and packs that somebody, or a disk, has made up: nothing is missing silently, nothing is waited for or unpacked."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer, models

from foundation.errors import InputError
from packing.arrow import ArrowPacks, Pack, PackWriter
from packing.chunks import TextTemplate, read_chunk
from packing.mds import MDSReader, read_index
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.sources import open_source
from packing.token_bin import TokenBin
from packing.token_log import TokenLog
from packing.tokenizer import load_tokenizer
from tests.fuzz.damage import stand_in
from tests.fuzz.files import forge_packs

MDS = Path(__file__).parents[1] / "data" / "mds"
LINE = b'{"text": "one two three"}\n'


def texts_of(path: Path, **settings: object) -> tuple[list[str], int, str | None]:
    """The documents that `prepare` would tokenise, how many were skipped, and where the first of these is."""
    data = DataSettings(packs="/nowhere/packs", source=str(path), tokenizer="x", **settings)
    template, skip = TextTemplate.parse(data.text), data.on_bad_line == "skip"
    found = [read_chunk(chunk, template, skip) for chunk in open_source(data).chunks()]
    first = next((texts.first_skipped for texts in found if texts.first_skipped), None)
    return [text for texts in found for text in texts.documents], sum(texts.skipped for texts in found), first


# ── Text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".txt.gz"])
def test_an_archive_without_a_byte_is_not_taken_for_one_without_text(suffix: str, tmp_path: Path):
    (tmp_path / f"b{suffix}").touch()
    with pytest.raises(InputError, match=rf"b{suffix}: cannot be read: it is empty, which no {Path(suffix).suffix} file is"):
        texts_of(tmp_path)


@pytest.mark.parametrize("kind, says", [("dead link", "is a dead link"), ("fifo", "is no file"), ("socket", "is no file")])
def test_what_would_be_left_out_of_a_source_folder_silently_is_refused(kind: str, says: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / ".hidden").symlink_to("nowhere")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.jsonl").symlink_to("../a.jsonl")
    assert len(texts_of(tmp_path)[0]) == 2, "a link to a file is that file"
    stand_in(tmp_path / "inner" / "c.jsonl", kind)
    with pytest.raises(InputError, match=rf"data.source: .*inner/c.jsonl: {says}; put the text itself there"):
        texts_of(tmp_path)


def test_a_link_to_a_folder_in_a_source_is_refused(tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "more").mkdir()
    for folder in ("source", "more"):
        (tmp_path / folder / "a.jsonl").write_bytes(LINE)
    (tmp_path / "source" / "link").symlink_to(tmp_path / "more")
    with pytest.raises(InputError, match=r"source/link: is a link to a folder; put the text itself there"):
        texts_of(tmp_path / "source")


@pytest.mark.parametrize("name", [b"caf\xe9.jsonl", b"caf\xe9.txt", b"caf\xe9.parquet", b"caf\xe9/a.txt"])
def test_a_file_whose_name_is_not_utf8_is_refused_where_it_would_be_read(name: bytes, tmp_path: Path):
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(InputError, match=r"data.source: .*caf\udce9.*: its name is text that is not UTF-8.*; rename it"):
        texts_of(tmp_path)
    path.rename(path.with_suffix(".png"))
    (tmp_path / "b.jsonl").write_bytes(LINE)
    assert len(texts_of(tmp_path)[0]) == 1, "what is not read may be called anything"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst"])
def test_a_text_file_that_is_too_long_for_one_document_is_refused_also_where_it_is_packed(name: str, tmp_path: Path):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**28 + 1)
    if name.endswith(".zst"):
        (tmp_path / name).write_bytes(zstandard.compress(bytes(2**28 + 1)))
    with pytest.raises(InputError, match=rf"{name}: a text file is one document, and 256 MiB is too long for one; split it"):
        texts_of(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "socket", "/dev/zero"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_a_source_that_is_a_pipe_or_a_device_is_refused_without_waiting(kind: str, name: str, tmp_path: Path):
    stand_in(tmp_path / name, kind)
    with pytest.raises(InputError, match=rf"data.source: .*{name}: is no file or folder but a pipe, socket or device"):
        texts_of(tmp_path / name)


def test_a_parquet_string_that_is_not_utf8_is_named_by_row_and_column_and_can_be_skipped(tmp_path: Path):
    column = pa.array([b"one", b"tw\xff", b"three"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(
        InputError, match=r"a.parquet, row 1: column `text` is not UTF-8 .*at byte 2.*; or set data.on_bad_line: skip"
    ):
        texts_of(tmp_path / "a.parquet")
    documents, skipped, first = texts_of(tmp_path / "a.parquet", on_bad_line="skip")
    assert documents == ["one", "three"] and skipped == 1 and "row 1" in first


def test_a_flipped_bit_of_a_parquet_page_with_a_checksum_is_found(tmp_path: Path):
    path = tmp_path / "a.parquet"
    texts = [f"document {number} of many" for number in range(200)]
    pq.write_table(pa.table({"text": texts}), path, write_page_checksum=True, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    at = whole.index(b"document 77 of")
    path.write_bytes(whole[:at] + b"D" + whole[at + 1 :])
    with pytest.raises(InputError, match=r"a.parquet: cannot be read: .*CRC"):
        texts_of(path)


def test_a_dataset_that_is_a_script_is_refused_and_its_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("open('executed', 'w')\n")
    with pytest.raises(InputError, match=r"data.source: script: neither a file or folder here nor a dataset that can be loaded"):
        texts_of(Path("script"), format="dataset")
    assert not (tmp_path / "executed").exists()


def test_a_list_of_records_nested_without_end_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"a.json: not valid JSON: nested deeper than 64"):
        texts_of(tmp_path / "a.json")


@pytest.mark.parametrize("content", ['{"eos_token": [1]}', "[]", "[" * 9999, '{"eos_token": {"content": 3}}'])
def test_a_tokenizer_config_of_odd_values_is_refused(content: str, tmp_path: Path):
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer_config.json: "):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "model, message",
    [
        (models.BPE(), r"data\.tokenizer: .*odd\.json: has no tokens; fetch or train it again"),
        (
            models.WordLevel({"zzz": 0}, unk_token="?"),
            r"corpus\.jsonl: from record 1 on is a text .* cannot encode: .*Missing \[UNK\]",
        ),
        (
            models.Unigram([("a", -1.0)]),
            r"corpus\.jsonl: from record 1 on is a text that .* unknown token .*; name one \(data\.tok",
        ),
    ],
    ids=["empty", "words", "unigram"],
)
def test_a_tokenizer_that_cannot_encode_the_text_is_one_message(model: models.Model, message: str, tmp_path: Path):
    Tokenizer(model).save(str(tmp_path / "odd.json"))
    (tmp_path / "corpus.jsonl").write_bytes(LINE)
    made = {"packs": tmp_path / "packs", "source": str(tmp_path / "corpus.jsonl"), "tokenizer": str(tmp_path / "odd.json")}
    with pytest.raises(InputError, match=message):
        prepare(DataSettings(**made, add_eos=False, processes=1), progress=False)


# ── Arrow ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    with PackWriter(tmp_path / "packs", 8) as writer:
        for _ in range(3):
            writer.add("train", Pack(np.arange(8, dtype=np.uint32), np.array([3, 4], np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return tmp_path / "packs"


def manifest_of(packs: Path) -> dict:
    manifest = json.loads((packs / "packs.json").read_text())
    del manifest["checksum"]
    return manifest


@pytest.mark.parametrize(
    "change, says",
    [
        ({"length": "8"}, "`length`: Input should be a valid integer"),
        ({"length": 2**40}, "`length`: "),
        ({"splits": {"train": []}}, "`splits.train`: "),
        ({"splits": {}}, "`splits`: "),
        ({"tokenizer": {"vocab_size": "x"}}, "`tokenizer.vocab_size`: "),
        ({"files": [{"name": "../x", "bytes": 1, "sha256": ""}]}, r"`files.0.name`: '../x' lies outside its folder"),
    ],
)
def test_a_forged_manifest_of_packs_is_refused_with_the_key(change: dict, says: str, packs: Path):
    forge_packs(packs, manifest_of(packs) | change)
    with pytest.raises(InputError, match=rf"packs.json: not a manifest of packs: {says}"):
        ArrowPacks(packs)


def test_packs_whose_files_lie_elsewhere_are_refused(packs: Path, tmp_path: Path):
    manifest = manifest_of(packs)
    name = manifest["splits"]["train"]["files"][0]["name"]
    shutil.move(packs / "train" / name, tmp_path / name)
    (packs / "train" / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=r"a link that leads outside its folder"):
        ArrowPacks(packs)
    manifest["splits"]["train"]["files"][0]["name"] = f"../../{name}"
    forge_packs(packs, manifest)
    with pytest.raises(InputError, match="lies outside its folder"):
        ArrowPacks(packs)


@pytest.mark.parametrize("lengths", [[3, 6], [0, 8], [-1, 4], []])
def test_impossible_document_lengths_of_forged_packs_are_refused_where_they_are_read(lengths: list[int], packs: Path):
    path = packs / "train" / "data-00000-of-00001.arrow"
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        table, schema = stream.read_all(), stream.schema
    column = pa.array([[3, 4], lengths, [3, 4]], pa.list_(pa.int32()))
    with pa.ipc.new_stream(pa.OSFile(str(path), "wb"), schema) as writer:
        writer.write_table(pa.table([table["input_ids"], column, table["first_position"]], schema=schema))
    manifest = manifest_of(packs)
    manifest["splits"]["train"]["files"][0] |= {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    forge_packs(packs, manifest)
    forged = ArrowPacks(packs)
    for read in (forged.__getitem__, forged.lengths):
        with pytest.raises(InputError, match=r"documents of lengths that make no packs of 8 tokens"):
            read(0)


# ── MDS ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change, says",
    [
        ({"column_encodings": ["ndarray:uint22"] * 3}, "'ndarray:uint22' names no dtype of an array"),
        ({"samples": "3"}, "`0.samples`: "),
        ({"column_names": [1, 2, 3]}, "`0.column_names.0`: "),
        ({"column_sizes": None}, "`0.column_sizes`: "),
        ({"raw_data": {"basename": "x", "bytes": -1, "hashes": {}}}, "`0.raw_data.bytes`: "),
        ({"raw_data": {"basename": "/etc/passwd", "bytes": 1, "hashes": {}}}, "'/etc/passwd' lies outside its folder"),
    ],
)
def test_a_forged_index_is_refused_with_the_key(change: dict, says: str, tmp_path: Path):
    folder = shutil.copytree(MDS / "reference", tmp_path / "mds")
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=rf"index.json: not an MDS index: .*{says}"):
        read_index(folder)


def test_a_zstd_bomb_is_not_unpacked(tmp_path: Path):
    """256 MiB of zeros in a few KiB, under an index that says 100 bytes, where no file may grow beyond 8 MiB."""
    (tmp_path / "s.mds.zstd").write_bytes(zstandard.ZstdCompressor().compress(bytes(2**28)))
    shard = {"version": 2, "format": "mds", "compression": "zstd", "samples": 1, "hashes": []}
    shard |= {"column_names": ["x"], "column_encodings": ["int"], "column_sizes": [8]}
    shard["raw_data"] = {"basename": "s.mds", "bytes": 100, "hashes": {}}
    shard["zip_data"] = {"basename": "s.mds.zstd", "bytes": (tmp_path / "s.mds.zstd").stat().st_size, "hashes": {}}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**23, before[1]))
    try:
        with pytest.raises(InputError, match="damaged: what it decompresses to is not what was written"):
            MDSReader([tmp_path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(os.listdir(tmp_path)) == ["index.json", "s.mds.zstd"]


# ── Token .bin ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    np.arange(64, dtype="<u2").tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


@pytest.mark.parametrize(
    "meta",
    [
        b"\x80\x04r\xff\xff\xff\x7f.",  # a memo's slot beyond two thousand million
        b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",  # a bytearray of a TiB
        pickle.dumps((1, 2)),
        pickle.dumps({"vocab_size": 2**70}),
        pickle.dumps({"vocab_size": True}),
        pickle.dumps(Path("x")),
        b"I" + b"9" * 5000 + b"\n.",
        b"(" * 100_000,
    ],
)
def test_a_damaged_or_forged_meta_pkl_is_refused_without_taking_memory(meta: bytes, token_file: Path):
    (token_file.parent / "meta.pkl").write_bytes(meta)
    with pytest.raises(InputError, match=r"meta.pkl: "):
        TokenBin(token_file, 8)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_meta_pkl_as_nanogpt_writes_it_is_read_in_every_protocol(protocol: int, token_file: Path):
    meta = {"vocab_size": 65, "itos": {i: chr(i) for i in range(300)}, "stoi": {chr(i): i for i in range(300)}, "x": [1.5, None]}
    (token_file.parent / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    assert TokenBin(token_file, 8).tokenizer == {"vocab_size": 65}


@pytest.mark.parametrize("name", ["meta.json", "meta.pkl", "train.bin.sha256"])
def test_a_pipe_beside_a_token_file_is_not_waited_for(name: str, token_file: Path):
    os.mkfifo(token_file.parent / name)
    with pytest.raises(InputError, match=rf"{name}: cannot be read.*it is a pipe"):
        TokenBin(token_file, 8)


def test_a_pack_that_is_a_thousand_times_its_file_is_refused(token_file: Path):
    with pytest.raises(InputError, match=r"fewer tokens than one pack of `data.length: 1099511627776`"):
        TokenBin(token_file, 2**40)
    assert len(TokenBin(token_file, 100)) == 1, "a short file makes one pack"


# ── What preparing leaves behind ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", ['{"counts": {"documents": "many"}}', '{"counts": {"documents": 1}, "key": 3}', "[]", "{"])
def test_a_damaged_note_of_what_is_tokenised_is_refused_and_kept(content: str, tmp_path: Path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "progress.json").write_text(content)
    with pytest.raises(InputError, match=r"progress.json: .*remove .*log to start over"):
        TokenLog(tmp_path / "log", {})
    assert (tmp_path / "log" / "progress.json").read_text() == content


def test_a_folder_of_somebody_elses_where_tokens_would_go_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis.tex is not ours"):
        TokenLog(tmp_path / "log", {})
    assert (tmp_path / "log" / "thesis.tex").read_text() == "years of work"


def test_a_gzip_bomb_of_lines_is_read_a_chunk_at_a_time(tmp_path: Path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINE * 200_000, 1))
    data = DataSettings(packs="/nowhere/packs", source=str(tmp_path / "a.jsonl.gz"), tokenizer="x")
    first = next(open_source(data).chunks())
    assert len(first.payload) < 2**21


def test_a_bit_that_renames_a_column_in_an_index_does_not_leave_the_column_out(tmp_path: Path):
    """An index.json has no hash of its own; the shards hold a copy of what it says of their columns."""
    folder = shutil.copytree(MDS / "reference", tmp_path / "mds")
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace("attention_mask", "attentioN_mask", 1))
    with pytest.raises(InputError, match=r"shard.00000.mds: has other columns than index.json says"):
        MDSReader([folder])
