"""fp4pass doctor: what runs packed weights on this machine."""

from __future__ import annotations

import platform
from typing import Any

import torch

from .._version import __version__
from ..core.formats import NVFP4
from ..kernels.cpu.library import load
from ..ops.registration import unserved
from . import screen


def doctor(as_json: screen.Json = False) -> None:
    """Say what runs packed weights on this machine: C++ or plain PyTorch on its CPU, its GPUs.

    The C++ of the CPU is compiled now, if no earlier process did.
    """
    _, reason = load()
    found: dict[str, Any] = {
        "versions": {
            "fp4pass": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "cpu": {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "kernels": "C++" if reason is None else "plain PyTorch",
            "reason": reason,
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
    }
    if as_json:
        screen.print_json(found)
        return
    print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    cpu = found["cpu"]
    print(f"CPU: {cpu['kernels']} ({cpu['instructions']}, {cpu['threads']} threads)")
    for line in filter(None, (cpu["reason"], None if found["gpus"] else "GPU: none")):
        print(line)
    for gpu in found["gpus"]:
        print(": ".join(filter(None, (gpu["name"], gpu["kernels"], gpu["reason"]))))


def _gpu(index: int) -> dict[str, str | None]:
    reason = unserved(torch.device("cuda", index), NVFP4)
    return {
        "name": torch.cuda.get_device_name(index),
        "kernels": "Triton" if reason is None else "plain PyTorch",
        "reason": reason,
    }
