"""`python -m packing`: learn a tokenizer, prepare packs from text, look at packs.

    python -m packing tokenizer my_text --vocabulary 8192 --out my_tokenizer
    python -m packing prepare recipes/smoke.yaml data.length=1024
    python -m packing prepare data.source=corpus.jsonl data.tokenizer=Qwen/Qwen3-0.6B data.packs=packs/corpus
    python -m packing inspect packs/corpus --index 0

Exit status: 0 done, 2 something given cannot be used (one message says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from foundation.command import CommandParser, run_command
from foundation.errors import InputError
from foundation.progress import Progress, say
from foundation.reading import load_with_bases
from foundation.settings import Settings, parse, set_value, value_from_text
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Packs, Split
from packing.prepare import check_counts, prepare, summary
from packing.records import TextTemplate
from packing.settings import DataSettings
from packing.sources import Counts, open_source, read_chunk
from packing.store import find_splits
from packing.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

# characters that a tokenizer is learnt from: more do not make better words, and take memory
_MOST_TEXT = 10**9


class _Recipe(Settings):
    """What `prepare` reads of a recipe; the rest is the trainer's."""

    UNKNOWN_KEY_HELP: ClassVar = "docs/coming_from.md has other trainers' names"

    data: DataSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""

    def run() -> None:
        options = _parser().parse_args(arguments)
        options.run(options)

    return run_command(run, on_ctrl_c="interrupted; the same command goes on from here")


def _parser() -> CommandParser:
    parser = CommandParser("python -m packing", __doc__)
    parser.remedy = (
        "settings are key=value before all options, as data.source=my_text; --help lists these"
    )
    commands = parser.add_subparsers(required=True, metavar="tokenizer | prepare | inspect")

    tokenizer = commands.add_parser(
        "tokenizer", help="learn a byte-level BPE; its end-of-text token, id 0, closes documents"
    )
    tokenizer.add_argument("source", metavar="SOURCE", help="file, folder or Hugging Face dataset")
    tokenizer.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="keys of data, as data.text=body"
    )
    tokenizer.add_argument(
        "--vocabulary", type=int, required=True, metavar="N", help="bytes included"
    )
    tokenizer.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    tokenizer.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="as <|im_start|>; repeatable",
    )
    tokenizer.set_defaults(run=_learn_tokenizer)

    prepare = commands.add_parser(
        "prepare", help="tokenise text and pack it; goes on where it stopped"
    )
    prepare.add_argument(
        "recipe",
        nargs="*",
        help="RECIPE.yaml, whose data section counts, then key=value to override it",
    )
    prepare.set_defaults(run=_prepare)

    inspect = commands.add_parser("inspect", help="show Arrow, MDS or token .bin packs")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--index", type=int, help="also show the text of this training pack")
    inspect.add_argument(
        "--tokenizer", help="tokenizer.json, folder or hub name (the one with the packs)"
    )
    inspect.add_argument("--verify", action="store_true", help="hash every file again")
    inspect.set_defaults(run=_inspect)
    return parser


def _learn_tokenizer(options: argparse.Namespace) -> None:
    named = [
        f"data.source={options.source}",
        f"data.packs={options.out}",
        f"data.tokenizer={options.out}",
    ]
    settings, out = _data_settings([*named, *options.settings]), options.out
    if out.exists():
        raise InputError(
            f"--out {out}: exists already and is never written over; name another folder or move it away"
        )
    if settings.messages or settings.input_ids:
        raise InputError(
            "command line: a tokenizer is learnt from `data.text`; name a column of text, or a template of columns"
        )
    if options.vocabulary <= (fixed := 257 + len(options.special)):
        raise InputError(
            f"--vocabulary {options.vocabulary}: {fixed} are bytes, the end of a text and --special; ask for more"
        )
    template = TextTemplate.parse(settings.text)
    source = open_source(settings, template)
    say(f"reading {source.description}")

    def texts() -> Iterator[str]:
        counts = Counts()
        with Progress("learning", "characters") as line:
            for chunk in source.chunks():
                texts, left_out = read_chunk(chunk, template, settings.on_bad_line == "skip")
                yield from texts
                counts += left_out + Counts(documents=len(texts))
                line.update(sum(map(len, texts)))
                if line.n >= _MOST_TEXT:
                    return
        check_counts(settings, counts)

    tokenizer = train_tokenizer(texts(), options.vocabulary, options.special)
    save_tokenizer(tokenizer, out)
    print(f"{out}: byte-level BPE, {tokenizer.get_vocab_size():,} tokens")


def _prepare(options: argparse.Namespace) -> None:
    print(prepare(_data_settings(options.recipe)))


def _data_settings(arguments: Sequence[str]) -> DataSettings:
    """Returns the settings of the data section: defaults, over them a recipe's, then key=value."""
    recipe = arguments[0] if arguments and "=" not in arguments[0] else None
    data: dict[str, Any] = {}
    if recipe and Path(recipe).is_dir():
        raise InputError(
            f"{recipe}: a folder; name a recipe, or data.source={recipe} with data.tokenizer=... and data.packs=..."
        )
    for path, own in load_with_bases(recipe) if recipe else ():
        if not isinstance(section := own.get("data") or {}, dict):
            raise InputError(
                f"{path}: `data`: a section of keys is wanted, the recipe holds {section!r}"
            )
        data |= section
    for key, _, value in (text.partition("=") for text in arguments[bool(recipe) :]):
        if not key.startswith("data."):
            raise InputError(
                f"command line: {key}: prepare takes the keys of data only, as in data.length=1024"
            )
        set_value({"data": data}, key, value_from_text(_Recipe, key, value))
    return parse(_Recipe, {"data": data}, recipe or "command line").data


def _inspect(options: argparse.Namespace) -> None:
    wanted = (
        _decoded(_open_splits(options.path)["train"], options.index, options.tokenizer)
        if options.index is not None
        else ()
    )
    for line in chain(_described(options.path, options.verify), wanted):
        print(line)


def _open_splits(path: Path) -> dict[Split, Packs]:
    """The splits that the packs at `path` have of their own. InputError where nothing there can be read as packs."""
    length = (
        None
        if path.is_dir() and not any(path.glob("*.bin"))
        else DataSettings.model_fields["length"].default
    )
    return {split: open_split() for split, open_split in find_splits(path, length).items()}


def _described(path: Path, verify: bool) -> Iterator[str]:
    """Lines that describe the packs at `path`: a folder of packs, one of several sources, or a stream's, with parts."""
    if not (path / MANIFEST).is_file() and (
        inside := sorted(file.parent for file in path.rglob(MANIFEST))
    ):
        for each in inside:
            yield from _described(each, verify)
        return
    splits = _open_splits(path)
    first = splits["train"]
    yield f"{path}: {type(first).__name__} of {first.length:,} tokens"
    recorded = ", ".join(
        f"{key} {value}" for key, value in (first.tokenizer or {}).items() if value is not None
    )
    yield f"  tokenizer            {recorded or 'not recorded in this format'}"
    for split, packs in splits.items():
        yield f"  {split:<20} {len(packs):,} packs, fingerprint {packs.fingerprint}"
        if verify:
            packs.verify()
            yield "  verified             every file that has a recorded hash is as it was written"
    if isinstance(first, ArrowPacks):
        yield summary(first.manifest)


def _decoded(packs: Packs, index: int, tokenizer_name: str | None) -> Iterator[str]:
    """The text of one pack, each document under a line of its own; the ids where no tokenizer is named or lies with the packs."""
    if not 0 <= index < len(packs):
        raise InputError(f"--index {index}: {packs.path} has packs 0 to {len(packs) - 1}")
    stored = [
        file
        for folder in (packs.path, packs.path.parent / FIRST)
        if (file := folder / "tokenizer.json").is_file()
    ]
    tokenizer = (
        load_tokenizer(tokenizer_name or str(stored[0])).tokenizer
        if tokenizer_name or stored
        else None
    )
    pack, ends = packs[index], np.cumsum(packs[index].lengths).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        yield f"──── document at {begin:,} · {end - begin:,} tokens ".ljust(100, "─")
        shown = {"": pack.input_ids[begin:end]}
        if pack.trained is not None:
            shown["[trained on] "] = shown[""][pack.trained[begin:end]]
        for what, ids in shown.items():
            yield what + (
                tokenizer.decode(ids, skip_special_tokens=False)
                if tokenizer
                else " ".join(map(str, ids))
            )
    if ends[-1] < packs.length:
        yield f"──── padding · {packs.length - ends[-1]:,} tokens ".ljust(100, "─")


if __name__ == "__main__":
    sys.exit(main())
