"""`python -m packing`: prepare packs from text, look at packs, convert packs of other formats to ours.

    python -m packing tokenizer my_text --vocabulary 8192 --out my_tokenizer
    python -m packing prepare recipes/smoke.yaml data.length=1024
    python -m packing prepare data.source=corpus.jsonl data.tokenizer=Qwen/Qwen3-0.6B data.packs=packs/corpus
    python -m packing inspect packs/corpus --index 0
    python -m packing import ./multipacking --out packs/multipacking

Exit status: 0 done, 2 something given cannot be used (one message says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundation.command import CommandParser, number, run_command
from foundation.errors import InputError
from foundation.reading import load_with_bases
from foundation.settings import Settings, given_once, parse, place_of, value_from_text
from packing.settings import DataSettings


class _Recipe(Settings):
    """What `prepare` reads of a recipe; the rest is the trainer's."""

    data: DataSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""

    def run() -> None:
        options = _parser().parse_args(arguments)
        options.run(options)

    return run_command(run, on_ctrl_c="interrupted; the same command goes on from here")


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m packing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="tokenizer | prepare | inspect | import")

    tokenizer = commands.add_parser("tokenizer", help="learn a byte-level BPE; its end-of-text token, id 0, closes documents")
    tokenizer.add_argument("source", metavar="SOURCE", help="file, folder or Hugging Face dataset")
    tokenizer.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="keys of data, as data.text=body")
    tokenizer.add_argument("--vocabulary", type=number(1, whole=True), required=True, metavar="N", help="tokens, bytes included")
    tokenizer.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    tokenizer.add_argument("--special", action="append", default=[], metavar="TOKEN", help="as <|im_start|>; repeatable")
    most = "bytes of text to learn from, from the beginning (1000000000)"
    tokenizer.add_argument("--most-bytes", type=number(1, whole=True), default=10**9, metavar="N", help=most)
    tokenizer.set_defaults(run=_tokenizer)

    prepare = commands.add_parser("prepare", help="tokenise text and pack it; goes on where it stopped")
    prepare.add_argument("recipe", nargs="*", help="RECIPE.yaml, whose data section counts, then key=value to override it")
    prepare.set_defaults(run=_prepare)

    inspect = commands.add_parser("inspect", help="show Arrow, MDS or token .bin packs")
    inspect.add_argument("--index", type=number(0, whole=True), help="also show the text of this pack")
    inspect.add_argument("--split", choices=("train", "held_out"), default="train", help="where --index counts (train)")
    inspect.add_argument("--verify", action="store_true", help="hash every file again")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser("import", help="convert MDS or token .bin packs to Arrow packs")
    convert.add_argument("--out", type=Path, required=True)
    convert.set_defaults(run=_import)
    for command in (inspect, convert):
        command.add_argument("path", type=Path)
        command.add_argument("--tokenizer", help="tokenizer.json, folder or hub name (the one with the packs)")
        command.add_argument("--length", type=number(1, whole=True), help="tokens of a pack: for token .bin, which does not say")
        command.add_argument("--end-token", type=number(0, whole=True), help="token .bin: the id that ends a document")
    return parser


def _tokenizer(options: argparse.Namespace) -> None:
    from packing.vocabulary import make_tokenizer

    named = [f"data.source={options.source}", f"data.packs={options.out}", f"data.tokenizer={options.out}"]
    settings = _data_settings([*named, *options.settings])
    tokenizer = make_tokenizer(settings, options.out, options.vocabulary, special=options.special, most_bytes=options.most_bytes)
    print(f"{options.out}: byte-level BPE, {tokenizer.get_vocab_size():,} tokens")


def _prepare(options: argparse.Namespace) -> None:
    settings = _data_settings(options.recipe)
    from packing.packer import prepare

    print(prepare(settings))


def _data_settings(arguments: Sequence[str]) -> DataSettings:
    """Returns the settings of the data section: defaults, over them a recipe's, then key=value."""
    recipe = arguments[0] if arguments and "=" not in arguments[0] else None
    data: dict[str, Any] = {}
    for path, own in load_with_bases(recipe) if recipe else ():
        if not isinstance(section := own.get("data") or {}, dict):
            raise InputError(f"{path}: `data`: a section of keys is wanted, the recipe holds {section!r}")
        data |= section
    given = given_once((key, value) for key, _, value in (text.partition("=") for text in arguments[bool(recipe) :]))
    for key, value in given.items():
        if not key.startswith("data."):
            raise InputError(f"command line: {key}: prepare takes the keys of data only, as in data.length=1024")
        place, name = place_of({"data": data}, key)  # which may lie deeper, as data.validation.source
        place[name] = value_from_text(_Recipe, key, value)
    return parse(_Recipe, {"data": data}, recipe or "command line").data


def _inspect(options: argparse.Namespace) -> None:
    from packing.inspection import decoded, inspect, open_splits

    length, end_token = options.length, options.end_token
    for line in inspect(options.path, verify=options.verify, length=length, end_token=end_token):
        print(line)
    if options.index is not None:
        splits = open_splits(options.path, length, end_token)
        if options.split not in splits:
            raise InputError(f"{options.path}: has no {options.split} split")
        for line in decoded(splits[options.split], options.index, options.tokenizer):
            print(line)


def _import(options: argparse.Namespace) -> None:
    from packing.inspection import import_packs

    given = {"length": options.length, "end_token": options.end_token, "tokenizer": options.tokenizer}
    manifest = import_packs(options.path, options.out, **given)
    numbers = manifest["statistics"]
    print(f"{options.out}: {numbers['packs']:,} packs of {manifest['length']:,} tokens, {numbers['fill']:.2%} filled")


if __name__ == "__main__":
    sys.exit(main())
