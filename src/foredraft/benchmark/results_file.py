"""The JSON file of a benchmark: written whole, read with every field checked."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from foredraft.benchmark.comparison import standings
from foredraft.benchmark.results import Condition, Run
from foredraft.errors import UserError


@dataclass(frozen=True)
class Results:
    """environment: see ``machine.environment``. command: the command line that made them, None in older files."""

    environment: Mapping[str, Any]
    runs: list[Run]
    command: str | None = None


def check_output(path: Path) -> None:
    """Raise UserError, before any work, where results cannot be written to ``path``."""
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file name such as {path / 'bench.json'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"--output {path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {path}: the folder {folder} is not writable")


def write_results(path: Path, results: Results) -> None:
    """Write a results file at once, so that a reader, or a crash, never meets half of one."""
    content = {
        "command": results.command,
        "environment": dict(results.environment),
        "runs": [run.as_json() for run in results.runs],
        "standings": [_flat(asdict(standing)) for standing in standings(results.runs)],
    }
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_results(path: Path) -> Results:
    """A file that ``write_results`` made, by this version or an older one.

    Raises UserError naming the file and the field that is not as it should be.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as a results file: {error}") from error
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, list) or not runs:
        raise UserError(f"{path} is not a results file of `foredraft bench`: it needs `runs`, a list of at least one")
    environment, command = content.get("environment"), content.get("command")
    return Results(
        environment=environment if isinstance(environment, dict) else {},
        runs=[_run(f"{path}, run {number}", run) for number, run in enumerate(runs, 1)],
        command=command if isinstance(command, str) else None,
    )


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")


def _run(place: str, value: Any) -> Run:
    if not isinstance(value, dict):
        raise UserError(f"{place} is {value!r}, expected a JSON object")
    condition = _parsed(place, Condition, value)
    run: Run = _parsed(place, Run, {**value, "condition": condition})
    return run


def _parsed(place: str, hint: Any, value: Any) -> Any:
    """``value`` as the type that ``hint`` names; a field that may be null may also be absent."""
    options = (hint,) if get_origin(hint) in (None, list, Literal) else get_args(hint)
    for option in options:
        if _fits(option, value):
            return _inside(place, option, value)
    raise UserError(f"{place} is {value!r}, expected {' or '.join(_words(option) for option in options)}")


def _inside(place: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is list:
        (inner,) = get_args(hint)
        return [_parsed(f"{place} [{index}]", inner, each) for index, each in enumerate(value)]
    if is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        named = {name: _parsed(f"{place}: {name}", each, value.get(name)) for name, each in hints.items()}
        return hint(**named)  # type: ignore[operator]
    return value


def _fits(hint: Any, value: Any) -> bool:
    """Whether ``value`` is of that kind; ``_inside`` looks at what it holds."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list)
    if is_dataclass(hint):
        return isinstance(value, dict | hint)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _words(hint: Any) -> str:
    names: dict[Any, str] = {
        float: "a number",
        int: "an integer",
        str: "a string",
        bool: "true or false",
        type(None): "null",
        Literal["auto"]: '"auto"',
    }
    return names.get(hint, "a list" if get_origin(hint) is list else "a JSON object")


def _flat(standing: dict[str, Any]) -> dict[str, Any]:
    setting, series = standing.pop("setting"), standing.pop("series")
    return {**setting, **series, **standing}
