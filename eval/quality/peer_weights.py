"""The weights of a language model in 4 bits by fp4pass and by other libraries, side by side.

    python -m eval.quality.peer_weights --by NAME [NAME ...] --json FILE

All quantize the linear layers of one float32 model but its head, weights only, and are measured
on the same tokens as `fp4pass.evaluate` does. Those that calibrate get the same windows. Each
library is imported by the function that uses it, and a run adds its rows to the file.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality.models import TINY, read
from eval.record import facts
from fp4pass.evaluation import token_windows

WINDOW = 512

# Takes the model, its tokenizer and windows of text; returns what to measure.
Peer = Callable[[nn.Module, Any, Tensor], nn.Module]


def rounded(model: nn.Module, there_and_back: Callable[[Tensor], Tensor]) -> nn.Module:
    """The model with every weight of a linear layer but the head's quantized and dequantized."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = there_and_back(module.weight.data).to(module.weight.dtype)
    return model


def bitsandbytes(model: nn.Module, tokenizer: Any, windows: Tensor, *, kind: str) -> nn.Module:
    from bitsandbytes import functional

    def there_and_back(weight: Tensor) -> Tensor:
        return functional.dequantize_4bit(
            *functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
        )

    return rounded(model, there_and_back)


def torchao(model: nn.Module, tokenizer: Any, windows: Tensor) -> nn.Module:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def there_and_back(weight: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(weight.abs().max())
        return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(weight.dtype)

    return rounded(model, there_and_back)


def modelopt(model: nn.Module, tokenizer: Any, windows: Tensor) -> nn.Module:
    """What its NVFP4 export stores with the scales of its default configuration."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def there_and_back(weight: Tensor) -> Tensor:
        packed, scale, scale_2 = NVFP4QTensor.quantize(weight, 16)
        return packed.dequantize(
            dtype=weight.dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
        )

    return rounded(model, there_and_back)


def llm_compressor(
    model: nn.Module, tokenizer: Any, windows: Tensor, *, by_gptq: bool
) -> nn.Module:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    modifier = GPTQModifier if by_gptq else QuantizationModifier
    recipe = modifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    rows = {"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()}
    data = {
        "dataset": Dataset.from_dict(rows),
        "num_calibration_samples": len(windows),
        "max_seq_length": WINDOW,
    }
    return oneshot(model=model, recipe=recipe, tokenizer=tokenizer, **(data if by_gptq else {}))


def auto_round(model: nn.Module, tokenizer: Any, windows: Tensor, *, iters: int) -> nn.Module:
    """The weights that it tunes with 4-bit inputs, as its scheme has them, alone."""
    from auto_round import AutoRound

    tuner = AutoRound(
        copy.deepcopy(model),
        tokenizer=tokenizer,
        scheme="NVFP4",
        iters=iters,
        nsamples=len(windows),
        seqlen=WINDOW,
        batch_size=8,
        dataset=[{"input_ids": row[None]} for row in windows],
        device_map="cpu",
        enable_torch_compile=False,
    )
    tuned = tuner.quantize()[0]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            found = tuned.get_submodule(name)
            module.weight.data = getattr(found, "orig_layer", found).weight.data.float()
    return model


def named(
    model: nn.Module, tokenizer: Any, windows: Tensor, *, quality: str, own_text: bool = False
) -> nn.Module:
    data = None if own_text else windows
    return fp4pass.convert(model, "nvfp4a16", quality=quality, data=data, tokenizer=tokenizer)


def peer(package: str, fmt: str, function: Callable[..., nn.Module], **options: Any) -> Any:
    """Return an entry: the package, the format of its weights, and the function."""
    return package, fmt, functools.partial(function, **options)


PEERS: dict[str, tuple[str, str, Peer]] = {
    "fp4pass fast": peer("fp4pass", "nvfp4", named, quality="fast"),
    "fp4pass good": peer("fp4pass", "nvfp4", named, quality="good"),
    "fp4pass best": peer("fp4pass", "nvfp4", named, quality="best"),
    "fp4pass best, own text": peer("fp4pass", "nvfp4", named, quality="best", own_text=True),
    "bitsandbytes nf4": peer("bitsandbytes", "nf4", bitsandbytes, kind="nf4"),
    "bitsandbytes fp4": peer("bitsandbytes", "fp4", bitsandbytes, kind="fp4"),
    "torchao": peer("torchao", "nvfp4", torchao),
    "ModelOpt": peer("nvidia-modelopt", "nvfp4", modelopt),
    "llm-compressor": peer("llmcompressor", "nvfp4", llm_compressor, by_gptq=False),
    "llm-compressor GPTQ": peer("llmcompressor", "nvfp4", llm_compressor, by_gptq=True),
    "auto-round, 0 iterations": peer("auto-round", "nvfp4", auto_round, iters=0),
    "auto-round, 200 iterations": peer("auto-round", "nvfp4", auto_round, iters=200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--by", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--samples", type=int, default=64, help="windows to calibrate on")
    parser.add_argument("--windows", type=int, default=32, help="windows to measure")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    calib = token_windows(tokenizer, read(TINY / "calib.txt"), window=WINDOW, windows=args.samples)
    text = read(TINY / "eval.txt")
    options = {"window": WINDOW, "windows": args.windows, "progress": False}
    original = fp4pass.evaluate(model, tokenizer, text, **options)
    found = {
        **facts("cpu"),
        "model": TINY.name,
        "dtype": "float32",
        "calibration_windows": args.samples,
        "windows": args.windows,
        "window": WINDOW,
        "original": {"perplexity": original.perplexity},
        "rows": [],
    }
    if args.json.exists():
        stored = json.loads(args.json.read_text("utf-8"))
        found |= {"command": stored["command"], "rows": stored["rows"]}
    for name in args.by:
        package, fmt, quantize = PEERS[name]
        began = time.perf_counter()
        quantized = quantize(copy.deepcopy(model), tokenizer, calib).eval()
        seconds = time.perf_counter() - began
        here = fp4pass.evaluate(quantized, tokenizer, text, model, **options)
        low, high = here.intervals["kl"]
        row = {
            "by": name,
            "version": importlib.metadata.version(package),
            "format": fmt,
            "perplexity": here.perplexity,
            "kl": {"value": here.kl, "low": low, "high": high},
            "seconds": seconds,
        }
        found["rows"] = [each for each in found["rows"] if each["by"] != name] + [row]
        order = list(PEERS)
        found["rows"].sort(key=lambda each: order.index(each["by"]))
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: KL {here.kl:.4f}, perplexity {here.perplexity:.3f}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
