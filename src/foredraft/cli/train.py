"""foredraft train: a drafter for a target."""

import math
import os
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.cli import options
from foredraft.drafters.checkpoints import default_taps
from foredraft.drafters.dspark import MarkovKind
from foredraft.errors import UserError
from foredraft.models.configuration import read_json
from foredraft.models.loading import load_target
from foredraft.tokenizer import Tokenizer
from foredraft.training.data import frequent_tokens, load_examples, split_held_out
from foredraft.training.features import FeatureSource, FeatureStore
from foredraft.training.losses import Mixture
from foredraft.training.methods import MARKOV_OPTIONS, OBJECTIVES, Start, is_dflash
from foredraft.training.recipe import Recipe
from foredraft.training.trainer import Progress as TrainProgress
from foredraft.training.trainer import TrainConfig, Trainer


def train(
    model: options.Model,
    data: Annotated[list[Path], typer.Option(help="Answers of the target, JSON lines (.gz too); repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of the drafter, its checkpoint and its log.")],
    method: Annotated[str, typer.Option(help="Drafting method: mtp, gemma4_mtp, eagle3, dflash or dspark.")] = "dflash",
    init: Annotated[
        Path | None,
        typer.Option(help="Start from this drafter (dspark: or a dflash one), not from the target's layers."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 5000,
    answers_per_step: Annotated[int, typer.Option(help="Texts a step (and process).")] = 2,
    anchors: Annotated[int, typer.Option(help="Blocks a text and step.")] = 96,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Drafter depth. \\[default: the method's]", show_default=False)
    ] = None,
    draft_tokens: Annotated[
        str, typer.Option(help="Numbers of draft tokens trained, one drawn a step; the largest limits a block drafter.")
    ] = "7",
    taps: Annotated[
        str | None,
        typer.Option(help="Target layers read, such as 1,10,19,26. \\[default: the method's]", show_default=False),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Most frequent answer tokens the head predicts. \\[default: all]", show_default=False),
    ] = None,
    gamma: Annotated[float, typer.Option(help="Loss weight exp(-(k-1)/gamma) of block position k.")] = 4.0,
    loss: Annotated[
        str | None,
        typer.Option(
            help="Weights of the cross-entropies with token and with the target's distribution, and of the distance "
            "of the distributions. \\[default: 1,0,0; dspark: 0.1,0,0.9]",
            show_default=False,
        ),
    ] = None,
    markov_rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of dspark's Markov head. \\[default: 64]", show_default=False)
    ] = None,
    markov_kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of dspark's Markov head: vanilla, gated or rnn. \\[default: vanilla]", show_default=False
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="At the plateau.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of rising learning rate.")] = 100,
    decay: Annotated[float, typer.Option(help="Last share of the steps, in which the learning rate falls to 0.")] = 0.3,
    max_prompt_tokens: Annotated[int, typer.Option(help="Texts with longer prompts are left out.")] = 512,
    max_answer_tokens: Annotated[int, typer.Option(min=2, help="Answers are cut here.")] = 256,
    held_out: Annotated[int, typer.Option(min=0, help="Texts kept for evaluation.")] = 64,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations and checkpoints.")] = 500,
    feature_cache_gb: Annotated[
        float, typer.Option(min=0, max=1e6, help="Memory for features of texts seen before.")
    ] = 4.0,
    feature_dir: Annotated[
        Path | None,
        typer.Option(help="Keep the target's features on disk, for several runs over the same texts."),
    ] = None,
    feature_taps: Annotated[
        str | None,
        typer.Option(help="Layers kept in --feature-dir. \\[default: those that this run needs]", show_default=False),
    ] = None,
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
    if method not in OBJECTIVES:
        raise UserError(f"method {method!r} cannot be trained; known: {', '.join(OBJECTIVES)}")
    options.check_folder(output)
    if feature_dir is not None:
        options.check_folder(feature_dir, "--feature-dir")
    known = OBJECTIVES[method]
    shape = {
        "--layers": layers,
        "--taps": taps,
        "--markov-rank": markov_rank,
        "--markov-kind": markov_kind,
        "--draft-vocab-size": draft_vocab_size,
    }
    _check_shape(method, init, {name for name, value in shape.items() if value is not None})
    if feature_taps is not None and feature_dir is None:
        raise UserError("--feature-taps says what --feature-dir keeps; give that too, or leave it out")
    markov_rank, markov = markov_rank or 64, _kind(markov_kind or "vanilla")
    if math.isnan(feature_cache_gb):
        raise UserError("--feature-cache-gb is nan, expected a number")
    config = TrainConfig(
        steps=steps,
        answers_per_step=answers_per_step,
        learning_rate=learning_rate,
        warmup=warmup,
        decay=decay,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=evaluate_every,
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
    base = target.model.config
    recipe = Recipe(
        layers=layers or known.layers,
        drafts=_integers(draft_tokens, "--draft-tokens"),
        taps=_integers(taps, "--taps") if taps else default_taps(base.num_layers, known.taps),
        mask_token_id=_mask_token(tokenizer),
        gamma=gamma,
        mixture=_mixture(loss) if loss else known.mixture,
        anchors=anchors,
    )
    recipe.check()
    if init is None:
        recipe.check_shape(base)
    objective = known.build(target.model, recipe, Start(init, vocab, train_set[0].tokens, markov_rank, markov))
    store = None
    if feature_dir is not None:
        kept = _integers(feature_taps, "--feature-taps") if feature_taps else objective.taps
        needed = FeatureStore.bytes_needed(examples, kept, base.hidden_size)
        console.print(
            f"features of layers {', '.join(map(str, kept))} go to {feature_dir}: "
            f"{needed / 1e9:.1f} GB once all {len(examples)} texts have been seen"
        )
        store = FeatureStore(feature_dir, model, kept, base.hidden_size, examples)
    output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        FeatureSource(target.model, objective.taps, int(feature_cache_gb * 2**30), store),
        objective,
        train_set,
        held_out_set,
        config,
        output,
        {
            "method": method,
            "model": model,
            "examples": len(train_set),
            "init": str(init),
            **_before(init),
            **({"markov_rank": markov_rank, "markov_kind": markov} if method == "dspark" else {}),
            # With --init these come from the drafter there.
            **{name: value for name, value in asdict(recipe).items() if init is None or name not in SHAPE},
        },
    )
    if trainer.step:
        console.print(f"going on from step {trainer.step}")
    with _Display(console, steps, quiet=trainer.rank > 0) as display:
        finished = trainer.run(display.report, display.interrupted)
    console.print(f"{'finished' if finished else 'stopped'} at step {trainer.step}; the drafter is in {output}")
    if not finished:
        raise typer.Exit(1)


def _before(init: Path | None) -> dict[str, Any]:
    """The log of the training that made the drafter in ``init``, for the log of what is made from it."""
    file = init / "training.json" if init else None
    return {"before": read_json(file)} if file and file.is_file() else {}


SHAPE = ("layers", "taps", "mask_token_id")
"""Fields of a recipe that only a new drafter takes from it."""


def _check_shape(method: str, init: Path | None, given: set[str]) -> None:
    """Raise UserError for options of a drafter's shape, among ``given``, that would have no effect."""
    open_ones = OBJECTIVES[method].choices | {"--draft-vocab-size"}
    if useless := sorted(given - open_ones):
        raise UserError(f"{method} has no choice of {', '.join(useless)}; leave that out")
    if init is not None:
        if not (init / "config.json").is_file():
            raise UserError(f"--init {init}: no drafter there (config.json is missing)")
        new = MARKOV_OPTIONS if method == "dspark" and is_dflash(init) else frozenset()
        if useless := sorted(given - new):
            raise UserError(f"--init {init} has a shape already; leave out {', '.join(useless)}")


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


def _mixture(text: str) -> Mixture:
    try:
        token, soft, distance = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--loss is {text!r}, expected three numbers such as 0.5,0.5,0") from error
    return Mixture(token, soft, distance)


def _kind(text: str) -> MarkovKind:
    for kind in get_args(MarkovKind):
        if kind == text:
            return kind  # type: ignore[no-any-return]
    raise UserError(f"--markov-kind is {text!r}, expected one of {', '.join(get_args(MarkovKind))}")


def _mask_token(tokenizer: Tokenizer) -> int:
    """A special token that ordinary text never holds: the last one that neither ends nor begins anything."""
    in_use = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
    free = [token for token in tokenizer.special_ids if token not in in_use]
    if not free:
        raise UserError("the tokenizer has no unused special token that could be the mask")
    return max(free)
