"""From series to tables: medians with their spread, and the goals that the ratios are measured against."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rounds import Ratio, Series, fastest
from sections import PREFILL_TOKENS, REQUESTS, WITH_PROMPTS, Section

UNITS = {"bandwidth": "GB/s"}
TITLES = {
    "plain": "Plain decoding, 128 tokens of one request (tok/s)",
    "speculation": "Prompts of the five workloads, one request, after the first token (tok/s)",
    "prefill": f"A prompt of {PREFILL_TOKENS} tokens (tok/s)",
    "batch": f"{REQUESTS} requests at once (tok/s of all)",
    "rows": "A pass of the target by rows (ms)",
    "large": "Random weights of the shape of Qwen3-1.7B, one request (tok/s)",
}


@dataclass(frozen=True)
class Goal:
    """One line of the table of issue 3. at_most: whether less is better."""

    what: str
    ratio: Ratio
    must: float
    aim: float
    at_most: bool = False

    @property
    def verdict(self) -> str:
        reached = [self.ratio.value <= bound if self.at_most else self.ratio.value >= bound for bound in self._bounds]
        return "aim" if reached[1] else "must" if reached[0] else "missed"

    @property
    def _bounds(self) -> tuple[float, float]:
        return self.must, self.aim

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.ratio.value,
            "range": [self.ratio.low, self.ratio.high],
            "must": self.must,
            "aim": self.aim,
            "reached": self.verdict,
        }


def goals(sections: Mapping[str, Section]) -> list[Goal]:
    """Those of which this run measured both sides."""
    found: list[Goal] = []
    for name, of in (
        ("plain", _plain_goals),
        ("speculation", _speculation_goals),
        ("batch", _batch_goals),
        ("prefill", _prefill_goals),
        ("rows", _rows_goals),
        ("large", _large_goals),
    ):
        if name in sections:
            found += of(sections[name])
    return found


def _plain_goals(section: Section) -> Iterator[Goal]:
    series: dict[str, Series] = section["series"]
    for what, mine, theirs, must, aim in (
        ("plain decoding, bf16 / llama.cpp BF16", "foredraft bf16", "llama.cpp BF16", 1.05, 1.25),
        ("plain decoding, MXFP4 / llama.cpp Q4_0", "foredraft mxfp4", "llama.cpp Q4_0", 1.3, 2.0),
        ("the same / Q4_0 with a 4-bit head (--pure)", "foredraft mxfp4", "llama.cpp Q4_0 pure", 1.3, 2.0),
    ):
        if mine in series and theirs in series:
            yield Goal(what, series[mine].over(series[theirs]), must, aim)


def _speculation_goals(section: Section) -> Iterator[Goal]:
    series: dict[str, Series] = section["series"]
    best = fastest(series, lambda name: name.startswith("foredraft mxfp4 DFlash") and WITH_PROMPTS not in name)
    if best is None:
        return
    name, mine = best
    label = f"DFlash + MXFP4 ({name.rpartition(' ')[2]})"
    four_bits = fastest(series, lambda name: name in ("llama.cpp Q4_0", "llama.cpp Q4_0 pure", "llama.cpp Q4_1"))
    if four_bits:
        yield Goal(f"{label} / {four_bits[0]}, plain", mine.over(four_bits[1]), 2.0, 3.0)
    if "foredraft bf16" in series:
        yield Goal(f"{label} / own bf16, plain", mine.over(series["foredraft bf16"]), 3.0, 5.02)
    lengths: dict[str, dict[str, float]] = section["acceptance_lengths"]
    other = name.replace("mxfp4", "bf16")
    if other in lengths:
        value = sum(lengths[name].values()) / sum(lengths[other].values())
        yield Goal("acceptance length, MXFP4 target / bf16 target", Ratio(value, value, value), 0.95, 0.98)


def _batch_goals(section: Section) -> Iterator[Goal]:
    series: dict[str, Series] = section["series"]
    if "foredraft bf16" in series and "vLLM bf16" in series:
        ratio = series["foredraft bf16"].over(series["vLLM bf16"])
        yield Goal(f"{REQUESTS} requests at once, bf16 / vLLM CPU", ratio, 1.3, 2.0)


def _prefill_goals(section: Section) -> Iterator[Goal]:
    series: dict[str, Series] = section["series"]
    best = fastest(series, lambda name: name.startswith("llama.cpp"))
    for precision in ("bf16", "mxfp4"):
        if best and f"foredraft {precision}" in series:
            ratio = series[f"foredraft {precision}"].over(best[1])
            yield Goal(f"prefill of {PREFILL_TOKENS} tokens, {precision} / {best[0]}", ratio, 0.8, 1.2)


def _rows_goals(section: Section) -> Iterator[Goal]:
    series: dict[str, Series] = section["series"]
    for precision, must, aim in (("bf16", 1.3, 1.1), ("mxfp4", 2.2, 1.6)):
        name = f"foredraft {precision}"
        if f"{name}, 8 rows" in series:
            ratio = series[f"{name}, 8 rows"].over(series[f"{name}, 1 rows"])
            yield Goal(f"step time of 8 rows / 1 row, {precision}", ratio, must, aim, at_most=True)


def _large_goals(section: Section) -> Iterator[Goal]:
    for precision, must, aim in (("bf16", 0.75, 0.9), ("mxfp4", 0.6, 0.8)):
        share = shares(section).get(f"foredraft {precision}")
        if share:
            yield Goal(f"share of read bandwidth, 1.7B shape, {precision}", share, must, aim)
    sizes = section["memory"].get("foredraft mxfp4")
    if sizes:
        value = sizes["resident_bytes"] / sizes["weight_bytes"]
        yield Goal("resident memory / weight bytes, MXFP4, 1.7B shape", Ratio(value, value, value), 1.5, 1.2, True)


def shares(section: Section) -> dict[str, Ratio]:
    """Of each engine, bytes of weights a token times tokens a second over the best bandwidth of the run."""
    series: dict[str, Series] = section["series"]
    found = {}
    for name, size in section.get("streamed_bytes", {}).items():
        of_best = size / (max(series["bandwidth"].values) * 1e9)
        own = series[name]
        found[name] = Ratio(own.median * of_best, min(own.values) * of_best, max(own.values) * of_best)
    return found


def section_table(name: str, section: Section) -> Table:
    """Every series with median and range; acceptance, share of bandwidth or step ratios where they apply."""
    table = Table(title=TITLES[name], title_justify="left")
    own = shares(section)
    lengths: dict[str, dict[str, float]] = section.get("acceptance_lengths", {})
    identical: dict[str, int] = section.get("identical_to_plain", {})
    series: dict[str, Series] = section["series"]
    extra = {
        "with prompts": {
            key.removesuffix(WITH_PROMPTS): f"{each.median:.0f}" for key, each in series.items() if WITH_PROMPTS in key
        },
        "share of bandwidth": {key: f"{ratio.value:.0%}" for key, ratio in own.items()},
        "acceptance length": {key: f"{sum(each.values()) / len(each):.2f}" for key, each in lengths.items()},
        "as plain": {key: f"{count} of {identical['of']}" for key, count in identical.items() if key != "of"},
        "over 1 row": {
            key: f"{each.median / series[key.partition(',')[0] + ', 1 rows'].median:.2f}"
            for key, each in series.items()
            if key.endswith(" rows")
        },
    }
    extra = {title: column for title, column in extra.items() if column}
    for title in ("", "median", "range", *extra):
        table.add_column(title, justify="right" if title else "left")
    for key, each in series.items():
        if WITH_PROMPTS in key:
            continue
        digits = 2 if max(each.values) < 100 else 0
        label = f"{key} ({UNITS[key]})" if key in UNITS else key
        spread = f"{min(each.values):.{digits}f} to {max(each.values):.{digits}f}"
        table.add_row(label, f"{each.median:.{digits}f}", spread, *(column.get(key, "") for column in extra.values()))
    return table


def goal_table(found: list[Goal]) -> Table:
    table = Table(
        title="Goals of issue 3: ratios of medians, in brackets the range of the rounds", title_justify="left"
    )
    for title in ("", "measured", "range", "must", "aim", "reached"):
        table.add_column(title, justify="right" if title else "left")
    for goal in found:
        sign = "≤" if goal.at_most else "≥"
        spread = f"[{goal.ratio.low:.2f}, {goal.ratio.high:.2f}]".replace("[", "\\[")
        bounds = (f"{sign} {goal.must:g}", f"{sign} {goal.aim:g}")
        table.add_row(goal.what, f"{goal.ratio.value:.2f}", spread, *bounds, goal.verdict)
    return table
