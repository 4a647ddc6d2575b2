"""Options that several commands share, and how they become a speculative config."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from foredraft.config import SpeculativeConfig
from foredraft.drafters import METHODS
from foredraft.errors import UserError
from foredraft.llm import DTYPES
from foredraft.models.loading import PRECISIONS, Quantization
from foredraft.ops import Kernels

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="smollm2-135m (embedded), a folder, a GGUF file, or a Hub id.",
        show_default=False,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method", help=f"Drafting method: none, {', '.join(METHODS)}. \\[default: none]", show_default=False
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option("--drafter", help="The drafter's folder or Hub id; the embedded model has its own."),
]
NumSpeculativeTokens = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens",
        "-N",
        help="Draft tokens a round, or auto. \\[default: the drafter's]",
        show_default=False,
    ),
]
SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='The same as JSON, as vLLM takes it: \'{"method": "dflash", "num_speculative_tokens": 7}\'.',
    ),
]
QuantizationOption = Annotated[
    str, typer.Option("--quantization", help="Of the target's weights: none, mxfp4 (W4A8) or mxfp4-a16 (W4A16).")
]
KernelsOption = Annotated[
    str,
    typer.Option("--kernels", help="auto, native or pytorch. auto: native for bfloat16 on the CPU."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16, float32 or float64.")]
Device = Annotated[str, typer.Option("--device", help="PyTorch device: cpu, cuda, mps.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Most tokens of prompt and answer. \\[default: the model's limit]",
        show_default=False,
    ),
]

FLAGS = {"model": "--drafter", "num_speculative_tokens": "--num-speculative-tokens"}


def speculation(
    method: str | None,
    drafter: str | None,
    num_speculative_tokens: str | None,
    speculative_config: str | None,
) -> SpeculativeConfig | None:
    """One config from the single options or from JSON; single options override JSON."""
    given: dict[str, Any] = {}
    if speculative_config is not None:
        given = _json_object(speculative_config)
    overrides = {"method": method, "model": drafter, "num_speculative_tokens": _count(num_speculative_tokens)}
    given.update({key: value for key, value in overrides.items() if value is not None})
    if given.get("method", "none") == "none":
        extra = sorted(set(given) - {"method"})
        if extra:
            flags = ", ".join(FLAGS.get(name, name) for name in extra)
            raise UserError(f"{flags} is given, but the method is none; add --method dflash")
        return None
    return SpeculativeConfig.parse(given)


def _count(text: str | None) -> int | str | None:
    """A number as such; all else is for the config to judge."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--speculative-config is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError("--speculative-config must be a JSON object")
    return value


def check_folder(path: Path, flag: str = "--output") -> None:
    """Raise UserError, before any work, where ``path`` cannot be a folder to write to."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{flag} {path}: {existing} is not a writable folder")


def quantization(name: str) -> Quantization:
    if name not in PRECISIONS:
        raise UserError(f"--quantization is {name!r}, expected one of {', '.join(PRECISIONS)}")
    return name


def kernels(name: str) -> Kernels:
    if name not in get_args(Kernels):
        raise UserError(f"--kernels is {name!r}, expected one of {', '.join(get_args(Kernels))}")
    return name  # type: ignore[return-value]


def dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
