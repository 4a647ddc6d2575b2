"""Under load every answer is that of offline plain decoding alone: requests of mixed length, temperature and arrival.

foredraft serve smollm2-135m --method eagle3 &
python benchmarks/serving/exactness.py http://127.0.0.1:8000 --data-dir ../shared/data/eval --requests 500
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx

from foredraft import LLM, SamplingParams
from foredraft.benchmark.workloads import load_workloads

NAMES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")


def requests(data_dir: str, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    prompts = [turns[0] for workload in load_workloads(NAMES, Path(data_dir), 24) for turns in workload.conversations]
    found = []
    for index in range(count):
        text = rng.choice(prompts)
        if rng.random() < 0.1:
            text = " ".join(rng.choices(prompts, k=rng.randint(3, 8)))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": int(rng.choice([1, 8, 32, 64, 128, 192])),
            "temperature": rng.choice([0.0, 0.0, 0.6, 1.0]),
            "seed": index,
        }
        if rng.random() < 0.2:
            body["stop"] = ["\n\n"]
        if rng.random() < 0.2:
            body |= {"top_p": 0.9, "presence_penalty": 0.3}
        found.append(body)
    return found


async def ask_all(url: str, bodies: list[dict[str, Any]], rate: float, seed: int) -> list[str]:
    """Poisson arrivals."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(body: dict[str, Any], after: float) -> str:
            await asyncio.sleep(after)
            response = await client.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            text: str = response.json()["choices"][0]["message"]["content"]
            return text

        moments, now = [], 0.0
        for _ in bodies:
            now += rng.expovariate(rate)
            moments.append(now)
        return await asyncio.gather(*(ask(body, moment) for body, moment in zip(bodies, moments, strict=True)))


def alone(bodies: list[dict[str, Any]]) -> list[str]:
    llm = LLM("smollm2-135m")
    found = []
    for body in bodies:
        params = SamplingParams(**{name: value for name, value in body.items() if name != "messages"})
        found.append(llm.chat(body["messages"], params)[0].outputs[0].text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bodies = requests(options.data_dir, options.requests, options.seed)
    begin = time.perf_counter()
    served = asyncio.run(ask_all(options.url, bodies, options.rate, options.seed))
    print(f"{len(served)} answers in {time.perf_counter() - begin:.0f} s")
    expected = alone(bodies)
    wrong = [index for index, pair in enumerate(zip(served, expected, strict=True)) if pair[0] != pair[1]]
    print(f"{len(wrong)} of {len(bodies)} differ from offline plain decoding alone{': ' + str(wrong) if wrong else ''}")


if __name__ == "__main__":
    main()
