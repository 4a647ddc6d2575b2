"""foredraft train: a drafter for a target."""

import os
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.cli import options
from foredraft.drafters.checkpoints import default_taps, load_dflash
from foredraft.errors import UserError
from foredraft.models.loading import load_target
from foredraft.tokenizer import Tokenizer
from foredraft.training import dflash
from foredraft.training.data import frequent_tokens, load_examples, split_held_out
from foredraft.training.trainer import Progress as TrainProgress
from foredraft.training.trainer import TrainConfig, Trainer


def train(
    model: options.Model,
    data: Annotated[list[Path], typer.Option(help="Answers of the target, JSON lines (.gz too); repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of the drafter, its checkpoint and its log.")],
    method: Annotated[str, typer.Option(help="Drafting method: dflash.")] = "dflash",
    init: Annotated[Path | None, typer.Option(help="Start from this drafter instead of the target's layers.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 5000,
    answers_per_step: Annotated[int, typer.Option(help="Texts a step (and process).")] = 2,
    anchors: Annotated[int, typer.Option(help="Blocks a text and step.")] = 96,
    layers: Annotated[int, typer.Option(help="Drafter depth.")] = 3,
    block_sizes: Annotated[
        str, typer.Option(help="Trained block sizes, anchor included; the largest is shipped.")
    ] = "8",
    taps: Annotated[
        str | None,
        typer.Option(help="Target layers read, such as 1,10,19,26. \\[default: 4 spread evenly]", show_default=False),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Most frequent answer tokens the head predicts. \\[default: all]", show_default=False),
    ] = None,
    gamma: Annotated[float, typer.Option(help="Loss weight exp(-(k-1)/gamma) of block position k.")] = 4.0,
    distillation: Annotated[
        float, typer.Option(help="Share of the target's distribution in the labels, 0 to 1.")
    ] = 0.0,
    learning_rate: Annotated[float, typer.Option(help="At the plateau.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of rising learning rate.")] = 100,
    decay: Annotated[float, typer.Option(help="Last share of the steps, in which the learning rate falls to 0.")] = 0.3,
    max_prompt_tokens: Annotated[int, typer.Option(help="Texts with longer prompts are left out.")] = 512,
    max_answer_tokens: Annotated[int, typer.Option(help="Answers are cut here.")] = 256,
    held_out: Annotated[int, typer.Option(help="Texts kept for evaluation.")] = 64,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations and checkpoints.")] = 500,
    feature_cache_gb: Annotated[float, typer.Option(help="Memory for features of texts seen before.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the order of texts and of the anchors.")] = 0,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
) -> None:
    """Train a drafter on answers that the target wrote itself (see foredraft synthesize).

    Run again with the same options to go on from the last checkpoint; Ctrl-C writes one and stops.
    Several processes: torchrun --standalone --nproc-per-node 4 -m foredraft train ...

    Example:

      foredraft train smollm2-135m --method dflash --data answers.jsonl --output runs/dflash --steps 3000
    """
    if method != "dflash":
        raise UserError(f"method {method!r} cannot be trained; known: dflash")
    config = TrainConfig(
        steps=steps,
        answers_per_step=answers_per_step,
        learning_rate=learning_rate,
        warmup=warmup,
        decay=decay,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=evaluate_every,
        feature_cache_bytes=int(feature_cache_gb * 2**30),
    )
    console = Console(stderr=True)
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    target = load_target(model, options.dtype(dtype), device, kernels="pytorch")
    tokenizer = target.tokenizer
    examples = load_examples(data, tokenizer, max_answer_tokens, max_prompt_tokens)
    train_set, held_out_set = split_held_out(examples, held_out)
    console.print(f"{len(train_set)} answers to train on, {len(held_out_set)} held out")
    vocab = None
    if draft_vocab_size is not None:
        vocab, covered = frequent_tokens(train_set, draft_vocab_size, tokenizer.eos_token_ids)
        console.print(f"the head's {len(vocab)} tokens are {covered:.2%} of what the target wrote")
    recipe = dflash.DFlashRecipe(
        layers=layers,
        block_sizes=_integers(block_sizes, "--block-sizes"),
        taps=_integers(taps, "--taps") if taps else default_taps(target.model.config.num_layers, 4),
        mask_token_id=_mask_token(tokenizer),
        gamma=gamma,
        distillation=distillation,
        anchors=anchors,
    )
    if init is None:
        start = dflash.initial_drafter(target.model, recipe, vocab, train_set[0].tokens)
    else:
        start = load_dflash(init, torch.float32)
    output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        target.model,
        dflash.DFlashObjective(target.model, *start, recipe),
        train_set,
        held_out_set,
        config,
        output,
        {"method": method, "model": model, "examples": len(train_set), "init": str(init), **asdict(recipe)},
    )
    if trainer.step:
        console.print(f"going on from step {trainer.step}")
    with _Display(console, steps, quiet=trainer.rank > 0) as display:
        finished = trainer.run(display.report, display.interrupted)
    console.print(f"{'finished' if finished else 'stopped'} at step {trainer.step}; the drafter is in {output}")
    if not finished:
        raise typer.Exit(1)


class _Display:
    """Progress on the terminal, and Ctrl-C as a wish to stop after the running step."""

    def __init__(self, console: Console, steps: int, quiet: bool) -> None:
        columns = (
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._progress = Progress(*columns, console=console, disable=quiet)
        self._task = self._progress.add_task("step", total=steps, figures="")
        self._stop = False

    def __enter__(self) -> "_Display":
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        signal.signal(signal.SIGINT, self._previous)

    def interrupted(self) -> bool:
        return self._stop

    def report(self, now: TrainProgress) -> None:
        accuracy = " ".join(f"{100 * value:.0f}" for value in now.accuracy)
        figures = f"loss {now.loss:.3f}  τ {now.acceptance_length:.2f}  accuracy % {accuracy}"
        self._progress.update(self._task, completed=now.step, figures=figures)
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"step {now.step}  {figures}  {now.seconds_per_step:.2f} s", soft_wrap=True)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._stop = True


def _integers(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"{name} is {text!r}, expected integers such as 1,10,19") from error


def _mask_token(tokenizer: Tokenizer) -> int:
    """A special token that ordinary text never holds: the last one that neither ends nor begins anything."""
    in_use = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
    free = [token for token in tokenizer.special_ids if token not in in_use]
    if not free:
        raise UserError("the tokenizer has no unused special token that could be the mask")
    return max(free)
