"""foredraft in a process of its own: answers requests, one JSON object a line.

Each request has ``do``, the name of a function below, and its arguments.
"""

import faulthandler
import gc
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foredraft import LLM, SamplingParams
from foredraft.drafters.base import DraftRequest
from foredraft.models.batch import flat_batch
from foredraft.models.loading import Quantization
from foredraft.models.native import NativeDecoder
from foredraft.ops import native

ENGINES: dict[str, LLM] = {}
"""Engines of this process by name; all of them share one target."""


def open_target(model: str, quantization: Quantization) -> dict[str, Any]:
    """Load the target of this process, and make the engine ``plain``. Sizes in bytes."""
    ENGINES["plain"] = LLM(model, quantization=quantization, kernels="native")
    target = ENGINES["plain"].target.model
    assert isinstance(target.decoder, NativeDecoder)
    streamed = target.decoder.weight_bytes + target.head.nbytes
    apart = target.embeddings is not target.head
    return {
        "streamed_bytes": streamed,
        "weight_bytes": streamed + (target.embeddings.nbytes if apart else 0),
        "isa": native.isa(),
    }


def open_engine(name: str, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """Make another engine on the same target."""
    llm = LLM(ENGINES["plain"].target, speculative)
    ENGINES[name] = llm
    assert llm.speculation
    return {"num_speculative_tokens": llm.speculation.num_speculative_tokens}


def generate(
    prompts: Sequence[list[int]],
    max_tokens: int,
    engine: str = "plain",
    ignore_eos: bool = False,
    together: bool = False,
) -> dict[str, Any]:
    """Greedy answers, one after the other or all at once."""
    llm = ENGINES[engine]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
    begin = perf_counter()
    requests = [
        request
        for group in groups
        for request in llm.generate([{"prompt_token_ids": prompt} for prompt in group], params)
    ]
    seconds = perf_counter() - begin
    outputs = [request.outputs[0] for request in requests]
    return {
        "seconds": seconds,
        "decode_seconds": sum(r.metrics.seconds - r.metrics.time_to_first_token for r in requests),
        "decoded": sum(len(output.token_ids) - 1 for output in outputs),
        "token_ids": [output.token_ids for output in outputs],
        "rounds": [output.acceptance.rounds for output in outputs],
    }


def generate_rounds(prompts: Sequence[list[int]], max_tokens: int, engine: str) -> dict[str, Any]:
    """Greedy answers one after the other: of each the token ids, and how many of them each step brought."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    answers = []
    for prompt in prompts:
        updates = [update.token_ids for update in ENGINES[engine].stream({"prompt_token_ids": prompt}, params)]
        token_ids = [token for new in updates for token in new]
        answers.append({"token_ids": token_ids, "steps": [len(new) for new in updates if new]})
    return {"answers": answers}


@torch.inference_mode()
def replay(
    prompts: Sequence[list[int]], answers: Sequence[Mapping[str, Any]], engine: str, count: int
) -> dict[str, Any]:
    """What this drafter would have proposed in the rounds of other engines' answers, on their text.

    answers: of each ``token_ids``, and ``steps``, how many of them each step brought. Returns for each round of each
    answer how many of ``count`` draft tokens are what the answer has there.
    """
    llm = ENGINES[engine]
    target, drafter = llm.target.model, llm.drafter
    assert drafter
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer["token_ids"]]
        cache = target.new_cache()
        computed, known, kept = 0, len(prompt), []
        for step in answer["steps"][:-1]:
            known += step
            batch = flat_batch([tokens[computed : known - 1]], [computed], [0], [0], target.device)
            drafter.observe(batch, target.forward(batch, cache, drafter.taps).taps, [known - 1 - computed])
            computed = known - 1
            cache.commit(0, computed)
            draft = drafter.propose([DraftRequest(0, tokens[computed], computed)], count)[0].token_ids
            same = (mine == theirs for mine, theirs in zip(draft, tokens[known:], strict=False))
            kept.append(sum(takewhile(bool, same)))
        drafter.release(0)
        found.append(kept)
    return {"kept": found}


@torch.inference_mode()
def rows(counts: Sequence[int], context: int, repeats: int) -> dict[str, Any]:
    """Median seconds of a pass of the target over some rows of one sequence, after ``context`` positions."""
    target = ENGINES["plain"].target.model
    cache = target.new_cache()
    tokens = [(7919 * position) % 40000 + 100 for position in range(context + max(counts))]
    target.forward(flat_batch([tokens[:context]], [0], [0], [1]), cache)
    cache.commit(0, context)
    measured: dict[int, list[float]] = {count: [] for count in counts}
    batches = {count: flat_batch([tokens[context : context + count]], [context], [0]) for count in counts}
    for turn in range(repeats + 1):
        for count, batch in batches.items():
            begin = perf_counter()
            target.forward(batch, cache)
            if turn:
                measured[count].append(perf_counter() - begin)
    return {"seconds": {count: statistics.median(values) for count, values in measured.items()}}


@torch.inference_mode()
def score(windows: Sequence[list[int]]) -> dict[str, Any]:
    """Sum of negative log-likelihoods of the second half of each window, given what stands before in it.

    The rows of llama-perplexity: position n/2 to n-2 predict the token after each of them.
    """
    target = ENGINES["plain"].target.model
    cache = target.new_cache()
    total, count = 0.0, 0
    for window in windows:
        half = len(window) // 2
        wanted = len(window) - half
        logits = target.forward(flat_batch([window], [0], [0], [wanted]), cache).logits
        likelihoods = torch.log_softmax(logits[:-1].double(), dim=-1)
        total -= float(likelihoods[torch.arange(wanted - 1), torch.tensor(window[half + 1 :])].sum())
        count += wanted - 1
    return {"nll": total, "count": count}


def memory() -> dict[str, Any]:
    """Resident bytes of this process, Python and PyTorch included: now, at most since it began, and what is its own
    data and what are mapped files, such as libraries."""
    gc.collect()
    kinds = {"resident_bytes": "VmRSS", "peak_bytes": "VmHWM", "own_bytes": "RssAnon", "file_bytes": "RssFile"}
    return {name: status_bytes(field) for name, field in kinds.items()}


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


ANSWERS = {
    function.__name__: function
    for function in (open_target, open_engine, generate, generate_rounds, replay, rows, score, memory)
}


def main() -> None:
    faulthandler.enable()
    # Whatever else prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = ANSWERS[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
