"""A server on a free port, in a thread of the test."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from foredraft.llm import LLM
from foredraft.server.app import ServerConfig, create_app
from foredraft.server.connection import Connection


@dataclass
class Running:
    url: str
    uvicorn: uvicorn.Server
    client: httpx.Client

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that carry these labels."""
        found = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{key}="{own}"' in head for key, own in labels.items()):
                found += float(value)
        return found


@contextmanager
def serving(llm: LLM, http: type[Connection] = Connection, **settings: Any) -> Iterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    # Little is buffered, so that a client that does not read is noticed.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    app = create_app(llm, ServerConfig("tiny", **settings))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", http=http, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Running(url, server, client)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
