"""From a speculative config to a drafter: every method, stored in 16 and in 8 bits, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sequential import eagle3_json, eagle3_tensors, gemma4_json, gemma4_tensors, mtp_json, mtp_tensors, write
from tiny import (
    CONFIG,
    TOKENS,
    dflash_json,
    dflash_tensors,
    dspark_json,
    dspark_tensors,
    tiny_target,
)

from foredraft import drafters
from foredraft.config import SpeculativeConfig
from foredraft.drafters import METHODS, load_drafter
from foredraft.drafters.base import Drafter, DraftRequest, ReadsTargetCache
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.dflash import DFlashDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.storage import compact
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.loading import Target

# Wide enough for matrices with whole groups of 32 columns.
WIDE = replace(CONFIG, hidden_size=64, num_layers=3)
TRAINED = ("mtp", "gemma4_mtp", "eagle3", "dflash", "dspark")
CALIBRATION = Calibration((1.5, 0.7), (0.2, -0.1), (0.3, 0.2), (0.1, 0.1), 10, "made up")


@pytest.fixture(scope="module")
def wide() -> Target:
    return tiny_target(hidden_size=WIDE.hidden_size, num_layers=WIDE.num_layers)


def write_drafter(method: str, folder: Path) -> Path:
    """A random drafter of ``method`` for a target of the shape WIDE."""
    makers: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]] = {
        "mtp": (mtp_json, mtp_tensors),
        "gemma4_mtp": (gemma4_json, gemma4_tensors),
        "eagle3": (eagle3_json, eagle3_tensors),
        "dflash": (dflash_json, dflash_tensors),
        "dspark": (dspark_json, dspark_tensors),
    }
    config, tensors = makers[method]
    raw = config(WIDE)
    return write(folder, raw, tensors(raw))


def proposed(drafter: Drafter, target: Target) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What a drafter proposes after a text whose last tokens occurred before."""
    tokens = [3, 4, 5, 6, 7, 8, 3, 4]
    cache = target.model.new_cache()
    if isinstance(drafter, ReadsTargetCache):
        drafter.attach(cache)
    batch = flat_batch([tokens], [0], [0])
    taps = target.model.forward(batch, cache, drafter.taps).taps
    cache.commit(0, len(tokens))
    drafter.observe(batch, taps, [len(tokens)])
    (proposal,) = drafter.propose([DraftRequest(0, 5, len(tokens))], 4)
    assert proposal.confidences is not None
    return proposal.token_ids, proposal.confidences


def load(method: str, folder: Path | None, target: Target, count: int | None = None) -> Drafter:
    return load_drafter(SpeculativeConfig(method, None if folder is None else str(folder), count), target)


def test_the_methods() -> None:
    assert tuple(METHODS) == (*TRAINED, "ngram")


@pytest.mark.parametrize("method", TRAINED)
def test_a_drafter_from_its_folder(tmp_path: Path, wide: Target, method: str) -> None:
    """As stored and in 8 bits, with a calibration and without."""
    folder = write_drafter(method, tmp_path / "given")
    drafter = load(method, folder, wide)
    assert type(drafter) is METHODS[method].drafter and drafter.calibration is None
    ids, raw = proposed(drafter, wide)
    assert len(ids) == 4 and all(0 <= token < len(TOKENS) for token in ids)
    CALIBRATION.save(folder)
    compact(folder, tmp_path / "small")
    stored = json.loads((tmp_path / "small" / "config.json").read_text())
    assert stored["quantization_config"]["format"] == "int-quantized"
    small = load(method, tmp_path / "small", wide)
    assert small.calibration == load(method, folder, wide).calibration == CALIBRATION
    small.calibration = None
    # 8 bits of random weights move the first confidence a little, and later ones follow other tokens.
    first = proposed(small, wide)[1][0]
    assert first != raw[0] and first == pytest.approx(raw[0], abs=0.1)


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("asked", TRAINED)
def test_a_drafter_of_another_method(tmp_path: Path, wide: Target, method: str, asked: str) -> None:
    folder = write_drafter(method, tmp_path)
    if method == asked:
        assert load(asked, folder, wide).max_tokens >= 5
        return
    with pytest.raises(UserError, match=rf"holds a drafter of method {method} \(.*\), not {asked}; choose the method"):
        load(asked, folder, wide)


def test_something_else_in_the_folder(tmp_path: Path, wide: Target) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for method in TRAINED:
        with pytest.raises(UserError, match=r"architectures is \['LlamaForCausalLM'\]"):
            load(method, tmp_path, wide)


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize(
    ("other", "message"),
    [({"hidden_size": 32}, "hidden size"), ({"vocab_size": 40}, "vocabulary size"), ({"num_layers": 4}, "layers")],
)
def test_a_drafter_for_another_target(tmp_path: Path, method: str, other: dict[str, int], message: str) -> None:
    folder = write_drafter(method, tmp_path)
    target = tiny_target(**{"hidden_size": WIDE.hidden_size, "num_layers": WIDE.num_layers, **other})
    with pytest.raises(UserError, match=f"made for another target: .*{message}"):
        load(method, folder, target)


def test_ngram_needs_no_folder(tmp_path: Path, wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load("ngram", None, wide)
    assert isinstance(drafter, NgramDrafter) and drafter.calibration is None
    assert proposed(drafter, wide)[0] == (6, 7, 8, 3)
    with pytest.raises(UserError, match=r"num_speculative_tokens is 16, but ngram proposes 1 to 15 tokens"):
        load("ngram", None, wide, 16)
    with pytest.raises(
        UserError, match=r"ngram needs no drafter; .* can only hold its calibration\.json, and does not"
    ):
        load("ngram", tmp_path, wide)
    CALIBRATION.save(tmp_path / "ngram-smollm2-135m")
    assert load("ngram", tmp_path / "ngram-smollm2-135m", wide).calibration == CALIBRATION
    # What ships for the embedded target is a calibration.
    monkeypatch.setattr(drafters, "ASSETS", tmp_path)
    assert load("ngram", None, wide).calibration is None
    assert load("ngram", None, replace(wide, name="smollm2-135m")).calibration == CALIBRATION


def test_more_tokens_than_the_block_has(tmp_path: Path, wide: Target) -> None:
    folder = write_drafter("dflash", tmp_path)
    assert load("dflash", folder, wide, 5).max_tokens == 5
    with pytest.raises(UserError, match=r"num_speculative_tokens is 6, but the drafter in .* proposes 1 to 5 tokens"):
        load("dflash", folder, wide, 6)


def test_no_such_method_or_drafter(tmp_path: Path, wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="method 'eagle9' is not known; known: none, mtp, gemma4_mtp, eagle3, dflash,"):
        load("eagle9", tmp_path, wide)
    with pytest.raises(UserError, match=r"no model '\./no-such-folder'"):
        load_drafter(SpeculativeConfig("dflash", "./no-such-folder"), wide)
    file = tmp_path / "drafter.gguf"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="is not a drafter's folder"):
        load("dflash", file, wide)
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load("dflash", tmp_path, wide)
    with pytest.raises(UserError, match="no drafter ships for tiny; name one with `model`"):
        load("dflash", None, wide)
    monkeypatch.setattr(drafters, "ASSETS", tmp_path)
    with pytest.raises(UserError, match=r"the eagle3 drafter for smollm2-135m is missing from this installation"):
        load("eagle3", None, replace(wide, name="smollm2-135m"))


def test_the_shipped_drafter_is_found(tmp_path: Path, wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "ASSETS", tmp_path)
    write_drafter("dflash", tmp_path / "dflash-smollm2-135m")
    assert isinstance(load("dflash", None, replace(wide, name="smollm2-135m")), DFlashDrafter)
