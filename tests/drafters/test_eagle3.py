"""EAGLE-3 against a re-computation from its description and a closed form of its head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequential import (
    VOCABULARY,
    causal_layer,
    check_description,
    check_native,
    eagle3_json,
    eagle3_tensors,
    head_of,
    norm,
    taps_of,
    target_model,
    unrolled,
    write,
)
from tiny import TOKENS
from torch import Tensor

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.eagle3 import Eagle3Drafter
from foredraft.drafters.sequential_checkpoints import load_eagle3
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.ops import NATIVE, native

TARGET = target_model()
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": len(VOCABULARY)},
    "norm-before-residual": {"norm_before_residual": True},
    "targets-head": {"draft_vocab_size": len(VOCABULARY), "own_head": False, "num_key_value_heads": 4},
    "qk-norm": {"qk_norm": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3]}},
}
MISSING = native.unavailable()


class Method:
    """A random EAGLE-3 drafter as a file, as we load it, and as its description computes it."""

    def __init__(self, name: str, folder: Path, target: DecoderModel) -> None:
        changes = dict(VARIANTS[name])
        own_head = changes.pop("own_head", True)
        self.target = target
        self.raw = eagle3_json(target.config, **changes)
        self.tensors = eagle3_tensors(self.raw, own_head=own_head)
        self.head, self.vocabulary = head_of(self.raw, target)
        if own_head:
            self.head = self.tensors["lm_head.weight"]
        self.config, self.weights = load_eagle3(write(folder, self.raw, self.tensors), torch.float64, target.config)

    def drafter(self) -> Eagle3Drafter:
        return Eagle3Drafter(self.config, self.weights, self.target)

    def features(self, taps: Tensor) -> Tensor:
        return taps @ self.tensors["fc.weight"].T

    def rows(self, features: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        table, raw = self.target.ops.embedding(torch.arange(len(TOKENS)), self.target.embeddings).double(), self.raw
        normed = norm(features, self.tensors["midlayer.hidden_norm.weight"], raw)
        embedded = norm(table[list(token_ids)], self.tensors["midlayer.input_layernorm.weight"], raw)
        residual = normed if raw.get("norm_before_residual") else features
        x = causal_layer(self.tensors, "midlayer.", raw, residual, torch.cat((embedded, normed), -1))
        return x, norm(x, self.tensors["norm.weight"], raw)


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Method]:
    return {name: Method(name, tmp_path_factory.mktemp(name), TARGET) for name in VARIANTS}


@pytest.fixture(scope="module")
def native_method(tmp_path_factory: pytest.TempPathFactory) -> Method:
    return Method("plain", tmp_path_factory.mktemp("native"), target_model(NATIVE))


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_proposals_are_those_of_the_description(methods: Mapping[str, Method], name: str, seed: int) -> None:
    check_description(TARGET, methods[name].drafter, methods[name], seed)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_native_drafter_with_a_past_is_one_freshly_primed(native_method: Method, seed: int) -> None:
    check_native(native_method.target, native_method.drafter, native_method, seed)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", ["plain", "targets-head", "norm-before-residual"])
def test_closed_form_of_the_head(methods: Mapping[str, Method], name: str, normed: bool) -> None:
    """A layer that adds nothing hands f on: every step predicts i + d2t[i], i the best row of lm_head(norm(f))."""
    method = methods[name]
    [layer] = method.weights.layers
    silent = replace(layer, out=torch.zeros_like(layer.out), down=torch.zeros_like(layer.down))
    config = replace(method.config, norm_before_residual=normed)
    drafter = Eagle3Drafter(config, replace(method.weights, layers=(silent,)), TARGET)
    tokens = [5, 9, 4, 30, 7]
    taps = taps_of(TARGET, drafter.taps, tokens)
    batch = flat_batch([tokens], [0], [0])
    drafter.observe(batch, taps, [5])
    [proposal] = drafter.propose([DraftRequest(0, 6, 5)], 4)
    found = []
    f = (method.tensors["fc.weight"] @ taps[-1]).tolist()
    for _ in range(4):
        if normed:
            f = plain_norm(f, method.tensors["midlayer.hidden_norm.weight"].tolist(), method.raw["rms_norm_eps"])
        read = plain_norm(f, method.tensors["norm.weight"].tolist(), method.raw["rms_norm_eps"])
        scores = [sum(w * x for w, x in zip(row, read, strict=True)) for row in method.head.tolist()]
        best = scores.index(max(scores))
        found.append(best + (int(method.tensors["d2t"][best]) if "d2t" in method.tensors else 0))
    assert proposal.token_ids == tuple(found)


def plain_norm(x: list[float], weight: list[float], eps: float) -> list[float]:
    size = (sum(value * value for value in x) / len(x) + eps) ** 0.5
    return [w * value / size for w, value in zip(weight, x, strict=True)]


def test_everything_reaches_the_proposal(methods: Mapping[str, Method]) -> None:
    """Guards the tests above: every tap of every position and every step do matter."""
    method, tokens, drafted = methods["plain"], [5, 9, 4, 30, 7, 22], [4, 9, 18]
    taps = taps_of(TARGET, method.config.target_layer_ids, tokens)
    base = unrolled(method, taps, tokens, 6, drafted)
    for position in range(len(tokens)):
        for tap in taps.view(len(tokens), 3, -1)[position]:
            kept = tap.clone()
            tap *= -1
            assert (unrolled(method, taps, tokens, 6, drafted) - base).abs().amax(-1).min() > 1e-6
            tap.copy_(kept)
    assert (unrolled(method, taps, tokens, 7, drafted) - base).abs().amax(-1).min() > 1e-3
    other = unrolled(method, taps, tokens, 6, [4, 1, 18])
    assert torch.equal(other[:2], base[:2]) and (other[2] - base[2]).abs().max() > 1e-3


def test_limits_and_taps(methods: Mapping[str, Method]) -> None:
    drafter = methods["plain"].drafter()
    assert drafter.taps == (0, 1, 3) and drafter.max_tokens == 15 and drafter.default_tokens == 3


def test_another_target_is_named(methods: Mapping[str, Method]) -> None:
    method = methods["plain"]
    with pytest.raises(UserError, match="its number of target layers is 4, the target's is 5"):
        Eagle3Drafter(method.config, method.weights, target_model(num_layers=5))
