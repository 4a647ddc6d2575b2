"""The terminal's view of a benchmark."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foredraft.benchmark.results import Run


def results_table(runs: Sequence[Run]) -> Table:
    """One row for each run; under "identical", how many of the conversations differ from plain decoding's."""
    table = Table(title=_title(runs), box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    quantized = any(run.condition.quantization not in (None, "none") for run in runs)
    for heading in ("dataset", *(("weights",) if quantized else ()), "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("N", "conc.", "tok/s", "speed-up", "τ"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kept at 1, 2, … (%)")
    table.add_column("identical", no_wrap=True)
    before = None
    for run in runs:
        condition = run.condition
        group = (condition.dataset, condition.concurrency, condition.quantization)
        if before not in (None, group):
            table.add_section()
        before = group
        table.add_row(
            condition.dataset + ("*" if condition.dataset_source == "bundled" else ""),
            *((condition.quantization or "-",) if quantized else ()),
            condition.method,
            str(condition.num_speculative_tokens or "-"),
            str(condition.concurrency),
            f"{run.output_tokens_per_second:.1f}",
            "-" if run.speedup is None else f"{run.speedup:.2f}x",
            "-" if run.acceptance_length is None else f"{run.acceptance_length:.2f}",
            " ".join(f"{100 * rate:.0f}" for rate in run.acceptance_rate_per_position or []) or "-",
            _identical(run),
        )
    if any(run.condition.dataset_source == "bundled" for run in runs):
        table.caption = "* this package's own prompts, not the public data set of that name"
    return table


def best_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Where several N were tried: the fastest one for each dataset, a line per method and concurrency."""
    found: defaultdict[tuple[str, int, str], defaultdict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.condition.num_speculative_tokens and run.speedup is not None:
            weights = "" if run.condition.quantization in (None, "none") else f" on {run.condition.quantization}"
            found[run.condition.method, run.condition.concurrency, weights][run.condition.dataset].append(run)
    for (method, concurrency, weights), datasets in found.items():
        if all(len(tried) == 1 for tried in datasets.values()):
            continue
        fastest = {name: max(tried, key=lambda run: run.speedup or 0) for name, tried in datasets.items()}
        parts = [f"{name} {run.condition.num_speculative_tokens} ({run.speedup:.2f}x)" for name, run in fastest.items()]
        yield f"Best N of {method}{weights} at concurrency {concurrency}: {', '.join(parts)}"


def _title(runs: Sequence[Run]) -> str:
    condition = runs[0].condition
    return f"{condition.model}, temperature {condition.temperature:g}, at most {condition.max_tokens} tokens"


def _identical(run: Run) -> str:
    if run.identical_to_plain is None:
        return "-"
    return "yes" if run.identical_to_plain else f"no: {run.num_different}/{run.num_prompts}"
