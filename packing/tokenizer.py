"""Tokenizers: loaded without a model library, and learnt from text, as byte-level BPE, which gives every text back exactly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, Tokenizer

from foundation.errors import InputError
from foundation.reading import load_object, one_line
from packing.settings import split_revision

REMEDY = "make it with `python -m packing tokenizer` (`make demo` makes demo/work), fetch it again, or name another"
_CONVERT = (
    "where vocab.json, merges.txt or a .model file is in its place, write it with transformers' "
    "`AutoTokenizer.from_pretrained('{}').save_pretrained(FOLDER)`"
)
# tokenizer_config.json says which special token ends a document; where there is none, these usual names decide.
_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]"),
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
}
# These differ from one save to the next without changing the ids that `encode(..., add_special_tokens=False)` gives.
_NOT_PART_OF_THE_FINGERPRINT = ("version", "truncation", "padding", "post_processor")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the ids that mark documents. Nobody may change it: who loads the same again gets the same object."""

    name: str
    tokenizer: Tokenizer
    special: dict[str, int]  # bos, eos, pad -> id; those it has

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex of everything that decides which ids a text gets; formatting and order of keys do not count."""
        content = json.loads(self.tokenizer.to_str())
        deciding = {
            key: value for key, value in content.items() if key not in _NOT_PART_OF_THE_FINGERPRINT
        }
        canonical = json.dumps(
            without_nulls(deciding), sort_keys=True, ensure_ascii=False, separators=(",", ":")
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included: so many embeddings a model needs at least."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def unknown(self) -> int | None:
        """The id that stands for text which the vocabulary lacks, or None if there is none."""
        model = json.loads(self.tokenizer.to_str())["model"]
        unknown = model.get("unk_id", self.tokenizer.token_to_id(model.get("unk_token") or ""))
        return None if unknown in self.special.values() else unknown

    @property
    def padding(self) -> int:
        """The id that fills what a pack has left."""
        return self.special.get("eos", self.special.get("pad", 0))

    @property
    def end_of_text(self) -> int:
        """The id that ends a text; InputError if there is none."""
        if "eos" not in self.special:
            raise InputError(
                f"data.tokenizer: {self.name} names no EOS token to end texts with; set `eos_token` in its tokenizer_config.json"
            )
        return self.special["eos"]

    def describe(self) -> dict[str, Any]:
        """Returns what packs record of their tokenizer."""
        ids = {f"{role}_id": self.special.get(role) for role in _USUAL_NAMES}
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            **ids,
        }


# A run loads its tokenizer several times, and one of 150,000 tokens takes a second to parse and another for its fingerprint.
@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer `name`: a tokenizer.json, a folder with one, or a model on the hub (`name@revision`). Raises InputError."""
    file = Path(name) if Path(name).is_file() else file_of(name, "tokenizer.json")
    config = file_of(name, "tokenizer_config.json", needed=False)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8", errors="replace"))
    except Exception as error:
        if type(error) is not Exception:
            raise
        # The library has no narrower class for a file that it cannot use.
        raise InputError(
            f"data.tokenizer: {file}: no tokenizer that can be read: {one_line(error)}; "
            f"{_CONVERT.format(file.parent)}, or {REMEDY}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    values, special = load_object(config, REMEDY) if config else None, {}
    for role, usual in _USUAL_NAMES.items():
        token = values.get(f"{role}_token") if values else None
        names = [token["content"] if isinstance(token, dict) else token or ""] if config else usual
        if ids := [number for name in names if (number := tokenizer.token_to_id(name)) is not None]:
            special[role] = ids[0]
    return TextTokenizer(name, tokenizer, special)


def file_of(tokenizer: str, name: str, *, needed: bool = True) -> Path | None:
    """The file `name` of a tokenizer's folder, or of its hub repository, from the local cache where it is in it.

    None where it is known that there is none, and it is not `needed`. A hub that cannot be reached is an InputError: ids must not
    depend on the network.
    """
    path, (repository, revision) = Path(tokenizer), split_revision(tokenizer)
    if path.exists():
        file = (path if path.is_dir() else path.parent) / name
        if file.is_file() or not needed:
            return file if file.is_file() else None
        raise InputError(
            f"data.tokenizer: {file}: no such file; {_CONVERT.format(file.parent)}, or {REMEDY}"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except (OSError, HFValidationError) as error:
        # Without a network, the cache knows no more of the files that most repositories lack.
        absent = (
            (RemoteEntryNotFoundError, LocalEntryNotFoundError)
            if name.endswith(".jinja")
            else RemoteEntryNotFoundError
        )
        if not needed and isinstance(error, absent):
            return None
        raise InputError(
            f"data.tokenizer: {repository}: not in {Path.cwd()}, and no {name} from the hub: "
            f"{one_line(error)}; {_CONVERT.format(repository)}, or {REMEDY}"
        ) from None


def without_nulls(value: Any) -> Any:
    """`value` without null fields, which one library version writes and another leaves out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


END_OF_TEXT = "<|endoftext|>"  # closes every document, and pads


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str] = ()
) -> Tokenizer:
    """Learn `vocabulary` tokens from `texts`: the end-of-text token (id 0), those of `special`, the 256 bytes, and merges.

    The same texts in the same order give the same tokenizer. Few texts can give fewer tokens.
    """
    tokenizer = ByteLevelBPETokenizer()
    named = [END_OF_TEXT, *special]
    tokenizer.train_from_iterator(
        texts, vocabulary, min_frequency=0, special_tokens=named, show_progress=False
    )
    return Tokenizer.from_str(tokenizer.to_str())


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, which is made, as AutoTokenizer loads them."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        # code is not prose: "a , b" must not come back as "a, b"
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
