"""foredraft calibrate: from a drafter's confidences to how often its tokens are kept."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import options
from foredraft.config import SpeculativeConfig
from foredraft.drafters import check_method, load_drafter
from foredraft.drafters.calibration import FILE, Calibration
from foredraft.errors import UserError
from foredraft.llm import LLM, Prompt
from foredraft.models.loading import load_target
from foredraft.sampling_params import SamplingParams
from foredraft.training.calibration import calibrate as fit
from foredraft.training.synthesis import read_prompts


def calibrate(
    model: options.Model,
    method: Annotated[str, typer.Option("--method", help="Drafting method.", show_default=False)],
    data: Annotated[
        Path,
        typer.Option(
            help="JSON lines with `turns`, `prompt` or `messages`, which the drafter was not trained on. "
            "Of a conversation its first turn counts.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for calibration.json: the drafter's own, to be used.", show_default=False)
    ],
    drafter: options.Drafter = None,
    num_prompts: Annotated[int, typer.Option(help="Most prompts that are used.", min=2)] = 200,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=2)] = 192,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampled answers.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="Answers written at once.")] = 8,
    quantization: options.QuantizationOption = "none",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    kernels: options.KernelsOption = "auto",
) -> None:
    """Let a drafter draft, see what the target keeps, and fit its confidences to that.

    One half of the prompts is for the fit, the other half for its error, which is printed and stored.

    Examples:

      foredraft calibrate smollm2-135m --method dspark --data held_out.jsonl --output my-drafter --drafter my-drafter
    """
    if method == "none":
        raise UserError("--method none drafts nothing that could be calibrated")
    options.check_folder(output)
    config = SpeculativeConfig(method, drafter)
    check_method(config)
    conversations = read_prompts(data)[:num_prompts]
    precision, implementation = options.quantization(quantization), options.kernels(kernels)
    target = load_target(model, options.dtype(dtype), device, quantization=precision, kernels=implementation)
    # All positions that the drafter can propose.
    longest = load_drafter(config, target).max_tokens
    llm = LLM(target, SpeculativeConfig(method, drafter, longest), max_num_seqs=max_num_seqs)
    prompts: list[Prompt] = [
        llm.chat_prompt([*conversation.messages, {"role": "user", "content": conversation.turns[0]}])
        for conversation in conversations
    ]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    console = Console(stderr=True, soft_wrap=True)
    with console.status(f"answering {len(prompts)} prompts"):
        calibration = fit(llm, prompts, params, f"{len(prompts)} prompts of {data.name}, temperature {temperature:g}")
    calibration.save(output)
    console.print(_table(calibration))
    console.print(f"fitted on {calibration.rounds} rounds; written to {output / FILE}")


def _table(calibration: Calibration) -> Table:
    table = Table("k", "temperature", "offset", "error before", "error after", title="Survival of draft token k")
    errors = zip(calibration.error_before, calibration.error_after, strict=True)
    columns = zip(calibration.temperatures, calibration.offsets, errors, strict=False)
    for k, (temperature, offset, (before, after)) in enumerate(columns, start=1):
        table.add_row(str(k), f"{temperature:.2f}", f"{offset:+.2f}", f"{before:.3f}", f"{after:.3f}")
    return table
