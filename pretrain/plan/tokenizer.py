"""The tokenizer of a run: special tokens of a model from scratch, prompts, and the exported folder.

A model from scratch takes from the tokenizer what `model.config` does not set of vocab_size,
eos_token_id, bos_token_id and pad_token_id. So the exported model has no unused embeddings, and
`generate` stops at the token that ended the documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from transformers import (
    AutoTokenizer,
    BatchEncoding,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from foundation.errors import InputError
from foundation.reading import refusing
from packing.records import CHAT_TEMPLATE, chat_template
from packing.settings import DataSettings, split_revision
from packing.store import training_parts
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.model.huggingface import config_values, load_config
from pretrain.settings.recipe import ModelSettings

# The vocabulary of a model from scratch is a multiple of this. Products with the head are then
# fastest, and every precision can compute them.
VOCABULARY_MULTIPLE = 128
ROLES = {"eos": "EOS", "bos": "BOS", "pad": "padding"}
# Texts that transformers' tokenizer classes normalize or split in different ways.
PROBES = (
    "Hello world 12345, it's 3.14 and 1,000,000!",
    "  two blanks, a\ttab,\n\n  an indented line\r\n and blanks at the end   ",
    "DON'T we'll I'M __init__(self, *args) -> None: # 0x1F != 7e-5",
    "Caf\u00e9 cafe\u0301 \ufb01ne \u00df \u0130 \u1e9b\u0323 \uff21\uff11 \u00bd x\u00b2 \u2026",
    "\u4f60\u597d\uff0c\u4e16 \u3053\u3093 \u0645\u0631 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f469\u200d\U0001f4bb \u00a0\u3000\u200b\ufeff \u2581a \x00\x07",
)


class Data(Protocol):
    """Open packs (`pretrain.run.data.Data`), as far as the tokenizer depends on them."""

    @property
    def tokenizer(self) -> Mapping[str, Any]:
        """Return the packs' record of their tokenizer."""

    def beside(self, name: str) -> Path | None:
        """Return the file `name` in the folder of the packs, or None if it does not exist."""


def with_tokens(
    model: ModelSettings, settings: DataSettings, data: Data | None, *, needed: bool = False
) -> ModelSettings:
    """Return `model` with the keys of the vocabulary that it does not set, from the tokenizer.

    The tokenizer is `data.tokenizer`, or else that of the packs. `model` is returned unchanged if
    there is no tokenizer, and if its `source` has the tokenizer already.

    Raises InputError if `data.tokenizer` differs from the tokenizer of the packs or of the model's
    weights, if `model.config` contradicts it, and, with `needed`, if it cannot be loaded although
    the model needs nothing from it.
    """
    given = dict(model.config or {})
    if not needed and not model.from_scratch and (model.source or "vocab_size" in given):
        return model
    tokenizer = data.tokenizer if data else {}
    if settings.tokenizer is not None:
        named = load_text_tokenizer(settings.tokenizer).describe()
        for owner, fingerprint in (
            (settings.packs, tokenizer.get("fingerprint")),
            ("`model.source`", fingerprint_at(model.weights_source)),
        ):
            if fingerprint not in (None, named["fingerprint"]):
                raise InputError(
                    f"`data.tokenizer`: {settings.tokenizer} ({named['fingerprint'][:12]}) is not "
                    f"the tokenizer of {owner} ({fingerprint[:12]}); name that one, and prepare "
                    "packs with it"
                )
        tokenizer = named
    if (
        "vocab_size" not in tokenizer
        or model.weights_source is not None
        or (model.source and tokenizer.get("fingerprint") in (None, fingerprint_at(model.source)))
    ):
        return model
    default = load_config(
        model if model.source else ModelSettings(config={"model_type": given["model_type"]})
    )
    return model.model_copy(update={"config": tokens_of(tokenizer, given, default)})


def tokens_of(
    tokenizer: Mapping[str, Any], given: Mapping[str, Any], config: PretrainedConfig
) -> dict[str, Any]:
    """Return `given`, completed with the keys of `config` that the tokenizer has values for.

    A token that the tokenizer lacks is null. If the configuration class accepts no null, as that of
    cwm for BOS, the token is EOS. Raises InputError if `given` contradicts the tokenizer.

    tokenizer: as `TextTokenizer.describe` returns it.
    given: values of `model.config`.
    """
    size = tokenizer["vocab_size"]
    if given.get("vocab_size", size) < size:
        raise InputError(
            f"`model.config.vocab_size: {given['vocab_size']}`: the data's tokenizer has {size} "
            "ids; remove the key"
        )
    values = {"vocab_size": -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}
    for role, name in ROLES.items():
        if f"{role}_id" not in tokenizer:
            continue
        key = f"{role}_token_id"
        token = tokenizer[f"{role}_id"]
        ids = given.get(key)
        if None not in (ids, token) and token not in (ids if isinstance(ids, list) else [ids]):
            raise InputError(
                f"`model.config.{key}: {ids}`: the {name} token of the data's tokenizer "
                f"({tokenizer.get('name', 'unnamed')}) is {token}; remove the key"
            )
        accepts_null = config_values(type(config), {key: None}).get(key, 0) is None
        if token is None and not accepts_null:
            token = tokenizer.get("eos_id")
        if hasattr(config, key) and (token is not None or accepts_null):
            values[key] = token
    return values | dict(given)


def fingerprint_in_use(
    settings: DataSettings, model: ModelSettings, data: Data | None
) -> str | None:
    """Return the fingerprint of the tokenizer that `load_tokenizer` returns, or None."""
    return fingerprint_at(_place(settings, model, data))


def fingerprint_at(place: str | None) -> str | None:
    """Return the fingerprint of the tokenizer in a folder or hub repository, or None."""
    # A place without a tokenizer, or a machine without network.
    with contextlib.suppress(InputError):
        return place and load_text_tokenizer(place).fingerprint
    return None


def load_tokenizer(
    settings: DataSettings, model: ModelSettings, data: Data | None = None, *, needed: bool
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer for samples and for the exported folder, or None if there is none.

    It is the data's, or else the model's, or else the one in the folder of the packs. It has the
    chat template that the data were rendered with. Raises InputError if there is no tokenizer but
    one is `needed`, and if the exported folder would encode text in another way than packs.
    """
    place = _place(settings, model, data)
    if place is None:
        if needed:
            raise InputError(
                "`evaluate.samples`: there is no tokenizer to read the prompts with; set "
                "`data.tokenizer`"
            )
        return None
    recorded = data.tokenizer if data else {}
    is_recorded = recorded.get("fingerprint") == fingerprint_at(place)
    tokenizer = tokenizer_in(place, recorded if is_recorded else None)
    templates = (part.chat_template for part in training_parts(settings).values())
    template = next(filter(None, templates), None)
    file = data.beside(CHAT_TEMPLATE) if data else None
    if template:
        tokenizer.chat_template = chat_template(template, str(settings.tokenizer))
    elif file:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    _check_export(tokenizer, place, load_config(model))
    return tokenizer


def _place(settings: DataSettings, model: ModelSettings, data: Data | None) -> str | None:
    """Return the place of a run's tokenizer.json, or None if there is none.

    It is the data's tokenizer, or the model's source, or the folder of the packs.
    """
    file = data.beside("tokenizer.json") if data else None
    # The weights of the source used its ids. A model from scratch prefers the packs' tokenizer.
    source = None if model.from_scratch and file else model.source
    places = [settings.tokenizer or source, str(file) if file else None]
    return next((place for place in places if fingerprint_at(place)), None)


def tokenizer_in(place: str, ids: Mapping[str, Any] | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer.json of a file, folder or hub repository, which encodes text as in packs.

    AutoTokenizer is not used, because it may rebuild the tokenizer from `tokenizer_class`, with
    another normalizer or pre-tokenizer. A special token that tokenizer.json lacks is dropped:
    transformers would give it a new id. Raises InputError if there is no tokenizer.json.

    ids: of EOS, BOS and padding, as in `TextTokenizer.describe`; by default from the place.
    """
    text = load_text_tokenizer(place)
    ids = ids or text.describe()
    tokens: dict[Any, str] = {number: token for token, number in text.tokenizer.get_vocab().items()}
    roles: dict[str, Any] = {f"{role}_token": tokens.get(ids.get(f"{role}_id")) for role in ROLES}
    if Path(place).is_file():
        return PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, **roles)
    name, roles["revision"] = split_revision(place)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(name, **roles)
    tokenizer.init_kwargs.pop("auto_map", None)  # a class of the repository, which is not exported
    return tokenizer


def _check_export(
    tokenizer: PreTrainedTokenizerFast,
    place: str,
    config: PretrainedConfig,
) -> None:
    """Raise InputError if the exported folder encodes text in another way than packs.

    For some model types AutoTokenizer uses a class that ignores parts of tokenizer.json.
    """
    packed = load_text_tokenizer(place).tokenizer
    what = f"`data.tokenizer`: {place}: AutoTokenizer does not read it as packs do"
    remedy = f"name another tokenizer, or another `model_type` than {config.model_type}"
    with TemporaryDirectory() as folder, refusing((Exception,), what, remedy):
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    added = {*exported.get_added_vocab(), *map(str, packed.get_added_tokens_decoder().values())}
    for probe in [*PROBES, *(f"a {token} b{token}c" for token in sorted(added))]:
        ids = packed.encode(probe, add_special_tokens=False).ids
        if exported.encode(probe, add_special_tokens=False) != ids:
            kind = type(exported).__name__
            raise InputError(
                f"{what}: as {kind}, it encodes {probe!r} otherwise; {remedy}; or make one that "
                f'agrees, by transformers.{kind}.from_pretrained("{place}").save_pretrained(NEW), '
                "and prepare packs with `data.tokenizer: NEW`"
            )


def positions_of(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that the model can read, or None if its config has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def encoded_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, model: PretrainedConfig
) -> BatchEncoding:
    """Return `prompt` as [1, tokens] int64, encoded as in packs.

    An empty prompt becomes BOS, or EOS if there is no BOS. Raises InputError if the prompt leaves
    no position for another token.
    """
    text = prompt or tokenizer.bos_token or tokenizer.eos_token
    if not text:
        raise InputError(
            "prompt '': the tokenizer has no BOS or EOS token to begin with; write a few words"
        )
    encoded = tokenizer(
        text,
        return_tensors="pt",
        return_token_type_ids=False,
        add_special_tokens=False,
    )
    tokens = encoded["input_ids"].shape[1]
    positions = positions_of(model)
    if positions and tokens >= positions:
        raise InputError(
            f"prompt {prompt[:40]!r}: {tokens} tokens, and the model has {positions} positions; "
            "shorten it"
        )
    return encoded
