"""Tokenizers for `prepare`, `inspect` and checks against a model, without a model library: quick to import."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.reading import load_object, one_line, parse_json, read_regular, reason_of
from packing.settings import HUB_NAME

ROLES = ("bos", "eos", "pad")
_REMEDY = "fetch or train it again, or name another"
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
    """A tokenizer and the ids that mark documents."""

    name: str
    tokenizer: Tokenizer
    special: dict[str, int]  # bos, eos, pad -> id; those it has

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex of everything that decides which ids a text gets; formatting and order of keys do not count."""
        return _fingerprint_of(self.tokenizer.to_str())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included: so many embeddings a model needs at least."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def padding(self) -> int:
        """The id that fills what a pack has left."""
        return next((self.special[role] for role in ("eos", "pad") if role in self.special), 0)

    def required(self, role: str, setting: str) -> int:
        """The id of the `role` token (bos or eos) that `setting` asks for; InputError if there is none."""
        if role not in self.special:
            raise InputError(
                f"{setting} is true, but the tokenizer {self.name} names no {role.upper()} token; set {setting}: false, "
                f"or name one in its tokenizer_config.json as `{role}_token`"
            )
        return self.special[role]

    def save(self, path: Path) -> None:
        """Write a tokenizer.json. (The library's own `save` turns every OSError, also a full disk, into a bare Exception.)"""
        path.write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")

    def describe(self) -> dict[str, Any]:
        """Returns what packs record of their tokenizer."""
        ids = {f"{role}_id": self.special.get(role) for role in ROLES}
        return {"name": self.name, "fingerprint": self.fingerprint, "vocab_size": self.vocab_size, **ids}


def load_tokenizer(name: str, revision: str | None = None) -> TextTokenizer:
    """The tokenizer `name`: a tokenizer.json, a folder with one, or a model on the hub at `revision`. Raises InputError."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    config = file.parent / "tokenizer_config.json"
    if not file.is_file():
        if path.is_dir():
            raise InputError(
                f"data.tokenizer: {path}: no tokenizer.json in this folder; name a tokenizer.json, or a folder with one"
            )
        if path.is_symlink() and not path.exists():  # not to be looked for among the models of that name
            raise InputError(f"data.tokenizer: {path}: is a dead link; correct it, or name the tokenizer itself")
        if not HUB_NAME.fullmatch(name):
            raise InputError(
                f"data.tokenizer: {name}: no such file or folder; name a tokenizer.json, a folder with one, or a model on the hub"
            )
        file, config = _tokenizer_from_hub(name, revision)
    try:
        text = str(read_regular(file), "utf-8")
        _check_json(text)
    except (OSError, ValueError) as error:
        raise InputError(f"data.tokenizer: {file}: not a readable tokenizer.json: {reason_of(error)}; {_REMEDY}") from None
    try:
        tokenizer = _parsed(text)
    except Exception as error:
        if type(error) is not Exception:  # the library knows no narrower class for a file that it cannot use
            raise
        raise InputError(f"data.tokenizer: {file}: valid JSON, but no tokenizer: {error}; {_REMEDY}") from None
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise InputError(f"data.tokenizer: {file}: has no tokens; {_REMEDY}")
    return TextTokenizer(name, tokenizer, _special_ids(tokenizer, config))


# A run asks for its tokenizer three times, to check packs, vocabulary and prompts; one of 150,000 tokens takes a second to parse.
# Kept by the text, so that a file that changes is parsed anew.


@lru_cache(maxsize=2)
def _check_json(text: str) -> None:
    parse_json(text)


@lru_cache(maxsize=2)
def _parsed(text: str) -> Tokenizer:
    """Nobody may change it: who asks for the same again gets the same object."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=2)
def _fingerprint_of(text: str) -> str:
    content = {key: value for key, value in json.loads(text).items() if key not in _NOT_PART_OF_THE_FINGERPRINT}
    canonical = json.dumps(_without_nulls(content), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _tokenizer_from_hub(name: str, revision: str | None) -> tuple[Path, Path]:
    """tokenizer.json and tokenizer_config.json of a hub model, from the local cache where they are in it.

    A repository may lack the second. One that cannot be reached is an InputError: ids must not depend on the network.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError

    wanted = "tokenizer.json"
    try:
        file = Path(hf_hub_download(name, wanted, revision=revision))
        wanted = "tokenizer_config.json"
        return file, Path(hf_hub_download(name, wanted, revision=revision))
    except (OSError, HFValidationError) as error:
        if wanted == "tokenizer_config.json" and isinstance(error, RemoteEntryNotFoundError):
            return file, file.parent / wanted
        raise InputError(
            f"data.tokenizer: {name}: no such file or folder in {Path.cwd()}, and no {wanted} from the hub: {one_line(error)}; "
            f"{_REMEDY}"
        ) from None


def _special_ids(tokenizer: Tokenizer, config: Path) -> dict[str, int]:
    """Id by role (bos, eos, pad), for the roles that the tokenizer has a token for."""
    candidates = _USUAL_NAMES
    if config.exists() or config.is_symlink():
        values = load_object(config, _REMEDY)
        named = {role: values.get(f"{role}_token") for role in ROLES}
        names = {role: value.get("content") if isinstance(value, dict) else value for role, value in named.items() if value}
        if strange := [role for role, name in names.items() if not isinstance(name, str)]:
            raise InputError(f"data.tokenizer: {config}: `{strange[0]}_token` is no text; {_REMEDY}")
        candidates = {role: [name] for role, name in names.items()}
    ids = {role: map(tokenizer.token_to_id, names) for role, names in candidates.items()}
    known = {role: next((number for number in found if number is not None), None) for role, found in ids.items()}
    return {role: number for role, number in known.items() if number is not None}


def _without_nulls(value: Any) -> Any:
    """`value` without null fields, which one library version writes and another leaves out."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
