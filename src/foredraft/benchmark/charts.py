"""What the pictures of a benchmark show, apart from how they are drawn (``svg`` and ``plots``)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor

from foredraft.benchmark.comparison import Series, by_dataset, by_series, draft_counts
from foredraft.benchmark.results import Run
from foredraft.config import NumSpeculativeTokens


@dataclass(frozen=True)
class Line:
    """Values over ticks, ``(index of the tick, value)``. series: number of the method, from which its looks follow."""

    series: int
    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Bar:
    series: int
    label: str
    value: float


@dataclass(frozen=True)
class LinePanel:
    title: str
    ticks: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class BarPanel:
    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Chart:
    """One picture: a panel for each workload, all with the same range of values.

    name: for files. description: what it shows, for those who do not see it and as its caption.
    value, over: what the axes are. reference: a value to mark, such as plain decoding's. legend: of line panels.
    """

    name: str
    title: str
    description: str
    value: str
    over: str
    low: float
    high: float
    panels: tuple[LinePanel, ...] | tuple[BarPanel, ...]
    reference: float | None = None
    legend: tuple[tuple[int, str], ...] = ()


def charts(runs: Sequence[Run], labels: Mapping[Series, str]) -> list[Chart]:
    """The pictures of one setting; those left out for which there are no values. labels: see ``series_labels``."""
    found = (_acceptance(runs, labels), _speedup(runs, labels), _acceptance_length(runs, labels))
    return [chart for chart in found if chart]


def axis_ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, six or fewer steps."""
    steps = (0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)
    step = next((each for each in steps if (high - low) / each <= 6.5), high - low)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(step * index, 6) for index in range(first, last + 1)]


def _acceptance(runs: Sequence[Run], labels: Mapping[Series, str]) -> Chart | None:
    """By position, at each method's largest N, where most positions are seen."""
    chosen = {
        series: _largest(draft_counts([run for run in own if run.acceptance_rate_per_position]))
        for series, own in by_series(runs).items()
    }
    lines: dict[str, list[Line]] = {}
    named = _with_n(labels, chosen)
    for dataset, series, run in _chosen_runs(runs, chosen):
        if rates := run.acceptance_rate_per_position:
            line = Line(_index(series, labels), named[series], tuple(enumerate(rates)))
            lines.setdefault(dataset, []).append(line)
    if not lines:
        return None
    longest = max(len(line.points) for each in lines.values() for line in each)
    ticks = tuple(str(position) for position in range(1, longest + 1))
    return Chart(
        name="acceptance",
        title="Acceptance rate by position",
        description="Of all rounds that proposed a token at a position, the share that kept it. "
        f"Each method at the largest N that was tried{_n_words(chosen)}.",
        value="acceptance rate",
        over="position in the proposal",
        low=0.0,
        high=1.0,
        panels=tuple(LinePanel(dataset, ticks, tuple(each)) for dataset, each in lines.items()),
        legend=_legend(lines),
    )


def _speedup(runs: Sequence[Run], labels: Mapping[Series, str]) -> Chart | None:
    """Over N; "auto" stands apart at the right."""
    timed = [run for run in runs if run.condition.method != "none" and run.speedup is not None]
    counts = draft_counts(timed)
    if not counts:
        return None
    place = {n: index for index, n in enumerate(counts)}
    lines: dict[str, list[Line]] = {}
    for dataset, on_dataset in by_dataset(timed).items():
        for series, own in by_series(on_dataset).items():
            speeds = {run.condition.num_speculative_tokens: run.speedup for run in own}
            points = [(n, (place[n], value)) for n in counts if (value := speeds.get(n)) is not None]
            fixed = tuple(point for n, point in points if n != "auto")
            chosen = tuple(point for n, point in points if n == "auto")
            lines.setdefault(dataset, []).extend(
                Line(_index(series, labels), labels[series], part) for part in (fixed, chosen) if part
            )
    values = [value for each in lines.values() for line in each for _, value in line.points]
    return Chart(
        name="speedup",
        title="Speed-up over N",
        description="Output tokens a second, divided by plain decoding's in the same run (the dotted line is 1)."
        + (" auto: the engine chooses N in each round." if "auto" in counts else ""),
        value="speed-up",
        over="N, draft tokens a round",
        low=min(0.9, floor(2 * min(values)) / 2),
        high=max(1.5, ceil(2 * max(values)) / 2),
        panels=tuple(LinePanel(dataset, tuple(str(n) for n in counts), tuple(each)) for dataset, each in lines.items()),
        reference=1.0,
        legend=_legend(lines),
    )


def _acceptance_length(runs: Sequence[Run], labels: Mapping[Series, str]) -> Chart | None:
    """By workload and method, all at one N where they can be."""
    known = [run for run in runs if run.condition.method != "none" and run.acceptance_length is not None]
    if not known:
        return None
    shared = _most_shared(known)
    chosen = {}
    for series, own in by_series(known).items():
        counts = draft_counts(own)
        chosen[series] = shared if shared in counts else _largest(counts)
    named = _with_n(labels, chosen)
    bars: dict[str, list[Bar]] = {}
    for dataset, series, run in _chosen_runs(known, chosen):
        assert run.acceptance_length is not None
        bars.setdefault(dataset, []).append(Bar(_index(series, labels), named[series], run.acceptance_length))
    return Chart(
        name="acceptance-length",
        title="Acceptance length τ",
        description=f"Tokens committed a round, the bonus token included{_n_words(chosen)}. Plain decoding's is 1.",
        value="τ",
        over="",
        low=0.0,
        high=max(2.0, float(ceil(max(bar.value for each in bars.values() for bar in each)))),
        panels=tuple(BarPanel(dataset, tuple(each)) for dataset, each in bars.items()),
        reference=1.0,
    )


def _chosen_runs(
    runs: Sequence[Run], chosen: Mapping[Series, NumSpeculativeTokens | None]
) -> Iterator[tuple[str, Series, Run]]:
    """By workload the run of each method at its N of ``chosen``."""
    for dataset, on_dataset in by_dataset(runs).items():
        for series, own in by_series(on_dataset).items():
            for run in own:
                if run.condition.num_speculative_tokens == chosen[series]:
                    yield dataset, series, run
                    break


def _largest(counts: Sequence[NumSpeculativeTokens]) -> NumSpeculativeTokens | None:
    """The largest fixed N; "auto", or None for a server that does not tell, if there is none."""
    fixed = [n for n in counts if n != "auto"]
    return fixed[-1] if fixed else next(iter(counts), None)


def _most_shared(runs: Sequence[Run]) -> NumSpeculativeTokens | None:
    """The N that most methods ran with; of several the largest."""
    counts = draft_counts(runs)
    tried = [draft_counts(own) for own in by_series(runs).values()]
    most = max((sum(n in own for own in tried) for n in counts), default=0)
    return _largest([n for n in counts if sum(n in own for own in tried) == most])


def _with_n(labels: Mapping[Series, str], chosen: Mapping[Series, NumSpeculativeTokens | None]) -> dict[Series, str]:
    """Labels that name N where methods differ in it."""
    if len(set(chosen.values())) == 1:
        return dict(labels)
    return {series: labels[series] if n is None else f"{labels[series]}, N = {n}" for series, n in chosen.items()}


def _n_words(chosen: Mapping[Series, NumSpeculativeTokens | None]) -> str:
    counts = set(chosen.values())
    return f" (N = {next(iter(counts))})" if len(counts) == 1 and None not in counts else ""


def _legend(lines: Mapping[str, Sequence[Line]]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted({(line.series, line.label) for each in lines.values() for line in each}))


def _index(series: Series, labels: Mapping[Series, str]) -> int:
    return list(labels).index(series)
