"""From what a drafter thinks of its tokens to how often they are kept: sequential temperature scaling.

A drafter's raw confidence c_k is calibrated position by position (arXiv 2607.05147): sigmoid(logit(c_k) / T_k + b_k).
T_k is the temperature that minimises the expected calibration error of the survival, the product of the calibrated
confidences up to k, on rounds that were held out. The offset b_k is this project's: a scalar temperature alone never
moves a confidence across one half, which max q of a drafter that learned a distribution needs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foredraft.errors import UserError

FILE = "calibration.json"
_SURE = 1e-4
"""Confidences are held this far from 0 and 1."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """What a drafter thought in one round, and what came of it.

    confidences: raw, of every token that was sent to verification. accepted: how many of them were kept.
    """

    confidences: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class Calibration:
    """temperatures, offsets: T_k and b_k for k = 1, 2, ...; positions beyond them take the last.

    error_before, error_after: expected calibration error of the survival at each position, on rounds that had no
    part in the fit, with raw and with calibrated confidences. rounds: how many the fit saw. source: where they came
    from.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    error_before: tuple[float, ...] = ()
    error_after: tuple[float, ...] = ()
    rounds: int = 0
    source: str = ""

    def apply(self, k: int, raw: float) -> float:
        """The calibrated confidence of draft token ``k`` (1, 2, ...)."""
        place = min(k, len(self.temperatures)) - 1
        return _sigmoid(_logit(raw) / self.temperatures[place] + self.offsets[place])

    @classmethod
    def load(cls, folder: Path) -> "Calibration | None":
        """From calibration.json in a drafter's folder, None where there is none. Raises UserError if it is damaged."""
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            raw = json.loads(file.read_text())
            lists = ("temperatures", "offsets", "error_before", "error_after")
            columns = {name: tuple(float(value) for value in raw[name]) for name in lists}
            loaded = cls(**columns, rounds=int(raw["rounds"]), source=str(raw["source"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(
                f"{file} is not a calibration ({error!r}); write it again with foredraft calibrate"
            ) from error
        if not loaded.temperatures or len(loaded.temperatures) != len(loaded.offsets) or min(loaded.temperatures) <= 0:
            raise UserError(f"{file}: temperatures must be above 0, and as many as offsets")
        if not all(map(math.isfinite, loaded.temperatures + loaded.offsets)):
            raise UserError(f"{file}: temperatures and offsets must be finite; write it again with foredraft calibrate")
        return loaded

    def save(self, folder: Path) -> None:
        """Write calibration.json into a drafter's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def expected_calibration_error(predicted: ArrayLike, outcome: ArrayLike, bins: int = 10) -> float:
    """Mean distance between predicted probabilities [n] and the share of outcomes [n] (0 or 1) that came true, over
    ``bins`` bins of equal width, weighted by how many predictions lie in each (Guo et al., arXiv 1706.04599)."""
    p, y = np.asarray(predicted, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    if not p.size:
        return 0.0
    place = np.minimum((p * bins).astype(np.int64), bins - 1)
    distance = np.bincount(place, weights=p, minlength=bins) - np.bincount(place, weights=y, minlength=bins)
    return float(np.abs(distance).sum() / p.size)


def survival_errors(rounds: Sequence[Round], calibration: Calibration | None, bins: int = 10) -> tuple[float, ...]:
    """Expected calibration error of the survival at each position, with raw confidences where there is no
    calibration."""
    errors = []
    for k in range(1, _positions(rounds) + 1):
        sent = [each for each in rounds if len(each.confidences) >= k]
        predicted = [survival(each.confidences[:k], calibration)[-1] for each in sent]
        errors.append(expected_calibration_error(predicted, [each.accepted >= k for each in sent], bins))
    return tuple(errors)


def survival(raw: Sequence[float], calibration: Calibration | None) -> list[float]:
    """P(d_1..d_k all kept) for each k, from raw confidences."""
    products, product = [], 1.0
    for k, confidence in enumerate(raw, start=1):
        product *= calibration.apply(k, confidence) if calibration else confidence
        products.append(product)
    return products


def fit_calibration(rounds: Sequence[Round], source: str = "", bins: int = 10) -> Calibration:
    """Position by position: slope and offset by maximum likelihood on the rounds that reached the position, drawn a
    little towards those of the position before; then the temperature with the least calibration error of the survival.

    Raises UserError if no round sent a token to verification.
    """
    positions = _positions(rounds)
    if not positions:
        raise UserError("no draft token was verified, so there is nothing to calibrate on")
    accepted = np.array([each.accepted for each in rounds])
    lengths = np.array([len(each.confidences) for each in rounds])
    before = np.ones(len(rounds))
    slope, offset = 1.0, 0.0
    temperatures, offsets = [], []
    for k in range(1, positions + 1):
        sent = lengths >= k
        x = np.array([_logit(each.confidences[k - 1]) if len(each.confidences) >= k else 0.0 for each in rounds])
        kept = (accepted >= k).astype(np.float64)
        reached = sent & (accepted >= k - 1)
        slope, offset = _logistic(x[reached], kept[reached], slope, offset)
        temperature = _least_error(x[sent], kept[sent], before[sent], offset, 1 / slope, bins)
        before[sent] *= _sigmoids(x[sent] / temperature + offset)
        temperatures.append(temperature)
        offsets.append(offset)
    return Calibration(tuple(temperatures), tuple(offsets), rounds=len(rounds), source=source)


def _positions(rounds: Sequence[Round]) -> int:
    return max((len(each.confidences) for each in rounds), default=0)


def _logistic(x: Floats, y: Floats, slope: float, offset: float) -> tuple[float, float]:
    """Slope and offset of P(y) = sigmoid(slope x + offset), with a normal prior around the given ones whose weight is
    that of a few rounds."""
    prior = at = np.array([slope, offset])
    inputs = np.stack([x, np.ones_like(x)], axis=1)

    def loss(theta: Floats) -> float:
        z = inputs @ theta
        return float((np.logaddexp(0, z) - y * z).sum() + ((theta - prior) ** 2).sum())

    for _ in range(50):
        p = _sigmoids(inputs @ at)
        gradient = inputs.T @ (p - y) + 2 * (at - prior)
        step = np.linalg.solve(inputs.T @ (inputs * (p * (1 - p))[:, None]) + 2 * np.eye(2), gradient)
        scale = 1.0
        while loss(at - scale * step) > loss(at) and scale > 1e-6:
            scale /= 2
        at = at - scale * step
        if np.abs(scale * step).max() < 1e-9:
            break
    return max(float(at[0]), 0.05), float(at[1])


def _least_error(x: Floats, kept: Floats, before: Floats, offset: float, start: float, bins: int) -> float:
    """The temperature around ``start`` whose survival has the least calibration error; of equals, the nearest."""
    steps = sorted(np.linspace(-1, 1, 41), key=abs)
    candidates = [start * 2.0**step for step in steps]
    errors = [
        expected_calibration_error(before * _sigmoids(x / temperature + offset), kept, bins)
        for temperature in candidates
    ]
    return float(candidates[int(np.argmin(errors))])


def _sigmoids(x: Floats) -> Floats:
    probabilities: Floats = 1 / (1 + np.exp(-x))
    return probabilities


def _logit(p: float) -> float:
    p = min(max(p, _SURE), 1 - _SURE)
    return math.log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
