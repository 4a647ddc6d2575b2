"""foredraft chat: a conversation in the terminal."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from foredraft.cli import options
from foredraft.cli.generate import summary
from foredraft.errors import UserError
from foredraft.llm import LLM, RequestOutput
from foredraft.models.loading import EMBEDDED
from foredraft.sampling_params import SamplingParams

DRAFTED = "green"


def chat(
    model: options.Model,
    method: Annotated[
        str | None,
        typer.Option(help="Drafting method, or none. \\[default: dflash for the embedded model, else none]"),
    ] = None,
    drafter: options.Drafter = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    speculative_config: options.SpeculativeConfigOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    quantization: options.QuantizationOption = "none",
    kernels: options.KernelsOption = "auto",
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Chat with a model. Accepted draft tokens are green, tokens that the target added itself are not.

    With the embedded model its DFlash drafter is used unless --method none says otherwise.
    An empty line or Ctrl-D ends the conversation; Ctrl-C ends an answer.

    Examples:

      foredraft chat smollm2-135m

      foredraft chat smollm2-135m --method none --system "Answer in one sentence."
    """
    if method is None and speculative_config is None and model == EMBEDDED:
        method = "dflash"
    config = options.speculation(method, drafter, num_speculative_tokens, speculative_config)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    llm = LLM(
        model,
        config,
        dtype=dtype,
        device=device,
        quantization=options.quantization(quantization),
        kernels=options.kernels(kernels),
        max_model_len=max_model_len,
    )
    console = Console(highlight=False)
    messages = [{"role": "system", "content": system}] if system is not None else []
    while (line := _read(console)) is not None:
        messages.append({"role": "user", "content": line})
        try:
            result = _answer(llm, console, messages, params)
        except UserError as error:
            console.print(f"[red]{error}[/]")
            return
        if result is None:
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": result.outputs[0].text})
        console.print(f"[dim]{summary(result)}[/]")


def _read(console: Console) -> str | None:
    try:
        line = console.input("[bold]> [/]").strip()
    except EOFError:
        return None
    return line or None


def _answer(llm: LLM, console: Console, messages: list[dict[str, str]], params: SamplingParams) -> RequestOutput | None:
    """Stream one answer; None when Ctrl-C ended it."""
    result = None
    updates = llm.stream(llm.chat_prompt(messages), params)
    try:
        for update in updates:
            for piece, origin in update.pieces:
                console.print(Text(piece, style=DRAFTED if origin else ""), end="", soft_wrap=True)
            result = update.output
    except KeyboardInterrupt:
        updates.close()
        console.print("\n[dim]stopped[/]")
        return None
    console.print()
    return result
