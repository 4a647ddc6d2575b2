"""foredraft bench: how much faster, how much accepted, and whether the text stayed the same."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.benchmark import local, remote
from foredraft.benchmark.machine import environment
from foredraft.benchmark.report import check_report, write_report
from foredraft.benchmark.results import Run
from foredraft.benchmark.results_file import Results, check_output, write_results
from foredraft.benchmark.table import results_table, standings_tables
from foredraft.benchmark.workloads import NAMES, Workload, load_workloads, notes
from foredraft.cli import options
from foredraft.config import AcceptanceRule, NumSpeculativeTokens
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
            "--num-speculative-tokens",
            "-N",
            help="Draft tokens a round, such as 3,5,7,auto; auto chooses in each round. \\[default: the drafter's]",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 192,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    acceptance_rule: Annotated[
        str | None, typer.Option(help="exact, rejection, or both with a comma. \\[default: exact]")
    ] = None,
    seed: Annotated[int, typer.Option(help="From which each prompt gets its own.")] = 0,
    quantization: options.QuantizationOption = "none",
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page (report.html) and plots (PNG) into this folder.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="FOREDRAFT_DATA",
            help="Folder with DATASET.jsonl files. \\[default: the Hub, else the package's own prompts]",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="METHOD=DIR, once for each method that is not to take the embedded model's own drafter, or DIR where "
            "one method takes a drafter. DIR may be a Hub id.",
            show_default=False,
        ),
    ] = None,
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

      foredraft bench smollm2-135m --method mtp,eagle3,dflash,dspark,ngram -N 3,5,7,auto --report ./comparison

      foredraft bench Qwen/Qwen3-0.6B --method dflash --drafter ./my-drafter --concurrency 1,8

      foredraft bench auto --base-url http://localhost:8000/v1 --dataset gsm8k --concurrency 32
    """
    quantizations = [options.quantization(each) for each in _listed("--quantization", quantization)]
    chosen_kernels = options.kernels(kernels)
    own_settings = (method, num_speculative_tokens, drafter or None, acceptance_rule, quantization, kernels)
    if base_url is not None and own_settings != (None, None, None, None, "none", "auto"):
        raise UserError(
            "--method, --num-speculative-tokens, --drafter, --acceptance-rule, --quantization and --kernels are the "
            "server's own settings; leave them out with --base-url"
        )
    if base_url is None and model == "auto":
        raise UserError("MODEL auto is the first model of a server; add --base-url, or name a model")
    methods = _listed("--method", method or "dflash")
    for each in methods:
        if each not in ("none", *METHODS):
            raise UserError(f"method {each!r} is not known; known: none, {', '.join(METHODS)}")
    rules = _rules(acceptance_rule or "exact")
    configurations = local.configurations(
        methods,
        _draft_counts(num_speculative_tokens) if num_speculative_tokens else [None],
        _drafters(drafter or (), methods),
        rules,
    )
    concurrencies = _integers("--concurrency", concurrency)
    for option, value in (("--num-prompts", num_prompts), ("--max-tokens", max_tokens)):
        if value < 1:
            raise UserError(f"{option} is {value}, expected an integer of at least 1")
    SamplingParams(temperature=temperature)
    torch_dtype = options.dtype(dtype)
    if output is not None:
        check_output(output)
    if report is not None:
        check_report(report)
    server = None if base_url is None else remote.Server(base_url, api_key, timeout)
    if quick:
        num_prompts, max_tokens = min(num_prompts, QUICK_PROMPTS), min(max_tokens, QUICK_TOKENS)

    messages = Console(stderr=True, soft_wrap=True, highlight=False)
    workloads = load_workloads(_listed("--dataset", dataset), data_dir, num_prompts)
    told = [*notes(workloads), *_idle_places(workloads, max(concurrencies))]
    if len(rules) > 1 and temperature == 0:
        told.append("at temperature 0 both acceptance rules keep the same tokens")
    for note in told:
        messages.print(f"[dim]{escape(note)}[/]")
    plan = local.Plan(
        configurations=(None,) if server else configurations,
        workloads=tuple(workloads),
        concurrencies=concurrencies,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )

    def measured(progress: _Progress) -> Iterator[list[Run]]:
        if server is not None:
            progress.expect(plan.num_conversations)
            yield from remote.measure(server, remote.find_model(server, model), plan, progress.advance)
            return
        possible = None
        for each in quantizations:
            target = load_target(model, torch_dtype, device, quantization=each, kernels=chosen_kernels)
            if possible is None:
                possible, left_out = local.fitting(target, plan)
                for note in left_out:
                    messages.print(f"[dim]{escape(note)}[/]")
                progress.expect(possible.num_conversations * len(quantizations))
            yield from local.measure(target, possible, progress.advance)

    results = Results(environment(), [], _command_line(sys.argv))
    failure = None
    try:
        with _Progress(messages) as progress:
            for complete in measured(progress):
                results.runs.extend(complete)
                if output is not None:
                    write_results(output, results)
    except KeyboardInterrupt:
        failure = "interrupted"
    except remote.BenchmarkError as error:
        failure = str(error)
    if results.runs:
        written = [] if output is None else [output]
        if report is not None:
            written.append(write_report(report, results))
        _print(results, written, messages)
    if failure is not None:
        kept = "the runs above are complete" if results.runs else "no run was complete"
        messages.print(f"[bold red]Error:[/] {escape(failure)} ({kept})")
        raise typer.Exit(1)


class _Progress:
    """How far the benchmark is; shown on a terminal only."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        # Drawing takes time from what is measured: seldom is enough.
        self._shown = Progress(
            *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
        )
        self._task = self._shown.add_task("getting ready", total=None)

    def __enter__(self) -> "_Progress":
        self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.stop()

    def expect(self, total: int) -> None:
        self._shown.update(self._task, total=total)

    def advance(self, what: str) -> None:
        self._shown.update(self._task, advance=1, description=what)


def _print(results: Results, written: Sequence[Path], messages: Console) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        # In a file or a pipe nothing is gained by folding.
        console = Console(highlight=False, width=160)
    console.print(results_table(results.runs))
    for heading, table in standings_tables(results.runs):
        console.print(f"\n{heading}", markup=False)
        console.print(table)
    for path in written:
        messages.print(f"[dim]Written to {escape(str(path))}[/]")


def _command_line(arguments: Sequence[str]) -> str:
    """The command as typed, without the API key."""
    shown = ["foredraft"]
    hide = False
    for argument in arguments[1:]:
        name, given, _ = argument.partition("=")
        shown.append("***" if hide else f"{name}=***" if given and name == "--api-key" else argument)
        hide = argument == "--api-key"
    return shlex.join(shown)


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


def _draft_counts(text: str) -> list[NumSpeculativeTokens | None]:
    option = "--num-speculative-tokens"
    return ["auto" if value == "auto" else _integers(option, value)[0] for value in _listed(option, text)]


def _rules(text: str) -> tuple[AcceptanceRule, ...]:
    known = get_args(AcceptanceRule)
    values = _listed("--acceptance-rule", text)
    for value in values:
        if value not in known:
            raise UserError(f"--acceptance-rule has {value!r}, expected some of {', '.join(known)}")
    return values  # type: ignore[return-value]


def _drafters(given: Sequence[str], methods: Sequence[str]) -> dict[str, str]:
    """The drafter's folder of each method that was given one; a method without weights takes one by name only."""
    takers = [method for method in methods if method != "none" and METHODS[method].load is not None]
    found: dict[str, str] = {}
    for text in given:
        method, named, folder = text.partition("=")
        if not named or method not in ("none", *METHODS):
            if len(takers) != 1:
                raise UserError(
                    f"--drafter {text} belongs to one method; name exactly one that takes a drafter, or say "
                    "--drafter METHOD=DIR"
                )
            (method,), folder = takers, text
        if method == "none" or method not in methods:
            raise UserError(f"--drafter {text}: {method} is not among the drafting methods of --method")
        if not folder:
            raise UserError(f"--drafter {text} names no folder")
        if method in found:
            raise UserError(f"--drafter is given twice for {method}")
        found[method] = folder
    return found
