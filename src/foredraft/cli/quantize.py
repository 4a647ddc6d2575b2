"""foredraft quantize: a model's weights in MXFP4, as a folder that foredraft and vLLM load."""

import json
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.cli import options
from foredraft.quantization import checkpoints
from foredraft.quantization.checkpoints import QuantizedCheckpoint, quantize_checkpoint
from foredraft.quantization.layouts import Layout
from foredraft.quantization.mxfp4 import Rule


def quantize(
    model: options.Model,
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    layout: Annotated[str, typer.Option(help="How the tensors are stored: quark or compressed-tensors.")] = "quark",
    rule: Annotated[
        str, typer.Option(help="Scale of a block: mse (least squared error) or ocp (the specification's).")
    ] = "mse",
    quantize_head: Annotated[
        bool,
        typer.Option("--quantize-head", help="The head too, which vLLM loads in the compressed-tensors layout only."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model with its layers' matrices in MXFP4 (4.25 bits a weight) and the rest in bfloat16.

    It can be stopped at any time; run again with the same options it goes on after the last complete file.

    Examples:

      foredraft quantize smollm2-135m --output smollm2-mxfp4

      foredraft quantize Qwen/Qwen3-1.7B --output qwen3-1.7b-mxfp4 --layout compressed-tensors
    """
    messages = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    try:
        with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
            task = progress.add_task("reading", total=None)

            def report(now: checkpoints.Progress) -> None:
                progress.update(task, description=escape(now.name), completed=now.done, total=now.total)

            written = quantize_checkpoint(
                model,
                output,
                layout=cast(Layout, layout),
                rule=cast(Rule, rule),
                quantize_head=quantize_head,
                report=report,
            )
    except OSError as error:
        messages.print(f"[bold red]Error:[/] {escape(str(error))}; run again to go on after the last complete file")
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(_record(written, layout, rule), ensure_ascii=False))
        return
    for line in _lines(written):
        messages.print(escape(line))


def _record(written: QuantizedCheckpoint, layout: str, rule: str) -> dict[str, object]:
    return {
        "output": str(written.folder),
        "layout": layout,
        "rule": rule,
        "shards": written.shards,
        "kept_shards": written.kept_shards,
        "bytes": written.nbytes,
        "bfloat16_bytes": written.bfloat16_nbytes,
        "quantized_matrices": len(written.relative_errors),
        "mean_relative_error": written.mean_relative_error,
    }


def _lines(written: QuantizedCheckpoint) -> list[str]:
    share = written.nbytes / written.bfloat16_nbytes
    files = "1 file" if written.shards == 1 else f"{written.shards} files"
    lines = [f"{written.folder}: {written.nbytes / 1e6:.1f} MB in {files}, {share:.0%} of its size in bfloat16"]
    if written.kept_shards:
        lines.append(f"{written.kept_shards} of them kept from an earlier run")
    if written.mean_relative_error is not None:
        count = len(written.relative_errors)
        lines.append(f"mean relative error of the {count} matrices quantised now: {written.mean_relative_error:.2%}")
    return lines
