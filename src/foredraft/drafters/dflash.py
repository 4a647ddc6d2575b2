"""DFlash: block drafting with one denoising step and KV injection (arXiv 2602.06036).

Taps of the target at every committed position are fused into one context vector
c = RMSNorm(fc([tap_1; ...; tap_m])). In every drafter layer the keys and values of the context come from c;
the block [anchor, MASK, ..., MASK] attends to them and, in both directions, to itself. All mask rows are
predicted at once through the target's own head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.fitting import FORM, check_shape, draft_head, fitted
from foredraft.drafters.picking import Draft, DraftVocabulary, pick
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import Cache
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel, build_decoder
from foredraft.models.layers import DecoderLayer
from foredraft.ops import Matrix, Operations
from foredraft.ops.plan import Visibility


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


def context_features(fc: Matrix, norm: Tensor, taps: Tensor, eps: float, ops: Operations) -> Tensor:
    """c = RMSNorm(fc(taps)): ``taps [T, m * K]`` to [T, K]."""
    return ops.rms_norm(ops.linear(taps, fc, None), norm, eps)


class Backbone:
    """What block drafters share: a cache of context keys and values in the target's slots, and the pass over a block.

    embeddings: of the block's tokens, as ``ops.embedding`` reads them.
    """

    def __init__(
        self, config: DFlashConfig, weights: DFlashWeights, target: DecoderModel, ops: Operations, embeddings: Matrix
    ) -> None:
        check_shape(config.layers, config.num_target_layers, target.config)
        self._config = config
        self._ops = ops
        self._embeddings = embeddings
        self._device = target.device
        visibility = [Visibility(window is not None and config.causal_windows, window) for window in config.windows]
        self._decoder = build_decoder(weights.layers, config.layers, ops, target.dtype, FORM, visibility)
        self._fc = ops.pack(weights.fc, FORM)
        self._context_norm, self._norm = weights.context_norm, weights.norm
        self._cache = self._decoder.new_cache()
        self.caches: tuple[Cache, ...] = (self._cache,)

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """KV injection: context keys and values of the committed rows, all layers in one product."""
        assert taps is not None
        committed = batch.first_rows(accepted)
        if committed.rows is not None:
            taps = taps.index_select(0, committed.rows)
        context = context_features(self._fc, self._context_norm, taps, self._config.layers.rms_norm_eps, self._ops)
        self._decoder.inject(context, committed.batch, self._cache)
        for slot, end, count in zip(batch.slots, committed.batch.ends, accepted, strict=True):
            if count:
                self._cache.commit(slot, end)

    def hidden(self, requests: Sequence[DraftRequest], masks: int, predicting: int) -> Tensor:
        """One pass over [anchor, MASK x masks] of every sequence: the normed hidden states of the last ``predicting``
        rows of each, [R * predicting, K]."""
        for request in requests:
            if self._cache.length(request.slot) != request.position:
                raise RuntimeError(
                    f"slot {request.slot}: the drafter has seen {self._cache.length(request.slot)} positions, "
                    f"the anchor stands at {request.position}"
                )
        batch = flat_batch(
            [[request.anchor] + [self._config.mask_token_id] * masks for request in requests],
            [request.position for request in requests],
            [request.slot for request in requests],
            [predicting] * len(requests),
            self._device,
        )
        hidden = self._ops.embedding(batch.token_ids, self._embeddings)
        hidden, _ = self._decoder.forward(hidden, batch, self._cache, ())
        wanted = hidden if len(batch.logit_rows) == len(hidden) else hidden.index_select(0, batch.logit_rows)
        return self._ops.rms_norm(wanted, self._norm, self._config.layers.rms_norm_eps)

    def release(self, slot: int) -> None:
        self._cache.release(slot)


class DFlashDrafter:
    """Runs a DFlash drafter beside its target; state is one cache that shares the target's slots.

    ops: by default the target's.
    """

    lookahead = False

    def __init__(
        self,
        config: DFlashConfig,
        weights: DFlashWeights,
        target: DecoderModel,
        ops: Operations | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.taps = config.target_layer_ids
        self.max_tokens = config.block_size - 1
        self.default_tokens = min(config.default_tokens, self.max_tokens)
        self.calibration = calibration
        self._ops = ops = ops or target.ops
        weights = fitted(weights, target)
        self._backbone = Backbone(config, weights, target, ops, target.embeddings)
        self.caches = self._backbone.caches
        self._vocab = DraftVocabulary(weights.draft_vocab, target.config.vocab_size)
        self._head = draft_head(None, weights.draft_vocab, target, ops)

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing: its state is its cache."""

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        self._backbone.observe(batch, taps, accepted)

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        """One pass over [anchor, MASK x max_tokens] of every sequence; each mask row gives a token."""
        count = min(max_tokens, self.max_tokens)
        normed = self._backbone.hidden(requests, masks=count, predicting=count)
        rows = [(request, k) for request in requests for k in range(1, count + 1)]
        picked = pick(self._ops.linear(normed, self._head, None), rows, self._vocab, self._ops)
        drafts = [Draft() for _ in requests]
        for row in range(len(rows)):
            drafts[row // count].add(picked, row, picked.confidences[row], self.calibration)
        return [draft.proposal() for draft in drafts]

    def release(self, slot: int) -> None:
        self._backbone.release(slot)
