"""Totals of an engine's phases."""

import pytest

from foredraft.engine import timings
from foredraft.engine.timings import Timings


def test_totals_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr(timings, "perf_counter", lambda: next(clock))
    found = Timings()
    with found.measure("draft"):
        pass
    with found.measure("verify"):
        pass
    found.add("verify", 1.0)
    assert found.seconds == {"draft": 0.5, "verify": 3.0, "observe": 0.0}
    assert found.counts == {"draft": 1, "verify": 2, "observe": 0}
