"""A SentencePiece vocabulary in a GGUF file gives the ids and the text that SentencePiece gives."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from gguf_models import write_gguf
from kvrelay_export.reference import TEXTS
from kvrelay_export.source import Checkpoint, load_checkpoint
from tiny import build_model
from tokenizers import Tokenizer

USER = "<|user|>"
SAMPLES = [
    *TEXTS,
    "hello  world",
    "  two before",
    "after  ",
    " ",
    "",
    "tab\tx\n\n  next",
    "1234 567",
    "Gr\u00f6\u00dfe \u65e5\u672c\u8a9e \U0001f642",
]
Load = Callable[..., Checkpoint]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def reference(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary as Llama 2 has it: BPE with bytes for what it does not know."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.splitlines() if line.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        add_dummy_prefix=request.param,
        user_defined_symbols=[USER],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def load(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Load:
    size = reference.get_piece_size()
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_model(vocab_size=size, **sizes)
    pieces = [(reference.id_to_piece(i), reference.get_score(i), token_type(reference, i)) for i in range(size)]

    def make(**metadata: Any) -> Checkpoint:
        path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        ids = {"bos": reference.bos_id(), "eos": reference.eos_id(), "unknown": reference.unk_id()}
        metadata |= {f"tokenizer__ggml__{name}_token_id": i for name, i in ids.items()}
        return load_checkpoint(str(write_gguf(path, model, pre="default", pieces=pieces, **metadata)))

    return make


def token_type(reference: Any, i: int) -> int:
    """The value of ``tokenizer.ggml.token_type``."""
    if reference.id_to_piece(i) == USER:
        return 4
    return 6 if reference.is_byte(i) else 2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 1


def test_ids_and_text_are_those_of_sentencepiece(reference: Any, load: Load) -> None:
    checkpoint = load(tokenizer__ggml__add_space_prefix=adds_prefix(reference))
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.vocab_size) == (1, [2], 600)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    for text in SAMPLES:
        ids = reference.encode(text)
        assert tokenizer.encode(text).ids == [1, *ids], text
        assert tokenizer.decode(ids) == reference.decode(ids) == text


def test_text_after_a_special_token_begins_anew_as_in_llama_cpp(reference: Any, load: Load) -> None:
    checkpoint = load(tokenizer__ggml__add_space_prefix=adds_prefix(reference))
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    a, b, user = reference.encode("a"), reference.encode("b"), reference.piece_to_id(USER)
    assert tokenizer.encode(f"a{USER}b</s>a", add_special_tokens=False).ids == [*a, user, *b, 2, *a]


def test_a_space_is_put_before_the_text_unless_the_file_says_no(reference: Any, load: Load) -> None:
    tokenizer = Tokenizer.from_str(load().tokenizer_json)
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["\u2581a"]


def adds_prefix(reference: Any) -> bool:
    return bool(reference.encode("a", out_type=str)[0].startswith("\u2581"))
