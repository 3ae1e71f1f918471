# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's files, read by the tokenizers library. What vLLM makes of them:
test_names.py."""

import pytest

from proof import model, tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    def read(words):
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.write_tokenizer(folder, words)
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    return read


def test_every_id_is_one_word(read):
    found = read(model.WORDS)
    assert found.get_vocab_size() == model.WORDS
    words = [found.id_to_token(token) for token in range(model.WORDS)]
    assert found.encode(" ".join(words)).ids == list(range(model.WORDS))


def test_the_last_quarter_spells_the_third_in_capitals(read):
    found = read(model.WORDS)
    quarter = model.WORDS // 4
    words = [found.id_to_token(token) for token in range(model.WORDS)]
    assert [word.lower() for word in words[-quarter:]] == words[-2 * quarter : -quarter]
    assert len({word.lower() for word in words}) == model.COMPRESSED_WORDS


def test_the_image_word_is_special(read):
    found = read(model.IMAGE_WORDS)
    assert found.get_vocab_size() == model.IMAGE_WORDS
    text = f"word5 {tokenizer.IMAGE_WORD}word6"
    assert found.encode(text).ids == [5, model.IMAGE_TOKEN, 6]
    assert found.decode([5, model.IMAGE_TOKEN], skip_special_tokens=True) == "word5"
