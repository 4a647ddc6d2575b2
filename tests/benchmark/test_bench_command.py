"""foredraft bench: from options to a table, a file and an exit status."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny import dflash_json, dflash_tensors, tiny_target, write_dflash
from typer.testing import CliRunner

from foredraft.benchmark import local, report
from foredraft.benchmark.remote import BenchmarkError
from foredraft.benchmark.results import Run
from foredraft.cli import bench as command
from foredraft.errors import UserError
from foredraft.models.loading import Quantization, Target

ROOM = 300

runner = CliRunner()


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command in a folder with data and a drafter, and with the tiny target as its model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "load_target", lambda *_, **__: tiny_target(max_position_embeddings=ROOM))
    monkeypatch.setattr(command, "environment", lambda: {"processor": "abacus"})
    for name in ("gsm8k", "mbpp"):
        lines = [json.dumps({"turns": [turn]}) for turn in ("ab", "cab", f"{name[0]}.", "dd a")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    raw = dflash_json(max_position_embeddings=ROOM)
    write_dflash(tmp_path / "drafter", raw, dflash_tensors(raw))
    app = typer.Typer(rich_markup_mode="rich")
    app.command()(command.bench)
    return app


USUAL = ["tiny", "--data-dir", ".", "--dataset", "gsm8k,mbpp", "--drafter", "drafter"]


def test_runs_and_writes_what_the_contract_says(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/foredraft", "bench", "tiny", "--api-key", "secret"])
    options = ["--num-prompts", "3", "--concurrency", "1,2", "--num-speculative-tokens", "2,4", "--max-tokens", "10"]
    result = runner.invoke(app, [*USUAL, *options, "--method", "dflash", "--output", "f.json"])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "f.json").read_text())
    assert content["environment"] == {"processor": "abacus"}
    keys = ("dataset", "concurrency", "method", "num_speculative_tokens", "num_prompts")
    assert [tuple(run[key] for key in keys) for run in content["runs"]] == [
        (dataset, concurrency, method, n, 3)
        for concurrency in (1, 2)
        for dataset in ("gsm8k", "mbpp")
        for method, n in (("none", 0), ("dflash", 2), ("dflash", 4))
    ]
    assert all(run["identical_to_plain"] is True for run in content["runs"])
    assert all(run["dataset_source"] == "data-dir" for run in content["runs"])
    assert content["command"] == "foredraft bench tiny --api-key '***'"
    assert "Fastest N of each method: tiny, float64, concurrency 2" in result.stdout
    assert {(each["dataset"], each["method"]) for each in content["standings"]} == {
        (dataset, "dflash") for dataset in ("gsm8k", "mbpp", None)
    }


def test_each_quantization_is_compared_with_its_own_plain_decoding(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, quantization: Quantization, kernels: str) -> Target:
        assert kernels == "pytorch"
        target = tiny_target(seed=len(quantization), max_position_embeddings=ROOM)
        return replace(target, quantization=quantization)

    monkeypatch.setattr(command, "load_target", load)
    options = ["-N", "3", "--quick", "--quantization", "none,mxfp4", "--kernels", "pytorch", "--output", "f.json"]
    result = runner.invoke(app, [*USUAL, *options])
    assert result.exit_code == 0, result.output
    runs = json.loads(Path("f.json").read_text())["runs"]
    assert [(run["quantization"], run["method"]) for run in runs] == [
        (quantization, method) for quantization in ("none", "mxfp4") for _ in range(2) for method in ("none", "dflash")
    ]
    assert all(run["identical_to_plain"] is True for run in runs)


def test_methods_n_and_rules_are_swept_together(app: typer.Typer) -> None:
    """ngram needs no drafter, and can do an N that is too large for the drafter's block of six."""
    options = ["--method", "dflash,ngram", "-N", "3,6", "--acceptance-rule", "exact,rejection", "--temperature", "0.7"]
    result = runner.invoke(app, [*USUAL, *options, "--quick", "--output", "f.json", "--report", "made/report"])
    assert result.exit_code == 0, result.output
    assert "dflash proposes at most 5 tokens: left out for it is N = 6" in result.stderr
    runs = json.loads(Path("f.json").read_text())["runs"]
    rules = [
        (method, n, rule)
        for method, n in (("dflash", 3), ("ngram", 3), ("ngram", 6))
        for rule in ("exact", "rejection")
    ]
    assert [(run["method"], run["num_speculative_tokens"], run["acceptance_rule"]) for run in runs] == [
        ("none", 0, "exact"),
        *rules,
    ] * 2
    for run in runs:
        assert run["identical_to_plain"] is (True if run["acceptance_rule"] == "exact" else None)
    page = Path("made/report/report.html").read_text()
    assert "ngram (rejection)" in page
    assert {path.name for path in Path("made/report").iterdir()} == {
        *("report.html", "acceptance.png", "speedup.png", "acceptance-length.png")
    }


def test_auto_is_a_way_to_choose_n(app: typer.Typer) -> None:
    result = runner.invoke(app, [*USUAL, "-N", "2,auto", "--quick", "--output", "f.json"])
    assert result.exit_code == 0, result.output
    runs = json.loads(Path("f.json").read_text())["runs"]
    assert [run["num_speculative_tokens"] for run in runs] == [0, 2, "auto"] * 2
    assert all(run["identical_to_plain"] is True for run in runs)


def test_a_report_needs_matplotlib_and_says_so_first(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_target", refuse)
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    result = runner.invoke(app, [*USUAL, "--report", "made"])
    assert isinstance(result.exception, UserError)
    assert "pip install 'foredraft[report]'" in str(result.exception)
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("given", "methods", "found"),
    [
        ([], ["dflash", "mtp"], {}),
        (["d"], ["none", "dflash", "ngram"], {"dflash": "d"}),
        (["dflash=d", "mtp=x=y"], ["mtp", "dflash", "eagle3"], {"dflash": "d", "mtp": "x=y"}),
        (["a=b"], ["mtp"], {"mtp": "a=b"}),
        (["ngram=d"], ["dflash", "ngram"], {"ngram": "d"}),
    ],
)
def test_drafters_by_method(given: list[str], methods: list[str], found: dict[str, str]) -> None:
    assert command._drafters(given, methods) == found


@pytest.mark.parametrize(
    ("given", "methods", "complaint"),
    [
        (["d"], ["dflash", "mtp"], "--drafter METHOD=DIR"),
        (["d"], ["ngram"], "--drafter METHOD=DIR"),
        (["eagle3=d"], ["dflash", "mtp"], "eagle3 is not among the drafting methods of --method"),
        (["dflash=d", "e"], ["dflash"], "given twice for dflash"),
        (["dflash="], ["dflash"], "names no folder"),
    ],
)
def test_drafters_that_cannot_be_meant(given: list[str], methods: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        command._drafters(given, methods)


@pytest.mark.parametrize("key", [["--api-key", "secret"], ["--api-key=secret"]])
def test_the_command_is_kept_without_the_key(key: list[str]) -> None:
    assert command._command_line(["/x/foredraft", "bench", *key, "--dataset", "a b"]) == (
        f"foredraft bench {'--api-key ' if len(key) > 1 else ''}'{'***' if len(key) > 1 else '--api-key=***'}' "
        "--dataset 'a b'"
    )


@pytest.mark.parametrize("options", [["--quantization", "mxfp4"], ["--kernels", "native"]])
def test_a_server_has_settings_of_its_own(app: typer.Typer, options: list[str]) -> None:
    result = runner.invoke(app, ["auto", "--base-url", "http://127.0.0.1:9", *options])
    assert isinstance(result.exception, UserError)
    assert "leave them out with --base-url" in str(result.exception)


def test_quick_is_small(app: typer.Typer) -> None:
    result = runner.invoke(app, [*USUAL, "-N", "3", "--quick", "--output", "f.json"])
    assert result.exit_code == 0, result.output
    runs = json.loads(Path("f.json").read_text())["runs"]
    assert [(run["method"], run["num_prompts"], run["max_tokens"]) for run in runs] == [
        ("none", 2, 32),
        ("dflash", 2, 32),
    ] * 2


def refuse(*_: Any) -> Target:
    raise AssertionError("the model was loaded before the command line was checked")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--method", "dflsh"], "method 'dflsh' is not known; known: none, "),
        (["--method", "none,"], "--method is 'none,'"),
        (["--method", "none"], "--drafter drafter belongs to one method"),
        (["--dataset", "gsm8k,gsm9k"], "dataset 'gsm9k' is not known"),
        (["--dataset", "humaneval"], "humaneval.jsonl does not exist"),
        (["--concurrency", "1,0"], "--concurrency has '0'"),
        (["--concurrency", "many"], "--concurrency has 'many'"),
        (["--num-speculative-tokens", "-1"], "--num-speculative-tokens has '-1'"),
        (["--num-speculative-tokens", "3,max"], "--num-speculative-tokens has 'max'"),
        (["--acceptance-rule", "exact,loose"], "--acceptance-rule has 'loose', expected some of exact, rejection"),
        (["--report", "gsm8k.jsonl"], "gsm8k.jsonl is a file; name a folder"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--quantization", "none,int3"], "--quantization is 'int3', expected one of none, mxfp4, mxfp4-a16"),
        (["--kernels", "fast"], "--kernels is 'fast', expected one of auto, native, pytorch"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--output", "nowhere/f.json"], "does not exist"),
        (["--base-url", "http://localhost:8000"], "leave them out with --base-url"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, options: list[str], complaint: str
) -> None:
    monkeypatch.setattr(command, "load_target", refuse)
    result = runner.invoke(app, [*USUAL, *options])
    assert isinstance(result.exception, UserError), result.output
    assert complaint in str(result.exception)


def test_auto_needs_a_server(app: typer.Typer) -> None:
    result = runner.invoke(app, ["auto"])
    assert isinstance(result.exception, UserError)
    assert "--base-url" in str(result.exception)


def test_an_unreachable_server_is_a_failed_run(app: typer.Typer) -> None:
    result = runner.invoke(app, ["auto", "--base-url", "http://127.0.0.1:9", "--data-dir", ".", "--dataset", "mbpp"])
    assert result.exit_code == 1
    assert "no connection to http://127.0.0.1:9/v1/models" in result.stderr


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), BenchmarkError("the server left")])
def test_what_is_complete_is_kept(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, stop: BaseException) -> None:
    measure = local.measure

    def stopped(*arguments: Any) -> Iterator[list[Run]]:
        yield next(measure(*arguments))
        raise stop

    monkeypatch.setattr(local, "measure", stopped)
    result = runner.invoke(app, [*USUAL, "-N", "3", "--quick", "--output", "f.json"])
    assert result.exit_code == 1
    assert [run["dataset"] for run in json.loads(Path("f.json").read_text())["runs"]] == ["gsm8k", "gsm8k"]
    assert "gsm8k" in result.stdout
    assert "the runs above are complete" in result.stderr


def test_nothing_complete_leaves_an_older_file(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> Iterator[list[Run]]:
        raise KeyboardInterrupt
        yield []

    Path("f.json").write_text("older")
    monkeypatch.setattr(local, "measure", stopped)
    result = runner.invoke(app, [*USUAL, "-N", "3", "--quick", "--output", "f.json"])
    assert result.exit_code == 1
    assert "no run was complete" in result.stderr
    assert Path("f.json").read_text() == "older"


def test_help_teaches_by_example(app: typer.Typer) -> None:
    result = runner.invoke(app, ["--help"], terminal_width=200)
    assert result.exit_code == 0
    assert "foredraft bench smollm2-135m --quick" in result.stdout
    assert "foredraft bench auto --base-url http://localhost:8000/v1" in result.stdout
