"""One run of a peer, in an environment that has it: called by eval/quality/peers.py.

    python -m eval.quality.peer_runs LIBRARY RUN --model DIR --ids FILE --out FOLDER

FOLDER gets a dense float32 model, which `AutoModelForCausalLM` loads, with the weights that the
peer's model multiplies by; `run.json`, with what the run was and what it cost; and where a library
multiplies inputs first, those factors. The environments of peers do not have fp4pass: only the
function that runs it imports it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

# What a run leaves: the weights, and for some layers what their inputs are multiplied by, which
# the weights of the dense model hold already.
Weights = dict[str, Tensor]
SCALED = "input_multiplier"
MULTIPLIERS = "input_multipliers.safetensors"

# Packages whose versions decide what a library does.
BESIDE = ("torch", "transformers", "compressed-tensors")


def main() -> None:
    """Quantize a model by one library and keep what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("run")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ids", type=Path, required=True, help="of torch.save: [windows, tokens]")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.load(args.ids)
    before = peak_mb()
    began = time.perf_counter()
    cpu = time.process_time()
    quantized = LIBRARIES[args.library](args.run, model, tokenizer, ids)
    found = {
        "library": args.library,
        "run": args.run,
        "calibration": {"windows": len(ids), "window": ids.shape[1]},
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_mb(),
        "loaded_mb": before,
        "threads": torch.get_num_threads(),
        "versions": versions(args.library),
    }
    weights = {name: each.detach().float() for name, each in quantized().items()}
    keep(weights, args.model, args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "run.json").write_text(json.dumps(found, indent=1))


def versions(library: str) -> dict[str, str]:
    """Return the versions of a library and of those beside it that are installed."""
    there = {str(each.name).lower() for each in importlib.metadata.distributions()}
    names = [library, *(name for name in BESIDE if name in there)]
    return {name: importlib.metadata.version(name) for name in names}


def keep(weights: Weights, source: Path, folder: Path) -> None:
    """Write the dense model of a run, and what its inputs are multiplied by."""
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with_weights(model, weights).save_pretrained(folder)
    factors = {n: each.contiguous() for n, each in weights.items() if n.endswith(f".{SCALED}")}
    if factors:
        save_file(factors, folder / MULTIPLIERS)


def with_weights(model: nn.Module, weights: Weights) -> Any:
    """Return a model with other weights, in place; its output embedding is as it was."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                factor = weights.get(f"{name.removesuffix('.weight')}.{SCALED}")
                parameter.copy_(weights[name] if factor is None else weights[name] * factor)
    return model


def peak_mb() -> float:
    """The most memory that this process has had, of the program alone that it runs now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) / 1024


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that are quantized: all but the output embedding."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("lm_head")
    }


# ---- llm-compressor ---------------------------------------------------------------------------


def llmcompressor(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`SCHEME method observer`, such as `NVFP4A16 gptq nvfp4_expanded_mse`."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    scheme, method, observer = run.split()
    modifiers = {"rtn": QuantizationModifier, "gptq": GPTQModifier, "awq": AWQModifier}
    preset = preset_name_to_scheme(scheme, ["Linear"])
    if observer != "default":
        preset.weights.observer = observer
    recipe = modifiers[method](config_groups={"group_0": preset}, ignore=["lm_head"])
    if method == "awq":
        without_pinning()
    windows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()]
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=Dataset.from_list(windows),
        recipe=recipe,
        num_calibration_samples=len(windows),
        max_seq_length=ids.shape[1],
        save_compressed=False,
    )

    def quantized() -> Weights:
        state = model.state_dict()
        for name, layer in linears(model).items():
            args = layer.quantization_scheme.weights
            state[f"{name}.weight"] = forward_quantize(layer, layer.weight, "weight", args)
        kinds = (".weight", ".bias")
        return {name: each.clone() for name, each in state.items() if name.endswith(kinds)}

    return quantized


def without_pinning() -> None:
    """Leave out pinned memory, which a CPU alone has none of."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda self, batch_index: None


# ---- ModelOpt ---------------------------------------------------------------------------------


def modelopt(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """The name of a config, such as `NVFP4_DEFAULT_CFG`; `gptq` is its recipe of that method.

    The weights of GPTQ alone are quantized, in static blocks as in that recipe.
    """
    import modelopt.torch.quantization as mtq

    from eval.quality.modelopt_cpu import on_a_cpu

    on_a_cpu()
    if run == "gptq":
        config = copy.deepcopy(mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG)
        config["algorithm"] = {"method": "gptq", "layerwise": {"enable": True}}
        config["quant_cfg"] = [
            entry for entry in config["quant_cfg"] if entry["quantizer_name"] != "*input_quantizer"
        ]
    else:
        config = getattr(mtq, run)

    def forward(model: Any) -> None:
        for batch in ids.split(8):
            model(batch, use_cache=False)

    with torch.no_grad():
        mtq.quantize(model, config, forward)

    def quantized() -> Weights:
        found: Weights = {}
        with torch.no_grad():
            for name, layer in linears(model).items():
                found[f"{name}.weight"] = layer.weight_quantizer(layer.weight)
                scaled = getattr(layer.input_quantizer, "pre_quant_scale", None)
                if scaled is not None:
                    found[f"{name}.{SCALED}"] = scaled.reshape(-1)
        return found

    return quantized


# ---- auto-round -------------------------------------------------------------------------------


def auto_round(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`SCHEME iterations`, such as `NVFP4 200`, `SCHEME iterations batch`, or with `W4A4` behind.

    Its inputs stay in floating point, with `W4A4` they are what the scheme makes of them.
    """
    from auto_round import AutoRound

    words = run.split()
    own_inputs = words[-1] == "W4A4"
    scheme, iterations, batch = [*words[: len(words) - own_inputs], "8"][:3]
    rounding = AutoRound(
        model,
        tokenizer,
        scheme=scheme,
        dataset=[{"input_ids": row[None]} for row in ids],
        iters=int(iterations),
        seqlen=ids.shape[1],
        nsamples=len(ids),
        batch_size=int(batch),
        device_map="cuda" if torch.cuda.is_available() else "cpu",
        # Compiling pays on a GPU alone.
        enable_torch_compile=torch.cuda.is_available(),
        **({} if own_inputs else {"act_bits": 16, "act_data_type": "float"}),
    )
    tuned, _ = rounding.quantize()

    def quantized() -> Weights:
        # It leaves each layer in one of its own, which would quantize inputs.
        layers = {name.removesuffix(".orig_layer"): each for name, each in linears(tuned).items()}
        return {f"{name}.weight": layer.weight.cpu() for name, layer in layers.items()}

    return quantized


# ---- libraries that only round -------------------------------------------------------------------


def rounded(model: nn.Module, there_and_back: Callable[[Tensor], Tensor]) -> Callable[[], Weights]:
    """Return the weights of the linear layers, each quantized and dequantized."""
    found = {f"{n}.weight": there_and_back(m.weight.data) for n, m in linears(model).items()}
    return lambda: found


def torchao(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`NVFP4`: nearest values, with a scale for each weight."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def there_and_back(weight: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(weight.abs().max())
        return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(weight.dtype)

    return rounded(model, there_and_back)


def bitsandbytes(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`nf4` or `fp4`, in blocks of 64."""
    from bitsandbytes import functional

    def there_and_back(weight: Tensor) -> Tensor:
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=run)
        return functional.dequantize_4bit(packed, state)

    return rounded(model, there_and_back)


# ---- fp4pass ----------------------------------------------------------------------------------


def fp4pass(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`format name`: a quality or a method; "cross" is Gptq(target="cross", damping=0.5).

    Behind a quality, `own` has the model write what it calibrates on.
    """
    import fp4pass as library
    from fp4pass.nn.linear import QuantizedLinear
    from fp4pass.record.schemes import QUALITIES

    fmt, name, *own = run.split()
    if name in QUALITIES:
        options: dict[str, Any] = {"weight_only": True, "progress": False}
        data = ids if QUALITIES[name].tokens and not own else None
        library.convert(model, fmt, quality=name, data=data, tokenizer=tokenizer, **options)
    else:
        is_cross = name == "cross"
        method = library.Gptq(target="cross", damping=0.5) if is_cross else name
        if name not in ("naive", "sse"):
            library.prepare(model, method, sequential=is_cross)
            library.calibrate(model, ids.split(8), progress=False)
        library.convert(model, fmt, method, weight_only=True, progress=False)

    def quantized() -> Weights:
        modules = model.named_modules()
        layers = {name: each for name, each in modules if isinstance(each, QuantizedLinear)}
        return {f"{name}.weight": layer.weight for name, layer in layers.items()}

    return quantized


LIBRARIES: dict[str, Callable[..., Callable[[], Weights]]] = {
    "llmcompressor": llmcompressor,
    "nvidia-modelopt": modelopt,
    "auto-round": auto_round,
    "torchao": torchao,
    "bitsandbytes": bitsandbytes,
    "fp4pass": fp4pass,
}


if __name__ == "__main__":
    main()
