"""Reading config.json: JSON objects with errors that name the file, and fields that are what their names promise."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import UserError

_SIZES = {
    "backbone_hidden_size",
    "block_size",
    "centroid_intermediate_top_k",
    "draft_vocab_size",
    "global_head_dim",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mtp_num_hidden_layers",
    "num_attention_heads",
    "num_centroids",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_speculative_tokens",
    "num_target_layers",
    "sliding_window",
    "target_hidden_size",
    "vocab_size",
}
_COUNTS = {"markov_rank", "mask_token_id", "original_max_position_embeddings"}
_NUMBERS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "final_logit_softcapping",
    "high_freq_factor",
    "input_embedding_scale",
    "logit_scale",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_theta",
}
_INDICES = {"eagle_aux_hidden_state_layer_ids", "kv_layers", "target_layer_ids"}
_NAMES = {"architectures", "layer_types"}
_STRINGS = {"hidden_act", "markov_head_type", "model_type", "rope_type"}
_OBJECTS = {"dflash_config", "eagle_config", "rope_parameters", "rope_scaling", "text_config"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, with errors that name the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_configuration(path: Path) -> dict[str, Any]:
    """A model's or drafter's config.json. Raises UserError for fields of the wrong kind; null counts as absent."""
    config = _without_nulls(read_json(path))
    check_kinds(config, str(path))
    return config


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value is not None
    }


def check_kinds(config: Mapping[str, Any], source: str) -> None:
    """Raise UserError where a field that is known by name is not what it must be, in objects within objects too."""
    for name, value in config.items():
        if name in _SIZES:
            expected = None if _whole(value) and value >= 1 else "an integer of at least 1"
        elif name in _COUNTS:
            expected = None if _whole(value) and value >= 0 else "an integer of at least 0"
        elif name in _NUMBERS:
            expected = None if _number(value) else "a number"
        elif name in _INDICES:
            expected = None if isinstance(value, list) and all(map(_whole, value)) else "a list of integers"
        elif name in _NAMES:
            named = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
            expected = None if named else "a list of strings"
        elif name in _STRINGS:
            expected = None if isinstance(value, str) else "a string"
        elif name in _OBJECTS:
            expected = None if isinstance(value, dict) else "an object"
        else:
            expected = None
        if expected:
            said = repr(value)
            raise UserError(f"{source}: {name} is {said[:80]}{'...' * (len(said) > 80)}, expected {expected}")
        if isinstance(value, dict):
            check_kinds(value, source)


def _number(value: object) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _whole(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
