"""The schema of a bundle's ``manifest.json``: what was exported. It never changes after the export."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "SCHEMA_VERSION",
    "Check",
    "Dialect",
    "EngineEntry",
    "FileEntry",
    "Generation",
    "Manifest",
    "ModelEntry",
    "Precision",
    "Role",
    "Strict",
]

SCHEMA_VERSION = 1

Precision = Literal["fp32", "fp16", "int8", "int4", "int8-dynamic"]
Dialect = Literal["ort", "standard", "decomposed"]
Float = Literal["float32", "float16"]
Role = Literal["draft", "decode", "step", "verify", "prefill"]
Size = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Unknown keys are refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(Strict):
    """A file of the bundle, by relative path."""

    path: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Check(Strict):
    """What the export's numeric check of an engine against torch measured."""

    tokens: int
    top1: float  # share of positions with the same most likely token as torch with the engine's own weights
    max_logit_diff: float  # largest absolute difference of any logit
    agreement: float  # share of positions with the same most likely token as the unquantised model
    # For float16 activations: the largest magnitude that each layer computes in float32, norm and head last. A backend
    # that computes in float16 overflows above 65504; one that computes in float32 between casts never shows it.
    activation_maxima: list[float] = []


class ModelEntry(Strict):
    """Sizes and origin of one model."""

    name: str
    family: str
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    vocab_size: Size  # ids that the tokenizer knows
    padded_vocab_size: Size  # rows of the embedding, columns of `logits`
    context: Size  # most tokens of prompt and output together
    capacity: Size  # KV entries a slot holds: context plus room for a window that starts at its end
    rope: dict[str, Any]
    source: str
    source_sha256: str


class EngineEntry(Strict):
    """One engine: its place in the loop, its shape and its file."""

    name: str
    role: Role
    model: str
    precision: Precision
    dialect: Dialect
    file: FileEntry
    batch: Size | None = None  # None: dynamic
    sequence: Size | None = None
    rows: Size | None = None
    activations: Float = "float32"  # what products, norms and attention take and give
    kv_dtype: Float = "float32"
    kv_layers: list[int]  # layers of the model whose cache the engine reads and writes
    draft: str | None = None  # the name under which the API offers a draft
    skip: list[str] = []  # sublayers that a layer-skipping draft leaves out
    check: Check | None = None

    @model_validator(mode="after")
    def _shape_fits_role(self) -> EngineEntry:
        fixed = [self.batch is not None, self.sequence is not None, self.rows is not None]
        if self.role in ("verify", "prefill") and not all(fixed):
            raise ValueError(f"engine {self.name}: role {self.role} needs a fixed batch, sequence and rows")
        if self.role in ("draft", "decode") and any(fixed):
            raise ValueError(f"engine {self.name}: role {self.role} has dynamic axes")
        if self.role == "step" and (self.batch, self.sequence, self.rows) != (None, 1, 1):
            raise ValueError(f"engine {self.name}: role step has a dynamic batch and one token a row")
        if self.role == "draft" and self.draft is None:
            raise ValueError(f"engine {self.name}: a draft needs a name")
        return self


class Generation(Strict):
    """Token facts and defaults that generation starts from."""

    bos_id: int | None
    eos_id: int | None  # the tokenizer's own, which a chat template means
    eos_ids: list[int]  # all that end a generation


class Manifest(Strict):
    """The whole bundle."""

    schema_version: Literal[1]
    kvrelay_version: str
    created: str
    tools: dict[str, str]
    target: str
    models: dict[str, ModelEntry]
    engines: list[EngineEntry]
    weights: FileEntry
    tokenizer: FileEntry
    chat_template: FileEntry | None
    generation: Generation

    @model_validator(mode="after")
    def _names_resolve(self) -> Manifest:
        if self.target not in self.models:
            raise ValueError(f"target {self.target!r} is not among the models {sorted(self.models)}")
        names = [e.name for e in self.engines]
        if len(set(names)) != len(names):
            raise ValueError(f"engine names are not unique: {sorted(names)}")
        for engine in self.engines:
            if engine.model not in self.models:
                raise ValueError(f"engine {engine.name} names an unknown model {engine.model!r}")
            layers = self.models[engine.model].layers
            if any(not 0 <= i < layers for i in engine.kv_layers):
                raise ValueError(f"engine {engine.name} names a layer outside 0..{layers - 1}")
        return self
