"""A byte-level BPE tokenizer trained on the demo's own corpus, saved the way Hugging Face's AutoTokenizer loads it.

Byte-level means that every text can be encoded and comes back exactly, whatever characters it holds. The vocabulary is small on
purpose: at a hidden size of 256 each 4,096 tokens of vocabulary cost a million parameters that a three-minute run cannot teach.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # closes every document, and pads


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` tokens from `texts`: the end-of-text token (id 0), the 256 bytes, and merges for the rest.

    The same texts in the same order give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all bytes, seen or not
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; `folder` appears whole or not at all."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,  # code is not prose: "a , b" must not come back as "a, b"
    ).save_pretrained(unfinished)
    unfinished.replace(folder)
