"""foredraft bench: how much faster, how much accepted, and whether the text stayed the same."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.benchmark import local, remote
from foredraft.benchmark.machine import environment
from foredraft.benchmark.results import Run, check_output, write_results
from foredraft.benchmark.table import best_lines, results_table
from foredraft.benchmark.workloads import NAMES, Workload, load_workloads, notes
from foredraft.cli import options
from foredraft.drafters import METHODS
from foredraft.errors import UserError
from foredraft.models.loading import load_target
from foredraft.sampling_params import SamplingParams

QUICK_PROMPTS, QUICK_TOKENS = 2, 32


def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="smollm2-135m (embedded), a folder, a GGUF file, or a Hub id; with --base-url the server's "
            "name for it, or auto.",
            show_default=False,
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(help="Drafting methods, such as none,dflash; none always runs. \\[default: dflash]"),
    ] = None,
    dataset: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}.")] = ",".join(NAMES),
    num_prompts: Annotated[int, typer.Option(help="Prompts of each dataset.")] = 8,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, such as 1,8,32.")] = "1",
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens", "-N", help="Draft tokens a round, such as 3,5,7. \\[default: the drafter's]"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 192,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="From which each prompt gets its own.")] = 0,
    quantization: options.QuantizationOption = "none",
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="FOREDRAFT_DATA",
            help="Folder with DATASET.jsonl files. \\[default: the Hub, else the package's own prompts]",
        ),
    ] = None,
    drafter: options.Drafter = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    kernels: options.KernelsOption = "auto",
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"At most {QUICK_PROMPTS} prompts and {QUICK_TOKENS} tokens: does it run at all?"),
    ] = False,
    base_url: Annotated[
        str | None, typer.Option(help="Measure the OpenAI-compatible server at this address instead.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="FOREDRAFT_API_KEY", help="The server's API key.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which a server has failed.")
    ] = 300.0,
) -> None:
    """Measure speculation against plain decoding: tokens a second, acceptance, and whether the text is the same.

    Plain decoding always runs, in turns with the rest, so that every speed-up is a ratio from one run.

    Examples:

      foredraft bench smollm2-135m --quick

      foredraft bench smollm2-135m --dataset gsm8k,humaneval --num-speculative-tokens 3,5,7 --output bench.json

      foredraft bench Qwen/Qwen3-0.6B --method dflash --drafter ./my-drafter --concurrency 1,8

      foredraft bench auto --base-url http://localhost:8000/v1 --dataset gsm8k --concurrency 32
    """
    quantizations = [options.quantization(each) for each in _listed("--quantization", quantization)]
    chosen_kernels = options.kernels(kernels)
    own_settings = (method, num_speculative_tokens, drafter, quantization, kernels)
    if base_url is not None and own_settings != (None, None, None, "none", "auto"):
        raise UserError(
            "--method, --num-speculative-tokens, --drafter, --quantization and --kernels are the server's own "
            "settings; leave them out with --base-url"
        )
    if base_url is None and model == "auto":
        raise UserError("MODEL auto is the first model of a server; add --base-url, or name a model")
    methods = _listed("--method", method or "dflash")
    for each in methods:
        if each not in ("none", *METHODS):
            raise UserError(f"method {each!r} is not known; known: none, {', '.join(METHODS)}")
    if drafter is not None and len(set(methods) - {"none"}) != 1:
        raise UserError("--drafter belongs to one method; name exactly one besides none")
    configurations = local.configurations(
        methods,
        _integers("--num-speculative-tokens", num_speculative_tokens) if num_speculative_tokens else [None],
        drafter,
    )
    concurrencies = _integers("--concurrency", concurrency)
    for option, value in (("--num-prompts", num_prompts), ("--max-tokens", max_tokens)):
        if value < 1:
            raise UserError(f"{option} is {value}, expected an integer of at least 1")
    SamplingParams(temperature=temperature)
    torch_dtype = options.dtype(dtype)
    if output is not None:
        check_output(output)
    server = None if base_url is None else remote.Server(base_url, api_key, timeout)
    if quick:
        num_prompts, max_tokens = min(num_prompts, QUICK_PROMPTS), min(max_tokens, QUICK_TOKENS)

    messages = Console(stderr=True, soft_wrap=True, highlight=False)
    workloads = load_workloads(_listed("--dataset", dataset), data_dir, num_prompts)
    for note in (*notes(workloads), *_idle_places(workloads, max(concurrencies))):
        messages.print(f"[dim]{escape(note)}[/]")
    plan = local.Plan(
        configurations=(None,) if server else configurations,
        workloads=tuple(workloads),
        concurrencies=concurrencies,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )

    def results(report: local.Report) -> Iterator[list[Run]]:
        if server is not None:
            yield from remote.measure(server, remote.find_model(server, model), plan, report)
        else:
            for each in quantizations:
                target = load_target(model, torch_dtype, device, quantization=each, kernels=chosen_kernels)
                yield from local.measure(target, plan, report)

    machine = environment()
    runs: list[Run] = []
    failure = None
    total = plan.num_conversations * (1 if server else len(quantizations))
    try:
        for complete in _with_progress(results, total, messages):
            runs += complete
            if output is not None:
                write_results(output, machine, runs)
    except KeyboardInterrupt:
        failure = "interrupted"
    except remote.BenchmarkError as error:
        failure = str(error)
    if runs:
        _print(runs, output, messages)
    if failure is not None:
        kept = "the runs above are complete" if runs else "no run was complete"
        messages.print(f"[bold red]Error:[/] {escape(failure)} ({kept})")
        raise typer.Exit(1)


def _with_progress(
    results: Callable[[local.Report], Iterator[list[Run]]], total: int, console: Console
) -> Iterator[list[Run]]:
    """Show how far the benchmark is; on a terminal only."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # Drawing takes time from what is measured: seldom is enough.
    shown = Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal)
    with shown as progress:
        task = progress.add_task("getting ready", total=total)
        yield from results(lambda what: progress.update(task, advance=1, description=what))


def _print(runs: list[Run], output: Path | None, messages: Console) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # In a file or a pipe nothing is gained by folding.
        console = Console(highlight=False, width=140)
    console.print(results_table(runs))
    for line in best_lines(runs):
        console.print(line)
    if output is not None:
        messages.print(f"[dim]Written to {escape(str(output))}[/]")


def _idle_places(workloads: list[Workload], concurrency: int) -> Iterator[str]:
    short = [workload.name for workload in workloads if len(workload.conversations) < concurrency]
    if short:
        yield (
            f"{', '.join(short)}: fewer prompts than concurrency {concurrency}, so that some places stay empty; "
            "raise --num-prompts"
        )


def _listed(option: str, text: str) -> tuple[str, ...]:
    """The values of a comma-separated list, each once."""
    values = tuple(dict.fromkeys(value.strip() for value in text.split(",")))
    if "" in values:
        raise UserError(f"{option} is {text!r}, expected values separated by commas")
    return values


def _integers(option: str, text: str) -> tuple[int, ...]:
    values = _listed(option, text)
    for value in values:
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"{option} has {value!r}, expected integers of at least 1, such as 1,8")
    return tuple(int(value) for value in values)
