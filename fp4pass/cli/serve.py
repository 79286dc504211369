"""fp4pass serve: an OpenAI-compatible server of a folder with packed weights."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Context, Option

# Its other options are those of `transformers serve`, which reads them.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: Context,
    folder: Annotated[str, Argument(help="A folder with packed weights.", metavar="DIR")],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 is any free one.")] = 8000,
    device: Annotated[
        str, Option(help="cpu, cuda, cuda:1, ..., or auto for the GPU, if any.")
    ] = "auto",
    continuous_batching: Annotated[
        bool, Option(help="Run requests together; all sample with the options of the first.")
    ] = False,
    log_level: Annotated[
        str, Option(help="debug, info, warning, error or critical; info logs requests.")
    ] = "error",
) -> None:
    """Serve a folder with an OpenAI-compatible API and packed weights.

    Serves chat completions, completions and responses, streamed or not, and the list of models,
    until it is interrupted. All other options of `transformers serve` also work: --compile,
    --enable-cors, --chat-template-kwargs, --cb-max-memory-percent, ... (transformers serve --help).
    """
    # Importing transformers takes a second.
    from ..integrations.serving import serve as run

    run(
        folder,
        host=host,
        port=port,
        device=device,
        continuous_batching=continuous_batching,
        log_level=log_level,
        arguments=context.args,
        ready=_announce,
    )


def _announce(name: str, address: str) -> None:
    # A program that started it reads this line.
    print(f"{name} is served at {address}/v1", flush=True)
