"""Generated requests: the server accepts or rejects each of them, and never fails.

schemathesis generates valid and invalid requests from /openapi.json. Afterwards the server, a separate process,
still works and holds no more resources than before.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_server import wait_until

pytestmark = pytest.mark.long


schemathesis = pytest.importorskip("schemathesis")

# Texts that a schema does not suggest: lone surrogates, control characters, and special syntax.
texts = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=12),
    st.sampled_from(["[MASK]", "one [MASK] two", "a ||| b", "Anna\tlives", "{", '{"question": 1}', "we walk", "../x"]),
)


@dataclass(frozen=True)
class ServerProcess:
    url: str
    pid: int

    def measure_resources(self) -> tuple[int, int, float]:
        """Threads, open files, and MiB of memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        threads, kib = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("Threads", "VmRSS"))  # type: ignore[index]
        return threads, len(os.listdir(f"/proc/{self.pid}/fd")), kib / 1024


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[ServerProcess]:
    """Serve all runs with the command."""
    command = [sys.executable, "-m", "jumok", "serve", "--port", "0", "--device", "cpu", "--max-batch-delay-ms", "0"]
    runs_by_name = [f"{name}={folder}" for name, folder in runs.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *runs_by_name], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        first, *_ = [process.stdout.readline() for _ in runs_by_name]
        yield ServerProcess(first.split()[0].rsplit("/", 1)[0], process.pid)
        process.terminate()
        assert process.wait(timeout=60) == -signal.SIGTERM  # it was still running, and the signal ended it


CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
CHECKS += ("response_schema_conformance",)


def send_generated_requests(server: ServerProcess, count: int) -> None:
    """Send generated requests. The server may reject any of them, and must not fail."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    modes = schemathesis.GenerationMode
    checks = [getattr(schemathesis.checks, name) for name in CHECKS]
    sent = 0

    @settings(max_examples=count)
    @given(
        case=st.one_of(schema.as_strategy(modes.POSITIVE), schema.as_strategy(modes.NEGATIVE)),
        text=st.one_of(st.none(), texts),
    )
    def test(case: Any, text: str | None) -> None:
        nonlocal sent
        if text is not None and isinstance(case.body, dict):
            fields = [name for name in case.body if name in ("text", "text_pair", "question", "context")]
            case.body |= dict.fromkeys(fields[:1], text)
        case.call_and_validate(checks=checks)
        sent += 1

    test()
    assert sent >= count


def is_working(server: ServerProcess) -> bool:
    """Whether a request gets the expected response."""
    response = httpx2.post(f"{server.url}/tag", json={"text": "Anna"}, timeout=60, verify=False)
    return bool(response.status_code == 200 and response.json()["words"] == ["Anna"])


def test_generated_requests_cause_no_server_error(server: ServerProcess) -> None:
    send_generated_requests(server, 100)
    assert is_working(server)


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(server: ServerProcess) -> None:
    send_generated_requests(server, 2_000)
    threads, files, before = server.measure_resources()
    send_generated_requests(server, 8_000)
    assert is_working(server)
    # Connections are closed a little later.
    wait_until(
        lambda: all(now <= then for now, then in zip(server.measure_resources(), (threads, files), strict=False))
    )
    assert server.measure_resources()[2] < before + 32
    metrics = httpx2.get(f"{server.url}/metrics", verify=False).text
    counts = set(re.findall(r'jumok_http_requests_total{path="([^"]+)",status="(\d+)"}', metrics))
    tasks = ("translate", "translate/stream", "classify", "tag", "answer", "fill-mask", "attend/tag")
    assert {(f"/{task}", status) for task in tasks for status in ("200", "422")} <= counts
