"""Correct what a tokenizer built from GGUF metadata loses: the pre-tokenizer, and whether a BOS token is added.

transformers rebuilds vocabulary, merges and special tokens, but gives every byte-level BPE model the GPT-2 splitting.
Which splitting a model was trained with is named by ``tokenizer.ggml.pre``; the patterns below are the ones of the
models' own tokenizer files.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors

from .errors import ExportError

__all__ = ["correct_tokenizer"]

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


def correct_tokenizer(path: Path, tokenizer: Tokenizer) -> list[int]:
    """Correct ``tokenizer`` in place from the metadata of the GGUF file at ``path``.

    Returns:
        The ids that end a generation.

    Raises:
        ExportError: the file names a splitting that is not known here; guessing one would change every prompt.
    """
    fields = GGUFReader(path).fields

    def read(key: str) -> object:
        field = fields.get(f"tokenizer.ggml.{key}")
        return field.contents() if field is not None else None

    kind, pre = read("model"), read("pre")
    if kind == "gpt2":
        if pre not in _PRE:
            raise ExportError(
                f"{path.name}: tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(_PRE)}. "
                "Export from the model's Hugging Face directory instead"
            )
        tokenizer.pre_tokenizer = _PRE[str(pre)]()
        if pre == "llama-bpe":
            # Its tokenizer takes a whole word of the vocabulary before it tries merges.
            tokenizer.model.ignore_merges = True
    adds_bos = read("add_bos_token")
    if adds_bos is None:
        adds_bos = kind == "llama" or _ADDS_BOS.get(str(pre), False)
    bos_id = read("bos_token_id")
    if adds_bos and isinstance(bos_id, int):
        token = tokenizer.id_to_token(bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, bos_id)]
        )
    elif kind == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    found = [read(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    return [i for i in found if isinstance(i, int)]
