"""Make a bundle for `gpu_check.py` on a workstation: a seeded model's graphs and a recipe, without the weights.

    python tests/gpu/make_bundle.py build/gpu-check

exports the default model's geometry in the dialects standard and decomposed: some minutes, a few MiB to carry.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from kvrelay.bundle import open_bundle
from kvrelay_export.exporter import export_bundle
from kvrelay_export.options import ExportOptions
from seeded import FORMS, Piece, seeded_weight, write_recipe
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["DEFAULT_GEOMETRY", "WINDOWS", "export_seeded", "without_weights"]

# SmolLM2-135M's, but for the head, which is not the embedding.
DEFAULT_GEOMETRY = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
WINDOWS = ((1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (4, 16))


def main() -> None:
    """Make the bundles that `make gpu-check` runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for dialect, drafts, verify in (
        ("standard", ("skip", "int4"), WINDOWS),
        ("decomposed", ("skip",), ((1, 2), (1, 8), (4, 8))),
    ):
        options = {"dialect": dialect, "precisions": ("fp16",), "drafts": drafts, "verify": verify, "context": 1024}
        without_weights(export_seeded(folder / dialect, DEFAULT_GEOMETRY, skip=_skip_list(30), **options))
        print(f"{folder / dialect} made")


def _skip_list(layers: int) -> tuple[str, ...]:
    return tuple(f"{kind}.{i}" for i in range(layers // 3, layers - 4, 6) for kind in ("attention", "mlp"))


def export_seeded(output: Path, geometry: dict[str, int], **options: object) -> Path:
    """Export a seeded Llama; ``options`` are those of :class:`ExportOptions`."""
    config = LlamaConfig(
        **geometry,  # type: ignore[arg-type]
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict({n: torch.from_numpy(seeded_weight(n, s)) for n, s in shapes.items()})
    _restore_buffers(model)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "seeded"
        model.save_pretrained(source)
        _tokenizer(geometry["vocab_size"]).save_pretrained(source)
        return export_bundle(
            ExportOptions(source=str(source), output=output, name="seeded", **options),  # type: ignore[arg-type]
        )


def _restore_buffers(model: LlamaForCausalLM) -> None:
    """Compute what is no weight again: memory that was emptied holds anything."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config)


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token for each id, so that every id may be chosen."""
    vocab = {"<s>": 0, "</s>": 1, **{f"t{i} ": i for i in range(2, size)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def without_weights(folder: Path) -> Path:
    """Replace the weights file of a seeded bundle by its recipe."""
    bundle = open_bundle(folder)
    weights = folder / bundle.manifest.weights.path
    content = weights.read_bytes()
    pieces = [_piece(content, *place) for place in _external(folder)]
    write_recipe(folder, weights.name, sorted(pieces, key=lambda p: p.offset))
    weights.unlink()
    return folder


def _external(folder: Path) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield name, dims, offset and length of each tensor of the weights file once."""
    seen = set()
    for file in sorted(folder.glob("*.onnx")):
        for tensor in onnx.load(file, load_external_data=False).graph.initializer:
            entry = {e.key: e.value for e in tensor.external_data}
            if entry and entry["offset"] not in seen:
                seen.add(entry["offset"])
                yield tensor.name, tuple(tensor.dims), int(entry["offset"]), int(entry["length"])


def _piece(content: bytes, name: str, dims: tuple[int, ...], offset: int, length: int) -> Piece:
    """Find the weight and the form behind a tensor; a constant is kept as it is."""
    wanted = content[offset : offset + length]
    weight, _, stored = name.replace("model.model.", "model.").partition(".weight")
    if stored or name.endswith(".weight"):
        weight += ".weight"
        transposed = stored.startswith("_t") and len(dims) == 2
        shape = (dims[1], dims[0] * (32 if "scale" in stored else 1)) if transposed else dims
        for form in _forms(stored, len(wanted) / int(np.prod(shape))):
            if FORMS[form](weight, shape) == wanted:
                return Piece(offset, length, weight, shape, form)
    if length > 2**21:
        raise SystemExit(f"{name} {dims} is too large to travel, and no form of {weight} has its bytes")
    return Piece(offset, length, "", (), base64.b64encode(wanted).decode())


def _forms(stored: str, bytes_each: float) -> list[str]:
    """Return the forms that a tensor may have, by what the exporter added to its name and by its size."""
    if "scale" in stored:
        return ["int4 scales kn"]
    if "int4" in stored:
        return ["int4 kn"]
    kind = {4: "float32", 2: "float16"}.get(int(bytes_each), "")
    return [kind, f"{kind} kn"] if kind else []


if __name__ == "__main__":
    main()
