"""The same weights in every engine's own format, in a cache folder."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafters.export import load_portable
from foredraft.drafters.export_gguf import RoundedTensor, add_shape, bfloat16, copy_metadata, write_gguf, write_tensors
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.gguf import GGUFFile
from foredraft.models.layers import Weights, dense
from foredraft.models.loading import embedded_file, folder_weights
from foredraft.tokenizer import Tokenizer

QUANTIZED = {"Q8_0": ("Q8_0",), "Q4_0": ("Q4_0",), "Q4_0 pure": ("--pure", "Q4_0")}
"""What llama-quantize is asked for. By default it keeps a tied embedding, which is the head too, in 8 bits."""

LARGE = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope=RopeConfig(theta=1e6),
    tie_word_embeddings=True,
    qk_norm=True,
)
"""The shape of Qwen3-1.7B."""


@dataclass(frozen=True)
class Weights135M:
    """The embedded model: GGUF files by type, the Hugging Face folder, and the drafter for llama.cpp by type."""

    ggufs: dict[str, Path]
    folder: Path
    drafters: dict[str, Path]


def prepare(work: Path, llama: Path | None, drafter: Path) -> Weights135M:
    """Write what is not in ``work`` yet. Without llama.cpp there is nothing to quantise with."""
    ggufs = {"BF16": work / "bf16.gguf", "Q4_1": embedded_file()}
    drafters = {"BF16": work / "drafter-bf16.gguf"}
    folder = work / "smollm2-135m"
    if not ggufs["BF16"].exists():
        _once(ggufs["BF16"], lambda path: write_rounded(embedded_file(), path))
    if not folder.exists():
        _once(folder, lambda path: write_folder(embedded_file(), path))
    if llama is None:
        return Weights135M(ggufs, folder, {})
    if not drafters["BF16"].exists():
        _once(drafters["BF16"], lambda path: write_drafter(drafter, embedded_file(), path))
    for name, arguments in QUANTIZED.items():
        ggufs[name] = _quantized(llama, ggufs["BF16"], arguments)
    drafters["Q8_0"] = _quantized(llama, drafters["BF16"], ("Q8_0",))
    return Weights135M(ggufs, folder, drafters)


def tensor_bytes(path: Path) -> int:
    """Bytes of a GGUF file's tensors; with a tied head every one of them is read for each token."""
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def write_rounded(source: Path, path: Path) -> None:
    """A GGUF file with every matrix of ``source`` dequantised and rounded to bfloat16."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, "llama")
    copy_metadata(reader, writer, "")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    write_tensors(
        writer, (_rounded(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
    )


def write_drafter(folder: Path, target: Path, path: Path) -> None:
    """A DFlash drafter as llama.cpp reads it."""
    file = GGUFFile(target)
    model = DecoderModel(file.config(), file.weights(file.config(), torch.bfloat16))
    write_gguf(load_portable("dflash", folder, model), target, path)


def write_folder(source: Path, folder: Path) -> None:
    """A GGUF model as a Hugging Face folder in bfloat16."""
    file = GGUFFile(source)
    config = file.config()
    folder.mkdir(parents=True)
    read = _reader(file.weights(config, torch.bfloat16), torch.bfloat16)
    save_file({name: read(name).contiguous() for name in _tensor_shapes(config)}, folder / "model.safetensors")
    _write_config(folder, config, "LlamaForCausalLM")
    write_tokenizer(file, folder)


def write_large(work: Path) -> Path:
    """A folder with random weights of the shape LARGE, about 3.4 GB, one file a layer."""
    folder = work / "qwen3-1.7b-random"
    if not folder.exists():
        _once(folder, _write_random)
    return folder


def write_large_gguf(folder: Path, path: Path) -> None:
    """The random model for llama.cpp in bfloat16."""
    read = _reader(folder_weights(folder, torch.bfloat16), torch.bfloat16)
    writer = GGUFWriter(path, "qwen3")
    copy_metadata(GGUFReader(embedded_file()), writer, "tokenizer.")
    missing = LARGE.vocab_size - len(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
    writer.kv_data[0]["tokenizer.ggml.tokens"].value.extend(f"<unused{index}>" for index in range(missing))
    writer.kv_data[0]["tokenizer.ggml.token_type"].value.extend([gguf.TokenType.UNUSED] * missing)
    add_shape(writer, LARGE)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    names = _layer_names(LARGE)
    write_tensors(writer, (bfloat16(names[name], read(name)) for name in names))


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """tokenizer.json and what transformers wants beside it."""
    tokenizer = Tokenizer.from_gguf(file.metadata)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    eos = tokens[file.metadata["tokenizer.ggml.eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[file.metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _reader(weights: Weights, dtype: torch.dtype) -> Callable[[str], Tensor]:
    return lambda name: dense(weights(name), dtype)


def _once(path: Path, write: Callable[[Path], None]) -> None:
    """Write to a neighbour first, so that what bears the name is whole."""
    partial = path.with_name(f"partial-{path.name}")
    if partial.is_dir():
        for file in partial.iterdir():
            file.unlink()
        partial.rmdir()
    write(partial)
    partial.rename(path)


def _quantized(llama: Path, source: Path, arguments: tuple[str, ...]) -> Path:
    path = source.with_name(f"{source.stem}-{'-'.join(a.strip('-').lower() for a in arguments)}.gguf")
    if not path.exists():
        *flags, kind = arguments
        with (source.parent / "quantize.log").open("a") as log:
            command: list[str | Path] = [llama / "llama-quantize", *flags, source, path, kind, "2"]
            subprocess.run(command, stdout=log, stderr=log, check=True)
    return path


# GGUF


def _rounded(name: str, values: NDArray[Any]) -> RoundedTensor:
    """Norms stay in float32, as llama.cpp wants them."""
    if values.ndim == 1:
        return name, values.astype(np.float32), GGMLQuantizationType.F32
    return bfloat16(name, torch.from_numpy(np.array(values)))


def _layer_names(shape: ModelConfig) -> dict[str, str]:
    """Hugging Face name to GGUF name of every tensor of a model of the Qwen3 kind."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, shape.num_layers)
    return {name: str(known.get_name(name, (".weight",))) for name in _tensor_shapes(shape)}


# Hugging Face folders


def _tensor_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if shape.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(shape.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return shapes


def _write_config(folder: Path, shape: ModelConfig, architecture: str) -> None:
    config = {
        "architectures": [architecture],
        "model_type": shape.architecture,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_random(folder: Path) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    listed: dict[str, str] = {}
    for number, group in enumerate(_groups(_tensor_shapes(LARGE))):
        file = f"model-{number:05}.safetensors"
        save_file({name: _random(size, generator) for name, size in group.items()}, folder / file)
        listed |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    _write_config(folder, LARGE, "Qwen3ForCausalLM")
    write_tokenizer(GGUFFile(embedded_file()), folder)


def _groups(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """One layer at a time, the rest together."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in shapes.items():
        _, kind, *rest = name.split(".")
        groups.setdefault(rest[0] if kind == "layers" else "", {})[name] = size
    yield from groups.values()


def _random(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, size[1] ** -0.5, generator=generator)
