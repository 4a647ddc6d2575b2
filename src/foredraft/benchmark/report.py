"""A benchmark as a page to read and pictures to show: one HTML file without any other, and PNG files beside it."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from foredraft.benchmark.charts import Chart, charts
from foredraft.benchmark.comparison import (
    Series,
    Setting,
    Standing,
    by_setting,
    series_labels,
    series_of,
    setting_labels,
    standings,
)
from foredraft.benchmark.results import Percentiles, Run
from foredraft.benchmark.results_file import Results
from foredraft.benchmark.svg import legend_svg, panel_svg
from foredraft.errors import UserError

TEMPLATE = Path(__file__).parent / "report.html.jinja"
PAGE = "report.html"
NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A column of the table of runs; left out where it has nothing to say."""

    heading: str
    cell: Callable[[Run], str]
    number: bool = True


@dataclass(frozen=True)
class Section:
    """What the page says about one setting. rows: cells by run; comparison: standings by method and workload."""

    anchor: str
    heading: str
    summary: str
    datasets: list[str | None]
    comparison: dict[str, list[Standing | None]]
    charts: list[Chart]
    columns: list[Column]
    rows: list[list[str]]


def check_report(folder: Path) -> None:
    """Raise UserError, before any work, where the report cannot be written to ``folder``."""
    if find_spec("matplotlib") is None:
        raise UserError("the report's pictures need matplotlib; install it with: pip install 'foredraft[report]'")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the report's folder {folder} is a file; name a folder")
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"the report's folder {folder} cannot be made: {existing} is not a writable folder")


def write_report(folder: Path, results: Results) -> Path:
    """Write the page and the pictures; returns the page's path."""
    from foredraft.benchmark.plots import write_png  # matplotlib is an extra, and slow to import

    folder.mkdir(parents=True, exist_ok=True)
    sections = list(_sections(results.runs))
    for section in sections:
        for chart in section.charts:
            suffix = f"-{section.anchor}" if len(sections) > 1 else ""
            write_png(chart, section.heading, folder / f"{chart.name}{suffix}.png")
    page = folder / PAGE
    page.write_text(_page(results, sections), encoding="utf-8")
    return page


def _page(results: Results, sections: Sequence[Section]) -> str:
    models = dict.fromkeys(run.condition.model for run in results.runs)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        models=", ".join(models),
        date=results.environment.get("date"),
        sections=sections,
        machine=list(_flat(results.environment)),
        command=results.command,
        notes=list(_notes(results.runs)),
        panel_svg=lambda chart, panel: Markup(panel_svg(chart, panel)),
        legend_svg=lambda series: Markup(legend_svg(series)),
        nothing=NOTHING,
    )


def _sections(runs: Sequence[Run]) -> Iterator[Section]:
    labels = series_labels(runs)
    settings = by_setting(runs)
    headings = setting_labels(list(settings))
    ranked = standings(runs)
    anchors: set[str] = set()
    for setting, own in settings.items():
        compared = [standing for standing in ranked if standing.setting == setting]
        datasets = list(dict.fromkeys(standing.dataset for standing in compared))
        columns = [column for column in _columns(labels) if any(column.cell(run) != NOTHING for run in own)]
        anchor = _anchor(headings[setting], anchors)
        yield Section(
            anchor=anchor,
            heading=headings[setting],
            summary=_summary(setting, compared, labels),
            datasets=datasets,
            comparison=_by_method(compared, datasets, labels),
            charts=charts(own, labels),
            columns=columns,
            rows=[[column.cell(run) for column in columns] for run in own],
        )


def _by_method(
    compared: Sequence[Standing], datasets: Sequence[str | None], labels: Mapping[Series, str]
) -> dict[str, list[Standing | None]]:
    placed = {(standing.series, standing.dataset): standing for standing in compared}
    methods = dict.fromkeys(standing.series for standing in compared)
    return {labels[series]: [placed.get((series, dataset)) for dataset in datasets] for series in methods}


def _summary(setting: Setting, compared: Sequence[Standing], labels: Mapping[Series, str]) -> str:
    """What one would say if asked for one sentence."""
    decoding = "greedy" if setting.temperature == 0 else f"at temperature {setting.temperature:g}"
    how = f"At most {setting.max_tokens} tokens an answer, {decoding}."
    if not compared:
        return f"{how} No speed-ups: plain decoding was not measured beside."
    workloads = [standing.dataset for standing in compared if standing.dataset is not None]
    last = None if any(standing.dataset is None for standing in compared) else workloads[0]
    best = next((each for each in compared if each.dataset == last and each.winner), None)
    where = "over all workloads (geometric mean)" if last is None else f"on {last}"
    if best is None:
        return f"{how} No method is faster than plain decoding {where}."
    return (
        f"{how} Fastest {where}: {labels[best.series]} with N = {best.num_speculative_tokens}, "
        f"{best.speedup:.2f} times plain decoding."
    )


def _columns(labels: Mapping[Series, str]) -> list[Column]:
    return [
        Column("workload", lambda run: _dataset(run), number=False),
        Column("method", lambda run: labels.get(series_of(run), "none (plain)"), number=False),
        Column("N", lambda run: _words(run.condition.num_speculative_tokens or None)),
        Column("tok/s", lambda run: _fixed(run.output_tokens_per_second, 1)),
        Column("speed-up", lambda run: _fixed(run.speedup, 2)),
        Column("τ", lambda run: _fixed(run.acceptance_length, 2)),
        Column("kept at 1, 2, … (%)", lambda run: _rates(run.acceptance_rate_per_position), number=False),
        Column("draft ms", lambda run: _fixed(run.draft_ms, 2)),
        Column("verify ms", lambda run: _fixed(run.verify_ms, 2)),
        Column("observe ms", lambda run: _fixed(run.observe_ms, 2)),
        Column("drafter’s share", lambda run: _percent(run.draft_share)),
        Column("first token ms, p50 / p95", lambda run: _percentiles(run.ttft_ms)),
        Column("next tokens ms, p50 / p95", lambda run: _percentiles(run.tpot_ms)),
        Column("rounds", lambda run: _words(run.rounds)),
        Column("tokens", lambda run: _words(run.output_tokens)),
        Column("seconds", lambda run: _fixed(run.seconds, 1)),
        Column("prompts", lambda run: _words(run.num_prompts)),
        Column("same as plain", _identical, number=False),
    ]


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    bundled = dict.fromkeys(run.condition.dataset for run in runs if run.condition.dataset_source == "bundled")
    if bundled:
        yield f"* {', '.join(bundled)}: the package's own prompts, not the public data set of that name."
    differing = sum(run.identical_to_plain is False for run in runs)
    if differing:
        yield f"{differing} of the runs gave other tokens than plain decoding; see the last column."


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        words = f"{before}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{words}: ")
        else:
            yield words, _words(value)


def _anchor(heading: str, taken: set[str]) -> str:
    """For links and file names."""
    stem = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "runs"
    anchor = next(name for n in range(len(taken) + 1) if (name := f"{stem}-{n + 1}" if n else stem) not in taken)
    taken.add(anchor)
    return anchor


def _dataset(run: Run) -> str:
    return run.condition.dataset + ("*" if run.condition.dataset_source == "bundled" else "")


def _identical(run: Run) -> str:
    if run.identical_to_plain is None:
        return NOTHING
    return "yes" if run.identical_to_plain else f"no: {_words(run.num_different)} of {run.num_prompts} differ"


def _words(value: Any) -> str:
    return NOTHING if value is None else str(value)


def _fixed(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.0f} %"


def _rates(rates: Sequence[float] | None) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates or ()) or NOTHING


def _percentiles(value: Percentiles) -> str:
    return NOTHING if value.p50 is None else f"{_fixed(value.p50, 1)} / {_fixed(value.p95, 1)}"
