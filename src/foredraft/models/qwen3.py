"""Qwen3 family, dense: as Llama, with an RMSNorm on each head's query and key."""

from collections.abc import Mapping
from typing import Any

from foredraft.models.config import ModelConfig, decoder_config


def read_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """From a Hugging Face config.json with ``model_type`` "qwen3"."""
    return decoder_config({"head_dim": 128, **config}, source, architecture="qwen3", qk_norm=True)
