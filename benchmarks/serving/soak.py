"""A server near its capacity for a long time, with clients as they come: ones that leave, that send too much, nonsense,
or slowly. Memory, acceptance and every answer of a fixed set are watched.

    foredraft serve smollm2-135m --max-num-seqs 16 --max-queue 32 --kv-cache-memory 400M \\
        --per-request-spec-decode-metrics summary &
    python benchmarks/serving/soak.py http://127.0.0.1:8000 --pid $! --minutes 30 --data-dir ../shared/data/eval
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from foredraft.benchmark.workloads import load_workloads

NAMES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20


class Soak:
    def __init__(self, url: str, prompts: list[str], seed: int) -> None:
        self._url, self._prompts, self._rng = url, prompts, random.Random(seed)
        self._first: dict[int, str] = {}
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.drafted = self.accepted = 0

    async def client(self, until: float) -> None:
        kinds = [self.repeat] * 8 + [self.leave] * 3 + [self.malformed, self.oversized, self.slow, self.chatty]
        while time.monotonic() < until:
            try:
                async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
                    await self._rng.choice(kinds)(client)
            except httpx.HTTPError as error:
                self.outcomes[f"http error {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)

    def _body(self, number: int) -> dict[str, Any]:
        rng = random.Random(number)
        return {
            "messages": [{"role": "user", "content": rng.choice(self._prompts)}],
            "max_tokens": rng.choice([4, 32, 96]),
            "temperature": rng.choice([0.0, 0.9]),
            "seed": number,
        }

    async def repeat(self, client: httpx.AsyncClient) -> None:
        """One of a fixed set of requests, whose answer must be the same every time."""
        number = self._rng.randrange(200)
        response = await client.post("/v1/chat/completions", json=self._body(number))
        self.outcomes[f"answered {response.status_code}"] += 1
        if response.status_code == 429:
            await asyncio.sleep(min(2, int(response.headers["retry-after"])))
        if response.status_code != 200:
            return
        answer = response.json()
        text = answer["choices"][0]["message"]["content"]
        if self._first.setdefault(number, text) != text:
            self.wrong.append(f"request {number}: {text!r} was {self._first[number]!r}")
        told = answer.get("metrics", {}).get("speculative_decoding", {})
        self.drafted += told.get("num_draft_tokens", 0)
        self.accepted += told.get("num_accepted_draft_tokens", 0)

    async def leave(self, client: httpx.AsyncClient) -> None:
        body = self._body(self._rng.randrange(10**6)) | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            left = self._rng.randrange(1, 40)
            async for _ in response.aiter_lines():
                left -= 1
                if not left:
                    break
        self.outcomes[f"left {response.status_code}"] += 1

    async def malformed(self, client: httpx.AsyncClient) -> None:
        content = self._rng.choice(
            [b"{", b"\xff\xfe", b"[1]", b'{"messages": 3}', json.dumps({"messages": [], "n": -1}).encode()]
        )
        response = await client.post("/v1/chat/completions", content=content)
        self.outcomes[f"malformed {response.status_code}"] += 1

    async def oversized(self, client: httpx.AsyncClient) -> None:
        length = self._rng.choice([10**5, 5 * 10**6])
        body = {"messages": [{"role": "user", "content": "word " * (length // 5)}], "max_tokens": 4}
        response = await client.post("/v1/chat/completions", json=body)
        self.outcomes[f"oversized {response.status_code}"] += 1

    async def slow(self, client: httpx.AsyncClient) -> None:
        async def content() -> Any:
            for piece in (b'{"messages": [{"role": "user", ', b'"content": "hi"}], ', b'"max_tokens": 2}'):
                await asyncio.sleep(0.5)
                yield piece

        response = await client.post("/v1/chat/completions", content=content())
        self.outcomes[f"slow {response.status_code}"] += 1

    async def chatty(self, client: httpx.AsyncClient) -> None:
        """A conversation of several turns, whose past the prefix cache has."""
        body = self._body(self._rng.randrange(10**6)) | {"max_tokens": 48}
        for _ in range(4):
            response = await client.post("/v1/chat/completions", json=body)
            self.outcomes[f"turn {response.status_code}"] += 1
            if response.status_code != 200:
                return
            body["messages"] += [response.json()["choices"][0]["message"] | {}, {"role": "user", "content": "Go on."}]
            body["messages"][-2].pop("refusal", None)


async def watch(soak: Soak, pid: int, until: float, every: float) -> None:
    begin, drafted, accepted = time.monotonic(), 0, 0
    while time.monotonic() < until:
        await asyncio.sleep(every)
        new = soak.drafted - drafted, soak.accepted - accepted
        drafted, accepted = soak.drafted, soak.accepted
        rate = new[1] / new[0] if new[0] else float("nan")
        print(
            f"{(time.monotonic() - begin) / 60:.1f} min: {resident(pid):.0f} MiB, acceptance {rate:.3f} of {new[0]}, "
            f"wrong {len(soak.wrong)}, {dict(sorted(soak.outcomes.items()))}",
            flush=True,
        )


async def run(options: argparse.Namespace) -> Soak:
    prompts = [turns[0] for workload in load_workloads(NAMES, options.data_dir, 24) for turns in workload.conversations]
    soak = Soak(options.url, prompts, options.seed)
    until = time.monotonic() + 60 * options.minutes
    clients = [soak.client(until) for _ in range(options.clients)]
    await asyncio.gather(watch(soak, options.pid, until, 60.0), *clients)
    return soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    soak = asyncio.run(run(parser.parse_args()))
    print(f"{len(soak.wrong)} wrong answers", *soak.wrong[:5], sep="\n")


if __name__ == "__main__":
    main()
