"""The engines as processes: each runs in its turn and is stopped in between."""

import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

START_SECONDS = 600.0

Command = list[str | Path]


class EngineError(RuntimeError):
    """A peer failed; the message says which and where its log lies."""


@dataclass(frozen=True)
class Generated:
    """What one engine did with some prompts.

    seconds: wall time. decode_seconds, decoded: time after each request's first token, and the tokens in it, summed
    over requests. token_ids: of each prompt. rounds: target passes after each answer's first token, where it tells.
    """

    seconds: float
    decode_seconds: float
    decoded: int
    token_ids: list[list[int]]
    rounds: list[int] | None = None

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for tokens in self.token_ids)


class Process:
    """A child in a process group of its own, which is stopped (SIGSTOP) unless it is its turn.

    An engine waiting for work may spin or poll; stopped, it costs nothing.
    """

    def __init__(self, command: Command, log: Path, environment: dict[str, str], *, pipes: bool) -> None:
        self.command = [str(part) for part in command]
        self.log = log
        self._log = log.open("w")
        self.child = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else self._log,
            stderr=self._log,
            env=os.environ | environment,
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self._log.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run for a while."""
        os.killpg(self.child.pid, signal.SIGCONT)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGSTOP)

    def failure(self, what: str) -> EngineError:
        with suppress(subprocess.TimeoutExpired):
            what += f" (exit status {self.child.wait(5)})"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return EngineError(f"{what}; log: {self.log}{': ' if last else ''}{''.join(last)}")


class Worker(Process):
    """A Python process that answers JSON lines: ``worker.py`` or ``vllm_worker.py``."""

    def __init__(self, command: Command, log: Path, **environment: str) -> None:
        super().__init__(command, log, environment, pipes=True)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.child.stdin and self.child.stdout
        with self.turn():
            try:
                self.child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                self.child.stdin.flush()
            except BrokenPipeError as error:
                raise self.failure(f"{self.command[-1]} has ended") from error
            line = self.child.stdout.readline()
        if not line:
            raise self.failure(f"{self.command[-1]} ended during {do!r}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.command[-1]}: {do}: {answer['error']}; log: {self.log}")
        return answer

    def generate(self, prompts: Sequence[list[int]], **arguments: Any) -> Generated:
        return Generated(**self.ask("generate", prompts=prompts, **arguments))


class LlamaServer(Process):
    """llama-server with one model and one way to speculate, asked over HTTP with token ids."""

    def __init__(self, llama: Path, threads: int, model: Path, log: Path, *, slots: int, extra: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command: Command = [llama / "llama-server", "-m", model, "-t", str(threads), "--port", str(port)]
        command += ["-np", str(slots), "-c", str(max(4096, 1024 * slots)), "--no-ui", "--cache-ram", "0", *extra]
        super().__init__(command, log, {}, pipes=False)
        self.slots = slots
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS)
        try:
            with self.turn():
                self._wait()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.client.close()
        super().__exit__()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.child.poll() is None:
            with suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise self.failure("llama-server did not start")

    def generate(self, prompts: Sequence[list[int]], *, max_tokens: int, ignore_eos: bool = False) -> Generated:
        """Greedy answers, as many at once as the server has slots."""

        def answer(prompt: list[int]) -> dict[str, Any]:
            request = {
                "prompt": prompt,
                "n_predict": max_tokens,
                "temperature": 0,
                "top_k": 1,
                "ignore_eos": ignore_eos,
                "cache_prompt": False,
                "return_tokens": True,
            }
            response = self.client.post("/completion", json=request)
            if response.status_code != 200:
                raise self.failure(f"llama-server answered {response.status_code} {response.text}")
            body: dict[str, Any] = response.json()
            return body

        pool = ThreadPoolExecutor(self.slots)
        try:
            with self.turn():
                begin = time.perf_counter()
                answers = list(pool.map(answer, prompts))
                seconds = time.perf_counter() - begin
        except BaseException:
            # Else the threads would wait for a server that is stopped.
            self.child.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        timings = [each["timings"] for each in answers]
        return Generated(
            seconds=seconds,
            decode_seconds=sum(timing["predicted_ms"] for timing in timings) / 1e3,
            decoded=sum(timing["predicted_n"] - 1 for timing in timings),
            token_ids=[each["tokens"] for each in answers],
            rounds=[timing["predicted_n"] - 1 - timing.get("draft_n_accepted", 0) for timing in timings],
        )

    def generate_rounds(self, prompts: Sequence[list[int]], *, max_tokens: int) -> list[dict[str, Any]]:
        """Greedy answers one after the other: of each the token ids, None where it did not say, and of each round
        with a proposal how many tokens it brought."""
        with self.turn():
            return [self._rounds(prompt, max_tokens) for prompt in prompts]

    def _rounds(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Each chunk of the stream is one token, with the totals of drafted and accepted tokens up to its round. A
        token that ends inside a character brings no chunk of its own."""
        request = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
            "timings_per_token": True,
        }
        tokens: dict[int, int] = {}
        accepted: dict[int, int] = {0: 0}
        count = 0
        # The server closes a connection some time after a stream, sometimes before it answers the next request on it.
        close = {"Connection": "close"}
        with self.client.stream("POST", "/completion", json=request, headers=close) as response:
            if response.status_code != 200:
                raise self.failure(f"llama-server answered {response.status_code}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                timings = chunk["timings"]
                count = timings["predicted_n"]
                if chunk["tokens"]:
                    tokens[count - 1] = chunk["tokens"][-1]
                accepted[timings.get("draft_n", 0)] = timings.get("draft_n_accepted", 0)
        totals = [accepted[drafted] for drafted in sorted(accepted)]
        steps = [1, *(1 + later - sooner for sooner, later in itertools.pairwise(totals))]
        return {"token_ids": [tokens.get(index) for index in range(count)], "steps": steps}


def llama_bench(llama: Path, threads: int, model: Path, *arguments: str) -> float:
    """Tokens a second of one test of llama-bench."""
    command: Command = [llama / "llama-bench", "-m", model, "-t", str(threads), "-o", "json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise EngineError(f"{shlex.join(map(str, command))} failed: {result.stderr.strip()[-500:]}")
    return float(json.loads(result.stdout)[0]["avg_ts"])


def llama_perplexity(llama: Path, threads: int, model: Path, text: Path, window: int) -> tuple[float, int]:
    """Perplexity as llama-perplexity computes it, and the number of windows."""
    command: Command = [
        llama / "llama-perplexity",
        "-m",
        model,
        "-t",
        str(threads),
        "-f",
        text,
        "-c",
        str(window),
        "--no-escape",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout + result.stderr
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", said)
    windows = re.search(r"over (\d+) chunks", said)
    if result.returncode or not found or not windows:
        raise EngineError(f"{shlex.join(map(str, command))} failed: {said.strip()[-500:]}")
    return float(found[1]), int(windows[1])


def llama_tokens(llama: Path, model: Path, text: Path) -> list[int]:
    """The token ids of a text in llama.cpp."""
    command: Command = [llama / "llama-tokenize", "-m", model, "-f", text, "--ids"]
    command += ["--log-disable", "--no-parse-special", "--no-escape"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise EngineError(f"{shlex.join(map(str, command))} failed: {result.stderr.strip()[-500:]}")
    ids: list[int] = json.loads(result.stdout)
    return ids
