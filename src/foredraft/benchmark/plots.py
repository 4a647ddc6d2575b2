"""Charts as PNG files. Needs matplotlib, which the extra `report` installs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from foredraft.benchmark.charts import BarPanel, Chart, LinePanel, axis_ticks

COLORS = ("#0072b2", "#c94f00", "#00805e", "#ad4788", "#806600", "#4f6875", "#7a3fc0", "#b3261e")
"""The page's light colors, in its order."""

MARKERS = "os^DvP"
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 4)), (0, (1, 3)))


def write_png(chart: Chart, setting: str, path: Path) -> None:
    """Draw to a file, with no display. setting: what the chart's runs have in common, for its title."""
    columns = min(3, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    bars = max((len(panel.bars) for panel in chart.panels if isinstance(panel, BarPanel)), default=0)
    figure = Figure(figsize=(4.2 * columns + 0.4, rows * (0.9 + 0.3 * bars if bars else 2.9) + 1), layout="constrained")
    figure.suptitle(f"{chart.title}\n{setting}", fontsize=11)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    panels: Sequence[LinePanel | BarPanel] = chart.panels
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_title(panel.title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if isinstance(panel, LinePanel):
            _draw_lines(axis, chart, panel)
        else:
            _draw_bars(axis, chart, panel)
    for axis in axes[len(chart.panels) :]:
        axis.set_visible(False)
    if chart.legend:
        handles = [Line2D([], [], label=label, **_looks(series)) for series, label in chart.legend]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    figure.savefig(path, dpi=140)


def _draw_lines(axis: Axes, chart: Chart, panel: LinePanel) -> None:
    for line in panel.lines:
        axis.plot([tick for tick, _ in line.points], [value for _, value in line.points], **_looks(line.series))
    if chart.reference is not None:
        axis.axhline(chart.reference, color="0.4", linestyle=":", linewidth=1)
    axis.set_xlim(-0.5, len(panel.ticks) - 0.5)
    axis.set_xticks(range(len(panel.ticks)), panel.ticks)
    axis.set_yticks(axis_ticks(chart.low, chart.high))
    axis.set_ylim(chart.low, chart.high)
    axis.grid(axis="y", alpha=0.3)
    axis.set_xlabel(chart.over, fontsize=9)
    axis.set_ylabel(chart.value, fontsize=9)


def _draw_bars(axis: Axes, chart: Chart, panel: BarPanel) -> None:
    drawn = axis.barh(
        range(len(panel.bars)),
        [bar.value for bar in panel.bars],
        0.7,
        color=[COLORS[bar.series % len(COLORS)] for bar in panel.bars],
    )
    axis.bar_label(drawn, [f"{bar.value:.2f}" for bar in panel.bars], padding=3, fontsize=8)
    if chart.reference is not None:
        axis.axvline(chart.reference, color="0.4", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(panel.bars)), [bar.label for bar in panel.bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * chart.high)


def _looks(series: int) -> dict[str, Any]:
    return {
        "color": COLORS[series % len(COLORS)],
        "marker": MARKERS[series % len(MARKERS)],
        "linestyle": STYLES[series % len(STYLES)],
        "markersize": 5,
    }
