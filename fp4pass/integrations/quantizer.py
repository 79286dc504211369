"""The base of the two quantizers for transformers: one packs a model, one keeps it packed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from .._compat.transformers import held_plan, released_mesh, require_transformers
from ..quantization.restore import dequantize_model

require_transformers()

from transformers.quantizers import HfQuantizer  # noqa: E402


class PackedQuantizer(HfQuantizer):
    """A quantizer whose models are converted ones once they are loaded.

    transformers documents the methods that it calls, those with an underscore too.
    """

    _split: dict[str, str] | None = None

    def hold_plan(self, model: Any) -> None:
        """Take the plan of tensor parallelism from a model, which is split once it is whole."""
        self._split = held_plan(model)

    @abstractmethod
    def complete(self, model: Any) -> None:
        """Complete a model whose tensors are loaded."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Complete the model, and split it if that was asked for."""
        # The config of the layout takes its place, if there is one.
        del model.config.quantization_config
        split, self._split = self._split, None
        self.complete(model)
        if split is not None:
            # Importing it takes a second.
            from ..parallel import parallelize

            parallelize(model, released_mesh(model, split))
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Make every packed layer dense again, with its rounded weight."""
        return dequantize_model(model, dtype)

    def is_serializable(self) -> bool:
        """Return whether save_pretrained works; the model refuses where there is no layout."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: products have a gradient for their input, so that adapters can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile works."""
        return True
