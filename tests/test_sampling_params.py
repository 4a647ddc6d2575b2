import dataclasses
import math

import numpy as np
import pytest

from foredraft.errors import UserError
from foredraft.sampling_params import SamplingParams

# Read off vLLM's SamplingParams (vllm/sampling_params.py), except for the normalised stop fields.
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "structured_outputs": None,
}


def test_names_and_defaults_are_those_of_vllm() -> None:
    assert dataclasses.asdict(SamplingParams()) == VLLM_DEFAULTS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", [3]),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", b"a"),
        ("stop", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", 2),
        ("stop_token_ids", "2"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("max_tokens", 0),
        ("logprobs", -2),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_refuses_and_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{field} is {value!r}, expected ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 5.0),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("min_p", 1),
        ("repetition_penalty", 0.5),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("seed", -(2**63)),
        ("max_tokens", None),
        ("min_tokens", 16),
        ("logprobs", -1),
        ("logprobs", 0),
        ("top_k", np.int64(7)),
        ("temperature", np.float32(0.5)),
    ],
)
def test_accepts_the_ends_of_the_ranges(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_normalises() -> None:
    biases = {"7": 2, 3: -100}
    params = SamplingParams(stop="END", stop_token_ids=[2, 5, 2], logit_bias=biases, seed=-1)  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (2, 5)
    assert params.logit_bias == {7: 2.0, 3: -100.0}
    assert params.seed is None
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert dataclasses.replace(params, temperature=0.5) == SamplingParams(
        stop=["END"], stop_token_ids=(2, 5), logit_bias={7: 2.0, 3: -100.0}, temperature=0.5
    )


def test_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_several_greedy_outputs_are_refused() -> None:
    assert SamplingParams(n=2).n == 2
    with pytest.raises(UserError, match=r"^n is 2, expected 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize("field", [{"logit_bias": {10: 1.0}}, {"stop_token_ids": [9, 10]}])
def test_check_vocabulary(field: dict[str, object]) -> None:
    params = SamplingParams(**field)  # type: ignore[arg-type]
    params.check_vocabulary(11)
    with pytest.raises(UserError, match=r"names token 10, .* 0 to 9$"):
        params.check_vocabulary(10)
