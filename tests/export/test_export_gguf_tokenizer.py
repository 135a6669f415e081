"""The tokenizer built from GGUF metadata splits text as the model's own tokenizer file does."""

from __future__ import annotations

from typing import Any

import pytest
from gguf_models import CONTROL, TEMPLATE, USER_DEFINED, vocabulary, write_gguf
from kvrelay_export.errors import ExportError
from kvrelay_export.source import Checkpoint, load_checkpoint
from tiny import build_model
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = build_model(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)

    def make(pre: str | None, **metadata: Any) -> Checkpoint:
        path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        return load_checkpoint(str(write_gguf(path, model, pre=pre, **metadata)))

    return make


def split(checkpoint: Checkpoint, text: str) -> list[str]:
    """Pieces of ``text`` that merges never cross."""
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    assert tokenizer.pre_tokenizer is not None
    raw = text.encode()
    pieces, start = [], 0
    for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
        length = len(piece)  # a byte a character
        pieces.append(raw[start : start + length].decode())
        start += length
    assert start == len(raw)
    return pieces


# Written by hand from the splitting rules of each model's tokenizer.json.
SPLITS = {
    "gpt-2": {
        "a   12345 b": ["a", "  ", " 12345", " b"],
        "I'M don't": ["I", "'", "M", " don", "'t"],
        "x\n\n\n  y": ["x", "\n\n\n ", " y"],
        "end. \r\nNew": ["end", ".", " \r", "\n", "New"],
        "1234567": ["1234567"],
        "né(è)": ["né", "(", "è", ")"],
    },
    "smollm": {
        "a   12345 b": ["a", "   ", "1", "2", "3", "4", "5", " b"],
        "I'M don't": ["I", "'", "M", " don", "'t"],
        "x\n\n\n  y": ["x", "\n\n\n ", " y"],
        "end. \r\nNew": ["end", ".", " \r", "\n", "New"],
        "1234567": ["1", "2", "3", "4", "5", "6", "7"],
        "né(è)": ["né", "(", "è", ")"],
    },
    "llama-bpe": {
        "a   12345 b": ["a", "  ", " ", "123", "45", " b"],
        "I'M don't": ["I", "'M", " don", "'t"],
        "x\n\n\n  y": ["x", "\n\n\n", " ", " y"],
        "end. \r\nNew": ["end", ".", " \r\n", "New"],
        "1234567": ["123", "456", "7"],
        "né(è)": ["né", "(è", ")"],
    },
    "qwen2": {
        "a   12345 b": ["a", "  ", " ", "1", "2", "3", "4", "5", " b"],
        "I'M don't": ["I", "'M", " don", "'t"],
        "x\n\n\n  y": ["x", "\n\n\n", " ", " y"],
        "end. \r\nNew": ["end", ".", " \r\n", "New"],
        "1234567": ["1", "2", "3", "4", "5", "6", "7"],
        "né(è)": ["né", "(è", ")"],
    },
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_model_s_own_tokenizer_splits_it(load: Any, pre: str) -> None:
    checkpoint = load(pre)
    assert {text: split(checkpoint, text) for text in SPLITS[pre]} == SPLITS[pre]


@pytest.mark.parametrize("pre", SPLITS)
def test_merges_work_inside_the_pieces_and_decoding_gives_the_text_back(load: Any, pre: str) -> None:
    tokenizer = Tokenizer.from_str(load(pre, tokenizer__ggml__add_bos_token=False).tokenizer_json)
    text = "Years later the river, 12 bytes: é 日 \U0001f600\n  end"
    encoding = tokenizer.encode(text)
    assert len(encoding.ids) < len(text.encode())
    assert tokenizer.decode(encoding.ids) == text


def test_llama_bpe_takes_a_whole_word_of_the_vocabulary_before_merges(load: Any) -> None:
    tokens, merges = vocabulary(316)
    tokens += ["zqzq", "Ġzzzz"]
    arguments = {"tokens": tokens, "merges": merges, "tokenizer__ggml__add_bos_token": False}
    whole = Tokenizer.from_str(load("llama-bpe", **arguments).tokenizer_json)
    assert whole.encode("zqzq zzzz").ids == [316, 317]
    merged = Tokenizer.from_str(load("qwen2", **arguments).tokenizer_json)
    assert 316 not in merged.encode("zqzq zzzz").ids


@pytest.mark.parametrize("pre", ["tekken", "deepseek-llm", None])
def test_an_unknown_splitting_is_refused_by_name(load: Any, pre: str | None) -> None:
    with pytest.raises(ExportError, match=rf"tokenizer\.ggml\.pre={pre!r} is not supported; supported: gpt-2, smollm"):
        load(pre)


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("smollm", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", True, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_bos_token_is_added_if_the_file_says_so(load: Any, pre: str, flag: bool | None, adds: bool) -> None:
    metadata = {} if flag is None else {"tokenizer__ggml__add_bos_token": flag}
    tokenizer = Tokenizer.from_str(load(pre, **metadata).tokenizer_json)
    assert (tokenizer.encode("hello").ids[0] == 0) is adds
    assert tokenizer.encode("").ids == ([0] if adds else [])
    assert tokenizer.encode("hello", add_special_tokens=False).ids[0] != 0


def test_special_tokens_arrive_whole_with_their_ids_and_user_defined_ones_stay_visible(load: Any) -> None:
    tokenizer = Tokenizer.from_str(load("smollm").tokenizer_json)
    names = [*CONTROL, *USER_DEFINED]
    for token_id, name in enumerate(names):
        assert tokenizer.encode(f"a{name}b").ids == [*tokenizer.encode("a").ids, token_id, *tokenizer.encode("b").ids]
    assert tokenizer.decode(list(range(len(names)))) == "<tool call>"


def test_no_token_is_added_to_those_of_the_file(load: Any) -> None:
    checkpoint = load("smollm")
    assert checkpoint.vocab_size == 320
    vocab = Tokenizer.from_str(checkpoint.tokenizer_json).get_vocab(with_added_tokens=True)
    assert sorted(vocab.values()) == list(range(320))


def test_the_chat_template_arrives(load: Any) -> None:
    assert load("smollm").chat_template == TEMPLATE
