"""Runs, loaded and served until somebody stops it."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from jumok.errors import InputError
from jumok.run import Run
from jumok.serve.app import SETTLE, app
from jumok.serve.limits import Limits
from jumok.serve.protocol import Prompt
from jumok.tasks import engines, served
from jumok.tasks.served import Bounds, Service

__all__ = ["config", "load", "serve"]

BACKLOG = 512  # connections that may wait to be accepted, and are accepted at once
OTHER_FILES = 128  # open files that are no connections
SWITCH_INTERVAL = 0.0005  # seconds
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def load(
    runs: Sequence[str], bounds: Bounds, device: str = "auto", engine: str = "torch"
) -> dict[str, Service[Any, Any]]:
    """The models of runs, by name: one that is given, as in ``name=runs/folder``, or that of the folder."""
    engines.check(engine)
    found: dict[str, Service[Any, Any]] = {}
    for given in runs:
        name, folder = _named(given)
        if name in found:
            raise InputError(f"two runs have the name {name}; give one of them another, as in other={folder}")
        run = Run.open(folder)
        made = served.of(run.recipe.task).Service
        found[name] = made(engines.load(run, engine, device), bounds)
    return found


def _named(given: str) -> tuple[str, Path]:
    name, equals, folder = given.partition("=")
    if equals and not Path(given).exists():
        return name, Path(folder)
    return Path(given).resolve().name, Path(given)


def serve(
    runs: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    limits: Limits | None = None,
    engine: str = "torch",
    device: str = "auto",
) -> None:
    """Serve runs until SIGTERM or Ctrl+C, and finish then what was taken."""
    limits = _fit_open_files(limits or Limits())
    if token is not None and not token.strip():
        raise InputError(
            "--token is empty, or JUMOK_TOKEN is; leave the option out, or unset the variable, to let "
            "everybody in"
        )
    services = load(runs, limits.bounds, device, engine)
    local = _is_local(host)
    if not local and token is None:
        print(f"jumok: whoever reaches {host} may use this; --token … asks for a token", file=sys.stderr)
    # Without a token a page from elsewhere could have its own name point here, and ask in a reader's browser.
    made = app(services, limits, token=token, hosts=LOOPBACK if local and token is None else None)
    with _listening(host, port) as sock:
        at = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        for name, service in services.items():
            print(f"{at}/{service.task}   {name}", flush=True)
        print(f"{at}/   a page for all of them", flush=True)
        # Said to a person at a terminal about one text. Here nobody knows whose text it was, and each warning
        # would be remembered, so as not to be said twice.
        warnings.filterwarnings("ignore", category=UserWarning)
        # A model's thread releases the GIL at every operation, and waits up to this long to get it back from
        # a busy event loop. With Python's default of 5 ms, an overload leaves the model little time.
        sys.setswitchinterval(SWITCH_INTERVAL)
        # Modules and models stay until the end. Without this, each full garbage collection would traverse
        # them, and stop all threads for 0.1 to 0.2 s.
        gc.collect()
        gc.freeze()
        uvicorn.Server(config(made, limits)).run(sockets=[sock])


def config(app: FastAPI, limits: Limits) -> uvicorn.Config:
    """How the app is run."""
    return uvicorn.Config(
        app,
        http=Prompt.with_limits(limits.body_seconds, limits.connections, app.state.admission),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(0.0, limits.grace - SETTLE),  # type: ignore[arg-type]  # seconds, any
    )


def _fit_open_files(limits: Limits) -> Limits:
    """Raise the limit on open files as far as needed and allowed; fit the number of connections to it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return limits
    wanted = limits.connections + BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limits = replace(limits, connections=max(1, min(limits.connections, soft - BACKLOG - OTHER_FILES)))
    return limits


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: {error}; another port may be free") from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
