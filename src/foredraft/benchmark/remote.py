"""Measuring any server that speaks the OpenAI chat API."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from foredraft.benchmark.local import WARM_UP_TOKENS, Plan, Report
from foredraft.benchmark.results import Answer, Condition, Measurement, Run, summarize
from foredraft.benchmark.workloads import Workload, request_seed
from foredraft.engine.sequence import Acceptance
from foredraft.errors import UserError


class BenchmarkError(RuntimeError):
    """A run that failed through no fault of the command line; the message says what to do."""


@dataclass(frozen=True)
class Server:
    """Where to send requests. timeout: seconds without a sign of life after which a run has failed."""

    base_url: str
    api_key: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise UserError(f"--base-url {self.base_url!r} is not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 2**16:
            raise UserError(f"--base-url is {self.base_url!r}, expected one such as http://localhost:8000/v1")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"--timeout is {self.timeout}, expected a number of seconds above 0")

    @property
    def api(self) -> str:
        """The address with the API's version, which users may leave out."""
        url = self.base_url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


@dataclass(frozen=True)
class _Reply:
    answer: Answer
    text: str
    speculation: Mapping[str, Any] | None


def find_model(server: Server, name: str) -> str:
    """``name``, or for "auto" the first model that the server lists."""
    return asyncio.run(_first_model(server)) if name == "auto" else name


def measure(server: Server, model: str, plan: Plan, report: Report) -> Iterator[list[Run]]:
    """Yield the run of one workload at one concurrency as it is complete; methods cannot be switched there.

    Raises BenchmarkError when the server cannot be reached, refuses, or answers what is not understood.
    """
    for concurrency in plan.concurrencies:
        for workload in plan.workloads:
            measured, n = asyncio.run(_measure_workload(server, model, workload, plan, concurrency, report))
            condition = Condition(
                model=model,
                dtype=None,
                quantization=None,
                method="server",
                drafter=None,
                num_speculative_tokens=n,
                acceptance_rule=None,
                dataset=workload.name,
                dataset_source=workload.source,
                concurrency=concurrency,
                max_tokens=plan.max_tokens,
                temperature=plan.temperature,
                seed=plan.seed,
                base_url=server.base_url,
            )
            yield [summarize(condition, measured, plain=None)]


def acceptance_of(speculation: Mapping[str, Any]) -> Acceptance:
    """Counts from vLLM's ``metrics.speculative_decoding`` of one response.

    Its histogram says how many rounds kept j draft tokens. Only the detailed form says how many each round
    proposed; else every round is taken to have proposed all N, as vLLM's own rates do.
    """
    histogram = [int(rounds) for rounds in speculation["acceptance_histogram"]]
    positions = len(histogram) - 1
    drafted = speculation.get("per_step_drafted")
    lengths = [int(length) for length in drafted] if drafted else [positions] * sum(histogram)
    return Acceptance(
        rounds=sum(histogram),
        committed=sum((kept + 1) * rounds for kept, rounds in enumerate(histogram)),
        proposed=[sum(length > position for length in lengths) for position in range(positions)],
        kept=[sum(histogram[position + 1 :]) for position in range(positions)],
    )


async def _measure_workload(
    server: Server, model: str, workload: Workload, plan: Plan, concurrency: int, report: Report
) -> tuple[Measurement, int | None]:
    """The measurement, and the N that the server used, if it tells."""
    what = f"{workload.name}, concurrency {concurrency}"
    numbers = iter(range(len(workload.conversations)))
    replies: dict[int, list[_Reply]] = {}

    async with _client(server, concurrency) as client:

        async def converse() -> None:
            for number in numbers:
                replies[number] = await _converse(client, server, model, workload, number, plan)
                report(what)

        hello = _payload(model, [{"role": "user", "content": "Hello!"}], plan, None)
        warm_up = hello | {"max_tokens": min(WARM_UP_TOKENS, plan.max_tokens)}
        await asyncio.gather(*(_ask(client, server, warm_up) for _ in range(concurrency)))
        begin = perf_counter()
        await asyncio.gather(*(converse() for _ in range(concurrency)))
        seconds = perf_counter() - begin
    conversations = [replies[number] for number in sorted(replies)]
    acceptance, n = _total([reply.speculation for each in conversations for reply in each])
    answers = [tuple(reply.answer for reply in each) for each in conversations]
    return Measurement(seconds, answers, acceptance), n


async def _converse(
    client: httpx.AsyncClient, server: Server, model: str, workload: Workload, number: int, plan: Plan
) -> list[_Reply]:
    messages: list[dict[str, str]] = []
    replies = []
    for turn, content in enumerate(workload.conversations[number]):
        messages.append({"role": "user", "content": content})
        seed = request_seed(plan.seed, workload.name, number, turn)
        reply = await _ask(client, server, _payload(model, messages, plan, seed))
        messages.append({"role": "assistant", "content": reply.text})
        replies.append(reply)
    return replies


def _payload(model: str, messages: Sequence[Mapping[str, str]], plan: Plan, seed: int | None) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # Some servers refuse a seed even where nothing is random.
    if plan.temperature > 0 and seed is not None:
        payload["seed"] = seed
    return payload


async def _ask(client: httpx.AsyncClient, server: Server, payload: Mapping[str, Any]) -> _Reply:
    url = f"{server.api}/chat/completions"
    pieces: list[str] = []
    times: list[float] = []
    usage = speculation = None
    begin = perf_counter()
    with _errors(server, url):
        async with client.stream("POST", url, json=payload) as response:
            await _check(response, url)
            async for event in _events(response, url):
                text, visible = _delta(event)
                if visible:
                    times.append(perf_counter())
                    pieces.append(text)
                usage = event.get("usage") or usage
                speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
    num_tokens = (usage or {}).get("completion_tokens")
    if not isinstance(num_tokens, int):
        raise BenchmarkError(
            f"{url} reports no token counts (`usage` in the last event of a stream); without them nothing "
            "can be measured"
        )
    first, last = (times[0], times[-1]) if times else (perf_counter(),) * 2
    return _Reply(Answer(num_tokens, first - begin, last - first), "".join(pieces), speculation)


def _delta(event: Mapping[str, Any]) -> tuple[str, bool]:
    """Text that an event adds to the answer, and whether it brings tokens (those of reasoning count too)."""
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    text = delta.get("content") or ""
    return text, bool(text or delta.get("reasoning_content") or delta.get("reasoning"))


async def _events(response: httpx.Response, url: str) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to its [DONE]."""
    async for line in response.aiter_lines():
        field, _, data = line.partition(":")
        if field != "data" or not data.strip():
            continue
        if data.strip() == "[DONE]":
            return
        event = _object(data, url)
        if "error" in event:
            raise BenchmarkError(f"{url} broke off with an error: {_message(event)}")
        yield event


async def _first_model(server: Server) -> str:
    url = f"{server.api}/models"
    async with _client(server, 1) as client:
        with _errors(server, url):
            response = await client.get(url)
            await _check(response, url)
    listed = _object(response.text, url).get("data")
    name = listed[0].get("id") if isinstance(listed, list) and listed else None
    if not isinstance(name, str):
        raise BenchmarkError(f"{url} lists no model; name one instead of auto")
    return name


async def _check(response: httpx.Response, url: str) -> None:
    if response.is_success:
        return
    await response.aread()
    try:
        said = _message(json.loads(response.text))
    except (ValueError, TypeError):
        said = response.text[:200]
    raise BenchmarkError(f"{url} answered {response.status_code} {response.reason_phrase}: {said}")


def _message(content: Any) -> str:
    """What an error object says, in OpenAI's form or another."""
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _object(text: str, url: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"{url} sent what is not JSON: {text[:100]!r}") from error
    if not isinstance(content, dict):
        raise BenchmarkError(f"{url} sent {text[:100]!r} where a JSON object was expected")
    return content


def _client(server: Server, concurrency: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
        timeout=httpx.Timeout(server.timeout, connect=10.0),
        limits=httpx.Limits(max_connections=concurrency),
    )


@contextmanager
def _errors(server: Server, url: str) -> Iterator[None]:
    """Turn what can go wrong on the way into one sentence."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise BenchmarkError(f"no connection to {url} ({error}); is the server running there?") from error
    except httpx.TimeoutException as error:
        raise BenchmarkError(
            f"{url} gave no sign of life for {server.timeout:g} s; if it is only slow, raise --timeout"
        ) from error
    except httpx.HTTPError as error:
        raise BenchmarkError(f"the connection to {url} broke: {error or type(error).__name__}") from error


def _total(reports: Sequence[Mapping[str, Any] | None]) -> tuple[Acceptance | None, int | None]:
    """Counts of all responses and the largest N; None unless every response reports them."""
    total = Acceptance()
    try:
        for report in reports:
            if report is None:
                return None, None
            total.add(acceptance_of(report))
    except (KeyError, TypeError, ValueError) as error:
        raise BenchmarkError(f"the server's metrics.speculative_decoding is not understood: {error!r}") from error
    return total, len(total.proposed)
