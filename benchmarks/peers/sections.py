"""What is measured: one function a section, each giving the series of its engines."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from engines import Command, EngineError, Generated, LlamaServer, Worker, llama_bench
from rounds import Turn, in_turns
from weights import Weights135M, tensor_bytes, write_large, write_large_gguf

from foredraft.benchmark.machine import MIB, last_level_cache, read_bandwidth
from foredraft.benchmark.workloads import NAMES, load_workload
from foredraft.models.gguf import GGUFFile
from foredraft.models.loading import EMBEDDED, embedded_file
from foredraft.tokenizer import Tokenizer

HERE = Path(__file__).parent
QUANTIZATIONS = {"bf16": "none", "mxfp4": "mxfp4", "mxfp4-a16": "mxfp4-a16"}
"""What ``--quantization`` calls foredraft's precisions. The last one, weight-only, is for perplexity."""

ROW_COUNTS = (1, 2, 4, 8, 16)
ROW_CONTEXT = 256
PREFILL_TOKENS = 512
REQUESTS = 32
WITH_PROMPTS = " (with prompts)"
NGRAM_METHODS = ("ngram-simple", "ngram-mod", "ngram-cache")


@dataclass(frozen=True)
class Bench:
    """Everything a section needs. llama, vllm: the folder of llama.cpp's programs, vLLM's Python; None if absent."""

    work: Path
    llama: Path | None
    vllm: Path | None
    weights: Weights135M
    precisions: Sequence[str]
    numbers_of_tokens: Sequence[int]
    repeats: int
    max_tokens: int
    prompts_per_workload: int
    data_dir: Path | None
    threads: int
    told: Callable[[str], None]
    commands: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def foredraft(self, precision: str, model: str) -> tuple[Worker, dict[str, Any]]:
        """A process with one target and an engine ``plain`` on it, and what it says of the target."""
        self.told(f"loading foredraft {precision}")
        command: Command = [sys.executable, HERE / "worker.py"]
        worker = Worker(command, self.work / f"foredraft-{precision}.log")
        try:
            opened = worker.ask("open_target", model=model, quantization=QUANTIZATIONS[precision])
        except BaseException:
            worker.__exit__()
            raise
        return worker, opened

    def server(self, kind: str, *, slots: int = 1, extra: Sequence[str] = ()) -> LlamaServer:
        assert self.llama
        name = "-".join(["llama-server", kind, str(slots), *(each for each in extra if "/" not in each)])
        log = self.work / f"{name.replace(' ', '-').replace('---', '-')}.log"
        self.told(f"loading {name}")
        server = LlamaServer(self.llama, self.threads, self.weights.ggufs[kind], log, slots=slots, extra=extra)
        self.commands[name] = server.command
        return server

    def prompts(self, count: int) -> dict[str, list[list[int]]]:
        """Prompt token ids of the first turns of ``count`` conversations of each workload."""
        tokenizer = Tokenizer.from_gguf(GGUFFile(embedded_file()).metadata)
        loaded = [load_workload(name, self.data_dir, count) for name in NAMES]
        return {
            each.name: [tokenizer.encode_chat([{"role": "user", "content": turns[0]}]) for turns in each.conversations]
            for each in loaded
        }


Section = dict[str, Any]
"""``series``: by engine; and whatever else the section found."""


def plain(bench: Bench) -> Section:
    """128 tokens of one request after almost no prompt, as llama-bench's tg128, and the share of bandwidth."""
    with ExitStack() as stack:
        turns: dict[str, Turn] = {"bandwidth": bandwidth(bench)}
        streamed: dict[str, int] = {}
        for precision in bench.precisions:
            worker, opened = bench.foredraft(precision, EMBEDDED)
            stack.enter_context(worker)
            name = f"foredraft {precision}"
            streamed[name] = opened["streamed_bytes"]
            turns[name] = partial(_tokens_after_one, worker, name, 128)
        if bench.llama:
            for kind, path in bench.weights.ggufs.items():
                name = f"llama.cpp {kind}"
                streamed[name] = tensor_bytes(path)
                turns[name] = partial(_llama_bench, bench, name, path, ("-p", "0", "-n", "128", "-r", "1"))
        return {"series": in_turns(turns, bench.repeats, bench.told), "streamed_bytes": streamed}


def speculation(bench: Bench) -> Section:
    """Answers to prompts of the five workloads, one request at a time; decoding speed after the first token."""
    prompts = bench.prompts(bench.prompts_per_workload)
    flat = [prompt for own in prompts.values() for prompt in own]
    lengths: dict[str, dict[str, float]] = {}
    answers: dict[str, list[list[int]]] = {}

    def turn(name: str, run: Callable[[], Generated]) -> Mapping[str, float]:
        generated = run()
        answers.setdefault(name, generated.token_ids)
        lengths[name] = _acceptance_lengths(prompts, generated)
        return {
            name: generated.decoded / generated.decode_seconds,
            f"{name}{WITH_PROMPTS}": generated.tokens / generated.seconds,
        }

    with ExitStack() as stack:
        turns: dict[str, Turn] = {}
        plain_of: dict[str, str] = {}
        for precision in bench.precisions:
            worker, _ = bench.foredraft(precision, EMBEDDED)
            stack.enter_context(worker)
            for count in (0, *bench.numbers_of_tokens):
                name = f"foredraft {precision}" + (f" DFlash N={count}" if count else "")
                plain_of[name] = f"foredraft {precision}"
                engine = f"dflash-{count}" if count else "plain"
                if count:
                    speculative = {"method": "dflash", "num_speculative_tokens": count}
                    worker.ask("open_engine", name=engine, speculative=speculative)
                turns[name] = partial(
                    turn, name, partial(worker.generate, flat, engine=engine, max_tokens=bench.max_tokens)
                )
        for name, kind, extra in _llama_variants(bench):
            server = stack.enter_context(bench.server(kind, extra=extra))
            plain_of[name] = f"llama.cpp {kind}"
            turns[name] = partial(turn, name, partial(server.generate, flat, max_tokens=bench.max_tokens))
        for run in turns.values():
            run()
        series = in_turns(turns, bench.repeats, bench.told)
    identical = {
        name: sum(a == b for a, b in zip(answers[name], answers[own], strict=True))
        for name, own in plain_of.items()
        if name != own and own in answers
    }
    return {
        "series": series,
        "acceptance_lengths": lengths,
        "identical_to_plain": {"of": len(flat), **identical},
    }


def prefill(bench: Bench) -> Section:
    """One prompt of 512 tokens; foredraft's time is that to the first token."""
    prompt = [(7919 * position) % 40000 + 100 for position in range(PREFILL_TOKENS)]
    with ExitStack() as stack:
        turns: dict[str, Turn] = {}

        def first_token(worker: Worker, name: str) -> Mapping[str, float]:
            worker.generate([prompt], max_tokens=1)
            repeated = worker.generate([prompt] * 3, max_tokens=1)
            return {name: 3 * PREFILL_TOKENS / repeated.seconds}

        for precision in bench.precisions:
            worker, _ = bench.foredraft(precision, EMBEDDED)
            stack.enter_context(worker)
            turns[f"foredraft {precision}"] = partial(first_token, worker, f"foredraft {precision}")
        if bench.llama:
            for kind, path in bench.weights.ggufs.items():
                for label, flags in (("", ()), (" -fa 0 -ub 256", ("-fa", "0", "-ub", "256"))):
                    name = f"llama.cpp {kind}{label}"
                    test = ("-p", str(PREFILL_TOKENS), "-n", "0", "-r", "3", *flags)
                    turns[name] = partial(_llama_bench, bench, name, path, test)
        return {"series": in_turns(turns, bench.repeats, bench.told)}


def batch(bench: Bench) -> Section:
    """32 requests at once, every answer of the same length; tokens of all of them over the wall time."""
    workloads = bench.prompts(-(-REQUESTS // len(NAMES)))
    prompts = [prompt for own in zip(*workloads.values(), strict=True) for prompt in own][:REQUESTS]
    wanted: dict[str, Any] = {"max_tokens": bench.max_tokens, "ignore_eos": True}

    def turn(name: str, run: Callable[[], Generated]) -> Mapping[str, float]:
        generated = run()
        if generated.tokens != REQUESTS * bench.max_tokens:
            raise EngineError(f"{name} gave {generated.tokens} tokens, not {REQUESTS} times {bench.max_tokens}")
        return {name: generated.tokens / generated.seconds}

    with ExitStack() as stack:
        turns: dict[str, Turn] = {}
        for precision in bench.precisions:
            worker, _ = bench.foredraft(precision, EMBEDDED)
            stack.enter_context(worker)
            run = partial(worker.generate, prompts, together=True, **wanted)
            turns[f"foredraft {precision}"] = partial(turn, f"foredraft {precision}", run)
        if bench.vllm:
            bench.told("loading vLLM")
            script: Command = [bench.vllm, HERE / "vllm_worker.py"]
            vllm = stack.enter_context(Worker(script, bench.work / "vllm.log", **vllm_environment(bench.threads)))
            opened = vllm.ask("open_target", model=str(bench.weights.folder), max_model_len=2048)
            bench.notes.append(
                f"vLLM CPU {opened['version']}, bfloat16, one process with {bench.threads} threads, prefix caching off"
            )
            turns["vLLM bf16"] = partial(turn, "vLLM bf16", partial(vllm.generate, prompts, together=True, **wanted))
        if bench.llama:
            for kind in ("BF16", "Q4_0"):
                server = stack.enter_context(bench.server(kind, slots=REQUESTS))
                run = partial(server.generate, prompts, **wanted)
                turns[f"llama.cpp {kind}"] = partial(turn, f"llama.cpp {kind}", run)
        for warm_up in turns.values():
            warm_up()
        return {"series": in_turns(turns, bench.repeats, bench.told)}


def rows(bench: Bench) -> Section:
    """Milliseconds of a pass of the target over 1 to 16 rows of one sequence at a context of 256."""
    with ExitStack() as stack:
        turns: dict[str, Turn] = {}

        def steps(worker: Worker, name: str) -> Mapping[str, float]:
            seconds = worker.ask("rows", counts=ROW_COUNTS, context=ROW_CONTEXT, repeats=10)["seconds"]
            return {f"{name}, {count} rows": 1e3 * seconds[str(count)] for count in ROW_COUNTS}

        for precision in bench.precisions:
            worker, _ = bench.foredraft(precision, EMBEDDED)
            stack.enter_context(worker)
            turns[f"foredraft {precision}"] = partial(steps, worker, f"foredraft {precision}")
        return {"series": in_turns(turns, bench.repeats, bench.told)}


def large(bench: Bench, keep: bool) -> Section:
    """A random model of the shape of Qwen3-1.7B: share of the bandwidth at one row, and resident memory."""
    bench.told("writing the random 1.7B model (3.4 GB)")
    folder = write_large(bench.work)
    file = bench.work / "qwen3-1.7b-random-bf16.gguf"
    try:
        with ExitStack() as stack:
            turns: dict[str, Turn] = {"bandwidth": bandwidth(bench)}
            streamed: dict[str, int] = {}
            workers: dict[str, tuple[Worker, int]] = {}
            for precision in bench.precisions:
                worker, opened = bench.foredraft(precision, str(folder))
                stack.enter_context(worker)
                name = f"foredraft {precision}"
                workers[name] = worker, opened["weight_bytes"]
                streamed[name] = opened["streamed_bytes"]
                turns[name] = partial(_tokens_after_one, worker, name, 32)
            if bench.llama:
                if not file.exists():
                    bench.told("writing the random 1.7B model for llama.cpp")
                    write_large_gguf(folder, file)
                streamed["llama.cpp BF16"] = tensor_bytes(file)
                test = ("-p", "0", "-n", "32", "-r", "1")
                turns["llama.cpp BF16"] = partial(_llama_bench, bench, "llama.cpp BF16", file, test)
            series = in_turns(turns, bench.repeats, bench.told)
            memory = {name: {**worker.ask("memory"), "weight_bytes": size} for name, (worker, size) in workers.items()}
        return {"series": series, "streamed_bytes": streamed, "memory": memory}
    finally:
        if not keep:
            file.unlink(missing_ok=True)
            shutil.rmtree(folder)


def bandwidth(bench: Bench) -> Turn:
    """Measures how fast memory is read: a small C++ program if there is a compiler, else PyTorch's sum."""
    size = max(512, 8 * last_level_cache() // MIB)
    program = bench.work / "bandwidth"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        bench.notes.append("no C++ compiler: the read bandwidth is that of a sum in PyTorch")
        return lambda: {"bandwidth": read_bandwidth(size * MIB)}
    flags = ("-std=c++20", "-O3", "-march=native", "-pthread")
    subprocess.run([compiler, *flags, HERE / "bandwidth.cpp", "-o", program], check=True)

    def measured() -> Mapping[str, float]:
        arguments: Command = [program, str(bench.threads), str(size), "5"]
        return {"bandwidth": float(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)}

    return measured


def vllm_environment(threads: int) -> dict[str, str]:
    """In one process with a thread on every core: of its own accord vLLM keeps a core for serving, which leaves it
    one of two, and takes half as many tokens a second."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _tokens_after_one(worker: Worker, name: str, count: int) -> Mapping[str, float]:
    worker.generate([[1]], max_tokens=4, ignore_eos=True)
    return {name: count / worker.generate([[1]], max_tokens=count, ignore_eos=True).seconds}


def _llama_bench(bench: Bench, name: str, path: Path, test: Sequence[str]) -> Mapping[str, float]:
    assert bench.llama
    return {name: llama_bench(bench.llama, bench.threads, path, *test)}


def _acceptance_lengths(prompts: Mapping[str, Sequence[list[int]]], generated: Generated) -> dict[str, float]:
    """By workload: tokens a round, the first token of each answer left out."""
    assert generated.rounds
    counts = zip(generated.token_ids, generated.rounds, strict=True)
    lengths = {}
    for workload, own in prompts.items():
        tokens, passes = zip(*((len(tokens) - 1, passes) for tokens, passes in islice(counts, len(own))), strict=True)
        lengths[workload] = sum(tokens) / max(sum(passes), 1)
    return lengths


def _llama_variants(bench: Bench) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, type of the weights and extra arguments of each server."""
    if bench.llama is None:
        return []
    variants: list[tuple[str, str, tuple[str, ...]]] = [
        (f"llama.cpp {kind}", kind, ()) for kind in ("BF16", "Q8_0", "Q4_1", "Q4_0", "Q4_0 pure")
    ]
    for kind, drafter in (("BF16", "BF16"), ("Q4_0", "Q8_0")):
        for count in bench.numbers_of_tokens:
            path = str(bench.weights.drafters[drafter])
            extra = ("--spec-type", "draft-dflash", "-md", path, "--spec-draft-n-max", str(count))
            variants.append((f"llama.cpp {kind} draft-dflash N={count}", kind, extra))
    variants += [(f"llama.cpp Q4_0 {method}", "Q4_0", ("--spec-type", method)) for method in NGRAM_METHODS]
    return variants
