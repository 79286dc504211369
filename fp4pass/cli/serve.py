"""fp4pass serve: a small OpenAI-compatible server of a folder with packed weights."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from ..errors import VersionError


def serve(
    folder: Annotated[str, Argument(help="A folder with packed weights.", metavar="DIR")],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 is any free one.")] = 8000,
    device: Annotated[
        str, Option(help="cpu, cuda, cuda:1, ..., or auto for the GPU, if any.")
    ] = "auto",
    log_level: Annotated[
        str, Option(help="debug, info, warning, error or critical; info logs requests.")
    ] = "error",
) -> None:
    """Serve a folder with an OpenAI-compatible API and packed weights, one request at a time.

    Serves chat completions and completions, streamed or not, and the list of models, until it is
    interrupted. For many requests at once, serve the folder with vLLM.
    """
    try:
        # Importing transformers takes a second.
        from ..integrations.serving import serve as run
    except ModuleNotFoundError as error:
        raise VersionError(
            f"The server needs {error.name}, which is missing: pip install 'fp4pass[serving]'."
        ) from error
    run(folder, host=host, port=port, device=device, log_level=log_level, ready=_announce)


def _announce(name: str, address: str) -> None:
    # A program that started it reads this line.
    print(f"{name} is served at {address}/v1", flush=True)
