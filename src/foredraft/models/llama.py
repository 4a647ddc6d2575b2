"""Llama family (also SmolLM2): grouped-query attention, RMSNorm, gated SiLU."""

from collections.abc import Mapping
from typing import Any

from foredraft.models.config import ModelConfig, decoder_config


def read_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """From a Hugging Face config.json with ``model_type`` "llama"."""
    return decoder_config(config, source, architecture="llama", qk_norm=False)
