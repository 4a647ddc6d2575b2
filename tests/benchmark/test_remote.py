"""Measuring a server: a small one here streams what a test tells it to."""

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock, Thread
from typing import Any

import pytest

from foredraft.benchmark import remote
from foredraft.benchmark.local import Plan
from foredraft.benchmark.remote import BenchmarkError, Server, acceptance_of, find_model, measure
from foredraft.benchmark.results import Percentiles, Run
from foredraft.benchmark.workloads import Workload, request_seed
from foredraft.errors import UserError

WORKLOAD = Workload("mt-bench", "data-dir", (("one",), ("two", "and then?"), ("three",)))
Event = dict[str, Any] | str | float
"""A JSON event, a raw line, or seconds to wait."""


def text(content: str, **delta: Any) -> Event:
    return {"choices": [{"index": 0, "delta": {"content": content, **delta}}]}


def usage(tokens: int, **more: Any) -> Event:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}, **more}


def answer(request: dict[str, Any]) -> list[Event]:
    """Seven tokens in three pieces, after the shape of vLLM's chat stream."""
    said = f"re: {request['messages'][-1]['content']}"
    head: Event = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    return [head, text(said), text(" b"), ": keep-alive", text(" c"), usage(7), "data: [DONE]"]


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[dict[str, Any]], list[Event]] = answer
        self.refusal: tuple[int, str] | None = None
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"object": "list", "data": [{"id": "served"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        try:
            if self.server.refusal:
                self._reply(*self.server.refusal)
            else:
                self._stream(self.server.answer(request))
        except OSError:
            pass  # the client has gone
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def _stream(self, events: list[Event]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in events:
            if isinstance(event, float):
                time.sleep(event)
                continue
            line = event if isinstance(event, str) else f"data: {json.dumps(event)}"
            self.wfile.write(f"{line}\n\n".encode())
            self.wfile.flush()

    def _reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = FakeServer()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a second passes on whenever it is read."""
    clock = count()
    monkeypatch.setattr(remote, "perf_counter", lambda: float(next(clock)))


def measured(server: Server, concurrency: int = 1, temperature: float = 0.0, told: list[str] | None = None) -> Run:
    plan = Plan((None,), (WORKLOAD,), (concurrency,), max_tokens=9, temperature=temperature, seed=5)
    ((run,),) = measure(server, "served", plan, (told if told is not None else []).append)
    return run


def asked(fake: FakeServer) -> list[dict[str, Any]]:
    """What was asked after the warm-up."""
    return [request for request in fake.requests if request["messages"][0]["content"] != "Hello!"]


@pytest.mark.usefixtures("ticks")
def test_times_are_those_of_the_stream(fake: FakeServer) -> None:
    """Readings: before all, then a request's start and its three pieces, four times, and after all."""
    told: list[str] = []
    run = measured(Server(fake.url), told=told)
    assert (run.num_prompts, run.turns, run.output_tokens) == (3, 4, 4 * 7)
    assert run.ttft_ms == Percentiles(1000, 1000)
    assert run.tpot_ms.p50 == run.tpot_ms.p95 == pytest.approx(2000 / 6)
    assert run.seconds == 4 * 4 + 1
    assert run.output_tokens_per_second == pytest.approx(28 / run.seconds)
    assert (run.condition.method, run.condition.num_speculative_tokens) == ("server", None)
    assert run.condition.base_url == fake.url
    assert (run.speedup, run.identical_to_plain, run.rounds, run.acceptance_length) == (None,) * 4
    assert told == ["mt-bench, concurrency 1"] * 3


def test_second_turns_follow_the_first_answer(fake: FakeServer) -> None:
    measured(Server(fake.url))
    assert [request["messages"] for request in asked(fake)][2] == [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "re: two b c"},
        {"role": "user", "content": "and then?"},
    ]


def test_what_is_sent(fake: FakeServer) -> None:
    measured(Server(fake.url + "/v1/", api_key="sesame"))
    request = asked(fake)[0]
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("served", 9, 0.0)
    assert "seed" not in request
    assert set(fake.keys) == {"Bearer sesame"}
    fake.requests.clear()
    measured(Server(fake.url), temperature=0.7)
    assert [request["seed"] for request in asked(fake)] == [
        request_seed(5, "mt-bench", prompt, turn) for prompt, turn in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert fake.keys[-1] is None


@pytest.mark.parametrize("concurrency", [1, 3])
def test_requests_in_flight(fake: FakeServer, concurrency: int) -> None:
    fake.answer = lambda request: [0.05, *answer(request)]
    run = measured(Server(fake.url), concurrency)
    assert fake.most_in_flight == concurrency
    assert run.condition.concurrency == concurrency


@pytest.mark.usefixtures("ticks")
def test_tokens_of_reasoning_start_the_clock_but_are_not_said(fake: FakeServer) -> None:
    hidden: Event = {"choices": [{"delta": {"content": None, "reasoning_content": "hm"}}]}
    fake.answer = lambda _: [hidden, text("x"), usage(2), "data: [DONE]"]
    run = measured(Server(fake.url))
    assert run.tpot_ms.p50 == 1000
    assert asked(fake)[2]["messages"][1]["content"] == "x"


def test_acceptance_is_taken_from_the_response(fake: FakeServer) -> None:
    """Per request: five rounds that kept 0, 0, 1, 3 and 3 of N = 3."""
    report = {
        "mean_acceptance_length": 2.4,
        "draft_acceptance_rate": 7 / 15,
        "acceptance_histogram": [2, 1, 0, 2],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 15,
        "num_spec_tokens": 3,
    }
    fake.answer = lambda _: [text("x"), usage(13, metrics={"speculative_decoding": report}), "data: [DONE]"]
    run = measured(Server(fake.url))
    assert run.rounds == 4 * 5
    assert run.acceptance_length == pytest.approx(report["mean_acceptance_length"])
    assert run.acceptance_rate_per_position == pytest.approx([3 / 5, 2 / 5, 2 / 5])
    assert run.condition.num_speculative_tokens == 3


def test_acceptance_of_the_detailed_form_counts_what_was_proposed() -> None:
    report = {"acceptance_histogram": [1, 1, 1], "per_step_accepted": [2, 1, 0], "per_step_drafted": [2, 1, 2]}
    counted = acceptance_of(report)
    assert counted.proposed == [3, 2]
    assert counted.kept == [2, 1]
    assert counted.length == pytest.approx(2.0)


def test_auto_is_the_first_model_listed(fake: FakeServer) -> None:
    assert find_model(Server(fake.url), "auto") == "served"
    assert find_model(Server("http://127.0.0.1:1"), "named") == "named"


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((401, '{"error": {"message": "bad key", "code": 401}}'), "401 Unauthorized: bad key"),
        ((404, '{"object": "error", "message": "no model served"}'), "404 Not Found: no model served"),
        ((500, "<html>oops</html>"), "500 Internal Server Error: <html>oops"),
    ],
)
def test_refusals_say_what_the_server_said(fake: FakeServer, refusal: tuple[int, str], said: str) -> None:
    fake.refusal = refusal
    with pytest.raises(BenchmarkError, match=said):
        measured(Server(fake.url))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([text("x"), "data: [DONE]"], "reports no token counts"),
        ([text("x"), "data: {oops"], "sent what is not JSON"),
        ([text("x"), "data: 3"], "where a JSON object was expected"),
        ([text("x"), {"error": {"message": "out of memory"}}], "broke off with an error: out of memory"),
        ([usage(1, metrics={"speculative_decoding": {"rounds": 1}})], "metrics.speculative_decoding is not understood"),
    ],
)
def test_streams_that_cannot_be_measured(fake: FakeServer, events: list[Event], said: str) -> None:
    fake.answer = lambda _: events
    with pytest.raises(BenchmarkError, match=said):
        measured(Server(fake.url), concurrency=2)


def test_a_silent_server_is_given_up(fake: FakeServer) -> None:
    fake.answer = lambda _: [text("x"), 30.0]
    begin = time.perf_counter()
    with pytest.raises(BenchmarkError, match=r"no sign of life for 0.2 s; .* --timeout"):
        measured(Server(fake.url, timeout=0.2))
    assert time.perf_counter() - begin < 20


def test_no_server_there() -> None:
    unused = FakeServer()
    url = unused.url
    unused.server_close()
    with pytest.raises(BenchmarkError, match=r"no connection to .*; is the server running there\?"):
        measured(Server(url))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://localhost", "http://", "http://localhost:port", "http://localhost:70000", ""]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match="--base-url"):
        Server(url)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_timeouts_are_finite(timeout: float) -> None:
    with pytest.raises(UserError, match="--timeout"):
        Server("http://localhost:8000", timeout=timeout)
