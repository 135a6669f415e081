"""``kvrelay chat``: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..errors import PromptError
from ..pipeline import Pipeline
from . import options as o
from .run import cancel_on_interrupt
from .table import share

__all__ = ["chat"]


def chat(
    bundle: o.Bundle,
    draft: o.Draft = "auto",
    window: o.Window = None,
    precision: o.Precision = None,
    threads: o.Threads = None,
    exact: o.Exact = True,
    backend: o.Backend = "onnxruntime",
    provider: o.Provider = None,
    draft_backend: o.DraftBackend = None,
    draft_provider: o.DraftProvider = None,
    max_new_tokens: o.MaxNewTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    presence_penalty: o.PresencePenalty = 0.0,
    seed: o.Seed = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Chat; an empty line or Ctrl-D ends it, Ctrl-C stops an answer. Earlier turns stay in the KV cache."""
    o.require_output()
    console = Console(stderr=True)
    with o.opening(bundle, console) as progress:
        pipeline = Pipeline(
            bundle,
            draft=draft,
            window=window,
            precision=precision,
            threads=threads,
            exact=exact,
            backend=backend,
            provider=provider,
            draft_backend=draft_backend,
            draft_provider=draft_provider,
            progress=progress,
        )
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> ")
        except (EOFError, RuntimeError):  # RuntimeError: standard input is closed
            break
        except UnicodeDecodeError as error:
            raise PromptError(f"the message on standard input is not text: {error}") from None
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        stream = pipeline.stream(
            messages,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
        )
        with cancel_on_interrupt(stream):
            for piece in stream:
                print(piece, end="", flush=True)
        print(flush=True)
        result = stream.result
        messages.append({"role": "assistant", "content": result.text})
        s = result.stats
        speed = "-" if s.tokens_per_second is None else f"{s.tokens_per_second:.1f} tokens/s"
        console.print(
            f"[{s.emitted} tokens, {speed}, first after {s.ttft * 1000:.0f} ms, {s.reused_tokens} of "
            f"{s.prompt_tokens} prompt tokens reused, acceptance {share(s.acceptance)}]",
            style="dim",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
