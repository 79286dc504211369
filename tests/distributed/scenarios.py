"""What two processes over Gloo do together, each as a program: python scenarios.py NAME FOLDER."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4pass

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = os.environ.get("ON_GPU") == "1"
DEVICE = torch.device(f"cuda:{RANK}" if ON_GPU else "cpu")


class Readers(nn.Module):
    """Linears that read one input, so that sums over integers are exact."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.k, self.o = nn.Linear(64, 32), nn.Linear(64, 48), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.o(x)], -1)


class Fused(nn.Module):
    """Linears that serving engines multiply by as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(64, 32), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], -1)


class Tall(nn.Module):
    """A linear with more rows than gptq takes at once, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tall, self.small = nn.Linear(32, 13000), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.tall(x[:, :32]), self.small(x[:, 32:])], -1)


def integers(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-9, 10, (40, 64), generator=generator).float() for _ in range(count)]


def decoder(kind: str = "Qwen3", **sizes: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        **sizes,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def texts(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(96, (2, 24), generator=generator) for _ in range(count)]


def share(batches: list[Tensor]) -> list[Tensor]:
    return batches[RANK::SIZE]


def quantized(model: Any, batches: list[Tensor], method: Any, **options: Any) -> Any:
    sequential = options.pop("sequential", False)
    model = model.to(DEVICE)
    fp4pass.prepare(model, method, sequential=sequential, **{"fmt": "nvfp4", **options})
    fp4pass.calibrate(model, batches, progress=False)
    return fp4pass.convert(model)


@contextmanager
def noting_searches() -> Iterator[list[tuple[str, int, slice | None]]]:
    """Yield what this process searches: the layer, the matrix and its rows."""
    from fp4pass.quantization import quantize as search

    found: list[tuple[str, int, slice | None]] = []
    before = search._search

    def noted(weight: Any, stats: Any, layer: Any, matrix: int, cache: Any, rows: Any) -> Any:
        found.append((layer.name, matrix, rows))
        return before(weight, stats, layer, matrix, cache, rows)

    search._search = noted
    yield found
    search._search = before


def kept(folder: Path) -> Any:
    """Return a mixture with the codes of a folder in FP8."""
    import fp8_folders

    from fp4pass.checkpoint.float_models import load_float

    if RANK == 0:
        fp8_folders.make(fp8_folders.mixture_model(), folder, "finegrained")
    dist.barrier()
    model = load_float(str(folder), "auto", "cpu").to(DEVICE)
    return fp4pass.convert(model, "fp8_block", "naive", progress=False)


def facts(model: Any) -> dict[str, Any]:
    report = fp4pass.report(model).to_dict()
    state = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    return {"state": state, "report": report}


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except fp4pass.Fp4PassError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def together(folder: Path) -> dict[str, Any]:
    """Everything that ends well, or with an error of all."""
    found: dict[str, Any] = {}
    for method in ("hessian", "gptq"):
        found[method] = facts(quantized(Readers(), share(integers()), method))
    for method in ("hessian", "gptq"):
        one = quantized(Fused(), share(integers()), method, fmt="fp8_tensora16")
        found[f"{method}, one scale"] = facts(one)
    found["headroom"] = facts(
        quantized(Readers(), share(integers()), "sse", input_range="headroom")
    )
    found["sse"] = facts(fp4pass.convert(Readers(), "mxfp4", "sse", weight_only=True))
    normed = nn.Sequential(nn.LayerNorm(64), Readers()).to(DEVICE).eval()
    with torch.no_grad():
        normed[0].weight.mul_(torch.logspace(-1, 1, 64, device=DEVICE))
    fp4pass.smooth(normed, data=share(integers()), progress=False)
    found["smooth"] = facts(fp4pass.convert(normed, method="sse", weight_only=True))
    with noting_searches() as found["rows, searched"]:
        found["rows"] = facts(quantized(Tall(), share(integers()), "gptq"))
    cross = fp4pass.Gptq(target="cross", damping=0.5)
    for name, method in (("sequential", "gptq"), ("cross", cross)):
        given: dict[str, Any] = {"input_range": "headroom"} if name == "cross" else {}
        found[name] = facts(quantized(decoder(), share(texts()), method, sequential=True, **given))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    for name, sequential in (("experts", False), ("experts, one by one", True)):
        mixture = decoder("Qwen3Moe", **experts)
        method = "gptq" if sequential else "hessian"
        with noting_searches() as found[f"{name}, searched"]:
            found[name] = facts(quantized(mixture, share(texts()), method, sequential=sequential))
    found["kept"] = facts(kept(folder / "fp8"))
    streamed_twice(found, folder)
    model = quantized(decoder(), share(texts()), "hessian", weight_only=True)
    found["saved"] = facts(model)
    fp4pass.save(model, folder / "saved")
    found["there"] = (folder / "saved" / "config.json").exists()
    recipe = fp4pass.load(folder / "saved")
    found["recipe"] = recipe.__dict__["_fp4pass_state"].recipe["calibration"]

    other = [("q", None)] if RANK else ()
    found["other plan"] = failure(lambda: fp4pass.convert(Readers(), method="sse", rules=other))
    found["other weights"] = failure(lambda: fp4pass.convert(Readers(RANK), method="sse"))
    poisoned = [each * float("nan") if RANK else each for each in share(integers())]
    found["poisoned"] = failure(lambda: quantized(Readers(), poisoned, "hessian"))
    target = folder / "saved"
    found["in the way"] = failure(lambda: fp4pass.save(model, target))
    found["other folder"] = failure(lambda: fp4pass.save(model, folder / f"saved-{RANK}"))
    found["after"] = facts(quantized(Readers(), share(integers()), "hessian"))
    model = fp4pass.prepare(Readers().to(DEVICE), "hessian")
    if RANK == 0:
        fp4pass.calibrate(model, integers(), progress=False)
    found["one calibrates"] = facts(fp4pass.convert(model, "nvfp4"))

    # The last, for the group is of no use behind it.
    sys.modules["fp4pass.distributed"].__dict__["_ARRIVAL"] = timedelta(seconds=2)
    if RANK == 0:
        found["alone"] = failure(lambda: fp4pass.save(model, folder / "alone"))
        (folder / "done").touch()
    while not (folder / "done").exists() and SIZE > 1:
        time.sleep(0.1)
    return found


def exact(folder: Path) -> dict[str, Any]:
    """What has the same bits on any number of processes."""
    found: dict[str, Any] = {}
    for method in ("hessian", "gptq"):
        found[method] = facts(quantized(Readers(), share(integers()), method))
    found["rows"] = facts(quantized(Tall(), share(integers()), "gptq"))
    found["sse"] = facts(fp4pass.convert(Readers(), "mxfp4", "sse", weight_only=True))
    return found


def streamed_twice(found: dict[str, Any], folder: Path) -> None:
    streamed = fp4pass.prepare(decoder(), "gptq", sequential=True)
    fp4pass.calibrate(streamed, share(texts()), progress=False)
    for name in ("streamed", "resumed"):
        again = copy.deepcopy(streamed)
        found[name] = facts(
            fp4pass.convert(again, "nvfp4", stream=folder / "layers", device=DEVICE)
        )


def dies(folder: Path) -> dict[str, Any]:
    """One process ends in the middle of its searches."""
    model = quantized_later()
    if RANK == 1:
        from fp4pass.quantization import quantize as search

        search._search = lambda *args: os._exit(3)
    return {"error": failure(lambda: fp4pass.convert(model, "nvfp4"))}


def dies_streaming(folder: Path) -> dict[str, Any]:
    """One process ends in the second layer, when the first is written."""
    from fp4pass.quantization import quantize as search

    before = search._search

    def dying(weight: Any, stats: Any, layer: Any, *others: Any) -> Any:
        if RANK == 1 and ".layers.1." in layer.name:
            os._exit(3)
        return before(weight, stats, layer, *others)

    search._search = dying
    return {"error": failure(lambda: streamed(folder / "interrupted"))}


def goes_on(folder: Path) -> dict[str, Any]:
    """The same again, and what an uninterrupted run has."""
    with noting_searches() as searched:
        found = facts(streamed(folder / "interrupted"))
    return {"found": found, "searched": list(searched), "whole": facts(streamed(folder / "whole"))}


def streamed(folder: Path) -> Any:
    model = fp4pass.prepare(decoder(), "gptq", sequential=True)
    fp4pass.calibrate(model, share(texts()), progress=False)
    return fp4pass.convert(model, "nvfp4", stream=folder)


def quantized_later() -> Any:
    model = fp4pass.prepare(Readers(), "hessian")
    fp4pass.calibrate(model, share(integers()), progress=False)
    return model


def main(scenarios: dict[str, Any]) -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    store = dist.FileStore(str(folder / f"store-{name}"), SIZE)
    limit = timedelta(seconds=60)
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=SIZE, timeout=limit)
    torch.save(scenarios[name](folder), folder / f"{name}-{RANK}.pt")


if __name__ == "__main__":
    main(globals())
