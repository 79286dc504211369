"""Load our folders by SGLang's own code, without a GPU, and compare what it holds with them.

    python -m eval.engines.sglang_loading --json eval/results/sglang-loading.json

As `eval.engines.vllm_loading`, whose folders these are: SGLang reads the config, chooses the method
of each layer, makes its model and loads the folder, as on a GPU of compute capability 10.0. Then
each of its parameters is compared to the bit. Nothing is done after that, and no kernel runs.
Needs sglang beside fp4pass; packages for GPUs and images that are missing are replaced.

    outcome   equal, differs, refused with the first line of the error, or not tried: SGLang asks
              for a GPU
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from eval.engines.vllm_loading import Case, compared, measure, words_of, written

# What SGLang imports for GPUs, images and tokenizers.
_REPLACED = ("torchvision", "sentencepiece", "sgl_kernel", "vllm", "IPython")

# Errors of methods that look for a GPU.
_OF_GPUS = ("Current platform does not support", "'<=' not supported")


def main() -> None:
    """Write, load and compare all of them."""
    measure(__doc__, "sglang", start_engine, row)


def start_engine() -> None:
    """Replace what is missing here, and say that a GPU is there."""
    sys.meta_path.insert(0, Replaced())
    torch.cuda.get_device_capability = lambda *args, **options: (10, 0)


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of packages that are not there, or not for this machine."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return the spec of such a module, None for all others."""
        if name.partition(".")[0] in _REPLACED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module that has every name."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        module.__version__ = "99"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it as it is."""


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name)


def row(case: Case, folder: Path) -> dict[str, Any]:
    """Return what SGLang makes of one folder."""
    found = written(case, folder)
    try:
        return found | loaded(folder)
    except Exception as error:
        words = words_of(error)
        outcome = "not tried" if any(each in words for each in _OF_GPUS) else "refused"
        return found | {"outcome": outcome, "error": words}


def model_of(folder: Path) -> tuple[Any, Any]:
    """Return SGLang's model of a folder, with its weights, and its config."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    logging.disable(logging.CRITICAL)
    args = ServerArgs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, dtype="bfloat16"
    )
    set_global_server_args_for_scheduler(args)
    if not torch.distributed.is_initialized():
        with tempfile.NamedTemporaryFile() as file:
            parallel_state.init_distributed_environment(
                1, 0, f"file://{file.name}.group", 0, "gloo"
            )
            parallel_state.initialize_model_parallel()
    groups = ("tp", "pp", "moe_ep", "moe_tp", "attn_tp", "attn_cp", "attn_dp", "moe_dp")
    get_parallel().override_permanently(**{f"{group}_rank": 0 for group in groups})
    initialize_dp_attention(args)
    model_config, load_config = ModelConfig.from_server_args(args), LoadConfig()
    declared = loader._get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(torch.bfloat16):
        model = loader._initialize_model(model_config, load_config, declared)
    model.load_weights(loader.DefaultModelLoader(load_config)._get_all_weights(model_config, model))
    return model, model_config


def loaded(folder: Path) -> dict[str, Any]:
    """Return what SGLang holds of a folder. Raises what it raises."""
    model, model_config = model_of(folder)
    held = {
        # As vLLM has it.
        name.replace(".experts.w", ".experts.routed_experts.w"): tensor.detach().clone()
        for name, tensor in model.named_parameters()
    }
    tensors = load_file(folder / "model.safetensors")
    return {"quantization": model_config.quantization} | compared(held, tensors)


if __name__ == "__main__":
    main()
