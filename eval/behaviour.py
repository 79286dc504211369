"""What must not change when the package is restructured: bytes, logits, numbers and exit codes.

    python eval/behaviour.py --save FILE
    python eval/behaviour.py --compare FILE [--only PART ...]

Parts: `models`, files of converted models by tensor, their logits and reports; `tensors`, of
fp4pass.quantize; `compiled`, KL of compiled models; `commands`, what the command line returns and
writes; and, only where named, `tables`, rows of eval/results that a CPU makes from what the
repository holds. --compare prints every difference, and exits with 1 if there is one. All runs on
one thread of the CPU, where bits are the same twice; another CPU may sum in another order, and is
named. `fp4pass.json` and versions are left out. Only names that users see are used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
import transformers
from torch import Tensor, nn

import fp4pass
import fp4pass.integrations.transformers
import fp4pass.parity

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny_lm"
FORMATS = """nvfp4 mxfp4 nvfp4_ue4m4 nvfp4_ue5m3 nvint4 int8 mxfp6_e2m3 mxfp6_e3m2 mxfp8_e4m3
    mxfp8_e5m2""".split()
CODEBOOKS = "nf4 fp4 nf8 fp8 int8_linear int4_linear".split()
OWN = "compressed-tensors"
BOTH = (OWN, "modelopt")

# What many entries have in common, written once: values by their hashes.
KEPT: dict[str, Any] = {}

Found = Iterator[tuple[str, Any]]
note = partial(print, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", type=Path, metavar="FILE", help="write what is found")
    what.add_argument("--compare", type=Path, metavar="FILE", help="with what --save wrote")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)[:-1])
    parser.add_argument("--tables", nargs="*", choices=TABLES, help="run these too, or all")
    parser.add_argument("--formats", metavar="A,B", help="of the table tiny-lm, to save time")
    args = parser.parse_args()
    if not Path(fp4pass.__file__).is_relative_to(ROOT):
        raise SystemExit(f"fp4pass is that of {fp4pass.__file__}. Set PYTHONPATH to {ROOT}.")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    found: dict[str, Any] = {}
    for part in [*args.only, *(["tables"] if args.tables is not None else [])]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[part] = dict(PARTS[part](Path(folder), args))
        note(f"{part}: {len(found[part])} entries in {time.perf_counter() - began:.0f} s")
    if args.save:
        text = json.dumps({"machine": machine(), **found, "kept": KEPT}, indent=0)
        args.save.write_text(text + "\n", encoding="utf-8")
    else:
        raise SystemExit(compare(json.loads(args.compare.read_text(encoding="utf-8")), found))


def models(folder: Path, args: argparse.Namespace) -> Found:
    """Converted models: what is saved, what they answer, and what a loaded one answers."""
    ids = tokens("eval.txt", 2 * 96).view(2, 96)
    for name, make, layouts in cases():
        try:
            yield name, saved(folder / name, make(), ids, layouts)
        except Exception as error:
            # The rest is looked at as well.
            note(f"  {name}: {error}")
            yield name, f"{type(error).__name__}: {error}"


def cases() -> Iterator[tuple[str, Callable[[], Any], tuple[str, ...]]]:
    """The name of each, how it is made, and the layouts that it is saved in."""

    def case(name: str, *layouts: str, **options: Any) -> Any:
        return name, partial(converted, **options), layouts or (OWN,)

    for fmt, layouts in (("nvfp4", BOTH), ("mxfp4", (OWN,))):
        for method in ("naive", "sse", "hessian", "gptq"):
            for alone in (True, False):
                name = f"{fmt} {method} {'float' if alone else 'quantized'} inputs"
                options: dict[str, Any] = {"fmt": fmt, "method": method, "weight_only": alone}
                yield case(name, *layouts, **options)
                if fmt == "nvfp4" and method in ("sse", "hessian"):
                    yield case(f"{name}, bfloat16", *layouts, dtype=torch.bfloat16, **options)
    for fmt in FORMATS[2:]:
        yield case(fmt, fmt=fmt, method="sse")
    yield case("block 32", fmt="nvfp4", block=32)
    yield case("block 128", fmt="int8", method="gptq", block=128)
    yield case("rotation", fmt="mxfp4", rotation=64)
    yield case("rotation, gptq", fmt="mxfp4", method="gptq", rotation=32, weight_only=True)
    yield case("scales of inputs", *BOTH, fmt="nvfp4", method="sse", activation_scales="sse")
    cross = fp4pass.Gptq(target="cross", damping=0.5)
    yield case("sequential", fmt="nvfp4", method=cross, sequential=True)
    mixed = [("*.down_proj", {"fmt": "mxfp4"}), ("model.layers.0.*", None)]
    yield case("rules", OWN, "shards", fmt="nvfp4", rules=mixed)
    yield case("head", fmt="nvfp4", method="sse", rules=[("lm_head", {"weight_only": True})])
    yield case("smooth", fmt="nvfp4", smooth=True)
    yield case("uncalibrated", fmt="mxfp4", method="sse", calibrate=False)
    config = fp4pass.integrations.transformers.Fp4PassConfig(
        fmt="nvfp4", method="sse", weight_only=True
    )
    yield "while loading", partial(original, quantization_config=config), (OWN,)
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    # Transposed weights, and stacked experts.
    yield "gpt2", partial(other, "gpt2", **small), (OWN,)
    yield "mixtral", partial(other, "mixtral", **small, **experts), (OWN,)


def original(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(TINY, dtype=dtype, **options).eval()


def converted(
    dtype: torch.dtype = torch.float32,
    method: Any = "hessian",
    calibrate: bool = True,
    sequential: bool = False,
    smooth: bool = False,
    **options: Any,
) -> nn.Module:
    """tiny_lm, calibrated on little text and converted."""
    model = original(dtype)
    if calibrate:
        name = method if isinstance(method, str) else "gptq"
        rotation = options.get("rotation", 0)
        fp4pass.prepare(model, name, rotation=rotation, sequential=sequential)
        batches = list(tokens("calib.txt", 8 * 128).view(4, 2, 128))
        fp4pass.calibrate(model, batches, progress=False)
        if smooth:
            fp4pass.smooth(model)
    return fp4pass.convert(model, method=method, **options)


def other(kind: str, **config: Any) -> nn.Module:
    """A small random model of another architecture."""
    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    made = transformers.AutoConfig.for_model(kind, vocab_size=2048, **ids, **config)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    return fp4pass.convert(model, fmt="mxfp4", method="sse")


@torch.no_grad()
def saved(folder: Path, model: Any, ids: Tensor, layouts: Any) -> dict[str, Any]:
    """Logits, the report and files of a model, and the logits of what is loaded from them."""
    found: dict[str, Any] = {"logits": digest(model(ids, use_cache=False).logits)}
    rows = fp4pass.report(model).rows
    found["left alone"] = {row.name: row.skip_reason for row in rows if row.skip_reason}
    for name in ("bits", "weight_error", "output_error"):
        found[name] = sum(getattr(row, name) or 0.0 for row in rows)
    for name in layouts:
        layout, size = (OWN, "3MB") if name == "shards" else (name, "5GB")
        fp4pass.save(model, folder / name, layout=layout, max_shard_size=size)
        found[name] = files(folder / name)
        loaded = fp4pass.load(folder / name).eval()
        found[f"{name}, logits"] = digest(loaded(ids, use_cache=False).logits)
        shutil.rmtree(folder / name)
    return found


def files(folder: Path) -> dict[str, Any]:
    """Every file of a checkpoint: of JSON what it says, of safetensors each tensor."""
    found: dict[str, Any] = {}
    for path in sorted(set(folder.iterdir()) - {folder / "fp4pass.json"}):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            about, hashes = header.pop("__metadata__", None), []
            for name in sorted(header):
                dtype, shape, span = (header[name][k] for k in ("dtype", "shape", "data_offsets"))
                raw = data[start + span[0] : start + span[1]]
                hashes.append(short(f"{dtype} {shape} ".encode() + raw))
            names = keep(sorted(header))
            found[path.name] = {"metadata": about, "names": names, "hashes": " ".join(hashes)}
        elif path.suffix == ".json" and len(data) < 100_000:
            said = without(json.loads(data), lambda key, value: key.endswith("version"))
            found[path.name] = {key: keep(value) for key, value in said.items()}
        else:
            found[path.name] = short(data)
    return found


def state_scales(state: Any) -> tuple[Tensor, float]:
    """Block scales and global scale of a tensor, 1 for codebooks, whose scales are `absmax`."""
    return (state.absmax, 1.0) if hasattr(state, "absmax") else (state.scale, state.global_scale)


def tensors(folder: Path, args: argparse.Namespace) -> Found:
    """One tensor in every format and codebook: codes, scales and what they stand for."""
    x = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-3, 2, 24)[:, None]
    for scheme in (*FORMATS, "nvfp4:32", "mxfp4:16", "int8:256", *CODEBOOKS):
        for method in ("naive", "sse"):
            for name, tensor in (("float32", x), ("odd bfloat16", x[:, :333].bfloat16())):
                state = fp4pass.quantize(tensor, scheme, method=method)
                scale, factor = state_scales(state)
                parts = (state.qdata, scale, fp4pass.dequantize(state))
                found = " ".join([*map(digest, parts), str(factor)])
                yield f"{scheme} {method} {name}", found


def compiled(folder: Path, args: argparse.Namespace) -> Found:
    """KL of compiled models to the float one: a number, for Inductor may round otherwise."""
    ids = tokens("eval.txt", 4 * 128).view(4, 128)
    for fmt, alone in (("nvfp4", True), ("nvfp4", False), ("mxfp4", False)):
        torch.compiler.reset()
        model = converted(fmt=fmt, method="sse", weight_only=alone)
        both = (original(), model, torch.compile(model, fullgraph=True))
        with torch.no_grad():
            p, *others = (m(ids, use_cache=False).logits.double().log_softmax(-1) for m in both)
        kl = [(p.exp() * (p - q)).sum(-1).mean().item() for q in others]
        yield f"{fmt} {'float' if alone else 'quantized'} inputs", kl


SMALL = "--samples 4 --seq-len 64"
PLAIN = "--scheme nvfp4a16 --method sse"
COMMANDS = f"""
quantize TINY -o W/mixed {PLAIN} --rules W/rules.yaml
quantize TINY -o W/inputs --calib CALIB {SMALL} --json
quantize TINY -o W/mixed {PLAIN}
quantize TINY -o W/q {PLAIN} --scheme nvfp5
quantize TINY -o W/q
quantize W/none -o W/q {PLAIN}
quantize TINY
quantize TINY -o W/q --calib W/none.txt
quantize TINY -o W/q {PLAIN} --export modelopt --scheme mxfp4a16
verify W/mixed --ref TINY
verify W/damaged --ref TINY
verify W/none --ref TINY
verify TINY --ref TINY
convert W/inputs -o W/modelopt --to modelopt
convert W/inputs -o W/bf16 --to bf16
convert W/mixed -o W/q --to modelopt
convert W/inputs -o W/modelopt --to bf16
inspect W/inputs
inspect W/damaged --json
inspect TINY
inspect W/inputs W/bf16 --fail-above 0
inspect TINY W/mixed --fail-above 0.1 --json
eval W/inputs --text EVAL --windows 2 --length 64 --reference TINY --json
eval W/inputs
report W/mixed -o W/report.html --no-png --reference TINY
report W/none -o W/r.html
inspect W/mixed --jsn
quantise TINY

--help
quantize --help
--version
"""


def commands(folder: Path, args: argparse.Namespace) -> Found:
    """Exit codes, the number of lines that say what is wrong, numbers and folders."""
    (folder / "rules.yaml").write_text('- "*.down_proj": {fmt: mxfp4}\n- "*.layers.0.*": null\n')
    places = {"TINY": TINY, "CALIB": TINY / "calib.txt", "EVAL": TINY / "eval.txt"}
    for line in COMMANDS[1:-1].split("\n"):
        words = [str(places.get(word, word)).replace("W/", f"{folder}/") for word in line.split()]
        done = run("-m", "fp4pass", *words)
        found: dict[str, Any] = {"code": done.returncode}
        if done.returncode == 2:
            found["lines"] = done.stderr.count("\n")
        if line.startswith(("eval", "inspect TINY")) and "--json" in words:
            # Texts may name folders.
            said = json.loads(done.stdout)
            found["numbers"] = without(said, lambda key, value: isinstance(value, str))
        if line.startswith(("quantize TINY -o", "convert")) and not done.returncode:
            found["files"] = files(Path(words[words.index("-o") + 1]))
        if not (folder / "damaged").exists():
            # A copy of the first folder with one bit of its weights flipped.
            shutil.copytree(folder / "mixed", folder / "damaged")
            path = folder / "damaged" / "model.safetensors"
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        yield line or "(nothing)", found
    yield "what lies there", sorted(path.name for path in folder.iterdir())


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)


_LAYERS = "eval/layer_error.py examples/tiny_lm --tokens 16384 --dtype float32"
# The commands in the files themselves, without the text and the pictures that are not here.
TABLES = {
    "tiny-lm": "eval/quality.py --text examples/tiny_lm/eval.txt --windows 32 --error-windows 16 "
    "--dtype float32 --remember",
    "layers-tiny-lm": f"{_LAYERS} --formats nvfp4 nvfp4:32 mxfp4 mxfp4:16 --sensitivity",
    "layers-tiny-lm-formats": f"{_LAYERS} --layers '*.down_proj'",
}


def tables(folder: Path, args: argparse.Namespace) -> Found:
    """Hashes of rows as they come out here, and on stderr how far the committed ones are, which are
    of another CPU: KL within 0.02 % with float inputs, 1 % with quantized ones, at first.
    """
    done = run("eval/results_page.py", "--docs", str(folder))
    page = (folder / "results.md").read_bytes() == (ROOT / "docs/results.md").read_bytes()
    yield "docs/results.md", {"code": done.returncode, "as committed": page}
    for name in args.tables or TABLES:
        few = ["--formats", args.formats] if name == "tiny-lm" and args.formats else []
        done = run(*shlex.split(TABLES[name]), *few, "--json", str(folder / f"{name}.json"))
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        here, there = (rows_of(f / f"{name}.json") for f in (folder, ROOT / "eval" / "results"))
        old = flat({key: there[key] for key in here})
        far = sorted((distance(v, old.get(path)), path) for path, v in flat(here).items())
        for share in (0.5, 0.9, 0.99, 1.0):
            relative, path = far[int(share * (len(far) - 1))]
            note(f"  {name}: {share:.0%} of {len(far)} values within {relative:.2g},{path}")
        yield name, {key: short(json.dumps(row).encode()) for key, row in here.items()}


def rows_of(path: Path) -> dict[str, Any]:
    """The rows of a file by what they are about, without times and texts that are not here."""
    data, found = json.loads(path.read_text()), {}
    for row in [*data["rows"], *data.get("sensitivity", [])]:
        row = {key: value for key, value in row.items() if "seconds" not in key}
        if "texts" in row:
            # Small differences of large numbers are another CPU's own.
            text = row["texts"]["eval"]
            row["texts"] = without(text, lambda key, value: key in ("change", "against"))
        keys = ("layer", "format", "block", "method", "weight_only")
        found[" ".join(str(row[key]) for key in keys if key in row)] = row
    return found


def tokens(name: str, count: int) -> Tensor:
    """The first tokens of a text of tiny_lm."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    text = (TINY / name).read_text(encoding="utf-8")[: 20 * count]
    return torch.tensor(tokenizer(text)["input_ids"][:count])


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def digest(x: Tensor) -> str:
    data = x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return short(f"{x.dtype} {tuple(x.shape)} ".encode() + data)


def keep(value: Any) -> Any:
    """The name of a long value in KEPT."""
    text = json.dumps(value)
    if len(text) < 60:
        return value
    key = f"@{short(text.encode())}"
    KEPT[key] = value
    return key


def without(value: Any, unwanted: Callable[[str, Any], bool]) -> Any:
    """A value of JSON without some of what is in it."""
    if isinstance(value, dict):
        return {k: without(v, unwanted) for k, v in value.items() if not unwanted(k, v)}
    if isinstance(value, list):
        return [without(v, unwanted) for v in value if not unwanted("", v)]
    return value


def machine() -> dict[str, str]:
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"cpu": cpu[1] if cpu else platform.machine(), **versions}


def compare(before: dict[str, Any], now: dict[str, Any]) -> int:
    """Print what differs in the parts, and rows of tables, that both have; 1 if anything does."""
    if before["machine"] != machine():
        note(f"another machine, bits may differ: {before['machine']} before, {machine()} now")
    KEPT.update(before["kept"])
    parts = [part for part in now if part in before]
    old, new = (flat({part: each[part] for part in parts}) for each in (before, now))
    tables = {path for path in {*old} ^ {*new} if path.startswith(" / tables")}
    count = 0
    for path in [path for path in {**old, **new} if path not in tables]:
        a, b = old.get(path, "nothing"), new.get(path, "nothing")
        if distance(a, b) > (0.02 if path.startswith(" / compiled") else 1e-9):
            count += 1
            print(f"{path.removeprefix(' / ')}: {a} before, {b} now")
    print(f"{count} of {len({**old, **new})} values differ")
    return int(count > 0)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every value by its path."""
    if isinstance(value, str):
        value = KEPT.get(value, value)
    if isinstance(value, dict) and "hashes" in value:
        names = KEPT.get(str(value["names"]), value["names"])
        tensors = zip(names, value["hashes"].split(), strict=True)
        value = {"metadata": value["metadata"], **dict(tensors)}
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {k: v for key, item in value.items() for k, v in flat(item, f"{path} / {key}").items()}


def distance(a: Any, b: Any) -> float:
    """How far apart two numbers are, by the larger one; infinite for other things."""
    plain = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    if a == b or not plain:
        return 0.0 if a == b else float("inf")
    return abs(a - b) / max(abs(a), abs(b))


PARTS = {part.__name__: part for part in (models, tensors, compiled, commands, tables)}

if __name__ == "__main__":
    main()
