"""The terminal's view of a benchmark."""

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foredraft.benchmark.comparison import (
    Series,
    Standing,
    by_setting,
    series_labels,
    series_of,
    setting_labels,
    standings,
)
from foredraft.benchmark.results import Run

OVERALL = "overall"
"""The geometric mean over workloads, with one N for all of them."""


def results_table(runs: Sequence[Run]) -> Table:
    """One row for each run; under "identical", how many of the conversations differ from plain decoding's."""
    table = Table(title=_title(runs), box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    quantized = any(run.condition.quantization not in (None, "none") for run in runs)
    ruled = any(run.condition.acceptance_rule == "rejection" for run in runs)
    timed = any(run.verify_ms is not None for run in runs)
    for heading in ("dataset", *(("weights",) if quantized else ()), "method", *(("rule",) if ruled else ())):
        table.add_column(heading, no_wrap=True)
    for heading in ("N", "conc.", "tok/s", "speed-up", "τ"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kept at 1, 2, … (%)")
    if timed:
        table.add_column("ms draft+verify+observe", no_wrap=True)
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
            *((condition.acceptance_rule or "-",) if ruled else ()),
            str(condition.num_speculative_tokens or "-"),
            str(condition.concurrency),
            f"{run.output_tokens_per_second:.1f}",
            "-" if run.speedup is None else f"{run.speedup:.2f}x",
            "-" if run.acceptance_length is None else f"{run.acceptance_length:.2f}",
            " ".join(f"{100 * rate:.0f}" for rate in run.acceptance_rate_per_position or []) or "-",
            *((_phases(run),) if timed else ()),
            _identical(run),
        )
    if any(run.condition.dataset_source == "bundled" for run in runs):
        table.caption = "* this package's own prompts, not the public data set of that name"
    return table


def standings_tables(runs: Sequence[Run]) -> Iterator[tuple[str, Table]]:
    """For each setting in which several methods or N ran: the fastest N of each by workload, and who wins.

    Each with its heading, which as a table's title would be folded to the table's width.
    """
    found, labels = standings(runs), series_labels(runs)
    settings = by_setting(runs)
    words = setting_labels(list(settings))
    for setting, own in settings.items():
        tried = {(series_of(run), run.condition.num_speculative_tokens) for run in own}
        compared = [standing for standing in found if standing.setting == setting]
        if compared and len(tried) > 2:
            yield f"Fastest N of each method: {words[setting]}", _standings_table(compared, labels)


def _standings_table(compared: Sequence[Standing], labels: Mapping[Series, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    datasets = list(dict.fromkeys(standing.dataset for standing in compared))
    for dataset in datasets:
        table.add_column(dataset or OVERALL, no_wrap=True)
    placed = {(standing.series, standing.dataset): standing for standing in compared}
    for series in dict.fromkeys(standing.series for standing in compared):
        row = [placed.get((series, dataset)) for dataset in datasets]
        table.add_row(labels[series], *(_standing(standing) if standing else "-" for standing in row))
    table.add_section()
    winners = {standing.dataset: standing for standing in compared if standing.winner}
    table.add_row("winner", *(_winner(winners.get(dataset), labels) for dataset in datasets))
    return table


def _standing(standing: Standing) -> str:
    length = "" if standing.acceptance_length is None else f", τ {standing.acceptance_length:.2f}"
    return f"{standing.speedup:.2f}x\nN {standing.num_speculative_tokens}{length}"


def _winner(standing: Standing | None, labels: Mapping[Series, str]) -> str:
    """Nobody is faster than plain decoding where there is none."""
    return f"{labels[standing.series]}\nN {standing.num_speculative_tokens}" if standing else "none"


def _phases(run: Run) -> str:
    phases = (run.draft_ms, run.verify_ms, run.observe_ms)
    return "+".join("-" if ms is None else f"{ms:.2f}" for ms in phases)


def _title(runs: Sequence[Run]) -> str:
    condition = runs[0].condition
    return f"{condition.model}, temperature {condition.temperature:g}, at most {condition.max_tokens} tokens"


def _identical(run: Run) -> str:
    if run.identical_to_plain is None:
        return "-"
    return "yes" if run.identical_to_plain else f"no: {run.num_different}/{run.num_prompts}"
