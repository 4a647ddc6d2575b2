"""The server over HTTP: what it answers is what offline decoding gives, and what it refuses it refuses by name."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from running import Running, serving
from tiny import CONFIG, TOKENS, tiny_model, tiny_tokenizer
from uvicorn.protocols.http.flow_control import FlowControl

from foredraft.config import EngineConfig
from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.engine import sequence as sequences
from foredraft.llm import LLM, Progress
from foredraft.models.config import RopeConfig
from foredraft.models.loading import Target
from foredraft.sampling_params import SamplingParams
from foredraft.server.answers import Answer
from foredraft.server.connection import Connection
from foredraft.server.runner import Job, _Follower

LONG = replace(CONFIG, max_position_embeddings=256, rope=RopeConfig(theta=1000.0))
LETTERS = "abcdefghijklmnop"


def target() -> Target:
    return Target("tiny", tiny_model(LONG), tiny_tokenizer())


def speculating(**limits: Any) -> LLM:
    return LLM(target(), {"method": "ngram", "num_speculative_tokens": 3}, engine_config=EngineConfig(**limits))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speculating(max_num_seqs=8, max_num_batched_tokens=32), max_queue=200, detail="detailed") as running:
        yield running


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(target())


def chat(running: Running, text: str, **more: Any) -> httpx.Response:
    return running.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **more})


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(running: Running, text: str, **more: Any) -> list[Any]:
    return events(chat(running, text, stream=True, **more))


def expected(offline: LLM, text: str, **params: Any) -> Any:
    return offline.chat([{"role": "user", "content": text}], SamplingParams(**params))[0]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}])
def test_a_chat_is_what_offline_decoding_gives(server: Running, offline: LLM, params: dict[str, Any]) -> None:
    answer = chat(server, "abcabc", max_tokens=30, **params).json()
    wanted = expected(offline, "abcabc", max_tokens=30, **params)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == wanted.outputs[0].finish_reason
    prompt, completion = len(wanted.prompt_token_ids), len(wanted.outputs[0].token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    told = answer["metrics"]["speculative_decoding"]
    assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] == len(told["per_step_drafted"])


def test_a_stream_says_the_same(server: Running) -> None:
    settings = {"temperature": 0.9, "seed": 7, "max_tokens": 40}
    whole = chat(server, "abab", **settings).json()
    chunks = streamed(server, "abab", stream_options={"include_usage": True}, return_rounds=True, **settings)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *told, last = chunks[1:]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told)
    assert text == whole["choices"][0]["message"]["content"]
    assert told[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    rounds = [entry for chunk in told for entry in chunk["choices"][0]["rounds"]]
    assert "".join(piece for entry in rounds for piece, _ in entry["pieces"]) == text
    assert all(len(entry["rejected"]) == entry["drafted"] - entry["accepted"] for entry in rounds)
    assert rounds[0]["drafted"] == 0
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_many_at_once_are_each_as_if_alone(server: Running, offline: LLM) -> None:
    rng = random.Random(3)

    def request(index: int) -> tuple[str, dict[str, Any]]:
        text = "".join(rng.choices(LETTERS, k=rng.choice([2, 4]))) * rng.randint(1, 12)
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "temperature": rng.choice([0.0, 0.7, 1.1])}
        params["seed"] = index
        if index % 3 == 0:
            params["stop"] = ["ab", "d."]
        if index % 4 == 0:
            params |= {"presence_penalty": 0.5, "top_p": 0.9}
        if params["temperature"] and index % 5 == 0:
            params["n"] = 3
        return text, params

    requests = [request(index) for index in range(60)]

    def ask(index: int) -> list[str]:
        text, params = requests[index]
        time.sleep(rng.random() * 0.2)
        if index % 2:
            choices = chat(server, text, **params).json()["choices"]
            return [choice["message"]["content"] for choice in choices]
        found = [""] * params.get("n", 1)
        for chunk in streamed(server, text, **params):
            for choice in chunk["choices"]:
                found[choice["index"]] += choice["delta"].get("content", "")
        return found

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(len(requests))))
    for (text, params), found in zip(requests, answers, strict=True):
        assert found == [output.text for output in expected(offline, text, **params).outputs]


def test_completions(server: Running, offline: LLM) -> None:
    prompts = ["abc", "ddd ab"]
    body = {
        "prompt": prompts,
        "max_tokens": 9,
        "temperature": 0.8,
        "seed": 2,
        "n": 2,
        "logprobs": 3,
        "ignore_eos": True,
    }
    answer = server.client.post("/v1/completions", json=body).json()
    wanted = offline.generate(
        prompts, SamplingParams(max_tokens=9, temperature=0.8, seed=2, n=2, logprobs=3, ignore_eos=True)
    )
    outputs = [output for request in wanted for output in request.outputs]
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, output in zip(answer["choices"], outputs, strict=True):
        logprobs = choice["logprobs"]
        assert output.logprobs is not None
        assert logprobs["token_logprobs"] == pytest.approx([entry.logprob for entry in output.logprobs])
        assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 9
    tokens = tiny_tokenizer().encode("abc")
    by_ids = server.client.post(
        "/v1/completions", json={**body, "prompt": tokens, "echo": True, "logprobs": None}
    ).json()
    assert by_ids["choices"][0]["text"] == "abc" + outputs[0].text


def test_logprobs_of_chats(server: Running, offline: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    wanted = expected(offline, "abcab", logprobs=2, **settings).outputs[0].logprobs
    whole = chat(server, "abcab", logprobs=True, top_logprobs=2, **settings).json()["choices"][0]["logprobs"]["content"]
    parts = [
        entry
        for chunk in streamed(server, "abcab", logprobs=True, top_logprobs=2, **settings)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in parts] == [entry["token"] for entry in whole]
    for found, part, entry in zip(whole, parts, wanted, strict=True):
        # The PyTorch path rounds by the size of its batches.
        assert found["logprob"] == pytest.approx(entry.logprob) == part["logprob"]
        assert [top["logprob"] for top in found["top_logprobs"]] == pytest.approx([value for _, value in entry.top])
        assert bytes(found["bytes"]).decode(errors="replace") == found["token"]


def test_a_request_can_do_without_speculation(server: Running) -> None:
    before = server.metric("vllm:spec_decode_num_draft_tokens_total")
    unfollowed = server.metric("foredraft:admissions_total", followed="false")
    plain = chat(
        server, "abababab", temperature=0, max_tokens=40, speculative_config={"num_speculative_tokens": 0}
    ).json()
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == before
    assert server.metric("foredraft:admissions_total", followed="false") == unfollowed + 1
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    faster = chat(server, "abababab", temperature=0, max_tokens=40).json()
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > before
    assert plain["choices"][0]["message"] == faster["choices"][0]["message"]


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (b"{", 400, None, "not valid JSON"),
        (b"[]", 400, None, "object"),
        ({}, 400, "messages", "missing"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "a"}]}, 400, "messages.0.role", "assistant"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0", "content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            None,
            "image_url",
        ),
        ({"audio": {"voice": "x"}}, 400, "audio", "audio is not supported"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, 400, "temperature", "number"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"n": 10**6, "temperature": 1}, 400, None, "at most 208"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater"),
        ({"logit_bias": {"99": 1}}, 400, None, "logit_bias names token 99"),
        ({"stop": ""}, 400, None, "stop"),
        ({"stream_options": {"include_usage": True}}, 400, None, "stream_options needs stream"),
        ({"top_logprobs": 3}, 400, None, "needs logprobs"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type", "json_object"),
        ({"model": "gpt-9"}, 404, None, "'gpt-9' is not served"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, 400, None, "the prompt has"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, ""),
        ({"deadline_seconds": 0}, 400, "deadline_seconds", "greater than 0"),
        ({"speculative_config": {"num_speculative_tokens": -1}}, 400, None, "greater than or equal to 0"),
        ({"chat_template_kwargs": {"messages": 1}}, 400, None, "chat_template_kwargs cannot have messages"),
    ],
)
def test_what_is_refused(server: Running, body: Any, status: int, param: str | None, said: str) -> None:
    if isinstance(body, dict) and body and "messages" not in body:
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.client.post("/v1/chat/completions", content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status
    assert said in error["message"]
    assert param is None or error["param"] == param


def test_null_counts_as_left_out(server: Running) -> None:
    assert chat(server, "ab", temperature=None, tools=None, audio=None, max_tokens=2).status_code == 200


def test_other_paths(server: Running) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 256
    assert card["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert server.client.get("/v1/models/tiny").json() == card
    assert server.client.get("/v1/models/other").status_code == 404
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/version").json().keys() == {"version"}
    told = server.client.post("/tokenize", json={"prompt": "ab c", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) and "".join(told["token_strs"]) == "ab c"
    assert server.client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "ab c"}
    assert server.client.post("/detokenize", json={"tokens": [len(TOKENS)]}).status_code == 400
    missing = server.client.get("/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == 404
    assert server.client.get("/v1/chat/completions").status_code == 405
    page = server.client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert all(server.client.get(f"/page/page.{kind}").status_code == 200 for kind in ("css", "js"))
    assert server.client.get("/page/../app.py").status_code == 404


def test_a_body_that_is_too_large_or_too_slow() -> None:
    with serving(speculating(), body_bytes=1000, body_seconds=0.3) as running:
        assert chat(running, "a" * 2000).status_code == 413

        def chunks(pause: float) -> Iterator[bytes]:
            for _ in range(30):
                yield b" " * 100
                time.sleep(pause)

        response = running.client.post("/v1/chat/completions", content=chunks(0.0))
        assert response.status_code == 413
        response = running.client.post("/v1/chat/completions", content=chunks(0.1))
        assert response.status_code == 408
        assert chat(running, "ab", max_tokens=2).status_code == 200


def test_a_client_that_sends_too_much_reads_why() -> None:
    """One that reads only after it has sent everything."""
    with serving(speculating(), body_bytes=2**20) as running, connected(running) as client:
        body = b" " * (5 * 2**20)
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
        client.sendall(body)
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


class Impatient(Connection):
    head_seconds = 0.5
    send_seconds = 0.5


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        yield client


def received(client: socket.socket) -> bytes:
    """Until the server closes the connection."""
    found = b""
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_clients_that_do_not_send_the_head_of_a_request() -> None:
    with ExitStack() as stack:
        running = stack.enter_context(serving(speculating(), Impatient))
        silent, slow, again = (stack.enter_context(connected(running)) for _ in range(3))
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        again.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert again.recv(4096).startswith(b"HTTP/1.1 200 ")
        # Between requests it may take longer.
        time.sleep(0.8)
        again.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert again.recv(4096).startswith(b"HTTP/1.1 200 ")
        again.sendall(b"GET /hea")
        assert received(silent) == received(slow) == received(again) == b""


def test_a_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    with serving(speculating(max_num_seqs=4), Impatient) as running, connected(running) as client:
        settings = {"max_tokens": 240, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 16, "n": 4}
        body = json.dumps({"messages": [{"role": "user", "content": "ab"}], **settings}).encode()
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
        client.sendall(body)
        time.sleep(2.0)
        found = received(client)
        assert found.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in found
        assert chat(running, "ab", max_tokens=2).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_reads_a_little_of_a_closing_connection() -> None:
    """What makes room for more does not end the time for the rest."""
    loop, aborted = asyncio.new_event_loop(), threading.Event()
    connection = Impatient.__new__(Impatient)
    connection.loop = loop
    connection.transport = SimpleNamespace(is_closing=lambda: True, abort=aborted.set)  # type: ignore[assignment]
    connection.flow = FlowControl(connection.transport)
    connection.pause_writing()
    connection.resume_writing()
    loop.run_until_complete(asyncio.sleep(2 * Impatient.send_seconds))
    loop.close()
    assert aborted.is_set()


def test_api_keys() -> None:
    with serving(speculating(), api_keys=("one", "two")) as running:
        for headers in ({}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}):
            response = running.client.get("/v1/models", headers=headers)
            assert response.headers["connection"] == "close"
            assert response.status_code == 401 and response.json()["error"]["code"] == 401
        assert running.client.get("/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200
        assert running.client.get("/").status_code == running.client.get("/health").status_code == 200
        assert running.client.get("/metrics").status_code == 401


def test_a_full_queue() -> None:
    with serving(speculating(max_num_seqs=1), max_queue=2) as running, ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: chat(running, "ab", max_tokens=200, ignore_eos=True), range(12)))
        refused = [response for response in found if response.status_code == 429]
        assert refused and all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert running.metric("vllm:admission_rejections_total") == len(refused)
        assert sum(response.status_code == 200 for response in found) == 12 - len(refused) >= 3


def test_a_full_queue_compiles_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speculating(max_num_seqs=1)
    slow_down(llm, monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(llm.engine, "prepare", asked.append)
    with serving(llm, max_queue=1) as running, ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(chat, running, "ab", max_tokens=100, ignore_eos=True) for _ in range(2)]
        wait_until(lambda: running.metric("vllm:num_requests_waiting") == 1)
        answer = chat(running, "ab", response_format={"type": "json_object"})
        assert answer.status_code == 429 and not asked
        assert all(one.result().status_code == 200 for one in busy)


def test_grammars_that_compile_have_a_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only place, here."""
    llm = speculating(max_num_seqs=1)
    prepare, begun, go_on = llm.engine.prepare, threading.Event(), threading.Event()

    def slowly(params: SamplingParams) -> None:
        begun.set()
        assert go_on.wait(20)
        prepare(params)

    monkeypatch.setattr(llm.engine, "prepare", slowly)
    settings: dict[str, Any] = {"structured_outputs": {"regex": "[ab]+"}, "max_tokens": 3}
    with serving(llm, max_queue=0) as running, ThreadPoolExecutor(2) as pool:
        one = pool.submit(chat, running, "ab", **settings)
        assert begun.wait(20)
        assert chat(running, "ab", **settings).status_code == 429
        go_on.set()
        assert one.result().status_code == 200
        assert chat(running, "ab", **settings).status_code == 200
        # The time that it takes counts.
        go_on.clear()
        late = pool.submit(chat, running, "ab", deadline_seconds=0.2, **settings)
        time.sleep(0.4)
        go_on.set()
        assert late.result().status_code == 504


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def slow_down(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of at least 20 ms, so that a request takes some seconds."""
    forward = llm.target.model.forward

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return forward(*arguments)

    monkeypatch.setattr(llm.target.model, "forward", slow)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speculating(max_num_seqs=4)
    slow_down(llm, monkeypatch)
    with serving(llm) as running:
        body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 240, "ignore_eos": True, "n": 4}
        body |= {"stream": stream, "temperature": 1.0}
        with httpx.Client(base_url=running.url) as leaving:
            if stream:
                with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    leaving.post("/v1/chat/completions", json=body, timeout=1.0)
        wait_until(lambda: running.metric("vllm:num_requests_running") == 0)
        wait_until(lambda: running.metric("vllm:request_success_total", finished_reason="abort") == 4)
        assert chat(running, "ab", max_tokens=2).status_code == 200


def test_a_client_that_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its stream has begun."""
    llm = speculating(max_num_seqs=1)
    slow_down(llm, monkeypatch)
    with serving(llm) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(chat, running, "ab", max_tokens=200, ignore_eos=True)
        wait_until(lambda: running.metric("vllm:num_requests_running") == 1)
        body = {"messages": [{"role": "user", "content": "ab"}], "stream": True}
        with httpx.Client(base_url=running.url) as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post("/v1/chat/completions", json=body, timeout=0.7)
        wait_until(lambda: running.metric("vllm:num_requests_waiting") == 0)
        assert not first.done()
        assert first.result().status_code == 200


def test_the_end_is_told_once_and_last(offline: LLM) -> None:
    """Updates that are read when the engine's thread has long finished the sequence."""
    sequence = offline.engine.add(tiny_tokenizer().encode("abc"), SamplingParams(max_tokens=6, ignore_eos=True))[0]
    follower = _Follower(Job([], 0.0), 0, Progress(0, 0, sequence))
    updates = []
    while not sequence.finished:
        offline.engine.step()
        updates.append(follower.update())
    answer = Answer(
        chat=True,
        model="tiny",
        tokenizer=tiny_tokenizer(),
        prompts=[[1]],
        n=1,
        logprobs=None,
        detail="none",
        most_drafts=0,
        trace=False,
    )
    told = []
    for update in updates:
        assert update is not None
        told.append((answer.take(update)["finish_reason"], answer.usage()["completion_tokens"]))
    assert told == [*((None, count) for count in range(1, 6)), ("length", 6)]


def test_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speculating()
    slow_down(llm, monkeypatch)
    with serving(llm) as running:
        response = chat(running, "ab", max_tokens=240, ignore_eos=True, deadline_seconds=0.05)
        assert response.status_code == 504 and "deadline" in response.json()["error"]["message"]
        chunks = streamed(running, "ab", max_tokens=240, ignore_eos=True, deadline_seconds=0.1)
        assert chunks[-1]["error"]["code"] == 504
        wait_until(lambda: running.metric("vllm:num_requests_running") == 0)


class Failing:
    """A drafter that raises from some round on, in ``where``."""

    taps: tuple[int, ...] = ()
    max_tokens = default_tokens = 3
    calibration = None

    def __init__(self, where: str) -> None:
        self.where, self.asked = where, 0

    def observe(self, batch: Any, taps: Any, accepted: Sequence[int]) -> None:
        if self.where == "observe" and self.asked > 3:
            raise RuntimeError("the drafter is out of order")

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        self.asked += 1
        if self.where == "propose" and self.asked > 3:
            raise RuntimeError("the drafter is out of order")
        return [Proposal((4, 5)) for _ in requests]

    def release(self, slot: int) -> None:
        pass


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_raises(where: str, offline: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.llm.load_drafter", lambda *_: Failing(where))
    with serving(speculating(drafter_errors="continue")) as running:
        answer = chat(running, "abc", temperature=0, max_tokens=30, ignore_eos=True).json()
        wanted = expected(offline, "abc", temperature=0, max_tokens=30, ignore_eos=True)
        assert answer["choices"][0]["message"]["content"] == wanted.outputs[0].text
        assert running.metric("foredraft:drafter_failures_total") == 1


def test_a_pass_that_fails_takes_only_its_own_requests_along(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speculating()
    with serving(llm) as running:
        forward = llm.target.model.forward
        monkeypatch.setattr(llm.target.model, "forward", lambda *_: 1 / 0)
        response = chat(running, "ab", max_tokens=4)
        assert response.status_code == 500 and "division" not in response.text
        monkeypatch.setattr(llm.target.model, "forward", forward)
        assert chat(running, "ab", max_tokens=4).status_code == 200


def test_a_pass_that_fails_after_some_of_its_sequences_have_finished(
    monkeypatch: pytest.MonkeyPatch, offline: LLM
) -> None:
    """Their places are free again, and who waited is answered."""
    llm = speculating(max_num_seqs=2, max_num_batched_tokens=64)
    append, failed = sequences.Sequence.append, threading.Event()

    def failing(self: sequences.Sequence, tokens: Any, accepted: int) -> int:
        if self.params.seed == 7 and self.num_output:
            failed.set()
            raise RuntimeError("cannot be taken in")
        return append(self, tokens, accepted)

    monkeypatch.setattr(sequences.Sequence, "append", failing)
    slow_down(llm, monkeypatch)
    with serving(llm) as running, ThreadPoolExecutor(6) as pool:
        # Both are in one pass, whose first ends with its second token, before the other raises.
        settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        both = {"prompt": ["ab", "ab"], "max_tokens": 2, "seed": 7, **settings}
        broken = pool.submit(running.client.post, "/v1/completions", json=both)
        wait_until(lambda: llm.engine.scheduler.running or failed.is_set())
        waiting = [pool.submit(chat, running, text, max_tokens=5, **settings) for text in ("abc", "bcd", "cab")]
        assert broken.result().status_code == 500
        for text, one in zip(("abc", "bcd", "cab"), waiting, strict=True):
            wanted = expected(offline, text, max_tokens=5, **settings).outputs[0].text
            assert one.result().json()["choices"][0]["message"]["content"] == wanted
        assert failed.is_set() and not llm.engine.scheduler.running
        assert chat(running, "ab", max_tokens=2).status_code == 200


def test_logits_that_are_not_finite_end_one_request(monkeypatch: pytest.MonkeyPatch, offline: LLM) -> None:
    """A logit bias of the other request's own kind would not do: the pass itself brings them, for one sequence."""
    llm = speculating(max_num_seqs=4)
    forward = llm.target.model.forward

    def damaged(batch: Any, cache: Any, taps: Any = ()) -> Any:
        output = forward(batch, cache, taps)
        first = 0
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            rows = [row for row in range(len(batch.logit_rows)) if first <= batch.logit_rows[row] < first + count]
            if slot == 1:
                output.logits[rows] = float("nan")
            first += count
        return output

    monkeypatch.setattr(llm.target.model, "forward", damaged)
    with serving(llm) as running, ThreadPoolExecutor(3) as pool:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
        found = list(pool.map(lambda text: chat(running, text, **settings), ["abc", "bcd", "cab"]))
        codes = sorted(response.status_code for response in found)
        assert codes[0] == 200 and set(codes) <= {200, 500}
        for text, response in zip(["abc", "bcd", "cab"], found, strict=True):
            if response.status_code == 200:
                wanted = expected(offline, text, **settings).outputs[0].text
                assert response.json()["choices"][0]["message"]["content"] == wanted
            else:
                assert "NaN" in response.json()["error"]["message"]
        assert running.metric("vllm:request_success_total", finished_reason="error") == codes.count(500)


def engines() -> int:
    return sum(thread.name == "engine" and thread.is_alive() for thread in threading.enumerate())


def test_what_was_accepted_is_finished_at_shutdown() -> None:
    before = engines()
    with serving(speculating()) as running, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(chat, running, "ab", max_tokens=200, ignore_eos=True) for _ in range(3)]
        wait_until(lambda: running.metric("vllm:num_requests_running") == 3)
        running.uvicorn.should_exit = True
        for answer in answers:
            assert answer.result().json()["usage"]["completion_tokens"] == 200
    assert engines() == before
