"""The native decoder against the PyTorch one in float64, and bit for bit against itself in other company."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, layer_shapes, random_tensor
from torch import Tensor

from foredraft.models import layers as layers_module
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import Cache, KVCache
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.decoder import TorchDecoder
from foredraft.models.layers import DecoderLayer, load_layer
from foredraft.models.native import NativeDecoder
from foredraft.ops import REFERENCE, Format, native
from foredraft.ops.plan import AttentionPlan, Visibility

MISSING = native.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

BASE = replace(CONFIG, max_position_embeddings=4096, rope=RopeConfig(theta=10000.0))
BIASES = {"attention_bias": True, "mlp_bias": True}
ODD = {"hidden_size": 37, "intermediate_size": 51}
CONFIGS: dict[str, ModelConfig] = {
    "llama": BASE,
    "qwen3": replace(BASE, qk_norm=True, head_dim=16, num_heads=3, num_kv_heads=1, **ODD),
    "biases": replace(BASE, head_dim=64, num_heads=4, num_kv_heads=4, **BIASES, **ODD),
    "wide-heads": replace(BASE, head_dim=80, num_heads=4, num_kv_heads=1, qk_norm=True, hidden_size=64, **BIASES),
    "yarn": replace(
        BASE, head_dim=10, rope=RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64, theta=500.0)
    ),
}
CAUSAL = Visibility()
STEP = 128
"""Absolute positions whose attention weights share a maximum before they are rounded."""


def random_layers(config: ModelConfig, seed: int = 0) -> list[DecoderLayer[Any]]:
    """Values that bfloat16 holds, so that every decoder has the same weights; in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer_shapes(config).items()}
    shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items() if "proj" in name}
    tensors = {name: random_tensor(shape, generator).bfloat16().double() for name, shape in shapes.items()}
    return [load_layer(tensors.__getitem__, f"{i}.", config) for i in range(config.num_layers)]


def wide_layers(config: ModelConfig, width: int) -> list[DecoderLayer[Any]]:
    """The first layer's queries, keys and values come from rows of ``width`` elements, as EAGLE-3's."""
    first, *others = random_layers(config)
    generator = torch.Generator().manual_seed(7)
    qkv = random_tensor((first.qkv.shape[0], width), generator).bfloat16().double()
    return [replace(first, qkv=qkv), *others]


def query_layers(config: ModelConfig) -> list[DecoderLayer[Any]]:
    """Without keys and values of their own, as Gemma 4 MTP's."""
    rows = config.num_heads * config.head_dim
    return [
        replace(
            layer,
            qkv=layer.qkv[:rows],
            qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias[:rows],
            k_norm=None,
        )
        for layer in random_layers(config)
    ]


def native_decoder(
    config: ModelConfig,
    form: Format = "bf16",
    visibility: Sequence[Visibility] | None = None,
    seed: int = 0,
    layers: Sequence[DecoderLayer[Any]] | None = None,
    kv_layers: tuple[int, ...] | None = None,
) -> NativeDecoder:
    seen = tuple(visibility or [CAUSAL] * config.num_layers)
    return NativeDecoder(layers or random_layers(config, seed), config, form, seen, kv_layers)


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def eight_bit(x: Tensor) -> Tensor:
    """Per block of 32 the nearest of 255 steps of amax / 127."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / step).round() * step).view(len(x), -1)[:, : x.shape[1]]


def stepwise_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """``reference.attention`` with weights rounded to bfloat16, as e^(score - highest score of a step)."""
    out = torch.empty_like(q)
    heads, size = q.shape[1:]
    for group in plan.groups:
        rows = torch.arange(len(q)) if group.rows is None else group.rows
        for index, (slot, own) in enumerate(zip(group.slots, rows.split(group.rows_each), strict=True)):
            key, value = (
                cached[slot, : group.length].repeat_interleave(heads // cached.shape[2], dim=1)
                for cached in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", q[own], key) / math.sqrt(size)
            visible = torch.ones(len(own), group.length, dtype=torch.bool)
            if group.triangular:
                visible = visible.tril()
            elif group.mask is not None:
                visible = group.mask[index if len(group.mask) > 1 else 0, 0, : len(own)]
            scores = scores.masked_fill(~visible, -torch.inf)
            highest = scores.amax(-1, keepdim=True)
            mixed = mass = torch.zeros((), dtype=q.dtype)
            for part, part_values in zip(scores.split(STEP, -1), value.split(STEP), strict=True):
                top = part.amax(-1, keepdim=True)
                weights = (part - top.where(top > -torch.inf, 0)).exp()
                factor = (top - highest).exp()
                mixed = mixed + factor * torch.einsum("hqk,khd->hqd", bfloat16(weights), part_values)
                mass = mass + factor * weights.sum(-1, keepdim=True)
            out[own] = (mixed / mass).transpose(0, 1)
    return out


@pytest.fixture(scope="module", autouse=True)
def rounded_attention() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers_module, "attention", stepwise_attention)
        yield


class RoundedCache(KVCache):
    """Keys and values as bfloat16 holds them."""

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        super().write(layer, rows, bfloat16(keys), bfloat16(values))


def reference_decoder(
    config: ModelConfig,
    form: Format = "bf16",
    visibility: Sequence[Visibility] | None = None,
    layers: Sequence[DecoderLayer[Any]] | None = None,
    kv_layers: tuple[int, ...] | None = None,
) -> TorchDecoder:
    """PyTorch's decoder in float64, over the weights as ``form`` has them, with the roundings that the native decoder
    declares: of what its products multiply, to bfloat16 or 8 bits, and of queries, keys, values and attention weights
    to bfloat16."""
    rounded = bfloat16 if form in ("bf16", "mxfp4_a16") else eight_bit
    ops = replace(
        REFERENCE,
        linear=lambda x, weight, bias: REFERENCE.linear(rounded(x), weight, bias),
        rope=lambda x, cos, sin: bfloat16(REFERENCE.rope(x, cos, sin)),
    )
    stored = [
        layer.map_matrices(lambda weight: native.unpack(native.pack(weight, form)).double())
        for layer in layers or random_layers(config)
    ]
    seen = tuple(visibility or [CAUSAL] * config.num_layers)
    return TorchDecoder(stored, config, ops, torch.float64, "bf16", seen, kv_layers)


def rows_of(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    """Inputs of the first layer, [count, K]."""
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def inputs_of(width: int, count: int, seed: int = 0) -> Tensor:
    """What a first layer's attention reads, [count, width]."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed + 10**6))


def batch_of(counts: Sequence[int], starts: Sequence[int], slots: Sequence[int]) -> Batch:
    return flat_batch([[0] * count for count in counts], starts, slots, [0] * len(counts))


@dataclass
class Both:
    """The two decoders, each with its cache, fed with the same rows."""

    config: ModelConfig
    native: NativeDecoder
    reference: TorchDecoder
    caches: tuple[Cache, KVCache]
    tolerance: float
    errors: list[Tensor]
    """Of every row that was compared."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        form: Format = "bf16",
        visibility: Sequence[Visibility] | None = None,
        layers: Sequence[DecoderLayer[Any]] | None = None,
    ) -> "Both":
        mine = native_decoder(config, form, visibility, layers=layers)
        theirs = reference_decoder(config, form, visibility, layers)
        return cls.with_caches(config, form, mine, theirs, (mine.new_cache(), RoundedCache(config, torch.float64)))

    @classmethod
    def reading(
        cls,
        target: "Both",
        config: ModelConfig,
        kv_layers: tuple[int, ...],
        form: Format = "bf16",
        visibility: Sequence[Visibility] | None = None,
    ) -> "Both":
        """Decoders that read the keys and values of ``target``'s."""
        layers = query_layers(config)
        mine = native_decoder(config, form, visibility, layers=layers, kv_layers=kv_layers)
        theirs = reference_decoder(config, form, visibility, layers, kv_layers)
        return cls.with_caches(config, form, mine, theirs, target.caches)

    @classmethod
    def with_caches(
        cls,
        config: ModelConfig,
        form: Format,
        mine: NativeDecoder,
        theirs: TorchDecoder,
        caches: tuple[Cache, KVCache],
    ) -> "Both":
        # All that differs is float32 sums, and what lies so near to the middle of two bfloat16 or 8-bit values that
        # these sums round it elsewhere: a few elements, by 2^-8 or by amax / 127.
        return cls(config, mine, theirs, caches, 2.0**-6 if form in ("bf16", "mxfp4_a16") else 2.0**-4, [])

    def forward(
        self,
        counts: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        seed: int = 0,
        taps: Sequence[int] = (),
        width: int | None = None,
    ) -> None:
        """width: of an attention input."""
        hidden = rows_of(self.config, sum(counts), seed)
        batch = batch_of(counts, starts, slots)
        own = None if width is None else inputs_of(width, sum(counts), seed)
        found, found_taps = self.native.forward(hidden.clone(), batch, self.caches[0], taps, own)
        own = None if own is None else own.double()
        expected, expected_taps = self.reference.forward(hidden.double(), batch, self.caches[1], taps, own)
        self.assert_close(found, expected)
        if taps:
            assert found_taps is not None and expected_taps is not None
            self.assert_close(found_taps, expected_taps)
        for cache in self.caches:
            for slot, end in zip(slots, batch.ends, strict=True):
                cache.commit(slot, end)

    def inject(self, counts: Sequence[int], starts: Sequence[int], slots: Sequence[int], seed: int = 0) -> None:
        context = rows_of(self.config, sum(counts), seed)
        batch = batch_of(counts, starts, slots)
        self.native.inject(context.clone(), batch, self.caches[0])
        self.reference.inject(context.double(), batch, self.caches[1])

    def assert_close(self, found: Tensor, expected: Tensor) -> None:
        """Per row, in the root mean square: a layer adds to every element what it rounds of all of them."""
        assert found.shape == expected.shape and bool(found.isfinite().all())
        error = (found.double() - expected).square().mean(-1).sqrt() / expected.square().mean(-1).sqrt()
        self.errors.append(error)
        assert error.max() < self.tolerance, f"a row is off by {error.max():.5f} of its size"


@pytest.mark.parametrize("name", CONFIGS)
def test_one_layer_but_for_float32(name: str) -> None:
    """An element that is rounded elsewhere spreads from its row to those that see it, but not every time."""
    config = replace(CONFIGS[name], num_layers=1)
    prefill, ragged, decoding = (
        [Both.of(config, visibility=[Visibility(window=window)]) for window in (None, 70, 200)] for _ in range(3)
    )
    for seed, (alone, several, short) in enumerate(zip(prefill, ragged, decoding, strict=True)):
        alone.forward([300], [0], [0], seed)
        several.forward([3, 70, 1, 130], [0, 0, 0, 0], [0, 3, 7, 2], seed)
        short.forward([1], [0], [0], seed)
        for at in range(1, 40):
            short.forward([1], [at], [0], 100 * seed + at)
    for passes in (prefill, ragged, decoding):
        assert min(torch.cat(both.errors).median() for both in passes) < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_decode_and_verification(name: str) -> None:
    both = Both.of(CONFIGS[name])
    taps = [1, 0]
    both.forward([150], [0], [0], 1, taps)
    both.forward([1], [150], [0], 2, taps)
    both.forward([5], [151], [0], 3, taps)
    both.forward([100], [156], [0], 4, taps)


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batches(name: str) -> None:
    both = Both.of(CONFIGS[name])
    both.forward([3, 70, 1, 130], [0, 0, 0, 0], [4, 0, 7, 2], 1, [0])
    both.forward([1, 8, 2, 1, 20], [3, 70, 0, 130, 1], [4, 0, 1, 2, 7], 2, [1])


@pytest.mark.parametrize("form", ["int8", "mxfp4", "mxfp4_a16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_weights(name: str, form: Format) -> None:
    both = Both.of(replace(CONFIGS[name], num_layers=1), form)
    both.forward([20, 1, 9], [0, 0, 0], [0, 1, 2], 1, [0])
    both.forward([1, 40, 3], [20, 1, 9], [0, 1, 2], 2, [0])


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 256, 300])
def test_around_pages_of_64_and_steps_of_128(length: int) -> None:
    both = Both.of(replace(CONFIGS["qwen3"], num_layers=1))
    both.forward([length], [0], [0], 1)
    both.forward([1], [length], [0], 2)
    both.forward([6], [length + 1], [0], 3)


def test_a_long_context() -> None:
    both = Both.of(replace(CONFIGS["llama"], num_layers=1))
    both.forward([1100, 5], [0, 0], [1, 0], 1)
    both.forward([1, 1], [1100, 5], [1, 0], 2)
    both.forward([8, 3, 2], [1101, 6, 0], [1, 0, 2], 3, [0])
    both.forward([90], [1109], [1], 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 17, 64, 128, 130, 1000])
def test_windows(window: int, causal: bool) -> None:
    """One layer with a window, one without; both ways of looking at the rows of a block."""
    both = Both.of(CONFIGS["llama"], visibility=[Visibility(causal, window), Visibility(not causal)])
    both.forward([140, 4], [0, 0], [0, 1], 1, [0])
    both.forward([1, 7], [140, 4], [0, 1], 2, [0])
    both.forward([9, 1], [141, 11], [0, 1], 3, [0, 1])


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("heads", [(4, 2, 10), (3, 1, 16), (4, 4, 64)])
def test_injected_context_and_a_bidirectional_block(heads: tuple[int, int, int], form: Format) -> None:
    """As DFlash drafts: the block's keys and values are replaced by the injected ones of what was accepted. The first
    key rows of the projection do not begin with a panel."""
    num_heads, kv_heads, head_dim = heads
    config = replace(BASE, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, qk_norm=True, **ODD)
    both = Both.of(config, form, [Visibility(causal=False), Visibility(causal=False, window=20)])
    both.inject([100, 3], [0, 0], [0, 1], 1)
    both.forward([8, 8], [100, 3], [0, 1], 2)
    both.inject([5, 0], [100, 3], [0, 1], 3)
    both.forward([8, 8], [105, 3], [0, 1], 4)
    both.inject([1, 60], [105, 3], [0, 1], 5)
    both.forward([4, 4], [106, 63], [0, 1], 6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("width", [8, 74, 200])
def test_an_attention_input_of_the_first_layer(name: str, form: Format, width: int) -> None:
    """Fewer and more columns than the residual stream has, than all heads have, and than the MLP has."""
    config = CONFIGS[name]
    both = Both.of(config, form, layers=wide_layers(config, width))
    both.forward([3, 40, 1], [0, 0, 0], [4, 0, 2], 1, [0], width)
    both.forward([1, 8, 1], [3, 40, 1], [4, 0, 2], 2, [1, 0], width)


def test_an_attention_input_but_for_float32() -> None:
    config = replace(CONFIGS["qwen3"], num_layers=1)
    both = Both.of(config, layers=wide_layers(config, 74))
    for at in range(40):
        both.forward([1], [at], [0], at, width=74)
    assert torch.cat(both.errors).median() < 1e-6


READERS: dict[str, dict[str, Any]] = {
    "same-heads": {"hidden_size": 24, "intermediate_size": 40},
    "more-heads": {"num_heads": 12, **ODD},
    "one-head-each": {"num_heads": 2, "hidden_size": 33, "intermediate_size": 20},
    "normed": {"qk_norm": True, "hidden_size": 48, "attention_bias": True, "rms_norm_eps": 1e-5},
}
"""How a decoder that reads another's keys and values differs from that one, which has 4 heads, 2 of them key/value."""


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("reader", READERS)
def test_layers_that_read_the_keys_and_values_of_another_decoder(reader: str, form: Format) -> None:
    target = Both.of(BASE)
    config = replace(BASE, num_layers=3, **READERS[reader])
    visibility = [CAUSAL, Visibility(window=20), CAUSAL]
    both = Both.reading(target, config, (1, 0, 1), form, visibility)
    target.forward([150, 3, 1], [0, 0, 0], [0, 5, 2], 1)
    both.forward([1, 1, 1], [149, 2, 0], [0, 5, 2], 2, [0, 2])
    both.forward([1], [149], [0], 3)
    both.forward([60, 2], [90, 1], [0, 5], 4)
    target.forward([6, 1], [150, 3], [0, 5], 5)
    both.forward([1, 1], [155, 3], [0, 5], 6)


def test_reading_but_for_float32() -> None:
    target = Both.of(replace(BASE, num_layers=1))
    both = Both.reading(target, replace(BASE, num_layers=1, **READERS["more-heads"]), (0,))
    for at in range(40):
        target.forward([1], [at], [0], at)
        both.forward([1], [at], [0], 100 + at)
    assert torch.cat(both.errors).median() < 1e-6


def test_the_reference_can_tell() -> None:
    """The tolerance is not so wide that a wrong position, window or head would pass."""
    config = CONFIGS["qwen3"]
    both = Both.of(config, visibility=[Visibility(window=17)] * 2)
    wrong = {
        "position": (config, [Visibility(window=17)] * 2, 1),
        "window": (config, [Visibility(window=16)] * 2, 0),
        "eps": (replace(config, rms_norm_eps=0.05), [Visibility(window=17)] * 2, 0),
    }
    both.forward([40], [0], [0], 1)
    for broken, visibility, shift in wrong.values():
        both = Both.of(config, visibility=[Visibility(window=17)] * 2)
        both.native = NativeDecoder(random_layers(config), broken, "bf16", tuple(visibility))
        hidden, batch = rows_of(config, 40), batch_of([40], [0], [0])
        both.native.forward(rows_of(config, 1), batch_of([1], [0], [0]), both.caches[0], [])
        found, _ = both.native.forward(hidden.clone(), batch_of([40], [shift], [0]), both.caches[0], [])
        expected, _ = both.reference.forward(hidden.double(), batch, both.caches[1], [])
        with pytest.raises(AssertionError, match="a row is off"):
            both.assert_close(found, expected)


# What a row depends on: bit for bit


def whole(decoder: NativeDecoder, hidden: Tensor) -> Tensor:
    """Output and taps of all rows of a sequence, in one pass with nothing else beside them, by one thread."""
    with native.threads(1):
        out, taps = decoder.forward(hidden.clone(), batch_of([len(hidden)], [0], [0]), decoder.new_cache(), [0, 1])
    assert taps is not None
    return torch.cat([out, taps], dim=1)


@pytest.mark.parametrize("window", [1, 2, 40, 63, 64, 65, 127, 128, 129, 150])
def test_a_row_sees_its_window_and_no_more(window: int) -> None:
    """In a model of one layer, exactly the ``window`` positions up to its own."""
    config = replace(BASE, num_layers=1)
    decoder = native_decoder(config, visibility=[Visibility(window=window)])
    hidden = rows_of(config, 200)

    def last(changed: int | None) -> Tensor:
        rows = hidden.clone()
        if changed is not None:
            rows[changed] *= -3
        return decoder.forward(rows, batch_of([200], [0], [0]), decoder.new_cache(), [])[0][199]

    expected = last(None)
    assert torch.equal(last(199 - window), expected)
    assert not torch.equal(last(200 - window), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_a_block_see_each_other_unless_causal(causal: bool) -> None:
    config = replace(BASE, num_layers=1)
    decoder = native_decoder(config, visibility=[Visibility(causal)])
    hidden = rows_of(config, 140)
    first, _ = decoder.forward(hidden.clone(), batch_of([140], [0], [0]), decoder.new_cache(), [])
    hidden[139] *= -3
    second, _ = decoder.forward(hidden.clone(), batch_of([140], [0], [0]), decoder.new_cache(), [])
    for row in range(139):
        assert torch.equal(first[row], second[row]) == causal


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, Format, list[Visibility], int]:
    name = draw(st.sampled_from(list(CONFIGS)))
    form: Format = draw(st.sampled_from(["bf16", "int8", "mxfp4", "mxfp4_a16"]))
    window = st.sampled_from([None, None, 1, 20, 64, 130])
    return name, form, [Visibility(window=draw(window)) for _ in range(2)], draw(st.integers(0, 2**32))


@settings(max_examples=60)
@given(schedules(), st.integers(1, 25))
def test_any_schedule_computes_what_each_sequence_alone_would(
    drawn: tuple[str, Format, list[Visibility], int], passes: int
) -> None:
    """Ragged passes over sequences that come and go, by any number of threads: prefill in chunks, decoding,
    verification with rows that are then rejected, slots and pages taken over with what others left in them."""
    name, form, visibility, seed = drawn
    config, rng = CONFIGS[name], random.Random(seed)
    decoder = native_decoder(config, form, visibility)
    cache = decoder.new_cache()
    running: dict[int, tuple[Tensor, Tensor, int]] = {}
    for _ in range(passes):
        for slot in range(5):
            if slot not in running and rng.random() < 0.5:
                hidden = rows_of(config, rng.choice([1, 7, 63, 66, 129, 150, 270]), rng.randrange(10**6))
                running[slot] = (hidden, whole(decoder, hidden), 0)
        slots = [slot for slot in running if rng.random() < 0.8]
        if not slots:
            continue
        rng.shuffle(slots)
        rows, starts, kept = [], [], []
        for slot in slots:
            hidden, _, done = running[slot]
            count = min(rng.choice([1, 1, 2, 5, 20, 64, 140]), len(hidden) - done)
            wrong = rows_of(config, rng.choice([0, 0, 1, 6, 70]), rng.randrange(10**6)) * rng.choice([1.0, 1e4])
            rows.append(torch.cat([hidden[done : done + count], wrong]))
            starts.append(done)
            kept.append(count)
        counts = [len(part) for part in rows]
        with native.threads(rng.randint(1, 4)):
            out, taps = decoder.forward(torch.cat(rows), batch_of(counts, starts, slots), cache, [0, 1])
        assert taps is not None
        for slot, part, count in zip(slots, torch.cat([out, taps], dim=1).split(counts), kept, strict=True):
            hidden, expected, done = running[slot]
            assert torch.equal(part[:count], expected[done : done + count])
            cache.commit(slot, done + count)
            running[slot] = (hidden, expected, done + count)
            if done + count == len(hidden) or rng.random() < 0.1:
                cache.release(slot)
                del running[slot]


def test_pages_that_held_nan() -> None:
    """What a broken sequence left in its pages reaches no other, even where it is multiplied by a weight of 0."""
    config = CONFIGS["llama"]
    decoder = native_decoder(config)
    cache = decoder.new_cache()
    decoder.forward(rows_of(config, 300) * torch.nan, batch_of([300], [0], [0]), cache, [])
    cache.release(0)
    hidden = rows_of(config, 150, 1)
    expected = whole(decoder, hidden)
    for start, count in [(0, 70), (70, 1), (71, 10), (81, 69)]:
        batch = batch_of([count], [start], [1])
        out, taps = decoder.forward(hidden[start : start + count].clone(), batch, cache, [0, 1])
        assert taps is not None
        assert torch.equal(torch.cat([out, taps], dim=1), expected[start : start + count])


@pytest.mark.parametrize("form", ["bf16", "mxfp4"])
def test_a_broken_row_reaches_none_before_it(form: Format) -> None:
    """A draft token whose embedding is damaged: neither in its own pass nor, once rejected, in the next."""
    config = CONFIGS["llama"]
    decoder = native_decoder(config, form)
    hidden = rows_of(config, 20)
    expected = whole(decoder, hidden)[:, : config.hidden_size]
    cache = decoder.new_cache()
    rows = torch.cat([hidden[:5], rows_of(config, 3) * torch.nan])
    assert torch.equal(decoder.forward(rows, batch_of([8], [0], [0]), cache, [])[0][:5], expected[:5])
    for at in range(5, 20):
        found, _ = decoder.forward(hidden[at : at + 1].clone(), batch_of([1], [at], [0]), cache, [])
        assert torch.equal(found, expected[at : at + 1])
    broken, _ = decoder.forward(rows_of(config, 1) * torch.nan, batch_of([1], [20], [0]), cache, [])
    assert broken.isnan().all()


@settings(max_examples=4)
@given(st.integers(0, 2**32))
def test_a_long_context_in_any_chunks(seed: int) -> None:
    rng = random.Random(seed)
    config = CONFIGS["llama"]
    decoder = native_decoder(config)
    hidden = rows_of(config, 1200, seed % 1000)
    expected = whole(decoder, hidden)
    cache, done = decoder.new_cache(), 0
    while done < len(hidden):
        count = min(rng.choice([1, 3, 17, 130, 400]), len(hidden) - done)
        beside = rows_of(config, rng.choice([1, 40]), done)
        rows = torch.cat([hidden[done : done + count], beside])
        with native.threads(rng.randint(1, 4)):
            batch = batch_of([count, len(beside)], [done, 0], [0, 1])
            out, taps = decoder.forward(rows, batch, cache, [0, 1])
        assert taps is not None
        assert torch.equal(torch.cat([out, taps], dim=1)[:count], expected[done : done + count])
        done += count


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(["bf16", "int8"]), st.sampled_from([None, 3, 70]), st.integers(1, 12))
def test_a_drafted_block_depends_on_its_own_context_alone(
    seed: int, form: Format, window: int | None, rounds: int
) -> None:
    """Context injected in any pieces, blocks of other sizes before it, other sequences beside it: the same block."""
    rng = random.Random(seed)
    config = replace(CONFIGS["qwen3"], num_heads=4, num_kv_heads=2)
    decoder = native_decoder(config, form, [Visibility(causal=False), Visibility(causal=False, window=window)])
    cache = decoder.new_cache()
    contexts = [rows_of(config, 400, seed % 10**6 + slot) for slot in range(3)]
    lengths = [0, 0, 0]

    def alone(slot: int, block: Tensor) -> Tensor:
        own, length = decoder.new_cache(), lengths[slot]
        with native.threads(1):
            decoder.inject(contexts[slot][:length].clone(), batch_of([length], [0], [0]), own)
            return decoder.forward(block.clone(), batch_of([len(block)], [length], [0]), own, [])[0]

    for turn in range(rounds):
        slots = rng.sample(range(3), rng.randint(1, 3))
        grown = [rng.choice([1, 1, 4, 30, 0]) for _ in slots]
        parts = [contexts[slot][lengths[slot] : lengths[slot] + more] for slot, more in zip(slots, grown, strict=True)]
        with native.threads(rng.randint(1, 4)):
            decoder.inject(torch.cat(parts), batch_of(grown, [lengths[slot] for slot in slots], slots), cache)
        for slot, more in zip(slots, grown, strict=True):
            lengths[slot] += more
        counts = [rng.choice([2, 8, 16]) for _ in slots]
        blocks = [rows_of(config, count, turn) for count in counts]
        with native.threads(rng.randint(1, 4)):
            batch = batch_of(counts, [lengths[slot] for slot in slots], slots)
            found, _ = decoder.forward(torch.cat(blocks), batch, cache, [])
        for slot, block, part in zip(slots, blocks, found.split(counts), strict=True):
            assert torch.equal(part, alone(slot, block))
        if rng.random() < 0.2:
            cache.release(slots[0])
            lengths[slots[0]] = 0


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(["bf16", "int8", "mxfp4"]), st.sampled_from([None, 5, 70]))
def test_a_reading_row_depends_on_its_own_context_alone(seed: int, form: Format, window: int | None) -> None:
    """Not on other rows, sequences and threads; and what it reads stays as it was."""
    rng = random.Random(seed)
    target, cache = native_decoder(BASE), native_decoder(BASE).new_cache()
    lengths = [rng.choice([1, 5, 70, 200, 400]) for _ in range(4)]
    contexts = [rows_of(BASE, length + 1, seed % 10**6 + slot) for slot, length in enumerate(lengths)]
    slots = list(range(4))
    first = torch.cat([context[:-1] for context in contexts])
    target.forward(first, batch_of(lengths, [0] * 4, slots), cache, [])
    for slot, length in enumerate(lengths):
        cache.commit(slot, length)
    config = replace(BASE, **READERS["more-heads"])
    seen = [Visibility(window=window), CAUSAL]
    reader = native_decoder(config, form, seen, layers=query_layers(config), kv_layers=(1, 0))
    pages, lengths_before = cache.pool.pages, [cache.length(slot) for slot in slots]
    for turn in range(3):
        own = rng.sample(slots, rng.randint(1, 4))
        counts = [rng.randint(1, min(30, lengths[slot])) for slot in own]
        starts = [lengths[slot] - count for slot, count in zip(own, counts, strict=True)]
        rows = [rows_of(config, count, turn) for count in counts]
        with native.threads(rng.randint(1, 4)):
            found, _ = reader.forward(torch.cat(rows), batch_of(counts, starts, own), cache, [])
        with native.threads(1):
            for slot, part, start, result in zip(own, rows, starts, found.split([len(r) for r in rows]), strict=True):
                for i in range(len(part)):
                    alone, _ = reader.forward(part[i : i + 1].clone(), batch_of([1], [start + i], [slot]), cache, [])
                    assert torch.equal(alone, result[i : i + 1])
    assert cache.pool.pages == pages and [cache.length(slot) for slot in slots] == lengths_before
    last = torch.cat([context[-1:] for context in contexts])
    after, _ = target.forward(last, batch_of([1] * 4, lengths, slots), cache, [])
    for slot, context in enumerate(contexts):
        assert torch.equal(after[slot], whole(target, context)[-1, : BASE.hidden_size])


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["bf16", "int8", "mxfp4"]))
def test_a_row_with_an_attention_input_depends_on_its_own_context_alone(seed: int, form: Format) -> None:
    rng, width = random.Random(seed), 45
    decoder = native_decoder(BASE, form, layers=wide_layers(BASE, width))
    hidden, inputs = rows_of(BASE, 150, seed % 10**6), inputs_of(width, 150, seed % 10**6)
    with native.threads(1):
        expected, _ = decoder.forward(hidden.clone(), batch_of([150], [0], [0]), decoder.new_cache(), [], inputs)
    cache, done = decoder.new_cache(), 0
    while done < 150:
        count, beside = min(rng.choice([1, 3, 20, 60]), 150 - done), rng.choice([1, 30])
        part = slice(done, done + count)
        rows = torch.cat([rows_of(BASE, beside, done), hidden[part]])
        own = torch.cat([inputs_of(width, beside, done), inputs[part]])
        with native.threads(rng.randint(1, 4)):
            found, _ = decoder.forward(rows, batch_of([beside, count], [0, done], [1, 0]), cache, [], own)
        assert torch.equal(found[beside:], expected[part])
        done += count


def test_python_threads_may_share_a_decoder() -> None:
    """Each with its own cache; prefill and decoding over a long context plan their work differently."""
    config = CONFIGS["llama"]
    decoder = native_decoder(config)
    context, short = rows_of(config, 700), rows_of(config, 90, 1)
    expected = whole(decoder, context)[:, : config.hidden_size], whole(decoder, short)[:, : config.hidden_size]

    def decode() -> bool:
        cache = decoder.new_cache()
        decoder.forward(context[:600].clone(), batch_of([600], [0], [0]), cache, [])
        return all(
            torch.equal(
                decoder.forward(context[at : at + 1].clone(), batch_of([1], [at], [0]), cache, [])[0],
                expected[0][at : at + 1],
            )
            for at in range(600, 700)
        )

    def prefill() -> bool:
        counts = [1 + turn % 90 for turn in range(200)]
        return all(
            torch.equal(
                decoder.forward(short[:count].clone(), batch_of([count], [0], [0]), decoder.new_cache(), [])[0],
                expected[1][:count],
            )
            for count in counts
        )

    def retune() -> bool:
        for turn in range(400):
            native.library().set_threads(1 + turn % 4)
            time.sleep(1e-4)
        return True

    with native.threads(2), ThreadPoolExecutor(4) as pool:
        assert all(future.result() for future in [pool.submit(work) for work in (decode, prefill, retune, decode)])


def test_rows_and_taps_that_do_not_fit() -> None:
    config = CONFIGS["llama"]
    decoder = native_decoder(config)
    cache = decoder.new_cache()
    with pytest.raises(ValueError, match=r"\(3, 16\), the batch says \(4, 16\)"):
        decoder.forward(rows_of(config, 3), batch_of([4], [0], [0]), cache, [])
    with pytest.raises(ValueError, match="the batch says"):
        decoder.inject(rows_of(config, 3)[:, :8], batch_of([3], [0], [0]), cache)
    for tap in (-1, 2):
        with pytest.raises(IndexError, match=r"0\.\.1"):
            decoder.forward(rows_of(config, 1), batch_of([1], [0], [0]), cache, [tap])


@pytest.mark.parametrize("kernels", ["native", "pytorch"])
def test_an_attention_input_that_does_not_fit(kernels: str) -> None:
    make: Any = native_decoder if kernels == "native" else reference_decoder
    batch = batch_of([3], [0], [0])
    wide, plain = make(BASE, layers=wide_layers(BASE, 45)), make(BASE)
    for decoder, width in ((wide, 44), (plain, 45)):
        with pytest.raises(ValueError, match=rf"attention_input is \(3, {width}\), expected \(3, "):
            decoder.forward(rows_of(BASE, 3).double(), batch, decoder.new_cache(), [], inputs_of(width, 3).double())
    with pytest.raises(ValueError, match=r"attention_input is \(2, 45\)"):
        wide.forward(rows_of(BASE, 3).double(), batch, wide.new_cache(), [], inputs_of(45, 2).double())
    with pytest.raises(ValueError, match="needs an attention_input of 45 columns"):
        wide.forward(rows_of(BASE, 3).double(), batch, wide.new_cache(), [])


@pytest.mark.parametrize("kernels", ["native", "pytorch"])
def test_keys_and_values_that_do_not_fit(kernels: str) -> None:
    make: Any = native_decoder if kernels == "native" else reference_decoder
    target = make(BASE)
    cache = target.new_cache()
    target.forward(rows_of(BASE, 5).double(), batch_of([5], [0], [0]), cache, [])
    cache.commit(0, 5)

    def read(config: ModelConfig, kv_layers: tuple[int, ...], start: int = 4) -> None:
        reader = make(config, layers=query_layers(config), kv_layers=kv_layers)
        reader.forward(rows_of(config, 1).double(), batch_of([1], [start], [0]), cache, [])

    read(BASE, (1, 1))
    for wrong in ((0, 2), (-1, 0)):
        with pytest.raises(ValueError, match=r"0 to 1"):
            read(BASE, wrong)
    with pytest.raises(ValueError, match="a layer for each layer"):
        read(BASE, (0,))
    for config in (replace(BASE, num_kv_heads=1), replace(BASE, head_dim=8)):
        with pytest.raises(ValueError, match=f"2 key/value heads of 6, the layers .*{config.num_kv_heads} of "):
            read(config, (0, 1))
    with pytest.raises(ValueError, match="slot 0: rows up to position 5, but 5 are committed"):
        read(BASE, (0, 1), start=5)


def test_matrices_that_do_not_fit_the_configuration() -> None:
    first, second = random_layers(BASE)
    for name in ("qkv", "out", "gate_up", "down"):
        broken = replace(second, **{name: getattr(second, name)[:-2]})
        with pytest.raises(ValueError, match="expected"):
            native_decoder(BASE, layers=[first, broken])
    with pytest.raises(ValueError, match="qkv is 48 x 16, expected 24 x 16"):
        native_decoder(BASE, layers=[first, second], kv_layers=(0, 1))


def test_weight_bytes_count_what_a_pass_streams() -> None:
    """Panels of 32 rows and blocks of 32 columns, two bytes an element, or half a byte and a 32nd of a scale."""
    config = replace(BASE, num_layers=3, hidden_size=64, intermediate_size=96, head_dim=16)
    elements = 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    assert native_decoder(config).weight_bytes == 2 * elements
    assert native_decoder(config, "mxfp4").weight_bytes == elements // 2 + elements // 32
    assert native_decoder(config, "int8").weight_bytes == elements + 2 * elements // 32
