"""foredraft bench: from options to a table, a file and an exit status."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny import dflash_json, dflash_tensors, tiny_target, write_dflash
from typer.testing import CliRunner

from foredraft.benchmark import local
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


def test_runs_and_writes_what_the_contract_says(app: typer.Typer, tmp_path: Path) -> None:
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
    assert "Best N of dflash at concurrency 2: gsm8k " in result.stdout
    assert result.stdout.count("dflash") == 8 + 2


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
        (["--method", "dflsh"], "method 'dflsh' is not known; known: none, dflash"),
        (["--method", "none,"], "--method is 'none,'"),
        (["--method", "none"], "--drafter belongs to one method"),
        (["--dataset", "gsm8k,gsm9k"], "dataset 'gsm9k' is not known"),
        (["--dataset", "humaneval"], "humaneval.jsonl does not exist"),
        (["--concurrency", "1,0"], "--concurrency has '0'"),
        (["--concurrency", "many"], "--concurrency has 'many'"),
        (["--num-speculative-tokens", "-1"], "--num-speculative-tokens has '-1'"),
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
