"""The invariance check finds what it is there to find: engines are doctored, and the verdicts must say how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import EngineError
from kvrelay.box import Box
from kvrelay.bundle import open_bundle
from kvrelay.findings import Findings
from kvrelay.fingerprint import PREFIX, Fingerprint, fingerprint, fingerprint_elsewhere
from kvrelay.invariance import Verdict, check_shapes, promise_of, shape_classes
from kvrelay.kv import KVCache
from kvrelay.shapes import Shape, TargetShapes, target_shapes
from kvrelay.survey import survey

Change = Callable[[Any, KVCache], None]


class Doctored:
    """An engine that changes its results after each run."""

    def __init__(self, engine: Any, change: Change) -> None:
        self.entry = engine.entry
        self.memory = engine.memory
        self._engine = engine
        self._change = change

    def bind(self, cache: KVCache, *args: Any, **kwargs: Any) -> Any:
        return DoctoredPass(self._engine.bind(cache, *args, **kwargs), cache, self._change)


class DoctoredPass:
    """A bound pass of such an engine."""

    def __init__(self, bound: Any, cache: KVCache, change: Change) -> None:
        self._bound = bound
        self._cache = cache
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)

    def run(self) -> None:
        self._bound.run()
        self._change(self._bound, self._cache)


def doctored(shape: Shape, change: Change) -> Shape:
    return replace(shape, engine=Doctored(shape.engine, change))


def add(value: float) -> Change:
    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[:] += np.float32(value)

    return change


def fill(value: float) -> Change:
    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[:] = value

    return change


@pytest.fixture(scope="module")
def box(llama_bundle: Path) -> Box:
    return Box(open_bundle(llama_bundle), None)


@pytest.fixture(scope="module")
def shapes(box: Box) -> TargetShapes:
    return target_shapes(box, "fp32", max_batch=3)


@pytest.fixture(scope="module")
def dynamic_box(variants_bundle: Path) -> Box:
    return Box(open_bundle(variants_bundle), None)


def verdict_of(box: Box, shape: Shape) -> Verdict:
    return check_shapes(box.bundle.target, [shape], box.reference("fp32"))[shape.name]


def classes_of(box: Box, shapes: Sequence[Shape]) -> list[list[str]]:
    model, reference = box.bundle.target, box.reference("fp32")
    return shape_classes(model, shapes, check_shapes(model, shapes, reference), reference)


def by_width(shapes: TargetShapes, width: int) -> Shape:
    return next(s for s in shapes.verify if s.width == width)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_reference_without_numbers_is_refused(box: Box, shapes: TargetShapes, value: float) -> None:
    broken = doctored(box.reference("fp32"), fill(value))
    with pytest.raises(EngineError, match="fp32-verify-1x16@1x16 gives logits that are not finite or all zero"):
        check_shapes(box.bundle.target, [shapes.prefill], broken)


def test_a_reference_whose_kv_is_not_finite_is_refused(box: Box, shapes: TargetShapes) -> None:
    def spoil(bound: Any, cache: KVCache) -> None:
        if bound.write_index[0] == 19:  # the last window at the first depth: no later pass sees it
            cache.tensors["past_value.1"][0, 0, 19, 0] = np.nan

    broken = doctored(box.reference("fp32"), spoil)
    with pytest.raises(EngineError, match="KV entries that are not finite"):
        check_shapes(box.bundle.target, [shapes.prefill], broken)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_another_shape_without_numbers_lies_in_no_class(box: Box, shapes: TargetShapes, value: float) -> None:
    broken = doctored(shapes.plain[2], fill(value))
    verdict = verdict_of(box, broken)
    assert verdict.outside is not None
    assert verdict.unstable == "logits are not finite or all zero at context 3"
    assert classes_of(box, [shapes.prefill, broken]) == [[shapes.prefill.name]]


def test_pads_that_matter_are_found(box: Box, shapes: TargetShapes) -> None:
    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[:, 0] += np.float32(bound.input_ids[:, -1:] % 7)

    verdict = verdict_of(box, doctored(by_width(shapes, 8), change))
    assert verdict.outside is not None
    assert verdict.unstable is not None and verdict.unstable.endswith("when the pads change")


def test_neighbours_that_matter_are_found(box: Box, shapes: TargetShapes) -> None:
    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[0] += np.float32(bound.write_index[-1])

    verdict = verdict_of(box, doctored(shapes.steps[3][0], change))
    assert verdict.outside is not None and "row 0" in verdict.outside
    assert verdict.unstable is not None and verdict.unstable.endswith("neighbours change")


def test_a_last_row_that_differs_is_found(box: Box, shapes: TargetShapes) -> None:
    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[2, ..., 5] += np.float32(1e-3)

    verdict = verdict_of(box, doctored(shapes.steps[3][0], change))
    assert verdict.outside is not None and "in row 2" in verdict.outside
    assert verdict.unstable is not None


def test_a_place_in_the_window_that_matters_is_no_instability(box: Box, shapes: TargetShapes) -> None:
    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[:] *= np.arange(1, bound.logits.shape[1] + 1, dtype=np.float32)[:, None]

    odd = doctored(by_width(shapes, 16), change)
    verdict = verdict_of(box, odd)
    assert verdict.outside is not None
    assert verdict.unstable is None
    verdicts = {s.name: Verdict(None, None) for s in shapes.all} | {odd.name: verdict}
    assert promise_of(verdicts, shapes).windows == "aligned"


def test_kv_entries_are_compared_and_deep_contexts_are_tried(box: Box, shapes: TargetShapes) -> None:
    def change(bound: Any, cache: KVCache) -> None:
        if bound.write_index[0] > 30:
            cache.tensors["past_key.2"][0, 1, int(bound.write_index[0]), 3] += 1e-3

    assert verdict_of(box, doctored(by_width(shapes, 4), change)).outside == "KV entries differ at context 40"


def test_results_that_change_from_run_to_run_are_found(box: Box, shapes: TargetShapes) -> None:
    runs = iter(range(10**9))

    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[:] += np.float32(next(runs))

    verdict = verdict_of(box, doctored(by_width(shapes, 4), change))
    assert verdict.unstable is not None and "repeated runs" in verdict.unstable


def test_shapes_that_differ_in_logit_rows_have_names_verdicts_and_costs_of_their_own(
    box: Box, shapes: TargetShapes
) -> None:
    one = shapes.doubled[2]
    two = box.shape(one.engine.entry, 2, 2, 2)
    assert (one.name, two.name) == ("fp32-decode@2x2", "fp32-decode@2x2r2")
    assert shapes.prefill.name == "fp32-prefill-1x16@1x16", "fixed rows are the engine's own"
    assert by_width(shapes, 8).name == "fp32-verify-1x8@1x8"
    found = check_shapes(box.bundle.target, [one, doctored(two, add(1.0))], box.reference("fp32"))
    assert found[one.name] == verdict_of(box, one)
    assert found[two.name].outside is not None and "logits differ" in found[two.name].outside
    assert set(box.batch_ms("fp32", [one, two])) == {one.name, two.name}


@pytest.mark.parametrize(("width", "rows"), [(4, 2), (4, 3), (8, 5)])
def test_shapes_that_give_some_rows_of_their_window_are_compared_in_those(
    box: Box, shapes: TargetShapes, width: int, rows: int
) -> None:
    def last(bound: Any, _cache: KVCache) -> None:
        bound.logits[-1, -1] += np.float32(1e-3)

    shape = box.shape(shapes.plain[1].engine.entry, 2, width, rows)
    verdict = verdict_of(box, shape)
    assert verdict.unstable is None
    odd = verdict_of(box, doctored(shape, last))
    assert odd.outside is not None and odd.outside.startswith("logits differ by up to")
    # As a reference it gives the rest of its window in further runs.
    classes = classes_of(box, [doctored(shape, add(1.0)), doctored(shapes.plain[3], add(1.0))])
    assert classes[0] == [] and shape.name in classes[1]


def test_findings_from_before_names_told_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(found: str) -> list[str]:
        return Findings(tmp_path, ["here"]).remembered("kind", "fp32", "key", lambda: [found], list, again=False)

    with monkeypatch.context() as patch:
        patch.setattr("kvrelay.findings._FORMAT", "1")
        assert stored("old") == ["old"]
        assert stored("found anew") == ["old"]
    assert stored("found anew") == ["found anew"]


def test_engines_that_quantise_activations_lie_in_no_class(dynamic_box: Box) -> None:
    shapes = target_shapes(dynamic_box, "int8-dynamic", max_batch=2)
    verdicts = dynamic_box.verdicts("int8-dynamic", shapes.all)
    assert all(v.outside is not None for v in verdicts.values())
    wide = [s.name for s in shapes.all if s.batch * s.width > 1]
    assert all(verdicts[name].unstable is not None for name in wide)
    promise = promise_of(verdicts, shapes)
    assert (promise.windows, promise.committing) == (None, [])
    assert promise.refusal is not None and "int8-dynamic-verify-1x16@1x16 does not agree with itself" in promise.refusal
    classes = shape_classes(dynamic_box.bundle.target, shapes.all, verdicts, dynamic_box.reference("int8-dynamic"))
    assert classes[0] == []
    assert not {name for names in classes for name in names} & set(wide)


def test_shapes_outside_the_verifiers_class_are_sorted_pair_by_pair(box: Box, shapes: TargetShapes) -> None:
    inside = [shapes.prefill, by_width(shapes, 8), shapes.steps[1][0], shapes.steps[2][0]]
    # References of these classes have one row, several, and one row of logits for two tokens.
    one = [doctored(s, add(1.0)) for s in (by_width(shapes, 4), shapes.steps[3][0])]
    two = [doctored(s, add(2.0)) for s in (shapes.doubled[2], by_width(shapes, 2), shapes.doubled[3])]
    mixed = [inside[0], one[0], two[0], inside[1], two[1], one[1], inside[2], two[2], inside[3]]
    found = classes_of(box, mixed)
    assert found == [[s.name for s in part] for part in (inside, one, two)]


def test_a_class_is_left_for_one_late_difference(box: Box, shapes: TargetShapes) -> None:
    def late(bound: Any, _cache: KVCache) -> None:
        bound.logits[:] += np.float32(1.0)
        bound.logits[:, :, 7] += np.float32(bound.write_index[0] >= 40)

    a, b = doctored(by_width(shapes, 4), add(1.0)), doctored(by_width(shapes, 8), late)
    assert classes_of(box, [a, b]) == [[], [a.name], [b.name]]


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_the_real_engines_are_partitioned(box: Box, precision: str) -> None:
    shapes = target_shapes(box, precision, max_batch=2)
    verdicts = box.verdicts(precision, shapes.all)
    classes = shape_classes(box.bundle.target, shapes.all, verdicts, box.reference(precision))
    assert sorted(name for names in classes for name in names) == sorted(s.name for s in shapes.all)
    assert {s.name for s in shapes.verify} <= set(classes[0])


def test_what_may_commit_follows_from_the_verdicts(shapes: TargetShapes) -> None:
    good = {s.name: Verdict(None, None) for s in shapes.all}
    apart, unstable = Verdict("differs", None), Verdict("differs", "differs when the pads change")
    sliding = promise_of({**good, shapes.plain[1].name: unstable}, shapes)
    assert sliding.windows == "sliding"
    assert sliding.committing == [s for s in shapes.all if s is not shapes.plain[1]]
    aligned = promise_of({**good, shapes.prefill.name: apart}, shapes)
    assert (aligned.windows, aligned.committing) == ("aligned", [shapes.main, shapes.prefill])
    refused = promise_of({**good, shapes.main.name: unstable}, shapes)
    assert (refused.windows, refused.committing) == (None, [])
    assert refused.refusal == f"{shapes.main.name} does not agree with itself (differs when the pads change)"


def test_a_fingerprint_is_the_same_in_another_process_and_tells_what_changed(box: Box, shapes: TargetShapes) -> None:
    some = [shapes.prefill, by_width(shapes, 4), shapes.steps[2][0]]
    here = fingerprint(box, "fp32", some)
    assert set(here.sha256) == {*(s.name for s in some), PREFIX}
    assert here.repeated and here.prefix_kept
    elsewhere = fingerprint_elsewhere(box, "fp32", box.threads, [s.name for s in some])
    assert here == elsewhere

    def slight(bound: Any, _cache: KVCache) -> None:
        bound.logits[-1, ..., 3] = np.nextafter(bound.logits[-1, ..., 3], np.float32(9))

    changed = fingerprint(box, "fp32", [*some[:2], doctored(some[2], slight)])
    assert here.differences(changed) == [some[2].name]


def test_a_fingerprint_notices_what_does_not_repeat_and_refuses_what_is_no_number(
    box: Box, shapes: TargetShapes
) -> None:
    runs = iter(range(10**9))

    def change(bound: Any, _cache: KVCache) -> None:
        bound.logits[0, 0, 0] += np.float32(next(runs))

    assert not fingerprint(box, "fp32", [shapes.prefill, doctored(shapes.plain[1], change)]).repeated
    for value in (float("nan"), 0.0):
        with pytest.raises(EngineError, match="fp32-decode@1x1 gives logits that are not finite or all zero"):
            fingerprint(box, "fp32", [shapes.prefill, doctored(shapes.plain[1], fill(value))])


def test_a_prompt_continued_from_its_middle_in_another_class_is_noticed(box: Box, shapes: TargetShapes) -> None:
    def change(bound: Any, cache: KVCache) -> None:
        at = int(bound.write_index[0])
        cache.tensors["past_key.0"][0, :, at : at + 4] += 1e-3

    # A prompt's last tokens go through this engine, and where they begin depends on where the prompt was continued.
    assert not fingerprint(box, "fp32", [shapes.prefill, doctored(by_width(shapes, 4), change)]).prefix_kept


def test_fingerprints_of_other_logit_rows_are_told_apart(box: Box, shapes: TargetShapes) -> None:
    one = shapes.doubled[2]
    some = [shapes.prefill, one, box.shape(one.engine.entry, 2, 2, 2)]
    elsewhere = fingerprint_elsewhere(box, "fp32", box.threads, [s.name for s in some])
    assert elsewhere == fingerprint(box, "fp32", some)
    assert elsewhere.sha256[some[1].name] != elsewhere.sha256[some[2].name]


@pytest.mark.parametrize("name", ["fp32-nothing@1x1", "fp32-decode@1x0", "fp32-decode@1x2r1", "fp32-verify-1x8@1x4"])
def test_a_process_that_fails_says_why(box: Box, name: str) -> None:
    with pytest.raises(EngineError, match=r"a process that checks fp32 on 1 thread\(s\) failed: .*no such shape"):
        fingerprint_elsewhere(box, "fp32", 1, [name])


def test_a_survey_reports_what_other_processes_changed(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(_bundle: Path, precision: str, threads: int, names: Sequence[str]) -> Fingerprint:
        return Fingerprint(precision, threads, dict.fromkeys([*names, PREFIX], str(threads)), True, True)

    monkeypatch.setattr("kvrelay.survey.fingerprint_elsewhere", elsewhere)
    monkeypatch.setattr("kvrelay.survey.fingerprint", lambda *_: elsewhere(Path(), "fp32", box.threads, names))
    every = target_shapes(box, "fp32", max_batch=2)
    names = [s.name for s in promise_of(box.verdicts("fp32", every.all), every).committing]
    found = survey(box, "fp32", 2, again=True, progress=lambda _: None).processes
    assert found is not None
    assert (found.process_changes, found.other_threads, found.threads_change) == ([], 1, [*names, PREFIX])
