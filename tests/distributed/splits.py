"""What two processes compute with parts of one model: python splits.py NAME FOLDER."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scenarios import DEVICE, ON_GPU, RANK, SIZE, decoder, failure, main, quantized, texts
from torch import Tensor, nn
from torch.distributed import checkpoint, fsdp, init_device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fp4pass
from fp4pass import ops
from fp4pass.distributed import ranks, whole_tensors
from fp4pass.kernels.norm.naive import square_sums_ref
from fp4pass.parallel import (
    ColwiseParallel,
    ExpertParallel,
    RowwiseParallel,
    fully_shard,
    reach_peers,
    with_shared_scale,
)

IDS = texts(1)[0].to(DEVICE)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT_OSS = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
W4A16 = {"weight_only": True}
# A static cache that is made before the first keys are there.
CHUNKS = {"cache_implementation": "static", "prefill_chunk_size": 8, "disable_compile": True}

# A model, its sizes, how it is converted, and a plan where the model has none.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "weight only": ("Qwen3", {}, W4A16, None),
    "static": ("Qwen3", {}, {"method": "hessian"}, None),
    "dynamic": ("Llama", {"attention_bias": True}, {}, None),
    "rotated": ("Qwen3", {"intermediate_size": 128}, {"fmt": "mxfp4", "rotation": 32}, None),
    "tied": ("Qwen3", {"tie_word_embeddings": True}, {"rules": [("*.o_proj", None)]}, None),
    "experts": ("Qwen3Moe", EXPERTS, {"method": "hessian"}, None),
    "dynamic experts": ("Qwen3Moe", EXPERTS, {}, None),
    "experts of tokens": ("Qwen3Moe", EXPERTS, {"fmt": "mxfp4a8"}, None),
    "dense experts": ("Qwen3Moe", EXPERTS, {"rules": [("*.experts.*", None)]}, None),
    "biased experts": ("GptOss", GPT_OSS, {}, {"model.layers.*.mlp.experts": ExpertParallel()}),
}

# Those that kernels tell apart, each of which takes seconds to compile.
ON_GPUS = ("weight only", "dynamic", "dynamic experts")


def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh(DEVICE.type, sizes or (SIZE,))


def converted(kind: str, sizes: dict[str, Any], options: dict[str, Any]) -> Any:
    model = decoder(kind, **{**HEADS, **sizes})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    if "method" in options:
        return quantized(model, texts(), **options)
    return fp4pass.convert(model.to(DEVICE), **{"fmt": "nvfp4", "method": "sse", **options})


@contextmanager
def counted(name: str) -> Iterator[list[str]]:
    """The calls of an operator."""
    calls: list[str] = []
    operator = getattr(ops, name)

    def call(*args: Any) -> Any:
        calls.append(name)
        return operator(*args)

    setattr(ops, name, call)
    try:
        yield calls
    finally:
        setattr(ops, name, operator)


def computed(model: Any) -> dict[str, Any]:
    """The logits of a model, and how often it quantizes an input."""
    with torch.no_grad(), counted("quantize") as calls:
        logits = model(IDS).logits.cpu()
    return {"logits": logits, "quantizations": len(calls)}


def generated(model: Any, **options: Any) -> Tensor:
    return model.generate(IDS, max_new_tokens=4, do_sample=False, **options).cpu()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, in the first process."""
    found = whole_tensors(ranks(), model.state_dict(), {})
    return {name: x if x.is_meta else x.cpu() for name, x in found.items()}


def shapes(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Of what is split: the shape of the whole and that of the part."""
    return {
        name: (tuple(tensor.shape), tuple(tensor.to_local().shape))
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, DTensor)
    }


def reductions() -> dict[str, Any]:
    """Sums and maxima of integers in operators, alone and on GPUs in a graph, and whether right."""
    found: dict[str, Any] = {"shared memory": reach_peers(mesh())}
    name = mesh().get_group().group_name
    generators = [torch.Generator().manual_seed(10 + rank) for rank in range(SIZE)]

    def numbers(count: int, dtype: torch.dtype) -> list[Tensor]:
        made = [torch.randint(-50, 51, (count,), generator=each) for each in generators]
        return [each.to(dtype).to(DEVICE) for each in made]

    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    cases = [(count, kind) for count in (1, 2, 66, 4096, 1 << 15, 1 << 18) for kind in kinds]
    for count, kind in cases:
        every = numbers(count, kind)
        expected = sum(every), torch.stack(every).amax(0)
        reduced = (ops.all_reduce(every[RANK], name, maximum) for maximum in (False, True))
        found[f"{count} {kind}"] = tuple(map(torch.equal, reduced, expected))
    for count, kind in ((4096, torch.bfloat16), (48, torch.float16), (560, torch.float32)):
        parts = [each.view(2, -1) for each in numbers(2 * count, kind)]
        # Halves do not round away.
        residual = torch.arange(2 * count, device=DEVICE).remainder(7).view(2, -1).to(kind) / 2
        total, squares = ops.all_reduce_add(parts[RANK], residual, name)
        expected = residual + sum(parts)
        right = torch.equal(total, expected), torch.equal(squares, square_sums_ref(expected))
        found[f"with a residual, {count} {kind}"] = right
    if ON_GPU:
        x = [torch.empty(count, device=DEVICE, dtype=torch.bfloat16) for count in (4096, 64)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = [ops.all_reduce(each, name, False) for each in (*x, *x)]
        right = []
        for _ in range(20):
            every = [numbers(len(each), each.dtype) for each in x]
            for each, values in zip(x, every, strict=True):
                each.copy_(values[RANK])
            graph.replay()
            sums = [sum(values) for values in every] * 2
            right += [torch.equal(a, b) for a, b in zip(y, sums, strict=True)]
        found["graph"] = all(right), True
    return found


def models(folder: Path) -> dict[str, Any]:
    """Models that are split by their plans."""
    found: dict[str, Any] = {"reductions": reductions()}
    for name in ON_GPUS if ON_GPU else CASES:
        kind, sizes, options, plan = CASES[name]
        model = converted(kind, sizes, options)
        facts = {"before": state_of(model), "whole": computed(model)}
        if name == "weight only" and not ON_GPU:
            # The kernels of GPUs have no float64.
            facts["exact"] = copy.deepcopy(model).double()(IDS).logits.detach().cpu()
        if name in ("static", "experts"):
            facts["tokens"] = [generated(model)]
        fp4pass.parallelize(model, mesh(), plan)
        if name in ("static", "experts"):
            facts["tokens"] += [generated(model), generated(model, **CHUNKS)]
        facts |= {"split": computed(model), "shapes": shapes(model)}
        facts |= {"after": gathered(model), "frozen": not any(map(_trains, model.parameters()))}
        model.load_state_dict(model.state_dict())
        facts["loaded"] = computed(model)
        found[name] = facts
    return found


def _trains(parameter: Tensor) -> bool:
    return parameter.requires_grad


class Mlp(nn.Module):
    """Two linears with biases."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.a(x)))


STYLES = {"a": ColwiseParallel(), "b": RowwiseParallel()}
# The tensor between the layers is whole.
WHOLE = {
    "a": ColwiseParallel(output_layouts=Replicate()),
    "b": RowwiseParallel(input_layouts=Replicate()),
}


def styles(folder: Path) -> dict[str, Any]:
    """Layers that are split by styles: outputs and scales."""
    found: dict[str, Any] = {}
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    rows = slice(64 * RANK, 64 * RANK + 64)
    kinds = {"W4A16": W4A16, "rotated": {**W4A16, "rotation": 32}, "W4A4": {}}
    for name, options in kinds.items():
        whole: Any = fp4pass.convert(
            Mlp().to(DEVICE), **{"fmt": "nvfp4", "method": "sse", **options}
        )
        part = parallelize_module(copy.deepcopy(whole), mesh(), STYLES)
        with torch.no_grad():
            found[name] = {"whole": whole(x).cpu(), "split": part(x).cpu()}
        found[name]["weights"] = [
            (each.weight.cpu(), other.weight.full_tensor().cpu())
            for each, other in ((whole.a, part.a), (whole.b, part.b))
        ]
    between = parallelize_module(copy.deepcopy(whole), mesh(), WHOLE)
    with torch.no_grad():
        found["between"] = whole(x).cpu(), between(x).cpu()
    # The largest number is among the columns of one process.
    wide = torch.randn(5, 128, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    wide[:, 64:] *= 4096
    scale = ops.dynamic_global_scale(wide, "nvfp4")
    columns = part.b
    stored = with_shared_scale(columns.packed_weight, columns.config, wide[:, rows], columns.mesh)
    found["scales"] = {"columns": (scale, stored.input_global_scale)}
    # And among what the experts of one process made.
    model = converted("Qwen3Moe", {**EXPERTS, "num_hidden_layers": 1}, {})
    fp4pass.parallelize(model, mesh())
    stack = model.model.layers[0].mlp.experts.down_proj
    made = wide[:, None, rows][..., :32]
    found["scales"]["experts"] = scale, stack.weight_for(made).input_global_scale
    return found


def saved(folder: Path) -> dict[str, Any]:
    """Models that are saved from parts."""
    found: dict[str, Any] = {}
    for name in ("dynamic experts", "tied"):
        kind, sizes, options, plan = CASES[name]
        model = converted(kind, sizes, {**options, **W4A16})
        fp4pass.save(model, folder / f"{name}, whole")
        fp4pass.parallelize(model, mesh(), plan)
        fp4pass.save(model, folder / f"{name}, split")
        found[name] = reloaded(model, fp4pass.load(folder / f"{name}, whole"), folder / name)
    found["save_pretrained"] = failure(lambda: model.save_pretrained(folder / "own"))
    return found


def reloaded(model: nn.Module, whole: nn.Module, folder: Path) -> tuple[Any, Any]:
    """The tensors of a whole model, and those that torch writes of a split one."""
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    state = {key: torch.zeros_like(tensor) for key, tensor in whole.state_dict().items()}
    checkpoint.load(state, checkpoint_id=folder)
    return whole.state_dict(), state


def sharded(folder: Path) -> dict[str, Any]:
    """Models under FSDP2."""
    found: dict[str, Any] = {}
    bfloat16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name in ("static", "experts") if ON_GPU else ("static", "rotated", "experts"):
        kind, sizes, options, _ = CASES[name]
        model = converted(kind, sizes, options)
        before = state_of(model)
        logits = computed(model)
        cast = copy.deepcopy(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh())
        fully_shard(model, mesh=mesh())
        found[name] = {"before": before, "shapes": shapes(model), "whole": logits}
        found[name] |= {"split": computed(model), "after": gathered(model)}
        model.load_state_dict(model.state_dict())
        found[name]["loaded"] = computed(model)
        found[name]["bfloat16"] = precise(cast, bfloat16)
    fp4pass.save(model.to(torch.float32), folder / "sharded")
    found["reloaded"] = computed(fp4pass.load(folder / "sharded").to(DEVICE))["logits"]
    model = converted(*CASES["weight only"][:3])
    fp4pass.parallelize(model, mesh())
    found["split"] = failure(lambda: fully_shard(model, mesh=mesh()))
    return found


def precise(model: Any, policy: Any) -> Any:
    """The logits of a policy, with packed tensors replicated and sharded; or an error."""
    found: list[Tensor] = []

    def run() -> None:
        for shard in (fsdp.fully_shard, fully_shard):
            each = copy.deepcopy(model)
            for layer in each.model.layers:
                shard(layer, mesh=mesh(), mp_policy=policy)
            shard(each, mesh=mesh(), mp_policy=policy)
            with torch.no_grad():
                found.append(each(IDS).logits.cpu())

    return failure(run) or found


def errors(folder: Path) -> dict[str, Any]:
    """What cannot be split."""
    found: dict[str, Any] = {}

    def split(sizes: dict[str, Any], kind: str = "Qwen3", plan: Any = None) -> str:
        model = converted(kind, sizes, W4A16)
        message = failure(lambda: fp4pass.parallelize(model, mesh(), plan))
        # Before anything was changed.
        assert not shapes(model)
        return message

    found["columns"] = split({"intermediate_size": 80})
    found["heads"] = split({"num_key_value_heads": 1})
    found["experts"] = split({**EXPERTS, "num_experts": 5}, "Qwen3Moe")
    found["vocabulary"] = split({"vocab_size": 97})
    mlp = fp4pass.convert(Mlp(), "nvfp4", method="sse")
    found["no plan"] = failure(lambda: fp4pass.parallelize(mlp, mesh()))
    found["unknown"] = split({}, plan={"lm_heads": "colwise"})
    found["a style"] = split({}, plan={"model.layers.*.mlp": "sequence_parallel"})
    found["a norm"] = split({}, plan={"model.norm": "colwise"})
    found["a parameter"] = split({}, plan={"model.norm.weight": "colwise"})
    model = converted("Qwen3", {}, W4A16)
    found["mesh"] = failure(lambda: fp4pass.parallelize(model, mesh(1, 2)))
    tokens = ColwiseParallel(input_layouts=Shard(0))
    layer = fp4pass.convert(nn.Linear(64, 64), "nvfp4", method="sse")
    found["tokens"] = failure(lambda: parallelize_module(layer, mesh(), tokens))
    found["rows"] = failure(
        lambda: parallelize_module(
            fp4pass.convert(nn.Linear(64, 63), "nvfp4", method="sse"), mesh(), STYLES["a"]
        )
    )
    model.model.norm.weight.data[0] = RANK
    found["other weights"] = failure(lambda: fp4pass.parallelize(model, mesh()))
    model.model.norm.weight.data[0] = 1
    fp4pass.parallelize(model, mesh())
    found["twice"] = failure(lambda: fp4pass.parallelize(model, mesh()))
    found["dense"] = failure(lambda: fp4pass.parallelize(decoder(), mesh()))
    layer = model.model.layers[0].mlp.gate_proj
    parts = DTensor.from_local(torch.randn(3, 64), mesh(), [Replicate()])
    plain: Any = fp4pass.convert(nn.Linear(64, 64), "nvfp4", method="sse")
    found["input"] = failure(lambda: plain(parts))
    embeds = torch.randn(1, 4, 64, requires_grad=True)
    found["gradient"] = failure(lambda: model(inputs_embeds=embeds))
    found["state"] = ""
    whole = converted("Qwen3", {}, W4A16).model.layers[0].mlp.gate_proj.state_dict()
    try:
        layer.load_state_dict(whole)
    except RuntimeError as error:
        found["state"] = str(error)
    return found


def traced(folder: Path, name: str = "dynamic", backend: str = "aot_eager") -> dict[str, Any]:
    """A model in one graph."""
    kind, sizes, options, plan = CASES[name]
    model = converted(kind, {**sizes, "num_hidden_layers": 1}, options)
    with torch.no_grad():
        whole = model(IDS).logits.cpu()
        fp4pass.parallelize(model, mesh(), plan)
        logits = torch.compile(model, fullgraph=True, backend=backend)(IDS).logits.cpu()
    return {"whole": whole, "split": logits}


def compiled(folder: Path) -> dict[str, Any]:
    """Models that Inductor compiles, with the passes."""
    found = {name: traced(folder, name, "inductor") for name in ("dynamic", "dynamic experts")}
    return {**found, "report": str(fp4pass.compile_report())}


def quick(folder: Path) -> dict[str, Any]:
    parts = (models, styles, saved, sharded, errors, traced)
    return {part.__name__: part(folder) for part in parts}


def transformers_loads(folder: Path) -> dict[str, Any]:
    """Models that transformers is to split while it loads them."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from fp4pass.integrations import Fp4PassConfig, PackedConfig

    os.environ["LOCAL_RANK"] = str(RANK)
    if RANK == 0:
        decoder("Qwen3", **HEADS).save_pretrained(folder / "float")
    torch.distributed.barrier()

    def load(**options: Any) -> Any:
        config = Fp4PassConfig()
        path = folder / "float"
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **options)

    found = {"whole": computed(load().to(DEVICE))}
    model = load(distributed_config=DistributedConfig(tp_size=2))
    found |= {"split": computed(model), "shapes": shapes(model)}
    fp4pass.save(model, folder / "packed")
    found["saved"] = computed(fp4pass.load(folder / "packed").to(DEVICE))
    # The folder declares bfloat16, which engines compute in.
    options = {"distributed_config": DistributedConfig(tp_size=2), "dtype": torch.float32}
    kept = AutoModelForCausalLM.from_pretrained(
        folder / "packed", quantization_config=PackedConfig(), **options
    )
    found |= {"kept packed": computed(kept), "kept shapes": shapes(kept)}
    own = DistributedConfig(tp_plan={"model.layers.*.mlp.up_proj": "colwise"})
    found["own plan"] = failure(lambda: load(distributed_config=own))
    found["fsdp"] = failure(lambda: load(distributed_config=DistributedConfig(fsdp_size=2)))
    rules = [("*.self_attn.*", None)]
    model = converted("Qwen3Moe", EXPERTS, {"rules": rules})
    found["their plan"] = failure(lambda: theirs(model))
    return found


def adapters(folder: Path) -> dict[str, Any]:
    """Gradients of adapters on a model, whole and sharded."""
    from peft import LoraConfig, get_peft_model

    found: dict[str, Any] = {}
    for name in ("whole", "sharded"):
        model = converted(*CASES["weight only"][:3])
        torch.manual_seed(5)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
        model = get_peft_model(model, config)
        if name == "sharded":
            for layer in model.base_model.model.model.layers:
                fully_shard(layer, mesh=mesh())
            fully_shard(model, mesh=mesh())
        model(IDS, labels=IDS).loss.backward()
        found[name] = {
            key: (each.grad.full_tensor() if name == "sharded" else each.grad).cpu()
            for key, each in model.named_parameters()
            if each.requires_grad
        }
    return found


def theirs(model: Any) -> None:
    """Have transformers split a model that is packed."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {"model.layers.0.mlp.experts": "moe_tp_experts"}
    model.tp_plan = plan
    try:
        apply_tensor_parallelism(model, mesh(), plan)
    except TypeError:
        apply_tensor_parallelism(model, mesh())
    model(IDS)


if __name__ == "__main__":
    main(globals())
