"""``jumok serve``."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from jumok.cli.options import DeviceOption, batching_option, computation_option, limit_option, network_option
from jumok.errors import MissingExtra

AUTH_TOKEN_VARIABLE = "JUMOK_AUTH_TOKEN"


# The defaults equal those of ServerLimits and RequestLimits, which are too slow to import here.
def serve(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders. NAME=RUN sets the name of a model.")],
    host: Annotated[str, network_option(help="Address to listen on. 0.0.0.0 listens on all interfaces.")] = "127.0.0.1",
    port: Annotated[int, network_option(min=0, max=65535, help="Port to listen on. 0 selects a free port.")] = 8000,
    auth_token: Annotated[
        str | None, network_option(envvar=AUTH_TOKEN_VARIABLE, help="Require this bearer token on every request.")
    ] = None,
    max_queue_tokens: Annotated[
        int,
        batching_option(
            min=1,
            help="Maximum number of pending tokens per model. When the queue is full, the server returns 503 "
            "immediately.",
        ),
    ] = 65536,
    max_batch_tokens: Annotated[
        int, batching_option(min=1, help="Maximum number of tokens in a batch, including padding.")
    ] = 4096,
    max_batch_delay_ms: Annotated[
        float, batching_option(min=0, help="Maximum time in milliseconds that a request waits for a batch to fill.")
    ] = 4.0,
    max_body_bytes: Annotated[
        int | None,
        limit_option(
            min=1,
            help="Maximum size of a request body in bytes. Defaults to what the largest request of the task needs.",
        ),
    ] = None,
    max_text_chars: Annotated[int, limit_option(min=1, help="Maximum length of a text in characters.")] = 20_000,
    max_beam_size: Annotated[int, limit_option(min=1, help="Maximum beam size of a request.")] = 10,
    max_decode_tokens: Annotated[
        int, limit_option(min=1, help="Maximum cost of a translation: source tokens times beam size.")
    ] = 4096,
    max_image_bytes: Annotated[int, limit_option(min=1, help="Maximum size of an image file in bytes.")] = 12 << 20,
    max_image_pixels: Annotated[int, limit_option(min=1, help="Maximum number of pixels of an image.")] = 24_000_000,
    max_speech_chars: Annotated[
        int, limit_option(min=1, help="Maximum length of a text to synthesize, in characters.")
    ] = 2_000,
    timeout: Annotated[float, limit_option(min=0.001, help="Maximum time in seconds to answer a request.")] = 60.0,
    shutdown_timeout: Annotated[
        float, limit_option(min=0, help="Time in seconds to finish running requests at shutdown.")
    ] = 30.0,
    engine: Annotated[
        Literal["torch", "ctranslate2", "onnx"],
        computation_option(help="Inference engine. ctranslate2 is for Transformers that translate."),
    ] = "torch",
    device: DeviceOption = "auto",
) -> None:
    """Serve runs over HTTP, with a web page.

    The endpoints are translate, classify, tag, answer, fill-mask, caption and speak.
    """
    try:
        from jumok.serve import server
    except ModuleNotFoundError as error:
        raise MissingExtra(f'serving needs {error.name}, which is not installed: pip install "jumok[serve]"') from error
    from jumok.serve.limits import ServerLimits
    from jumok.tasks.api import RequestLimits

    if auth_token is None:
        auth_token = os.environ.get(AUTH_TOKEN_VARIABLE)  # Typer ignores an empty variable
    limits = ServerLimits(
        max_body_bytes=max_body_bytes,
        request_limits=RequestLimits(
            max_text_chars=max_text_chars,
            max_beam_size=max_beam_size,
            max_decode_tokens=max_decode_tokens,
            max_image_bytes=max_image_bytes,
            max_image_pixels=max_image_pixels,
            max_speech_chars=max_speech_chars,
        ),
        max_queue_tokens=max_queue_tokens,
        max_batch_tokens=max_batch_tokens,
        max_batch_delay=max_batch_delay_ms / 1000,
        request_timeout=timeout,
        shutdown_timeout=shutdown_timeout,
    )
    server.serve(runs, host=host, port=port, auth_token=auth_token, limits=limits, engine=engine, device=device)
