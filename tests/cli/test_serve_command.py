"""foredraft serve as a process: its start line, an answer, SIGTERM under load, and what it refuses."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from foredraft.errors import UserError
from foredraft.models.loading import embedded_file
from foredraft.ops import native

MISSING = native.unavailable()


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "foredraft", "serve", "smollm2-135m", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stderr is not None
    for line in process.stderr:
        event: dict[str, Any] = json.loads(line)
        if event.get("event") == "ready":
            return event
    raise AssertionError("it ended before it was ready")


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_server_from_start_to_sigterm() -> None:
    try:
        embedded_file()
    except UserError as error:
        pytest.skip(str(error))
    process = serve("--kv-cache-memory", "600M", "--max-num-seqs", "4")
    try:
        event = ready(process)
        assert event["model"] == "smollm2-135m" and event["method"] == "dflash"
        assert event["num_speculative_tokens"] == "auto" and event["max_model_len"] == 8192
        assert 500 < event["memory_mib"]["kv_cache"] <= 600 and event["memory_mib"]["process"] > 50
        assert event["pass_ms_by_rows"]["1"] > 0 and event["draft_ms_by_tokens"].keys() == {"1", "3", "7"}
        body = {"messages": [{"role": "user", "content": "Name a river."}], "temperature": 0, "max_tokens": 150}
        body["ignore_eos"] = True
        found: list[httpx.Response] = []
        asked = threading.Thread(
            target=lambda: found.append(httpx.post(f"{event['url']}/v1/chat/completions", json=body, timeout=60))
        )
        asked.start()
        running = 'vllm:num_requests_running{engine="0",model_name="smollm2-135m"} 1.0'
        while running not in httpx.get(f"{event['url']}/metrics").text:
            assert asked.is_alive()
        process.send_signal(signal.SIGTERM)
        asked.join(60)
        assert found[0].json()["usage"]["completion_tokens"] == 150
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_sigterm_right_after_the_start_line() -> None:
    try:
        embedded_file()
    except UserError as error:
        pytest.skip(str(error))
    process = serve("--kv-cache-memory", "600M", "--method", "none")
    try:
        ready(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--log-format", "xml"], "expected json or text"),
        (["--max-body", "huge"], "--max-body"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory"),
        (["--kv-cache-memory", "1G", "--kernels", "pytorch"], "needs the native kernels"),
        (["--per-request-spec-decode-metrics", "all"], "summary or detailed"),
    ],
)
def test_what_is_refused(arguments: Sequence[str], said: str) -> None:
    process = serve(*arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and said in " ".join(errors.split())


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = serve("--port", port)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in " ".join(errors.split())
