"""fp4pass doctor: the kernels that run on this machine, the fallbacks, and their reasons."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from .._compat import LIBRARIES, all_parts, is_newer, is_older
from .._version import __version__
from ..core.formats import FORMATS, NVFP4
from ..core.machine import has_fp4_tensor_cores
from ..kernels.cpu.library import load, serves
from ..ops.registration import OPERATORS, unserved
from . import screen

# Compute capability from which GPUs have tensor cores for it.
FP8 = (8, 9)

# The variable that names a compiler, its usual programs, and its uses.
COMPILERS = {
    "C++": ("CXX", ("g++", "clang++"), "products and torch.compile on the CPU"),
    "C": ("CC", ("gcc", "clang"), "the launchers of Triton's kernels"),
}


def doctor(as_json: screen.Json = False) -> None:
    """Show what runs packed weights on this machine, and why some formats run slower code.

    Compiles the C++ kernels of the CPU, if no earlier process did.
    """
    _, reason = load()
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    found: dict[str, Any] = {
        "versions": {
            "fp4pass": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in LIBRARIES},
        },
        "tested": {name: [each.oldest, each.newest] for name, each in LIBRARIES.items()},
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "compilers": {name: _compiler(*where[:2]) for name, where in COMPILERS.items()},
        "cpu": {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "kernels": "C++" if reason is None else "plain PyTorch",
            "reason": reason,
        },
        "gpus": gpus,
        "formats": {name: _served(name, reason is None, bool(gpus)) for name in FORMATS},
    }
    off = [str(part) for part in all_parts() if not part.works()]
    found["falls_back"] = [*_fallbacks(found), *off]
    found["problems"] = [line for line in (_static_library(),) if line]
    if as_json:
        screen.print_json(found)
        return
    versions = found["versions"]
    print(f"fp4pass {versions.pop('fp4pass')}, Python {versions.pop('python')}")
    for name, version in versions.items():
        tested = LIBRARIES[name]
        remark = ""
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
    threads = "1 thread" if cpu["threads"] == 1 else f"{cpu['threads']} threads"
    print(f"CPU: {cpu['kernels']} ({cpu['instructions']}, {threads})")
    for gpu in gpus:
        print(
            f"GPU: {gpu['name']}, {gpu['memory_gb']:.0f} GB, {gpu['capability']}: {gpu['kernels']}"
        )
        cores = ", ".join(f"{name} {'yes' if gpu[name] else 'no'}" for name in ("fp8", "fp4"))
        print(f"  tensor cores for {cores}")
    if not gpus:
        print("GPU: none")
    print("Falls back:" if found["falls_back"] else "Nothing falls back.")
    for line in found["falls_back"]:
        print(f"  {line}")
    for line in found["problems"]:
        print(f"Problem: {line}")


def _fallbacks(found: dict[str, Any]) -> list[str]:
    """Return a line for everything that slower code does, with its reason."""
    lines = []
    cpu, gpus = found["cpu"], found["gpus"]
    if cpu["reason"]:
        lines.append(f"Products on the CPU run in plain PyTorch: {cpu['reason']}")
    for gpu in gpus:
        if gpu["reason"]:
            lines.append(f"{gpu['name']} runs plain PyTorch: {gpu['reason']}.")
        if not gpu["fp8"]:
            lines.append(
                f'{gpu["name"]} has no FP8 tensor cores: computing in "fp8" is an error there.'
            )
    formats = found["formats"]
    plain = [name for name in formats if not serves(torch.float32, FORMATS[name])]
    plain = [name for name in plain if formats[name]["gpu"] != "Triton"]
    if plain:
        lines.append(f"{', '.join(plain)} run in plain PyTorch: no kernel supports them.")
    return lines


PLAIN = "plain PyTorch"


def _served(name: str, compiled: bool, has_gpu: bool) -> dict[str, str | None]:
    """Return what multiplies the packed weights of a format, on the CPU and on the first GPU."""
    fmt = FORMATS[name]
    on_cpu = compiled and serves(torch.float32, fmt)
    by_gpu = None
    if has_gpu:
        device = torch.device("cuda", 0)
        kernel = OPERATORS["linear"].triton
        by_gpu = PLAIN if kernel is None or unserved(device, fmt, kernel) else "Triton"
    return {"cpu": "C++" if on_cpu else PLAIN, "gpu": by_gpu}


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = torch.cuda.get_device_capability(index)
    reason = unserved(torch.device("cuda", index), NVFP4)
    nvidia = torch.version.cuda is not None
    return {
        "name": torch.cuda.get_device_name(index),
        "memory_gb": properties.total_memory / 1e9,
        "capability": f"compute capability {capability[0]}.{capability[1]}",
        "fp8": nvidia and capability >= FP8,
        "fp4": has_fp4_tensor_cores(index),
        "kernels": "Triton" if reason is None else PLAIN,
        "reason": reason,
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler(variable: str, names: tuple[str, ...]) -> str | None:
    """Return the first line that a compiler says of its version, None if there is none."""
    done = _ask(variable, names, "--version")
    return None if done is None else done.partition("\n")[0]


def _static_library() -> str | None:
    """Return a line where the C++ compiler copies its C++ library into what it links."""
    with tempfile.TemporaryDirectory() as folder:
        source, linked = Path(folder, "locale.cpp"), Path(folder, "locale.so")
        source.write_text("#include <locale>\nstd::locale here() { return std::locale(); }\n")
        options = ("-shared", "-fPIC", str(source), "-o", str(linked))
        if _ask(*COMPILERS["C++"][:2], *options) is None:
            return None
        needed = linked.read_bytes()
    # Of GNU and of LLVM, by the name under which a shared library needs it.
    if b"libstdc++.so" in needed or b"libc++" in needed:
        return None
    return (
        "the C++ compiler links its C++ library statically, so torch._inductor.aoti_load_package "
        "fails or crashes on what it builds. Set CXX to the system's compiler (CXX=/usr/bin/g++)."
    )


def _ask(variable: str, names: tuple[str, ...], *options: str) -> str | None:
    """Return what a compiler prints with some options, None if there is none that can."""
    for name in filter(None, (os.environ.get(variable), *names)):
        if path := shutil.which(name):
            done = subprocess.run([path, *options], capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout
    return None
