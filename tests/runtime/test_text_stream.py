"""Text as it comes: whole characters, no part of a stop string, and joined the same as decoded at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvrelay.text import TextStream
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SAMPLE = "\u010f\u00e1belsk\u00e9 \U0001f642\U0001f642 \u4f60\u597d"
PLAIN_BYTES: Tokenizer = byte_tokenizer().backend_tokenizer


def merged_bytes() -> Tokenizer:
    """A byte-level BPE whose tokens hold parts of characters, several characters, or both."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE * 5, "the stopping of the stops \u4f60\u4f61\u4f62\u597d"] * 20, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece: words with a mark for the space before them, bytes for what it does not know."""
    words = ["\u2581", "\u2581the", "\u2581stop", "ping", "op", *"abcdefghijklmnopqrstuvwxyz.,\u00e9\u4f60"]
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    merges = [("o", "p")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
NAMES = {b: chr(b if b in PRINTABLE else 256 + OTHERS.index(b)) for b in range(256)}  # GPT-2's names of bytes
TOKENIZERS = {"bytes": PLAIN_BYTES, "merged bytes": merged_bytes(), "byte fallback": byte_fallback()}
tokenizers = pytest.mark.parametrize("kind", TOKENIZERS)
texts = st.text(
    st.sampled_from("abdeklopstn .\u00e1\u010f\u00e9\u4f60\u597d\u4f61\U0001f642\U0001f9d1\u200d\u0301"), max_size=30
)


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def stream(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """All pieces of a stream over ``ids``, checked to add up to its text at every moment."""
    text = TextStream(decoder(tokenizer), stop)
    pieces: list[str] = []
    for token in ids:
        pieces.append(text.push(token))
        assert "".join(pieces) == text.text
        if text.stopped:
            break
    pieces.append(text.finish())
    assert "".join(pieces) == text.text
    return pieces, text


@tokenizers
def test_characters_split_over_tokens_arrive_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(SAMPLE).ids
    pieces, text = stream(tokenizer, ids)
    assert text.text == decoder(tokenizer)(ids)
    assert text.text.lstrip(" ") == SAMPLE
    assert all("\ufffd" not in piece for piece in pieces)


@tokenizers
@settings(max_examples=150)
@given(parts=st.lists(texts, max_size=4))
def test_the_pieces_of_any_ids_join_to_what_decoding_at_once_gives(kind: str, parts: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    # Encoding part by part splits the text at places where encoding it whole would not.
    ids = [token for part in parts for token in tokenizer.encode(part).ids]
    pieces, text = stream(tokenizer, ids)
    assert text.text == decoder(tokenizer)(ids)
    assert all("\ufffd" not in piece for piece in pieces)


@tokenizers
@settings(max_examples=100)
@given(text=texts, places=st.lists(st.integers(0, 200), max_size=12))
@example(text="a\u4f60", places=[1, 1, 1, 1, 1])
def test_special_tokens_in_between_change_no_text(kind: str, text: str, places: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    special = tokenizer.token_to_id("</s>")
    ids = tokenizer.encode(text).ids
    for place in places:
        ids.insert(place % (len(ids) + 1), special)
    _, found = stream(tokenizer, ids)
    assert found.text == decoder(tokenizer)(ids)


@settings(max_examples=300)
@given(data=st.lists(st.sampled_from([0x41, 0x80, 0xBD, 0xA0, 0xE4, 0xF0, 0x9F, 0x99, 0x82, 0xFF, 0xC3]), max_size=14))
@example(data=[0x80, 0x80, 0x80, 0xE4, 0xBD, 0xA0])
def test_bytes_that_are_no_characters_cost_no_character_after_them(data: list[int]) -> None:
    ids = [PLAIN_BYTES.token_to_id(NAMES[b]) for b in data]
    _, text = stream(PLAIN_BYTES, ids)
    assert text.text.rstrip("\ufffd") == bytes(data).decode(errors="replace").rstrip("\ufffd")


@tokenizers
@settings(max_examples=200)
@given(
    text=texts,
    stops=st.lists(st.text(st.sampled_from("opst .\u00e1\u4f60\U0001f642"), min_size=1, max_size=5), max_size=3),
)
def test_no_part_of_a_stop_string_is_ever_given(kind: str, text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    full = decoder(tokenizer)(ids)
    found = [full.find(s) for s in stops if s in full]
    _, result = stream(tokenizer, ids, stops)
    if not found:
        assert (result.text, result.stopped) == (full, False)
        return
    assert result.stopped
    # Where stop strings overlap, the one that is complete first ends the text.
    complete = min(full.find(s) + len(s) for s in stops if s in full)
    assert result.text in {full[: full.find(s)] for s in stops if s in full[: complete + 4]}
    assert not any(s in result.text for s in stops)


def test_a_stop_string_before_a_broken_character_in_one_token_is_seen_at_once() -> None:
    decode = {0: "ab", 1: "op\ufffd", 2: "\ufffd"}
    text = TextStream(lambda ids: "".join(decode[i] for i in ids), ["op"])
    assert [text.push(0), text.push(1), text.stopped] == ["ab", "", True]


def test_a_possible_start_of_a_stop_string_is_held_until_it_is_none() -> None:
    text = TextStream(lambda ids: "".join(chr(i) for i in ids), ["stop", "top!"])
    assert [text.push(ord(c)) for c in "a stole it"] == ["a", " ", "", "", "", "stol", "e", " ", "i", ""]
    assert text.finish() == "t"
    assert text.text == "a stole it"


def test_a_held_start_is_given_at_the_end() -> None:
    text = TextStream(lambda ids: "".join(chr(i) for i in ids), ["stop"])
    assert [text.push(ord(c)) for c in "sto"] == ["", "", ""]
    assert text.finish() == "sto"
    assert text.finish() == ""


def test_spaces_at_the_start_of_words_are_kept() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id(t) for t in ("\u2581the", "\u2581stop", "ping", "\u2581", "\u2581the")]
    assert stream(tokenizer, ids)[0] == ["the", " stop", "ping", " ", " the", ""]
