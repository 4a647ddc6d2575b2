"""Perplexity of the same text under every kind of weights, computed alike."""

import math
from typing import Any

from engines import EngineError, llama_perplexity, llama_tokens
from sections import QUANTIZATIONS, Bench

from foredraft.benchmark.workloads import NAMES, load_workload
from foredraft.models.gguf import GGUFFile
from foredraft.models.loading import EMBEDDED, embedded_file
from foredraft.tokenizer import Tokenizer

WINDOW = 512
TOKENS = 30_000


def perplexity(bench: Bench) -> dict[str, Any]:
    """``perplexity`` by engine over the prompts of the five workloads, on which nothing here was trained.

    llama-perplexity's rules: windows of 512 tokens without overlap, no BOS since the model wants none, and in each
    window the tokens 257 to 511 (counted from 0) judged. Raises EngineError if llama.cpp cuts the text otherwise.
    """
    text = bench.work / "perplexity.txt"
    tokenizer = Tokenizer.from_gguf(GGUFFile(embedded_file()).metadata)
    text.write_text(_text(bench, tokenizer), encoding="utf-8")
    tokens = tokenizer.encode(text.read_text(encoding="utf-8"))
    windows = [tokens[begin : begin + WINDOW] for begin in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    found: dict[str, float] = {}
    if bench.llama:
        if llama_tokens(bench.llama, bench.weights.ggufs["BF16"], text) != tokens:
            raise EngineError(f"llama.cpp and foredraft cut {text} into different tokens")
        for kind, path in bench.weights.ggufs.items():
            bench.told(f"perplexity of llama.cpp {kind}")
            found[f"llama.cpp {kind}"], count = llama_perplexity(bench.llama, bench.threads, path, text, WINDOW)
            if count != len(windows):
                raise EngineError(f"llama-perplexity took {count} windows, not {len(windows)}")
    for precision in QUANTIZATIONS:
        if not precision.startswith(tuple(bench.precisions)):
            continue
        worker, _ = bench.foredraft(precision, EMBEDDED)
        with worker:
            bench.told(f"perplexity of foredraft {precision}")
            scored = worker.ask("score", windows=windows)
        found[f"foredraft {precision}"] = math.exp(scored["nll"] / scored["count"])
    judged = len(windows) * (WINDOW - WINDOW // 2 - 1)
    return {"perplexity": found, "tokens": len(tokens), "windows": len(windows), "judged": judged}


def _text(bench: Bench, tokenizer: Tokenizer) -> str:
    """First turns of the workloads in turns, until there are enough tokens."""
    workloads = [load_workload(name, bench.data_dir, 10**6).conversations for name in NAMES]
    pieces: list[str] = []
    count, number = 0, 0
    while count < TOKENS and any(number < len(own) for own in workloads):
        for own in workloads:
            if number < len(own):
                pieces.append(own[number][0].strip())
                count += len(tokenizer.encode(pieces[-1]))
        number += 1
    return "\n\n".join(pieces)
