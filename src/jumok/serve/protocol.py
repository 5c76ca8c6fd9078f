"""The server's HTTP connections: uvicorn's protocol, with limits on time and number, and refusals in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any, ClassVar, Self

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jumok.serve.responses import SAFE

__all__ = ["Prompt"]

FULL = "too many connections; try again in 1 s"


class Prompt(H11Protocol):
    """Connections on which no request's head arrives in time are closed, or no answer is taken.

    Beyond ``max_connections``, the one that has been without a request for longest makes room. If all are
    busy, the new one is refused. Neither is logged: that would be a line for each.
    """

    seconds = 10.0
    max_connections = 4096
    idle: ClassVar[dict[Prompt, None]] = {}  # connections without a request, the oldest first
    _hurry: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    @classmethod
    def with_limits(cls, seconds: float, max_connections: int) -> type[Self]:
        """The protocol of one server."""
        limits = {"seconds": seconds, "max_connections": max_connections, "idle": {}}
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
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
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
        """What uvicorn calls for a request that is no HTTP, perhaps in the middle of its body."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing that is still written for it is sent
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, "the request is no valid HTTP")
        else:
            self.transport.close()

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, error: str, *headers: tuple[str, str]) -> None:
        """Write a refusal and close the connection."""
        body = json.dumps({"error": error}).encode()
        described = [*SAFE.items(), *headers, ("content-type", "application/json")]
        described += [("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=described),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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
