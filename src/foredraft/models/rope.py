"""Rotary position embedding with the context extensions that published checkpoints use."""

import math

import torch
from torch import Tensor

from foredraft.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angular frequency of each rotated pair, [head_dim / 2] float32, and the factor on cos and sin.

    linear: positions divided by ``factor``. llama3: long wavelengths divided, short ones kept, a ramp between
    (Llama 3.1). yarn: the same idea with a ramp over rotations and a softmax temperature (arXiv 2309.00071).
    """
    plain = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(plain, config), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config, head_dim), _yarn_attention_factor(config)
    return plain, 1.0


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / config.factor


def _yarn(plain: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        wavelength = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return ramp * plain / config.factor + (1 - ramp) * plain


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


class RotaryTable:
    """cos and sin of the positions in use, [positions, head_dim] in the model's dtype, grown when needed."""

    def __init__(
        self, frequencies: Tensor, factor: float, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._frequencies = frequencies.to(device=device, dtype=torch.float32)
        self._factor = factor
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, 2 * len(frequencies), dtype=dtype, device=device)

    def __call__(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, head_dim] each, for ``positions [T]``, all below ``end``."""
        if end > len(self._cos):
            self._grow(max(end, 2 * len(self._cos), 512))
        return self._cos[positions], self._sin[positions]

    def _grow(self, length: int) -> None:
        steps = torch.arange(length, device=self._frequencies.device, dtype=torch.float32)
        angles = torch.outer(steps, self._frequencies).repeat(1, 2)
        self._cos = (angles.cos() * self._factor).to(self._dtype)
        self._sin = (angles.sin() * self._factor).to(self._dtype)
