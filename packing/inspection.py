"""Shows packs of any format and converts them to ours: `python -m packing inspect` and `import`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from foundation.errors import InputError
from foundation.progress import Progress
from foundation.settings import parse
from packing.arrow import ArrowPacks, Packs, PackWriter
from packing.manifest import FIRST, MANIFEST, Split
from packing.mds import MDSReader
from packing.order import evenly
from packing.pack import length_statistics
from packing.prepare import lock_of, summary
from packing.settings import DataSettings
from packing.store import find_mds, open_packs
from packing.tokenizer import TextTokenizer, load_tokenizer

_SAMPLED_PACKS = 10_000  # enough for statistics; reading the lengths of a terabyte's packs would take too long


def inspect(
    path: Path, *, index: int | None, split: Split, verify: bool, tokenizer: str | None, length: int | None, end_token: int | None
) -> Iterator[str]:
    """Lines that describe the packs at `path`: a folder of packs, one of several sources, or a stream's, with parts; of pack
    `index` also the text."""
    if not (path / MANIFEST).is_file() and (inside := sorted(file.parent for file in path.rglob(MANIFEST))):
        if index is not None:
            raise InputError(f"{path}: holds several folders of packs; name one, as in {inside[0]} --index {index}")
        for each in inside:
            yield from inspect(each, index=None, split=split, verify=verify, tokenizer=None, length=length, end_token=end_token)
        return
    splits = open_splits(path, length, end_token)
    yield from describe(path, splits)
    if verify:
        for packs in splits.values():
            packs.verify()
        yield "  verified        every file that has a recorded hash is as it was written"
    if index is not None:
        if split not in splits:
            raise InputError(f"{path}: has no {split} split")
        yield from decoded(splits[split], index, tokenizer)


def open_splits(path: Path, length: int | None, end_token: int | None) -> dict[Split, Packs]:
    """The splits that the packs at `path` have of their own. InputError where nothing there can be read as packs."""
    known = _length_of(path) if length is None else length
    settings = parse(DataSettings, {"packs": path, "length": known, "end_token": end_token}, "command line")
    opened = {split: open_packs(settings, split) for split in get_args(Split)}
    return {split: packs for split, packs in opened.items() if packs is not None}


def _length_of(path: Path) -> int:
    """The pack length that the format itself records; the default where there is none: open_packs then says what is wrong."""
    if (path / MANIFEST).is_file():
        return ArrowPacks(path).length
    if mds := find_mds(path):
        reader = MDSReader(mds["train"][:1])
        sample = reader.sample(0) if len(reader) else {}
        return len(sample.get("input_ids", sample.get("tokens", ()))) or 1
    if path.suffix == ".bin" or next(path.glob("*.bin"), None):
        raise InputError(f"{path}: a token file does not say how long its packs are; add --length, as in --length 1024")
    return DataSettings.model_fields["length"].default


def describe(path: Path, splits: dict[Split, Packs]) -> Iterator[str]:
    """Lines that describe the packs at `path`."""
    kinds = {"ArrowPacks": "Arrow", "MDSPacks": "MDS", "TokenBin": "token .bin"}
    first = next(iter(splits.values()))
    yield f"{path}: {kinds[type(first).__name__]}, packs of {first.length:,} tokens"
    known = [f"{key} {value}" for key, value in (first.tokenizer or {}).items() if value is not None]
    yield f"  tokenizer       {', '.join(known) or 'not recorded in this format'}"
    for split, packs in splits.items():
        chosen = evenly(len(packs), _SAMPLED_PACKS)
        lengths = np.concatenate([packs.lengths(index) for index in chosen])
        spread = ", ".join(f"{name.replace('_', ' ')} {value:,.0f}" for name, value in length_statistics(lengths).items())
        yield f"  {split}, figures from {len(chosen):,} packs spread over all"
        yield f"    packs         {len(packs):,}"
        yield f"    fingerprint   {packs.fingerprint}"
        yield f"    fill          {lengths.sum() / (len(chosen) * packs.length):.2%}"
        if packs.trained(0) is not None:
            share = sum(int(np.count_nonzero(packs.trained(index))) for index in chosen) / max(int(lengths.sum()), 1)
            yield f"    trained on    {share:.2%} of the tokens; the others are masked"
        yield f"    documents     {len(lengths) / len(chosen):,.1f} a pack; tokens each: {spread}"
    if isinstance(first, ArrowPacks) and "cut_documents" in first.manifest["statistics"]:
        yield "  as prepared"
        yield from summary(first.manifest).splitlines()
        if "stream" in first.manifest["statistics"]:
            yield f"  part of a stream {first.manifest['statistics']['stream']}"


def decoded(packs: Packs, index: int, tokenizer_name: str | None) -> Iterator[str]:
    """The text of one pack, each document under a line of its own; the ids where no tokenizer is named or lies with the packs."""
    if not 0 <= index < len(packs):
        raise InputError(f"--index {index}: {packs.path} has packs 0 to {len(packs) - 1}")
    stored = [file for folder in (packs.path, packs.path.parent / FIRST) if (file := folder / "tokenizer.json").is_file()]
    tokenizer = load_tokenizer(tokenizer_name or str(stored[0])) if tokenizer_name or stored else None
    pack, start = packs[index], 0
    for number, size in enumerate(pack.lengths.tolist()):
        position = pack.first_position if number == 0 else 0
        ids = pack.input_ids[start : start + size]
        positions = f"positions {position:,} to {position + size - 1:,}"
        yield _rule(f"document {number + 1} of {len(pack.lengths)} · {size:,} tokens · {positions}")
        if pack.trained is None:
            yield _text(ids, tokenizer)
        else:
            trained = pack.trained[start : start + size]
            changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1
            for part, is_answer in zip(np.split(ids, changes), np.split(trained, changes), strict=True):
                yield f"[{'trained on' if is_answer[0] else 'masked'}]"
                yield _text(part, tokenizer)
        start += size
    if start < packs.length:
        yield _rule(f"padding · {packs.length - start:,} tokens")


def _rule(text: str) -> str:
    return f"──── {text} ".ljust(100, "─")


def _text(ids: np.ndarray, tokenizer: TextTokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    _check_ids(ids, tokenizer, "--tokenizer")
    return tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _check_ids(ids: np.ndarray, tokenizer: TextTokenizer, where: str) -> None:
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise InputError(
            f"{where}: the packs hold the id {int(ids.max()):,}, and {tokenizer.name} has {tokenizer.vocab_size:,} ids; name the "
            "one they were made with"
        )


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
                if known is not None:
                    _check_ids(pack.input_ids, known, f"{path}: pack {index}")
                if masked and pack.trained is None:  # a split beside one with labels
                    pack = replace(pack, trained=np.arange(width) < pack.lengths.sum())
                writer.add(split, pack)
                lengths.append(pack.lengths)
                trained += 0 if pack.trained is None else int(np.count_nonzero(pack.trained))
                line.update(len(lengths), len(lengths) / total)
        everything = np.concatenate(lengths)
        if known is not None:
            known.save(writer.folder / "tokenizer.json")
        statistics = {
            "packs": total,
            "tokens": int(everything.sum()),
            "fill": float(everything.sum() / (total * width)),
            "held_out_packs": len(splits.get("held_out", ())),
            **({"trained_tokens": trained} if masked else {}),
            "lengths": length_statistics(everything),  # of documents as they lie in packs: a cut one counts as its pieces
        }
        origin = {"imported": str(path), "end_token": end_token}
        return writer.finish(settings=origin, statistics=statistics, tokenizer=known.describe() if known else first.tokenizer)
