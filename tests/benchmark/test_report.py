"""The report: what the charts hold, that the page stands alone, and that strange results do not break it."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import made

from foredraft.benchmark import plots
from foredraft.benchmark.charts import Bar, BarPanel, Chart, Line, LinePanel, axis_ticks, charts
from foredraft.benchmark.comparison import series_labels
from foredraft.benchmark.report import check_report, write_report
from foredraft.benchmark.results import Percentiles, Run
from foredraft.benchmark.results_file import Results
from foredraft.benchmark.svg import panel_svg
from foredraft.errors import UserError

VOID = {"meta", "path", "rect", "br"}


def run(method: str, n: object, speedup: float | None, dataset: str = "gsm8k", **changes: object) -> Run:
    """With rates that halve from position to position."""
    own = made(method, n, speedup, dataset, **changes)
    count = n if isinstance(n, int) else 4
    object.__setattr__(own, "acceptance_rate_per_position", [0.5**k for k in range(1, count + 1)])
    return own


SWEEP = [
    *(run("none", 0, 1.0, dataset) for dataset in ("gsm8k", "mbpp")),
    *(run("mtp", n, 1 + n / 10, dataset) for dataset in ("gsm8k", "mbpp") for n in (3, 5, "auto") if n != "auto"),
    *(run("dflash", n, 2.0, dataset) for dataset in ("gsm8k", "mbpp") for n in (3, 5, 7)),
    run("dflash", "auto", 2.25),
]


def by_name(runs: list[Run]) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(runs, series_labels(runs))}


def test_charts_hold_the_figures_of_the_runs() -> None:
    found = by_name(SWEEP)
    assert list(found) == ["acceptance", "speedup", "acceptance-length"]
    acceptance = found["acceptance"].panels[0]
    assert isinstance(acceptance, LinePanel)
    assert acceptance.ticks == ("1", "2", "3", "4", "5", "6", "7")
    assert [(line.label, len(line.points)) for line in acceptance.lines] == [("mtp, N = 5", 5), ("dflash, N = 7", 7)]
    assert acceptance.lines[0].points[:2] == ((0, 0.5), (1, 0.25))
    assert found["acceptance"].legend == ((0, "mtp, N = 5"), (1, "dflash, N = 7"))
    speedup = found["speedup"].panels
    assert speedup[0] == LinePanel(
        "gsm8k",
        ("3", "5", "7", "auto"),
        (
            Line(0, "mtp", ((0, 1.3), (1, 1.5))),
            Line(1, "dflash", ((0, 2.0), (1, 2.0), (2, 2.0))),
            Line(1, "dflash", ((3, 2.25),)),
        ),
    )
    # Both have run with 3 and 5: the larger of these.
    assert found["acceptance-length"].panels[1] == BarPanel("mbpp", (Bar(0, "mtp", 3.0), Bar(1, "dflash", 3.0)))
    assert "(N = 5)" in found["acceptance-length"].description


def test_charts_without_values_are_left_out() -> None:
    server = made("server", None, None, acceptance_rule=None, base_url="http://x", dtype=None, quantization=None)
    assert [chart.name for chart in charts([server], series_labels([server]))] == ["acceptance-length"]
    object.__setattr__(server, "acceptance_length", None)
    assert charts([server], series_labels([server])) == []
    assert charts([run("none", 0, 1.0)], {}) == []


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.9, 2.5, [1, 1.25, 1.5, 1.75, 2, 2.25, 2.5]),
        (0.5, 4.0, [1, 2, 3, 4]),
    ],
)
def test_axis_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert axis_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("name", ["acceptance", "speedup", "acceptance-length"])
def test_pictures_are_well_formed_described_and_inside_their_frame(name: str) -> None:
    chart = by_name(SWEEP)[name]
    for panel in chart.panels:
        tree = ElementTree.fromstring(panel_svg(chart, panel))
        width, height = (float(each) for each in tree.attrib["viewBox"].split()[2:])
        described = tree.findtext("desc") or ""
        assert tree.attrib["role"] == "img"
        assert tree.findtext("title") == f"{chart.title}: {panel.title}"
        for text in tree.iter("text"):
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 <= float(text.attrib["y"]) <= height
        values = (
            [value for line in panel.lines for _, value in line.points]
            if isinstance(panel, LinePanel)
            else [bar.value for bar in panel.bars]
        )
        assert values and all(f"{value:.2f}" in described for value in values)


def test_higher_values_are_drawn_higher() -> None:
    chart = by_name(SWEEP)["acceptance"]
    tree = ElementTree.fromstring(panel_svg(chart, chart.panels[0]))
    line = next(path for group in tree.findall("g") for path in group if path.get("class") == "line")
    places = [tuple(map(float, place.split())) for place in line.attrib["d"].removeprefix("M").split("L")]
    assert len(places) == 5
    # Halved rates come down, each time by half as much.
    for (x, y), (next_x, next_y) in pairwise(places):
        assert next_x > x
        assert next_y > y
    assert (places[1][1] - places[0][1]) / (places[2][1] - places[1][1]) == pytest.approx(2, abs=0.02)


class Page(HTMLParser):
    """Tables of a page by cell, whether its tags match, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.ids += [own["id"] or ""] if "id" in own else []
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        assert tag not in ("script", "link", "iframe", "img")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture
def no_pngs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes most of a report's time."""
    monkeypatch.setattr(plots, "write_png", lambda *_: None)


def page_of(folder: Path, runs: list[Run]) -> tuple[Page, str]:
    text = write_report(folder, Results({"processor": "a <b> & c", "versions": {"torch": "2"}}, runs)).read_text()
    page = Page(text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert all(load.startswith("#") and load[1:] in page.ids for load in page.loads)
    assert "url(" not in text and "@import" not in text
    return page, text


def test_the_page_stands_alone_and_holds_every_run(tmp_path: Path) -> None:
    runs = [*SWEEP, run("mtp", 3, 0.5, concurrency=8), run("mtp", 3, 1.125, model="other <model>")]
    page, text = page_of(tmp_path, runs)
    assert [row[:6] for row in page.rows if row[1:2] == ["dflash"]][:2] == [
        ["gsm8k", "dflash", "3", "8.0", "2.00", "2.00"],
        ["gsm8k", "dflash", "5", "8.0", "2.00", "2.00"],
    ]
    assert sum(row[0] in ("gsm8k", "mbpp") for row in page.rows) == len(runs)
    assert ["dflash", "2.25× ★N = auto, τ = 2.00", "2.00× ★N = 3, τ = 3.00", "2.00× ★N = 3, τ = 2.50"] in page.rows
    assert ["mtp", "0.50×N = 3, τ = 2.00"] in page.rows
    assert "other &lt;model&gt;" in text and "<model>" not in text
    assert "a &lt;b&gt; &amp; c" in text
    # Three settings: pictures carry their names.
    names = {path.name for path in tmp_path.iterdir()}
    assert {"speedup-tiny-bfloat16-concurrency-8.png", "acceptance-other-model-bfloat16-concurrency-1.png"} <= names
    assert len(names) == 1 + 3 * 3
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_pngs")
def test_columns_without_values_are_left_out_and_single_nulls_are_dashes(tmp_path: Path) -> None:
    plain, timed = run("none", 0, 1.0), run("mtp", 3, 2.0)
    object.__setattr__(timed, "ttft_ms", Percentiles(1.0, 2.0))
    page, _ = page_of(tmp_path, [plain, timed])
    headings = next(row for row in page.rows if "workload" in row)
    assert "first token ms, p50 / p95" in headings
    assert "draft ms" not in headings and "next tokens ms, p50 / p95" not in headings
    cell = headings.index("first token ms, p50 / p95")
    assert [row[cell] for row in page.rows if row[0] == "gsm8k"] == ["–", "1.0 / 2.0"]


@pytest.mark.usefixtures("no_pngs")
@pytest.mark.parametrize(
    "runs",
    [
        [run("none", 0, 1.0)],
        [run("mtp", 3, None)],
        [made("server", None, None, acceptance_rule=None, base_url="http://x", dtype=None, quantization=None)],
        [run("mtp", "auto", 0.25)],
        [run(f"method-{index}", 3, 1.5) for index in range(12)],
    ],
    ids=["plain alone", "no plain", "server", "auto alone", "many methods"],
)
def test_little_or_strange_results_make_a_page(tmp_path: Path, runs: list[Run]) -> None:
    page, text = page_of(tmp_path, runs)
    assert sum(row[0] == "gsm8k" for row in page.rows) == len(runs)
    assert not re.search(r"\bNone\b|\bnan\b", text)


def test_a_folder_that_cannot_be_is_refused_before_the_work(tmp_path: Path) -> None:
    check_report(tmp_path / "new" / "newer")
    check_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="folder"):
            check_report(path)
