"""A model read from GGUF is the model that was written to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import write_gguf
from kvrelay_export.errors import ExportError
from kvrelay_export.source import load_checkpoint
from tiny import build_model
from tracing import hf_logits, random_ids, trace_program, with_random_biases
from transformers import PreTrainedModel

SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}


def made(family: str = "llama", **config: Any) -> PreTrainedModel:
    return with_random_biases(build_model(family, **config))


def assert_same_tensors(read: PreTrainedModel, written: PreTrainedModel) -> None:
    state, expected = read.state_dict(), written.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", SIX_HEADS),
        ("llama", {**SIX_HEADS, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("qwen2", SIX_HEADS),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_every_tensor_and_every_logit_survives_the_round_trip(
    tmp_path: Path, family: str, config: dict[str, Any], half: bool
) -> None:
    model = made(family, **{"head_dim": 16, **config})
    if half:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half().float())
    read = load_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", model, half=half))).model
    assert read.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert_same_tensors(read, model)
    ids = random_ids(model, 1, 51)
    np.testing.assert_array_equal(hf_logits(read, ids), hf_logits(model, ids))


def test_an_engine_from_gguf_equals_the_hugging_face_original_at_position_50(tmp_path: Path) -> None:
    model = made(**SIX_HEADS, head_dim=16, tie_word_embeddings=True)
    checkpoint = load_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", model)))
    traced = trace_program(checkpoint.model, tmp_path)
    ids = random_ids(model, 2, 51)
    logits = traced.logits(traced.engine(), ids)
    np.testing.assert_allclose(logits[:, 50], hf_logits(model, ids)[:, 50], atol=2e-5)


def llama3_divisors(theta: float, head_dim: int, rope: dict[str, Any]) -> np.ndarray:
    """`rope_freqs` as llama.cpp's converter computes it from a llama3 scaling."""
    old = rope["original_max_position_embeddings"]
    low, high = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            smooth = (old / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def test_llama3_scaling_stored_as_rope_freqs_is_applied(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = made(rope_parameters=rope)
    divisors = llama3_divisors(10000.0, 16, rope)
    assert set(divisors) >= {1.0, 8.0}
    path = write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": divisors})
    read = load_checkpoint(str(path)).model
    ids = random_ids(model, 1, 201)
    expected = hf_logits(model, ids)
    np.testing.assert_allclose(hf_logits(read, ids)[0, [5, 40, 200]], expected[0, [5, 40, 200]], atol=2e-5)
    assert np.abs(hf_logits(made(), ids)[0, 200] - expected[0, 200]).max() > 0.01
    assert read.config.rope_parameters["frequency_divisors"] == divisors.tolist()


def test_linear_scaling_in_the_metadata_is_applied(tmp_path: Path) -> None:
    model = made(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    metadata = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    read = load_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", model, **metadata))).model
    ids = random_ids(model, 1, 60)
    np.testing.assert_array_equal(hf_logits(read, ids), hf_logits(model, ids))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama__rope__scaling__type": "yarn"}, r"llama\.rope\.scaling\.type='yarn'"),
        ({"llama__expert_count": 8}, r"llama\.expert_count=8"),
        ({"llama__attention__sliding_window": 16}, r"llama\.attention\.sliding_window=16"),
        ({"llama__attention__key_length": 32}, r"llama\.rope\.dimension_count=16 is not the head size 32"),
    ],
)
def test_metadata_that_would_be_ignored_is_refused_by_key(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", made(), **metadata)
    with pytest.raises(ExportError, match=named):
        load_checkpoint(str(path))


def test_a_missing_tensor_is_refused_instead_of_filled_with_random_numbers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", made(), without=("blk.1.ffn_up.weight",))
    with pytest.raises(ExportError, match=r"1 missing tensor\(s\).*layers\.1\.mlp\.up_proj"):
        load_checkpoint(str(path))


def test_a_tensor_without_a_place_is_refused_instead_of_dropped(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", made(), tensors=extra)
    with pytest.raises(ExportError, match=r"blk\.0\.attn_sinks\.weight"):
        load_checkpoint(str(path))


def test_end_tokens_are_those_of_the_metadata_alone(tmp_path: Path) -> None:
    """The config that transformers makes of a GGUF file has Llama's defaults: 1 and 2."""
    path = write_gguf(tmp_path / "a.gguf", made(), tokenizer__ggml__eos_token_id=3, tokenizer__ggml__bos_token_id=0)
    checkpoint = load_checkpoint(str(path))
    assert (checkpoint.eos_id, checkpoint.eos_ids) == (3, [3])
    assert checkpoint.bos_id == 0
    more = {"tokenizer__ggml__eot_token_id": 2, "tokenizer__ggml__eom_token_id": 3}
    several = load_checkpoint(str(write_gguf(tmp_path / "b.gguf", made(), **more)))
    assert (several.eos_id, several.eos_ids) == (1, [1, 2, 3])


@pytest.mark.parametrize("keep", [0, 3, 200, 0.5, 0.999])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, keep: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", made())
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    with pytest.raises(ExportError, match=r"tiny\.gguf"):
        load_checkpoint(str(path))


def test_a_file_that_is_not_gguf_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(4000))
    with pytest.raises(ExportError, match=r"model\.gguf is no GGUF file, or truncated"):
        load_checkpoint(str(path))
