"""Every CUDA call of the backend fails once: one clear error, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path

import pytest
from fake_box import FakeBox, bundle_of_dialect, fake_box
from kvrelay.bundle import Bundle
from kvrelay.cuda import Device, DeviceBuffer, PinnedArray, copy
from kvrelay.errors import CudaError, MemoryBudgetError
from kvrelay.kv import HandOver, KVCache


def whole_life(bundle: Bundle, box: FakeBox) -> None:
    """Use every part of the backend once: both dialects, plain and captured runs, rows, caches and their copies."""
    (entry,) = [e for e in bundle.engines(role="verify") if (e.batch, e.sequence) == (1, 2)]
    model = bundle.target
    appending = bundle_of_dialect(bundle, "decomposed")
    (other,) = [e for e in appending.engines(role="verify") if e.name == entry.name]
    cache = KVCache(model, range(model.layers), slots=2, memory="cuda")
    for engine in (box.engine(bundle, entry), box.engine(appending, other, append=True)):
        bound = engine.bind(cache, 2, 2, slot=1)
        for _ in range(3):
            bound.run()
        assert bound.logits.any()
    cache.swap(0, 1, 5)
    cache.clear(1)
    HandOver(cache, KVCache(model, [0, 2], memory="cuda")).advance(3)
    HandOver(cache, KVCache(model, [0, 2], "float16")).advance(3)


def test_each_call_that_fails_is_one_error_that_names_it_and_leaves_nothing(
    loop_bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvrelay.cuda")
    with fake_box(tmp_path) as box:
        whole_life(loop_bundle, box)
        gc.collect()
    calls = list(box.cuda.calls)
    assert len(calls) > 100
    for number, name in enumerate(calls):
        caplog.clear()
        with fake_box(tmp_path) as box:
            box.cuda.failing = number
            message = error_of_a_life(loop_bundle, box)
        if message is None:  # in a finaliser, which waits and frees: there is nobody to tell but the log
            assert "Free" in name or "Destroy" in name or name == "cudaStreamSynchronize", (number, name)
            message = next(r.getMessage() for r in caplog.records)
        assert re.fullmatch(r"CUDA cannot [a-z].*: cudaErrorLaunchFailure(; [\d.]+ of [\d.]+ MiB are free)?", message)


def error_of_a_life(bundle: Bundle, box: FakeBox) -> str | None:
    """The message of the error, None if there was none; its frames are gone with what they held."""
    try:
        whole_life(bundle, box)
    except CudaError as error:
        return str(error)
    return None


def test_no_room_on_the_gpu_is_said_with_the_numbers(loop_bundle: Bundle, fake: FakeBox) -> None:
    with pytest.raises(MemoryBudgetError, match=r"needs \d+ MiB, 1024 MiB are available"):
        KVCache(loop_bundle.target, range(3), slots=10**5, memory="cuda")
    with pytest.raises(CudaError, match=r"allocate 2048\.0 MiB on the GPU: cudaErrorMemoryAllocation; 1024\.0 of 1024"):
        DeviceBuffer(1 << 31)


def test_without_a_gpu_the_reason_is_said(fake: FakeBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.cuda, "cudaGetDeviceCount", lambda: (fake.cuda.cudaError_t.cudaSuccess, 0))
    with pytest.raises(CudaError, match="CUDA_VISIBLE_DEVICES"):
        Device.current()

    def missing() -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(fake.cuda, "cudaGetDeviceCount", missing)
    with pytest.raises(CudaError, match=r"no driver on this box: Failed to dlopen libcuda\.so\.1"):
        Device.current()


def test_memory_dropped_during_a_capture_is_freed_after_it(fake: FakeBox) -> None:
    device = Device.current()
    buffers = [DeviceBuffer(100), PinnedArray((9,), "float32")]
    with device.exclusive():
        fake.cuda.cudaStreamBeginCapture(device.stream.raw, 1)
        device.capturing = True
        buffers.clear()
        assert fake.cuda.live().count("memory") == fake.cuda.live().count("pinned") == 1
        code, graph = fake.cuda.cudaStreamEndCapture(device.stream.raw)
        assert code == 0
        device.capturing = False
        fake.cuda.cudaGraphDestroy(graph)
    assert not fake.cuda.memory
    assert not fake.cuda.pinned


def test_page_locked_memory_outlives_the_copies_from_it(fake: FakeBox) -> None:
    there, here = DeviceBuffer(64), PinnedArray((64,), "uint8")
    here.array[:] = 7
    copy(there.address, here.address, 64, "a test")
    del here
    assert not fake.cuda.pinned
    assert (fake.cuda.memory[there.address] == 7).all()


def test_views_keep_page_locked_memory(fake: FakeBox) -> None:
    view = PinnedArray((4, 4), "float32").array[1:, 2:]
    gc.collect()
    assert fake.cuda.live() == ["pinned", "stream"]
    assert not view.any()
    del view
    assert fake.cuda.live() == ["stream"]
