"""The commands for packs and their error messages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from packing.arrow import ArrowPacks
from packing.tokenizer import load_tokenizer
from pretrain.__main__ import main


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_file: Path, documents: list[str]) -> Path:
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents[:9])
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: x\ndata: {{source: {tmp_path}/x.jsonl, tokenizer: {tokenizer_file}, "
        f"packs: {tmp_path}/packs, length: 128}}\n"
    )
    return path


def test_prepare_reads_a_recipe_and_overrides(recipe: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "x.jsonl").read_text().replace("a", "b"))
    keys = ["data.length=64", f"data.packs={tmp_path}/other", f"data.validation.source={other}"]
    assert main(["prepare", str(recipe), *keys]) == 0
    assert ArrowPacks(tmp_path / "other").length == 64 and (tmp_path / "other-validation").is_dir()
    assert main(["inspect", str(tmp_path / "other"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "ArrowPacks of 64 tokens" in printed and "verified" in printed
    assert (
        main(["prepare", str(recipe), "train.steps=3"]) == 2
        and "train.steps" in capsys.readouterr().err
    )


def test_inspect_reads_the_packs_of_a_recipe(recipe: Path, tmp_path: Path, capsys) -> None:
    assert main(["inspect", str(recipe)]) == 2
    assert f"{tmp_path}/packs: no such file or folder" in capsys.readouterr().err
    assert main(["prepare", str(recipe)]) == main(["prepare", str(recipe)]) == 0
    assert main(["inspect", str(recipe)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("packs: these packs are already prepared") == 1
    assert f"{tmp_path}/packs: ArrowPacks of 128 tokens" in printed.out
    assert re.search(r"  fill +\d+\.\d\d %\n", printed.out)
    assert re.search(r"  cut documents +9\n", printed.err)
    assert main(["prepare", str(recipe), "data.packing=best_fit", f"data.packs={tmp_path}/b"]) == 0
    assert re.search(r"  cut documents +\d\n", capsys.readouterr().err)
    assert main(["inspect", str(recipe), f"data.packs={tmp_path}/b"]) == 0
    assert f"{tmp_path}/b: ArrowPacks of 128 tokens" in capsys.readouterr().out
    assert main(["inspect", f"{tmp_path}/b", "data.length=64"]) == 2
    assert "settings override a recipe" in capsys.readouterr().err


def test_each_source_is_prepared_and_described(recipe: Path, tmp_path: Path, capsys) -> None:
    """A missing second source is refused before the first is packed."""
    sources = [{"source": f"{tmp_path}/{name}.jsonl", "weight": 0.5} for name in "xy"]
    text = recipe.read_text()
    recipe.write_text(
        text.replace(f"source: {tmp_path}/x.jsonl", f"sources: {json.dumps(sources)}")
    )
    assert main(["prepare", str(recipe)]) == 2
    assert f"{tmp_path}/y.jsonl: no such file" in capsys.readouterr().err
    assert not (tmp_path / "packs").exists()
    shutil.copy(tmp_path / "x.jsonl", tmp_path / "y.jsonl")
    assert main(["prepare", str(recipe)]) == main(["inspect", str(recipe)]) == 0
    assert capsys.readouterr().out.count("ArrowPacks of 128 tokens") == 2


def test_mistakes_on_the_command_line_are_named(recipe: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "x.json").write_text("[1]")
    assert main(["prepar"]) == 2 and "prepare" in capsys.readouterr().err
    data = [[str(path)] for path in (tmp_path, tmp_path / "x.jsonl", tmp_path / "x.json")]
    for wrong in (*data, [str(recipe), "--source", "x"]):
        assert main(["prepare", *wrong]) == 2
        named = wrong[0] if len(wrong) == 1 else ""
        assert f"data.source={named}" in capsys.readouterr().err


def test_a_tokenizer_is_trained_on_the_words_of_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "words"}, {"role": "assistant", "content": "answers"}]
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": chat}))
    vocabularies = []
    for out, settings in (("a", []), ("b", ["data.messages=messages"])):
        options = ["--out", str(tmp_path / out), "--vocabulary", "290"]
        assert main(["tokenizer", str(source), *settings, *options]) == 0
        vocabularies.append(load_tokenizer(str(tmp_path / out)).tokenizer.get_vocab())
    assert vocabularies[0] == vocabularies[1]
    assert {"words", "answers"} <= vocabularies[0].keys()
