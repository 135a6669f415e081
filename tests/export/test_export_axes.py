"""Nothing of the example that was traced is left in an engine: neither sizes nor positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from kvrelay import contract
from kvrelay.ort import OrtEngine
from kvrelay_export import lower
from kvrelay_export.graph import fix_shape, pair_logit_row
from tracing import Program, hf_logits, random_ids, step

DIALECTS = ("ort", "standard", "decomposed")
N = 8
SIZES = list(itertools.product((1, 2, 5), (1, 3, 17), (0, 1, 33)))


@pytest.fixture(scope="module")
def llama(program: Callable[..., Program]) -> Program:
    return program("llama")


@pytest.fixture(scope="module")
def ids(llama: Program) -> np.ndarray:
    return random_ids(llama.model, 5, 80)


@pytest.fixture(scope="module")
def expected(llama: Program, ids: np.ndarray) -> np.ndarray:
    return hf_logits(llama.model, ids)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("batch", "new", "past"), SIZES)
def test_any_batch_width_and_past_equals_hugging_face(
    llama: Program, ids: np.ndarray, expected: np.ndarray, dialect: str, batch: int, new: int, past: int
) -> None:
    engine = llama.engine(dialect)
    cache = llama.cache(engine, batch)
    if past:
        step(engine, cache, ids[:batch, :past], [0] * batch)
    logits = step(engine, cache, ids[:batch, past : past + new], [past] * batch)
    np.testing.assert_allclose(logits, expected[:batch, past : past + new], atol=2e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("width", [1, 2, 5])
def test_rows_of_different_lengths_equal_their_solo_runs(
    llama: Program, ids: np.ndarray, expected: np.ndarray, dialect: str, width: int
) -> None:
    lengths = [2, 9, 30]
    engine = llama.engine(dialect)
    cache = llama.cache(engine, 3)
    for slot, length in enumerate(lengths):
        bound = engine.bind(cache, length, 1, slot=slot)
        bound.input_ids[0] = ids[slot, :length]
        bound.logit_rows[:] = length - 1
        bound.run()
        np.testing.assert_allclose(bound.logits[0, 0], expected[slot, length - 1], atol=2e-5)
    for _ in range(3):
        window = np.stack([ids[row, length : length + width] for row, length in enumerate(lengths)])
        logits = step(engine, cache, window, lengths)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(logits[row], expected[row, length : length + width], atol=2e-5)
        lengths = [length + width for length in lengths]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("past", [0, 1, 7, 33])
def test_pads_of_a_fixed_window_change_neither_its_tokens_nor_the_next_window(
    llama: Program, ids: np.ndarray, expected: np.ndarray, dialect: str, past: int
) -> None:
    engine = llama.engine(dialect, shape=(1, N))
    for valid in range(N + 1):
        cache = llama.cache(engine)
        for start in range(0, past, N):
            step(engine, cache, np.resize(ids[:1, start:past], (1, N)), [start])
        window = np.full((1, N), 5)
        window[0, :valid] = ids[0, past : past + valid]
        logits = step(engine, cache, window, [past])
        np.testing.assert_allclose(logits[0, :valid], expected[0, past : past + valid], atol=2e-5)
        length = past + valid
        after = step(engine, cache, ids[:1, length : length + N], [length])
        np.testing.assert_allclose(after[0], expected[0, length : length + N], atol=2e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_fixed_group_takes_rows_of_different_lengths_and_dummies(
    llama: Program, ids: np.ndarray, expected: np.ndarray, dialect: str
) -> None:
    engine = llama.engine(dialect, shape=(4, N))
    cache = llama.cache(engine, 4)
    lengths = [0, 8, 16, 0]  # the last row is a dummy
    for start in (0, 8):
        step(engine, cache, ids[:4, start : start + N], [min(start, length) for length in lengths])
    window = np.stack([ids[row, length : length + N] for row, length in enumerate(lengths)])
    window[3] = 0
    logits = step(engine, cache, window, lengths)
    for row in range(3):
        start = lengths[row]
        np.testing.assert_allclose(logits[row], expected[row, start : start + N], atol=2e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logit_rows_picks_the_asked_positions_row_by_row(
    llama: Program, ids: np.ndarray, expected: np.ndarray, dialect: str
) -> None:
    engine = llama.engine(dialect)
    bound = engine.bind(llama.cache(engine, 2), 12, 3, batch=2)
    bound.input_ids[:] = ids[:2, :12]
    rows = np.array([[0, 11, 5], [3, 3, 10]])
    bound.logit_rows[:] = rows
    bound.run()
    for row in range(2):
        np.testing.assert_allclose(bound.logits[row], expected[row, rows[row]], atol=2e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_fixed_window_ends_exactly_at_the_capacity(llama: Program, dialect: str) -> None:
    capacity = llama.entry.capacity
    ids = random_ids(llama.model, 1, capacity, seed=3)
    engine, window = llama.engine(dialect), llama.engine(dialect, shape=(1, N))
    cache = llama.cache(engine)
    step(engine, cache, ids[:, : capacity - N], [0])
    logits = step(window, cache, ids[:, capacity - N :], [capacity - N])
    np.testing.assert_allclose(logits, hf_logits(llama.model, ids)[:, -N:], atol=5e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_axis_of_a_fixed_engine_is_a_number_and_kv_capacity_is_static_everywhere(
    llama: Program, dialect: str
) -> None:
    dynamic = llama.graph(dialect)
    fixed = fix_shape(dynamic, 4, N, N)

    def shapes(model: ir.Model) -> dict[str, list[int | str]]:
        values = (*model.graph.inputs, *model.graph.outputs)
        return {str(v.name): [d if isinstance(d, int) else str(d.value) for d in v.shape] for v in values}  # type: ignore[union-attr]

    kv = contract.past_names(range(2))
    new = contract.new_names(range(2)) if dialect == "decomposed" else []
    kv += [] if new else contract.present_names(range(2))
    assert shapes(fixed) == {
        "input_ids": [4, N],
        "write_index": [4],
        "logit_rows": [4, N],
        "logits": [4, N, 320],
        **{name: [4, 2, 256, 16] for name in kv},
        **{name: [4, 2, N, 16] for name in new},
    }
    assert shapes(dynamic) == {
        "input_ids": ["batch", "sequence"],
        "write_index": ["batch"],
        "logit_rows": ["batch", "rows"],
        "logits": ["batch", "rows", 320],
        **{name: ["batch", 2, 256, 16] for name in kv},
        **{name: ["batch", 2, "sequence", 16] for name in new},
    }


@pytest.mark.parametrize(
    ("dialect", "precision"),
    [(d, p) for d in DIALECTS for p in ("fp32", "int4") if p in lower.DIALECTS[d]],
)
def test_an_engine_with_one_logit_row_gives_the_bits_of_one_with_all(
    llama: Program, ids: np.ndarray, dialect: str, precision: str
) -> None:
    """On some CPUs the head's product of one row has other bits than one of several: it is shown its row twice."""
    dynamic = llama.graph(dialect, precision)
    made: dict[str, Any] = {"dialect": dialect, "shape": (1, N)}
    wide = llama.load(fix_shape(dynamic, 1, N, N), precision, **made)
    wanted = step(wide, llama.cache(wide), ids[:1, :N], [0])
    single = fix_shape(dynamic, 1, N, 1)
    pair_logit_row(single)
    path = llama.save(single)
    entry = llama.engine_entry(path, precision, **made).model_copy(update={"rows": 1})
    bound = OrtEngine(entry, path, prepared=False).bind(llama.cache(wide), N, 1)
    bound.input_ids[:] = ids[:1, :N]
    for row in range(N):
        bound.logit_rows[:] = row
        bound.run()
        np.testing.assert_array_equal(bound.logits[0], wanted[0, row : row + 1])
