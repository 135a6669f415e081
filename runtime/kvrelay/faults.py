"""Faults on purpose, to test what deterministic requests promise when things go wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import EngineError, ParameterError

__all__ = ["Faults", "Injector"]


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares of events that are made to fail; 0 turns a kind off. A public option for testing.

    After any of them the committed output is right or the request fails with an error, and other requests go on.
    """

    rollback: float = 0.0  # of replayed windows with candidates: one candidate is made wrong
    engine: float = 0.0  # of engine runs: the run fails
    pads: float = 0.0  # of replayed windows with pads: there is no memory for them
    seed: int = 0  # of the draws; 0 or more

    def __post_init__(self) -> None:
        """Check the shares and the seed.

        Raises:
            ParameterError: one is out of range.
        """
        for name in ("rollback", "engine", "pads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ParameterError(f"faults: {name}={value!r}: a share from 0 to 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
            raise ParameterError(f"faults: seed={self.seed!r}: a whole number of at least 0")


class Injector:
    """Draws faults."""

    def __init__(self, faults: Faults, vocab_size: int) -> None:
        self._faults = faults
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(faults.seed)

    def spoil(self, candidates: list[int]) -> list[int]:
        """Return the candidates of a window, with one of them made wrong if its rollback is drawn."""
        if not candidates or self._random.random() >= self._faults.rollback:
            return candidates
        at = int(self._random.integers(len(candidates)))
        wrong = (candidates[at] + 1) % self._vocab_size
        return [*candidates[:at], wrong, *candidates[at + 1 :]]

    def before_run(self, engine: str) -> None:
        """Fail the run of an engine if that is drawn.

        Raises:
            EngineError: it is.
        """
        if self._faults.engine and self._random.random() < self._faults.engine:
            raise EngineError(f"engine {engine} failed: injected fault")

    def before_pads(self) -> None:
        """Fail the allocation of pads if that is drawn.

        Raises:
            MemoryError: it is.
        """
        if self._faults.pads and self._random.random() < self._faults.pads:
            raise MemoryError("injected fault: no memory for the pads of a window")
