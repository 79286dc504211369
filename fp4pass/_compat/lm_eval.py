"""Private APIs of lm-eval: how `hf` loads a model, the registry of models, the index of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import require_version

require_version("lm-eval", ">=0.4.12,<0.4.14", extra="eval")

from lm_eval.__main__ import cli_evaluate as run_command_line  # noqa: E402
from lm_eval.api.registry import model_registry, register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.utils_hf import get_dtype  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

__all__ = ["LoadingHFLM", "TaskCatalog", "get_dtype", "register_once", "run_command_line"]


def register_once(name: str, model_class: type) -> None:
    """Register a class as a model type of lm-eval, unless the name is registered."""
    if name not in model_registry:
        register_model(name)(model_class)


class LoadingHFLM(HFLM):
    """lm-eval's `hf` with public methods for the config and the model of a folder."""

    def load_config(self, pretrained: str, **options: Any) -> Any:
        """Return the config that `hf` reads of a folder or a hub id."""
        super()._get_config(pretrained, **options)
        return self._config

    def load_model(self, pretrained: str, **options: Any) -> Any:
        """Return the model that `hf` loads of a folder or a hub id."""
        super()._create_model(pretrained, **options)
        return self._model

    def _get_config(self, pretrained: str, **options: Any) -> None:
        self._config = self.load_config(pretrained, **options)

    def _create_model(self, pretrained: str, **options: Any) -> None:
        self._model = self.load_model(pretrained, **options)

    def use_device(self, device: Any) -> None:
        """Send inputs to another device than the one that the options name."""
        self._device = device


class TaskCatalog:
    """The tasks, groups and tags that lm-eval finds, its own if `builtin` and those of a folder."""

    def __init__(
        self, include_path: Path | None, *, builtin: bool, metadata: Mapping[str, str]
    ) -> None:
        self.manager: Any = TaskManager(
            include_path=include_path, include_defaults=builtin, metadata=dict(metadata)
        )
        self.names: list[str] = self.manager.all_tasks

    def has_tasks(self, names: set[str]) -> bool:
        """Return whether all names are those of single tasks."""
        return names <= set(self.manager.all_subtasks)

    def match(self, pattern: str) -> list[str]:
        """Return the names that match a glob pattern."""
        return list(self.manager.match_tasks([pattern]))

    def load(self, name: str) -> tuple[dict[str, Any], bool]:
        """Return a task, group or tag by name, with data, and whether it runs a model's code."""
        found = self.manager.load(name)
        tasks, groups = found["tasks"], found["groups"]
        unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in tasks.values())
        return ({name: groups[name]} if name in groups else tasks), unsafe
