"""HTTP connections: the protocol of uvicorn, with timeouts, a connection limit, and errors in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from http import HTTPStatus
from typing import Any, ClassVar, Self

import h11
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from jumok.serve.admission import AdmissionControl
from jumok.serve.errors import OverloadedError, ServerClosingError
from jumok.serve.responses import build_error_response

CONTENT_LENGTH_PATTERN = re.compile(rb"\ncontent-length:([^\r]*)", re.IGNORECASE)
# Headers that change how a request is parsed, and line endings that parsers treat differently.
UNUSUAL_HEADER_PATTERN = re.compile(
    rb"(?<!\r)\n|\n[ \t]|\ncontent-length[ \t]|\n(?:transfer-encoding|connection|expect|upgrade)[ \t]*:", re.IGNORECASE
)
MAX_FAST_REFUSAL_BODY_BYTES = 1 << 20  # of a rejected body that is read and discarded


class LimitedHttpProtocol(H11Protocol):
    """Closes connections that send no request head in time, or whose client does not read the response.

    Beyond ``max_connections``, the connection that has been idle for longest is closed. If all are busy, the
    new connection is rejected. Neither is logged, because a flood of connections would fill the log.

    If the server is overloaded, requests are rejected here, before their HTTP is parsed. This takes a third
    of the time that a rejection by the app takes.
    """

    io_timeout = 10.0
    max_connections = 4096
    admission: AdmissionControl | None = None
    # Connections without a request, longest idle first.
    idle_connections: ClassVar[dict[LimitedHttpProtocol, None]] = {}
    _bytes_to_discard = 0  # of a rejected body, not received yet
    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_limits(cls, io_timeout: float, max_connections: int, admission: AdmissionControl | None) -> type[Self]:
        """Create the protocol class of one server."""
        limits: dict[str, Any] = {
            "io_timeout": io_timeout,
            "max_connections": max_connections,
            "admission": admission,
            "idle_connections": {},
        }
        return type(cls.__name__, (cls,), limits)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with contextlib.suppress(OSError):
            # asyncio sets this option only for sockets that name their protocol. Without it, the second part
            # of a response waits 40 ms for the acknowledgement of the first.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.max_connections and not self._close_oldest_idle():
            self._refuse(HTTPException(503, "too many connections; try again in 1 s", {"Retry-After": "1"}))
            return
        self._update_timers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._bytes_to_discard:
            count = min(self._bytes_to_discard, len(data))
            self._bytes_to_discard, data = self._bytes_to_discard - count, data[count:]
        if not data:
            return
        if (refusal := self._build_fast_refusal(data)) is not None:
            self.transport.write(refusal)
            self._start_keep_alive_timer()
            return
        super().data_received(data)
        self._update_timers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the client still sends a rejected body
            self._update_timers()
        else:
            self._update_idle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.io_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle_connections.pop(self, None)
        for timer in (self._request_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Reject a request that is not valid HTTP. uvicorn calls this, possibly in the middle of a body."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # further output of the app is dropped
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(HTTPException(400, "the request is not valid HTTP"))
        else:
            self.transport.close()

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HTTPException) -> None:
        """Write an error response and close the connection."""
        error.headers = {**(error.headers or {}), "Connection": "close"}
        self.transport.write(self._format_refusal(error))
        self.transport.close()

    def _format_refusal(self, error: HTTPException) -> bytes:
        response = build_error_response(error)
        headers = (b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *response.raw_headers))
        status_line = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n"
        return b"%s%s\r\n%s" % (status_line.encode(), b"".join(headers), response.body)

    def _build_fast_refusal(self, data: bytes) -> bytes | None:
        """Build the response to a request that must be rejected, if its head is complete and not unusual."""
        if self.admission is None or not data.startswith(b"POST ") or not self._is_between_requests:
            return None
        path = data[5 : data.find(b" ", 5)].decode("latin-1")
        try:
            self.admission.check_capacity(path)
            return None
        except ServerClosingError:
            return None
        except OverloadedError as error:
            refusal = error
        head, end, body = data.partition(b"\r\n\r\n")
        is_usual = head.partition(b"\r\n")[0].endswith(b" HTTP/1.1") and not UNUSUAL_HEADER_PATTERN.search(head)
        lengths = [value.strip(b" ") for value in CONTENT_LENGTH_PATTERN.findall(head)]
        if not end or not is_usual or len(lengths) != 1 or not re.fullmatch(rb"\d{1,9}", lengths[0]):
            return None
        length = int(lengths[0])
        if not len(body) <= length <= MAX_FAST_REFUSAL_BODY_BYTES:
            return None
        self._bytes_to_discard = length - len(body)
        self.admission.count_refusal(path)
        return self._format_refusal(refusal)

    @property
    def _is_between_requests(self) -> bool:
        """Whether no part of a request has been received."""
        is_idle = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE
        return is_idle and not self._is_busy and not self.conn.trailing_data[0]

    def _start_keep_alive_timer(self) -> None:
        """Wait for the next request, as uvicorn does after a response."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _close_oldest_idle(self) -> bool:
        """Close the connection that has been idle for longest. Return False if there is none."""
        oldest = next(iter(self.idle_connections), None)
        if oldest is None:
            return False
        del self.idle_connections[oldest]
        oldest.transport.abort()
        return True

    def _update_timers(self) -> None:
        self._update_idle()
        if self._is_busy and self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        elif not self._is_busy and self._request_timer is None:
            self._request_timer = self.loop.call_later(self.io_timeout, self._on_request_timeout)

    def _update_idle(self) -> None:
        if self._is_busy or self.transport.is_closing():
            self.idle_connections.pop(self, None)
        else:
            self.idle_connections.setdefault(self)

    def _on_request_timeout(self) -> None:
        self._request_timer = None
        if not self._is_busy:
            self.transport.close()
