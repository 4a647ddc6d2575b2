"""Calibrating a drafter on prompts that it was not trained on."""

from collections.abc import Sequence
from dataclasses import replace

from foredraft.drafters.calibration import Calibration, Round, fit_calibration, survival_errors
from foredraft.errors import UserError
from foredraft.llm import LLM, Prompt
from foredraft.sampling_params import SamplingParams


def collect_rounds(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Round]:
    """Answer ``prompts`` and keep what the drafter thought of its tokens, raw, and how many were kept."""
    drafter = llm.drafter
    if drafter is None:
        raise UserError("method none drafts nothing that could be calibrated")
    rounds: list[Round] = []
    calibration, drafter.calibration = drafter.calibration, None
    llm.engine.rounds = rounds
    try:
        llm.generate(prompts, params)
    finally:
        llm.engine.rounds = None
        drafter.calibration = calibration
    return rounds


def calibrate(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, source: str) -> Calibration:
    """Fit on every other prompt; the errors in the result are those on the rest.

    Raises UserError if there are fewer than two prompts, or no rounds to learn from.
    """
    if len(prompts) < 2:
        raise UserError("calibration needs at least two prompts: one half to fit on, the other half to judge it")
    fitted, held_out = (collect_rounds(llm, prompts[begin::2], params) for begin in (0, 1))
    calibration = fit_calibration(fitted, source)
    return replace(
        calibration,
        error_before=survival_errors(held_out, None),
        error_after=survival_errors(held_out, calibration),
    )
