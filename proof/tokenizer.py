# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for the tiny checkpoints: one word a token id.

The engram's compressed vocabulary merges words that differ only in case: the last
quarter of the first 4096 ids spells the third quarter in capitals.
"""

import json
from pathlib import Path

from . import model

IMAGE_WORD = "<｜deepseek_image｜>"
"""DeepSeek's placeholder; vLLM looks it up by this spelling."""


def word(token: int) -> str:
    quarter = model.WORDS // 4
    if token < model.WORDS - quarter or token >= model.WORDS:
        return f"word{token}"
    return f"WORD{token - quarter}"


def write_tokenizer(folder: Path, words: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for ``words`` token ids."""
    vocabulary = {word(token): token for token in range(words)}
    added = []
    if words > model.IMAGE_TOKEN:
        del vocabulary[word(model.IMAGE_TOKEN)]
        vocabulary[IMAGE_WORD] = model.IMAGE_TOKEN
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": model.IMAGE_TOKEN, "content": IMAGE_WORD, "special": True, **flags}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": word(2)},
    }
    special = {"bos_token": word(0), "eos_token": word(1), "pad_token": word(2)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": word(2), **special}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
