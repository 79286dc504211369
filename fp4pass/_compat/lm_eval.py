"""Private APIs of lm-eval: how `hf` loads a model, and registries."""

from __future__ import annotations

from typing import Any

from . import needed

with needed("lm-eval"):
    from lm_eval.__main__ import cli_evaluate as cli_evaluate
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import get_dtype as get_dtype


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
