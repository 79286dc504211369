"""transformers: folders of packed weights that `from_pretrained` keeps packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._compat.transformers import register_quantization, require_transformers
from .._compat.transformers_loading import require_filled, when_loaded
from ..checkpoint.placing import PlacedLayers
from ..errors import CheckpointError
from .quantizer import PackedQuantizer

require_transformers()

from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

# The `quant_method` of configs that keep a folder packed.
PACKED = "fp4pass-packed"


class PackedConfig(QuantizationConfigMixin):
    """Keeps the weights of a packed folder packed: `from_pretrained(..., quantization_config=...)`.

    Folders of ModelOpt and Quark are kept packed without it, for transformers reads them in no
    other way. With it are those that transformers makes dense: compressed-tensors and gpt-oss.

    Attributes:
        declared: what the folder declares.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "packed-model")
        >>> config = fp4pass.integrations.PackedConfig()
        >>> load = AutoModelForCausalLM.from_pretrained
        >>> model = load("packed-model", quantization_config=config)
        >>> type(model.model.layers[0].mlp.up_proj).__name__
        'QuantizedLinear'
    """

    def __init__(self) -> None:
        self.quant_method: Any = PACKED
        self.declared: dict[str, Any] = {}

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the config of the `quantization_config` of a folder, as plain values.

        With `return_unused_kwargs` it returns the config and `kwargs`, as transformers asks.

        Example:
            >>> declared = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
            >>> fp4pass.integrations.PackedConfig.from_dict(declared).declared["quant_algo"]
            'NVFP4'
        """
        config = cls()
        config.declared = dict(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them; `from_dict` reads them.

        Example:
            >>> fp4pass.integrations.PackedConfig().to_dict()
            {'quant_method': 'fp4pass-packed'}
        """
        return {"quant_method": PACKED, **self.declared}


class FolderQuantizer(PackedQuantizer):
    """Leaves packed layers to fp4pass, and everything else to transformers."""

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._placed: PlacedLayers | None = None

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Give the skeleton its packed layers, without memory."""
        files = [Path(each) for each in kwargs.get("checkpoint_files") or ()]
        if not files or any(each.suffix != ".safetensors" for each in files):
            raise CheckpointError(
                "The checkpoint: expected a folder of packed weights in .safetensors files, got "
                f"{files[0].name if files else 'a state dict'}. Give the folder to from_pretrained."
            )
        self.hold_plan(model)
        # The skeleton is made within a context that has no memory.
        with torch.device("cpu"):
            placed = self._placed = PlacedLayers(model, files[0].parent)
        when_loaded(model, placed.fill, placed.is_packed, placed.dense)

    def complete(self, model: Any) -> None:
        """Finish the model as `load` does."""
        assert self._placed is not None, "transformers calls the other method first"
        require_filled(model)
        self._placed.finish()
        self._placed = None


register_quantization(PACKED, PackedConfig, FolderQuantizer)
