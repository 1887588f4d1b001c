"""The tokenizer of a run: special tokens of a model from scratch, prompts, and the exported folder.

If `model.config` of a model from scratch does not set vocab_size, eos_token_id, bos_token_id or
pad_token_id, the value is set from the tokenizer. So the exported model has at most 127 superfluous
embeddings, and `generate` stops at the token that marks the end of a document in the packs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import (
    AutoTokenizer,
    BatchEncoding,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from foundation.errors import InputError, as_input_error
from packing.records import CHAT_TEMPLATE, chat_columns, chat_template
from packing.settings import DataSettings, SourceSettings, split_revision
from packing.store import folder_of, training_sources
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.model.configuration import load_config
from pretrain.run.data import Data
from pretrain.settings.recipe import ModelSettings, Recipe

# The vocabulary size of a model from scratch is rounded up to a multiple of this number. Every
# precision supports an LM head of such a size, and its matrix products are fastest.
VOCABULARY_MULTIPLE = 128
# Map the prefix of each special token's key in configurations, such as "eos" in "eos_token_id", to
# the name of the token in messages.
ROLES = {"eos": "EOS", "bos": "BOS", "pad": "padding"}
# Texts with which `_check_export` compares two tokenizers. The tokenizer classes of transformers
# normalize or split these texts in different ways.
PROBES = (
    "Hello world 12345, it's 3.14 and 1,000,000!",
    "  two blanks, a\ttab,\n\n  an indented line\r\n and blanks at the end   ",
    "DON'T we'll I'M __init__(self, *args) -> None: # 0x1F != 7e-5",
    "Caf\u00e9 cafe\u0301 \ufb01ne \u00df \u0130 \u1e9b\u0323 \uff21\uff11 \u00bd x\u00b2 \u2026",
    "\u4f60\u597d\uff0c\u4e16 \u3053\u3093 \u0645\u0631 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f469\u200d\U0001f4bb \u00a0\u3000\u200b\ufeff \u2581a \x00\x07",
)


def with_tokens(
    model: ModelSettings, settings: DataSettings, data: Data | None, *, needed: bool
) -> ModelSettings:
    """Return a copy of `model` with missing vocabulary keys set from the tokenizer.

    The tokenizer is the recipe's `data.tokenizer`. If the recipe does not set it, it is the
    tokenizer of the packs. `model` is returned unchanged if there is no tokenizer, if trained
    weights are loaded from its `source`, if its `source` has the same tokenizer, or if packs with
    an unknown tokenizer are used with a `source`.

    settings: the section `data` of the recipe.
    data: the open packs, or None.
    needed: True to load and check the tokenizer even if no vocabulary key is missing.

    Raise InputError if the recipe's tokenizer differs from the tokenizer of the packs or of the
    model's weights, if `model.config` contradicts the tokenizer, or if the tokenizer cannot be
    loaded.
    """
    given = dict(model.config or {})
    # On the command line, null unsets the size of the recipe.
    if given.get("vocab_size") is None:
        given.pop("vocab_size", None)
    has_vocabulary = model.source or "vocab_size" in given
    # A model from scratch with a `source` needs the tokenizer, because it may have another one.
    if has_vocabulary and not (needed or model.from_scratch):
        return model
    tokenizer = data.tokenizer if data else {}
    if settings.tokenizer is not None:
        packs_fingerprint = tokenizer.get("fingerprint")
        tokenizer = load_text_tokenizer(settings.tokenizer).describe()
        weights_fingerprint = fingerprint_at(model.weights_source)
        _require_same_tokenizer(
            settings.tokenizer,
            tokenizer["fingerprint"],
            {str(settings.packs): packs_fingerprint, "`model.source`": weights_fingerprint},
        )
    if "vocab_size" not in tokenizer or model.weights_source:
        return model
    if model.source and tokenizer.get("fingerprint") in (None, fingerprint_at(model.source)):
        return model
    default = load_config(
        model if model.source else ModelSettings(config={"model_type": given["model_type"]})
    )
    return model.model_copy(update={"config": tokens_of(tokenizer, given, default)})


def _require_same_tokenizer(
    name: str, fingerprint: str, fingerprints: Mapping[str, str | None]
) -> None:
    """Raise InputError if `data.tokenizer` differs from the tokenizer of the packs or the weights.

    name: the setting `data.tokenizer`.
    fingerprint: the fingerprint of this tokenizer.
    fingerprints: map a text for the message to the fingerprint of the packs or weights, or to None.
    """
    for owner, other in fingerprints.items():
        if other not in (None, fingerprint):
            raise InputError(
                f"`data.tokenizer`: {name} ({fingerprint[:12]}) is not the tokenizer of {owner} "
                f"({other[:12]}); set `data.tokenizer` to the tokenizer of {owner}, and prepare "
                "the packs with it"
            )


def tokens_of(
    tokenizer: Mapping[str, Any], given: Mapping[str, Any], config: PretrainedConfig
) -> dict[str, Any]:
    """Return `given` and the values of the vocabulary keys that the tokenizer determines.

    The size of the vocabulary is rounded up to a multiple of VOCABULARY_MULTIPLE. If the tokenizer
    does not have a special token, the value of its key is null. Raise InputError if `given`
    contradicts the tokenizer.

    tokenizer: the description that `TextTokenizer.describe` returns.
    given: the recipe's values of `model.config`, which have precedence.
    config: a configuration of the model's class. It determines the keys that the class has.
    """
    size = tokenizer["vocab_size"]
    if given.get("vocab_size", size) < size:
        raise InputError(
            f"`model.config.vocab_size: {given['vocab_size']}` is too small, because the tokenizer "
            f"of the data has {size} ids; remove `vocab_size` from `model.config`"
        )
    values = {"vocab_size": -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}
    for role, name in ROLES.items():
        key = f"{role}_token_id"
        values[key] = token = tokenizer[f"{role}_id"]
        ids = given.get(key)
        allowed = ids if isinstance(ids, list) else [ids]
        if None not in (ids, token) and token not in allowed:
            raise InputError(
                f"`model.config.{key}: {ids}`: the {name} token of the data's tokenizer "
                f"({tokenizer['name']}) is {token}; remove `{key}` from `model.config`"
            )
    return {key: value for key, value in values.items() if hasattr(config, key)} | dict(given)


def fingerprint_in_use(
    settings: DataSettings, model: ModelSettings, data: Data | None
) -> str | None:
    """Return the fingerprint of the tokenizer that `load_tokenizer` would return, or None."""
    return fingerprint_at(_location(settings, model, data))


def fingerprint_at(location: str | None) -> str | None:
    """Return the fingerprint of the tokenizer in a folder or hub repository.

    Return None if `location` is None, or if no tokenizer can be loaded from it.
    """
    # An InputError means that there is no tokenizer, or that the machine has no network.
    with contextlib.suppress(InputError):
        return load_text_tokenizer(location).fingerprint if location else None
    return None


def tokenizer_for(
    recipe: Recipe, data: Data | None, model_config: PretrainedConfig
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer. Return None if there is no tokenizer and the recipe needs none.

    The recipe needs a tokenizer if it has prompts (`evaluate.samples`). Raises InputError if a
    needed tokenizer is missing, and if a prompt leaves no position for new tokens.
    """
    tokenizer = load_tokenizer(recipe.data, recipe.model, data)
    for prompt in recipe.evaluate.samples:
        if tokenizer is None:
            raise InputError(
                "`evaluate.samples` needs a tokenizer to encode the prompts, but there is none; "
                "set `data.tokenizer`"
            )
        # Raise InputError if the prompt is too long.
        encoded_prompt(tokenizer, prompt, model_config)
    return tokenizer


def load_tokenizer(
    settings: DataSettings, model: ModelSettings, data: Data | None = None
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer for samples and for the exported folder, or None if there is none.

    `_location` chooses the tokenizer. The returned tokenizer has the chat template of the packs,
    which has converted conversations to text. Raise InputError if an exported copy of the tokenizer
    would encode text differently from the packs.
    """
    location = _location(settings, model, data)
    if location is None:
        return None
    # Packs record the ids of special tokens. Their tokenizer.json has no names of these tokens.
    tokenizer = tokenizer_in(location, data.tokenizer if data else None)
    templates = (source.chat_template for source in training_sources(settings).values())
    template = next(filter(None, templates), None)
    file = data.find_file(CHAT_TEMPLATE) if data else None
    if template:
        tokenizer.chat_template = chat_template(template, str(settings.tokenizer))
    elif file:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    _check_export(tokenizer, location, load_config(model))
    return tokenizer


def stop_after_answers(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: DataSettings
) -> None:
    """Add the token that ends an answer of the run's chats to the model's EOS ids.

    So samples end after an answer, and so do texts of the exported model, because the export writes
    the generation config of `hf`. Nothing changes if the run was not trained on chats.

    tokenizer: the result of `load_tokenizer`, or None.
    settings: the section `data` of the recipe. Its packs exist, unless they were deleted.
    """
    has_chats = any(
        source.messages or source.chat_template or (folder_of(source) / CHAT_TEMPLATE).is_file()
        for source in training_sources(settings).values()
    )
    if tokenizer is None or not has_chats or not hf.can_generate():
        return
    eos = hf.generation_config.eos_token_id
    ids = [*(eos if isinstance(eos, list) else [eos]), end_of_answers(tokenizer)]
    unique = dict.fromkeys(number for number in ids if number is not None)
    hf.generation_config.eos_token_id = [*unique] or None


def end_of_answers(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token that ends an answer in the tokenizer's chat template.

    A short chat is encoded as for packs. The result is the first special token after the content of
    the answer, if the token has a loss. Return None if there is no such token, or if the template
    is missing or rejects the chat.
    """
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    chat = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]
    # ValueError is raised if there is no such template, or no token with a loss after the content.
    with contextlib.suppress(ValueError):
        columns = chat_columns(
            SourceSettings(messages="messages"),
            str(tokenizer.get_chat_template()),
            tuple(tokenizer.special_tokens_map.items()),
        )
        text, spans = columns.fill({"messages": chat}) or ("", [])
        after_content = text.rindex("Yes.") + len("Yes.")
        _, end_of_answer = spans[-1]
        # Encode the chat as if only the text between the content and the end of the answer had a
        # loss. Then the ids of all other tokens are marked, so that they equal no token's id.
        (ids,) = columns.encode(backend, [(text, [(after_content, end_of_answer)])])
        return next((n for n in ids.tolist() if n in added and added[n].special), None)
    return None


def _location(settings: DataSettings, model: ModelSettings, data: Data | None) -> str | None:
    """Return the file, folder or hub repository with the tokenizer of a run.

    The first of these locations that contains a tokenizer is returned:

    1. the recipe's `data.tokenizer`, or the model's `source` if the recipe does not set
       `data.tokenizer`,
    2. the file tokenizer.json in the folder of the packs.

    The `source` of a model from scratch is not considered if the folder of the packs has a
    tokenizer.json. Return None if neither location contains a tokenizer.
    """
    file = data.find_file("tokenizer.json") if data else None
    # The weights in `source` were trained with the ids of its tokenizer. A model from scratch has
    # no such weights.
    source = None if model.from_scratch and file else model.source
    locations = [settings.tokenizer or source, str(file) if file else None]
    return next(filter(fingerprint_at, locations), None)


def tokenizer_in(location: str, ids: Mapping[str, Any] | None = None) -> PreTrainedTokenizerFast:
    """Load tokenizer.json from a file, folder or hub repository as a tokenizer of transformers.

    The tokenizer encodes text in the same way as it was encoded in the packs. AutoTokenizer is not
    used, because it may rebuild the tokenizer from `tokenizer_class` with a different normalizer or
    pre-tokenizer. Special tokens that are missing in tokenizer.json are not set, because
    transformers would add them with new ids. Raise InputError if there is no tokenizer.json.

    location: the file, folder or hub repository.
    ids: a dict with the ids of EOS, BOS and padding, as `TextTokenizer.describe` returns it. If it
        is empty or None, read the ids from `location`.
    """
    text_tokenizer = load_text_tokenizer(location)
    backend = text_tokenizer.tokenizer
    ids = ids or text_tokenizer.describe()
    # The value None removes a token that only a configuration file names.
    options: dict[str, Any] = {}
    for role in ROLES:
        number = ids[f"{role}_id"]
        options[f"{role}_token"] = None if number is None else backend.id_to_token(number)
    if Path(location).is_file():
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    name, options["revision"] = split_revision(location)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(name, **options)
    # Remove the reference to a tokenizer class in the repository, because code is not exported.
    tokenizer.init_kwargs.pop("auto_map", None)
    return tokenizer


def _check_export(
    tokenizer: PreTrainedTokenizerFast,
    location: str,
    config: PretrainedConfig,
) -> None:
    """Raise InputError if the exported tokenizer does not encode text as the packs' tokenizer.

    For some model types, AutoTokenizer loads a class that ignores parts of tokenizer.json.

    tokenizer: the tokenizer that will be exported.
    location: the file, folder or hub repository of the packs' tokenizer.
    config: the model's configuration, which will be exported together with the tokenizer.
    """
    packed = load_text_tokenizer(location).tokenizer
    what = f"`data.tokenizer`: {location}: AutoTokenizer does not encode text as in the packs"
    remedy = (
        f"either choose another tokenizer, or choose another `model_type` than {config.model_type}"
    )
    with TemporaryDirectory() as folder, as_input_error((Exception,), what, remedy):
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    added = {*exported.get_added_vocab(), *map(str, packed.get_added_tokens_decoder().values())}
    # Tokenizer classes also treat blanks around added tokens in different ways.
    for probe in [*PROBES, *(f"a {token} b{token}c" for token in sorted(added))]:
        ids = packed.encode(probe, add_special_tokens=False).ids
        if exported.encode(probe, add_special_tokens=False) != ids:
            kind = type(exported).__name__
            raise InputError(
                f"{what}: it loads a {kind}, which encodes {probe!r} differently; {remedy}, or "
                "use a tokenizer of this class: write it to a folder NEW by "
                f'transformers.{kind}.from_pretrained("{location}").save_pretrained(NEW), '
                "and prepare packs with `data.tokenizer: NEW` (to continue trained weights, NEW "
                "must be a copy of the model's folder, which is also the `model.source`)"
            )


def positions_of(config: PretrainedConfig) -> int | None:
    """Return the largest length in tokens that the model supports, or None if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def encoded_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, model: PretrainedConfig
) -> BatchEncoding:
    """Encode `prompt` without adding special tokens. The `input_ids` are [1, tokens] int64.

    An empty prompt is replaced by the BOS token, or by the EOS token if there is no BOS token.
    Raise InputError if the prompt fills the largest length that the model supports, so that no
    token could be generated.

    model: the configuration of the model.
    """
    text = prompt or tokenizer.bos_token or tokenizer.eos_token
    if not text:
        raise InputError(
            "prompt '': the tokenizer has no BOS or EOS token that could replace an empty prompt; "
            "write a prompt of a few words"
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
            f"prompt {prompt[:40]!r} has {tokens} tokens, but the model has {positions} positions; "
            "shorten the prompt"
        )
    return encoded
