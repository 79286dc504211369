"""One run of a peer, in an environment that has it: called by eval/quality/peers.py.

    python -m eval.quality.peer_runs LIBRARY RUN --model DIR --windows FILE --out FOLDER

Writes the weights that the peer's model multiplies by, dequantized, and what the run cost.
The environments of peers do not have fp4pass: only the function that runs it imports it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

# What a run leaves: the weights, and for some layers what their inputs are multiplied by.
Weights = dict[str, Tensor]
SCALED = "input_multiplier"

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("run")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", type=Path, required=True, help="safetensors with `ids`")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = load_file(args.windows)["ids"]
    before = peak_mb()
    began = time.perf_counter()
    cpu = time.process_time()
    quantized = LIBRARIES[args.library](args.run, model, tokenizer, ids)
    found = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_mb(),
        "loaded_mb": before,
        "threads": torch.get_num_threads(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in (args.library, "torch", "transformers")
        },
    }
    args.out.mkdir(parents=True, exist_ok=True)
    weights = {name: each.detach().float().contiguous() for name, each in quantized().items()}
    save_file(weights, args.out / "weights.safetensors")
    (args.out / "run.json").write_text(json.dumps(found, indent=1))


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
    """The name of a config, such as `NVFP4_DEFAULT_CFG`."""
    import modelopt.torch.quantization as mtq

    on_a_cpu()

    def forward(model: Any) -> None:
        for batch in ids.split(8):
            model(batch, use_cache=False)

    with torch.no_grad():
        mtq.quantize(model, getattr(mtq, run), forward)

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


def on_a_cpu() -> None:
    """Give ModelOpt PyTorch in the place of its two kernels of CUDA and Triton."""
    from modelopt.torch.quantization import tensor_quant as tq

    def e4m3(scale: Tensor, amax: Tensor) -> Tensor:
        return tq.scaled_e4m3_impl(scale, amax)

    def cast(x: Tensor) -> Tensor:
        values = x.new_tensor(E2M1)
        near = (x.abs()[..., None] - values).abs()
        # Ties to the even code.
        best = near.amin(-1, keepdim=True)
        ties = (near == best) * (2.0 - torch.arange(8) % 2)
        return torch.copysign(values[ties.argmax(-1)], x)

    def of_blocks(x: Tensor, scale: Tensor) -> Tensor:
        blocks = x.float().reshape(scale.numel(), -1)
        scale = scale.reshape(-1, 1)
        scale = torch.where((scale == 0) | ~scale.isfinite(), torch.ones_like(scale), scale)
        parts = zip(blocks.split(65536), scale.split(65536), strict=True)
        return torch.cat([cast(b / s) * s for b, s in parts]).view_as(x).to(x.dtype)

    def static(
        ctx: Any,
        x: Tensor,
        amax: Tensor,
        total: Any = None,
        scaled: bool = True,
        most: float = 448.0,
        out: Any = None,
        through: bool = False,
    ) -> Tensor:
        scale = amax.float() / 6.0
        if scaled:
            total = amax.amax() if total is None else total
            scale = e4m3(scale, total.float() * (448.0 / most) / 6.0)
        return of_blocks(x, scale)

    def dynamic(
        x: Tensor, block: int, amax: Any, bits: int, exponents: int, scale_bits: int, scale_exp: int
    ) -> Tensor:
        blocks = x.float().reshape(-1, block)
        top = blocks.abs().amax(1)
        if scale_exp == 8:
            exponent = torch.ceil(torch.log2((top / 6.0).clamp(min=2.0**-126)))
            return of_blocks(x, torch.exp2(exponent))
        return of_blocks(x, e4m3(top / 6.0, amax.amax().float() / 6.0))

    tq.StaticBlockwiseFP4FakeQuantFunction.forward = staticmethod(static)
    tq._dynamic_block_quantize_impl = dynamic
    tq.dynamic_block_quantize_op = dynamic


# ---- auto-round -------------------------------------------------------------------------------


def auto_round(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`SCHEME iterations`, such as `NVFP4 200`, or `SCHEME iterations batch`.

    Its inputs stay in floating point.
    """
    from auto_round import AutoRound

    scheme, iterations, batch = (run + " 8").split()[:3]
    rounding = AutoRound(
        model,
        tokenizer,
        scheme=scheme,
        act_bits=16,
        dataset=[{"input_ids": row[None]} for row in ids],
        iters=int(iterations),
        seqlen=ids.shape[1],
        nsamples=len(ids),
        batch_size=int(batch),
        device_map="cpu",
        enable_torch_compile=False,
    )
    tuned, _ = rounding.quantize()

    def quantized() -> Weights:
        # It leaves each layer in one of its own, which would quantize inputs.
        layers = {name.removesuffix(".orig_layer"): each for name, each in linears(tuned).items()}
        return {f"{name}.weight": layer.weight for name, layer in layers.items()}

    return quantized


# ---- fp4pass ----------------------------------------------------------------------------------


def fp4pass(run: str, model: Any, tokenizer: Any, ids: Tensor) -> Callable[[], Weights]:
    """`format method`, such as `nvfp4 gptq`; "cross" is Gptq(target="cross", damping=0.5)."""
    import fp4pass as library
    from fp4pass.linear import QuantizedLinear

    fmt, name = run.split()
    is_cross = name == "cross"
    method = library.Gptq(target="cross", damping=0.5) if is_cross else name
    if name not in ("naive", "sse"):
        library.prepare(model, method, sequential=is_cross)
        library.calibrate(model, ids.split(8), progress=False)
    library.convert(model, fmt, method, weight_only=True)

    def quantized() -> Weights:
        modules = model.named_modules()
        layers = {name: each for name, each in modules if isinstance(each, QuantizedLinear)}
        return {f"{name}.weight": layer.weight for name, layer in layers.items()}

    return quantized


LIBRARIES: dict[str, Callable[..., Callable[[], Weights]]] = {
    "llmcompressor": llmcompressor,
    "nvidia-modelopt": modelopt,
    "auto-round": auto_round,
    "fp4pass": fp4pass,
}


if __name__ == "__main__":
    main()
