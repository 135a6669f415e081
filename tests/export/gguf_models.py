"""Write a tiny model as GGUF, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from kvrelay_export.reference import TEXTS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

__all__ = ["CONTROL", "TEMPLATE", "USER_DEFINED", "permute", "vocabulary", "write_gguf"]

CONTROL = ["<|begin|>", "<|end|>", "<|turn|>", "<｜wide▁name｜>"]  # noqa: RUF001 - as DeepSeek spells its tokens
USER_DEFINED = ["<tool call>"]
TEMPLATE = "{{ messages[0].content }}"
_ARCH = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def vocabulary(size: int = 320) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a byte-level BPE of ``size`` tokens with the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*CONTROL, *USER_DEFINED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda t: vocab[t])
    # Merges in the order in which their results got their ids.
    merges = []
    for token in tokens[len(CONTROL) + len(USER_DEFINED) + 256 :]:
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges.append(next(h for h in halves if all(vocab.get(part, size) < vocab[token] for part in h)))
    return tokens, merges


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of q and k: pairs of a rotation lie side by side."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    half: bool = False,
    pre: str | None = "smollm",
    tokens: list[str] | None = None,
    merges: list[tuple[str, str]] | None = None,
    pieces: list[tuple[str, float, int]] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    **metadata: Any,
) -> Path:
    """Write ``model`` and a byte-level BPE to ``path``.

    Args:
        path: the file.
        model: a tiny model.
        half: store matrices as F16.
        pre: ``tokenizer.ggml.pre``, or None to leave it out.
        tokens: of the tokenizer; the first are special.
        merges: of the tokenizer.
        pieces: a SentencePiece vocabulary instead: text, score and type of each token.
        tensors: more tensors.
        without: tensors left out.
        metadata: more keys, with "__" for ".".
    """
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "llama":
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config.vocab_size)
    if family == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if tokens is None:
        tokens, merges = vocabulary(config.vocab_size)
    special = len(CONTROL)
    kinds = [3 if i < special else 4 if i < special + len(USER_DEFINED) else 1 for i in range(len(tokens))]
    if pieces is not None:
        tokens, scores, kinds = (list(column) for column in zip(*pieces, strict=True))
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges([" ".join(merge) for merge in merges or []])
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_chat_template(TEMPLATE)
    settings = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    settings |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    names = gguf.get_tensor_name_map(_ARCH[family], config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        stem, _, kind = key.rpartition(".")
        name = f"{names.get_name(stem)}.{kind}"
        if name in without or (key == "lm_head.weight" and config.tie_word_embeddings):
            continue
        data = tensor.detach().numpy().astype(np.float32)
        if family == "llama" and ".q_proj." in key:
            data = permute(data, config.num_attention_heads)
        if family == "llama" and ".k_proj." in key:
            data = permute(data, config.num_key_value_heads)
        writer.add_tensor(name, data.astype(np.float16) if half and data.ndim == 2 else np.ascontiguousarray(data))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
