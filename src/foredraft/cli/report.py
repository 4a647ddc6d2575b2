"""foredraft report: the page and the pictures of a benchmark that has run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from foredraft.benchmark.report import check_report, write_report
from foredraft.benchmark.results_file import read_results


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="What bench --output wrote.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Folder for report.html and the plots (PNG); made if it is not there.")],
) -> None:
    """Make a page and plots from the results of a benchmark: which method, which N, on which workload.

    The page is one file that needs no other and no network.

    Example:

      foredraft bench smollm2-135m --num-speculative-tokens 3,5,7 --output bench.json

      foredraft report bench.json --output ./comparison
    """
    found = read_results(results)
    check_report(output)
    page = write_report(output, found)
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[dim]Written to {escape(str(page))}[/]")
