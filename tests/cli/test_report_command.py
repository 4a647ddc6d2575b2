"""foredraft report: a results file becomes a page, or a message."""

import json
import sys
from pathlib import Path

import pytest

from foredraft.cli.main import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "smollm2-135m-sweep.json"


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["foredraft", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_file_of_an_earlier_run_becomes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(monkeypatch, RESULTS, "--output", tmp_path / "page") == 0
    assert f"Written to {tmp_path / 'page' / 'report.html'}" in capsys.readouterr().err
    page = (tmp_path / "page" / "report.html").read_text()
    content = json.loads(RESULTS.read_text())
    assert page.count("<tr><td>") == len(content["runs"])
    assert content["environment"]["date"] in page


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("{}", "needs `runs`"), ('{"runs": [{}]}', "run 1: model is None, expected a string")],
)
def test_a_wrong_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "f.json").write_text(text)
    assert exit_status(monkeypatch, tmp_path / "f.json", "--output", tmp_path / "page") == 2
    message = capsys.readouterr().err
    assert says in message and "f.json" in message
    assert not (tmp_path / "page").exists()
