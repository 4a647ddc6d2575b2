"""foredraft calibrate on a tiny model with a DFlash drafter."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import dflash_json, dflash_tensors, write_dflash

from foredraft.drafters.calibration import Calibration
from foredraft.errors import UserError
from foredraft.llm import LLM
from foredraft.sampling_params import SamplingParams
from foredraft.training.calibration import calibrate, collect_rounds

Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    raw = dflash_json()
    return write_dflash(tmp_path / "drafter", raw, dflash_tensors(raw))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps({"turns": ["ab" * n, "later"]}) + "\n" for n in range(1, 9)))
    return file


def test_it_writes_a_calibration_that_the_drafter_then_uses(
    foredraft: Run, model: Path, drafter: Path, prompts: Path
) -> None:
    before = _confidences(model, drafter)
    status, _, err = foredraft(
        *("calibrate", model, "--method", "dflash", "--drafter", drafter, "--data", prompts, "--output", drafter),
        *("--max-tokens", "16", "--dtype", "float64"),
    )
    assert status == 0, err
    calibration = Calibration.load(drafter)
    assert calibration is not None
    # Blocks of six propose five tokens; half of eight prompts is for the fit.
    assert len(calibration.temperatures) == len(calibration.error_after) == 5 and calibration.rounds >= 4
    assert "8 prompts of held_out.jsonl" in calibration.source
    assert "temperature" in err and "calibration.json" in err
    after = _confidences(model, drafter)
    assert after != before
    assert after == pytest.approx([calibration.apply(k, raw) for k, raw in enumerate(before, start=1)])


def _confidences(model: Path, drafter: Path) -> list[float]:
    """Of the first full proposal, as the engine gets them."""
    llm = _llm(model, drafter)
    llm.engine.rounds = []
    llm.generate(["ab"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    return list(llm.engine.rounds[0].confidences)


def _llm(model: Path, drafter: Path) -> LLM:
    config = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 5}
    return LLM(str(model), config, dtype="float64", max_num_seqs=4)


def test_collecting_sees_raw_confidences_and_every_round(model: Path, drafter: Path) -> None:
    Calibration((3.0,), (1.0,)).save(drafter)
    llm = _llm(model, drafter)
    assert llm.drafter is not None and llm.drafter.calibration is not None
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    rounds = collect_rounds(llm, ["ab", "cab"], params)
    (drafter / "calibration.json").unlink()
    raw = _llm(model, drafter)
    raw.engine.rounds = []
    outputs = raw.generate(["ab", "cab"], params)
    assert rounds == raw.engine.rounds
    acceptance = [output.outputs[0].acceptance for output in outputs]
    assert len(rounds) == sum(each.proposed[0] for each in acceptance)
    assert llm.engine.rounds is None and llm.drafter.calibration is not None


def test_errors_say_what_to_do(foredraft: Run, model: Path, drafter: Path, prompts: Path, tmp_path: Path) -> None:
    common = ("calibrate", model, "--dtype", "float64", "--drafter", drafter, "--output", tmp_path / "out")
    assert foredraft(*common, "--method", "dflash", "--data", tmp_path / "none.jsonl")[0] == 2
    lonely = tmp_path / "one.jsonl"
    lonely.write_text(json.dumps({"prompt": "ab"}) + "\n")
    status, _, err = foredraft(*common, "--method", "dflash", "--data", lonely)
    assert status == 2 and "at least two prompts" in err
    status, _, err = foredraft("calibrate", model, "--method", "none", "--data", prompts, "--output", tmp_path)
    assert status == 2 and "none" in err
    assert not (tmp_path / "out").exists()


def test_prompts_that_draft_nothing(model: Path, drafter: Path) -> None:
    llm = _llm(model, drafter)
    with pytest.raises(UserError, match="nothing to calibrate on"):
        calibrate(llm, ["ab", "cab"], SamplingParams(temperature=0, max_tokens=1), "")
