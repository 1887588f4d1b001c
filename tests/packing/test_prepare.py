from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
from matplotlib.image import imread
from tokenizers import Tokenizer, normalizers

from foundation.errors import InputError
from packing import prepare as prepare_module
from packing import sources, token_log
from packing.arrow import PackWriter
from packing.chunks import Chunk, TextTemplate
from packing.manifest import read_manifest
from packing.packer import check_preparing
from packing.part_maker import PackedPart, PartTokens
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.sources import FileSource
from packing.store import open_packs
from packing.stream import PartStart
from packing.tokenizer import load_tokenizer
from packing.workers import Tokenized, TokenizerWorkers
from packing.writing import Arranged, split_documents


@pytest.fixture(scope="session")
def documents(documents: list[str]) -> list[str]:
    """A third of them, and all that are not ASCII."""
    return documents[:20] + documents[-3:]


@pytest.fixture
def corpus(tmp_path: Path, documents: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def settings(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> DataSettings:
    return DataSettings(packs=tmp_path / "packs", source=str(corpus), tokenizer=str(tokenizer_file), length=256, processes=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_documents(settings: DataSettings, split: str = "train") -> list[list[int]]:
    """The real tokens of every pack, a list a document piece."""
    packs, pieces = open_packs(settings, split), []
    for index in range(len(packs)):
        pack = packs[index]
        real = pack.input_ids[: pack.lengths.sum()]
        pieces += [part.tolist() for part in np.split(real, np.cumsum(pack.lengths)[:-1])]
    return pieces


def test_truncated_packs_decode_to_the_source_text(settings: DataSettings, documents: list[str]) -> None:
    settings = settings.model_copy(update={"shuffle": False})
    prepare(settings, progress=False)
    tokenizer = Tokenizer.from_file(settings.tokenizer)
    ids = [token for piece in read_documents(settings) for token in piece]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(text + "<|endoftext|>" for text in documents)


def test_best_fit_keeps_whole_documents_in_some_order(settings: DataSettings, documents: list[str]) -> None:
    settings = settings.model_copy(update={"packing": "best_fit", "length": 16384, "add_eos": False})
    prepare(settings, progress=False)
    tokenizer = Tokenizer.from_file(settings.tokenizer)
    assert sorted(map(tokenizer.decode, read_documents(settings))) == sorted(documents)
    assert read_manifest(settings.packs)["statistics"]["cut_documents"] == 0


def test_packs_do_not_depend_on_the_number_of_processes(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10_000)
    settings = settings.model_copy(update={"held_out": 0.1})
    folders = []
    for processes in (1, 2):
        folder = settings.packs.with_name(f"packs-{processes}")
        prepare(settings.model_copy(update={"packs": folder, "processes": processes}), progress=False)
        folders.append(contents(folder))
    assert folders[0] == folders[1]


# With a second argument it kills itself once it has saved its progress so many times.
PREPARE_IN_SMALL_STEPS = """
import os, signal, sys
from packing import sources, token_log
from packing.prepare import prepare
from packing.settings import DataSettings
left = int(sys.argv[2]) if len(sys.argv) > 2 else None
sources.CHUNK_BYTES, token_log._COMMIT_SECONDS = 10_000, 0.0 if left else 60.0
def watch(event, values):
    global left
    if left is not None and event == "os.rename" and str(values[1]).endswith("progress.json"):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
sys.addaudithook(watch)
prepare(DataSettings.model_validate_json(sys.argv[1]))
"""


def start_prepare(settings: DataSettings, *saves_before_kill: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE_IN_SMALL_STEPS, settings.model_dump_json(), *saves_before_kill]
    root = Path(prepare_module.__file__).parents[1]
    return subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("lengths_drawn")
def test_a_killed_run_goes_on_and_ends_with_the_bytes_of_an_unbroken_one(
    settings: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = settings.packs.with_name("packs.partial") / "progress.json"
    process = start_prepare(settings, "10")
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said
    counts = json.loads(progress.read_text())["counts"]
    assert not settings.packs.exists() and counts["chunks"] > 0 and not counts["complete"]

    resumed = start_prepare(settings)
    assert "going on after" in resumed.communicate()[1]
    unbroken = settings.model_copy(update={"packs": settings.packs.with_name("unbroken")})
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10_000)
    prepare(unbroken, progress=False)
    assert contents(settings.packs) == contents(unbroken.packs)
    assert not list(settings.packs.parent.glob("*.partial")) and not list(settings.packs.parent.glob("*.lock"))


def test_a_full_disk_is_told_and_what_was_tokenised_is_kept(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(token_log, "_COMMIT_SECONDS", 0.0)
    write_all = token_log._write_all

    def until_full(file: object, data: memoryview) -> None:
        if file.tell() > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(token_log, "_write_all", until_full)
        with pytest.raises(InputError, match=r"the disk is full; free some space .* kept in .*packs\.partial"):
            prepare(settings, progress=False)
    kept = json.loads((settings.packs.with_name("packs.partial") / "progress.json").read_text())["counts"]
    assert kept["tokens"] > 0 and not kept["complete"] and not settings.packs.exists()
    prepare(settings, progress=False)
    unbroken = settings.model_copy(update={"packs": settings.packs.with_name("unbroken")})
    prepare(unbroken, progress=False)
    assert contents(settings.packs) == contents(unbroken.packs)


def test_a_file_that_may_not_become_so_large_is_one_message(settings: DataSettings) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(InputError, match=r"packs: a file may not become so large here; raise `ulimit -f`"):
            prepare(settings, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not settings.packs.exists()


@pytest.fixture
def tokenised(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `settings` leave behind when they are stopped between tokenising and packing."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_write_packs", lambda *_: (_ for _ in ()).throw(InputError("stopped here")))
        with pytest.raises(InputError, match="stopped here"):
            prepare(settings, progress=False)
    return settings.packs.with_name("packs.partial")


def test_a_changed_source_starts_over_and_what_was_tokenised_is_moved_aside(
    settings: DataSettings, corpus: Path, tokenised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tokenised)
    tokenised.with_name("packs.partial.1").mkdir()  # moved aside earlier
    corpus.write_text('{"text": "other"}\n{"text": "text"}\n')
    prepare(settings)
    aside = tokenised.with_name("packs.partial.2")
    assert f"so this starts over; what was tokenised before is in {aside}" in capsys.readouterr().err
    assert contents(aside) == before
    assert read_manifest(settings.packs)["statistics"]["documents"] == 2


def test_a_saved_dataset_that_is_replaced_is_not_mixed_with_the_one_before(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`streaming: true` changes nothing in that it lies here."""
    saved = tmp_path / "saved"
    settings = settings.model_copy(update={"source": str(saved), "streaming": True})

    def save(word: str) -> None:
        shutil.rmtree(saved, ignore_errors=True)
        datasets.Dataset.from_dict({"text": [f"{word} {number}" for number in range(500)]}).save_to_disk(saved)

    def cut_short(source: sources.DatasetSource) -> Iterator[Chunk]:
        yield from islice(read(source), 40)
        raise InputError("stopped here")

    read = sources.DatasetSource.chunks
    monkeypatch.setattr(sources, "_ROWS", 10)
    save("old")
    with monkeypatch.context() as patch, pytest.raises(InputError, match="stopped here"):
        patch.setattr(sources.DatasetSource, "chunks", cut_short)
        prepare(settings, progress=False)
    assert settings.packs.with_name("packs.partial").exists()
    save("new")
    prepare(settings, progress=False)
    decode = Tokenizer.from_file(settings.tokenizer).decode
    text = " ".join(map(decode, read_documents(settings)))
    assert text.count("new") > 400 and "old" not in text


def test_files_that_change_while_they_are_read_give_no_packs(
    settings: DataSettings, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileSource.chunks

    def chunks(source: FileSource) -> Iterator[Chunk]:
        yield from read(source)
        with corpus.open("a") as file:
            file.write('{"text": "more"}\n')

    monkeypatch.setattr(FileSource, "chunks", chunks)
    with pytest.raises(InputError, match=f"{corpus.name}: has changed while it was read; wait"):
        prepare(settings, progress=False)
    monkeypatch.undo()
    assert not settings.packs.exists()
    prepare(settings, progress=False)
    assert read_documents(settings)


def test_what_was_moved_aside_is_no_source(settings: DataSettings, corpus: Path, tokenised: Path) -> None:
    tokenised.rename(tokenised.with_name("packs.partial.1"))
    folder = settings.model_copy(update={"source": str(corpus.parent), "format": "jsonl"})
    assert sources.open_source(folder).paths == [corpus]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "tetx"}, "text: text -> tetx"),
        ({"add_eos": False}, "add_eos: True -> False"),
        ({"source": "another.jsonl"}, "source: .*corpus.jsonl -> .*another.jsonl"),
    ],
)
def test_a_mistyped_setting_does_not_cost_what_was_tokenised(
    settings: DataSettings, corpus: Path, tokenised: Path, change: dict, message: str
) -> None:
    corpus.with_name("another.jsonl").write_text('{"text": "another"}\n')
    before = contents(tokenised)
    if "source" in change:
        change = {"source": str(corpus.with_name(change["source"]))}
    says = rf"packs\.partial: holds [\d,]+ tokens made with other settings \({message}\); set them back, .* or remove this one"
    with pytest.raises(InputError, match=says):
        prepare(settings.model_copy(update=change), progress=False)
    assert contents(tokenised) == before
    prepare(settings, progress=False)
    assert not tokenised.exists()


@pytest.mark.parametrize("kind", ["texts", "chats", "texts without an end"])
def test_packs_and_tokens_of_another_end_token_are_not_taken_for_the_same(
    settings: DataSettings, corpus: Path, kind: str
) -> None:
    folder = settings.packs.with_name("named")
    folder.mkdir()
    shutil.copy(settings.tokenizer, folder / "tokenizer.json")
    config, change = folder / "tokenizer_config.json", {"tokenizer": str(folder), "add_eos": kind == "texts"}
    if kind == "chats":
        corpus.write_text(json.dumps({"q": "one", "a": "two"}) + "\n")
        change |= {
            "prompt": "q",
            "response": "a",
            "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        }
    settings = DataSettings(**settings.model_dump() | change)
    config.write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(InputError, match="leaves none to train on"):
        prepare(settings.model_copy(update={"held_out": 0.999}), progress=False)
    for place in ("packs.partial: holds .* tokens", "packs: holds packs"):
        config.write_text('{"eos_token": "!"}')
        if kind == "texts without an end":
            prepare(settings, progress=False)
            continue
        with pytest.raises(InputError, match=rf"{place} .*eos_id: 0 -> 1"):
            prepare(settings, progress=False)
        config.write_text('{"eos_token": "<|endoftext|>"}')
        prepare(settings, progress=False)


def test_tokens_from_before_special_tokens_were_noted_are_still_good(settings: DataSettings, tokenised: Path) -> None:
    progress = json.loads((tokenised / "progress.json").read_text())
    assert progress["key"].pop("eos_id") == 0
    (tokenised / "progress.json").write_text(json.dumps(progress))
    prepare(settings, progress=False)
    assert not tokenised.exists()


def test_a_plan_takes_a_link_to_a_folder_that_is_not_there_yet_as_a_run_does(settings: DataSettings) -> None:
    settings.packs.symlink_to(settings.packs.with_name("elsewhere"))
    assert check_preparing(settings) == []
    prepare(settings, progress=False)
    assert settings.packs.is_symlink() and (settings.packs.with_name("elsewhere") / "packs.json").is_file()


def test_packs_behind_a_link_need_room_where_it_leads_to(settings: DataSettings) -> None:
    settings.packs.symlink_to("/proc/not/there")  # a file system without room
    with pytest.raises(InputError, match=r"the packs need 0\.00 GB and the disk has 0\.00 GB; what is tokenised is kept"):
        prepare(settings, progress=False)


@pytest.mark.parametrize("trained", [None, np.ones(400_000, bool)], ids=["all trained on", "masked"])
@pytest.mark.parametrize("length", [20, 1024])
def test_what_packs_take_on_disk_is_known_before_they_are_written(
    length: int, trained: np.ndarray | None, settings: DataSettings, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"length": length, "input_ids": "a", "labels": None if trained is None else "b"})
    log = PartTokens(settings.masks)
    log.append(Tokenized(np.zeros(400_000, np.uint32), np.full(10_000, 40), trained, 0, None, 0, None))
    arranged = Arranged.of(log, settings)
    with PackWriter(tmp_path / "packs", length) as writer:
        for _ in arranged.write(writer, "train", 0):
            pass
        writer.finish(settings={}, statistics={}, tokenizer=None)
    taken = sum(path.stat().st_size for path in (tmp_path / "packs").rglob("*.arrow"))
    assert arranged.bytes() <= taken < arranged.bytes() * 1.001 + 2000  # schema and record batches
    assert taken < PackedPart(PartStart(), 0, {}, arranged).bytes


def test_tokens_that_are_not_all_there_are_refused(settings: DataSettings, tokenised: Path) -> None:
    os.truncate(tokenised / "tokens.bin", 8)
    with pytest.raises(InputError, match=r"tokens\.bin: is not all there; remove .*packs\.partial to start over"):
        prepare(settings, progress=False)


def test_what_is_tokenised_serves_another_pack_length(
    settings: DataSettings, tokenised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(settings.model_copy(update={"length": 64}))
    assert "reading" not in capsys.readouterr().err


def test_skipping_a_bad_line_goes_on_after_what_was_tokenised_before_it(
    settings: DataSettings, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10_000)
    corpus.write_text(corpus.read_text() + "broken\n")
    with pytest.raises(InputError, match=r"set data\.on_bad_line: skip"):
        prepare(settings)
    skipping = settings.model_copy(update={"on_bad_line": "skip"})
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_write_packs", lambda *_: (_ for _ in ()).throw(InputError("stopped here")))
        with pytest.raises(InputError, match="stopped here"):
            prepare(skipping)
    assert "going on after" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"corpus\.jsonl:\d+: .*made with data\.on_bad_line: skip"):
        prepare(settings)
    prepare(skipping)
    assert read_manifest(settings.packs)["statistics"]["skipped_lines"] == 1


def test_uncommitted_tokens_are_cut_off(tmp_path: Path) -> None:
    log = token_log.TokenLog(tmp_path / "log", {"a": 1})
    with log.writing():
        pass
    (tmp_path / "log" / "tokens.bin").write_bytes(bytes(40))
    again = token_log.TokenLog(tmp_path / "log", {"a": 1})
    with again.writing():
        assert (tmp_path / "log" / "tokens.bin").stat().st_size == 0


def test_the_same_settings_find_their_packs_and_others_are_refused(
    settings: DataSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(settings, progress=False)
    before = contents(settings.packs)
    assert prepare(settings.model_copy(update={"processes": 2})) == settings.packs
    assert "already prepared" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"length: 256 -> 128.*seed: 42 -> 2"):
        prepare(settings.model_copy(update={"length": 128, "seed": 2}))
    assert contents(settings.packs) == before


def test_packs_of_a_source_that_has_grown_are_used_with_a_note(
    settings: DataSettings, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(settings, progress=False)
    with open(corpus, "a") as file:
        file.write('{"text": "more"}\n')
    assert prepare(settings) == settings.packs
    assert "remove them to prepare anew" in capsys.readouterr().err
    corpus.unlink()
    assert prepare(settings, progress=False) == settings.packs


def test_held_out_documents_are_whole_and_nowhere_else(settings: DataSettings, documents: list[str]) -> None:
    settings = settings.model_copy(update={"held_out": 0.2})
    prepare(settings, progress=False)
    tokenizer = Tokenizer.from_file(settings.tokenizer)
    texts = {}
    for split in ("train", "held_out"):
        ids = [token for piece in read_documents(settings, split) for token in piece]
        texts[split] = tokenizer.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert len(texts["held_out"]) == round(0.2 * len(documents))
    assert sorted(texts["train"] + texts["held_out"]) == sorted(documents)


def test_the_order_of_documents_is_the_seeds(settings: DataSettings) -> None:
    def split(**values: object) -> dict[str, np.ndarray]:
        return split_documents(1000, settings.model_copy(update={"held_out": 0.01, **values}))

    first, same, other = (split(seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert not np.array_equal(first["train"], other["train"]) and not np.array_equal(first["held_out"], other["held_out"])
    assert np.array_equal(split(seed=1, shuffle=False)["train"], np.sort(first["train"]))


@pytest.mark.usefixtures("lengths_drawn")
def test_hugging_face_datasets_loads_the_folder(settings: DataSettings, documents: list[str]) -> None:
    settings = settings.model_copy(update={"held_out": 0.1})
    prepare(settings, progress=False)
    loaded = datasets.load_from_disk(settings.packs)
    assert set(loaded) == {"train", "held_out"}
    assert loaded["train"][0]["input_ids"] == open_packs(settings, "train")[0].input_ids.tolist()
    assert imread(settings.packs / "lengths.png").shape[:2] == (540, 960)


def test_statistics_count_what_was_left_out(settings: DataSettings, corpus: Path) -> None:
    corpus.write_text('{"text": "abc"}\n{"text": ""}\nbroken\n{"text": null}\n{"text": "defg"}\n')
    prepare(settings.model_copy(update={"on_bad_line": "skip"}), progress=False)
    numbers = read_manifest(settings.packs)["statistics"]
    assert {key: numbers[key] for key in ("documents", "skipped_lines", "empty_documents", "packs")} == {
        "documents": 2, "skipped_lines": 1, "empty_documents": 2, "packs": 1,
    }  # fmt: skip
    assert "corpus.jsonl:3" in numbers["first_skipped"]


def test_a_document_of_no_tokens_is_empty_and_gets_no_end_token_either(settings: DataSettings, corpus: Path) -> None:
    tokenizer = Tokenizer.from_file(settings.tokenizer)
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.save(str(corpus.with_name("strips.json")))
    corpus.write_text('{"text": "a b"}\n{"text": "  \\n"}\n{"text": "b"}\n')
    for add_eos in (False, True):
        packs = corpus.with_name(f"packs-{add_eos}")
        change = {"tokenizer": str(corpus.with_name("strips.json")), "add_eos": add_eos, "packs": packs}
        prepare(settings.model_copy(update=change), progress=False)
        numbers = read_manifest(packs)["statistics"]
        assert (numbers["documents"], numbers["empty_documents"]) == (2, 1)
    corpus.write_text('{"text": " "}\n')
    with pytest.raises(InputError, match=r"no document with any text: 1 record without any"):
        prepare(settings.model_copy(update=change | {"packs": settings.packs}), progress=False)


def test_a_special_token_that_a_text_spells_out_becomes_its_id(settings: DataSettings, corpus: Path) -> None:
    corpus.write_text('{"text": "a<|endoftext|>b"}\n')
    prepare(settings.model_copy(update={"add_eos": False}), progress=False)
    a, b = (Tokenizer.from_file(settings.tokenizer).token_to_id(letter) for letter in "ab")
    assert read_documents(settings) == [[a, 0, b]]


def test_bos_and_eos_stand_where_they_are_asked_for(settings: DataSettings, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(settings.tokenizer)
    tokenizer.add_special_tokens(["<begin>"])
    (tmp_path / "named").mkdir()
    tokenizer.save(str(tmp_path / "named" / "tokenizer.json"))
    names = {"bos_token": {"content": "<begin>"}, "eos_token": "<|endoftext|>", "pad_token": None}
    (tmp_path / "named" / "tokenizer_config.json").write_text(json.dumps(names))
    settings = settings.model_copy(
        update={"tokenizer": str(tmp_path / "named"), "add_bos": True, "packing": "best_fit", "length": 16384}
    )
    prepare(settings, progress=False)
    assert all(piece[0] == 600 and piece[-1] == 0 for piece in read_documents(settings))
    assert read_manifest(settings.packs)["tokenizer"] | {"fingerprint": ""} == {
        "name": settings.tokenizer, "fingerprint": "", "vocab_size": 601, "bos_id": 600, "eos_id": 0, "pad_id": None,
    }  # fmt: skip


def test_a_fingerprint_is_of_the_tokenizer_and_not_of_its_file(tokenizer_file: Path, tmp_path: Path) -> None:
    content = json.loads(tokenizer_file.read_text())
    compact, truncating, other = (tmp_path / f"{name}.json" for name in ("compact", "truncating", "other"))
    compact.write_text(json.dumps(dict(reversed(content.items()))))
    limit = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    truncating.write_text(json.dumps(content | {"truncation": limit}))
    content["model"]["merges"].pop()
    other.write_text(json.dumps(content))
    same = {load_tokenizer(str(path)).fingerprint for path in (tokenizer_file, compact, truncating)}
    assert len(same) == 1 and load_tokenizer(str(other)).fingerprint not in same
    assert len(load_tokenizer(str(truncating)).tokenizer.encode("x " * 100)) > 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"add_bos": True}, r"data\.add_bos is true, but the tokenizer .* names no BOS token"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, r"data\.tokenizer: /nowhere/tokenizer\.json: no such file"),
        ({"source": "/nowhere/x.jsonl"}, r"data\.source: /nowhere/x\.jsonl: no such file"),
        ({"length": 2**40}, r"data\.length: 1,099,511,627,776, and .* has [\d,]+ tokens in all; set a shorter one"),
        ({"text": "body"}, r"corpus\.jsonl:1: no column `body`; the columns are: text"),
        ({"held_out": 0.999}, r"data\.held_out: 0\.999 of \d+ documents leaves none"),
        ({"source": None, "tokenizer": None}, r"data\.source and data\.tokenizer are not set"),
    ],
)
def test_what_cannot_be_prepared_is_refused_and_leaves_no_packs(settings: DataSettings, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare(settings.model_copy(update=change), progress=False)
    assert not settings.packs.exists()


def test_an_empty_source_is_refused(settings: DataSettings, corpus: Path) -> None:
    corpus.write_text("")
    with pytest.raises(InputError, match="no document with any text; the source is empty"):
        prepare(settings, progress=False)
    corpus.write_text("broken\n" * 3)
    with pytest.raises(InputError, match=r"3 malformed ones were skipped, the first at .*corpus\.jsonl:1"):
        prepare(settings.model_copy(update={"on_bad_line": "skip"}), progress=False)


def test_a_folder_with_something_else_is_left_alone(settings: DataSettings) -> None:
    settings.packs.mkdir()
    (settings.packs / "thesis.txt").write_text("the only copy")
    with pytest.raises(InputError, match="exists and holds no packs that were prepared"):
        prepare(settings, progress=False)
    assert (settings.packs / "thesis.txt").read_text() == "the only copy"


def test_two_processes_prepare_one_after_the_other(settings: DataSettings, corpus: Path) -> None:
    processes = [start_prepare(settings) for _ in range(2)]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("already prepared" in text for text in said) == 1
    assert sum("tokenising" in text for text in said) == 1


def test_workers_do_not_run_the_callers_script_again(settings: DataSettings, tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(f"print('script')\n{PREPARE_IN_SMALL_STEPS}")
    root = Path(prepare_module.__file__).parents[1]
    command = [sys.executable, str(script), settings.model_dump_json()]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True)
    assert done.stdout == "script\n" and settings.packs.exists()


def test_a_worker_that_is_killed_is_one_message_with_a_remedy(settings: DataSettings) -> None:
    def chunks(workers: TokenizerWorkers) -> Iterator[Chunk]:
        for number in range(100):
            if number == 20:
                workers._workers[0].kill()
            yield Chunk("jsonl", "corpus", number, b'{"text": "a"}')

    template = TextTemplate.parse("text")
    with (
        TokenizerWorkers(2, Path(settings.tokenizer), template, skip_bad=False, head=[], tail=[0]) as workers,
        pytest.raises(InputError, match=r"ended with signal 9 while working on corpus from \d+ on; .* data\.processes lower"),
    ):
        for result in workers.map(chunks(workers)):
            assert result.tokens[-1] == 0


def test_workers_begin_with_ctrl_c_blocked_and_the_parent_goes_on_without(
    settings: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the whole group, and an interpreter that is still importing would print a traceback."""
    monkeypatch.setattr("packing.workers.START", multiprocessing.get_context("spawn"))
    template = TextTemplate.parse("text")
    with TokenizerWorkers(1, Path(settings.tokenizer), template, skip_bad=False, head=[], tail=[]) as workers:
        workers._start()
        status = Path(f"/proc/{workers._workers[0].pid}/status").read_text()
        assert int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], 16) & 1 << signal.SIGINT - 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
