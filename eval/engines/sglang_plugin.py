"""Load folders in SGLang with fp4pass's plugin, without a GPU; compare parameters and outputs.

    python -m eval.engines.sglang_plugin --json eval/results/sglang-plugin.json

As `eval.engines.vllm_plugin`, whose rows these are, by the loading code that
`eval.engines.sglang_loading` calls. The plugin takes the CPU for a GPU that it serves, SGLang
applies its hooks, and its own class of each layer has the weights processed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eval.engines import sglang_loading, vllm_plugin
from eval.engines.vllm_loading import Case, write
from eval.record import Results, facts
from fp4pass.integrations import sglang as plugin

_CT, _MO = "compressed-tensors", "modelopt"

CASES = (
    Case(_CT, "nvfp4a16"),
    Case(_MO, "nvfp4a16"),
    *(Case(layout, "nvfp4a16", model="qwen2") for layout in (_CT, _MO)),
    Case(_CT, "nvfp4a16", "fp8", head=True),
    Case(_CT, "nvfp4a16", model="qwen3_moe"),
)


def row(folder: Path) -> dict[str, Any]:
    """Return what SGLang makes of one folder with the plugin."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    model, config = sglang_loading.model_of(folder)
    layers, others = {}, 0
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase | ParallelLMHead):
            continue
        # Those in FP8 need kernels.
        if getattr(module, "weight_scale", None) is not None and module.weight_scale.ndim == 2:
            if module.weight_scale.dtype == torch.float8_e4m3fn:
                module.quant_method.process_weights_after_loading(module)
        if hasattr(module, "fp4pass_key"):
            layers[name] = module
        else:
            others += 1
    found = {
        "config": config.quantization,
        "multiplied": f"{len(layers)} of {len(layers) + others}",
    }
    return found | vllm_plugin.compare(layers, folder)


def main() -> None:
    """Load and compare all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="the file of results; they are printed, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sglang_loading.start_engine()
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    plugin.register()
    HookRegistry.apply_hooks()
    results = Results(
        args.json, facts("cpu", "sglang"), again=True, key=("layout", "case", "model")
    )
    kinds = [*((case, "") for case in CASES), *((case, ", another scale") for case in CASES[:2])]
    for case, words in kinds:
        about = {"layout": case.layout, "case": case.name + words, "model": case.model}
        with (
            tempfile.TemporaryDirectory() as scratch,
            mock.patch.object(plugin, "_serves", lambda device: True),
        ):
            write(case, Path(scratch) / "packed")
            if words:
                vllm_plugin.change_scales(Path(scratch) / "packed")
            results.put(about | row(Path(scratch) / "packed"))
        print(json.dumps(results.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
