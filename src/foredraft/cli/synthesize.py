"""foredraft synthesize: training text written by the target itself."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.cli import options
from foredraft.errors import UserError
from foredraft.llm import LLM
from foredraft.training import synthesis


def synthesize(
    model: options.Model,
    output: Annotated[Path, typer.Option(help="JSON lines to write; what it holds is not done again.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `turns`, `prompt`, or `messages` and `followups`.")
    ] = None,
    self_written: Annotated[int, typer.Option(help="Prompts that the model makes up itself.")] = 0,
    temperature: Annotated[str, typer.Option(help="One or several, taken in turn.")] = "0,0.8",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 384,
    max_num_seqs: Annotated[int, typer.Option(help="Answers written at once.")] = 32,
    seed: Annotated[int, typer.Option(help="For sampled answers and self-written prompts.")] = 0,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    kernels: options.KernelsOption = "auto",
) -> None:
    """Let the target answer prompts, as training text for its drafter.

    It can be stopped and started again at any time.

    Examples:

      foredraft synthesize smollm2-135m --prompts prompts.jsonl --output answers.jsonl

      foredraft synthesize smollm2-135m --self-written 500 --output own.jsonl --temperature 0.8
    """
    if (prompts is None) == (self_written == 0):
        raise UserError("give either --prompts FILE or --self-written COUNT")
    temperatures = _temperatures(temperature)
    listed = synthesis.read_prompts(prompts) if prompts is not None else None
    llm = LLM(model, dtype=dtype, device=device, kernels=options.kernels(kernels), max_num_seqs=max_num_seqs)
    console = Console(stderr=True)
    if listed is None:
        console.print(f"writing {self_written} prompts")
        listed = synthesis.self_written(llm, self_written, seed)
    turns = sum(len(conversation.turns) for conversation in listed)
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("answers", total=turns, tokens=0)
        tokens = 0

        def report(count: int) -> None:
            nonlocal tokens
            tokens += count
            progress.update(task, advance=1, tokens=tokens)

        written = synthesis.synthesize(llm, listed, output, temperatures, max_tokens, seed, report)
    console.print(f"{written} answers added to {output}")


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--temperature is {text!r}, expected numbers such as 0,0.8") from error
    if any(value < 0 for value in values):
        raise UserError(f"--temperature is {text!r}, expected numbers of at least 0")
    return values
