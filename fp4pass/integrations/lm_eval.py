"""lm-eval with packed folders: its own command line, with the model type `fp4pass`.

python -m fp4pass.integrations.lm_eval --model fp4pass --model_args pretrained=DIR --tasks hellaswag
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..core.machine import require_device
from ..errors import Fp4PassError, OptionError, VersionError
from ..evaluation import fast_dtype

try:
    from .._compat.lm_eval import LoadingHFLM, cli_evaluate, get_dtype, register_once
except VersionError as error:
    if __name__ == "__main__":
        sys.exit(f"fp4pass: {error}")
    raise

# Options that `hf` passes on for every model, and that change nothing of a packed folder.
_IGNORED = {"revision", "trust_remote_code", "gpus", "offload_folder", "quantization_config"}


def _in_fast_dtype(name: str) -> Callable[..., Any]:
    """Return a method of `hf`, computed in the dtype that the CPU is fast in."""

    def run(self: Any, *args: Any, **options: Any) -> Any:
        with fast_dtype(self.model):
            return getattr(LoadingHFLM, name)(self, *args, **options)

    return run


class Fp4PassLM(LoadingHFLM):
    """lm-eval's `hf` that also reads folders with packed weights, and compiles."""

    # `device` None is a GPU if there is one, `device_map`, in place of it, is as for
    # `fp4pass.load`, and `compile` calls torch.compile with dynamic shapes. A model that is not
    # compiled computes in float32 on a CPU that is slow in bfloat16, see
    # `fp4pass.evaluation.fast_dtype`. All else is as in `hf`.

    def __init__(
        self,
        pretrained: Any,
        *,
        device: str | None = None,
        device_map: Any = None,
        compile: bool = False,
        **options: Any,
    ) -> None:
        # The second is what lm-eval's command line names where the user named none.
        if device in (None, "cuda:0"):
            device = "cuda" if torch.cuda.is_available() else "cpu"
        require_device(device, "device=")
        if device_map is not None:
            # Without `parallelize`, hf ignores the map and moves the model to one device.
            options |= {"parallelize": True, "device_map": device_map}
        super().__init__(pretrained, device=device, **options)
        if compile:
            self.model.compile(dynamic=True)

    def load_config(self, pretrained: str, **options: Any) -> Any:
        """Return the config of a folder, without the quantization of a packed one."""
        config = super().load_config(pretrained, **options)
        if is_packed(pretrained):
            # transformers would act on it.
            config.__dict__.pop("quantization_config", None)
        return config

    def load_model(
        self,
        pretrained: str,
        *,
        dtype: Any = "auto",
        parallelize: bool = False,
        device_map: Any = None,
        **options: Any,
    ) -> Any:
        """Return the model of a folder, by `fp4pass.load` if it is packed. Raises OptionError."""
        if not is_packed(pretrained):
            options |= {"dtype": dtype, "parallelize": parallelize, "device_map": device_map}
            return super().load_model(pretrained, **options)
        unused = sorted(name for name, value in options.items() if value and name not in _IGNORED)
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
                f"{pretrained}: expected dtype={stored}, in which it holds what is not packed, "
                f"got dtype={dtype}. Leave dtype out of model_args."
            )
        # The device of the embedding, where a device map spreads the rest.
        self.use_device(model.device)
        return model

    loglikelihood = _in_fast_dtype("loglikelihood")
    loglikelihood_rolling = _in_fast_dtype("loglikelihood_rolling")
    generate_until = _in_fast_dtype("generate_until")


# `python -m` runs this file under another name, and a task may import it under its own.
register_once("fp4pass", Fp4PassLM)


def main() -> None:
    """Run the command line of lm-eval, and exit."""
    try:
        cli_evaluate()
    except Fp4PassError as error:
        print(f"fp4pass: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
