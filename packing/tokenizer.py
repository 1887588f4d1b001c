"""Load tokenizers without a model library, and train byte-level BPE, which decodes exactly."""

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

REMEDY = (
    "make it with `python -m packing tokenizer` (`make demo` makes demo/work), fetch it again, "
    "or name another"
)
_CONVERT = (
    "where vocab.json, merges.txt or a .model file is in its place, write it with transformers' "
    "`AutoTokenizer.from_pretrained('{}').save_pretrained(FOLDER)`"
)
# Names of special tokens, for a tokenizer without a tokenizer_config.json that names them.
_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]"),
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
}
# These keys may change when a tokenizer is saved. They do not change the ids that
# `encode(..., add_special_tokens=False)` returns.
_NOT_PART_OF_THE_FINGERPRINT = {"version", "truncation", "padding", "post_processor"}


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and its special ids. It must not be changed: `load_tokenizer` shares it."""

    name: str
    tokenizer: Tokenizer
    special: dict[str, int]  # ids of bos, eos and pad, as far as the tokenizer has them

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids of a text. Formatting and order of keys do not."""
        values = json.loads(self.tokenizer.to_str())
        content = {key: values[key] for key in values.keys() - _NOT_PART_OF_THE_FINGERPRINT}
        canonical = json.dumps(
            without_nulls(content), sort_keys=True, ensure_ascii=False, separators=(",", ":")
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, with added tokens: the least number of a model's embeddings."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def unknown(self) -> int | None:
        """The id for text that the vocabulary lacks, or None if there is no such id.

        An id that also begins or ends documents does not count. Padding is in no document.
        """
        model = json.loads(self.tokenizer.to_str())["model"]
        unknown = model.get("unk_id", self.tokenizer.token_to_id(model.get("unk_token") or ""))
        frame = (self.special.get("bos"), self.special.get("eos"))
        return None if unknown in frame else unknown

    @property
    def padding(self) -> int:
        """The id that fills the rest of a pack."""
        return self.special.get("eos", self.special.get("pad", 0))

    @property
    def end_of_text(self) -> int:
        """The id that ends a document. Raises InputError if there is none."""
        if "eos" not in self.special:
            raise InputError(
                f"data.tokenizer: {self.name} names no EOS token to end texts with; "
                "set `eos_token` in its tokenizer_config.json"
            )
        return self.special["eos"]

    def describe(self) -> dict[str, Any]:
        """Return the values that packs record of their tokenizer."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            **{f"{role}_id": self.special.get(role) for role in _USUAL_NAMES},
        }


# A run loads its tokenizer several times. One of 150,000 tokens takes a second to parse, and
# another second for its fingerprint.
@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> TextTokenizer:
    """Return a tokenizer: a tokenizer.json, a folder with one, or a hub model (`name@revision`).

    Raises InputError if it cannot be found or read.
    """
    file = Path(name) if Path(name).is_file() else find_file(name, "tokenizer.json")
    if file is None:
        raise InputError(
            f"data.tokenizer: {name}: has no tokenizer.json; {_CONVERT.format(name)}, or {REMEDY}"
        )
    config = find_file(name, "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8", errors="replace"))
    except Exception as error:
        if type(error) is not Exception:
            raise
        # The library has no narrower class of error for a file that it cannot use.
        raise InputError(
            f"data.tokenizer: {file}: no tokenizer that can be read: {one_line(error)}; "
            f"{_CONVERT.format(file.parent)}, or {REMEDY}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    values = load_object(config, REMEDY) if config else None
    special: dict[str, int] = {}
    for role, usual_names in _USUAL_NAMES.items():
        names = list(usual_names)
        if values is not None:
            token = values.get(f"{role}_token")
            names = [token["content"] if isinstance(token, dict) else token or ""]
        ids = map(tokenizer.token_to_id, names)
        if (number := next((number for number in ids if number is not None), None)) is not None:
            special[role] = number
    return TextTokenizer(name, tokenizer, special)


def find_file(tokenizer: str, name: str) -> Path | None:
    """Return the file `name` from a tokenizer's folder, or from its hub repository or the cache.

    Returns None if there is certainly no such file. Raises InputError if the hub cannot be reached:
    ids must not depend on the network.
    """
    path = Path(tokenizer)
    if path.exists():
        file = (path if path.is_dir() else path.parent) / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
    )

    repository, revision = split_revision(tokenizer)
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except (OSError, HFValidationError) as error:
        # Most repositories have no template file. Without a network, the cache cannot know that.
        absent = (RemoteEntryNotFoundError, LocalEntryNotFoundError)
        if isinstance(error, absent if name.endswith(".jinja") else RemoteEntryNotFoundError):
            return None
        raise InputError(
            f"data.tokenizer: {repository}: not in {Path.cwd()}, and no {name} from the hub: "
            f"{one_line(error)}; {_CONVERT.format(repository)}, or {REMEDY}"
        ) from None


def without_nulls(value: Any) -> Any:
    """Return `value` without null fields, which some versions of a library write."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


END_OF_TEXT = "<|endoftext|>"  # closes every document, and pads


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str] = ()
) -> Tokenizer:
    """Train a tokenizer of `vocabulary` tokens on `texts`.

    Its tokens are the end-of-text token (id 0), the tokens of `special`, the 256 bytes, and merges.
    The same texts in the same order give the same tokenizer. Few texts may give fewer tokens.
    """
    tokenizer = ByteLevelBPETokenizer()
    special_tokens = [END_OF_TEXT, *special]
    tokenizer.train_from_iterator(
        texts, vocabulary, min_frequency=0, special_tokens=special_tokens, show_progress=False
    )
    return Tokenizer.from_str(tokenizer.to_str())


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a new `folder`, in the form that AutoTokenizer loads."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        # "a , b" must not be decoded as "a, b": code is not prose.
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
