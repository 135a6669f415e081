"""The Python API for many requests at once: dynamic batching, with bit-identical output for those that ask for it."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from typing import Any

from .batch_drafters import BatchDrafter, BatchEngineDrafter, BatchLookup
from .batch_drafting import Drafting
from .batch_target import BatchTarget
from .box import Box, boxes
from .bundle import open_bundle
from .drafts import acceptance_prior, check_draft, draft_cache, draft_entry
from .errors import ParameterError
from .faults import Faults, Injector
from .handle import Handle
from .intake import Intake, check_flag, is_whole, one_of
from .kv import KVCache, kv_bytes
from .place import draft_place_of, place_of
from .receipt import Conditions, conditions_of, receipt_of
from .request import Request
from .scheduler import Scheduler
from .slots import Row, Slots
from .stats import EngineStats
from .tokenizer import Prompt

__all__ = ["Engine"]


class Engine:
    """Serves many requests from one bundle under dynamic batching. Thread-safe; close it, or use it in ``with``.

    Requests join and leave at any step, are admitted in the order in which they came, and share one pass over the
    target for each token. A request marked ``deterministic`` gets bit-identical ids and scores whatever else is
    served: only passes that the invariance check found to agree bit for bit on this box commit its tokens and KV.

    Args:
        bundle: the bundle's folder.
        max_batch: most requests at once; their KV memory is allocated up front.
        precision: of the target; None for the bundle's first.
        threads: thread count of the process; None for the count in force.
        draft: "none", "auto", or another draft of the bundle; used where stored costs say that it pays for the batch.
        window: most tokens of a replayed window; the bundle needs a verify engine ``[group, window]``.
        group: most windows of one replay.
        in_class: deterministic requests decode with the batch in a shape of the verifier's class (True, refused where
            there is none), are replayed window by window (False), or whichever costs less now (None).
        faults: faults to inject, for testing.
        backend: "onnxruntime", "tensorrt" or "tensorrt-rtx". This and the next three: see :class:`kvrelay.Pipeline`.
        provider: see there.
        draft_backend: see there.
        draft_provider: see there.
        progress: told what takes long on first use; may use what is open, but open nothing.

    Raises:
        KvrelayError: the bundle, a parameter or the box does not allow it; the message says which and what would.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        *,
        max_batch: int = 8,
        precision: str | None = None,
        threads: int | None = None,
        draft: str = "none",
        window: int = 16,
        group: int = 4,
        in_class: bool | None = None,
        faults: Faults | None = None,
        backend: str = "onnxruntime",
        provider: str | None = None,
        draft_backend: str | None = None,
        draft_provider: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("window", window), ("group", group)):
            if not is_whole(value) or value < 1:
                raise ParameterError(f"{name}={value!r}: a whole number of at least 1")
        if in_class is not None:
            check_flag("in_class", in_class)
        place = place_of(backend, provider)
        draft_place = draft_place_of(place, draft_backend, draft_provider)
        self._bundle = open_bundle(bundle)
        # Now: the process may change its working directory. A name that is no UTF-8 is shown, or no receipt could be.
        self._folder = os.fsencode(self._bundle.path.resolve()).decode(errors="backslashreplace")
        self.precision = one_of("precision", precision, self._bundle.precisions())
        self.max_batch, self.window, self.group = int(max_batch), int(window), int(group)
        self.drafts = check_draft(self._bundle, self.precision, draft)
        self.draft = draft
        self._intake = Intake(self._bundle)
        box, draft_box = boxes(self._bundle, threads, progress, place, draft_place, self.max_batch)
        self.threads = box.threads
        injector = Injector(faults or Faults(), self._bundle.target.vocab_size)
        decode = self._bundle.engine("decode", self.precision)
        cache = box.cache(decode, max(self.max_batch, self.group))
        self.kv_bytes = cache.bytes
        self._target = BatchTarget(
            box,
            self.precision,
            cache,
            max_batch=self.max_batch,
            window=self.window,
            group=self.group,
            drafting=draft != "none",
            injector=injector,
        )
        if in_class:
            self._target.require_class_steps(self.max_batch)
        drafters = [self._drafter(name, draft_box, cache, injector) for name in self._wanted_drafts()]
        drafting = Drafting(drafters, partial(acceptance_prior, self._bundle, self.precision))
        slots = Slots(cache.slots, self.max_batch, _swapper([cache.swap, *(d.swap for d in drafters)]))
        self._conditions = conditions_of(
            box,
            self.precision,
            self._target.committing_engines(),
            self._target.windows,
        )
        self._scheduler = Scheduler(
            self._target, slots, drafting, injector, in_class=None if in_class is None else bool(in_class)
        )
        # When the engine is dropped without close(), and before the interpreter ends.
        weakref.finalize(self, self._scheduler.close)

    def submit(
        self,
        prompt: Prompt,
        *,
        deterministic: bool = False,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Handle:
        """Queue a request and return its handle at once.

        Args:
            prompt: text (taken as it is), chat messages (put through the chat template), or token ids.
            deterministic: ids and scores do not depend, bit for bit, on what else is served; the result has a receipt.
            max_new_tokens: this and the rest: see :meth:`kvrelay.Pipeline.stream`.
            temperature: see there.
            top_k: see there.
            top_p: see there.
            min_p: see there.
            repetition_penalty: see there.
            frequency_penalty: see there.
            presence_penalty: see there.
            seed: see there.
            stop: see there.
            ignore_eos: see there.

        Raises:
            ParameterError: a parameter is out of range.
            PromptError: the prompt is empty, or does not fit the context.
            ExactnessError: ``deterministic`` cannot be kept on this box; says what differed.
            EngineError: the engine is closed, or was made before this process was forked.
        """
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "stop": list(stop) if isinstance(stop, Iterator) else stop,
            "ignore_eos": ignore_eos,
        }
        request = self._checked(prompt, deterministic, {**options, "seed": seed})
        model = self._bundle.target
        request.stats.kv_bytes = kv_bytes(model, model.layers, self._target.cache.dtype.itemsize, model.capacity)
        receipt = None
        if deterministic:
            request.stats.policy = self._target.describe()
            receipt = partial(
                receipt_of,
                request,
                folder=self._folder,
                conditions=self._conditions,
                group=self.group,
                window=self.window,
                options=_options_for_receipt(request, options),
            )
        handle = Handle(request, self._scheduler.wake, receipt)
        self._scheduler.submit(Row(request, bool(deterministic), handle))
        return handle

    def check(self, prompt: Prompt, *, deterministic: bool = False, **options: Any) -> None:
        """Refuse what :meth:`submit` would refuse of a request, and queue nothing.

        Args:
            prompt: as for :meth:`submit`.
            deterministic: as for :meth:`submit`.
            options: as for :meth:`submit`.

        Raises:
            KvrelayError: as :meth:`submit`.
        """
        self._checked(prompt, deterministic, options)

    @property
    def conditions(self) -> Conditions:
        """What the bits of a deterministic request's output depend on here besides the request."""
        return self._conditions

    @property
    def stats(self) -> EngineStats:
        """What the batch did so far."""
        return dataclasses.replace(self._scheduler.stats)

    def close(self) -> None:
        """End every request that has not ended, as cancelled, and give the memory back.

        Every call returns when the engine has stopped, a second one and one in a signal handler too.
        """
        self._scheduler.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, prompt: Prompt, deterministic: bool, options: dict[str, Any]) -> Request:
        check_flag("deterministic", deterministic)
        if deterministic:
            self._target.require_determinism()
        return self._intake.request(prompt, **options)

    def _wanted_drafts(self) -> list[str]:
        if self.draft == "auto":
            return [name for name in self.drafts if name not in ("none", "self")]
        return [] if self.draft == "none" else [self.draft]

    def _drafter(self, name: str, box: Box, cache: KVCache, injector: Injector) -> BatchDrafter:
        if name == "ngram":
            return BatchLookup()
        entry = draft_entry(self._bundle, self.precision, name)
        own_model = entry.model != self._bundle.manifest.target
        engine = box.engine(entry)
        own, hand_over = draft_cache(self._bundle, entry, cache, engine.memory)
        if own is not cache:
            self.kv_bytes += own.bytes
        ms = self._target.step_costs(entry, box)
        return BatchEngineDrafter(name, engine, own, ms, injector, own_model=own_model, hand_over=hand_over)


def _swapper(swaps: Sequence[Callable[[int, int, int], int]]) -> Callable[[int, int, int], int]:
    def swap(a: int, b: int, length: int) -> int:
        return sum(one(a, b, length) for one in swaps)

    return swap


def _options_for_receipt(request: Request, options: dict[str, Any]) -> dict[str, Any]:
    stop = options["stop"]
    return {
        **dataclasses.asdict(request.sampler.params),
        "seed": request.sampler.seed,
        "max_new_tokens": int(options["max_new_tokens"]),
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "ignore_eos": bool(options["ignore_eos"]),
    }
