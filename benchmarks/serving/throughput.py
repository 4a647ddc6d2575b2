"""Servers under the same load, in turns: tokens a second and latencies by the number of requests at once.

    python benchmarks/serving/throughput.py --data-dir ../shared/data/eval --output serving.json \\
        --server "plain=foredraft serve smollm2-135m --method none --port {port}" \\
        --server "auto=foredraft serve smollm2-135m --method dflash -N auto --port {port}" \\
        --server "llama.cpp=llama-server -m MODEL.gguf -np 64 -c 65536 --port {port}"

Each server is stopped (SIGSTOP) while another one is measured. The first server is what ratios refer to.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from foredraft.benchmark.machine import environment
from foredraft.benchmark.workloads import load_workloads

NAMES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
LEAST = len(NAMES)
"""Prompts of each load come in multiples of this, so that each workload has the same share."""
WARM_UP = 20


@dataclass
class Server:
    name: str
    command: str
    process: subprocess.Popen[bytes]
    url: str
    model: str = ""

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


@contextmanager
def started(name: str, command: str, log: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen(
            shlex.split(command.format(port=port)), stdout=file, stderr=file, start_new_session=True
        )
    server = Server(name, command, process, f"http://127.0.0.1:{port}")
    try:
        until = time.monotonic() + 300
        while not server.model:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} did not start; see {log}")
            time.sleep(0.5)
            try:
                server.model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
            except (httpx.HTTPError, KeyError, ValueError):
                continue
        yield server
    finally:
        if process.poll() is None:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGTERM)
            process.wait(60)


async def load(server: Server, prompts: list[str], concurrency: int, max_tokens: int) -> dict[str, float]:
    """A closed loop: as many requests at once, until all prompts have been answered."""
    left = iter(prompts)
    tokens, firsts, betweens = 0, [], []

    # A connection for each request: llama.cpp's server closes one that is kept now and then.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:

        async def converse() -> None:
            nonlocal tokens
            for prompt in left:
                body = {
                    "model": server.model,
                    "messages": [{"role": "user", "content": prompt}],
                    "temperature": 0,
                    "max_tokens": max_tokens,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                begin, first, count = time.perf_counter(), 0.0, 0
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if not first and '"content":"' in line.replace(": ", ":") and '"content":""' not in line:
                            first = time.perf_counter()
                        if '"usage":{' in line.replace(": ", ":"):
                            count = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                end = time.perf_counter()
                tokens += count
                firsts.append(first - begin)
                if count > 1:
                    betweens.append((end - first) / (count - 1))

        begin = time.perf_counter()
        await asyncio.gather(*(converse() for _ in range(concurrency)))
        seconds = time.perf_counter() - begin
    return {
        "output_tokens_per_second": tokens / seconds,
        "output_tokens": tokens,
        "ttft_ms": 1000 * median(firsts),
        "tpot_ms": 1000 * median(betweens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    texts = [
        turns[0]
        for conversations in zip(
            *(workload.conversations for workload in load_workloads(NAMES, options.data_dir, 24)), strict=True
        )
        for turns in conversations
    ]
    concurrencies = [int(value) for value in options.concurrency.split(",")]
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    with all_started(options.server) as servers:
        for server in servers:
            server.signal(signal.SIGCONT)
            asyncio.run(load(server, texts[-WARM_UP:], 4, options.max_tokens))
            server.signal(signal.SIGSTOP)
        for number, concurrency in itertools.product(range(options.rounds), concurrencies):
            size = LEAST * max(3, math.ceil(2 * concurrency / LEAST))
            # No two prompts have a beginning in common, so that nothing is answered from a cache.
            prompts = [
                f"[{number + 1}.{concurrency}.{index + 1}] {texts[(number * size + index) % len(texts)]}"
                for index in range(size)
            ]
            for server in random.Random(f"{number} {concurrency}").sample(servers, len(servers)):
                server.signal(signal.SIGCONT)
                run = asyncio.run(load(server, prompts, concurrency, options.max_tokens))
                server.signal(signal.SIGSTOP)
                found.setdefault(concurrency, {}).setdefault(server.name, []).append(run)
                print(f"round {number + 1}, {concurrency} at once, {server.name}: {run}", flush=True)
            if options.output:
                # After each load: a long run that is stopped has not been for nothing.
                commands = {server.name: server.command for server in servers}
                table = summary(found, list(commands))
                report = {"environment": environment(), "servers": commands, "runs": table, "rounds": found}
                options.output.write_text(json.dumps(report, indent=1) + "\n")
        print_table(summary(found, [server.name for server in servers]))


@contextmanager
def all_started(given: list[str]) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = []
        for index, text in enumerate(given):
            name, _, command = text.partition("=")
            servers.append(stack.enter_context(started(name, command, Path(f"/tmp/serving-{index}.log"))))
            servers[-1].signal(signal.SIGSTOP)
        yield servers


def summary(found: dict[int, dict[str, list[dict[str, float]]]], names: list[str]) -> list[dict[str, Any]]:
    """Medians over the rounds, and of the ratios to the first server in each."""
    rows = []
    for concurrency, by_name in found.items():
        base = by_name[names[0]]
        for name in names:
            runs = by_name[name]
            ratios = [
                own["output_tokens_per_second"] / other["output_tokens_per_second"]
                for own, other in zip(runs, base, strict=True)
            ]
            medians = {
                key: median(run[key] for run in runs) for key in ("output_tokens_per_second", "ttft_ms", "tpot_ms")
            }
            rows.append({"concurrency": concurrency, "server": name, **medians, "ratio": median(ratios)})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| at once | server | tok/s | ratio | first token, ms | between tokens, ms |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['concurrency']} | {row['server']} | {row['output_tokens_per_second']:.0f} | {row['ratio']:.2f} | "
            f"{row['ttft_ms']:.0f} | {row['tpot_ms']:.1f} |"
        )


if __name__ == "__main__":
    main()
