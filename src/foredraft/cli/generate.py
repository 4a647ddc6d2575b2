"""foredraft generate: one prompt, one answer."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from foredraft.cli import options
from foredraft.errors import UserError
from foredraft.llm import LLM, RequestOutput
from foredraft.sampling_params import SamplingParams


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The user's message; - reads it from standard input.")],
    method: options.Method = None,
    drafter: options.Drafter = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    speculative_config: options.SpeculativeConfigOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the end token.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text itself, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quantization: options.QuantizationOption = "none",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    kernels: options.KernelsOption = "auto",
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Answer one prompt.

    Examples:

      foredraft generate smollm2-135m --prompt "Why is the sky blue?"

      foredraft generate smollm2-135m -p "Write a python function to add numbers." --method dflash --json

      foredraft generate ./my-model -p "Once upon" --raw --temperature 0.8 --seed 3
    """
    config = options.speculation(method, drafter, num_speculative_tokens, speculative_config)
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or None,
        ignore_eos=ignore_eos,
    )
    text = _standard_input() if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty")
    llm = LLM(
        model,
        config,
        dtype=dtype,
        device=device,
        quantization=options.quantization(quantization),
        kernels=options.kernels(kernels),
        max_model_len=max_model_len,
    )
    if raw:
        result = llm.generate(text, params)[0]
    else:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        result = llm.chat(messages, params)[0]
    if as_json:
        print(json.dumps(_record(result), ensure_ascii=False))
        return
    print(result.outputs[0].text)
    Console(stderr=True).print(f"[dim]{summary(result)}[/]")


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error}") from error


def _record(result: RequestOutput) -> dict[str, object]:
    output = result.outputs[0]
    acceptance = output.acceptance
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "metrics": {
            "prompt_tokens": len(result.prompt_token_ids),
            "output_tokens": len(output.token_ids),
            "seconds": result.metrics.seconds,
            "ttft_ms": 1000 * result.metrics.time_to_first_token,
            "output_tokens_per_second": len(output.token_ids) / result.metrics.seconds,
            "rounds": acceptance.rounds,
            "acceptance_length": acceptance.length,
            "acceptance_rate_per_position": acceptance.rates,
        },
    }


def summary(result: RequestOutput) -> str:
    """One line on an answer: tokens, speed and, where there was speculation, acceptance length."""
    output, seconds = result.outputs[0], result.metrics.seconds
    line = f"{len(output.token_ids)} tokens, {len(output.token_ids) / seconds:.1f} tok/s"
    if output.acceptance.proposed:
        line += f", τ {output.acceptance.length:.2f} over {output.acceptance.rounds} rounds"
    return line
