"""Build the baseline: the default model by onnxruntime-genai's own builder, in fp32 and int4.

    python tests/bench/genai_build.py CHECKPOINT_OUT          # with kvrelay's environment: saves the checkpoint
    python tests/bench/genai_build.py CHECKPOINT_OUT --build  # with genai's environment: builds fp32 and int4

Two environments, because the two projects must not share one. Genai's was made with onnxruntime-genai 0.18.0, onnx,
onnx-ir, torch and transformers 5: its builder imports models that transformers 4 does not have.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def save_checkpoint(folder: Path) -> None:
    """Save the default model as a plain float32 Hugging Face directory."""
    from kvrelay_export.source import DEFAULT_MODEL, resolve
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = resolve(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # A model loaded from GGUF still counts as quantised, and refuses to be saved, until these marks are gone.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def build(checkpoint: Path) -> None:
    """Run genai's builder for both precisions, with its own defaults."""
    for precision in ("fp32", "int4"):
        output = checkpoint.parent / f"genai-{precision}"
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(output)]
        subprocess.run([*builder, "-p", precision, "-e", "cpu", "-c", str(checkpoint.parent / "cache")], check=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    build(target) if "--build" in sys.argv else save_checkpoint(target)
