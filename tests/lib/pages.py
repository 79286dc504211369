"""Code blocks of the documentation, and what stands for the models and texts that they name."""

from __future__ import annotations

import ast
import copy
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch

import fp4pass
from fp4pass.checkpoint import LAYOUTS
from fp4pass.core.formats import FORMATS
from fp4pass.methods import METHODS

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny_lm"
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
RECIPES = [f"docs/recipes/{path.name}" for path in sorted((ROOT / "docs/recipes").glob("*.md"))]

# ---- blocks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, with its includes."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


_INCLUDE = re.compile(r'^-+8<-+ "([^":]+)(?::(\w+))?"$', re.MULTILINE)


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order, also those that are indented in tabs and boxes."""
    found, lines = [], (ROOT / page).read_text("utf-8").splitlines()
    fences = [i for i, line in enumerate(lines) if line.strip().startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        code = dedent("\n".join(lines[start + 1 : end]))
        language = lines[start].strip().removeprefix("```")
        found.append(Block(page, start + 1, language, included(code)))
    return found


def included(code: str) -> str:
    """The text with the files, or the sections of files, that it includes."""

    def text(match: re.Match[str]) -> str:
        path, section = match.groups()
        whole = (ROOT / path).read_text("utf-8").rstrip("\n")
        if section is None:
            return re.sub(r"^ *# -+8<-+ .*\n", "", whole, flags=re.MULTILINE)
        start, end = (f"# --8<-- [{word}:{section}]\n" for word in ("start", "end"))
        assert whole.count(start) == 1, f"{path} has no section {section}"
        return dedent(whole.split(start)[1].split(end)[0].rstrip(" ")).rstrip("\n")

    return _INCLUDE.sub(text, code)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            end = words.index("&&")
            yield words[:end]
            words = words[end + 1 :]
        if words:
            yield words


def recipe_file(page: str) -> str | None:
    """The first YAML block of a page, which its commands call recipe.yaml."""
    return next((each.code for each in blocks(page) if each.language == "yaml"), None)


# ---- what cannot run --------------------------------------------------------------------------

# Parts of commands, or first lines of snippets, by why they are not run; the words are checked.
NOT_RUN = {
    "pip install": "asks a package index",
    "python3 -m venv": "makes an environment, as .ci/run does",
    ".venv/bin/python": "needs that environment; tests/test_examples.py runs the script",
    "python examples/": "runs in tests/test_recipes.py and tests/test_examples.py",
    " serve ": "serves until it is stopped, as tests/integrations do",
    "sglang.launch_server": "serves until it is stopped, and is not installed",
    "torchrun": "starts processes; tests/test_recipes.py and tests/distributed do",
    "hellaswag": "its documents come from the hub",
    "torch.distributed.init_process_group": "runs in several processes, as tests/distributed does",
    "# torchrun": "runs in several processes, as tests/distributed does",
    "import fully_shard": "runs in several processes, as tests/distributed does",
    "import lm_eval": "its documents come from the hub",
    "torch.compile(model.forward": "compiles for minutes, as tests/test_compiled_model.py does",
    "generate_batch": "takes long on a CPU; tests/integrations/test_serving.py does",
    "fp4pass.distill(": "trains for minutes; tests/lab/test_distill.py does",
    'quality="tuned"': "trains for minutes; tests/engine/test_one_call.py does",
    "fp4pass merge": "needs an adapter; tests/cli/test_cli_merge.py does",
    "fp4pass.merge(": "needs an adapter; tests/lab/test_merge.py does",
    "PackedConfig(": "needs a folder of another library; tests/integrations/test_packed_folders.py",
    'fp4pass.trace(model, {"input_ids"': "needs onnxruntime; tests/graph/test_plain.py does",
    "torch.onnx.export(": "needs onnxruntime; tests/graph/test_plain.py does",
    "onnxruntime.InferenceSession(": "needs onnxruntime; tests/graph/test_plain.py does",
    "fp4pass verify": "needs a folder; tests/doctor and tests/cli/test_cli_verify.py do",
    "--budget": "measures for minutes; tests/cli/test_cli_budget.py does",
    "Pipeline.from_pretrained(": "needs a pipeline; tests/integrations/test_diffusers.py does",
    "eval.engines.": "needs vLLM or SGLang; tests/eval/test_loading_by_engines.py does",
    "Fusion(": "is an entry of graph/inductor/fusions.py",
}


def not_run(text: str) -> str | None:
    """The entry of `NOT_RUN` for a command or a snippet."""
    return next((part for part in NOT_RUN if part in text), None)


# ---- what stands for what a user has ----------------------------------------------------------

# Words of commands, whole.
WORDS = {
    "MODEL": str(TINY),
    "MODEL2": str(TINY),
    "FILE": "calib.txt",
    "A": "DIR",
    "B": "DIR2",
    "wikitext:wikitext-2-raw-v1:train": "calib.txt",
    "wikitext:wikitext-2-raw-v1:test": "eval.txt",
}
# Names of models on the hub, in Python and in commands; a mixture is made by the test.
HUB = {
    "Qwen/Qwen3-0.6B": str(TINY),
    "meta-llama/Llama-3.1-70B": str(TINY),
    "path/or/id": str(TINY),
    "Qwen/Qwen3-30B-A3B": "mixture",
    # The repository's texts, shortened.
    "wikitext:wikitext-2-raw-v1:train": "calib.txt",
    "examples/tiny_lm/calib.txt": "calib.txt",
    "examples/tiny_lm/eval.txt": "eval.txt",
}
# Files that a user has: texts.
TEXTS = {"calib.txt": "calib.txt", "eval.txt": "eval.txt", "held-out.txt": "eval.txt"}


def local(code: str) -> str:
    """The text with models of this machine, on its CPU where it has no GPU."""
    for name, path in HUB.items():
        code = code.replace(name, path)
    return code if torch.cuda.is_available() else code.replace('"cuda"', '"cpu"')


def local_words(words: list[str]) -> list[str]:
    """The command with models and texts of this machine."""
    return [local(WORDS.get(word, word)) for word in words]


# ---- names that snippets take as given --------------------------------------------------------


@cache
def loaded() -> Any:
    """The first two layers of the repository's model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    return AutoModelForCausalLM.from_pretrained(TINY, config=config, dtype="auto").eval()


def converted() -> Any:
    return fp4pass.convert(copy.deepcopy(loaded()), "nvfp4", "sse", weight_only=True)


def calibrated(method: str, **options: Any) -> Any:
    model = fp4pass.prepare(copy.deepcopy(loaded()), method, **options)
    fp4pass.calibrate(model, batches(), progress=False)
    return model


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def words(name: str, characters: int) -> str:
    return (TINY / name).read_text("utf-8")[:characters]


@contextmanager
def registries_as_before() -> Iterator[None]:
    """Take out of the registries what is registered meanwhile."""
    registries: tuple[dict[str, Any], ...] = (FORMATS, METHODS, LAYOUTS)
    before = [dict(each) for each in registries]
    try:
        yield
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)


def batches() -> Any:
    return torch.randint(2048, (4, 64), generator=torch.Generator().manual_seed(0)).split(2)


def state_and_hessian() -> tuple[Any, Any, Any]:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    pieces = x.unflatten(1, (-1, 32))
    hessian = torch.einsum("tji,tjk->jik", pieces, pieces)
    return weight, fp4pass.quantize(weight, "nvfp4"), hessian


def random(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Pages other than programs speak of the names of the quickstart, and some of a few of their own.
# Each snippet gets them anew.
EVERYWHERE: Mapping[str, Any] = {
    "fp4pass": lambda: fp4pass,
    "torch": lambda: torch,
    "AutoModelForCausalLM": lambda: __import__("transformers").AutoModelForCausalLM,
    "token_windows": lambda: fp4pass.evaluation.token_windows,
    "model": lambda: copy.deepcopy(loaded()),
    "tokenizer": tokenizer,
    "batches": batches,
    "text": lambda: words("eval.txt", 6000),
    "calib": lambda: words("calib.txt", 6000),
    "ids": lambda: torch.arange(20).view(2, 10),
    "original": lambda: copy.deepcopy(loaded()),
    "float_model": lambda: copy.deepcopy(loaded()),
    "source": lambda: str(TINY),
    "texts": lambda: words("calib.txt", 6000).split("\n\n"),
    "data": lambda: words("calib.txt", 6000).split("\n\n"),
}
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "docs/check-a-folder.md": {"model": converted},
    "docs/checkpoints.md": {"model": converted},
    "docs/cli.md": {"model": converted},
    "docs/evaluation.md": {"model": converted},
    "docs/graphs.md": {"prompt": lambda: torch.arange(20).view(2, 10), "count": lambda: 3},
    "docs/learning.md": {"model": converted},
    "docs/quality.md": {
        "prepared": lambda: calibrated("gptq"),
        "weight": lambda: state_and_hessian()[0],
        "state": lambda: state_and_hessian()[1],
        "block_hessian": lambda: state_and_hessian()[2],
    },
    "docs/rotation.md": {"prepared": lambda: calibrated("gptq")},
    "docs/tensors.md": {
        "x": lambda: random(64, 128),
        "scheme": lambda: "nf4",
        "kind": lambda: "nf4",
        "weight": lambda: random(64, 128),
        "weights": lambda: random(64, 128).square(),
        "inputs": lambda: random(256, 128),
        "blocks": lambda: random(64, 128).unflatten(-1, (-1, 16)),
        "linear": lambda: torch.nn.Linear(128, 64),
    },
    "docs/transformers.md": {
        "model": lambda: fp4pass.convert(calibrated("hessian", kv_cache="fp8"), "nvfp4"),
        "base": converted,
    },
}
PROGRAMS = {"README.md", "docs/quickstart.md", *RECIPES}


def given(page: str, code: str) -> dict[str, Any]:
    """The names that a snippet reads before it makes them, where its page takes them as given."""
    known = {**({} if page in PROGRAMS else EVERYWHERE), **GIVEN.get(page, {})}
    read: set[str] = set()
    made: set[str] = set()
    for statement in ast.parse(code).body:
        nodes = list(ast.walk(statement))
        names = [each for each in nodes if isinstance(each, ast.Name)]
        read |= {each.id for each in names if isinstance(each.ctx, ast.Load)} - made
        made |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
        for each in nodes:
            if isinstance(each, ast.Import | ast.ImportFrom):
                made |= {(name.asname or name.name).split(".")[0] for name in each.names}
    return {name: known[name]() for name in read & known.keys()}


# ---- what is printed --------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?(?![\w])")


def differs(shown: str, printed: str, tolerance: float = 0.02) -> str | None:
    """Where a page shows another text than is printed, if it does.

    Numbers may differ by `tolerance` or by one in their last digit; `...` stands for any text.
    """
    pattern, values = "", []
    for part in re.split(rf"(\.\.\.|{_NUMBER.pattern})", shown.strip()):
        if _NUMBER.fullmatch(part):
            values.append(part)
        words = r"\s+".join(map(re.escape, re.split(r"\s+", part)))
        number = f"({_NUMBER.pattern})" if _NUMBER.fullmatch(part) else words
        pattern += r"[\s\S]*" if part == "..." else number
    match = re.fullmatch(pattern, printed.strip())
    if match is None:
        return f"expected\n{shown}\ngot\n{printed}"
    for expected, got in zip(values, match.groups(), strict=True):
        last = 1.001 * 10.0 ** -len(expected.partition(".")[2]) * ("." in got)
        a, b = float(expected), float(got)
        if "e" not in expected and abs(a - b) > max(tolerance * abs(a), last):
            return f"expected {expected}, got {got} in\n{printed}"
    return None


def shown(page: str) -> str:
    """What a page says is printed: its text blocks."""
    return "\n".join(each.code for each in blocks(page) if each.language == "text")
