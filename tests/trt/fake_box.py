"""A box with a fake GPU: bundles, plans and the draft-verify loop on it, and the same loop on ONNX Runtime."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorrt, plan_bytes
from kvrelay.bundle import Bundle
from kvrelay.cuda import Device
from kvrelay.drafters import Drafter, EngineDrafter, NgramDrafter
from kvrelay.engine import LoadedEngine
from kvrelay.intake import Intake, Result, result_of
from kvrelay.kv import KVCache
from kvrelay.loop import generate
from kvrelay.manifest import EngineEntry
from kvrelay.ort import OrtEngine
from kvrelay.policy import Costs, Policy
from kvrelay.target import Target
from kvrelay.trt import buffers
from kvrelay.trt.device import PlanDevice
from kvrelay.trt.engine import TrtEngine
from kvrelay.trt.plans import Plan, key_of

DEVICE = PlanDevice("tensorrt", "10.16.1", ("sm87",), "Fake GPU")


class FakeBox:
    """A fake GPU and the engines on it."""

    def __init__(self, folder: Path, version: str = "10.16.1", *, captures: bool = False) -> None:
        self.folder = folder
        self.cuda = FakeCuda()
        self.library = FakeTensorrt(self.cuda, version, captures=captures)

    def plan(self, bundle: Bundle, entry: EngineEntry, max_batch: int = 4, **changes: Any) -> Plan:
        """A plan on disk; ``changes`` make it wrong on purpose."""
        model = bundle.manifest.models[entry.model]
        data = plan_bytes(entry, model, bundle.path / entry.file.path, max_batch, **changes)
        return self.stored(bundle, entry, data, max_batch)

    def stored(self, bundle: Bundle, entry: EngineEntry, data: bytes, max_batch: int = 4) -> Plan:
        """A plan of any bytes."""
        path = self.folder / f"{entry.name}.plan"
        path.write_bytes(data)
        key = key_of(entry, bundle, DEVICE, max_batch)
        return Plan(path, key, hashlib.sha256(data).hexdigest(), len(data))

    def engine(self, bundle: Bundle, entry: EngineEntry, *, graphs: bool = True, **changes: Any) -> TrtEngine:
        """A loaded engine."""
        plan = self.plan(bundle, entry, **changes)
        return TrtEngine(entry, bundle.manifest.models[entry.model], plan, self.library, graphs=graphs)


@contextmanager
def fake_box(folder: Path, version: str = "10.16.1", *, captures: bool = False) -> Iterator[FakeBox]:
    """A box whose GPU is fake; afterwards nothing may be left on it, and no rule broken."""
    with pytest.MonkeyPatch.context() as patch:
        box = FakeBox(folder, version, captures=captures)
        patch.setattr("kvrelay.cuda.calls.cuda_runtime", lambda: box.cuda)
        patch.setattr(Device, "_one", None)
        gc.freeze()  # only what the test makes is looked through afterwards
        yield box
        leave(box)
        gc.unfreeze()


def leave(box: FakeBox) -> None:
    """Drop the device and require that everything on it was freed, and that no rule was broken."""
    box.library.contexts.clear()
    box.library.hook = lambda _: None
    buffers._scratch.clear()
    gc.collect()
    if Device._one is not None:
        with Device._one.exclusive():
            pass  # frees what waited for that
    Device._one = None
    assert box.cuda.violations == []
    if not box.cuda.lost:
        assert box.cuda.live() == [], f"{box.cuda.failing} {gc.get_count()}"


def bundle_of_dialect(bundle: Bundle, dialect: str) -> Bundle:
    """The same bundle, its engines said to be of another dialect."""
    engines = [e.model_copy(update={"dialect": dialect}) for e in bundle.manifest.engines]
    return Bundle(bundle.path, bundle.manifest.model_copy(update={"engines": engines}))


class Loop:
    """One lane of the draft-verify loop over engines of either backend."""

    def __init__(
        self, bundle: Bundle, box: FakeBox | None, draft: str = "none", window: int = 4, **changes: Any
    ) -> None:
        self.bundle = bundle
        self.window = window
        self._box = box
        self._changes = changes
        self._intake = Intake(bundle)
        precision = bundle.precisions()[0]
        model = bundle.target
        own = [e for e in bundle.engines(precision=precision) if e.model == bundle.manifest.target]
        engines = {e.name: self._engine(e) for e in own}
        memory = "host" if box is None else "cuda"
        (prefill,) = bundle.engines(role="prefill", precision=precision)
        (decode,) = bundle.engines(role="decode", precision=precision)
        self.cache = KVCache(model, range(model.layers), decode.kv_dtype, memory=memory)
        verify = {
            e.sequence: engines[e.name].bind(self.cache, e.sequence, e.rows)
            for e in bundle.engines(role="verify", precision=precision)
            if e.batch == 1 and e.sequence and e.rows
        }
        assert prefill.sequence
        first = engines[prefill.name].bind(self.cache, prefill.sequence, 1)
        self.target = Target(self.cache, verify, first, verify[min(verify)], mixed_prefill=False)
        self.drafter: Drafter | None = None
        if draft == "ngram":
            self.drafter = NgramDrafter()
        elif draft == "self":
            step = engines[decode.name]
            self.drafter = EngineDrafter("self", lambda width: step.bind(self.cache, width, 1))
        elif draft != "none":
            entry = next(e for e in bundle.manifest.engines if e.draft == draft)
            own = KVCache(bundle.manifest.models[entry.model], entry.kv_layers, entry.kv_dtype, memory=memory)
            engine = self._engine(entry)
            self.drafter = EngineDrafter(draft, lambda width: engine.bind(own, width, 1), own_model=True)

    def _engine(self, entry: EngineEntry) -> LoadedEngine:
        if self._box is None:
            return OrtEngine(entry, self.bundle.path / entry.file.path, prepared=False)
        return self._box.engine(self.bundle, entry, **self._changes)

    def __call__(self, prompt: Sequence[int], **options: Any) -> Result:
        """Generate."""
        request = self._intake.request(list(prompt), **{"seed": 7, **options})
        drafters = [] if self.drafter is None else [self.drafter]
        verify = dict.fromkeys(self.target.windows, 10.0)
        costs = Costs(10.0, verify, verify, {d.name: 0.1 for d in drafters})
        policy = Policy(
            drafters=drafters, costs=costs, windows=[self.window], prior=lambda *_: 0.9, fixed=bool(drafters)
        )
        for _ in generate(request, self.target, policy):
            pass
        return result_of(request)
