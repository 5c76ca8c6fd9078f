"""The server's HTTP connections: uvicorn's protocol, with limits on time and number, and refusals in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from http import HTTPStatus
from typing import Any, ClassVar, Self

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jumok.serve.admission import Admission
from jumok.serve.batcher import Closed, Overloaded
from jumok.serve.responses import SAFE

__all__ = ["Prompt"]

LENGTH = re.compile(rb"\ncontent-length:([^\r]*)", re.IGNORECASE)
# Headers that change how a request is read, and lines that parsers divide differently.
UNUSUAL = re.compile(
    rb"(?<!\r)\n|\n[ \t]|\ncontent-length[ \t]|\n(?:transfer-encoding|connection|expect|upgrade)[ \t]*:",
    re.IGNORECASE,
)
UNREAD = 1 << 20  # bytes of a refused body that are discarded at most
FULL = "too many connections; try again in 1 s"


class Prompt(H11Protocol):
    """Closes connections on which no request head arrives in time, or whose client reads no response.

    Beyond ``max_connections``, the connection that has been idle for longest is closed. If all are busy, the
    new one is refused. Neither is logged, as a flood would fill the log.

    When the server is overloaded, requests are refused here, before their HTTP is parsed. This takes a third
    of the time that a refusal by the app takes.
    """

    seconds = 10.0
    max_connections = 4096
    admission: Admission | None = None
    idle: ClassVar[dict[Prompt, None]] = {}  # connections without a request, the oldest first
    _unread = 0  # bytes of a refused body that have not arrived yet; they are discarded
    _hurry: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    @classmethod
    def with_limits(cls, seconds: float, connections: int, admission: Admission | None) -> type[Self]:
        """The protocol of one server."""
        limits: dict[str, Any] = {
            "seconds": seconds,
            "max_connections": connections,
            "admission": admission,
            "idle": {},
        }
        return type("Prompt", (cls,), limits)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with contextlib.suppress(OSError):
            # asyncio does this only for sockets that name their protocol. Without it, the second part of a
            # response waits 40 ms for the acknowledgement of the first.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.max_connections and not self._make_room():
            self._refuse(503, FULL, ("retry-after", "1"))
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._unread:
            count = min(self._unread, len(data))
            self._unread, data = self._unread - count, data[count:]
        if not data:
            return
        if (refusal := self._refusal_of(data)) is not None:
            self.transport.write(refusal)
            self._keep_alive()
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # a refused one still sends
            self._watch()
        else:
            self._watch_number()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        for timer in (self._hurry, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for a request that is not valid HTTP, perhaps in the middle of its body."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whatever the app still writes is dropped
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, "the request is not valid HTTP")
        else:
            self.transport.close()

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, error: str, *headers: tuple[str, str]) -> None:
        """Write a refusal and close the connection."""
        body = json.dumps({"error": error}).encode()
        fields = [*SAFE.items(), *headers, ("content-type", "application/json")]
        fields += [("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=fields, reason=HTTPStatus(status).phrase),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _refusal_of(self, data: bytes) -> bytes | None:
        """The response to a request that must be refused, if its whole head is here and is a usual one."""
        if self.admission is None or not data.startswith(b"POST ") or not self._is_between_requests:
            return None
        path = data[5 : data.find(b" ", 5)].decode("latin-1")
        try:
            self.admission.check(path)
            return None
        except Closed:
            return None
        except Overloaded as error:
            message, retry = str(error), error.retry
        head, end, body = data.partition(b"\r\n\r\n")
        usual = head.partition(b"\r\n")[0].endswith(b" HTTP/1.1") and not UNUSUAL.search(head)
        lengths = [value.strip(b" ") for value in LENGTH.findall(head)]
        if not end or not usual or len(lengths) != 1 or not re.fullmatch(rb"\d{1,9}", lengths[0]):
            return None
        length = int(lengths[0])
        if not len(body) <= length <= UNREAD:
            return None
        self._unread = length - len(body)
        self.admission.count_refusal(path)
        content = json.dumps({"error": message}).encode()
        headers = [*SAFE.items(), ("content-type", "application/json"), ("content-length", len(content))]
        lines = "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("retry-after", retry)])
        date = b"".join(b"%s: %s\r\n" % pair for pair in self.server_state.default_headers)
        return b"HTTP/1.1 503 Service Unavailable\r\n%s%s\r\n%s" % (date, lines.encode(), content)

    @property
    def _is_between_requests(self) -> bool:
        """Whether no part of a request has arrived."""
        idle = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE
        return idle and not self._is_busy and not self.conn.trailing_data[0]

    def _keep_alive(self) -> None:
        """Wait for the next request, as uvicorn does after a response."""
        self._unset_keepalive_if_required()
        wait = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = wait
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest; False if there is none."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest.transport.abort()
        return True

    def _watch(self) -> None:
        self._watch_number()
        if self._is_busy and self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None
        elif not self._is_busy and self._hurry is None:
            self._hurry = self.loop.call_later(self.seconds, self._late)

    def _watch_number(self) -> None:
        if self._is_busy or self.transport.is_closing():
            self.idle.pop(self, None)
        else:
            self.idle.setdefault(self)

    def _late(self) -> None:
        self._hurry = None
        if not self._is_busy:
            self.transport.close()
