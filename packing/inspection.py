"""Shows packs of any format and converts them to ours: `python -m packing inspect` and `import`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from foundation.errors import InputError
from foundation.progress import Progress
from foundation.reading import load_object
from foundation.settings import parse
from packing.arrow import ArrowPacks, Packs, PackWriter
from packing.manifest import FIRST, MANIFEST, REMEDY, Split, Statistics, read_manifest
from packing.mds import MDSReader
from packing.order import evenly
from packing.prepare import lock_of, summary
from packing.settings import DataSettings
from packing.statistics import draw_lengths, length_statistics
from packing.store import find_mds, open_packs
from packing.stream import ENDED, PART, read_part
from packing.tokenizer import TextTokenizer, load_tokenizer

_SAMPLED_PACKS = 10_000  # enough for statistics; reading the lengths of a terabyte's packs would take too long


def open_splits(path: Path, length: int | None, end_token: int | None) -> dict[Split, Packs]:
    """The splits that the packs at `path` have of their own. InputError where nothing there can be read as packs."""
    known = _length_of(path) if length is None else length
    settings = parse(DataSettings, {"packs": path, "length": known, "end_token": end_token}, "command line")
    opened = {split: open_packs(settings, split) for split in get_args(Split)}
    return {split: packs for split, packs in opened.items() if packs is not None}


def _length_of(path: Path) -> int:
    """The pack length that the format itself records; the default where nothing is found: open_packs then says what is wrong."""
    if (path / MANIFEST).is_file():
        return ArrowPacks(path).length
    if mds := find_mds(path):
        reader = MDSReader(mds["train"][:1])
        sample = reader.sample(0) if len(reader) else {}
        tokens = sample.get("input_ids", sample.get("tokens"))
        if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and len(tokens):
            return len(tokens)
    if path.exists() and (path.suffix == ".bin" or next(path.glob("*.bin"), None)):
        raise InputError(f"{path}: a token file does not say how long its packs are; add --length, as in --length 1024")
    return DataSettings.model_fields["length"].default


def describe(path: Path, splits: dict[Split, Packs]) -> Iterator[str]:
    """Lines that describe the packs at `path`."""
    kinds = {"ArrowPacks": "Arrow", "MDSPacks": "MDS", "TokenBin": "token .bin"}
    first = next(iter(splits.values()))
    yield f"{path}: {kinds.get(type(first).__name__, type(first).__name__)}, packs of {first.length:,} tokens"
    known = [f"{key} {value}" for key, value in (first.tokenizer or {}).items() if value is not None]
    yield f"  tokenizer       {', '.join(known) or 'not recorded in this format'}"
    for split, packs in splits.items():
        chosen = evenly(len(packs), _SAMPLED_PACKS)
        lengths, seen = np.concatenate([packs.lengths(index) for index in chosen]), len(chosen)
        yield f"  {split}"
        yield f"    packs         {len(packs):,}"
        yield f"    fingerprint   {packs.fingerprint}"
        sampled = "" if seen == len(packs) else f" (from {seen:,} packs spread over all)"
        yield f"    fill          {lengths.sum() / (seen * packs.length):.2%}{sampled}"
        numbers = length_statistics(lengths)
        spread = ", ".join(f"{name.replace('_', ' ')} {numbers[name]:,.0f}" for name in list(numbers)[:6])
        if packs.trained(0) is not None:
            share = sum(int(np.count_nonzero(packs.trained(index))) for index in chosen) / max(int(lengths.sum()), 1)
            yield f"    trained on    {share:.2%} of the tokens; the others are masked{sampled}"
        yield f"    documents     {len(lengths) / seen:,.1f} a pack; tokens each: {spread}{sampled}"
    recorded = Statistics.model_fields.keys() - {"trained_tokens", "held_out_tail"}  # which only some packs have
    whole = isinstance(first, ArrowPacks) and first.manifest["statistics"].keys() >= recorded
    if whole and all((first.tokenizer or {}).get(key) for key in ("name", "vocab_size", "fingerprint")):
        yield "  as prepared"
        yield from summary(first.manifest).splitlines()


def describe_stream(folder: Path, *, verify: bool) -> Iterator[str]:
    """Lines that describe one source's packs that are made while a run trains. `verify`: hash what is there first."""
    kept = {split: ArrowPacks(folder / FIRST, split) for split in read_manifest(folder / FIRST)["splits"]}
    first, settings = kept["train"], kept["train"].manifest["settings"]
    numbers = sorted(int(path.name[-8:]) for path in folder.glob("part-*") if PART.fullmatch(path.name))
    parts = [part for part in (read_part(folder, number) for number in numbers) if part is not None]
    if verify:
        for packs in (*kept.values(), *(part.packs for part in parts)):
            packs.verify()
    tokenizer = first.tokenizer or {}
    yield f"{folder}: a stream of Arrow packs of {first.length:,} tokens, made while a run trains"
    yield f"  source          {settings.get('source')}, {settings.get('window', 0):,} tokens a part"
    yield f"  tokenizer       {', '.join(f'{key} {value}' for key, value in tokenizer.items() if value is not None)}"
    held_out = f", {len(kept['held_out']):,} held out" if "held_out" in kept else ""
    yield f"  kept            {len(first):,} packs of the first part{held_out}"
    if parts:
        end, filled = parts[-1].after, sum(part.packs.tokens for part in parts)
        packs = sum(len(part.packs) for part in parts)
        size = sum(path.stat().st_size for part in parts for path in part.packs.path.rglob("*") if path.is_file())
        there = f"{parts[0].start.number} to {end.number - 1}" if len(parts) > 1 else str(parts[0].start.number)
        fill = filled / (packs * first.length)
        yield f"  on disk         parts {there}: {packs:,} packs, {fill:.2%} filled, {size / 1e9:.3g} GB"
        yield f"  packed          {end.documents:,} documents, {end.tokens:,} tokens, {end.first:,} packs to train on"
        yield f"  left out        {end.skipped:,} malformed records, {end.empty:,} without text"
        place = {key: value for key, value in end.place.items() if key != "state"}
        yield f"  goes on from    {json.dumps(place)}, epoch {end.epoch}"
    if (folder / ENDED).exists():
        yield f"  ended           the text is over after part {load_object(folder / ENDED, REMEDY).get('parts', 0) - 1}"
    if verify:
        yield "  verified        every file that has a recorded hash is as it was written"


def decoded(packs: Packs, index: int, tokenizer_name: str | None) -> Iterator[str]:
    """The text of one pack, each document under a line of its own; the ids where no tokenizer is named or lies with the packs."""
    if not 0 <= index < len(packs):
        raise InputError(f"--index {index}: {packs.path} has packs 0 to {len(packs) - 1}")
    beside = (packs.path, packs.path.parent / FIRST) if PART.fullmatch(packs.path.name) else (packs.path,)
    stored = next((file for folder in beside if (file := folder / "tokenizer.json").is_file()), beside[0] / "tokenizer.json")
    tokenizer = load_tokenizer(tokenizer_name or str(stored)) if tokenizer_name or stored.is_file() else None
    pack, start = packs[index], 0
    for number, size in enumerate(pack.lengths.tolist()):
        position = pack.first_position if number == 0 else 0
        ids = pack.input_ids[start : start + size]
        positions = f"positions {position:,} to {position + size - 1:,}"
        yield _rule(f"document {number + 1} of {len(pack.lengths)} · {size:,} tokens · {positions}")
        if pack.trained is None:
            yield _text(ids, tokenizer)
        else:
            yield from _answers_marked(ids, pack.trained[start : start + size], tokenizer)
        start += size
    if start < packs.length:
        yield _rule(f"padding · {packs.length - start:,} tokens")


def _answers_marked(ids: np.ndarray, trained: np.ndarray, tokenizer: TextTokenizer | None) -> Iterator[str]:
    """The text of a document in parts, each under a word on whether it is trained on."""
    changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    for part, learnt in zip(np.split(ids, changes), np.split(trained, changes), strict=True):
        yield f"[{'trained on' if learnt[0] else 'masked'}]"
        yield _text(part, tokenizer)


def _rule(text: str) -> str:
    return f"──── {text} ".ljust(100, "─")


def _text(ids: np.ndarray, tokenizer: TextTokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise InputError(
            f"--tokenizer {tokenizer.name}: has {tokenizer.vocab_size:,} ids and the pack holds {int(ids.max()):,}; "
            "name the one it was made with"
        )
    return tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def import_packs(path: Path, out: Path, *, length: int | None, end_token: int | None, tokenizer: str | None) -> dict[str, Any]:
    """Write the packs at `path`, of any format, as Arrow packs at `out`; returns their manifest. The tokens stay the same."""
    splits = open_splits(path, length, end_token)
    known = load_tokenizer(tokenizer) if tokenizer else None
    first, total = next(iter(splits.values())), sum(map(len, splits.values()))
    width = first.length
    lengths: list[np.ndarray] = []
    masked, trained = any(packs.trained(0) is not None for packs in splits.values()), 0
    with lock_of(out, progress=True), PackWriter(out, width) as writer, Progress("importing", "packs", shown=True) as line:
        for split, packs in splits.items():
            for index in range(len(packs)):
                pack = packs[index]
                if known is not None and int(pack.input_ids.max()) >= known.vocab_size:
                    raise InputError(
                        f"{path}: pack {index} holds id {int(pack.input_ids.max()):,}, and {tokenizer} has "
                        f"{known.vocab_size:,} ids; name the tokenizer the packs were made with"
                    )
                if masked and pack.trained is None:  # a split beside one with labels
                    pack = replace(pack, trained=np.arange(width) < pack.lengths.sum())
                writer.add(split, pack)
                lengths.append(pack.lengths)
                trained += 0 if pack.trained is None else int(np.count_nonzero(pack.trained))
                line.update(len(lengths), len(lengths) / total)
        everything = np.concatenate(lengths)
        if known is not None:
            known.save(writer.folder / "tokenizer.json")
        draw_lengths(everything, width, writer.folder / "lengths.png")
        statistics = {
            "packs": total,
            "tokens": int(everything.sum()),
            "fill": float(everything.sum() / (total * width)),
            "held_out_packs": len(splits.get("held_out", ())),
            **({"trained_tokens": trained} if masked else {}),
            "lengths": length_statistics(everything),  # of documents as they lie in packs: a cut one counts as its pieces
        }
        origin = {
            "imported": str(path),
            "fingerprints": {split: packs.fingerprint for split, packs in splits.items()},
            "end_token": end_token,
        }
        return writer.finish(settings=origin, statistics=statistics, tokenizer=known.describe() if known else first.tokenizer)
