"""foredraft demo: the main job on the embedded model, in under two minutes."""

from dataclasses import dataclass
from time import perf_counter
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foredraft.benchmark.workloads import BUNDLED, NAMES, read_conversations
from foredraft.cli.chat import DRAFTED
from foredraft.engine.sequence import Acceptance
from foredraft.llm import LLM, RequestOutput
from foredraft.models.loading import EMBEDDED, load_target
from foredraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class Pair:
    """One prompt answered plainly and with DFlash."""

    workload: str
    plain: RequestOutput
    drafted: RequestOutput

    @property
    def identical(self) -> bool:
        return self.plain.outputs[0].token_ids == self.drafted.outputs[0].token_ids


def demo(
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    seed: Annotated[int, typer.Option(help="For --temperature above 0.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Answer five prompts with the embedded model, plainly and with its DFlash drafter, and compare.

    Tokens that the drafter proposed and the target accepted are green.
    """
    console = Console(highlight=False)
    began = perf_counter()
    target = load_target(EMBEDDED)
    plain, drafted = LLM(target), LLM(target, {"method": "dflash"})
    console.print(f"{EMBEDDED} and its DFlash drafter loaded in {perf_counter() - began:.1f} s\n")
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    for llm in (plain, drafted):
        llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=16))
    pairs = []
    for name in NAMES:
        prompt = read_conversations(BUNDLED / f"{name}.jsonl")[0][0]
        messages = [{"role": "user", "content": prompt}]
        pair = Pair(name, plain.chat(messages, params)[0], drafted.chat(messages, params)[0])
        pairs.append(pair)
        console.print(Text(prompt, style="bold"))
        console.print(_coloured(pair.drafted), soft_wrap=True)
        console.print()
    console.print(_table(pairs))
    different = sum(not pair.identical for pair in pairs)
    if different:
        console.print(f"{different} of {len(pairs)} answers differ from plain decoding", style="red")
        raise typer.Exit(1)
    console.print("Every answer is token for token that of plain decoding.")


def _coloured(result: RequestOutput) -> Text:
    output = result.outputs[0]
    text = Text()
    for piece, origin in output.pieces:
        text.append(piece, style=DRAFTED if origin else "")
    return text


def _table(pairs: list[Pair]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("kind of prompt", no_wrap=True)
    for heading in ("plain tok/s", "DFlash tok/s", "speed-up", "τ"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kept at 1, 2, … (%)")
    table.add_column("same tokens", no_wrap=True)
    total = Acceptance()
    for pair in pairs:
        acceptance = pair.drafted.outputs[0].acceptance
        total.add(acceptance)
        table.add_row(pair.workload, *_figures([pair], acceptance), "yes" if pair.identical else "NO")
    table.add_section()
    table.add_row("all", *_figures(pairs, total), f"{sum(p.identical for p in pairs)} of {len(pairs)}")
    return table


def _figures(pairs: list[Pair], acceptance: Acceptance) -> tuple[str, ...]:
    def speed(results: list[RequestOutput]) -> float:
        return sum(len(r.outputs[0].token_ids) for r in results) / sum(r.metrics.seconds for r in results)

    plain, drafted = speed([pair.plain for pair in pairs]), speed([pair.drafted for pair in pairs])
    rates = " ".join(f"{100 * rate:.0f}" for rate in acceptance.rates)
    return f"{plain:.1f}", f"{drafted:.1f}", f"{drafted / plain:.2f}x", f"{acceptance.length:.2f}", rates
