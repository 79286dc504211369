"""lm-eval with packed folders: its own command line, with the model type `fp4pass`.

python -m fp4pass.integrations.lm_eval --model fp4pass --model_args pretrained=DIR --tasks hellaswag
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..errors import Fp4PassError, OptionError
from ..quantization.batches import require_device

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import get_dtype
except ImportError as error:
    problem = (
        f"fp4pass.integrations.lm_eval needs lm-eval 0.4.13: {error}. pip install 'fp4pass[eval]'."
    )
    if __name__ == "__main__":
        sys.exit(problem)
    raise ImportError(problem) from error

_NAME = "fp4pass"

# The device that lm-eval's command line names where nobody named one.
_UNSAID = "cuda:0"

# Of what HFLM hands on for a model to be loaded: what a packed folder needs no word about.
_SETTLED = {"revision", "trust_remote_code", "gpus", "offload_folder", "quantization_config"}


class Fp4PassLM(HFLM):
    """`hf` of lm-eval that reads folders with packed weights, and compiles."""

    def __init__(
        self,
        pretrained: Any,
        *,
        device: str | None = None,
        device_map: Any = None,
        compile: bool = False,
        **options: Any,
    ) -> None:
        """All other options are those of `hf`, and so are the models that are not packed.

        pretrained: a folder with packed or float weights, a hub id, or a model. device: a GPU if
        there is one. device_map: as for `fp4pass.load`, instead of a device. compile: by
        torch.compile, once for all shapes. Raises OptionError for a device that is not there and
        for what a packed folder cannot be loaded with, CheckpointError.
        """
        if device in (None, _UNSAID):
            device = "cuda" if torch.cuda.is_available() else "cpu"
        require_device(device, "device=")
        if device_map is not None:
            # hf leaves it out otherwise, and moves the model to one device.
            options |= {"parallelize": True, "device_map": device_map}
        super().__init__(pretrained, device=device, **options)
        if compile:
            self.model.compile(dynamic=True)

    def _get_config(self, pretrained: str, **options: Any) -> None:
        super()._get_config(pretrained, **options)
        if is_packed(pretrained):
            # Not for transformers to act on.
            self.config.__dict__.pop("quantization_config", None)

    def _create_model(
        self,
        pretrained: str,
        *,
        dtype: Any = "auto",
        parallelize: bool = False,
        device_map: Any = None,
        **options: Any,
    ) -> None:
        if not is_packed(pretrained):
            options |= {"dtype": dtype, "parallelize": parallelize}
            super()._create_model(pretrained, **options, device_map=device_map)
            return
        unused = sorted(name for name, value in options.items() if value and name not in _SETTLED)
        if unused:
            raise OptionError(
                f"{pretrained} has packed weights, which cannot be loaded with {unused[0]}="
                f"{options[unused[0]]}. Leave it out of model_args."
            )
        whole = "auto" if parallelize else str(self.device)
        model: Any = load(pretrained, device_map=whole if device_map is None else device_map)
        if get_dtype(dtype) not in ("auto", model.config.dtype):
            stored = str(model.config.dtype).removeprefix("torch.")
            raise OptionError(
                f"{pretrained} holds what is not packed in {stored}, and dtype={dtype} was asked "
                "for. Leave dtype out of model_args."
            )
        self._model = model
        # That of the embedding, where a device map spreads the rest.
        self._device = model.device


# `python -m` runs this file under another name, and a task may import it under its own.
if _NAME not in model_registry:
    register_model(_NAME)(Fp4PassLM)


def main() -> None:
    """Run the command line of lm-eval, and exit."""
    try:
        cli_evaluate()
    except Fp4PassError as error:
        print(f"fp4pass: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
