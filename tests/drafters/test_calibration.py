"""Calibration against rounds whose true acceptance is known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.calibration import (
    Calibration,
    Round,
    expected_calibration_error,
    fit_calibration,
    survival,
    survival_errors,
)
from foredraft.errors import UserError


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def simulated(count: int, temperatures: list[float], offsets: list[float], seed: int = 0) -> list[Round]:
    """Rounds of a drafter whose confidences are off by just these temperatures and offsets."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(count):
        true = rng.uniform(0.1, 0.95, len(temperatures))
        raw = [sigmoid((logit(p) - b) * t) for p, t, b in zip(true.tolist(), temperatures, offsets, strict=True)]
        kept = rng.uniform(size=len(true)) < true
        rounds.append(Round(tuple(raw), len(true) if kept.all() else int(kept.argmin())))
    return rounds


def test_calibration_error_by_hand() -> None:
    predicted = [0.05, 0.05, 0.95, 0.95, 0.55]
    outcome = [0, 1, 1, 1, 0]
    # Bins: |0.1 - 1|, |1.9 - 2|, |0.55 - 0|, over five predictions.
    assert expected_calibration_error(predicted, outcome, 10) == pytest.approx((0.9 + 0.1 + 0.55) / 5)
    assert expected_calibration_error([1.0, 0.0], [1, 0], 10) == 0
    assert expected_calibration_error([], [], 10) == 0


def test_a_fit_finds_what_was_done_to_the_confidences() -> None:
    temperatures, offsets = [0.5, 1.0, 1.7], [0.0, 0.8, -0.6]
    calibration = fit_calibration(simulated(20000, temperatures, offsets))
    assert calibration.temperatures == pytest.approx(temperatures, rel=0.2)
    assert calibration.offsets == pytest.approx(offsets, abs=0.15)
    assert calibration.rounds == 20000


def test_held_out_rounds_are_better_calibrated() -> None:
    rounds = simulated(6000, [0.4, 0.5, 0.6, 0.6], [0.5, 0.7, -0.5, 0.0])
    calibration = fit_calibration(rounds[::2])
    before, after = survival_errors(rounds[1::2], None), survival_errors(rounds[1::2], calibration)
    assert all(a < 0.025 for a in after)
    assert all(b > 2 * a for b, a in zip(before[:3], after, strict=False))
    assert before[0] > 0.1


def test_rounds_of_different_lengths_and_positions_that_nothing_reached() -> None:
    rounds = [Round((0.6,), 1), Round((0.6, 0.7), 0), Round((), 0), Round((0.2, 0.3, 0.4), 1)] * 50
    calibration = fit_calibration(rounds)
    assert len(calibration.temperatures) == 3
    # Of those that reached position 2, none was kept; nothing at all is known of position 3.
    assert calibration.apply(2, 0.3) < 0.15
    assert calibration.apply(9, 0.5) == calibration.apply(3, 0.5)
    assert all(math.isfinite(error) for error in survival_errors(rounds, calibration))


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.floats(0, 1), max_size=4).flatmap(
            lambda raw: st.builds(Round, st.just(tuple(raw)), st.integers(0, len(raw)))
        ),
        min_size=1,
        max_size=30,
    )
)
def test_calibrated_confidences_are_probabilities_and_keep_their_order(rounds: list[Round]) -> None:
    if not any(each.confidences for each in rounds):
        with pytest.raises(UserError, match="nothing to calibrate"):
            fit_calibration(rounds)
        return
    calibration = fit_calibration(rounds)
    for k in range(1, 6):
        values = [calibration.apply(k, raw) for raw in (0.0, 0.2, 0.5, 0.9, 1.0)]
        assert values == sorted(values) and values[0] >= 0 and values[-1] <= 1
    for each in rounds:
        products = survival(each.confidences, calibration)
        assert products == sorted(products, reverse=True)


def test_it_is_stored_beside_the_drafter(tmp_path: Path) -> None:
    assert Calibration.load(tmp_path) is None
    calibration = Calibration((1.5, 2.0), (0.0, -0.5), (0.2, 0.3), (0.01, 0.02), 100, "gsm8k.jsonl")
    calibration.save(tmp_path)
    assert Calibration.load(tmp_path) == calibration


@pytest.mark.parametrize(
    "change",
    [
        *({"temperatures": []}, {"temperatures": [0.0, 1.0]}, {"offsets": [0.0]}, {"rounds": "many"}, {"source": ...}),
        *({"temperatures": [math.nan, 1.0]}, {"offsets": [0.0, math.inf]}, {"rounds": math.inf}),
        {"offsets": [0.0, 10**400]},
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    Calibration((1.5, 2.0), (0.0, -0.5)).save(tmp_path)
    file = tmp_path / "calibration.json"
    record = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))
    with pytest.raises(UserError, match=r"calibration\.json"):
        Calibration.load(tmp_path)
