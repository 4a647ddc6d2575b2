"""Rotary angles against transformers' own, at positions far beyond what tiny models reach."""

from typing import Any

import pytest
import torch
from test_llama_qwen3 import ROPES
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foredraft.errors import UserError
from foredraft.models.config import RopeConfig, rope_config
from foredraft.models.rope import RotaryTable, inverse_frequencies


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("rope", ROPES)
def test_angles_equal_transformers(rope: str, theta: float) -> None:
    parameters = {"rope_theta": theta, **ROPES[rope]}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 2048
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=8192, rope_parameters=parameters
    )
    frequencies, factor = inverse_frequencies(rope_config(config.to_dict(), "config.json"), 64)
    reference = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=3e-7, atol=0)
    positions = torch.tensor([0, 1, 2047, 2048, 5000])
    cos, sin = RotaryTable(reference.inv_freq, factor, torch.float32)(positions, 5001)
    expected_cos, expected_sin = reference(torch.zeros(1), positions.unsqueeze(0))
    assert torch.equal(cos, expected_cos[0]) and torch.equal(sin, expected_sin[0])


def test_default_frequencies_are_transformers_to_the_last_bit() -> None:
    parameters = {"rope_type": "default", "rope_theta": 100000.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=parameters)
    frequencies, _ = inverse_frequencies(RopeConfig(theta=100000.0), 64)
    assert torch.equal(frequencies, LlamaRotaryEmbedding(config).inv_freq)


def test_the_table_grows() -> None:
    frequencies, factor = inverse_frequencies(RopeConfig(), 8)
    whole, grown = (RotaryTable(frequencies, factor, torch.float64) for _ in range(2))
    late = torch.tensor([3, 700, 1999])
    expected = whole(late, 2000)
    for end in (4, 600, 2000):
        found = grown(late.clamp(max=end - 1), end)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "'longrope' is not supported; known: default"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs `factor`"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "'linear' needs `factor`"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_unsupported_rope(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        rope_config(config, "some/config.json")
    assert "some/config.json" in str(error.value)


def test_original_context_is_found_where_configs_keep_it() -> None:
    """transformers gives priority to the field beside the RoPE parameters, and falls back on the context."""
    scaling = {"rope_type": "yarn", "factor": 2.0}
    inside = {"rope_scaling": {**scaling, "original_max_position_embeddings": 7}, "max_position_embeddings": 9}
    assert rope_config(inside, "").original_max_position_embeddings == 7
    assert rope_config({**inside, "original_max_position_embeddings": 5}, "").original_max_position_embeddings == 5
    fallback = {"rope_scaling": scaling, "max_position_embeddings": 9}
    assert rope_config(fallback, "").original_max_position_embeddings == 9
