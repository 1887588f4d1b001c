from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from foundation.errors import InputError
from foundation.locks import FileLock
from packing.__main__ import main
from packing.arrow import ArrowPacks, Pack, PackWriter
from packing.inspection import open_splits
from packing.manifest import read_manifest

ROOT = Path(main.__code__.co_filename).parents[1]


@pytest.fixture
def recipe(tmp_path: Path, documents: list[str], tokenizer_file: Path) -> Path:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"title": "T", "text": text}) + "\n" for text in documents[-30:]))
    data = {
        "seed": 7,
        "packs": str(tmp_path / "packs"),
        "source": str(corpus),
        "tokenizer": str(tokenizer_file),
        "length": 128,
        "processes": 1,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "seed": 1, "model": {"anything": 1}, "data": data}))
    return path


def test_prepare_takes_a_recipes_data_section_and_overrides(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(recipe), "data.length=64", "data.seed=8"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'packs'}\n"
    assert "documents" in captured.err and "fill" in captured.err
    settings = read_manifest(tmp_path / "packs")["settings"]
    assert (settings["length"], settings["seed"]) == (64, 8)


def test_a_key_may_follow_an_option_of_prepare(recipe: Path, tmp_path: Path) -> None:
    assert main(["prepare", "--out", str(tmp_path / "other"), str(recipe), "--length", "64", "data.seed=3"]) == 0
    settings = read_manifest(tmp_path / "other")["settings"]
    assert (settings["length"], settings["seed"]) == (64, 3)


def test_prepare_takes_the_data_section_of_a_recipe_that_builds_on_another(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "built.yaml"
    path.write_text(yaml.safe_dump({"base": recipe.name, "data": {"length": 64}}))
    assert main(["prepare", str(path)]) == 0
    settings = read_manifest(tmp_path / "packs")["settings"]
    assert (settings["length"], settings["seed"]) == (64, 7)


def test_prepare_takes_a_recipe_whose_path_has_an_equals_sign(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "rate=3").mkdir()
    path = recipe.rename(tmp_path / "rate=3" / "a=b.yaml")
    text = "{text}" + 300 * " "  # longer than the name of any file
    assert main(["prepare", str(path), "data.length=64", f"data.text={text}"]) == 0
    assert read_manifest(tmp_path / "packs")["settings"]["length"] == 64


def test_prepare_takes_keys_of_a_section_of_the_data(recipe: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"title": "one two three"}\n')
    recipe.write_text(yaml.safe_dump({"data": yaml.safe_load(recipe.read_text())["data"] | {"validation": None}}))
    assert main(["prepare", str(recipe), f"data.validation.source={other}", "data.validation.text={title}"]) == 0
    settings = read_manifest(tmp_path / "packs-validation")["settings"]
    assert (settings["source"], settings["text"]) == (str(other), "{title}")


def test_flags_say_what_a_recipe_says(recipe: Path, tmp_path: Path) -> None:
    assert main(["prepare", str(recipe), "data.text={title}: {text}", "data.shuffle=false"]) == 0
    data = yaml.safe_load(recipe.read_text())["data"]
    flags = ["--source", data["source"], "--tokenizer", data["tokenizer"], "--out", str(tmp_path / "by-flags"), "--length", "128"]
    assert main(["prepare", *flags, "--text", "{title}: {text}", "--no-shuffle", "--seed", "7"]) == 0
    by_recipe, by_flags = (ArrowPacks(tmp_path / name) for name in ("packs", "by-flags"))
    assert by_recipe.fingerprint == by_flags.fingerprint and by_recipe.manifest == by_flags.manifest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.lenght=64"], "unknown key `data.lenght`; did you mean `data.length`?"),
        (
            ["data.validation.sauce=x"],
            "command line: unknown key `data.validation.sauce`; did you mean `data.validation.source`?",
        ),
        (["data.length.of=3"], "command line: `data.length.of` cannot be set: `length` holds 128, not keys of its own"),
        (["data.length=many"], "`data.length` is 'many'"),
        (["data.source=/nowhere.jsonl"], "data.source: /nowhere.jsonl: no such file or folder"),
        (["--seed", str(2**64)], f"command line: `data.seed`: too large; the most that a count can be is {2**63 - 1}"),
        (["--source", ""], "`data.source=` is empty"),
        (["data.end_token=0"], "`end_token` is for token .bin files"),
        (["data.source=null", "data.packing=best_fit"], "`packing`, `seed`: for preparing packs, but no `source` is set"),
        (["dta.length=64"], "prepare takes the keys of data only"),
        (
            ["lr=1/missing.yaml"],
            "lr: prepare takes the keys of data only, as in data.length=1024 or data.seed=7, and no file is called lr",
        ),
        (["data.seed=8", "data.seed=9"], "command line: `data.seed` is given twice, as 8 and as 9; leave one of the two out"),
        (["data.length=64", "--length", "32"], "command line: `data.length` is given twice, as 64 and as 32; leave one of"),
        (["seed=8"], "seed: prepare takes the keys of data only, as in data.length=1024 or data.seed=7"),
        (["other.yaml"], "one recipe at a time"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(
    recipe: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["prepare", str(recipe), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and len(said.splitlines()) == 1
    assert not (tmp_path / "packs").exists()


def test_prepare_says_where_the_keys_of_a_mistaken_section_were_set(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"base": recipe.name, "data": {"end_token": 0}}))
    said = "`data`: `end_token` is for token .bin files"
    for arguments, place in (([own], own), ([own, "data.length=64"], own), ([recipe, "data.end_token=0"], "command line")):
        assert main(["prepare", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {place}: {said}")
    own.write_text(yaml.safe_dump({"base": recipe.name, "data": {"length": 64}}))
    recipe.write_text(recipe.read_text().replace("seed: 7", "seed: -7"))
    assert main(["prepare", str(own)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {recipe}: `data.seed` is -7")


def test_inspect_shows_numbers_and_the_documents_of_a_pack(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["prepare", str(recipe), "data.packing=best_fit", "data.length=16384"])
    capsys.readouterr()
    packs = ArrowPacks(tmp_path / "packs")
    index = next(i for i in range(len(packs)) if len(packs.lengths(i)) > 1)
    assert main(["inspect", str(tmp_path / "packs"), "--index", str(index)]) == 0
    said = capsys.readouterr().out
    assert packs.fingerprint in said and f"packs         {len(packs)}" in said
    assert f"document 1 of {len(packs.lengths(index))}" in said and "<|endoftext|>" in said and "padding" in said
    assert main(["inspect", str(tmp_path / "packs"), "--index", "999999"]) == 2

    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "packs"), "--verify"]) == 0
    assert "as it was written" in capsys.readouterr().out
    (tmp_path / "packs" / "lengths.png").write_bytes(b"no picture")
    assert main(["inspect", str(tmp_path / "packs"), "--verify"]) == 2
    assert "lengths.png: truncated" in capsys.readouterr().err


def test_a_source_called_first_is_not_taken_for_the_first_part_of_a_stream(tmp_path, tokenizer_file, capsys):
    lines = ["data:", f"  packs: {tmp_path / 'packs'}", f"  tokenizer: {tokenizer_file}", "  length: 8", "  sources:"]
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one two three"}\n')
        lines.append(f"    - {{source: {tmp_path / name}.jsonl, weight: 0.5}}")
    (tmp_path / "both.yaml").write_text("\n".join(lines))
    assert main(["prepare", str(tmp_path / "both.yaml")]) == 0
    assert main(["inspect", str(tmp_path / "packs")]) == 0
    told = capsys.readouterr().out
    assert "packs/first: Arrow" in told and "packs/second: Arrow" in told and "stream" not in told


def test_a_source_called_as_a_manifest_is_prepared_and_inspected_beside_another(tmp_path, tokenizer_file, capsys):
    lines = ["data:", f"  packs: {tmp_path / 'packs'}", f"  tokenizer: {tokenizer_file}", "  length: 8", "  sources:"]
    for name in ("packs.json", "other.json"):
        (tmp_path / name).write_text('{"text": "one two three"}\n')
        lines.append(f"    - {{source: {tmp_path / name}, name: {name}, weight: 0.5}}")
    (tmp_path / "both.yaml").write_text("\n".join(lines))
    for _ in range(2):
        assert main(["prepare", str(tmp_path / "both.yaml")]) == 0
    assert main(["inspect", str(tmp_path / "packs")]) == 0
    told = capsys.readouterr().out
    assert "packs/packs.json: Arrow" in told and "packs/other.json: Arrow" in told


def test_text_that_is_called_as_a_manifest_is_not_taken_for_one(tmp_path, tokenizer_file, capsys):
    (folder := tmp_path / "text" / "more").mkdir(parents=True)
    for path in (folder.parent / "a.json", folder.parent / "packs.json", folder / "packs.json"):
        path.write_text('{"text": "one two three"}\n' * 2)
    said = {
        folder: "packs.json: cannot be read: Extra data: line 2 column 1 (char 26); prepare the packs again, or fetch them again "
        "if they were copied; if it is text, name the folder of packs that were prepared from it",
        folder / "packs.json": "packs.json: holds no packs: no packs.json (Arrow), no index.json (MDS), no train.bin; set `data",
        folder.parent / "a.json": "a.json: holds no packs: no packs.json (Arrow)",
    }
    for path, wanted in said.items():
        assert main(["inspect", str(path)]) == 2
        told = capsys.readouterr().err
        assert wanted in told and told.count("error: ") == 1 and "one part of the packs" not in told
    (tmp_path / "all.yaml").write_text(
        f"data: {{source: {folder.parent}, packs: {tmp_path / 'packs'}, tokenizer: {tokenizer_file}, length: 8}}"
    )
    assert main(["prepare", str(tmp_path / "all.yaml")]) == 0
    assert "documents       6 (0 held out)" in capsys.readouterr().err


def test_a_token_file_is_inspected_and_imported(tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.tile(np.array([65, 66, 0], np.uint16), 100)
    (tmp_path / "bin").mkdir()
    tokens.tofile(tmp_path / "bin" / "train.bin")
    assert main(["inspect", str(tmp_path / "bin")]) == 2
    assert "add --length" in capsys.readouterr().err
    shape = ["--length", "50", "--end-token", "0", "--tokenizer", str(tokenizer_file)]
    assert main(["inspect", str(tmp_path / "bin"), *shape, "--index", "0"]) == 0
    assert "document 17 of 17 · 2 tokens" in capsys.readouterr().out

    assert main(["import", str(tmp_path / "bin"), "--out", str(tmp_path / "out"), *shape]) == 0
    packs = ArrowPacks(tmp_path / "out")
    assert np.array_equal(np.concatenate([packs[i].input_ids for i in range(len(packs))]), tokens)
    assert packs.lengths(0).tolist() == [3] * 16 + [2]
    assert packs.tokenizer["vocab_size"] == 600
    assert main(["inspect", str(tmp_path / "out"), "--index", "0"]) == 0


def test_an_mds_folder_is_inspected_and_imported_token_for_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(ROOT / "tests" / "data" / "mds" / "reference", tmp_path / "mds")
    assert main(["inspect", str(copy), "--index", "0"]) == 0
    assert "MDS, packs of 32 tokens" in capsys.readouterr().out
    assert main(["import", str(copy), "--out", str(tmp_path / "out")]) == 0
    before, after = open_splits(copy, None, None)["train"], ArrowPacks(tmp_path / "out")
    assert len(before) == len(after)
    for index in range(len(after)):
        assert np.array_equal(before[index].input_ids, after[index].input_ids)
        assert np.array_equal(before[index].lengths, after[index].lengths)
        assert before[index].first_position == after[index].first_position


def test_inspecting_a_folder_of_unlike_mds_folders_is_one_message_and_unpacks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(ROOT / "tests" / "data" / "mds", tmp_path / "mds")
    before = sorted(copy.rglob("*"))
    assert main(["inspect", str(copy)]) == 2
    assert "holds the MDS folders encodings, parts, reference" in capsys.readouterr().err
    assert sorted(copy.rglob("*")) == before


def test_an_mds_folder_that_holds_no_packs_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(ROOT / "tests" / "data" / "mds" / "scalar_uint32", tmp_path / "mds")
    assert main(["inspect", str(copy)]) == 2
    assert "where a row of integers is wanted" in capsys.readouterr().err
    assert main(["inspect", str(copy), "--length", "0"]) == 2


def test_importing_with_too_small_a_tokenizer_is_refused(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.array([1, 2, 30_000], np.uint16).tofile(tmp_path / "train.bin")
    arguments = [
        "import",
        str(tmp_path / "train.bin"),
        "--out",
        str(tmp_path / "out"),
        "--length",
        "3",
        "--tokenizer",
        str(tokenizer_file),
    ]
    assert main(arguments) == 2
    assert "holds id 30,000" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_nothing_that_packs_text_imports_torch() -> None:
    modules = "packing.__main__, packing.prepare, packing.inspection, packing.workers, packing.sources"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules and 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_help_loads_no_library_that_takes_seconds() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "packing", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "prepare" in done.stdout and "packing.settings" in loaded
    assert not loaded & {"torch", "transformers", "datasets", "tokenizers", "pandas"}


def test_an_import_waits_for_another_of_the_same_name_and_leaves_its_packs(tmp_path: Path) -> None:
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    command = [sys.executable, "-m", "packing", "import", str(tmp_path), "--out", str(tmp_path / "out"), "--length", "3"]
    with FileLock(tmp_path / "out.lock", lambda holder: pytest.fail(holder)):
        waits = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "is being prepared by process" in waits.stderr.readline()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    said = waits.communicate(timeout=60)[1]
    assert waits.returncode == 2 and "out: exists already and is never written over" in said and "Traceback" not in said
    (tmp_path / "file").touch()
    command[6] = str(tmp_path / "file" / "out")
    assert main(command[3:]) == 2


@pytest.mark.parametrize(
    "command", ["inspect {long}", "inspect {packs} --index 0 --tokenizer {long}", "import {packs} --out {near}"]
)
def test_a_name_that_is_too_long_is_one_message(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PackWriter(packs := tmp_path / "packs", 4) as writer:
        writer.add("train", Pack(np.zeros(4, np.uint32), np.array([4], np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    names = {"long": "x" * 300, "near": str(tmp_path / ("x" * 250)), "packs": str(packs)}
    assert main(command.format(**names).split()) == 2
    assert "File name too long; " in (said := capsys.readouterr().err) and "Traceback" not in said


def test_packs_that_cannot_be_made_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be made: Not a directory; name another folder"):
        PackWriter(tmp_path / "file" / "packs", 4)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"loop: is a link that leads in a circle; name another folder"):
        PackWriter(tmp_path / "loop", 4)


def test_packs_with_a_name_in_any_script_are_shown_where_output_is_ascii(tmp_path, monkeypatch):
    with PackWriter(tmp_path / "päcks", 8) as writer:
        writer.add("train", Pack(np.arange(8, dtype=np.uint32), np.array([8], dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii"))
    assert main(["inspect", str(tmp_path / "päcks")]) == 0
    sys.stdout.flush()
    assert b"p?cks: Arrow, packs of 8 tokens" in printed.getvalue()


def test_a_full_disk_under_what_is_printed_is_one_message(tmp_path, monkeypatch, capsys):
    with PackWriter(tmp_path / "packs", 8) as writer:
        writer.add("train", Pack(np.arange(8, dtype=np.uint32), np.array([8], dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", str(tmp_path / "packs")]) == 2
    said = "error: what is printed: the disk is full; free some space, then run the same command again\n"
    assert capsys.readouterr().err == said
