"""The ``foredraft`` command: its subcommands, and what an error becomes."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from foredraft import __version__
from foredraft.cli.bench import bench
from foredraft.cli.calibrate import calibrate
from foredraft.cli.chat import chat
from foredraft.cli.demo import demo
from foredraft.cli.export import export
from foredraft.cli.generate import generate
from foredraft.cli.quantize import quantize
from foredraft.cli.report import report
from foredraft.cli.serve import serve
from foredraft.cli.synthesize import synthesize
from foredraft.cli.train import train
from foredraft.errors import UserError

app = typer.Typer(
    name="foredraft",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Speculative decoding that one can trust: faster, and the same text.

Try it on the embedded model:

  foredraft generate smollm2-135m --prompt "Write a haiku about rivers." --method dflash

  foredraft chat smollm2-135m

  foredraft bench smollm2-135m --method none,dflash --dataset gsm8k,humaneval
""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for command in (demo, generate, chat, serve, bench, report, train, synthesize, calibrate, quantize, export):
    app.command()(command)


INTERRUPTED = 130
"""What typer makes of Ctrl-C."""


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 the run failed, 2 the command line or an input is wrong."""
    try:
        app(prog_name="foredraft")
    except UserError as error:
        message = escape(" ".join(str(error).split()))
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]Error:[/] {message}")
        sys.exit(2)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            Console(stderr=True).print("Interrupted.")
            sys.exit(1)
        raise
