"""Preparation packs every document, in an order that depends on the settings only.

An interrupted preparation continues with the same result.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.files import hash_of, write_json
from packing.arrow import MANIFEST, read_manifest
from packing.chunks import Tokens
from packing.pack_maker import PackMaker
from packing.prepare import holds_packs_of, prepare
from packing.records import CHATML, PLAIN
from packing.settings import DataSettings, StreamingSettings
from packing.sources import DatasetSource
from packing.store import folder_of, open_packs
from packing.token_log import TokenLog
from packing.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from pretrain.__main__ import main


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packing.sources.CHUNK_BYTES", 20_000)


def texts_in(settings: DataSettings, split: str = "train") -> list[str]:
    """Return the documents of the packs in order, split at their end tokens."""
    packs = open_packs(settings, split)
    ids = np.concatenate([packs[i].input_ids[: packs[i].lengths.sum()] for i in range(len(packs))])
    end = load_tokenizer(settings.tokenizer).end_of_text
    decode = Tokenizer.from_file(settings.tokenizer).decode
    return [decode(part) for part in np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]]


@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_packs_hold_every_document_once(
    held_out: float, settings: DataSettings, documents: list[str]
) -> None:
    settings = settings.model_copy(update={"held_out": held_out})
    prepare(settings, progress=False)
    train = texts_in(settings)
    held = texts_in(settings, "held_out") if held_out else []
    assert sorted(train + held) == sorted(documents) and train != documents
    assert len(held) == round(held_out * len(documents))
    statistics = read_manifest(settings.packs)["statistics"]
    assert statistics["documents"] == len(documents) and statistics["longest_document"] > 256


def test_columns_that_are_not_read_are_named(
    settings: DataSettings, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column may have a lone surrogate in its name."""
    corpus.write_text('{"text": "one two", "te\\ud83dxt": 1}\n{"text": "ein zwei drei", "id": 7}\n')
    prepare(settings)
    shown = "columns not read     id, te\\ud83dxt"
    assert read_manifest(settings.packs)["statistics"]["columns_not_read"] == "id, te\ud83dxt"
    assert shown in capsys.readouterr().err
    assert main(["inspect", str(settings.packs)]) == 0
    assert shown in capsys.readouterr().out


def test_documents_stay_in_their_split_if_the_source_grows(
    settings: DataSettings, corpus: Path, documents: list[str]
) -> None:
    """New documents come first, and every document of before occurs three times."""
    small = settings.model_copy(update={"held_out": 0.2})
    prepare(small, progress=False)
    held_out = {*texts_in(small, "held_out")}
    added = [f"{number} is a number" for number in range(len(documents) // 10)]
    lines = [json.dumps({"text": text}) + "\n" for text in (*added, *documents * 3)]
    corpus.write_text("".join(lines))
    grown = small.model_copy(update={"packs": settings.packs.with_name("grown")})
    prepare(grown, progress=False)
    held_out_later = {*texts_in(grown, "held_out")}
    assert not held_out_later & {*texts_in(grown)}
    growth = max(0, len(held_out_later) - len(held_out))
    assert len((held_out_later & {*documents}) - held_out) <= growth


def test_packs_and_progress_with_removed_keys_are_read(
    settings: DataSettings, corpus: Path, documents: list[str]
) -> None:
    text = corpus.read_text()
    corpus.write_text(text + '{"broken"\n')
    with pytest.raises(InputError, match=rf"corpus.jsonl:{len(documents) + 1}: "):
        prepare(settings, progress=False)
    progress = settings.packs.with_name(".packs.tokens") / "progress.json"
    content = json.loads(progress.read_text())
    content["counts"] |= {"skipped": 0, "first_skipped": None}
    progress.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"corpus.jsonl:{len(documents) + 1}: "):
        prepare(settings, progress=False)
    shutil.rmtree(progress.parent)
    corpus.write_text(text)
    prepare(settings, progress=False)
    manifest = read_manifest(settings.packs)
    manifest["settings"]["on_bad_line"] = "skip"
    write_json(settings.packs / MANIFEST, manifest | {"checksum": hash_of(manifest)})
    assert holds_packs_of(settings)


def test_a_source_that_changes_while_it_is_read_is_rejected(
    settings: DataSettings, corpus: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = TokenLog.append
    monkeypatch.setattr(
        TokenLog, "append", lambda log, result: (append(log, result), corpus.touch())
    )
    with pytest.raises(InputError, match=r"corpus.jsonl: the source was changed while it was read"):
        prepare(settings, progress=False)
    monkeypatch.undo()
    prepare(settings, progress=False)
    assert sorted(texts_in(settings)) == sorted(documents)


def chats_of(settings: DataSettings, corpus: Path, content: str = "word " * 30) -> DataSettings:
    """Return settings of 40 chats, each of which fits into a pack."""
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "So. " * 9}]
    corpus.write_text((json.dumps({"messages": chat}) + "\n") * 40)
    return settings.model_copy(update={"chat_template": "plain", "length": 192})


def test_chats_are_not_cut_unless_their_packs_or_the_settings_say_so(
    settings: DataSettings, corpus: Path, tmp_path: Path
) -> None:
    chats = chats_of(settings, corpus)
    for packing in (None, "best_fit"):
        prepare(chats.model_copy(update={"packing": packing}), progress=False)
    manifest = read_manifest(chats.packs)
    assert manifest["settings"]["packing"] == "best_fit"
    assert manifest["statistics"]["cut_documents"] == 0
    with pytest.raises(InputError, match="packing: best_fit -> truncate"):
        prepare(chats.model_copy(update={"packing": "truncate"}), progress=False)
    cut = chats.model_copy(update={"packing": "truncate", "packs": tmp_path / "cut"})
    prepare(cut, progress=False)
    prepare(cut.model_copy(update={"packing": None}), progress=False)
    assert read_manifest(cut.packs)["statistics"]["cut_documents"] > 0


def test_packs_of_an_earlier_chat_template_are_rejected(
    settings: DataSettings, corpus: Path, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    corpus.write_text(json.dumps({"messages": chat}) + "\n")
    folder = shutil.copytree(Path(str(settings.tokenizer)).parent, tmp_path / "tokenizer")
    of_tokenizer = {"tokenizer": str(folder), "packs": tmp_path / "other"}
    file = folder / "chat_template.jinja"
    for values in ({"chat_template": str(file)}, of_tokenizer):
        chats = settings.model_copy(update=values)
        file.write_text(PLAIN)
        for _ in range(2):
            prepare(chats, progress=False)
        file.write_text(CHATML.replace("<|im_end|>", "{{ eos_token }}"))
        with pytest.raises(InputError, match=r"other settings \(chat template: \w+ -> \w+\)"):
            prepare(chats, progress=False)
        file.unlink()
    kept = folder_of(chats) / file.name
    with pytest.raises(InputError, match=f"data.chat_template: {folder} has no template"):
        prepare(chats, progress=False)
    shutil.copy(kept, folder)
    prepare(chats, progress=False)
    plain = settings.model_copy(update={"chat_template": "plain", "packs": tmp_path / "plain"})
    for _ in range(2):
        prepare(plain, progress=False)


def test_packs_and_tokens_do_not_replace_other_files(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = tmp_path / "empty"
    current.mkdir()
    monkeypatch.chdir(current)
    for packs in (Path(""), current):
        with pytest.raises(InputError, match="the current folder"):
            prepare(settings.model_copy(update={"packs": packs}), progress=False)
    assert not list(tmp_path.glob(".*.tokens"))
    folder = tmp_path / ".packs.tokens"
    folder.mkdir()
    (folder / "tokens.bin").write_text("mine")
    with pytest.raises(InputError, match=r"has files, but no progress\.json"):
        prepare(settings, progress=False)
    (folder / "tokens.bin").rename(tmp_path / "mine")
    (folder / "tokens.bin").symlink_to(tmp_path / "mine")
    (folder / "progress.json").write_text(json.dumps({"key": {}, "counts": {}, "place": {}}))
    with pytest.raises(InputError, match="symbolic links"):
        prepare(settings, progress=False)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_changed_source_is_reported_at_every_start(
    settings: DataSettings,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_out = settings.model_copy(update={"held_out": 0.2})
    prepare(held_out)
    splits = read_manifest(settings.packs)["splits"]
    shown = dict(re.findall(r"^  (.*?) {2,}(.*)$", capsys.readouterr().err, re.M))
    assert shown["held out tokens"] == f"{splits['held_out']['tokens']:,}"
    modified = corpus.stat().st_mtime_ns

    def warned(settings: DataSettings = held_out) -> bool:
        prepare(settings)
        output = capsys.readouterr().err
        assert output.count("\n") == output.count("WARNING: the source has changed") <= 1
        return bool(output)

    assert not warned()
    corpus.touch()
    assert warned() and warned()
    os.utime(corpus, ns=(0, modified))
    assert not warned()
    corpus.write_text(corpus.read_text() + '{"text": "new"}\n')
    os.utime(corpus, ns=(0, modified))
    assert warned()
    corpus.unlink()
    assert warned()
    # A name like that of a dataset of the hub is not looked up.
    monkeypatch.chdir(corpus.parent)
    monkeypatch.setattr(DatasetSource, "_data", None)
    named = settings.model_copy(update={"source": "texts", "packs": Path("named")})
    Path("texts").mkdir()
    Path("texts/notes.txt").write_text("one two three")
    prepare(named, progress=False)
    shutil.rmtree("texts")
    assert warned(named)
    # Packs of earlier versions do not record their source.
    manifest = read_manifest(settings.packs)
    del manifest["statistics"]["source_identity"]
    write_json(settings.packs / MANIFEST, manifest | {"checksum": hash_of(manifest)})
    assert not warned()


def test_moved_packs_and_sources_count_as_unchanged(
    settings: DataSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("corpus.jsonl", "elsewhere.jsonl"):
        shutil.copy2(settings.source, tmp_path / "here" / name)
    monkeypatch.chdir(tmp_path / "here")
    for source in ("corpus.jsonl", "*.jsonl", "."):
        prepare(settings.model_copy(update={"source": source, "packs": Path("packs")}))
        (tmp_path / "here").rename(tmp_path / "there")
        monkeypatch.chdir(tmp_path / "there")
        capsys.readouterr()
        prepare(settings.model_copy(update={"source": source, "packs": Path("packs")}))
        assert "has changed" not in capsys.readouterr().err
        shutil.rmtree("packs")
        (tmp_path / "there").rename(tmp_path / "here")
        monkeypatch.chdir(tmp_path / "here")


def test_another_path_of_the_same_content_is_accepted(
    settings: DataSettings, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(settings, progress=False)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    copy = shutil.copytree(tokenizer_file.parent, tmp_path / "copy") / "tokenizer.json"
    vocabulary = json.loads(copy.read_text())
    copy.write_text(json.dumps(vocabulary | {"post_processor": None}, indent=7))
    for update in ({"source": "../corpus.jsonl"}, {"tokenizer": "../copy"}):
        prepare(settings.model_copy(update=update), progress=False)
    vocabulary["model"]["merges"].pop()
    copy.write_text(json.dumps(vocabulary))
    load_tokenizer.cache_clear()
    with pytest.raises(InputError, match=r"other settings \(tokenizer: \w{12} -> \w{12}\)"):
        prepare(settings.model_copy(update={"tokenizer": "../copy"}), progress=False)
    # The content of the tokenizer at the same path changes.
    other = settings.model_copy(update={"tokenizer": "../copy", "packs": tmp_path / "other"})
    prepare(other, progress=False)
    vocabulary["model"]["merges"].pop()
    copy.write_text(json.dumps(vocabulary))
    load_tokenizer.cache_clear()
    with pytest.raises(InputError, match=r"other settings \(tokenizer: \w{12} -> \w{12}\)"):
        prepare(other, progress=False)


def test_packs_on_a_full_disk_are_refused_with_a_remedy(
    settings: DataSettings, small_disk: Path
) -> None:
    prepare(settings, progress=False)
    size = sum(file.stat().st_size for file in settings.packs.rglob("*") if file.is_file())
    # The tokens of the packs fit on the disk, the packs do not fit beside them.
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(bytes(free - int(1.2 * size)))
    packs = settings.model_copy(update={"packs": small_disk / "packs"})
    with pytest.raises(InputError, match=r"packs: cannot be written: .*run the command again"):
        prepare(packs, progress=False)
    (small_disk / "ballast").unlink()
    prepare(packs, progress=False)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, like Lustre without its option `flock`."""

    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.filterwarnings("ignore:.*has no locks")
def test_without_locks_one_process_prepares_at_a_time(
    settings: DataSettings, documents: list[str], no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are refused. A second preparation, which starts after a chunk, ends the first."""
    append = TokenLog.append

    def append_beside_another(log: TokenLog, result: Tokens) -> None:
        append(log, result)
        monkeypatch.setattr(TokenLog, "append", append)
        TokenLog(log.folder, log.key)

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"first run `python -m pretrain prepare`"):
        prepare(settings, progress=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(TokenLog, "append", append_beside_another)
    with pytest.raises(InputError, match="another process prepares these packs too"):
        prepare(settings, progress=False)
    prepare(settings, progress=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    prepare(settings, progress=False)
    assert sorted(texts_in(settings)) == sorted(documents)


@pytest.mark.parametrize("streaming", [False, StreamingSettings(window=20_000)])
def test_tokens_are_kept_if_memory_runs_out(
    settings: DataSettings,
    streaming: bool | StreamingSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = settings.model_copy(update={"streaming": streaming})

    def arrange(*arguments: object) -> None:
        raise MemoryError("Unable to allocate 8.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(PackMaker, "arrange", arrange)
        with pytest.raises(InputError, match=r"Unable to allocate .*are kept in .*\.packs\.tokens"):
            prepare(settings, progress=False)
    progress = settings.packs.with_name(".packs.tokens") / "progress.json"
    documents = json.loads(progress.read_text())["counts"]["documents"]
    prepare(settings)
    assert f"continuing after document {documents:,}" in capsys.readouterr().err
    uninterrupted = settings.model_copy(update={"packs": tmp_path / "other"})
    prepare(uninterrupted, progress=False)
    fingerprints = {open_packs(data, "train").fingerprint for data in (settings, uninterrupted)}
    assert documents > 0 and len(fingerprints) == 1


def test_chatml_is_refused_if_the_tokenizer_lacks_its_tokens(
    settings: DataSettings, corpus: Path, documents: list[str], tmp_path: Path
) -> None:
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    corpus.write_text(json.dumps({"chat": chat}))
    chat_settings = settings.model_copy(update={"messages": "chat", "chat_template": "chatml"})
    options = "--special '<|im_start|>' --special '<|im_end|>'"
    with pytest.raises(InputError, match=rf"data.chat_template=plain.*{re.escape(options)}"):
        prepare(chat_settings, progress=False)
    special = ("<|im_start|>", "<|im_end|>")
    save_tokenizer(train_tokenizer(documents[:3], 400, special), tmp_path / "chats")
    prepare(chat_settings.model_copy(update={"tokenizer": str(tmp_path / "chats")}))
    assert open_packs(chat_settings, "train")[0].input_ids[0] == 1
    config = tmp_path / "chats/tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": None}))
    load_tokenizer.cache_clear()
    update = {"tokenizer": str(config.parent), "packs": tmp_path / "p", "chat_template": "plain"}
    with pytest.raises(InputError, match=r"the template uses `eos_token`, but .* has no EOS token"):
        prepare(chat_settings.model_copy(update=update), progress=False)
