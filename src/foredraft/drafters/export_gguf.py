"""Drafters for llama.cpp: GGUF files of its architectures ``eagle3`` and ``dflash`` (DSpark is the latter with a Markov
head), as its convert_hf_to_gguf.py writes them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from torch import Tensor

from foredraft.drafters.export import Portable
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig
from foredraft.models.gguf import LAYER_NAMES

RoundedTensor = tuple[str, NDArray[Any], GGMLQuantizationType]

NAMES = {
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def write_gguf(drafter: Portable, target: Path, path: Path) -> None:
    """Write ``drafter`` with the tokenizer of its target's GGUF file.

    llama.cpp names a tap by the layer whose input it is, so ours plus one, and takes exactly three for EAGLE-3. d2t
    holds target ids there, not offsets.
    """
    _check(drafter)
    arch = "eagle3" if drafter.method == "eagle3" else "dflash"
    shape, own = drafter.shape, drafter.own
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, arch)
    copy_metadata(GGUFReader(target), writer, "tokenizer.")
    add_shape(writer, shape)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_array(f"{arch}.target_layers", [index + 1 for index in drafter.taps])
    if drafter.method == "eagle3":
        writer.add_uint32("eagle3.target_hidden_size", shape.hidden_size)
        writer.add_bool("eagle3.norm_before_residual", own["norm_before_residual"])
    else:
        writer.add_mask_token_id(own["mask_token_id"])
        writer.add_uint32("dflash.block_size", own["block_size"])
    if drafter.method == "dspark":
        writer.add_bool("dflash.sample_from_anchor", True)
        writer.add_bool("dflash.has_confidence_head", _has_confidence(drafter))
    write_tensors(writer, _tensors(drafter))


def _check(drafter: Portable) -> None:
    if drafter.shape.rope.kind != "default":
        raise UserError(f"a drafter with {drafter.shape.rope.kind} RoPE scaling cannot be written as GGUF yet")
    if drafter.windows.get("use_sliding_window"):
        raise UserError("a drafter with sliding-window layers cannot be written as GGUF yet")
    if drafter.method == "eagle3" and len(drafter.taps) != 3:
        raise UserError(f"llama.cpp runs EAGLE-3 drafters with 3 taps, this one has {len(drafter.taps)}")
    if drafter.method == "eagle3" and drafter.shape.qk_norm:
        raise UserError("llama.cpp runs EAGLE-3 drafters without norms of queries and keys, this one has them")


def _has_confidence(drafter: Portable) -> bool:
    """llama.cpp knows only the confidence head that reads the Markov embedding too."""
    return bool(drafter.own["confidence_head_with_markov"])


def _tensors(drafter: Portable) -> Iterable[RoundedTensor]:
    for name, tensor in drafter.tensors.items():
        if name.startswith("confidence_head.") and not _has_confidence(drafter):
            continue
        if drafter.method == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _pairs_adjacent(tensor, drafter.shape.head_dim)
        yield bfloat16(_name(name), tensor)
    if drafter.head is not None:
        yield bfloat16("output.weight", drafter.head)
    if drafter.vocab is not None:
        yield "d2t", drafter.vocab.numpy(), GGMLQuantizationType.I64


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    if not name.startswith("layers."):
        return name
    _, index, own = name.split(".", 2)
    return f"blk.{index}.{LAYER_NAMES[own]}"


def _pairs_adjacent(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head reordered from halves to adjacent pairs: how llama.cpp rotates the ``eagle3`` architecture."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, 2, head_dim // 2, columns).transpose(1, 2).reshape(rows, columns)


def copy_metadata(reader: GGUFReader, writer: GGUFWriter, prefix: str) -> None:
    """Copy the fields whose names begin with ``prefix``, those that describe the file itself left out."""
    left_out = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(prefix) or name.startswith("GGUF.") or name in left_out:
            continue
        kind, *inner = field.types
        element = inner[0] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)


def add_shape(writer: GGUFWriter, shape: ModelConfig) -> None:
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_block_count(shape.num_layers)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope.theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)


def bfloat16(name: str, values: Tensor) -> RoundedTensor:
    """Vectors stay in float32, as llama.cpp wants them."""
    if values.ndim == 1:
        return name, values.float().numpy(), GGMLQuantizationType.F32
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
    return name, bits, GGMLQuantizationType.BF16


def write_tensors(writer: GGUFWriter, tensors: Iterable[RoundedTensor]) -> None:
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
