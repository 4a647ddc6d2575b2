"""Which method, which N: the runs of a benchmark put side by side."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean

from foredraft.benchmark.results import Run
from foredraft.config import NumSpeculativeTokens


@dataclass(frozen=True)
class Setting:
    """What must be equal for runs to be compared."""

    model: str
    dtype: str | None
    quantization: str | None
    concurrency: int
    temperature: float
    max_tokens: int
    base_url: str | None


@dataclass(frozen=True)
class Series:
    """What a comparison is about; N apart, because it is swept."""

    method: str
    acceptance_rule: str | None
    drafter: str | None


@dataclass(frozen=True)
class Standing:
    """A method at its fastest N on a workload.

    dataset: None is all workloads of the setting with one N; speedup is then the geometric mean and
    acceptance_length the mean. winner: whether it is faster than every other method there, and than plain decoding.
    """

    setting: Setting
    series: Series
    dataset: str | None
    num_speculative_tokens: NumSpeculativeTokens | None
    speedup: float
    acceptance_length: float | None
    winner: bool = False


def by_setting(runs: Sequence[Run]) -> dict[Setting, list[Run]]:
    """Runs that can be compared, in the order in which they were made."""
    found: defaultdict[Setting, list[Run]] = defaultdict(list)
    for run in runs:
        own = run.condition
        setting = Setting(
            own.model, own.dtype, own.quantization, own.concurrency, own.temperature, own.max_tokens, own.base_url
        )
        found[setting].append(run)
    return dict(found)


def series_of(run: Run) -> Series:
    return Series(run.condition.method, run.condition.acceptance_rule, run.condition.drafter)


def by_series(runs: Sequence[Run]) -> dict[Series, list[Run]]:
    """All but plain decoding's runs, by method."""
    found: defaultdict[Series, list[Run]] = defaultdict(list)
    for run in runs:
        if run.condition.method != "none":
            found[series_of(run)].append(run)
    return dict(found)


def by_dataset(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.condition.dataset].append(run)
    return dict(found)


def series_labels(runs: Sequence[Run]) -> dict[Series, str]:
    """For each series its method, and the rule and drafter where several were tried."""
    found = list(dict.fromkeys(series_of(run) for run in runs if run.condition.method != "none"))
    rules = {series.acceptance_rule for series in found}
    labels = {}
    for series in found:
        drafters = {each.drafter for each in found if each.method == series.method}
        parts = [series.acceptance_rule] if len(rules) > 1 else []
        parts += [series.drafter or "shipped drafter"] if len(drafters) > 1 else []
        labels[series] = " ".join([series.method, *(f"({part})" for part in parts if part)])
    return labels


def setting_labels(settings: Sequence[Setting]) -> dict[Setting, str]:
    """In words: the model and weights, and of the rest what is not the usual or differs between settings."""
    temperatures = {setting.temperature for setting in settings}
    lengths = {setting.max_tokens for setting in settings}
    labels = {}
    for setting in settings:
        quantized = setting.quantization not in (None, "none")
        parts = [
            setting.model,
            setting.quantization if quantized else setting.dtype,
            f"concurrency {setting.concurrency}",
            f"temperature {setting.temperature:g}" if setting.temperature or len(temperatures) > 1 else None,
            f"at most {setting.max_tokens} tokens" if len(lengths) > 1 else None,
            f"at {setting.base_url}" if setting.base_url else None,
        ]
        labels[setting] = ", ".join(part for part in parts if part)
    return labels


def draft_counts(runs: Sequence[Run]) -> list[NumSpeculativeTokens]:
    """The N that were tried, "auto" last."""
    found = {run.condition.num_speculative_tokens for run in runs}
    fixed: list[NumSpeculativeTokens] = sorted(n for n in found if isinstance(n, int) and n > 0)
    return [*fixed, "auto"] if "auto" in found else fixed


def standings(runs: Sequence[Run]) -> list[Standing]:
    """The fastest N of each method on each workload, then over all workloads; runs without a speed-up left out."""
    found: list[Standing] = []
    for setting, own in by_setting(runs).items():
        timed = [run for run in own if run.condition.method != "none" and (run.speedup or 0) > 0]
        for on_dataset in by_dataset(timed).values():
            found += _ranked([_fastest(setting, series, tried) for series, tried in by_series(on_dataset).items()])
        datasets = set(by_dataset(timed))
        if len(datasets) > 1:
            whole = [_overall(setting, series, tried, datasets) for series, tried in by_series(timed).items()]
            found += _ranked([standing for standing in whole if standing])
    return found


def _fastest(setting: Setting, series: Series, runs: Sequence[Run]) -> Standing:
    """Of runs on one workload."""
    run = max(runs, key=_speedup)
    condition = run.condition
    return Standing(
        setting, series, condition.dataset, condition.num_speculative_tokens, _speedup(run), run.acceptance_length
    )


def _overall(setting: Setting, series: Series, runs: Sequence[Run], datasets: set[str]) -> Standing | None:
    """The one N that is fastest over all workloads; None if none has run on all of them."""
    complete = []
    for n in draft_counts(runs):
        own = {run.condition.dataset: run for run in runs if run.condition.num_speculative_tokens == n}
        if set(own) == datasets:
            lengths = [run.acceptance_length for run in own.values() if run.acceptance_length is not None]
            length = fmean(lengths) if len(lengths) == len(own) else None
            complete.append(Standing(setting, series, None, n, geometric_mean(map(_speedup, own.values())), length))
    return max(complete, key=lambda standing: standing.speedup, default=None)


def _ranked(standings: Sequence[Standing]) -> list[Standing]:
    """With the winner marked. Plain decoding, a speed-up of 1, is in the race."""
    fastest = max((standing.speedup for standing in standings), default=0.0)
    return [replace(standing, winner=standing.speedup == fastest > 1) for standing in standings]


def _speedup(run: Run) -> float:
    assert run.speedup is not None
    return run.speedup
