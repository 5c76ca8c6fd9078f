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
from jumok.inference import engines
from jumok.run import Run
from jumok.serve.app import SHUTDOWN_MARGIN_SECONDS, build_app
from jumok.serve.http_protocol import LimitedHttpProtocol
from jumok.serve.limits import ServerLimits
from jumok.tasks import api as tasks_api
from jumok.tasks.api import RequestLimits, TaskService

__all__ = ["build_uvicorn_config", "load_services", "serve"]

BACKLOG = 512  # connections that may wait to be accepted, and are accepted at once
NUM_RESERVED_FILES = 128  # open files that are no connections
SWITCH_INTERVAL_SECONDS = 0.0005  # seconds
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def load_services(
    runs: Sequence[str], request_limits: RequestLimits, device: str = "auto", engine: str = "torch"
) -> dict[str, TaskService[Any, Any]]:
    """The models of runs, by name: one that is given, as in ``name=runs/folder``, or that of the folder."""
    engines.check_engine(engine)
    found: dict[str, TaskService[Any, Any]] = {}
    for given in runs:
        name, folder = _parse_run_argument(given)
        if name in found:
            raise InputError(f"two runs have the name {name}; give one of them another, as in other={folder}")
        run = Run.open(folder)
        made = tasks_api.get_api_module(run.recipe.task).Service
        found[name] = made(engines.load_predictor(run, engine, device), request_limits)
    return found


def _parse_run_argument(argument: str) -> tuple[str, Path]:
    name, equals, folder = argument.partition("=")
    if equals and not Path(argument).exists():
        return name, Path(folder)
    return Path(argument).resolve().name, Path(argument)


def serve(
    runs: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    auth_token: str | None = None,
    limits: ServerLimits | None = None,
    engine: str = "torch",
    device: str = "auto",
) -> None:
    """Serve runs until SIGTERM or Ctrl+C, and finish then what was taken."""
    limits = _fit_open_file_limit(limits or ServerLimits())
    if auth_token is not None and not auth_token.strip():
        raise InputError(
            "--token is empty, or JUMOK_TOKEN is; leave the option out, or unset the variable, to let "
            "everybody in"
        )
    services = load_services(runs, limits.request_limits, device, engine)
    local = _is_loopback(host)
    if not local and auth_token is None:
        print(f"jumok: whoever reaches {host} may use this; --token … asks for a token", file=sys.stderr)
    # Without a token a page from elsewhere could have its own name point here, and ask in a reader's browser.
    made = build_app(
        services,
        limits,
        auth_token=auth_token,
        allowed_hosts=LOOPBACK_HOSTS if local and auth_token is None else None,
    )
    with _open_socket(host, port) as sock:
        at = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        for name, service in services.items():
            print(f"{at}/{service.endpoint}   {name}", flush=True)
        print(f"{at}/   a page for all of them", flush=True)
        # Said to a person at a terminal about one text. Here nobody knows whose text it was, and each warning
        # would be remembered, so as not to be said twice.
        warnings.filterwarnings("ignore", category=UserWarning)
        # A model's thread releases the GIL at every operation, and waits up to this long to get it back from
        # a busy event loop. With Python's default of 5 ms, an overload leaves the model little time.
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        # Modules and models stay until the end. Without this, each full garbage collection would traverse
        # them, and stop all threads for 0.1 to 0.2 s.
        gc.collect()
        gc.freeze()
        uvicorn.Server(build_uvicorn_config(made, limits)).run(sockets=[sock])


def build_uvicorn_config(app: FastAPI, limits: ServerLimits) -> uvicorn.Config:
    """How the app is run."""
    return uvicorn.Config(
        app,
        http=LimitedHttpProtocol.with_limits(
            limits.body_timeout, limits.max_connections, app.state.admission
        ),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(0.0, limits.shutdown_timeout - SHUTDOWN_MARGIN_SECONDS),  # type: ignore[arg-type]  # seconds, any
    )


def _fit_open_file_limit(limits: ServerLimits) -> ServerLimits:
    """Raise the limit on open files as far as needed and allowed; fit the number of connections to it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return limits
    wanted = limits.max_connections + BACKLOG + NUM_RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limits = replace(
            limits, max_connections=max(1, min(limits.max_connections, soft - BACKLOG - NUM_RESERVED_FILES))
        )
    return limits


def _open_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: {error}; another port may be free") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
