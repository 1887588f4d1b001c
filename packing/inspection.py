"""Shows packs of any format and converts them to ours: `python -m packing inspect` and `import`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from foundation.errors import InputError
from foundation.progress import Progress
from foundation.settings import parse
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Packs, PackWriter, Split
from packing.mds import MDSPacks
from packing.order import evenly
from packing.pack import length_statistics
from packing.prepare import lock_of, summary
from packing.settings import DataSettings
from packing.store import find_mds, open_packs
from packing.tokenizer import TextTokenizer, load_tokenizer

_IMPORTED_TOKENS = 2**22  # read and written at once
_SAMPLED_PACKS = 10_000  # enough for statistics; reading the lengths of a terabyte's packs would take too long


def open_splits(path: Path, length: int | None, end_token: int | None) -> dict[Split, Packs]:
    """The splits that the packs at `path` have of their own. InputError where nothing there can be read as packs."""
    if length is None and (path / MANIFEST).is_file():
        length = ArrowPacks(path).length
    elif length is None and (mds := find_mds(path)):
        length = MDSPacks(mds["train"][:1], path, None).length
    elif length is None and (path.suffix == ".bin" or any(path.glob("*.bin"))):
        raise InputError(f"{path}: a token file does not say how long its packs are; add --length, as in --length 1024")
    given = {"packs": path, "end_token": end_token} | ({"length": length} if length else {})
    opened = {split: open_packs(parse(DataSettings, given, "command line"), split) for split in get_args(Split)}
    return {split: packs for split, packs in opened.items() if packs is not None}


def inspect(path: Path, *, verify: bool, length: int | None, end_token: int | None) -> Iterator[str]:
    """Lines that describe the packs at `path`: a folder of packs, one of several sources, or a stream's, with parts."""
    if not (path / MANIFEST).is_file() and (inside := sorted(file.parent for file in path.rglob(MANIFEST))):
        for each in inside:
            yield from inspect(each, verify=verify, length=length, end_token=end_token)
        return
    splits = open_splits(path, length, end_token)
    first = next(iter(splits.values()))
    kind = {"ArrowPacks": "Arrow", "MDSPacks": "MDS", "TokenBin": "token .bin"}[type(first).__name__]
    yield f"{path}: {kind}, packs of {first.length:,} tokens"
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
    if isinstance(first, ArrowPacks) and "documents" in first.manifest["statistics"]:
        yield "  as prepared"
        yield summary(first.manifest)
    if verify:
        for packs in splits.values():
            packs.verify()
        yield "  verified        every file that has a recorded hash is as it was written"


def decoded(packs: Packs, index: int, tokenizer_name: str | None) -> Iterator[str]:
    """The text of one pack, each document under a line of its own; the ids where no tokenizer is named or lies with the packs."""
    if index >= len(packs):
        raise InputError(f"--index {index}: {packs.path} has packs 0 to {len(packs) - 1}")
    stored = [file for folder in (packs.path, packs.path.parent / FIRST) if (file := folder / "tokenizer.json").is_file()]
    tokenizer = load_tokenizer(tokenizer_name or str(stored[0])) if tokenizer_name or stored else None
    pack, start = packs[index], 0
    trained = np.ones(packs.length, bool) if pack.trained is None else pack.trained
    for number, size in enumerate(pack.lengths.tolist()):
        position = pack.first_position if number == 0 else 0
        positions = f"positions {position:,} to {position + size - 1:,}"
        yield _rule(f"document {number + 1} of {len(pack.lengths)} · {size:,} tokens · {positions}")
        ids, learnt = (column[start : start + size] for column in (pack.input_ids, trained))
        changes = np.flatnonzero(learnt[1:] != learnt[:-1]) + 1
        for part, is_learnt in zip(np.split(ids, changes), np.split(learnt, changes), strict=True):
            if pack.trained is not None:
                yield f"[{'trained on' if is_learnt[0] else 'masked'}]"
            if tokenizer is not None:
                _check_ids(part, tokenizer, "--tokenizer")
            yield tokenizer.tokenizer.decode(part, skip_special_tokens=False) if tokenizer else " ".join(map(str, part))
        start += size
    if start < packs.length:
        yield _rule(f"padding · {packs.length - start:,} tokens")


def _rule(text: str) -> str:
    return f"──── {text} ".ljust(100, "─")


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
    lengths, step = list[np.ndarray](), max(1, _IMPORTED_TOKENS // first.length)
    with lock_of(out, progress=True), PackWriter(out, first.length) as writer, Progress("importing", "packs") as line:
        for split, packs in splits.items():
            for begin in range(0, len(packs), step):
                block = [packs[index] for index in range(begin, min(begin + step, len(packs)))]
                if known is not None:
                    _check_ids(np.stack([pack.input_ids for pack in block]), known, f"{path}: from pack {begin} on")
                writer.add(split, *block)
                lengths += [pack.lengths for pack in block]
                line.update(len(lengths), len(lengths) / total)
        if known is not None:
            known.save(writer.folder / "tokenizer.json")
        tokens = int(np.concatenate(lengths).sum())
        statistics = {"packs": total, "tokens": tokens, "fill": tokens / (total * first.length)}
        origin = {"imported": str(path), "end_token": end_token}
        return writer.finish(settings=origin, statistics=statistics, tokenizer=known.describe() if known else first.tokenizer)
