"""Tiny real models, made in seconds: random weights, a byte-level tokenizer, saved as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 256 + len(SPECIALS)
PADDED_VOCAB_SIZE = 320  # some tokenizer classes of transformers add special tokens of their own

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: ids 0..3 are special, 4.. are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:]
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(family: str = "llama", *, seed: int = 0, scale: float = 0.1, **config: object) -> PreTrainedModel:
    """A random model whose greedy text does not loop at once: weights are larger than the usual 0.02."""
    config_class, model_class = _FAMILIES[family]
    settings: dict[str, object] = {
        "vocab_size": PADDED_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": scale,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        **config,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).eval()
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=settings["eos_token_id"])
    return model


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Save ``model`` and its tokenizer to ``folder`` and return it."""
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def target_model() -> PreTrainedModel:
    """The model behind most bundles of the runtime tests."""
    return build_model("llama", num_hidden_layers=3)


def cousin_of(model: PreTrainedModel, *, noise: float = 0.004, padded_vocab_size: int = 384) -> PreTrainedModel:
    """A copy with a little noise on its weights and a padded tail whose logits are the largest by far."""
    cousin = build_model("llama", num_hidden_layers=3, vocab_size=padded_vocab_size)
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in cousin.state_dict().items():
            rows = state[name].shape[0]
            weight[:rows] = state[name] + noise * torch.randn(state[name].shape, generator=generator)
        # Loud whatever the hidden state is: one of a row and its negative is large.
        head = cousin.lm_head.weight
        head[PADDED_VOCAB_SIZE:] = 3.0 * torch.randn(head[PADDED_VOCAB_SIZE:].shape, generator=generator)
    return cousin


def tied_model() -> PreTrainedModel:
    """``target_model`` with output rows that come in pairs, a rounding error apart: shape classes flip its tokens."""
    model = target_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::4] = head[::4] * (1 + 3e-7 * torch.randn(head[::4].shape, generator=generator))
    return model
