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
        kv_layers: tuple[int, ...] | None = None,
    ) -> None:
        self._config = config
        self._kv_layers = kv_layers
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
            kv_layers=list(kv_layers or ()),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layers' matrices as packed: what a pass streams from memory."""
        size: int = self._decoder.weight_bytes
        return size

    def new_cache(self) -> PagedCache:
        assert self._kv_layers is None
        config = self._config
        return PagedCache(config.num_layers, config.num_kv_heads, config.head_dim)

    def forward(
        self, hidden: Tensor, batch: Batch, cache: Cache, taps: Sequence[int], attention_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(cache, PagedCache)
        hidden = native.floats(hidden)
        self._check(hidden, batch)
        check_attention_input(attention_input, len(hidden), self._decoder.attention_width, self._config.hidden_size)
        attention_input = None if attention_input is None else native.floats(attention_input)
        if self._kv_layers is not None:
            check_committed(batch, cache)
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
            0 if attention_input is None else attention_input.data_ptr(),
        )
        return hidden, tapped if taps else None

    def inject(self, context: Tensor, batch: Batch, cache: Cache) -> None:
        assert isinstance(cache, PagedCache) and self._kv_layers is None
        context = native.floats(context)
        self._check(context, batch)
        self._decoder.inject(context.data_ptr(), *_rows(batch, cache), cache.pool)

    def _check(self, hidden: Tensor, batch: Batch) -> None:
        expected = (sum(batch.counts), self._config.hidden_size)
        if tuple(hidden.shape) != expected:
            raise ValueError(f"the rows are {tuple(hidden.shape)}, the batch says {expected}")


def check_attention_input(attention_input: Tensor | None, rows: int, width: int, hidden_size: int) -> None:
    """Raise ValueError unless the first layer, whose qkv has ``width`` columns, gets its ``rows`` rows."""
    if attention_input is None:
        if width != hidden_size:
            raise ValueError(f"the first layer needs an attention_input of {width} columns")
    elif tuple(attention_input.shape) != (rows, width):
        raise ValueError(f"attention_input is {tuple(attention_input.shape)}, expected {(rows, width)}")


def check_committed(batch: Batch, cache: Cache) -> None:
    """Raise ValueError unless all positions of the batch are committed, for layers that only read them."""
    for slot, end in zip(batch.slots, batch.ends, strict=True):
        if end > cache.length(slot):
            raise ValueError(f"slot {slot}: rows up to position {end - 1}, but {cache.length(slot)} are committed")


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
