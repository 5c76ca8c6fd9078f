"""Load runs and serve them until the server is stopped."""

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
from jumok.tasks import get_service_type
from jumok.tasks.api import RequestLimits, TaskService

BACKLOG = 512  # connections that wait to be accepted
NUM_RESERVED_FILES = 128  # open files other than connections
SWITCH_INTERVAL_SECONDS = 0.0005
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def load_services(
    runs: Sequence[str], request_limits: RequestLimits, device: str = "auto", engine: str = "torch"
) -> dict[str, TaskService[Any, Any]]:
    """Load the services of runs, by name.

    A run is a folder, or ``name=folder``. The default name is that of the folder.
    """
    engines.check_engine(engine)
    services: dict[str, TaskService[Any, Any]] = {}
    for argument in runs:
        name, folder = _parse_run_argument(argument)
        if name in services:
            raise InputError(
                f"two runs have the name {name}; give one of them another name, for example other={folder}"
            )
        run = Run.open(folder)
        service_type = get_service_type(run.recipe.task)
        services[name] = service_type(engines.load_predictor(run, engine, device), request_limits)
    return services


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
    """Serve runs until SIGTERM or Ctrl+C. Running requests are finished before the server stops."""
    limits = _fit_open_file_limit(limits or ServerLimits())
    if auth_token is not None and not auth_token.strip():
        raise InputError(
            "the token in --auth-token or JUMOK_AUTH_TOKEN is empty; to serve without a token, remove the "
            "option and unset the variable"
        )
    services = load_services(runs, limits.request_limits, device, engine)
    is_local = _is_loopback(host)
    if not is_local and auth_token is None:
        print(f"jumok: anyone who can reach {host} can use this server; --auth-token requires a token", file=sys.stderr)
    # Without a token, the Host header must name this machine. Otherwise a foreign web page could point its
    # own host name here (DNS rebinding) and send requests from the browser of a local user.
    app = build_app(
        services,
        limits,
        auth_token=auth_token,
        allowed_hosts=LOOPBACK_HOSTS if is_local and auth_token is None else None,
    )
    with _open_socket(host, port) as sock:
        url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        for name, service in services.items():
            print(f"{url}/{service.endpoint}   {name}", flush=True)
        print(f"{url}/   web page", flush=True)
        # These warnings concern one text of one user. The server's log is not the place for them, and Python
        # would remember each of them to suppress duplicates.
        warnings.filterwarnings("ignore", category=UserWarning)
        # The thread of a model releases the GIL at every operation, and waits up to this long to get it back
        # from a busy event loop. With Python's default of 5 ms, an overload leaves the model little time.
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        # Modules and models live as long as the process. Without this, each full garbage collection would
        # traverse them and stop all threads for 0.1 to 0.2 s.
        gc.collect()
        gc.freeze()
        uvicorn.Server(build_uvicorn_config(app, limits)).run(sockets=[sock])


def build_uvicorn_config(app: FastAPI, limits: ServerLimits) -> uvicorn.Config:
    """Build the configuration of uvicorn."""
    return uvicorn.Config(
        app,
        http=LimitedHttpProtocol.with_limits(limits.body_timeout, limits.max_connections, app.state.admission),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(0.0, limits.shutdown_timeout - SHUTDOWN_MARGIN_SECONDS),  # type: ignore[arg-type]  # float works
    )


def _fit_open_file_limit(limits: ServerLimits) -> ServerLimits:
    """Raise the limit on open files as far as allowed, and lower the number of connections to fit it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return limits
    num_files = limits.max_connections + BACKLOG + NUM_RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        soft = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
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
        raise InputError(f"cannot listen on --host {host} --port {port}: {error}; try another port") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
