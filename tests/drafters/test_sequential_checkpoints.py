"""Folders of MTP and EAGLE-3 drafters: names, shapes, round trips, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sequential import TARGET_CONFIG, VOCABULARY, eagle3_json, eagle3_tensors, mtp_json, mtp_tensors, write
from torch import Tensor

from foredraft.drafters.eagle3 import Eagle3Config
from foredraft.drafters.mtp import MTPConfig
from foredraft.drafters.sequential_checkpoints import (
    default_eagle3_taps,
    load_eagle3,
    load_mtp,
    save_eagle3,
    save_mtp,
)
from foredraft.drafters.weights import named_tensors
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig, RopeConfig

YARN = RopeConfig(theta=77.0, kind="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2)
REDUCED = {"draft_vocab_size": len(VOCABULARY)}
LAYER = {
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "mtp": (mtp_json, mtp_tensors, load_mtp, save_mtp),
    "eagle3": (eagle3_json, eagle3_tensors, load_eagle3, save_eagle3),
}


def given(method: str, folder: Path, target: ModelConfig | None = None, **changes: Any) -> tuple[Any, Any]:
    """What is loaded of a random drafter whose config.json has ``changes``."""
    make_json, make_tensors, load, _ = METHODS[method]
    raw = make_json(TARGET_CONFIG, **changes)
    return load(write(folder, raw, make_tensors(raw)), torch.float64, target)  # type: ignore[no-any-return]


def tensors_of(weights: Any) -> dict[str, Tensor]:
    return dict(named_tensors(weights)) | ({} if weights.draft_vocab is None else {"vocab": weights.draft_vocab})


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_saving_writes_the_names_and_values_that_were_read(tmp_path: Path, method: str, qk_norm: bool) -> None:
    make_json, make_tensors, _, save = METHODS[method]
    stored = make_tensors(make_json(TARGET_CONFIG, qk_norm=qk_norm, **REDUCED))
    config, weights = given(method, tmp_path / "given", qk_norm=qk_norm, **REDUCED)
    save(tmp_path / "again", config, weights, {"trained_on": 3})
    saved = load_file(tmp_path / "again" / "model.safetensors")
    if method == "eagle3":
        assert saved.pop("t2d").nonzero().flatten().tolist() == VOCABULARY
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    expected = make_json(TARGET_CONFIG, qk_norm=qk_norm, **REDUCED)
    assert raw["trained_on"] == 3 and {name: raw[name] for name in expected} == expected


def test_names() -> None:
    mtp = {name.removesuffix(".weight") for name in mtp_tensors(mtp_json(TARGET_CONFIG))}
    own = {"mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"}
    assert mtp == own | {f"mtp.layers.0.{name}" for name in LAYER}
    eagle3 = {name.removesuffix(".weight") for name in eagle3_tensors(eagle3_json(TARGET_CONFIG, **REDUCED))}
    assert eagle3 == {"fc", "norm", "lm_head", "d2t", "midlayer.hidden_norm"} | {f"midlayer.{name}" for name in LAYER}


CHANGES: list[dict[str, Any]] = [{}, {"default_tokens": 5}, {"num_target_layers": 9}, {"layers": YARN}]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, changes) for method in METHODS for changes in CHANGES),
        ("eagle3", {"norm_before_residual": True}),
    ],
)
def test_round_trip(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    config, weights = given(method, tmp_path / "given")
    if "layers" in changes:
        changes = {"layers": replace(config.layers, rope=changes["layers"])}
    config = replace(config, **changes)
    _, _, load, save = METHODS[method]
    save(tmp_path / "again", config, weights)
    config_again, weights_again = load(tmp_path / "again", torch.float64)
    assert config_again == config and weights_again.draft_vocab is None
    before, after = tensors_of(weights), tensors_of(weights_again)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_eagle3_layer_ids_count_as_in_vllm(tmp_path: Path) -> None:
    """vLLM's i is the output of layer i - 1."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert given("eagle3", tmp_path / "a", eagle_config=ids)[0].target_layer_ids == (0, 2, 3)
    raw = eagle3_json(TARGET_CONFIG, eagle_config=ids)
    tensors = eagle3_tensors(raw)
    folder = write(tmp_path / "b", {**raw, "eagle_config": None, **ids}, tensors)
    assert load_eagle3(folder, torch.float64)[0].target_layer_ids == (0, 2, 3)
    # Without ids they are vLLM's 2, L / 2 and L - 3.
    deep = {**raw, "eagle_config": None, "num_target_layers": 30}
    assert load_eagle3(write(tmp_path / "c", deep, tensors), torch.float64)[0].target_layer_ids == (1, 14, 26)
    assert default_eagle3_taps(30) == (1, 14, 26)


def test_eagle3_in_other_hands(tmp_path: Path) -> None:
    """The layer under its other name, the target's head and embeddings, and no word of the target's depth."""
    raw = eagle3_json(TARGET_CONFIG, **REDUCED)
    del raw["num_target_layers"]
    tensors = eagle3_tensors(raw)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    del renamed["lm_head.weight"]
    hidden, size = TARGET_CONFIG.hidden_size, TARGET_CONFIG.vocab_size
    folder = write(tmp_path / "a", raw, {**renamed, "embed_tokens.weight": torch.zeros(size, hidden)})
    config, weights = load_eagle3(folder, torch.float64, TARGET_CONFIG)
    assert config.num_target_layers == 4 and weights.head is None
    assert weights.draft_vocab is not None and weights.draft_vocab.tolist() == VOCABULARY
    assert torch.equal(weights.layers[0].qkv[:40], tensors["midlayer.self_attn.q_proj.weight"])
    with pytest.raises(UserError, match="no `num_target_layers`, and no target was named"):
        load_eagle3(folder, torch.float64)
    other = write(tmp_path / "b", raw, {**renamed, "embed_tokens.weight": torch.zeros(size + 1, hidden)})
    with pytest.raises(UserError, match=r"embed_tokens.weight has shape \(33, 16\)"):
        load_eagle3(other, torch.float64, TARGET_CONFIG)


def test_defaults(tmp_path: Path) -> None:
    for method, kind in (("mtp", MTPConfig), ("eagle3", Eagle3Config)):
        config, _ = given(method, tmp_path / method)
        assert isinstance(config, kind)
        assert config.default_tokens == 3 and config.max_tokens == 15
        assert config.layers.num_layers == 1 and not config.layers.qk_norm


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("mtp", {"architectures": ["Qwen3_5ForCausalLM"]}, "not a MTPDraftModel"),
        ("mtp", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ("mtp", {"mtp_num_hidden_layers": None}, "no `mtp_num_hidden_layers`"),
        ("mtp", {"num_target_layers": None}, "no `num_target_layers`"),
        ("mtp", {"attention_bias": True}, "biases"),
        ("mtp", {"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ("eagle3", {"architectures": ["LlamaForCausalLM"]}, "expected one of LlamaForCausalLMEagle3"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ("eagle3", {"target_hidden_size": 32}, "target_hidden_size"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc"),
        ("eagle3", {"fc_norm": True}, "fc_norm"),
        ("eagle3", {"norm_output": True}, "norm_output"),
        ("eagle3", {"logit_scale": 2.0}, "logit_scale"),
        ("eagle3", {"mlp_bias": True}, "biases"),
        ("eagle3", {"draft_vocab_size": 9}, "lacks the tensor d2t"),
        *(
            ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, "ascending numbers in 1..4")
            for ids in ([0, 1, 2], [1, 2, 5], [2, 1, 3], [1, 1, 2])
        ),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": False}},
            "use_aux_hidden_state",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        given(method, tmp_path, **changes)


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_of_another_target_is_named_before_weights_are_read(tmp_path: Path, method: str) -> None:
    make_json, _, load, _ = METHODS[method]
    tmp_path.joinpath("config.json").write_text(json.dumps(make_json(TARGET_CONFIG)))
    with pytest.raises(UserError, match="its vocabulary size is 32, the target's is 40"):
        load(tmp_path, torch.float64, replace(TARGET_CONFIG, vocab_size=40))


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, method: str) -> None:
    make_json, make_tensors, load, _ = METHODS[method]
    raw = make_json(TARGET_CONFIG)
    name = "mtp.fc.weight" if method == "mtp" else "fc.weight"
    folder = write(tmp_path, raw, {**make_tensors(raw), name: torch.zeros(3, 4)})
    with pytest.raises(UserError, match=f"{name} has shape"):
        load(folder, torch.float64)
