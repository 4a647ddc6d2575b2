"""Charts as inline SVG, a picture a panel: its colors are the page's, so that it fits light, dark and print."""

from collections.abc import Iterator
from html import escape

from foredraft.benchmark.charts import BarPanel, Chart, Line, LinePanel, axis_ticks

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 36, 12, 10, 38
ROW = 24

DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 3")
"""Beside color, for print in grey and for the color-blind."""


def panel_svg(chart: Chart, panel: LinePanel | BarPanel) -> str:
    """One ``<svg>`` with a title and a description that says every value."""
    lines = isinstance(panel, LinePanel)
    parts = list(_line_panel(chart, panel) if isinstance(panel, LinePanel) else _bar_panel(chart, panel))
    height = HEIGHT if lines else ROW * len(panel.bars) + 8  # type: ignore[union-attr]
    title = escape(f"{chart.title}: {panel.title}")
    described = escape(_line_words(panel) if isinstance(panel, LinePanel) else _bar_words(panel))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}. {described}">'
        f"<title>{title}</title><desc>{described}</desc>{''.join(parts)}</svg>"
    )


def legend_svg(series: int) -> str:
    """A short line with its marker."""
    return (
        f'<svg viewBox="0 0 34 14" width="34" height="14" class="s{series % 8}" aria-hidden="true">'
        f'<path class="line" d="M2 7H32"{_dash(series)}/>{_marker(series, 17, 7)}</svg>'
    )


def _line_panel(chart: Chart, panel: LinePanel) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM

    def y(value: float) -> float:
        return bottom - (value - chart.low) / (chart.high - chart.low) * (bottom - TOP)

    def x(tick: int) -> float:
        return LEFT + (tick + 0.5) / len(panel.ticks) * (WIDTH - LEFT - RIGHT)

    for value in axis_ticks(chart.low, chart.high):
        yield f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>'
        yield _text(LEFT - 6, y(value) + 4, f"{value:g}", "end")
    for tick, words in enumerate(panel.ticks):
        yield _text(x(tick), bottom + 15, words, "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, chart.over, "middle")
    if chart.reference is not None:
        yield f'<path class="reference" d="M{LEFT} {y(chart.reference):.1f}H{WIDTH - RIGHT}"/>'
    for line in panel.lines:
        places = [(x(tick), y(value)) for tick, value in line.points]
        path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
        yield f'<g class="s{line.series % 8}"><path class="line" d="M{path}"{_dash(line.series)}/>'
        for (across, up), (tick, value) in zip(places, line.points, strict=True):
            told = escape(f"{line.label}, {panel.ticks[tick]}: {value:.2f}")
            yield f"<g><title>{told}</title>{_marker(line.series, across, up)}</g>"
        yield "</g>"


def _bar_panel(chart: Chart, panel: BarPanel) -> Iterator[str]:
    begin = min(200.0, 18 + 7.6 * max(len(bar.label) for bar in panel.bars))
    scale = (WIDTH - begin - 44) / chart.high
    for row, bar in enumerate(panel.bars):
        top = ROW * row + 4
        yield _text(begin - 6, top + 14, bar.label, "end")
        yield (
            f'<rect class="bar s{bar.series % 8}" x="{begin:.1f}" y="{top + 2}" '
            f'width="{bar.value * scale:.1f}" height="{ROW - 8}"/>'
        )
        yield _text(begin + bar.value * scale + 5, top + 14, f"{bar.value:.2f}", "start")
    if chart.reference is not None:
        across = begin + chart.reference * scale
        yield f'<path class="reference" d="M{across:.1f} 2V{ROW * len(panel.bars) + 6}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _dash(series: int) -> str:
    dash = DASHES[series % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _marker(series: int, x: float, y: float) -> str:
    shapes = (
        "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
        "m-3.5-3.5h7v7h-7z",
        "m0-5l4.5 8h-9z",
        "m0-5l4.5 5l-4.5 5l-4.5-5z",
        "m0 5l4.5-8h-9z",
        "m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    )
    return f'<path class="marker" d="M{x:.1f} {y:.1f}{shapes[series % len(shapes)]}"/>'


def _line_words(panel: LinePanel) -> str:
    return "; ".join(f"{line.label}: {_point_words(panel, line)}" for line in panel.lines)


def _point_words(panel: LinePanel, line: Line) -> str:
    return ", ".join(f"{panel.ticks[tick]}: {value:.2f}" for tick, value in line.points)


def _bar_words(panel: BarPanel) -> str:
    return "; ".join(f"{bar.label}: {bar.value:.2f}" for bar in panel.bars)
