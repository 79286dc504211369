"""Load folders in vLLM with fp4pass's plugin, without a GPU; compare parameters and outputs.

    python -m eval.engines.vllm_plugin --json eval/results/vllm-plugin.json

As `eval.engines.vllm_loading`, whose small models these are, with the plugin told that a GPU of
compute capability 9.0 is there. vLLM chooses the config, which goes through pickle as on the way to
a worker, makes its model, loads the folder and processes the weights. A row says

    multiplied   linear layers that the plugin multiplies, of all linear layers
    parameters   whether they hold the tensors of the folder, to the bit
    outputs      whether outputs of 1, 7 and 130 rows have the bits of `fp4pass.load` of the folder
    compiled     the same of torch.compile for any number of rows, in one graph

With "two processes" each has its part of every layer, over gloo, and outputs are those
of parts of the folder's tensors; the sum over processes is vLLM's own. Inputs of rotated layers are
rotated here, for vLLM does it by a kernel of its own. "another scale": k_proj has another global
scale than q_proj and v_proj, and up_proj than gate_proj.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp4pass
from eval.engines import vllm_loading
from eval.engines.vllm_loading import Case, write
from eval.record import Results, facts
from fp4pass import ops

_CT, _MO, _ROTATED = "compressed-tensors", "modelopt", "compressed-tensors-hadamard"

CASES = (
    Case(_CT, "nvfp4a16"),
    Case(_CT, "mxfp4a16"),
    Case(_MO, "nvfp4a16"),
    Case("quark", "mxfp4a16"),
    # Biases.
    *(Case(layout, "nvfp4a16", model="qwen2") for layout in (_CT, _MO)),
    # Others beside them, which vLLM multiplies.
    Case(_CT, "nvfp4a16", "fp8", head=True),
    Case(_MO, "nvfp4a16", "fp8", head=True),
    Case(_CT, "mxfp4a16", "fp8"),
    Case(_CT, "nvfp4a16", model="qwen3_moe"),
    Case(_ROTATED, "nvfp4a16", rotation=64),
)
# The layers of these stay vLLM's, and so does its config.
OTHERS = (
    Case(_CT, "nvfp4", calibrated=True),
    Case(_CT, "mxfp4"),
    Case(_MO, "nvfp4", calibrated=True),
    Case("quark", "mxfp4"),
    Case(_CT, "fp8"),
    Case(_MO, "fp8"),
)
ROWS = (1, 7, 130)

vllm_loading.MODELS.setdefault("qwen2", ("Qwen2", vllm_loading.MODELS["qwen3"][1]))


@contextmanager
def gpu(major: int = 9, minor: int = 0) -> Iterator[None]:
    """Tell the plugin that a GPU of a compute capability is there."""
    capability = SimpleNamespace(to_int=lambda: 10 * major + minor)
    there = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: capability)
    with mock.patch("vllm.platforms.current_platform", there):
        yield


def start(rank: int = 0, size: int = 1, file: str = "") -> None:
    """Make vLLM's groups of processes, and register the plugin."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from fp4pass.integrations.vllm import register

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        place = file or f"{folder}/group"
        init_distributed_environment(size, rank, f"file://{place}", 0, "gloo")
        initialize_model_parallel(size, 1)
    with gpu():
        register()
        register()


def load_model(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return vLLM's model of a folder, after its weights are processed, and its config."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    args = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **options
    )
    config = args.create_engine_config()
    config.quant_config = pickle.loads(pickle.dumps(config.quant_config))
    loader = get_model_loader(config.load_config)
    with set_current_vllm_config(config), vllm_loading.kernels_that_do_nothing():
        with set_default_torch_dtype(torch.bfloat16):
            model = loader.create_model(config, config.model_config)
        loader.load_weights(model, config.model_config)
        for layer in multiplied(model).values():
            layer.quant_method.process_weights_after_loading(layer)
    return model, config


def multiplied(model: nn.Module) -> dict[str, Any]:
    """Return the layers that the plugin multiplies, by their names in vLLM."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(getattr(method, "quant_method", method), "fp4pass"):
            found[name] = module
    return found


_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def parts_of(name: str) -> list[str]:
    """Return the names of the layers that vLLM has as one."""
    parent, _, last = name.rpartition(".")
    return [f"{parent}.{each}".removeprefix(".") for each in _JOINED.get(last, (last,))]


def global_scales(name: str) -> list[str]:
    """Return the names that the global scales of a layer of vLLM may have in a folder."""
    ends = ("weight_global_scale", "weight_scale_2")
    return [f"{part}.{end}" for part in parts_of(name) for end in ends]


def shares(layer: Any, of: Any, rank: int, size: int) -> tuple[Any, slice]:
    """Return the buffers of a layer that a process has, and the columns of the input."""
    weight = of.packed_weight
    if type(layer).__name__ == "RowParallelLinear":
        packed, scale = (each.chunk(size, 1)[rank] for each in weight[:2])
        width = of.in_features // size
        return weight._replace(packed=packed, scale=scale), slice(rank * width, (rank + 1) * width)
    packed, scale = (each.chunk(size, 0)[rank] for each in weight[:2])
    return weight._replace(packed=packed, scale=scale), slice(None)


def compare(
    layers: Mapping[str, Any], folder: Path, rank: int = 0, size: int = 1
) -> dict[str, Any]:
    """Compare parameters and outputs of layers, by their names in an engine."""
    loaded, tensors = fp4pass.load(folder), load_file(folder / "model.safetensors")
    wrong: dict[str, list[str]] = {"parameters": [], "outputs": [], "compiled": []}
    for name, layer in layers.items():
        parts = map(loaded.get_submodule, parts_of(name))
        found = [(each, *shares(layer, each, rank, size)) for each in parts]
        stored = [tensors[key] for key in global_scales(name) if key in tensors]
        if not is_equal(layer, [weight for _, weight, _ in found], stored):
            wrong["parameters"].append(name)
        torch._dynamo.reset()
        compiled = torch.compile(apply, backend="aot_eager", fullgraph=True, dynamic=True)
        for count in ROWS:
            x = torch.randn(count, found[0][0].in_features, dtype=torch.bfloat16)[:, found[0][2]]
            wanted = outputs(found, x, rank, size)
            for forward, key in ((apply, "outputs"), (compiled, "compiled")):
                if not torch.equal(forward(layer, x)[:, : wanted.shape[1]], wanted):
                    wrong[key].append(f"{name}, {count} rows")
    return {key: names or "equal" for key, names in wrong.items()}


def is_equal(layer: Any, wanted: list[Any], numbers: list[Tensor]) -> bool:
    """Return whether a layer of vLLM holds buffers and global scales, one below the other."""
    codes, bits = (torch.cat(each) for each in list(zip(*wanted, strict=True))[:2])
    held = layer.weight.view(torch.uint8)[: len(codes)], layer.weight_scale[: len(bits)]
    if not all(map(torch.equal, held, (codes, bits))):
        return False
    if not numbers:
        return not hasattr(layer, "weight_global_scale")
    stored = torch.cat([each.reshape(1) for each in numbers])
    return torch.equal(layer.weight_global_scale.expand(len(numbers)), stored)


def apply(layer: Any, x: Tensor) -> Tensor:
    """Return what a layer multiplies in this process."""
    method = getattr(layer.quant_method, "quant_method", layer.quant_method)
    found: Tensor = method.apply(layer, x, getattr(layer, "bias", None))
    return found


def outputs(found: list[Any], x: Tensor, rank: int, size: int) -> Tensor:
    """Return the outputs of parts of layers of fp4pass, side by side."""
    made = []
    for each, weight, _ in found:
        bias = None if each.bias is None else each.bias.chunk(size)[rank]
        made.append(ops.linear(x, *weight[:3], bias, each.config.format.key, "input"))
    return torch.cat(made, -1)


def row(case: Case, folder: Path) -> dict[str, Any]:
    """Return what vLLM makes of one folder with the plugin."""
    model, config = load_model(folder)
    own = config.quant_config
    found = {"config": config.model_config.quantization, "vLLM's": type(own).__name__}
    if config.model_config.quantization != "fp4pass":
        return found
    found["multiplied"] = f"{own.fp4pass['taken']} of {own.fp4pass['linear']}"
    return found | compare(multiplied(model), folder)


def of_process(rank: int, folder: str, file: str, answers: Any) -> None:
    """Load a folder in one of two processes, and put what differs into a queue."""
    logging.disable(logging.WARNING)
    start(rank, 2, file)
    model, _ = load_model(Path(folder))
    layers = multiplied(model)
    answers.put((rank, {"multiplied": len(layers)} | compare(layers, Path(folder), rank, 2)))


def in_two(case: Case, folder: Path) -> dict[str, Any]:
    """Return what two processes hold of a folder."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (str(folder), f"{scratch}/group", answers)
        each = [context.Process(target=of_process, args=(rank, *arguments)) for rank in (0, 1)]
        for process in each:
            process.start()
        found = dict(answers.get(timeout=300) for _ in each)
        for process in each:
            process.join()
    return found[0] if found[0] == found[1] else found


def another_scale(case: Case, folder: Path) -> dict[str, Any]:
    """Return what vLLM makes of a folder after parts of joined layers got another scale."""
    change_scales(folder)
    return row(case, folder)


def change_scales(folder: Path) -> None:
    """Give k_proj and up_proj of a folder another global scale."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    ends = tuple(
        f"{part}_proj.{name}"
        for part in ("k", "up")
        for name in ("weight_global_scale", "weight_scale_2")
    )
    for name in filter(lambda name: name.endswith(ends), tensors):
        tensors[name] = tensors[name] * 1.7
    save_file(tensors, path, {"format": "pt"})
    # It has the checksums.
    (folder / "fp4pass.json").unlink()


def main() -> None:
    """Load and compare all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="the file of results; they are printed, too")
    parser.add_argument("--only", default="", help="words that a case has, as 'modelopt qwen2'")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    start()
    about = facts("cpu", "vllm", "compressed_tensors")
    results = Results(args.json, about, again=not args.only, key=("layout", "case", "model"))
    kinds = [("", row, case) for case in (*CASES, *OTHERS)]
    kinds += [("another scale", another_scale, case) for case in (CASES[0], CASES[2])]
    kinds += [("two processes", in_two, case) for case in CASES[:6]]
    for words, measure, case in kinds:
        about = {"layout": case.layout, "case": f"{case.name}, {words}".removesuffix(", ")}
        about["model"] = case.model
        if not all(word in " ".join(about.values()) for word in args.only.split()):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            write(case, Path(scratch) / "packed")
            results.put(about | measure(case, Path(scratch) / "packed"))
        print(json.dumps(results.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
