"""The tokenizer that a GGUF file describes.

Byte-level BPE is built here: transformers adds special tokens of its own to it, drops some of the file's, and splits
text as GPT-2 does where it does not know better. Which splitting a model was trained with is named by
``tokenizer.ggml.pre``; the patterns below are the ones of the models' own tokenizer files. Of a SentencePiece
vocabulary transformers recovers the merges right, but not where a space is put before the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import ExportError
from .gguf_file import GgufFile

__all__ = ["GgufTokenizer", "read_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece spells a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}
# Whether a BOS token is added where the file does not say, as llama.cpp decides it.
_ADDS_BOS = {"llama-bpe": True}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer with what belongs to it."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    eos_ids: list[int]
    chat_template: str | None


def read_tokenizer(file: GgufFile, converted: Tokenizer | None) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file.

    Args:
        file: the file.
        converted: what transformers makes of it; used for SentencePiece.

    Raises:
        ExportError: the file has no tokenizer, one of another kind, or names a splitting that is not known here;
            guessing one would change every prompt.
    """

    def read(key: str) -> Any:
        return file.read(f"tokenizer.ggml.{key}")

    kind, pre = read("model"), read("pre")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(file, pre)
    elif kind == "llama" and converted is not None:
        tokenizer = _sentencepiece(converted, prefix=read("add_space_prefix") is not False)
    else:
        raise ExportError(
            f"{file.name}: tokenizer.ggml.model={kind!r} is not supported; supported: gpt2, llama. "
            "Export from the model's Hugging Face directory instead"
        )
    adds_bos = read("add_bos_token")
    if adds_bos is None:
        adds_bos = kind == "llama" or _ADDS_BOS.get(str(pre), False)
    bos_id = read("bos_token_id")
    if adds_bos and isinstance(bos_id, int):
        token = tokenizer.id_to_token(bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:1", special_tokens=[(token, bos_id)]
        )
    elif kind == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    eos_id = read("eos_token_id")
    found = [eos_id, read("eot_token_id"), read("eom_token_id")]
    return GgufTokenizer(
        tokenizer=tokenizer,
        bos_id=bos_id if isinstance(bos_id, int) else None,
        eos_id=eos_id if isinstance(eos_id, int) else None,
        eos_ids=[i for i in found if isinstance(i, int)],
        chat_template=file.read("tokenizer.chat_template"),
    )


def _byte_level_bpe(file: GgufFile, pre: Any) -> Tokenizer:
    if pre not in _PRE:
        raise ExportError(
            f"{file.name}: tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(_PRE)}. "
            "Export from the model's Hugging Face directory instead"
        )
    tokens, merges = file.read("tokenizer.ggml.tokens"), file.read("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ExportError(f"{file.name}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
        # The tokenizer of Llama 3 takes a whole word of the vocabulary before it tries merges.
        ignore_merges=pre == "llama-bpe",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, file.read("tokenizer.ggml.token_type") or [], strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


def _sentencepiece(tokenizer: Tokenizer, *, prefix: bool) -> Tokenizer:
    """Put a space before the text, even before one, and after each special token, as SentencePiece and llama.cpp do."""
    marks = [normalizers.Replace(" ", _SPACE)]
    strips = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        marks.insert(0, normalizers.Prepend(_SPACE))
        strips.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(strips)
    return tokenizer
