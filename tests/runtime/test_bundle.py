"""A bundle that is not what its manifest says is refused at once, with one clear error."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvrelay import BundleError, CacheDirectoryError, Engine, EngineError, KvrelayError, Pipeline
from kvrelay.boxcache import cache_directory, lock
from kvrelay.bundle import open_bundle
from kvrelay.ort.prepared import prepare
from rig import PROMPT, assert_same, plain


@pytest.fixture
def bundle(llama_bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama_bundle, tmp_path / "copy"))


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = bundle / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def damaged_files(bundle: Path) -> list[Path]:
    """One file of each kind: engine, weights, tokenizer, chat template."""
    weights = json.loads((bundle / "manifest.json").read_text())["weights"]["path"]
    return [bundle / n for n in ("int4-verify-1x8.onnx", weights, "tokenizer.json", "chat_template.jinja")]


@pytest.mark.parametrize("kind", range(4))
def test_a_truncated_file_is_named_with_both_sizes(bundle: Path, kind: int) -> None:
    file = damaged_files(bundle)[kind]
    size = file.stat().st_size
    os.truncate(file, size // 2)
    with pytest.raises(BundleError, match=rf"{file.name} has {size // 2} bytes, the manifest says {size}"):
        Pipeline(bundle)
    os.truncate(file, 0)
    with pytest.raises(BundleError, match=rf"{file.name} has 0 bytes"):
        open_bundle(bundle)


@pytest.mark.parametrize("kind", range(4))
def test_an_altered_byte_is_found_even_after_the_file_was_verified(bundle: Path, kind: int) -> None:
    open_bundle(bundle)
    file = damaged_files(bundle)[kind]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=rf"{file.name} has SHA-256 .* altered; export it again"):
        Pipeline(bundle)


@pytest.mark.parametrize("kind", range(4))
def test_a_missing_file_is_named(bundle: Path, kind: int) -> None:
    file = damaged_files(bundle)[kind]
    file.unlink()
    with pytest.raises(BundleError, match=rf"{file.name} is missing"):
        Pipeline(bundle)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer schema": (lambda m: m.update(schema_version=2), "schema version 2, this kvrelay reads up to 1: upgrade"),
    "newer schema with unknown keys": (lambda m: m.update(schema_version=9, new=1), "schema version 9"),
    "no schema": (lambda m: m.pop("schema_version"), "not valid at schema_version"),
    "unknown key": (lambda m: m.update(colour="red"), "not valid at colour"),
    "unknown key of an engine": (lambda m: m["engines"][0].update(speed=1), r"not valid at engines\.0\.speed"),
    "unknown role": (lambda m: m["engines"][0].update(role="guess"), r"not valid at engines\.0\.role"),
    "unknown target": (lambda m: m.update(target="nobody"), "target 'nobody' is not among the models"),
    "unknown model of an engine": (lambda m: m["engines"][0].update(model="nobody"), "unknown model 'nobody'"),
    "engine named twice": (lambda m: m["engines"][1].update(name=m["engines"][0]["name"]), "not unique"),
    "layer that is none": (lambda m: m["engines"][0].update(kv_layers=[0, 9]), r"a layer outside 0\.\.2"),
    "hash that is none": (lambda m: m["weights"].update(sha256="abc"), r"not valid at weights\.sha256"),
    "verify without a shape": (
        lambda m: next(e for e in m["engines"] if e["role"] == "verify").update(sequence=None),
        "needs a fixed batch",
    ),
    "file outside": (lambda m: m["tokenizer"].update(path="../tokenizer.json"), "lies outside the bundle"),
    "absolute path": (lambda m: m["tokenizer"].update(path="/etc/hostname"), "lies outside the bundle"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_not_ours_is_refused_with_the_place(bundle: Path, case: str) -> None:
    change, message = MANIFESTS[case]
    edit(bundle, change)
    with pytest.raises(BundleError, match=message) as error:
        Pipeline(bundle)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "\xff"])
def test_a_manifest_that_is_no_json_object_is_refused(bundle: Path, content: str) -> None:
    (bundle / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BundleError, match=r"manifest\.json (cannot be read|is not valid)"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("fp32-decode", "0 fp32 engines of role decode, 1 is needed"),
        ("fp32-prefill-1x16", "0 fp32 engines of role prefill"),
        ("fp32-verify-", "precision='fp32': this bundle has int4"),
        (("fp32-verify-", "int4-verify-"), "has no verify engine"),
    ],
)
def test_a_manifest_that_lacks_an_engine_of_the_loop_is_refused(
    bundle: Path, lost: str | tuple[str, ...], message: str
) -> None:
    edit(bundle, lambda m: m.update(engines=[e for e in m["engines"] if not e["name"].startswith(lost)]))
    with pytest.raises(KvrelayError, match=message):
        Pipeline(bundle, precision="fp32")
    with pytest.raises(KvrelayError, match=message):
        Engine(bundle, precision="fp32", window=4, group=1)


def test_a_folder_without_a_manifest_and_no_folder_at_all_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="the folder does not exist"):
        Pipeline(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json"):
        Pipeline(tmp_path)


def test_a_bundle_works_from_any_place_and_by_any_path(
    llama_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plain(llama_bundle).generate(PROMPT, max_new_tokens=10)
    place = tmp_path / "a space" / "\u00e9 and e\u0301"
    place.mkdir(parents=True)
    bundle = Path(shutil.copytree(llama_bundle, place / "bundle"))
    (tmp_path / "link").symlink_to(bundle)
    monkeypatch.chdir(place)
    for path in (bundle, str(bundle), "bundle", Path("bundle"), "../\u00e9 and e\u0301/bundle", tmp_path / "link"):
        assert_same(plain(path).generate(PROMPT, max_new_tokens=10), wanted)  # type: ignore[arg-type]
    moved = tmp_path / "moved"
    bundle.rename(moved)
    assert_same(plain(moved).generate(PROMPT, max_new_tokens=10), wanted)


def test_a_read_only_bundle_is_left_as_it_is(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_bundle: Path
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "elsewhere"))

    def state() -> dict[str, int]:
        return {str(f): f.stat().st_mtime_ns for f in (bundle, *bundle.rglob("*"))}

    for file in bundle.iterdir():
        file.chmod(0o444)
    bundle.chmod(0o555)
    before, beside = state(), set(tmp_path.iterdir())
    try:
        found = Pipeline(bundle, draft="skip", window=8).generate(PROMPT, max_new_tokens=20)
    finally:
        bundle.chmod(0o755)
    assert_same(found, plain(llama_bundle).generate(PROMPT, max_new_tokens=20))
    bundle.chmod(0o555)
    assert state() == before
    bundle.chmod(0o755)
    assert set(tmp_path.iterdir()) - beside == {tmp_path / "elsewhere"}


def test_without_a_named_cache_one_lies_beside_the_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRELAY_CACHE")
    names = {f.name for f in bundle.iterdir()}
    plain(bundle).generate(PROMPT, max_new_tokens=2)
    assert (bundle.parent / "kvrelay-cache").is_dir()
    assert {f.name for f in bundle.iterdir()} == names


def test_a_cache_beside_that_cannot_be_written_gives_way_to_the_users(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRELAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (bundle.parent / "kvrelay-cache").write_text("a file is no folder")
    plain(bundle)
    assert list((tmp_path / "user" / "kvrelay").iterdir())


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheDirectoryError, match="set KVRELAY_CACHE to a writable folder"):
        Pipeline(bundle)


def test_a_second_start_prepares_and_measures_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    told: list[str] = []
    first = Pipeline(bundle, draft="self", progress=told.append)
    assert any("first use" in line for line in told)
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "cache").rglob("*") if f.is_file()}
    told.clear()
    second = Pipeline(bundle, draft="self", progress=told.append)
    assert not any("first use" in line for line in told)
    after = {f: f.stat().st_mtime_ns for f in (tmp_path / "cache").rglob("*") if f.is_file()}
    assert {f: t for f, t in after.items() if f.name != "lock"} == {f: t for f, t in before.items() if f.name != "lock"}
    assert second._lanes.facts == first._lanes.facts
    assert_same(second.generate(PROMPT, max_new_tokens=10), first.generate(PROMPT, max_new_tokens=10))


def test_a_stored_fact_that_is_damaged_is_made_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    plain(bundle)
    for file in (tmp_path / "cache").rglob("*.json"):
        if file.name.startswith(("costs-", "shapes-", "verified")):
            file.write_text(file.read_text()[:20])
    assert len(plain(bundle).generate(PROMPT, max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("content", ["{}", "[1]", '{"a": 1}', '"text"'])
def test_stored_facts_of_another_form_are_made_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    plain(bundle, "int4")
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text(content)
    for prepared in (tmp_path / "cache").rglob("*.onnx"):
        prepared.unlink()
    assert len(plain(bundle, "int4").generate(PROMPT, max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_pool_that_lost_weights_is_refused_and_never_filled_with_zeros(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    plain(bundle)
    (pool,) = (tmp_path / "cache").rglob("weights.bin")
    os.truncate(pool, 100_000) if damage == "cut" else pool.unlink()
    for _ in range(2):
        with pytest.raises(EngineError, match=f"weights.bin has .* damaged, delete {pool.parent}"):
            plain(bundle, "int4")
    assert not pool.exists() or pool.stat().st_size == 100_000
    shutil.rmtree(pool.parent)
    assert len(plain(bundle, "int4").generate(PROMPT, max_new_tokens=3).token_ids) == 3


def test_what_a_killed_preparation_left_behind_is_removed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    plain(bundle)
    (pool,) = (tmp_path / "cache").rglob("weights.bin")
    (pool.parent / "work-killed").mkdir()
    (pool.parent / "work-killed" / "weights.bin").write_bytes(b"half")
    plain(bundle, "int4")
    assert not list(pool.parent.glob("work-*"))


def test_an_open_pipeline_needs_neither_its_bundle_nor_its_cache(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    pipe = Pipeline(bundle, draft="cousin", window=4)
    wanted = pipe.generate(PROMPT, max_new_tokens=10)
    shutil.rmtree(bundle)
    shutil.rmtree(tmp_path / "cache")
    stream = pipe.stream(PROMPT, max_new_tokens=10)
    next(stream)
    assert_same(pipe.generate(PROMPT, max_new_tokens=10), wanted)  # in a lane that is made now
    list(stream)
    assert_same(stream.result, wanted)


def test_a_full_disk_is_one_clear_error(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CacheDirectoryError, match=r"cannot write .*verified\.json: No space left .* free space"):
        Pipeline(bundle)


def test_waiting_for_another_process_is_told(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    plain(bundle)
    told, waiting = [], threading.Event()

    def progress(line: str) -> None:
        told.append(line)
        if line.startswith("waiting"):
            waiting.set()

    with lock(cache_directory(bundle)):
        opening = threading.Thread(target=Pipeline, args=(bundle,), kwargs={"draft": "none", "progress": progress})
        opening.start()
        assert waiting.wait(60), told
    opening.join(60)
    assert not opening.is_alive()


def test_a_cache_whose_lock_cannot_be_taken_is_one_clear_error(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    (cache_directory(bundle) / "lock").mkdir()
    with pytest.raises(CacheDirectoryError, match=r"cannot lock .*lock: Is a directory; set KVRELAY_CACHE"):
        Pipeline(bundle)


@pytest.mark.parametrize("path", [None, 5, b"bytes"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(BundleError, match=r"^bundle="):
        Pipeline(path)


def test_engines_share_one_copy_of_equal_weights_on_disk(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    pipe = plain(bundle)  # measures, so that every engine of fp32 and every draft is prepared
    (pool,) = (tmp_path / "cache").rglob("weights.bin")
    size = pool.stat().st_size
    for name in ("fp32-verify-1x16", "fp32-draft-skip", "fp32-prefill-1x16"):
        assert next(e for e in pipe._bundle.manifest.engines if e.name == name)
    weights = pipe._bundle.manifest.weights.bytes
    assert size < 2.2 * weights, "seven fp32 engines would otherwise take seven times the weights"


def test_a_changed_pool_of_packed_weights_is_refused_and_an_intact_one_is_not(
    llama_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    source = next(e for e in open_bundle(llama_bundle).manifest.engines if e.name == "fp32-decode")
    model = llama_bundle / source.file.path
    prepared = prepare(model, source.file.sha256, tmp_path)
    pool = prepared.parent / "weights.bin"
    with pool.open("ab") as file:
        file.write(b"what a killed run left behind")
    assert prepare(model, source.file.sha256, tmp_path) == prepared
    content = bytearray(pool.read_bytes())
    content[100] ^= 1
    pool.write_bytes(content)
    with pytest.raises(EngineError, match="damaged"):
        prepare(model, source.file.sha256, tmp_path)
