"""A server of a packed folder: that of `transformers serve`, for a model that stays packed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor
from transformers.utils.import_utils import is_serve_available

from .._compat import require
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..errors import CheckpointError, OptionError, VersionError, expected

# The names of the files of a tokenizer: without one transformers makes one that knows no word.
_TOKENIZERS = ("*token*.json", "*.tiktoken", "*.model", "vocab.*")

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def serve(
    folder: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    log_level: str = "error",
    ready: Callable[[str, str], None] = lambda name, address: None,
) -> None:
    """Serve a folder with packed weights until the process is interrupted.

    Args:
        folder: with packed weights and a tokenizer.
        host: an address or name of this machine.
        port: 0 for one that is free.
        device: "auto" is the GPU, or the CPU without one.
        log_level: "debug", "info", "warning", "error" or "critical"; requests are logged at "info".
        ready: called with the name of the model and the address once it answers.

    Raises:
        CheckpointError: the folder has no packed weights or no tokenizer, or generates no text.
        OptionError: an option does not fit, or the address is in use.
        VersionError: a package is missing.
    """
    require("transformers")
    if not is_serve_available():
        needed = "fastapi, openai, pydantic and uvicorn"
        raise VersionError(f"The server needs {needed}: pip install 'fp4pass[serving]'.")
    if log_level not in _LOG_LEVELS:
        wanted = f"one of {', '.join(_LOG_LEVELS)}"
        raise OptionError(expected("serve: log_level", wanted, repr(log_level)))
    path = Path(folder)
    if not is_packed(path):
        raise CheckpointError(
            f"{folder}: expected a folder with packed weights, got none. Quantize the model "
            "first (fp4pass quantize), or serve it with transformers serve."
        )
    if not any(each for pattern in _TOKENIZERS for each in path.glob(pattern)):
        raise CheckpointError(
            f"{folder}: expected a tokenizer beside the weights, got none. Save it there: "
            "tokenizer.save_pretrained(folder)."
        )
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("a port is at most 65535")
        # Before the model is loaded, which may take minutes.
        socket.create_server((host, port), family=kind).close()
    except OSError as error:
        raise OptionError(
            f"serve: {host}, port {port}: {error.strerror or error}. Give another --port (0: any "
            "that is free) or --host."
        ) from error
    processor = AutoProcessor.from_pretrained(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = load(path, device_map=device)
    if not (hasattr(model, "can_generate") and model.can_generate()):
        got = type(model).__name__
        raise CheckpointError(expected(str(path), "a model that generates text", got))
    name = path.resolve().name
    server, thread = _started(model, processor, name, host, port, log_level)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        # Python would wait for the threads that answer.
        signal.signal(number, lambda *_, code=code: os._exit(code))
    while thread.is_alive() and not server.started:
        time.sleep(0.02)
    if server.started:
        shown = f"[{host}]" if ":" in host else host
        ready(name, f"http://{shown}:{server.servers[0].sockets[0].getsockname()[1]}")
    thread.join()


def _started(
    model: Any, processor: Any, name: str, host: str, port: int, log_level: str
) -> tuple[Any, Any]:
    """Return the server of `transformers serve` for one model, and the thread that it runs in."""
    from transformers.cli import serve as command
    from transformers.cli.serving import model_manager

    class OneModel(model_manager.ModelManager):
        """Has a model that is loaded already, known by its name alone."""

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return model, processor

        def process_model_name(self, model_id: str) -> str:  # type: ignore[override]
            return model_id

        def list_models(self, *args: Any) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "fp4pass"}]

        # Until transformers 5.23.
        get_gen_models = list_models

    own = model_manager.ModelManager
    model_manager.ModelManager = OneModel  # type: ignore[misc]
    try:
        options = {"host": host, "port": port, "log_level": log_level}
        found: Any = command.Serve(force_model=name, non_blocking=True, **options)  # type: ignore
    finally:
        model_manager.ModelManager = own  # type: ignore[misc]
    for logger in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(logger).setLevel(log_level.upper())
    return found.server, found._thread
