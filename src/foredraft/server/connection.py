"""HTTP connections, as uvicorn has them, that do not wait for ever for their client."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn itself bounds the time between requests only, and the application the time of a body.

    head_seconds: in which the head of the first request must have come, and the rest of a later one's. send_seconds:
    after which a client that does not read is dropped.
    """

    head_seconds = 30.0
    send_seconds = 60.0
    _head: asyncio.TimerHandle | None = None
    _send: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head = _stop(self._head)
        elif self.conn.trailing_data[0]:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._send = _stop(self._send)
        super().resume_writing()
        if self.transport.is_closing():
            self._linger()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._linger()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._linger()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._send = _stop(self._head), _stop(self._send)
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _linger(self) -> None:
        """A closing connection still waits for its client to read what was written."""
        if self._send is None:
            self._send = self.loop.call_later(self.send_seconds, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer any more."""
    if timer is not None:
        timer.cancel()
    return None
