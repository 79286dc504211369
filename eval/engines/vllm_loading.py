"""Load our folders by vLLM's own code, without a GPU, and compare what it holds with their tensors.

    python -m eval.engines.vllm_loading --json eval/results/vllm-loading.json

Needs vllm beside fp4pass; its wheel for CUDA will do, without the dependencies for GPUs. vLLM reads
the config, chooses the method of each layer, makes its model and loads the folder. Then each of its
parameters is compared to the bit with the tensors of the folder, those of q, k and v and of gate
and up as it joins them. `process_weights_after_loading` of FP8 runs with kernels that do nothing,
to see what vLLM changes before a kernel gets the weights. No kernel runs.

Models are small, with random weights, in one process. The results have a row for each folder:

    methods             what vLLM computes layers by, with the inputs that it quantizes
    outcome             equal, differs, or refused with the first line of the error
    not in the folder   parameters of vLLM that the folder has no tensor for
    codes changed       of the codes in FP8, before a kernel gets them
    weights changed     |W - W'| / |W| of the linear layers whose codes change
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import fp4pass
from eval.record import Results, facts

# vLLM reads these when it is imported.
os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_SIZES = {**_HEADS, "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2}
_SIZES |= {"max_position_embeddings": 128, "intermediate_size": 384, "tie_word_embeddings": False}
_MIXTURE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}

# By name: the class without Config or ForCausalLM, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", _SIZES),
    "llama": ("Llama", _SIZES),
    # q, k and v have 192 and 96 rows, gate and up 448: no whole blocks of 128.
    "llama, cut rows": ("Llama", {**_SIZES, "intermediate_size": 448, "head_dim": 48}),
    # q, k and v have 576 and 192 rows.
    "sizes of SmolLM2-135M": (
        "Llama",
        {
            **_SIZES,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    # k and v have 64 rows.
    "llama, cut keys": ("Llama", {**_SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama, cut columns": ("Llama", {**_SIZES, "hidden_size": 192}),
    "qwen3_moe": ("Qwen3Moe", {**_SIZES, **_MIXTURE}),
}

ATTENTION = "*self_attn*"


class Case(NamedTuple):
    """A folder to write.

    Attributes:
        layout: its layout.
        scheme: of all layers.
        attention: the scheme of the attention, "" for that of all layers.
        model: its name in `MODELS`.
        calibrated: inputs are calibrated, which 4 bits and one stored scale of FP8 need.
        head: the output embedding is packed, too.
        cache: the format of the key-value cache.
        rotation: columns of the inputs that are rotated together.
    """

    layout: str
    scheme: str
    attention: str = ""
    model: str = "qwen3"
    calibrated: bool = False
    head: bool = False
    cache: str = ""
    rotation: int = 0

    @property
    def name(self) -> str:
        """The words for it, without the layout and the model."""
        words = [self.scheme]
        if self.attention:
            words.append(f"attention {self.attention}")
        if self.calibrated and "fp8_tensor" in (self.scheme, self.attention):
            words.append("inputs with one stored scale")
        if self.head:
            words.append("packed head")
        if self.cache:
            words.append(f"cache {self.cache}")
        if self.rotation:
            words.append(f"rotation {self.rotation}")
        return ", ".join(words)


_CT, _MO, _FINE = "compressed-tensors", "modelopt", "finegrained-fp8"
_ROTATED = "compressed-tensors-hadamard"

CASES = (
    # In 4 bits, as a control.
    Case(_CT, "nvfp4a16"),
    Case(_CT, "nvfp4", calibrated=True),
    Case(_CT, "mxfp4a16"),
    Case(_CT, "mxfp4"),
    Case(_MO, "nvfp4a16"),
    Case(_MO, "nvfp4", calibrated=True),
    # In 8 bits.
    *(
        Case(_CT, f"{fmt}{a16}")
        for fmt in ("fp8", "fp8_block", "fp8_tensor")
        for a16 in ("", "a16")
    ),
    Case(_CT, "fp8_tensor", calibrated=True),
    Case(_CT, "mxfp8"),
    Case(_CT, "mxfp8a16"),
    Case(_MO, "fp8"),
    Case(_MO, "fp8_blocka16"),
    Case(_MO, "fp8_tensor", calibrated=True),
    Case(_MO, "mxfp8"),
    Case(_FINE, "fp8_block"),
    Case(_FINE, "fp8_tensor"),
    Case("quark", "mxfp4a16"),
    Case("quark", "mxfp4"),
    Case("quark", "mxfp4", model="qwen3_moe"),
    Case(_FINE, "fp8_tensor", calibrated=True),
    # Mixed.
    Case(_CT, "nvfp4", "fp8", calibrated=True),
    Case(_CT, "nvfp4a16", "fp8_block"),
    Case(_CT, "nvfp4", "fp8_tensor", calibrated=True),
    Case(_CT, "mxfp4a16", "mxfp8"),
    Case(_MO, "nvfp4", "fp8", calibrated=True),
    Case(_MO, "nvfp4", "fp8_tensor", calibrated=True),
    Case(_MO, "nvfp4a16", "mxfp8"),
    # Inputs in FP8 of weights in 4 bits.
    Case(_CT, "mxfp4a8"),
    Case(_CT, "mxfp4a8_block"),
    Case(_CT, "mxfp4a8", "fp8"),
    Case(_MO, "mxfp4a8_tensor", calibrated=True),
    Case("quark", "mxfp4a8_tensor", calibrated=True),
    # A packed head.
    Case(_CT, "fp8", head=True),
    Case(_CT, "nvfp4a16", "fp8", head=True),
    Case(_MO, "fp8", head=True),
    Case(_MO, "nvfp4a16", "fp8", head=True),
    # A key-value cache.
    Case(_CT, "fp8", cache="fp8", calibrated=True),
    Case(_CT, "fp8", cache="fp8_tensor", calibrated=True),
    Case(_MO, "fp8", cache="fp8_tensor", calibrated=True),
    # Another class, and layers that do not fill whole blocks.
    Case(_CT, "fp8", model="llama"),
    Case(_MO, "fp8", model="llama"),
    Case(_FINE, "fp8_block", model="llama"),
    Case(_CT, "fp8", model="llama, cut rows"),
    *(
        Case(layout, scheme, model=f"llama, cut {part}")
        for part in ("rows", "keys", "columns")
        for layout, scheme in (
            (_CT, "fp8_block"),
            (_CT, "fp8_blocka16"),
            (_MO, "fp8_blocka16"),
            (_FINE, "fp8_block"),
        )
    ),
    Case(_CT, "fp8_block", model="sizes of SmolLM2-135M"),
    Case(_FINE, "fp8_block", model="sizes of SmolLM2-135M"),
    # Rotated weights.
    Case(_ROTATED, "nvfp4a16", rotation=64),
    Case(_ROTATED, "mxfp4", rotation=32),
    *(
        Case(_ROTATED, scheme, rotation=64)
        for scheme in ("fp8", "fp8_block", "fp8_tensor", "mxfp8")
    ),
    # Experts.
    *(
        Case(_CT, scheme, model="qwen3_moe")
        for scheme in ("nvfp4a16", "mxfp4a16", "fp8", "fp8_block", "fp8_tensor", "mxfp8")
    ),
    *(
        Case(_CT, f"{scheme}a16", model="qwen3_moe")
        for scheme in ("fp8", "fp8_block", "fp8_tensor", "mxfp8")
    ),
    Case(_CT, "mxfp4a16", "fp8", model="qwen3_moe"),
    Case(_CT, "fp8_tensor", model="qwen3_moe", calibrated=True),
    Case(_CT, "nvfp4", "fp8", model="qwen3_moe", calibrated=True),
    Case(_MO, "nvfp4a16", model="qwen3_moe"),
    Case(_MO, "fp8", model="qwen3_moe"),
    Case(_MO, "fp8_blocka16", model="qwen3_moe"),
    Case(_MO, "fp8_tensor", model="qwen3_moe", calibrated=True),
    Case(_MO, "mxfp8", model="qwen3_moe"),
    Case(_MO, "nvfp4", "fp8_tensor", model="qwen3_moe", calibrated=True),
    Case(_MO, "nvfp4", "fp8", model="qwen3_moe", calibrated=True),
    Case(_MO, "fp8", "mxfp8", model="qwen3_moe"),
    Case(_FINE, "fp8_block", model="qwen3_moe"),
)


def main() -> None:
    """Write, load and compare all of them."""
    measure(__doc__, "vllm", start_engine, row)


def measure(
    text: str | None,
    engine: str,
    start: Callable[[], None],
    row_of: Callable[[Case, Path], dict[str, Any]],
) -> None:
    """Write the row of each case into the file of the command line.

    Args:
        text: the help of the command.
        engine: the package that loads the folders.
        start: called once, before the first case.
        row_of: called with a case and the folder to write it to.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="the file of results; they are printed, too")
    parser.add_argument("--again", action="store_true", help="forget the rows that are there")
    parser.add_argument("--only", default="", help="words that a case has, as 'modelopt fp8'")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start()
    about = facts("cpu", engine, "compressed_tensors")
    results = Results(args.json, about, again=args.again, key=("layout", "case", "model"))
    for case in CASES:
        words = f"{case.layout} {case.name} {case.model}"
        if not all(word in words for word in args.only.split()):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            results.put(row_of(case, Path(scratch) / "packed"))
        print(json.dumps(results.rows[-1]), flush=True)


def row(case: Case, folder: Path) -> dict[str, Any]:
    """Return what vLLM makes of one folder."""
    found = written(case, folder)
    tensors = load_file(folder / "model.safetensors")
    try:
        return found | loaded(folder, tensors)
    except Exception as error:
        return found | {"outcome": "refused", "error": words_of(error)}


def written(case: Case, folder: Path) -> dict[str, Any]:
    """Write a case into a folder, and return the beginning of its row."""
    write(case, folder)
    layers = fp4pass.checkpoint.open_checkpoint(folder).layers.values()
    formats = sorted({e.config.scheme if e.config.inputs else e.fmt.key for e in layers})
    return {"layout": case.layout, "case": case.name, "model": case.model, "formats": formats}


def words_of(error: Exception) -> str:
    """Return the first line of an error, or the line of vLLM that raised one without words."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    words = str(error).partition(" The available")[0].strip()
    words = words or f"{Path(last.filename).name}: {last.line}"
    return f"{type(error).__name__}: {words.splitlines()[0]}"


def write(case: Case, folder: Path) -> None:
    """Convert a small model with random weights, and save it."""
    name, sizes = MODELS[case.model]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()
    if case.calibrated:
        fp4pass.prepare(model, "naive", **({"kv_cache": case.cache} if case.cache else {}))
        ids = torch.arange(512).reshape(4, 128)
        fp4pass.calibrate(model, [ids], progress=False)
    rules: list[Any] = []
    if case.attention:
        rules.append((ATTENTION, scheme(case.attention)))
    if case.head:
        rules.append(("lm_head", {}))
    options = scheme(case.scheme)
    if case.cache:
        options["kv_cache"] = case.cache
    if case.rotation:
        options["rotation"] = case.rotation
    model = fp4pass.convert(model, method="naive", rules=rules, progress=False, **options)
    fp4pass.save(model, folder, layout=case.layout, progress=False)


def scheme(name: str) -> dict[str, Any]:
    """Return the options of a scheme."""
    return {"fmt": name.removesuffix("a16"), "weight_only": name.endswith("a16")}


# vLLM.


def start_engine() -> None:
    """Import vLLM, and make its groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{file.name}.group", 0, "gloo")
        initialize_model_parallel(1, 1)


def loaded(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what vLLM holds of a folder. Raises what it raises."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True)
    args.max_model_len = 64
    config = args.create_engine_config()
    loader = get_model_loader(config.load_config)
    with set_current_vllm_config(config), kernels_that_do_nothing():
        with set_default_torch_dtype(torch.bfloat16):
            model = loader.create_model(config, config.model_config)
        loader.load_weights(model, config.model_config)
        found = {"quantization": config.model_config.quantization, "methods": methods(model)}
        held = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        return found | compared(held, tensors) | processed(model, held)


def methods(model: nn.Module) -> dict[str, int]:
    """Return what vLLM computes layers by, and how many."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    found: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            scheme = getattr(module, "scheme", None) or method
            found[f"{type(scheme).__name__}{inputs_of(scheme)}"] += 1
    return dict(found)


def inputs_of(scheme: Any) -> str:
    """Return the inputs that a method of vLLM quantizes, as far as it says."""
    name = type(scheme).__name__
    if getattr(scheme, "use_a16", False) or "A16" in name:
        return ": float inputs"
    spec = getattr(scheme, "spec", None)
    key = spec.activation if spec else getattr(scheme, "activation_quant_key", None)
    if spec and key is None:
        return ": float inputs"
    return f": {key}" if key else ""


def compared(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return whether the parameters of vLLM hold the tensors of a folder, to the bit."""
    wanted: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors.items():
        target, expert, shard = place(name)
        wanted.setdefault(target, {})[expert, shard] = torch.atleast_1d(tensor)
    wrong = []
    for target, parts in wanted.items():
        if target not in held:
            wrong.append(f"{target}: no such parameter")
        elif not is_equal(held[target], parts):
            wrong.append(f"{target}: it differs")
    # Scales of a cache, which have defaults.
    others = (name for name in held if name not in wanted and ".attn." not in name)
    unfilled = {re.sub(r"\.\d+\.", ".*.", name) for name in others}
    return {
        "outcome": "differs" if wrong else "equal",
        "tensors": len(tensors),
        "parameters": len(wanted),
        **({"wrong": sorted({re.sub(r"\.\d+\.", ".*.", each) for each in wrong})} if wrong else {}),
        "not in the folder": sorted(unfilled),
    }


_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_OF_EXPERTS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}


def place(name: str) -> tuple[str, int, int]:
    """Return the parameter of vLLM that holds a tensor, the expert in it, and the part of it."""
    if found := re.fullmatch(r"(.*self_attn)\.(?:[kv]_proj\.)?([kv]_scale)", name):
        return f"{found[1]}.attn.{found[2]}", 0, 0
    module, _, leaf = name.rpartition(".")
    if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", module):
        stack, shard = _OF_EXPERTS[found[3]]
        return f"{found[1]}.routed_experts.{stack}_{leaf}", int(found[2]), shard
    parent, _, last = module.rpartition(".")
    fused, shard = _FUSED.get(last, (last, 0))
    return f"{parent}.{fused}.{leaf}".removeprefix("."), 0, shard


def is_equal(held: Tensor, parts: Mapping[tuple[int, int], Tensor]) -> bool:
    """Return whether a parameter holds tensors, one after the other."""
    joined = torch.cat([bits(parts[key]) for key in sorted(parts)])
    if torch.equal(bits(held), joined):
        return held.dtype == next(iter(parts.values())).dtype
    # One input scale for gate and up of an expert.
    first = torch.cat([bits(parts[key]) for key in sorted(parts) if not key[1]])
    same = all(torch.equal(tensor, parts[key[0], 0]) for key, tensor in parts.items())
    if same and torch.equal(bits(held), first):
        return True
    # vLLM has the scale of a cache in bfloat16; ours, a power of two, is the same number there.
    return held.numel() == 1 and all(
        torch.equal(held.float().reshape(1), t) for t in parts.values()
    )


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def processed(model: nn.Module, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what vLLM changes in FP8 before it gives the weights to a kernel."""
    changed = codes = 0
    error = norm = 0.0
    for name, module in model.named_modules():
        before = {
            part: held[f"{name}.{part}"]
            for part in ("weight", "w13_weight", "w2_weight")
            if f"{name}.{part}" in held
        }
        if not any(each.dtype == torch.float8_e4m3fn for each in before.values()):
            continue
        module.quant_method.process_weights_after_loading(module)
        for part, old in before.items():
            new = getattr(module, part)
            new = new if new.is_contiguous() else new.mT
            count = int((bits(new) != bits(old)).sum())
            changed, codes = changed + count, codes + old.numel()
            if count and part == "weight":
                # One scale for each of the layers that are joined, and one for all.
                rows = torch.tensor(module.logical_widths)
                scale = held[f"{name}.weight_scale"].repeat_interleave(rows)[:, None]
                dense = old.float() * scale
                error += float((new.float() * module.weight_scale - dense).square().sum())
                norm += float(dense.square().sum())
    found: dict[str, Any] = {"codes": codes, "codes changed": changed} if codes else {}
    return found | ({"weights changed": (error / norm) ** 0.5} if norm else {})


class Kernel:
    """A kernel of vLLM that leaves the weights alone."""

    marlin_input_dtype = None

    def __init__(self) -> None:
        self.config = SimpleNamespace()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weights as they are."""

    def input_quant_key(self) -> None:
        """Take inputs that are not quantized yet."""


def scaled_fp8_quant(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight by a scale, as the kernel of vLLM does."""
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale


@contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """Replace what chooses kernels, which needs a GPU."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, nvfp4

    choices: dict[str, Callable[..., Any]] = {
        f"init_{name}_linear_kernel": lambda *args, **options: Kernel()
        for name in ("fp8", "wfp8_a16", "mxfp8", "mxfp4", "nvfp4")
    }
    for name in ("fp8", "mxfp8"):
        backend = fp8.Fp8MoeBackend.TRITON
        choices[f"select_{name}_moe_backend"] = lambda *a, _b=backend, **o: (_b, Kernel)
    choices["select_nvfp4_moe_backend"] = lambda *a, **o: (
        nvfp4.NvFp4MoeBackend.VLLM_CUTLASS,
        Kernel,
    )
    choices |= {
        "convert_to_fp8_moe_kernel_format": lambda w13, w2, w13_scale, w2_scale, **o: (
            w13,
            w2,
            w13_scale,
            w2_scale,
        ),
        "make_fp8_moe_quant_config": lambda **options: SimpleNamespace(),
        "make_fp8_moe_kernel": lambda **options: Kernel(),
        "scaled_fp8_quant": scaled_fp8_quant,
    }
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm."):
                for choice, made in choices.items():
                    if choice in vars(module):
                        stack.enter_context(mock.patch.object(module, choice, made))
        yield


if __name__ == "__main__":
    main()
