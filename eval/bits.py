"""Write down the bits that a change of structure must not move, and compare two such files.

Each case converts a small model, saves it, loads it, and notes a digest of every tensor on disk, of
config.json and of the logits after `load`; commands are noted by their exit codes.

    python -m eval.bits before.json          # at the old commit
    python -m eval.bits after.json           # at the new one
    python -m eval.bits --compare before.json after.json

With --device cuda the models, and so the kernels, are those of a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

import fp4pass

DEVICE = "cpu"
TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny_lm"
_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}


def dense() -> nn.Module:
    """Return a small Llama with weights of a fixed seed."""
    return _model(transformers.LlamaConfig(**_SMALL))


def mixture() -> nn.Module:
    """Return a small mixture of experts with weights of a fixed seed."""
    return _model(transformers.Qwen3MoeConfig(**_SMALL, **_MIXTURE))


def _model(config: Any) -> nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    return made.eval().to(DEVICE)


def _batches(count: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (2, 64), generator=draw) for _ in range(count)]


def _in_steps(
    make: Callable[[], nn.Module],
    fmt: str,
    method: object,
    sequential: bool = False,
    **options: Any,
) -> nn.Module:
    places = {name: options.pop(name) for name in ("stream", "resume") if name in options}
    cache = {"kv_cache": options.pop("kv_cache", None)}
    model = fp4pass.prepare(make(), method, sequential=sequential, **cache, **options)
    fp4pass.calibrate(model, _batches(), progress=False)
    return fp4pass.convert(model, fmt, progress=False, **places)


def _cases(folder: Path) -> dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]]:
    """Return how each case makes its model, and the options of `save`."""
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {}

    def add(name: str, make: Callable[[], nn.Module], **saved: Any) -> None:
        cases[name] = (make, saved)

    schemes = ("nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16", "fp8", "fp8_block", "mxfp8")
    for kind, make in (("dense", dense), ("mixture", mixture)):
        for fmt in schemes:
            for method in ("naive", "sse", "hessian"):
                add(
                    f"{kind} {fmt} {method}",
                    lambda m=make, f=fmt, d=method: _in_steps(m, f, d),  # type: ignore[misc]
                )
        for method in (fp4pass.Gptq(), fp4pass.Gptq(target="cross")):
            for fmt in ("nvfp4a16", "mxfp4"):
                add(
                    f"{kind} {fmt} gptq {method.target} sequential",
                    lambda m=make, f=fmt, d=method: _in_steps(m, f, d, True),  # type: ignore[misc]
                )
    add("layout quark", lambda: _in_steps(dense, "mxfp4a16", "hessian"), layout="quark")
    for layout in ("modelopt", "fp4pass"):
        add(f"layout {layout}", lambda: _in_steps(dense, "nvfp4a16", "hessian"), layout=layout)
    add("modelopt nvfp4", lambda: _in_steps(dense, "nvfp4", "sse"), layout="modelopt")
    add("rotated", lambda: _in_steps(dense, "mxfp4a16", "hessian", rotation=32))
    for cache in ("fp8", "fp8_tensor", "nvfp4"):
        add(f"cache {cache}", lambda c=cache: _in_steps(dense, "nvfp4", "sse", kv_cache=c))  # type: ignore[misc]
    mixed = [("*.self_attn.*", {"fmt": "fp8"}), ("*.down_proj", None)]
    add("mixed", lambda: _in_steps(dense, "nvfp4a16", "hessian", rules=mixed))
    streamed = {"stream": folder / "stream"}
    add("streamed", lambda: _in_steps(mixture, "nvfp4a16", "gptq", True, **streamed))
    resumed = {"resume": folder / "resume"}
    add("searched", lambda: _in_steps(dense, "nvfp4a16", "hessian", **resumed))
    add("resumed", lambda: _in_steps(dense, "nvfp4a16", "hessian", **resumed))
    for quality in ("fast", "good", "best"):
        add(f"quality {quality}", lambda q=quality: _tiny(q))  # type: ignore[misc]
    return cases


def _tiny(quality: str) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    data = [batch % 100 for batch in _batches()]
    return fp4pass.convert(model.eval().to(DEVICE), quality=quality, data=data, progress=False)


def digest(tensor: Tensor) -> str:
    """Return a digest of the shape, the dtype and the bytes of a tensor."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    facts = f"{tuple(plain.shape)} {plain.dtype} ".encode()
    return hashlib.sha256(facts + data).hexdigest()[:16]


def _noted(make: Callable[[], nn.Module], saved: dict[str, Any], folder: Path) -> dict[str, str]:
    fp4pass.save(make(), folder, **saved)
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: digest(file.get_tensor(name)) for name in file.keys()}
    found["config.json"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    with torch.no_grad():
        loaded = fp4pass.load(folder).to(DEVICE)
        logits = loaded(_batches(1)[0].to(DEVICE) % 100).logits
    return found | {"logits": digest(logits)}


def _commands(folder: Path) -> dict[str, list[str]]:
    made = str(folder / "made")
    return {
        "quantize": ["quantize", str(TINY), "-o", made, "--method", "sse"],
        "quantize again": ["quantize", str(TINY), "-o", made, "--method", "sse"],
        "no such model": ["quantize", str(folder / "none"), "-o", str(folder / "x")],
        "no such format": ["quantize", str(TINY), "-o", str(folder / "x"), "--fmt", "int3"],
        "verify": ["verify", made, "--reference", str(TINY)],
        "verify a float folder": ["verify", str(TINY)],
        "inspect": ["inspect", made, "--json"],
        "report": ["report", made, "-o", str(folder / "report")],
        "transcode": ["transcode", made, "-o", str(folder / "mo"), "--to", "modelopt"],
        "no such layout": ["transcode", made, "-o", str(folder / "no"), "--to", "gguf"],
        "eval": ["eval", made, "--data", str(TINY / "none.txt")],
        "doctor": ["doctor"],
    }


def measure(only: str = "") -> dict[str, Any]:
    """Return the digests of all cases whose name holds `only`."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for index, (name, (make, saved)) in enumerate(_cases(folder).items()):
            if only in name:
                try:
                    found[name] = _noted(make, saved, folder / str(index))
                except Exception as error:
                    traceback.print_exc()
                    found[name] = {"error": type(error).__name__}
                print(name, len(found[name]), file=sys.stderr)
        for name, arguments in _commands(folder).items():
            if only in name:
                command = [sys.executable, "-m", "fp4pass", *arguments]
                done = subprocess.run(command, capture_output=True, check=False)
                found[name] = {"exit code": str(done.returncode)}
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each case or tensor that differs."""
    lines = [f"{name}: in one file only" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        keys = sorted(before[name].keys() | after[name].keys())
        moved = [key for key in keys if before[name].get(key) != after[name].get(key)]
        lines += [f"{name}: {len(moved)} of {len(keys)} differ: {moved[:4]}"] if moved else []
    return lines


def main() -> None:
    """Measure, or compare two files; exit with 1 where they differ."""
    global DEVICE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    DEVICE = args.device
    if not args.compare:
        args.files[0].write_text(json.dumps(measure(args.only), indent=1) + "\n")
        return
    before, after = (json.loads(path.read_text()) for path in args.files)
    lines = differences(before, after)
    print("\n".join(lines) or f"{len(before)} cases are equal")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
