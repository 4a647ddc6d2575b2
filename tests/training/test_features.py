"""Features of texts on disk equal those computed anew."""

import pytest
import torch
from test_trainer import texts, tiny_target

from foredraft.errors import UserError
from foredraft.training.features import FeatureSource, FeatureStore


def test_a_store_gives_back_what_the_target_computes(tmp_path):
    target = tiny_target(dtype=torch.bfloat16)
    examples = texts(4)
    store = FeatureStore(tmp_path, "tiny", (1, 3, 5), 32, examples)
    fresh = FeatureSource(target, (5, 1), 0)
    stored = FeatureSource(target, (5, 1), 0, store)
    assert store.get(examples[2]) is None
    expected = fresh(examples[2])
    assert torch.equal(stored(examples[2]), expected)
    again = FeatureStore(tmp_path, "tiny", (1, 3, 5), 32, examples)
    assert again.get(examples[2]) is not None and again.get(examples[1]) is None
    assert torch.equal(FeatureSource(target, (5, 1), 0, again)(examples[2]), expected)
    other = texts(1, seed=9)[0]
    assert torch.equal(stored(other), fresh(other)) and store.get(other) is None


def test_a_store_says_its_size_and_belongs_to_its_texts(tmp_path):
    examples = texts(4)
    FeatureStore(tmp_path, "tiny", (1, 3), 32, examples)
    assert (tmp_path / "features.bin").stat().st_size == FeatureStore.bytes_needed(examples, (1, 3), 32)
    for changed in (("other", (1, 3), 32, examples), ("tiny", (1, 4), 32, examples), ("tiny", (1, 3), 32, texts(5))):
        with pytest.raises(UserError, match="another"):
            FeatureStore(tmp_path, *changed)
    store = FeatureStore(tmp_path, "tiny", (1, 3), 32, examples)
    with pytest.raises(UserError, match="layers"):
        FeatureSource(tiny_target(), (2,), 0, store)
