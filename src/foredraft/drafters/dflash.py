"""DFlash: block drafting with one denoising step and KV injection (arXiv 2602.06036).

Taps of the target at every committed position are fused into one context vector
c = RMSNorm(fc([tap_1; ...; tap_m])). In every drafter layer the keys and values of the context come from c;
the block [anchor, MASK, ..., MASK] attends to them and, in both directions, to itself. All mask rows are
predicted at once through the target's own head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal
from foredraft.errors import UserError
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel, build_decoder
from foredraft.models.layers import DecoderLayer
from foredraft.ops import Format, Matrix, Operations
from foredraft.ops.plan import Visibility

FORM: Format = "int8"


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter's shape: ``layers`` describes its own decoder layers (Qwen3-style, ``qk_norm`` on).

    block_size counts the anchor. target_layer_ids: 0-based, by the layers' output. windows: sliding window of
    each drafter layer in positions, None where it sees everything. causal_windows: whether the layers with a
    window also see no later row of the block (z-lab's default for them). default_tokens: N unless the user says
    otherwise.
    """

    layers: ModelConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal_windows: bool = False
    default_tokens: int = 7


@dataclass(frozen=True)
class DFlashWeights:
    """fc: [K, m * K]. context_norm, norm: [K]. draft_vocab: [Vd] target ids the head predicts, None for all."""

    fc: Tensor
    context_norm: Tensor
    layers: tuple[DecoderLayer[Tensor], ...]
    norm: Tensor
    draft_vocab: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "DFlashWeights":
        """The same weights with ``function`` applied to every tensor that is trained."""
        return replace(
            self,
            fc=function(self.fc),
            context_norm=function(self.context_norm),
            layers=tuple(layer.map(function) for layer in self.layers),
            norm=function(self.norm),
        )


def context_features(fc: Matrix, norm: Tensor, taps: Tensor, eps: float, ops: Operations) -> Tensor:
    """c = RMSNorm(fc(taps)): ``taps [T, m * K]`` to [T, K]."""
    return ops.rms_norm(ops.linear(taps, fc, None), norm, eps)


class DFlashDrafter:
    """Runs a DFlash drafter beside its target; state is one cache that shares the target's slots.

    ops: by default the target's. The native kernels run a drafter in 8 bits: the target has the last word anyway.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: DFlashWeights,
        target: DecoderModel,
        ops: Operations | None = None,
    ) -> None:
        check_target(config, target.config)
        self.config = config
        self.taps = config.target_layer_ids
        self.max_tokens = config.block_size - 1
        self.default_tokens = min(config.default_tokens, self.max_tokens)
        self._ops = ops = ops or target.ops
        weights = weights.map(lambda tensor: tensor.to(device=target.device, dtype=target.dtype))
        visibility = [Visibility(window is not None and config.causal_windows, window) for window in config.windows]
        self._decoder = build_decoder(weights.layers, config.layers, ops, target.dtype, FORM, visibility)
        self._fc = ops.pack(weights.fc, FORM)
        self._context_norm, self._norm = weights.context_norm, weights.norm
        self._embeddings = target.embeddings
        self._device = target.device
        vocab = weights.draft_vocab
        self._draft_vocab = None if vocab is None else vocab.to(target.device)
        reduced = self._draft_vocab is not None
        self._head = ops.pack(target.head_rows(self._draft_vocab), FORM) if reduced else target.head
        self._cache = self._decoder.new_cache()

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """KV injection: context keys and values of the committed rows, all layers in one product."""
        assert taps is not None
        committed = batch.first_rows(accepted)
        if committed.rows is not None:
            taps = taps.index_select(0, committed.rows)
        context = context_features(self._fc, self._context_norm, taps, self.config.layers.rms_norm_eps, self._ops)
        self._decoder.inject(context, committed.batch, self._cache)
        for slot, end in zip(batch.slots, committed.batch.ends, strict=True):
            self._cache.commit(slot, end)

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[Proposal]:
        """One pass over [anchor, MASK x max_tokens] of every sequence; each mask row's best token."""
        for request in requests:
            if self._cache.length(request.slot) != request.position:
                raise RuntimeError(
                    f"slot {request.slot}: the drafter has seen {self._cache.length(request.slot)} positions, "
                    f"the anchor stands at {request.position}"
                )
        count = min(max_tokens, self.max_tokens)
        masks = [self.config.mask_token_id] * count
        batch = flat_batch(
            [[request.anchor, *masks] for request in requests],
            [request.position for request in requests],
            [request.slot for request in requests],
            [count] * len(requests),
            self._device,
        )
        hidden = self._ops.embedding(batch.token_ids, self._embeddings)
        hidden, _ = self._decoder.forward(hidden, batch, self._cache, ())
        masked = hidden.index_select(0, batch.logit_rows)
        normed = self._ops.rms_norm(masked, self._norm, self.config.layers.rms_norm_eps)
        best = self._ops.argmax(self._ops.linear(normed, self._head, None))
        if self._draft_vocab is not None:
            best = self._draft_vocab.index_select(0, best)
        return [Proposal(tuple(row)) for row in best.view(len(requests), count).tolist()]

    def release(self, slot: int) -> None:
        self._cache.release(slot)


def check_target(config: DFlashConfig, target: ModelConfig) -> None:
    """Raise UserError unless the drafter was made for a target of this shape."""
    pairs = (
        ("hidden size", config.layers.hidden_size, target.hidden_size),
        ("vocabulary size", config.layers.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    )
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise UserError(f"the drafter was made for another target: its {what} is {mine}, the target's is {theirs}")
