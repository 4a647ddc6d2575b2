"""MXFP4 folders: what is written is what quantize() gives, in whole files, and what is read is what was written.

safetensors reads them back; that vLLM does is recorded in docs/quantization.md.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIG, TOKENS, model_tensors, save_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from foredraft.errors import UserError
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.gguf import GGUFFile
from foredraft.models.loading import folder_weights, read_config, resolve
from foredraft.quantization import checkpoints
from foredraft.quantization.checkpoints import Progress, quantize_checkpoint
from foredraft.quantization.layouts import Layout
from foredraft.quantization.mxfp4 import MXFP4Tensor, quantize, relative_error
from foredraft.quantization.source import open_source
from foredraft.tokenizer import Tokenizer

SHAPE = replace(CONFIG, hidden_size=64, intermediate_size=96, head_dim=16)
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": SHAPE.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 100.0,
    "torch_dtype": "float32",
    "some_other_field": [1, 2],
}
LAYOUTS: tuple[Layout, ...] = ("quark", "compressed-tensors")


def write_source(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> str:
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    save_file(
        {name: tensor.float() for name, tensor in (tensors or model_tensors(SHAPE)).items()},
        folder / "model.safetensors",
    )
    return str(folder)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_source(tmp_path / "source")


def is_layer_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["mse", "ocp"])
def test_what_is_written_is_the_quantised_model(source: str, tmp_path: Path, layout: Layout, rule: Any) -> None:
    written = quantize_checkpoint(source, tmp_path / "out", layout, rule)
    read = folder_weights(tmp_path / "out", torch.float32)
    tensors = {name: tensor.float().bfloat16() for name, tensor in model_tensors(SHAPE).items()}
    errors = []
    for name, tensor in tensors.items():
        found = read(name)
        if is_layer_matrix(name):
            expected = quantize(tensor, rule)
            assert isinstance(found, MXFP4Tensor) and found.shape == tensor.shape
            assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
            errors.append(relative_error(tensor, expected))
        else:
            assert isinstance(found, Tensor) and torch.equal(found, tensor.float())
    matrices = sum(tensor.numel() for name, tensor in tensors.items() if is_layer_matrix(name))
    others = sum(tensor.numel() for name, tensor in tensors.items() if not is_layer_matrix(name))
    assert written.nbytes == matrices * 17 // 32 + others * 2
    assert written.bfloat16_nbytes == 2 * (matrices + others)
    assert (written.shards, written.kept_shards, len(written.relative_errors)) == (1, 0, 14)
    assert written.mean_relative_error == pytest.approx(sum(errors) / len(errors))
    assert read_config(tmp_path / "out") == read_config(Path(source))


def test_the_names_and_fields_that_vllm_reads_quark(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(source, out, "quark")
    tensors = stored(out)
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype == torch.uint8
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (64, 48)
    assert tensors["model.layers.1.mlp.down_proj.weight_scale"].shape == (64, 3)
    assert len(tensors) == len(model_tensors(SHAPE)) + 14
    field = json.loads((out / "config.json").read_text())["quantization_config"]
    weight = field["global_quant_config"]["weight"]
    assert field["quant_method"] == "quark" and field["exclude"] == ["lm_head"]
    assert field["global_quant_config"]["input_tensors"] is None
    assert (weight["dtype"], weight["qscheme"], weight["group_size"]) == ("fp4", "per_group", 32)
    assert weight["scale_format"] == "e8m0" and weight["is_dynamic"] is False
    assert field["export"]["kv_cache_group"] == [] and "pack_method" in field["export"]
    assert field["layer_quant_config"] == field["layer_type_quant_config"] == {}


def test_the_names_and_fields_that_vllm_reads_compressed_tensors(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(source, out, "compressed-tensors", quantize_head=True)
    tensors = stored(out)
    assert tensors["lm_head.weight_packed"].shape == (SHAPE.vocab_size, 32)
    assert tensors["lm_head.weight_scale"].shape == (SHAPE.vocab_size, 2)
    assert "lm_head.weight" not in tensors and tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    field = json.loads((out / "config.json").read_text())["quantization_config"]
    assert field["quant_method"] == "compressed-tensors" and field["format"] == "mxfp4-pack-quantized"
    assert field["ignore"] == []
    (group,) = field["config_groups"].values()
    assert group["targets"] == ["Linear", "lm_head"]
    weights = group["weights"]
    assert (weights["num_bits"], weights["type"], weights["strategy"]) == (4, "float", "group")
    assert (weights["group_size"], weights["symmetric"], weights["dynamic"]) == (32, True, False)


def test_the_other_files(source: str, tmp_path: Path) -> None:
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "source" / "notes.txt").write_text("not of the model")
    out = tmp_path / "out"
    quantize_checkpoint(source, out)
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")
    assert config == {**RAW, "torch_dtype": "bfloat16"}
    assert {*contents(out)} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


@pytest.mark.parametrize("head", [False, True])
def test_a_head_that_is_the_embeddings(tmp_path: Path, head: bool) -> None:
    tensors = {name: tensor for name, tensor in model_tensors(SHAPE).items() if name != "lm_head.weight"}
    source = write_source(tmp_path / "source", tensors, tie_word_embeddings=True)
    written = quantize_checkpoint(source, tmp_path / "out", quantize_head=head)
    assert read_config(tmp_path / "out").tie_word_embeddings is not head
    assert written.bfloat16_nbytes == 2 * sum(tensor.numel() for tensor in tensors.values())
    read = folder_weights(tmp_path / "out", torch.bfloat16)
    embeddings = tensors["model.embed_tokens.weight"].float().bfloat16()
    assert torch.equal(read("model.embed_tokens.weight"), embeddings)  # type: ignore[arg-type]
    if head:
        found = read("lm_head.weight")
        assert isinstance(found, MXFP4Tensor) and torch.equal(found.codes, quantize(embeddings).codes)
    else:
        with pytest.raises(UserError, match=r"lacks the tensor lm_head\.weight"):
            read("lm_head.weight")


def test_biases_and_head_norms(tmp_path: Path) -> None:
    config = replace(SHAPE, architecture="qwen3", qk_norm=True)
    tensors = model_tensors(config)
    for index in range(2):
        rows = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32, "self_attn.o_proj": 64}
        tensors |= {f"model.layers.{index}.{name}.bias": torch.randn(size) for name, size in rows.items()}
    source = write_source(tmp_path / "source", tensors, model_type="qwen3", attention_bias=True)
    quantize_checkpoint(source, tmp_path / "out")
    read = folder_weights(tmp_path / "out", torch.bfloat16)
    for name, tensor in tensors.items():
        if not is_layer_matrix(name):
            assert torch.equal(read(name), tensor.float().bfloat16()), name  # type: ignore[arg-type]
    assert len(stored(tmp_path / "out")) == len(tensors) + 14


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [1, 3000, 9000])
def test_shards(source: str, tmp_path: Path, layout: Layout, limit: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    quantize_checkpoint(source, whole, layout)
    written = quantize_checkpoint(source, parts, layout, max_shard_bytes=limit)
    files = sorted(parts.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{written.shards:05}.safetensors" for number in range(1, written.shards + 1)
    ]
    expected = stored(whole)
    found = stored(parts)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for file in files:
        held = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in held)
        # A matrix of 64 x 96 takes 3264 bytes, the embeddings 4096: those may stand alone above the limit.
        units = {name.removesuffix("_scale").removesuffix("_packed") for name in held}
        assert sum(tensor.nbytes for tensor in held.values()) <= limit or len(units) == 1
    if limit == 1:
        assert written.shards == len(model_tensors(SHAPE))
    read = folder_weights(parts, torch.bfloat16)
    assert isinstance(read("model.layers.0.mlp.up_proj.weight"), MXFP4Tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_aligned(source: str, tmp_path: Path, layout: Layout) -> None:
    quantize_checkpoint(source, tmp_path / "out", layout)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header.pop("__metadata__")["format"] == "pt"
    assert {entry["dtype"] for entry in header.values()} == {"BF16", "U8"}
    assert all(entry["data_offsets"][0] % 2 == 0 for entry in header.values() if entry["dtype"] == "BF16")


class Stop(Exception):
    """Ctrl-C, as far as the files are concerned."""


def stop_after(count: int) -> Callable[[Progress], None]:
    calls = iter(range(count))

    def report(_: Progress) -> None:
        if next(calls, None) is None:
            raise Stop

    return report


@pytest.mark.parametrize("limit", [9000, 1 << 30])
@pytest.mark.parametrize("count", [0, 7, 12, 18])
def test_an_interrupted_run_goes_on(source: str, tmp_path: Path, limit: int, count: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one = quantize_checkpoint(source, whole, max_shard_bytes=limit)
    with pytest.raises(Stop):
        quantize_checkpoint(source, parts, max_shard_bytes=limit, report=stop_after(count))
    assert not (parts / "config.json").exists()
    complete = {name: data for name, data in contents(parts).items() if not name.endswith(".partial")}
    assert complete.items() <= contents(whole).items()
    before = {name: (parts / name).stat().st_ino for name in complete}
    seen: list[Progress] = []
    two = quantize_checkpoint(source, parts, max_shard_bytes=limit, report=seen.append)
    assert contents(parts) == contents(whole)
    assert two.kept_shards == len(complete)
    assert all((parts / name).stat().st_ino == number for name, number in before.items())
    assert seen[-1].done == seen[-1].total == one.nbytes == two.nbytes
    assert two.relative_errors.items() <= one.relative_errors.items()
    if limit == 9000 and count == 18:
        assert 0 < len(complete) < one.shards and len(two.relative_errors) < 14


def test_a_finished_run_is_kept(source: str, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", max_shard_bytes=9000)
    before = contents(tmp_path / "out")
    again = quantize_checkpoint(source, tmp_path / "out", max_shard_bytes=9000)
    assert contents(tmp_path / "out") == before
    assert again.kept_shards == again.shards and again.mean_relative_error is None


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"y" + data[1:]])
def test_a_file_that_is_not_whole_is_not_kept(source: str, tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    quantize_checkpoint(source, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors comes from another source, other arguments"):
        quantize_checkpoint(source, tmp_path / "out")


def test_one_tensor_at_a_time(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of the source is written before the next is read, though all is one file."""
    events: list[str] = []
    opened = open_source(source)

    def counted(name: str) -> Tensor | MXFP4Tensor:
        events.append(f"read {name}")
        return opened.weights(name)

    monkeypatch.setattr(checkpoints, "open_source", lambda name: replace(opened, weights=counted))
    sizes = []

    def report(now: Progress) -> None:
        events.append(f"wrote {now.name}")
        sizes.append(now.done)
        partial = (tmp_path / "out" / "model.safetensors.partial").stat().st_size
        assert partial >= now.done - 2 * 8192  # the file object's own buffer

    written = quantize_checkpoint(source, tmp_path / "out", report=report)
    names = [event.removeprefix("read ") for event in events[0::2]]
    assert events[1::2] == [f"wrote {name}" for name in names]
    assert sorted(names) == sorted(model_tensors(SHAPE))
    assert sizes == sorted(sizes) and sizes[-1] == written.nbytes


def test_a_quantised_source_keeps_its_codes(source: str, tmp_path: Path) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    quantize_checkpoint(source, first, "quark", "ocp", quantize_head=True)
    written = quantize_checkpoint(str(first), second, "compressed-tensors", "mse")
    assert written.mean_relative_error is None
    tensors, before = stored(second), stored(first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors[f"{name}_packed"], before[name])
    assert torch.equal(tensors[f"{name}_scale"], before[f"{name}_scale"])
    head = MXFP4Tensor(before["lm_head.weight"], before["lm_head.weight_scale"])
    assert torch.equal(tensors["lm_head.weight"], head.dequantize())
    assert json.loads((second / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    quantize_checkpoint(str(first), third, "quark", quantize_head=True)
    assert stored(third).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(third).items())


# GGUF


def write_gguf(file: Path, config: ModelConfig) -> Path:
    writer = gguf.GGUFWriter(file, config.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope.kind))
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position_embeddings)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    names = {tensor: name for name, tensor in GGUF_NAMES.items()}
    for name, tensor in model_tensors(config).items():
        prefix, _, rest = name.partition(".layers.")
        stem = f"blk.{rest.partition('.')[0]}.{names[rest.partition('.')[2]]}" if rest else names[prefix]
        writer.add_tensor(f"{stem}.weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


GGUF_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
}


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        ("llama", RopeConfig(theta=5000.0, original_max_position_embeddings=48)),
        ("qwen3", RopeConfig(theta=5000.0, kind="linear", factor=2.0, original_max_position_embeddings=48)),
        ("qwen3", RopeConfig(theta=5000.0, kind="yarn", factor=2.0, original_max_position_embeddings=24)),
    ],
)
def test_a_gguf_file(tmp_path: Path, architecture: str, rope: RopeConfig) -> None:
    file = write_gguf(
        tmp_path / "model.gguf", replace(SHAPE, architecture=architecture, rope=rope, qk_norm=architecture == "qwen3")
    )
    out = tmp_path / "out"
    quantize_checkpoint(str(file), out)
    opened = GGUFFile(file)
    config = opened.config()
    assert config.rope == rope
    assert read_config(out) == config
    theirs = AutoConfig.from_pretrained(out)
    assert theirs.architectures == ["LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"]
    assert (theirs.rope_parameters["rope_theta"], theirs.rope_parameters["rope_type"]) == (5000.0, rope.kind)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.head_dim) == (0, [1, 2], 16)
    read, original = folder_weights(out, torch.bfloat16), opened.weights(config, torch.bfloat16)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        found, before = read(f"model.layers.1.{name}.weight"), original(f"model.layers.1.{name}.weight")
        assert isinstance(found, MXFP4Tensor) and isinstance(before, Tensor)
        assert torch.equal(found.codes, quantize(before).codes)
    assert torch.equal(read("lm_head.weight"), original("lm_head.weight"))  # type: ignore[arg-type]


def same_tokenizer(folder: Path, ours: Tokenizer, texts: list[str], words: list[str]) -> None:
    """That ``folder`` gives the ids that ``ours`` gives, here and in transformers."""
    again, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in texts:
        ids = ours.encode(text)
        assert again.encode(text) == theirs(text).input_ids == ids
        assert again.decode(ids) == ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": word} for word in words]
    chat = ours.encode_chat(messages, add_generation_prompt=True)
    assert again.encode_chat(messages, add_generation_prompt=True) == chat
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == chat
    assert (again.bos_token_id, again.eos_token_ids) == (ours.bos_token_id, ours.eos_token_ids)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_ids[0])


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", SHAPE)
    quantize_checkpoint(str(file), tmp_path / "out")
    ours = Tokenizer.from_gguf(GGUFFile(file).metadata)
    same_tokenizer(tmp_path / "out", ours, ["abc dd!", "<bos>cab.<eos>", "é €"], ["abc", "d.d"])


def test_the_tokenizer_of_the_embedded_model(tmp_path: Path) -> None:
    source = open_source("smollm2-135m")
    for name, content in source.files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(source.raw))
    ours = Tokenizer.from_gguf(GGUFFile(resolve("smollm2-135m")).metadata)
    texts = ["Hello, world 12345\n\n  x", "def f(x):\n\treturn x  # 日本語 🎉", "<|im_start|>user\nHi<|im_end|>\n", ""]
    same_tokenizer(tmp_path, ours, texts, ["What is 2+2?", "Four."])


# Errors of writing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "gptq"}, "the layout is 'gptq', expected one of quark, compressed-tensors"),
        ({"rule": "best"}, "the scale rule is 'best', expected one of mse, ocp"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
    ],
)
def test_wrong_arguments(source: str, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        quantize_checkpoint(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [{"rule": "ocp"}, {"layout": "compressed-tensors"}, {"quantize_head": True}, {"max_shard_bytes": 9000}]
)
def test_other_arguments_in_a_used_folder(source: str, tmp_path: Path, arguments: dict[str, Any]) -> None:
    quantize_checkpoint(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="choose an empty folder"):
        quantize_checkpoint(source, tmp_path / "out", **arguments)
    assert contents(tmp_path / "out") == before


def test_another_source_in_a_used_folder(source: str, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out")
    other = write_source(tmp_path / "other", model_tensors(SHAPE, seed=1))
    with pytest.raises(UserError, match=r"model\.safetensors comes from another source"):
        quantize_checkpoint(other, tmp_path / "out")
    with pytest.raises(UserError, match=r"comes from another source|holds"):
        quantize_checkpoint(source, Path(source))


def test_a_folder_with_other_files(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds thesis\.tex, which is not of this checkpoint"):
        quantize_checkpoint(source, out)
    (out / "thesis.tex").unlink()
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json comes from another source"):
        quantize_checkpoint(source, out)


def test_a_file_in_the_way(source: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    for path in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(UserError, match="a file is in the way"):
            quantize_checkpoint(source, path)


def test_columns_without_blocks(tmp_path: Path) -> None:
    config = replace(SHAPE, intermediate_size=40)
    source = write_source(tmp_path / "source", model_tensors(config), intermediate_size=40)
    with pytest.raises(UserError, match=r"mlp\.down_proj\.weight has 40 columns; MXFP4 needs a multiple of 32"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_none(tmp_path: Path) -> None:
    tensors = model_tensors(SHAPE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: .* NaN"):
        quantize_checkpoint(source, tmp_path / "out")


def test_weights_of_another_shape(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", vocab_size=33)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight has shape \(32, 64\), .* implies \(33, 64\)"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_source_without_a_tokenizer(source: str, tmp_path: Path) -> None:
    (tmp_path / "source" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        quantize_checkpoint(source, tmp_path / "out")


def test_no_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model 'no-such-model'"):
        quantize_checkpoint("no-such-model", tmp_path / "out")


# Errors of reading

GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({}, "quant_method None"),
        ("fp8", "quant_method 'fp8'"),
        ({"quant_method": "quark"}, "global_quant_config.weight None"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups None"),
    ],
)
def test_other_kinds_of_quantization(source: str, field: Any, found: str) -> None:
    config = {**RAW, "quantization_config": field}
    (Path(source) / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        folder_weights(Path(source), torch.bfloat16)
    assert f"{Path(source) / 'config.json'}: quantization_config has {found}" in str(error.value)
    assert "must be MXFP4" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "int4"), ("dtype", "fp8_e4m3"), ("group_size", 16), ("scale_format", "float32"), ("scale_format", None)],
)
def test_other_weights_of_quark(source: str, tmp_path: Path, key: str, value: Any) -> None:
    quantize_checkpoint(source, tmp_path / "out", "quark")
    edit_config(tmp_path / "out", lambda field: field["global_quant_config"]["weight"].update({key: value}))
    with pytest.raises(UserError, match=f"global_quant_config.weight with {key} {value!r}"):
        folder_weights(tmp_path / "out", torch.bfloat16)


def test_quarks_list_of_one(source: str, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", "quark")
    edit_config(
        tmp_path / "out",
        lambda field: field["global_quant_config"].update(weight=[field["global_quant_config"]["weight"]]),
    )
    assert isinstance(folder_weights(tmp_path / "out", torch.bfloat16)(GATE), MXFP4Tensor)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda group: group["weights"].update(num_bits=8), "num_bits 8 in config_groups.group_0.weights"),
        (lambda group: group["weights"].update(type="int"), "type 'int' in config_groups.group_0.weights"),
        (lambda group: group["weights"].update(group_size=16), "group_size 16 in config_groups.group_0.weights"),
        (lambda group: group.update(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' in"),
        (lambda group: group.update(weights=None), "num_bits None in config_groups.group_0.weights"),
    ],
)
def test_other_weights_of_compressed_tensors(
    source: str, tmp_path: Path, change: Callable[[dict[str, Any]], object], found: str
) -> None:
    quantize_checkpoint(source, tmp_path / "out", "compressed-tensors")
    edit_config(tmp_path / "out", lambda field: change(field["config_groups"]["group_0"]))
    with pytest.raises(UserError, match=found):
        folder_weights(tmp_path / "out", torch.bfloat16)


def test_the_format_may_stand_beside_the_groups(source: str, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", "compressed-tensors")
    edit_config(tmp_path / "out", lambda field: field["config_groups"]["group_0"].pop("format"))
    assert isinstance(folder_weights(tmp_path / "out", torch.bfloat16)(GATE), MXFP4Tensor)


def spoiled(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> str:
    """The error of reading a matrix after a change of the stored tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        folder_weights(folder, torch.bfloat16)(GATE)
    assert str(folder) in str(error.value) and GATE in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_tensors_that_do_not_fit(source: str, tmp_path: Path, layout: Layout) -> None:
    codes, scales = GATE + ("" if layout == "quark" else "_packed"), f"{GATE}_scale"

    def folder(name: str) -> Path:
        quantize_checkpoint(source, tmp_path / name, layout)
        return tmp_path / name

    without = spoiled(folder("a"), lambda tensors: tensors.pop(scales))
    assert scales in without and ("lacks the tensor" in without or "there is no tensor" in without)
    assert f"lacks the tensor {codes}" in spoiled(folder("b"), lambda tensors: tensors.pop(codes))
    message = spoiled(folder("c"), lambda tensors: tensors.update({scales: tensors[scales][:, :1].contiguous()}))
    assert "codes (96, 32) and scales (96, 1) do not fit together" in message
    message = spoiled(folder("d"), lambda tensors: tensors.update({scales: tensors[scales].float()}))
    assert "MXFP4 scales must be a uint8 matrix, not torch.float32" in message
    message = spoiled(folder("e"), lambda tensors: tensors.update({codes: tensors[codes].to(torch.float8_e4m3fn)}))
    assert "MXFP4 codes must be a uint8 matrix, not torch.float8_e4m3fn" in message


def test_codes_that_the_configuration_does_not_announce(source: str, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(UserError, match=r"gate_proj\.weight is stored as uint8 codes"):
        folder_weights(tmp_path / "out", torch.bfloat16)(GATE)
