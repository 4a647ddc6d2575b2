"""foredraft export: a drafter for another engine."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from foredraft.cli import options
from foredraft.config import SpeculativeConfig
from foredraft.drafters import check_folder, check_method
from foredraft.drafters.export import LAYOUTS, drafter_folder, load_portable, write_portable
from foredraft.drafters.export_gguf import write_gguf
from foredraft.drafters.storage import compact
from foredraft.errors import UserError
from foredraft.models.loading import load_target, resolve

COMPACT = "compact"
FORMATS = "; ".join(f"{method}: {', '.join(layouts)}" for method, layouts in LAYOUTS.items())


def export(
    model: options.Model,
    output: Annotated[Path, typer.Option(help="Folder to write, or the file for gguf.")],
    method: Annotated[str, typer.Option(help=f"Drafting method: {', '.join(LAYOUTS)}; any with --format compact.")],
    drafter: options.Drafter = None,
    layout: Annotated[
        str | None,
        typer.Option("--format", help=f"{FORMATS}; compact. \\[default: the method's first]", show_default=False),
    ] = None,
) -> None:
    """Write a drafter in a layout that another engine loads: vLLM, or with --format gguf llama.cpp.

    --format compact is foredraft's own: half the size, and on a CPU the same drafts.

    Examples:

      foredraft export smollm2-135m --method dflash --output dflash-for-vllm

      foredraft export smollm2-135m --method eagle3 --drafter runs/eagle3 --format gguf --output eagle3.gguf
    """
    messages = Console(stderr=True, soft_wrap=True, highlight=False)
    if layout == COMPACT:
        check_method(SpeculativeConfig(method))
        folder = drafter_folder(model, method, drafter)
        check_folder(folder, method)
        _check_output(output, folder, layout)
        compact(folder, output)
        messages.print(escape(_written(output, output / "model.safetensors", layout)))
        return
    if method not in LAYOUTS:
        raise UserError(f"--method is {method!r}; drafters of {', '.join(LAYOUTS)} can be exported")
    chosen = layout or LAYOUTS[method][0]
    if chosen not in LAYOUTS[method]:
        raise UserError(f"--format is {chosen!r}; a {method} drafter has {', '.join(LAYOUTS[method])}")
    source = resolve(model)
    if chosen == "gguf" and not source.is_file():
        raise UserError(f"--format gguf copies the tokenizer of the target's GGUF file, but {model} is a folder")
    folder = drafter_folder(model, method, drafter)
    _check_output(output, folder, chosen)
    target = load_target(model, torch.bfloat16, kernels="pytorch").model
    portable = load_portable(method, folder, target)
    if chosen == "gguf":
        write_gguf(portable, source, output)
        command = f"llama-server -m TARGET.gguf --spec-type draft-{method} -md {output}"
        written = output
    else:
        write_portable(portable, chosen, output, model)
        speculative = {"method": method, "model": str(output), "num_speculative_tokens": portable.default_tokens}
        command = f"vllm serve TARGET --speculative-config '{json.dumps(speculative)}'"
        written = output / "model.safetensors"
    messages.print(escape(_written(output, written, chosen)))
    messages.print(escape(command))


def _check_output(output: Path, folder: Path, layout: str) -> None:
    if layout == "gguf":
        if output.is_dir():
            raise UserError(f"--output {output} is a folder; give a file name such as {output / 'drafter.gguf'}")
        options.check_folder(output.parent)
        return
    if output.exists() and output.samefile(folder):
        raise UserError(f"--output {output} is the drafter's own folder; name another")
    options.check_folder(output)


def _written(output: Path, weights: Path, layout: str) -> str:
    return f"{output}: {weights.stat().st_size / 1e6:.1f} MB, {layout} layout"
