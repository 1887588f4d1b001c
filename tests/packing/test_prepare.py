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
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.files import hash_of, write_json
from packing import workers
from packing.arrow import MANIFEST, read_manifest
from packing.chunks import Tokens
from packing.pack_maker import PackMaker
from packing.prepare import prepare
from packing.records import CHATML, PLAIN
from packing.settings import DataSettings, StreamingSettings
from packing.sources import DatasetSource
from packing.store import open_packs
from packing.token_log import TokenLog
from packing.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from packing.workers import start_worker
from pretrain.__main__ import main
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packing.sources.CHUNK_BYTES", 20_000)


def texts_in(settings: DataSettings, split: str = "train") -> list[str]:
    """Return the documents of the packs in order, split at their end tokens."""
    packs = open_packs(settings, split)
    ids = np.concatenate([pack.input_ids[: pack.lengths.sum()] for pack in packs])
    end = load_tokenizer(settings.tokenizer).end_of_text
    decode = Tokenizer.from_file(settings.tokenizer).decode
    return [decode(part) for part in np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]]


def packs_of(settings: DataSettings, **changes: object) -> DataSettings:
    changed = settings.model_copy(update=changes)
    prepare(changed, progress=False)
    return changed


@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_packs_hold_every_document_once(
    held_out: float, settings: DataSettings, documents: list[str]
) -> None:
    settings = packs_of(settings, held_out=held_out)
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
    assert shown in capsys.readouterr().err
    assert main(["inspect", str(settings.packs)]) == 0
    assert shown in capsys.readouterr().out


def test_documents_stay_in_their_split_if_the_source_grows(
    settings: DataSettings, corpus: Path, documents: list[str]
) -> None:
    """New documents come first, and every document of before occurs three times."""
    small = packs_of(settings, held_out=0.2)
    held_out = {*texts_in(small, "held_out")}
    added = [f"{number} is a number" for number in range(len(documents) // 10)]
    lines = [json.dumps({"text": text}) + "\n" for text in (*added, *documents * 3)]
    corpus.write_text("".join(lines))
    grown = packs_of(small, packs=settings.packs.with_name("grown"))
    held_out_later = {*texts_in(grown, "held_out")}
    assert not held_out_later & {*texts_in(grown)}
    growth = max(0, len(held_out_later) - len(held_out))
    assert len((held_out_later & {*documents}) - held_out) <= growth


def test_progress_with_removed_keys_is_read(settings: DataSettings, corpus: Path) -> None:
    corpus.write_text(corpus.read_text() + '{"broken"\n')
    progress = settings.packs.with_name(".packs.tokens") / "progress.json"
    for _ in range(2):
        with pytest.raises(InputError, match=r"corpus.jsonl:\d+: "):
            prepare(settings, progress=False)
        content = json.loads(progress.read_text())
        content["counts"] |= {"skipped": 0, "first_skipped": None}
        progress.write_text(json.dumps(content))


def test_a_source_that_changes_while_it_is_read_is_rejected(
    settings: DataSettings, corpus: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = TokenLog.append

    def append_and_touch(log: TokenLog, result: Tokens) -> None:
        append(log, result)
        corpus.touch()

    monkeypatch.setattr(TokenLog, "append", append_and_touch)
    with pytest.raises(InputError, match=r"corpus.jsonl: the source was changed while it was read"):
        prepare(settings, progress=False)
    monkeypatch.undo()
    prepare(settings, progress=False)
    assert sorted(texts_in(settings)) == sorted(documents)


@pytest.fixture
def here(settings: DataSettings, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    """Settings of 9 documents, a tokenizer with a chat template, and packs in this folder."""
    monkeypatch.chdir(corpus.parent)
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:9]))
    shutil.copytree(Path(str(settings.tokenizer)).parent, "tokenizer")
    Path("tokenizer", "chat_template.jinja").write_text(PLAIN)
    paths = {"source": "corpus.jsonl", "tokenizer": "tokenizer", "packs": Path("packs")}
    return settings.model_copy(update=paths)


def change_tokenizer(**values: Any) -> None:
    file = Path("tokenizer/tokenizer.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=7))


def drop_a_merge() -> None:
    model = json.loads(Path("tokenizer/tokenizer.json").read_text())["model"]
    change_tokenizer(model=model | {"merges": model["merges"][:-1]})


def rewrite_at_the_same_time() -> None:
    times = Path("corpus.jsonl").stat()
    Path("corpus.jsonl").write_text('{"text": "new"}\n')
    os.utime("corpus.jsonl", ns=(0, times.st_mtime_ns))


def move() -> None:
    here = Path.cwd()
    os.chdir(here.rename(here.with_name(f"{here.name}-moved")))


def record(**changes: dict[str, Any]) -> None:
    """Change sections of the manifest as an earlier version wrote it. None removes a key."""
    manifest = read_manifest(Path("packs"))
    for section, values in changes.items():
        kept = manifest[section] | values
        manifest[section] = {key: kept[key] for key in kept if kept[key] is not None}
    write_json(Path("packs", MANIFEST), manifest | {"checksum": hash_of(manifest)})


def keep_files() -> None:
    """Change no file."""


def lose_source_and_its_identity() -> None:
    record(statistics={"source_identity": None})
    Path("corpus.jsonl").unlink()


def change_template() -> None:
    Path("tokenizer/chat_template.jinja").write_text(CHATML.replace("im_end", "endoftext"))


CHANGED = "WARNING: the source has changed since"
SAME = ""
OTHER_TOKENIZER = r"other settings \(tokenizer: \w{12} -> \w{12}\)"
OTHER_TEMPLATE = r"other settings \(chat template: \w+ -> \w+\)"
FILE = "tokenizer/chat_template.jinja"
CHATS = {"messages": "messages"}

# Settings of the packs, a change of files, changed settings, and words of the answer.
AGAIN: list[tuple[dict[str, Any], Callable[[], object], dict[str, Any], str]] = [
    ({}, keep_files, {}, SAME),
    ({}, Path("corpus.jsonl").touch, {}, CHANGED),
    ({}, rewrite_at_the_same_time, {}, CHANGED),
    ({}, Path("corpus.jsonl").unlink, {}, CHANGED),
    *(({"source": source}, move, {}, SAME) for source in ("corpus.jsonl", "*.jsonl")),
    # A name like that of a dataset of the hub is not looked up.
    ({"source": "texts"}, lambda: shutil.rmtree("texts"), {}, CHANGED),
    # An earlier version wrote the packs, without the identity of their source.
    ({}, lambda: record(settings={"on_bad_line": "skip"}), {}, SAME),
    ({}, lose_source_and_its_identity, {}, SAME),
    ({}, keep_files, {"source": "tokenizer/../corpus.jsonl"}, SAME),
    ({}, keep_files, {"packing": "best_fit"}, "packing: truncate -> best_fit"),
    ({}, lambda: shutil.copytree("tokenizer", "copy"), {"tokenizer": "copy"}, SAME),
    ({}, lambda: change_tokenizer(post_processor=None), {}, SAME),
    ({}, drop_a_merge, {}, OTHER_TOKENIZER),
    (CHATS, keep_files, {"packing": "best_fit"}, SAME),
    (CHATS, keep_files, {"packing": "truncate"}, "packing: best_fit -> truncate"),
    (CHATS | {"packing": "truncate"}, keep_files, {"packing": None}, SAME),
    (CHATS, change_template, {}, OTHER_TEMPLATE),
    (CHATS | {"chat_template": FILE}, keep_files, {}, SAME),
    (CHATS | {"chat_template": FILE}, change_template, {}, OTHER_TEMPLATE),
    (CHATS | {"chat_template": "plain"}, Path(FILE).unlink, {}, SAME),
    (CHATS, Path(FILE).unlink, {}, "data.chat_template: tokenizer has no template"),
]


@pytest.mark.parametrize(("made", "change", "now", "answer"), AGAIN)
def test_packs_are_used_again_unless_their_documents_would_differ(
    made: dict, change: Callable, now: dict, answer: str, here: DataSettings, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(DatasetSource, "_data", None)
    Path("texts").mkdir()
    Path("texts/notes.txt").write_text("one two three")
    if "messages" in made:
        chat = [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "So."}]
        Path("corpus.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 9)
    load_tokenizer.cache_clear()
    made_with = packs_of(here, **made)
    if "messages" in made:
        are_cut = read_manifest(here.packs)["statistics"]["cut_documents"] > 0
        assert are_cut == ("packing" in made)
    change()
    load_tokenizer.cache_clear()
    capsys.readouterr()
    settings = made_with.model_copy(update=now)
    if answer in (SAME, CHANGED):
        prepare(settings)
        printed = capsys.readouterr().err
        assert printed.count("\n") == printed.count(CHANGED) == (answer == CHANGED)
    else:
        with pytest.raises(InputError, match=answer):
            prepare(settings, progress=False)


def test_packs_of_chats_have_masks_even_if_all_tokens_have_a_loss(here: DataSettings) -> None:
    Path("corpus.jsonl").write_text('{"messages": [{"role": "assistant", "content": "So."}]}\n')
    answer = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    packs = open_packs(packs_of(here, **CHATS, chat_template=answer), "train")
    assert packs[0].trained[: packs[0].lengths.sum()].all()


def test_a_summary_has_the_numbers_of_the_packs(settings: DataSettings, capsys) -> None:
    prepare(settings.model_copy(update={"held_out": 0.2}))
    splits = read_manifest(settings.packs)["splits"]
    shown = dict(re.findall(r"^  (.*?) {2,}(.*)$", capsys.readouterr().err, re.M))
    assert shown["held out tokens"] == f"{splits['held_out']['tokens']:,}"


def test_packs_and_tokens_do_not_replace_other_files(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = tmp_path / "empty"
    current.mkdir()
    monkeypatch.chdir(current)
    for packs in (Path(""), current):
        with pytest.raises(InputError, match="the current folder"):
            packs_of(settings, packs=packs)
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


def test_packs_on_a_full_disk_are_refused_with_a_remedy(
    settings: DataSettings, small_disk: Path
) -> None:
    prepare(settings, progress=False)
    size = sum(file.stat().st_size for file in settings.packs.rglob("*") if file.is_file())
    # The tokens of the packs fit on the disk, the packs do not fit beside them.
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(bytes(free - int(1.2 * size)))
    with pytest.raises(InputError, match=r"packs: cannot be written: .*run the command again"):
        packs_of(settings, packs=small_disk / "packs")
    (small_disk / "ballast").unlink()
    packs_of(settings, packs=small_disk / "packs")


@pytest.mark.filterwarnings("ignore:.*has no locks")
def test_without_locks_one_process_prepares_at_a_time(
    settings: DataSettings, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are refused. A second preparation, which starts after a chunk, ends the first.

    Lustre has no locks without its option `flock`.
    """

    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
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
    uninterrupted = packs_of(settings, packs=tmp_path / "other")
    fingerprints = {open_packs(data, "train").fingerprint for data in (settings, uninterrupted)}
    assert documents > 0 and len(fingerprints) == 1


def test_chatml_is_refused_if_the_tokenizer_lacks_its_tokens(
    settings: DataSettings, corpus: Path, documents: list[str], tmp_path: Path
) -> None:
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    corpus.write_text(json.dumps({"messages": chat}))
    settings = settings.model_copy(update={"messages": "messages"})
    options = "--special '<|im_start|>' --special '<|im_end|>'"
    with pytest.raises(InputError, match=rf"data.chat_template=plain.*{re.escape(options)}"):
        packs_of(settings, chat_template="chatml")
    special = ("<|im_start|>", "<|im_end|>")
    folder = tmp_path / "chats"
    save_tokenizer(train_tokenizer(documents[:3], 400, special), folder)
    chats = packs_of(settings, chat_template="chatml", tokenizer=str(folder))
    assert open_packs(chats, "train")[0].input_ids[0] == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    load_tokenizer.cache_clear()
    with pytest.raises(InputError, match=r"the template uses `eos_token`, but .* has no EOS token"):
        packs_of(chats, chat_template="plain", packs=tmp_path / "plain")


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(here: DataSettings, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Function that runs a command, and returns its output and messages."""
    Path("recipe.yaml").write_text(
        "data: {source: corpus.jsonl, tokenizer: tokenizer, packs: packs, length: 128}\nname: x\n"
    )

    def run(*arguments: str, status: int = 0) -> str:
        assert main([*arguments]) == status
        return "".join(capsys.readouterr())

    return run


def test_commands_read_the_data_section_of_a_recipe_with_overrides(run: Callable) -> None:
    assert "packs: no such file or folder" in run("inspect", "recipe.yaml", status=2)
    assert "train.steps" in run("prepare", "recipe.yaml", "train.steps=3", status=2)
    assert "already prepared" not in run("prepare", "recipe.yaml")
    assert "packs: these packs are already prepared" in run("prepare", "recipe.yaml")
    Path("corpus.jsonl").touch()
    answer = run("prepare", "recipe.yaml")
    assert CHANGED in answer and "already prepared" not in answer
    printed = run("inspect", "recipe.yaml")
    assert "packs: ArrowPacks of 128 tokens" in printed
    assert re.search(r"  fill +\d+\.\d\d %\n", printed)
    Path("other.jsonl").write_text(Path("corpus.jsonl").read_text().replace("a", "b"))
    other = ["data.length=64", "data.packs=other", "data.validation.source=other.jsonl"]
    run("prepare", "recipe.yaml", *other)
    assert Path("other-validation").is_dir()
    assert "other: ArrowPacks of 64 tokens" in run("inspect", "recipe.yaml", *other)
    assert "verified" in run("inspect", "other", "--verify")
    assert "settings override a recipe" in run("inspect", "other", "data.length=64", status=2)


def test_each_source_is_prepared_and_described(run: Callable) -> None:
    """A missing second source is refused before the first is packed."""
    sources = [{"source": f"{name}.jsonl", "weight": 0.5} for name in ("corpus", "y")]
    command = ["recipe.yaml", "data.source=null", f"data.sources={json.dumps(sources)}"]
    assert "y.jsonl: no such file" in run("prepare", *command, status=2)
    assert not Path("packs").exists()
    shutil.copy("corpus.jsonl", "y.jsonl")
    run("prepare", *command)
    assert run("inspect", *command).count("ArrowPacks of 128 tokens") == 2


# ── Worker processes ──────────────────────────────────────────────────────────────────────────────


def is_running(process: str) -> bool:
    """Return True if the process exists and is not a zombie, which has no command line."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return bool(Path("/proc", process, "cmdline").read_bytes())
    return False


def test_a_killed_preparation_continues_with_the_same_packs(
    settings: DataSettings, tmp_path: Path
) -> None:
    prepare(settings, progress=False)
    expected = open_packs(settings, "train").fingerprint
    shutil.rmtree(settings.packs)
    code = """
import json, sys, time
from packing import sources, token_log
from packing.prepare import DataSettings, prepare
sources.CHUNK_BYTES = 20_000
token_log._COMMIT_SECONDS = 0
append = token_log.TokenLog.append
token_log.TokenLog.append = lambda *a: (append(*a), time.sleep(0.2))
prepare(DataSettings(**json.loads(sys.argv[1])), progress=False)
"""
    run = subprocess.Popen([sys.executable, "-c", code, settings.model_dump_json()])
    partial = tmp_path / ".packs.tokens" / "progress.json"
    deadline = time.monotonic() + 60

    def place() -> int:
        return json.loads(partial.read_text())["place"].get("at", 0) if partial.exists() else 0

    while place() < 60_000 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGKILL)
    run.wait()
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, "a worker has outlived its parent"
        time.sleep(0.02)
    assert children and place() >= 60_000 and not settings.packs.exists()
    with open(partial.with_name("tokens.bin"), "ab") as file:
        file.write(b"written, but not recorded in progress.json")
    prepare(settings, progress=False)
    assert open_packs(settings, "train").fingerprint == expected and not partial.parent.exists()


def test_workers_import_neither_the_callers_script_nor_the_current_folder(
    settings: DataSettings, tmp_path: Path
) -> None:
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    for name in ("tokenizers", "pickle"):
        code = f"open('{name} of the current folder', 'w')\nraise SystemExit(1)"
        (tmp_path / f"{name}.py").write_text(code)
    script.write_text(
        "import sys, json\nprint('started', flush=True)\n"
        "from packing.prepare import prepare, DataSettings\n"
        "prepare(DataSettings(**json.loads(sys.argv[1])), progress=False)\n"
    )
    command = [sys.executable, script, settings.model_dump_json()]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    run = subprocess.run(command, **options, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.count("started") == 1, run.stderr
    assert not list(tmp_path.glob("* of the current folder"))


def test_workers_that_die_at_start_are_reported(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may die if memory runs out. In this test their interpreter ends at once."""
    monkeypatch.setattr(workers, "start_worker", start_worker)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(InputError, match=r"process died while it read .*corpus.jsonl:1 or"):
        prepare(settings, progress=False)
