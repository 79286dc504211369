"""Private APIs of transformers' server: its options, its models, how it runs."""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Fp4PassError, OptionError, VersionError
from .transformers import require_transformers

# Settings that continuous batching takes from the first request for all that follow.
_SAMPLING = ("temperature", "top_p", "stop", "frequency_penalty", "logit_bias")

# Of a generation config, what it takes from each request.
_PER_REQUEST = ("max_new_tokens", "eos_token_id")

# Below this level of logs nobody is told of each request.
_VERBOSE = ("debug", "info")


@dataclass(frozen=True)
class ServedModel:
    """The one model of a server.

    Attributes:
        name: under which it is listed.
        names: by which requests may ask for it.
        facts: what is listed of it beside its name.
        load: makes the model, of what the server has as its device, dtype and attention.
        load_processor: makes the tokenizer or processor.
    """

    name: str
    names: frozenset[str]
    facts: Mapping[str, Any]
    load: Callable[[Any, Any, str | None], Any]
    load_processor: Callable[[], Any]


def require_server() -> None:
    """Raise VersionError unless the server of transformers can run."""
    require_transformers()
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise VersionError(
            "The server needs fastapi, uvicorn, pydantic and openai, and one of them is missing: "
            "pip install 'fp4pass[serving]'."
        )


def run_server(
    served: ServedModel,
    host: str,
    port: int,
    arguments: Sequence[str],
    log_level: str,
    ready: Callable[[str], None],
) -> None:
    """Load a model and serve it until the process is interrupted.

    Args:
        served: the model.
        host: an address or name of this machine.
        port: 0 for one that is free.
        arguments: other options of `transformers serve`, as on its command line.
        log_level: of transformers; requests are logged at "info" and "debug".
        ready: called with the address once it answers.

    Raises:
        OptionError: the address is in use, or an option does not fit.
    """
    require_server()
    # Before the model is loaded, which may take minutes.
    sockets = _bound(host, port)
    try:
        serve = _made_server(served, [*arguments, "--host", host, "--log-level", log_level])
        from transformers.cli.serving.utils import BaseHandler

        handlers: list[Any] = [e for e in vars(serve).values() if isinstance(e, BaseHandler)]
        for handler in handlers:
            handler._resolve_model = functools.partial(_resolve, served, handler)
        app = serve.server.config.app
        app.add_api_route("/v1/models/{name:path}", functools.partial(_listed_as, served))
        app.add_exception_handler(_Refused, _answer_refused)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{sockets[0].getsockname()[1]}"
        _run(serve, sockets, log_level, lambda: ready(address))
    finally:
        for each in sockets:
            each.close()


class _Refused(Exception):
    """A request that is answered by an error, in the form that OpenAI's clients read."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


async def _answer_refused(request: Any, error: _Refused) -> Any:
    from fastapi.responses import JSONResponse

    facts = {"message": str(error), "type": "invalid_request_error", "code": error.code}
    return JSONResponse({"error": facts}, status_code=error.status)


def _made_server(served: ServedModel, arguments: Sequence[str]) -> Any:
    """Return transformers' server of a model, made of its own command line."""
    import typer
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    class Server(Serve):
        def start_server(self) -> None:
            """Do nothing: it runs in this thread once it is made."""

    app = typer.Typer(add_completion=False)
    app.command()(Server)
    module: Any = model_manager
    theirs, module.ModelManager = module.ModelManager, _manager_of(served)
    try:
        options = ["--non-blocking", *arguments]
        command = typer.main.get_command(app)
        return command.main(
            [served.name, *options], prog_name="fp4pass serve", standalone_mode=False
        )
    except Fp4PassError:
        raise
    except (ValueError, ImportError) as error:
        raise OptionError(f"serve: {error}") from error
    finally:
        module.ModelManager = theirs


def _manager_of(served: ServedModel) -> Any:
    """Return the class of the server's manager of models, which has one."""
    from transformers.cli.serving.model_manager import ModelManager

    class Manager(ModelManager):
        @staticmethod
        def process_model_name(model_id: str) -> str:
            return served.name

        @staticmethod
        def get_gen_models(
            cache_dir: str | None = None,
        ) -> list[dict[str, Any]]:
            return [_entry(served)]

        def _validate_args(self) -> None:
            super()._validate_args()
            if self.quantization is not None:
                raise ValueError(f"--quantization: {served.name} is packed already; leave it out.")

        def _load_model(self, *args: Any, **options: Any) -> Any:
            return served.load(self.device, self.dtype, self.attn_implementation)

        def _load_processor(self, *args: Any, **options: Any) -> Any:
            return served.load_processor()

    return Manager


def _entry(served: ServedModel) -> dict[str, Any]:
    return {"id": served.name, "object": "model", **served.facts}


def _listed_as(served: ServedModel, name: str) -> dict[str, Any]:
    _require_known(served, name)
    return _entry(served)


def _require_known(served: ServedModel, name: object) -> None:
    """Answer 404 for a model that is not the one of the server."""
    if name is not None and name not in served.names:
        message = f"model: expected {served.name!r}, the only one of this server, got {name!r}."
        raise _Refused(404, "model_not_found", message)


def _resolve(served: ServedModel, handler: Any, body: dict[str, Any]) -> Any:
    """Return the model of a request as transformers does, with its names and what it can do."""
    _require_known(served, body.get("model"))
    state = handler.generation_state
    if state._continuous_batching:
        _require_alike(state, body)
    body["model"] = served.name
    return type(handler)._resolve_model(handler, body)


def _require_alike(state: Any, body: Mapping[str, Any]) -> None:
    """Answer 400 where continuous batching would sample a request with options of another one."""
    own = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    given = json.loads(body.get("generation_config") or "{}")
    own |= {name: value for name, value in given.items() if name not in _PER_REQUEST}
    first = vars(state).setdefault("_fp4pass_sampling", own)
    if own != first:
        message = (
            f"Continuous batching samples all requests alike: expected {first or 'no options'}, "
            f"those of the first request, got {own or 'none'}. Ask with the same, or start the "
            "server without --continuous-batching."
        )
        raise _Refused(400, "invalid_value", message)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to every address of a host, at one port."""
    found: list[socket.socket] = []
    try:
        kinds = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in kinds:
            each = socket.socket(family, kind, protocol)
            found.append(each)
            if os.name == "posix":
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # A port that is free is the same for all addresses.
            number = port or (found[0].getsockname()[1] if len(found) > 1 else 0)
            each.bind((address[0], number, *address[2:]))
    except (OSError, OverflowError) as error:
        for each in found:
            each.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(
            f"serve: {host}, port {port}: {reason}. Give another --port (0: any that is free) or "
            "--host."
        ) from error
    return found


def _run(
    serve: Any, sockets: Sequence[socket.socket], log_level: str, ready: Callable[[], None]
) -> None:
    """Run a server that is made, and stop what it started at the end."""
    server = serve.server
    if log_level not in _VERBOSE:
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.WARNING)
    startup = server.startup

    async def announced(*args: Any, **options: Any) -> None:
        await startup(*args, **options)
        if server.started:
            ready()

    server.startup = announced
    try:
        server.run(sockets=list(sockets))
    finally:
        serve._generation_state.shutdown()
        serve._model_manager.shutdown()
