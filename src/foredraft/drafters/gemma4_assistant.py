"""The layers and the head of Google's ``gemma4_assistant`` checkpoints, in PyTorch operations.

Gemma 4 layers with queries only: norms before and after each half, a gated MLP with tanh-approximated GELU, unscaled
attention, one scalar on the whole output. Layers come in two kinds, ``full_attention`` and ``sliding_attention``,
which differ in head size and rotation; each reads the keys and values of the target's last layer of its kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models.config import RopeConfig
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops.reference import linear, rms_norm, rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Gemma4Attention:
    """Attention of one kind of layer. rotated: the share of a head's pairs that RoPE turns, the fastest ones.
    window: how many positions before the newest one a query still sees, None for all of them."""

    head_dim: int
    rope: RopeConfig
    rotated: float = 1.0
    window: int | None = None


@dataclass(frozen=True)
class Gemma4Shape:
    """kinds: of each layer. top_centroids: clusters whose tokens the head scores, None for a head over everything.
    softcap: logits become softcap * tanh(logits / softcap)."""

    kinds: tuple[str, ...]
    attention: dict[str, Gemma4Attention]
    top_centroids: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Gemma4Layer:
    """q: [heads * D, h]. q_norm: [D]. out: [h, heads * D]. gate_up: [2 * M, h]. down: [h, M]. scalar: [1]."""

    input_norm: Tensor
    q: Tensor
    q_norm: Tensor
    out: Tensor
    post_attention_norm: Tensor
    pre_mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    post_mlp_norm: Tensor
    scalar: Tensor


@dataclass(frozen=True)
class Gemma4Weights:
    """centroids: [C, h]. clusters: [C, V / C] int64, the token ids of each centroid. Both None without the sparse
    head."""

    layers: tuple[Gemma4Layer, ...]
    centroids: Tensor | None = None
    clusters: Tensor | None = None


class SharedCache(Protocol):
    """A Gemma 4 target's cache, as its drafter reads it."""

    def shared(self, kind: str, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values, [n, G, D] each, of the newest of the first ``length`` positions of a slot, as the
        last layer of ``kind`` with keys and values of its own holds them. A sliding layer may hold the last ones only.
        """


class Gemma4Decoder:
    """The layers over one row of each sequence. dtype and device are those of the weights."""

    def __init__(self, shape: Gemma4Shape, layers: Sequence[Gemma4Layer], eps: float) -> None:
        self._shape, self._layers, self._eps = shape, layers, eps
        self._rotary = {
            kind: RotaryTable(_frequencies(own), 1.0, layers[0].q.dtype, layers[0].q.device)
            for kind, own in shape.attention.items()
        }

    def forward(self, hidden: Tensor, slots: Sequence[int], lengths: Sequence[int], cache: SharedCache) -> Tensor:
        """``hidden [R, h]``: row i belongs to the sequence in ``slots[i]``, sees its first ``lengths[i]`` positions and
        stands at the next one. Returns [R, h], before the final norm."""
        positions = torch.tensor(lengths, device=hidden.device)
        kinds = set(self._shape.kinds)
        angles = {kind: self._rotary[kind](positions, max(lengths) + 1) for kind in kinds}
        seen = {
            kind: [cache.shared(kind, slot, length) for slot, length in zip(slots, lengths, strict=True)]
            for kind in kinds
        }
        for kind, layer in zip(self._shape.kinds, self._layers, strict=True):
            hidden = self._layer(layer, self._shape.attention[kind], hidden, angles[kind], seen[kind])
        return hidden

    def _layer(
        self,
        layer: Gemma4Layer,
        own: Gemma4Attention,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        seen: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        eps = self._eps
        queries = linear(rms_norm(hidden, layer.input_norm, eps), layer.q).view(len(hidden), -1, own.head_dim)
        queries = rope(rms_norm(queries, layer.q_norm, eps), *angles)
        mixed = torch.stack(
            [_attend(query, keys, values, own.window) for query, (keys, values) in zip(queries, seen, strict=True)]
        )
        hidden = hidden + rms_norm(linear(mixed, layer.out), layer.post_attention_norm, eps)
        gate, up = linear(rms_norm(hidden, layer.pre_mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
        gated = F.gelu(gate, approximate="tanh") * up
        return (hidden + rms_norm(linear(gated, layer.down), layer.post_mlp_norm, eps)) * layer.scalar


def gemma4_logits(hidden: Tensor, head: Tensor, shape: Gemma4Shape, weights: Gemma4Weights) -> Tensor:
    """Logits [R, V] of ``hidden [R, h]`` (after the final norm) over ``head [V, h]``.

    With the sparse head only the tokens of each row's best centroids are scored; the others are -inf.
    """
    if weights.centroids is None or weights.clusters is None or shape.top_centroids is None:
        return _capped(linear(hidden, head), shape.softcap)
    best = linear(hidden, weights.centroids).topk(shape.top_centroids, dim=-1).indices
    tokens = weights.clusters[best].flatten(1)
    scores = torch.bmm(head[tokens], hidden.unsqueeze(-1)).squeeze(-1)
    logits = scores.new_full((len(hidden), len(head)), -torch.inf)
    return logits.scatter_(1, tokens, _capped(scores, shape.softcap))


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _attend(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """One ``query [heads, D]`` over ``keys``, ``values [n, G, D]``: [heads * D]. Gemma 4 does not scale the scores."""
    if window is not None:
        keys, values = keys[-window - 1 :], values[-window - 1 :]
    grouped = query.view(keys.shape[1], -1, query.shape[1])
    weights = torch.matmul(grouped, keys.permute(1, 2, 0)).softmax(dim=-1)
    return torch.matmul(weights, values.transpose(0, 1)).reshape(-1)


def _frequencies(own: Gemma4Attention) -> Tensor:
    frequencies, _ = inverse_frequencies(own.rope, own.head_dim)
    turned = int(own.rotated * own.head_dim // 2)
    return torch.cat((frequencies[:turned], torch.zeros(len(frequencies) - turned)))
