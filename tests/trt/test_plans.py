"""The plan cache: what is found, what is refused, and that nothing damaged is ever read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import RTX, edit_manifest
from kvrelay.boxcache import cache_directory
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.errors import CacheDirectoryError, PlanError
from kvrelay.manifest import EngineEntry
from kvrelay.trt.device import ANY_GPU, PlanDevice
from kvrelay.trt.plans import FOLDER, Plan, find_plan, key_of, publish_plan, read_plan, stored_plan
from kvrelay.trt.profiles import profiles_of

ORIN = PlanDevice("tensorrt", "10.16.1", ("sm87",), "Orin")
LAPTOP = PlanDevice(RTX, "1.7.1", ("sm86",), ANY_GPU)
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def bundle(standard_bundle: Path, cache: Path) -> Bundle:
    return open_bundle(standard_bundle)


def engine(bundle: Bundle, name: str = "int4-decode") -> EngineEntry:
    return next(e for e in bundle.manifest.engines if e.name == name)


def store(bundle: Bundle, device: PlanDevice = ORIN, name: str = "int4-decode", max_batch: int = 8) -> Plan:
    folder = cache_directory(bundle.path) / FOLDER
    folder.mkdir(exist_ok=True)
    entry = engine(bundle, name)
    return publish_plan(folder, entry, key_of(entry, bundle, device, max_batch), CONTENT)


def refusal(bundle: Bundle, device: PlanDevice, name: str = "int4-decode", max_batch: int = 1) -> str:
    with pytest.raises(PlanError) as caught:
        find_plan(bundle, engine(bundle, name), device, max_batch)
    message = str(caught.value)
    assert "\n" not in message and name in message
    return message


def test_a_published_plan_is_found_and_read(bundle: Bundle) -> None:
    made = store(bundle)
    found = find_plan(bundle, engine(bundle), ORIN, 8)
    assert found == made
    assert read_plan(found) == CONTENT


def test_without_a_plan_the_command_that_builds_it_is_named(bundle: Bundle) -> None:
    message = refusal(bundle, ORIN)
    assert "no plan for tensorrt 10.16.1, sm87 (Orin)" in message
    assert f"`kvrelay build {bundle.path}`" in message
    assert f"`kvrelay build {bundle.path} --backend tensorrt-rtx`" in refusal(bundle, LAPTOP)


@pytest.mark.parametrize(
    ("change", "stored", "wanted"),
    [
        ({"library_version": "10.3.0"}, "for tensorrt 10.16.1", "tensorrt 10.3.0, sm87 (Orin)"),
        ({"compute_capabilities": ("sm110",)}, "for sm87", "tensorrt 10.16.1, sm110 (Orin)"),
        ({"gpu_name": "Thor"}, "for Orin", "tensorrt 10.16.1, sm87 (Thor)"),
        ({"backend": RTX, "gpu_name": ANY_GPU}, "for tensorrt 10.16.1", "tensorrt-rtx 10.16.1, sm87"),
    ],
)
def test_a_plan_for_another_box_is_refused_with_both_sides_and_the_command(
    bundle: Bundle, change: dict[str, object], stored: str, wanted: str
) -> None:
    store(bundle)
    message = refusal(bundle, replace(ORIN, **change))  # type: ignore[arg-type]
    assert f"no plan for {wanted}; what is stored is {stored}: rebuild" in message
    assert f"with `kvrelay build {bundle.path}" in message


def test_one_plan_of_tensorrt_rtx_serves_each_of_its_devices_by_any_name(bundle: Bundle) -> None:
    made = store(bundle, replace(LAPTOP, compute_capabilities=("sm86", "sm89", "sm120")))
    for capability in ("sm86", "sm120"):
        assert find_plan(bundle, engine(bundle), replace(LAPTOP, compute_capabilities=(capability,))) == made
    assert "what is stored is for sm86, sm89, sm120" in refusal(bundle, replace(LAPTOP, compute_capabilities=("sm75",)))


def test_a_batch_beyond_the_profile_is_refused_and_the_smallest_that_holds_it_is_taken(bundle: Bundle) -> None:
    eight, two = store(bundle, max_batch=8), store(bundle, max_batch=2)
    assert eight.path != two.path
    assert find_plan(bundle, engine(bundle), ORIN, 1) == two
    assert find_plan(bundle, engine(bundle), ORIN, 3) == eight
    message = refusal(bundle, ORIN, max_batch=9)
    assert "batches of up to 8, 9 are needed" in message and "--max-batch 9`" in message


def test_a_changed_graph_profile_or_recipe_makes_an_old_plan_stale(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(bundle)
    entry = engine(bundle)
    changed = entry.model_copy(update={"file": entry.file.model_copy(update={"sha256": "1" * 64})})
    with pytest.raises(PlanError, match=r"what is stored is of another graph"):
        find_plan(bundle, changed, ORIN)
    with monkeypatch.context() as patch:
        patch.setattr("kvrelay.trt.plans.OPTIONS", ("something new",))
        assert "built by another version of kvrelay" in refusal(bundle, ORIN)
    monkeypatch.setattr("kvrelay.trt.profiles.DECODE_WIDTH", 32)
    assert "for other shapes" in refusal(bundle, ORIN)


def test_plans_of_another_bundle_are_not_seen(bundle: Bundle, tmp_path: Path) -> None:
    store(bundle)
    other = Path(shutil.copytree(bundle.path, tmp_path / "other"))
    assert find_plan(open_bundle(other), engine(bundle), ORIN)  # the same bundle in another place
    edit_manifest(other, lambda m: m.update(created="later"))
    refusal(open_bundle(other), ORIN)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: len(CONTENT) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_bytes(path: Path) -> None:
    path.write_bytes(CONTENT[::-1])


def an_onnx_file(path: Path) -> None:
    shutil.copy(path.parents[3] / "int4-decode.onnx", path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["has 5120 bytes", "10240 bytes with SHA-256"]),
        (empty, ["is empty", "10240 bytes with SHA-256"]),
        (other_bytes, ["has other content"]),
        (an_onnx_file, ["10240 bytes with SHA-256"]),
        (Path.unlink, ["cannot be read (No such file or directory)"]),
    ],
)
def test_a_damaged_plan_is_one_clear_error_that_names_the_file(
    bundle: Bundle, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    shutil.copy(bundle.path / "int4-decode.onnx", tmp_path)
    plan = store(bundle)
    damage(plan.path)
    with pytest.raises(PlanError) as caught:
        read_plan(find_plan(bundle, engine(bundle), ORIN))
    message = str(caught.value)
    assert message.startswith(str(plan.path)) and "run `kvrelay build` again" in message
    for word in words:
        assert word in message


def test_records_that_are_damaged_or_of_another_form_are_no_plans(bundle: Bundle) -> None:
    plan = store(bundle)
    record = plan.path.with_suffix(".json")
    good = json.loads(record.read_text())
    for text in ("", "[]", '{"engine": "int4-decode"}', json.dumps({**good, "key": {**good["key"], "more": 1}})):
        record.write_text(text)
        refusal(bundle, ORIN)
        assert stored_plan(record.parent, engine(bundle), plan.key) is None


def test_what_a_killed_build_left_is_not_found_and_goes_with_the_next(bundle: Bundle) -> None:
    plan = store(bundle)
    left = plan.path.with_name(f"{plan.path.name}xyz.part")
    left.write_bytes(CONTENT)
    orphan = plan.path.with_name("fp16-decode-0123456789abcdef.plan")  # killed before the record was written
    orphan.write_bytes(CONTENT)
    refusal(bundle, ORIN, "fp16-decode")
    store(bundle, name="fp16-decode")
    assert not left.exists()
    assert find_plan(bundle, engine(bundle, "fp16-decode"), ORIN)


def test_plans_are_found_in_every_place_that_may_be_the_cache(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = open_bundle(shutil.copytree(bundle.path, tmp_path / "copy"))
    monkeypatch.delenv("KVRELAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    beside = store(copy)
    assert beside.path.is_relative_to(tmp_path / "kvrelay-cache")
    assert find_plan(copy, engine(copy), ORIN) == beside
    shutil.move(tmp_path / "kvrelay-cache", tmp_path / "user" / "kvrelay")
    assert find_plan(copy, engine(copy), ORIN).path.is_relative_to(tmp_path / "user")


def test_a_plan_that_cannot_be_written_is_one_clear_error_and_leaves_nothing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvrelay.boxcache.os.fsync", full)
    with pytest.raises(CacheDirectoryError, match=r"No space left on device; free space there or set KVRELAY_CACHE"):
        store(bundle)
    assert not [f for f in (cache_directory(bundle.path) / FOLDER).iterdir() if f.name != "lock"]


def test_profiles_cover_decoding_and_prefill_of_dynamic_engines_and_one_shape_of_fixed_ones(bundle: Bundle) -> None:
    model = bundle.target
    decode, prefill = profiles_of(engine(bundle), model, 8)
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert decode.holds(8, 16, 1) and not decode.holds(9, 1, 1) and not decode.holds(1, 17, 1)
    assert prefill.holds(1, model.capacity - model.context, 1) and not prefill.holds(2, 1, 1)
    shapes = decode.shapes(engine(bundle), model)
    cache = (model.kv_heads, model.capacity, model.head_dim)
    assert shapes["input_ids"] == ((1, 1), (1, 1), (8, 16))
    assert shapes["write_index"] == ((1,), (1,), (8,))
    assert shapes["past_value.1"] == ((1, *cache), (1, *cache), (8, *cache))
    verify = engine(bundle, "int4-verify-2x4")
    (static,) = profiles_of(verify, model, 8)
    assert static.holds(2, 4, 4) and not static.holds(1, 4, 4)
    assert static.shapes(verify, model)["logit_rows"] == ((2, 4),) * 3
    skip = engine(bundle, "int4-draft-skip")
    assert set(profiles_of(skip, model, 8)[0].shapes(skip, model)) == {
        "input_ids",
        "write_index",
        "logit_rows",
        "past_key.0",
        "past_value.0",
    }
