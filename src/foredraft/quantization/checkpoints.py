"""Writing a model as an MXFP4 checkpoint in the Hugging Face layout, with the memory of one tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from foredraft import __version__
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig
from foredraft.models.layers import Weights
from foredraft.ops import native
from foredraft.quantization.layouts import CODES_SUFFIX, SCALES_SUFFIX, Layout, config_field
from foredraft.quantization.mxfp4 import BLOCK, MXFP4Tensor, Rule, quantize, relative_error
from foredraft.quantization.shards import PARTIAL, Entry, Shard, write_file
from foredraft.quantization.source import Source, json_bytes, open_source

MAX_SHARD_BYTES = 1 << 30
"""Default size of a file. What is finished of an interrupted run is kept in whole files."""

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Progress:
    """Bytes of tensors in the output so far, and the last one's name."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """What was written.

    nbytes: of all tensors. bfloat16_nbytes: of the model unquantised.
    kept_shards: how many of ``shards`` an earlier run had finished.
    relative_errors: `relative_error` of each matrix that this run quantised.
    """

    folder: Path
    shards: int
    kept_shards: int
    nbytes: int
    bfloat16_nbytes: int
    relative_errors: Mapping[str, float]

    @property
    def mean_relative_error(self) -> float | None:
        errors = self.relative_errors.values()
        return sum(errors) / len(errors) if errors else None


def quantize_checkpoint(
    source: str,
    output: Path,
    layout: Layout = "quark",
    rule: Rule = "mse",
    quantize_head: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    report: Callable[[Progress], None] | None = None,
) -> QuantizedCheckpoint:
    """Write the model that ``source`` stands for into the folder ``output``, its layers' matrices in MXFP4.

    Everything else is bfloat16; so is what a matrix is rounded from, so that the result equals quantising the model as
    it is loaded. quantize_head: the head too, which unties it from the embeddings where the two are one. Matrices
    that are MXFP4 already keep their codes. The files are copied or made that transformers and vLLM need beside.

    A run that was stopped goes on when called again with the same arguments: files that are complete are kept, and
    the result does not differ from that of one uninterrupted run. config.json is written last.
    Raises UserError for a source that cannot be used, and for an ``output`` that holds anything else.
    """
    _check_arguments(layout, rule, max_shard_bytes)
    model = open_source(source)
    weights = _weights(model.config, quantize_head)
    origin = {"foredraft": __version__, "rule": rule, "source": model.identity}
    shards = _shards([_entries(weight, layout) for weight in weights], max_shard_bytes, origin)
    files = _files(model, shards, layout, quantize_head)
    finished = _finished(output, shards, files)

    by_codes = {weight.name + (CODES_SUFFIX[layout] if weight.quantized else ""): weight for weight in weights}
    total = sum(shard.nbytes for shard in shards)
    done = sum(shard.nbytes for shard in shards if shard.name in finished)
    errors: dict[str, float] = {}

    def tensors(shard: Shard) -> Iterator[Tensor]:
        nonlocal done
        for entry in shard.entries:
            weight = by_codes.get(entry.name)
            if weight is None:  # scales, which come with their codes
                continue
            for tensor in _converted(weight, model.weights, rule, errors):
                yield tensor
                done += tensor.nbytes
            if report is not None:
                report(Progress(weight.name, done, total))

    for shard in shards:
        if shard.name not in finished:
            shard.write(output / shard.name, tensors(shard))
    for name, content in files.items():
        if name not in finished:
            write_file(output / name, [content])
    return QuantizedCheckpoint(
        folder=output,
        shards=len(shards),
        kept_shards=sum(shard.name in finished for shard in shards),
        nbytes=total,
        bfloat16_nbytes=sum(
            Entry(weight.name, torch.bfloat16, weight.shape).nbytes
            for weight in weights
            if weight.source == weight.name
        ),
        relative_errors=errors,
    )


def _check_arguments(layout: str, rule: str, max_shard_bytes: int) -> None:
    for name, value, known in (("layout", layout, get_args(Layout)), ("scale rule", rule, get_args(Rule))):
        if value not in known:
            raise UserError(f"the {name} is {value!r}, expected one of {', '.join(known)}")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes is {max_shard_bytes}, expected at least 1")


@dataclass(frozen=True)
class _Weight:
    """One tensor of the unquantised model, and the one of the source that it is (the head may be the embeddings)."""

    name: str
    shape: tuple[int, ...]
    quantized: bool
    source: str


def _weights(config: ModelConfig, quantize_head: bool) -> list[_Weight]:
    """All tensors, in the order in which a forward pass needs them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    vectors = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    matrices = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config.qk_norm:
        vectors |= {"self_attn.q_norm.weight": config.head_dim, "self_attn.k_norm.weight": config.head_dim}
    for name, (rows, _) in matrices.items():
        if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
            vectors[f"{name}.bias"] = rows

    def weight(name: str, *shape: int, quantized: bool = False, source: str | None = None) -> _Weight:
        if quantized and shape[1] % BLOCK:
            raise UserError(f"{name} has {shape[1]} columns; MXFP4 needs a multiple of {BLOCK}")
        return _Weight(name, shape, quantized, source or name)

    weights = [weight(_EMBEDDINGS, config.vocab_size, hidden)]
    for prefix in (f"model.layers.{index}." for index in range(config.num_layers)):
        weights += [weight(prefix + name, size) for name, size in vectors.items()]
        weights += [weight(f"{prefix}{name}.weight", *shape, quantized=True) for name, shape in matrices.items()]
    weights.append(weight("model.norm.weight", hidden))
    tied = config.tie_word_embeddings
    if quantize_head or not tied:
        source = _EMBEDDINGS if tied else None
        weights.append(weight(_HEAD, config.vocab_size, hidden, quantized=quantize_head, source=source))
    return weights


def _entries(weight: _Weight, layout: Layout) -> list[Entry]:
    if not weight.quantized:
        return [Entry(weight.name, torch.bfloat16, weight.shape)]
    rows, columns = weight.shape
    return [
        Entry(weight.name + CODES_SUFFIX[layout], torch.uint8, (rows, columns // 2)),
        Entry(weight.name + SCALES_SUFFIX, torch.uint8, (rows, columns // BLOCK)),
    ]


def _shards(groups: Sequence[list[Entry]], max_bytes: int, metadata: Mapping[str, str]) -> list[Shard]:
    """Files of at most ``max_bytes`` each, or of one weight that alone is larger; a weight's entries stay together."""
    filled: list[list[list[Entry]]] = []
    free = 0
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if size > free or not filled:
            filled.append([])
            free = max_bytes
        filled[-1].append(group)
        free -= size
    shards = []
    for number, part in enumerate(filled, start=1):
        # safetensors allows no gaps: the wider type comes first so that every tensor is aligned.
        part.sort(key=lambda group: -group[0].dtype.itemsize)
        name = "model.safetensors" if len(filled) == 1 else f"model-{number:05}-of-{len(filled):05}.safetensors"
        shards.append(Shard(name, [entry for group in part for entry in group], metadata))
    return shards


def _files(model: Source, shards: Sequence[Shard], layout: Layout, quantize_head: bool) -> dict[str, bytes]:
    """All files but the shards, config.json last."""
    files = dict(model.files)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
            "weight_map": {entry.name: shard.name for shard in shards for entry in shard.entries},
        }
        files["model.safetensors.index.json"] = json_bytes(index)
    config: dict[str, Any] = {**model.raw, "quantization_config": config_field(layout, quantize_head)}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
    if quantize_head:
        config["tie_word_embeddings"] = False
    files["config.json"] = json_bytes(config)
    return files


def _finished(output: Path, shards: Sequence[Shard], files: Mapping[str, bytes]) -> set[str]:
    """Names of the files in ``output`` that are as they shall be; creates the folder where there is none."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{output} cannot be the output folder: a file is in the way") from error
    expected = {shard.name: shard for shard in shards}
    finished = set()
    for path in sorted(output.iterdir()):
        name = path.name
        if name.removesuffix(PARTIAL) not in expected.keys() | files.keys() or not path.is_file():
            raise UserError(f"{output} holds {name}, which is not of this checkpoint; choose an empty folder")
        if name.endswith(PARTIAL):
            continue
        if not (expected[name].is_in(path) if name in expected else path.read_bytes() == files[name]):
            raise UserError(
                f"{path} comes from another source, other arguments or another version of foredraft; "
                "choose an empty folder, or remove this one to begin again"
            )
        finished.add(name)
    return finished


def _converted(weight: _Weight, weights: Weights, rule: Rule, errors: dict[str, float]) -> list[Tensor]:
    """The tensors of `_entries` for a weight; adds its error to ``errors`` where it was quantised."""
    tensor: Tensor | MXFP4Tensor = weights(weight.source)
    if tensor.shape != weight.shape:
        raise UserError(
            f"the tensor {weight.source} has shape {tuple(tensor.shape)}, but the model's configuration implies "
            f"{weight.shape}"
        )
    if not weight.quantized:
        return [tensor.dequantize() if isinstance(tensor, MXFP4Tensor) else tensor]
    if isinstance(tensor, MXFP4Tensor):
        return [tensor.codes, tensor.scales]
    try:
        fast = rule == "mse" and native.unavailable() is None
        quantized = native.quantize(tensor) if fast else quantize(tensor, rule)
    except UserError as error:
        raise UserError(f"{weight.name}: {error}") from error
    errors[weight.name] = relative_error(tensor, quantized)
    return [quantized.codes, quantized.scales]
