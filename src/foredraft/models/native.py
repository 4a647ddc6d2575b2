"""A stack of decoder layers as one call into the native library (csrc/decoder.cpp)."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.models.batch import Batch
from foredraft.models.cache import Cache, PagedCache
from foredraft.models.config import ModelConfig
from foredraft.models.layers import DecoderLayer
from foredraft.models.rope import inverse_frequencies
from foredraft.ops import Format, Weight, native
from foredraft.ops.plan import Visibility
from foredraft.quantization.mxfp4 import MXFP4Tensor

BIASES = ("qkv_bias", "out_bias", "down_bias")
NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")


class NativeDecoder:
    """Weights packed as ``form`` (MXFP4 weights stay MXFP4), activations between the products in float32, keys and
    values in bfloat16. A row's result does not depend on the rows beside it."""

    def __init__(
        self,
        layers: Iterable[DecoderLayer[Weight]],
        config: ModelConfig,
        form: Format,
        visibility: tuple[Visibility, ...],
    ) -> None:
        self._config = config
        self._windows = [seen.window or 0 for seen in visibility]
        self._causal = [seen.causal for seen in visibility]
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
        self._decoder = native.library().Decoder(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            layers=[_packed(layer, form) for layer in layers],
            frequencies=frequencies.tolist(),
            factor=factor,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layers' matrices as packed: what a pass streams from memory."""
        size: int = self._decoder.weight_bytes
        return size

    def new_cache(self) -> PagedCache:
        config = self._config
        return PagedCache(config.num_layers, config.num_kv_heads, config.head_dim)

    def forward(self, hidden: Tensor, batch: Batch, cache: Cache, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        assert isinstance(cache, PagedCache)
        hidden = native.floats(hidden)
        self._check(hidden, batch)
        if any(not 0 <= tap < self._config.num_layers for tap in taps):
            raise IndexError(f"taps {tuple(taps)} must lie in 0..{self._config.num_layers - 1}")
        tapped = torch.empty(len(hidden), len(taps) * self._config.hidden_size)
        self._decoder.forward(
            hidden.data_ptr(),
            *_rows(batch, cache),
            cache.pool,
            list(taps),
            tapped.data_ptr(),
            self._windows,
            self._causal,
        )
        return hidden, tapped if taps else None

    def inject(self, context: Tensor, batch: Batch, cache: Cache) -> None:
        assert isinstance(cache, PagedCache)
        context = native.floats(context)
        self._check(context, batch)
        self._decoder.inject(context.data_ptr(), *_rows(batch, cache), cache.pool)

    def _check(self, hidden: Tensor, batch: Batch) -> None:
        expected = (sum(batch.counts), self._config.hidden_size)
        if tuple(hidden.shape) != expected:
            raise ValueError(f"the rows are {tuple(hidden.shape)}, the batch says {expected}")


def _rows(batch: Batch, cache: PagedCache) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    starts, counts = np.array(batch.starts, dtype=np.int32), np.array(batch.counts, dtype=np.int32)
    return starts, counts, cache.pages(batch.slots, batch.ends)


def _packed(layer: DecoderLayer[Weight], form: Format) -> object:
    """The layer in native memory; gate and up apart, so that each thread can gate its own columns."""
    gate, up = _halves(layer.gate_up)
    vectors = {name: getattr(layer, name) for name in (*NORMS, *BIASES) if getattr(layer, name) is not None}
    if layer.gate_up_bias is not None:
        vectors["gate_bias"], vectors["up_bias"] = layer.gate_up_bias.chunk(2)
    return native.library().LayerWeights(
        qkv=native.pack(layer.qkv, form),
        out=native.pack(layer.out, form),
        gate=native.pack(gate, form),
        up=native.pack(up, form),
        down=native.pack(layer.down, form),
        vectors={name: native.floats(vector.detach()).numpy() for name, vector in vectors.items()},
    )


def _halves(weight: Weight) -> tuple[Weight, Weight]:
    half = weight.shape[0] // 2
    if isinstance(weight, MXFP4Tensor):
        return weight.rows(slice(None, half)), weight.rows(slice(half, None))
    return weight[:half], weight[half:]
