"""fp4pass doctor: the kernels that run on this machine, the fallbacks, and their reasons."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from .._compat import LIBRARIES, all_parts, is_newer, is_older
from .._version import __version__
from ..core.formats import FORMATS, NVFP4
from ..core.machine import has_fp4_tensor_cores
from ..kernels.cpu.operators import load, serves
from ..ops.registration import unserved
from . import screen

# Compute capability from which GPUs have tensor cores for it.
FP8 = (8, 9)

# The variable that names a compiler, its usual programs, and its uses.
COMPILERS = {
    "C++": ("CXX", ("g++", "clang++"), "products and torch.compile on the CPU"),
    "C": ("CC", ("gcc", "clang"), "the launchers of Triton's kernels"),
}


def doctor(json: bool = False) -> None:
    """Show what runs packed weights on this machine, and why some formats run slower code.

    Compiles the C++ kernels of the CPU, if no earlier process did.
    """
    _, problem = load()
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    plain = [name for name, fmt in FORMATS.items() if not serves(torch.float32, fmt)]
    falls_back = [f"Products on the CPU run in plain PyTorch: {problem}"] if problem else []
    for gpu in gpus:
        if gpu["reason"]:
            falls_back.append(f"{gpu['name']} runs plain PyTorch: {gpu['reason']}.")
        if not gpu["fp8"]:
            falls_back.append(
                f'{gpu["name"]} has no FP8 tensor cores: computing in "fp8" is an error there.'
            )
    falls_back.append(f"{', '.join(plain)} run in plain PyTorch on a CPU: no kernel supports them.")
    falls_back += [str(part) for part in all_parts() if not part.works()]
    found: dict[str, Any] = {
        "fp4pass": __version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "tested": {name: [each.oldest, each.newest] for name, each in LIBRARIES.items()},
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "compilers": {name: _compiler(name) for name in COMPILERS},
        "cpu": {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "kernels": "plain PyTorch" if problem else "C++",
            "reason": problem,
        },
        "gpus": gpus,
        "falls_back": falls_back,
    }
    if json:
        screen.print_json(found)
        return
    print(f"fp4pass {__version__}, Python {found['python']}")
    for name, version in found["versions"].items():
        tested, remark = LIBRARIES[name], ""
        if version and is_newer(version, tested.newest):
            remark = ", newer than the tested ones"
        elif version and is_older(version, tested.oldest):
            remark = ", older than the tested ones"
        print(f"{name}: {version or 'not installed'} (tested: {tested}){remark}")
    build = f"torch is built for CUDA {found['cuda']}" if found["cuda"] else "torch has no CUDA"
    print(f"{found['system']}; {build}")
    for name, compiler in found["compilers"].items():
        print(f"{name} compiler: {compiler or 'none'}, for {COMPILERS[name][2]}")
    cpu = found["cpu"]
    print(f"CPU: {cpu['kernels']} ({cpu['instructions']}, threads: {cpu['threads']})")
    for gpu in gpus:
        cores = ", ".join(f"{name} {'yes' if gpu[name] else 'no'}" for name in ("fp8", "fp4"))
        print(f"GPU: {gpu['name']}, {gpu['memory_gb']:.0f} GB, {gpu['capability']}: ", end="")
        print(f"{gpu['kernels']}; tensor cores for {cores}")
    if not gpus:
        print("GPU: none")
    print("\n  ".join(("Falls back:", *falls_back)))


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    capability = torch.cuda.get_device_capability(index)
    reason = unserved(torch.device("cuda", index), NVFP4)
    return {
        "name": torch.cuda.get_device_name(index),
        "memory_gb": torch.cuda.get_device_properties(index).total_memory / 1e9,
        "capability": f"compute capability {capability[0]}.{capability[1]}",
        "fp8": torch.version.cuda is not None and capability >= FP8,
        "fp4": has_fp4_tensor_cores(index),
        "kernels": "Triton" if reason is None else "plain PyTorch",
        "reason": reason,
    }


def _compiler(language: str) -> str | None:
    """Return the first line that a compiler prints of its version, None without one."""
    variable, names, _ = COMPILERS[language]
    for name in filter(None, (os.environ.get(variable), *names)):
        if path := shutil.which(name):
            done = subprocess.run([path, "--version"], capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout.partition("\n")[0]
    return None
