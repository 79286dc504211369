"""docs/extending.md is true: each of its blocks, as it stands there, adds what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = {
    section.split("\n", 1)[0]: re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    for section in PAGE.split("\n## ")[1:]
}

# Each runs behind the block of its section, in a process of its own.
START = """
import sys, tempfile, torch, fp4pass
from torch import nn
folder = tempfile.mkdtemp()
torch.manual_seed(0)
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).eval()
x = torch.randn(40, 64)
"""
USES = {
    "A format": """
    from fp4pass.core.formats import get_format
    converted = fp4pass.convert(model(), "nv_e1m2", "sse", weight_only=True)
    step = converted[0].weight_scale.float() / converted[0].weight_global_scale
    ratios = converted[0].weight.reshape(48, 4, 16) / step.unsqueeze(2)
    assert {abs(round(value, 4)) for value in ratios.flatten().tolist()} <= set(E1M2.magnitudes)
    error = (converted[0].weight - model()[0].weight).square().sum()
    assert error < 0.02 * model()[0].weight.square().sum()
    fp4pass.save(converted, folder)
    assert torch.equal(fp4pass.load(folder, model=model())(x), converted(x))
    """,
    "A method": """
    found = {}
    for name in ("sse", "diagonal"):
        prepared = fp4pass.calibrate(fp4pass.prepare(model(), name), [x * x], progress=False)
        found[name] = fp4pass.convert(prepared, method=name, weight_only=True)
    rows = fp4pass.report(found["diagonal"]).rows
    assert [row.config.method_name for row in rows] == ["diagonal"] * 2
    gram = (x * x).T @ (x * x)
    def loss(name, metric):
        error = found[name][0].weight - model()[0].weight
        return float(((error @ metric) * error).sum())
    assert loss("diagonal", gram.diag().diag()) < loss("sse", gram.diag().diag())
    assert fp4pass.LinearConfig.from_dict({"method": {"name": "diagonal"}}).method == Diagonal()
    """,
    "A layout": """
    import safetensors.torch
    for fmt, bits in (("nvfp4", ["codes", "divisor", "scales"]), ("mxfp4", ["codes", "scales"])):
        converted = fp4pass.convert(model(), fmt, "sse", weight_only=True)
        fp4pass.save(converted, folder, layout="plain", overwrite=True)
        stored = safetensors.torch.load_file(f"{folder}/model.safetensors")
        assert sorted(name[2:] for name in stored if name[0] == "0") == ["bias", *bits]
        assert torch.equal(fp4pass.load(folder, model=model())(x), converted(x))
    """,
    "An option": """
    import json
    from torch.nn import functional as F
    from fp4pass.cli.app import parser
    options = {"fmt": "mxfp4:16", "method": "sse"}
    plain, clipped = fp4pass.convert(model(), **options), {**options, "clip": 0.5}
    recipe = fp4pass.Recipe(fp4pass.LinearConfig(**clipped))
    converted = fp4pass.convert(fp4pass.prepare(model(), **clipped))
    for each in (
        converted,
        fp4pass.convert(model(), **options, rules=[("*", {"clip": 0.5})]),
        fp4pass.convert(model(), **recipe.arguments()),
        torch.compile(converted, fullgraph=True, backend="aot_eager"),
    ):
        expected = plain[2](plain[1](plain[0](x.clamp(-0.5, 0.5))).clamp(-0.5, 0.5))
        torch.testing.assert_close(each(x), expected)
    assert [row.config.clip for row in fp4pass.report(converted).rows] == [0.5, 0.5]
    fp4pass.save(converted, folder)
    assert '"clip": 0.5' in open(f"{folder}/fp4pass.json").read()
    assert torch.equal(fp4pass.load(folder, model=model())(x), converted(x))
    from fp4pass.integrations import Fp4PassConfig
    assert Fp4PassConfig(clip=0.5).to_dict()["clip"] == 0.5
    shown = " ".join(parser("quantize").format_help().split())
    assert "--clip" in shown and "Largest magnitude of inputs" in shown
    """,
}


# Sections that take seconds each; the others add to as many registries.
LONG = ("An option", "A format", "A method")


@pytest.mark.parametrize(
    "section", [pytest.param(s, marks=pytest.mark.slow if s in LONG else ()) for s in USES]
)
def test_the_page_adds_it(section: str, tmp_path: Path) -> None:
    (block,) = BLOCKS[section]
    root = ROOT
    if section == "An option":
        root = tmp_path
        shutil.copytree(ROOT / "fp4pass", root / "fp4pass")
        for change in block.split("--- ")[1:]:
            name, *lines = change.splitlines()
            context = "\n".join(line[1:] for line in lines if line[0] == " ")
            text = (root / name).read_text(encoding="utf-8")
            assert text.count(context) == 1
            changed = "\n".join(line[1:] for line in lines)
            (root / name).write_text(text.replace(context, changed), encoding="utf-8")
        block = ""
    use = "\n".join(line.removeprefix("    ") for line in USES[section].splitlines())
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", block + START + use],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
