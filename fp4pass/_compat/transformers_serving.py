"""Private APIs of transformers' server: its command line, and which model it makes of a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .transformers import require_transformers


def manager_with(load: Callable[[str, Any, Any], Any]) -> Any:
    """Return the server's manager of models, which asks `load` for each one first.

    `load` takes the name of a folder or of a model, a device and a dtype, as the server has them;
    where it returns None, the server loads the model in its own way.
    """
    require_transformers()
    from transformers.cli.serving.model_manager import ModelManager

    class Manager(ModelManager):
        def _load_model(self, model_id_and_revision: str, *args: Any, **options: Any) -> Any:
            name = model_id_and_revision.split("@", 1)[0]
            model = load(name, self.device, self.dtype)
            if model is None:
                model = super()._load_model(model_id_and_revision, *args, **options)
            return model

    return Manager


def run_server(manager: Any) -> None:
    """Run the command line of `transformers serve` with a manager of models."""
    require_transformers()
    import typer
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    module: Any = model_manager
    module.ModelManager = manager
    typer.run(Serve)
