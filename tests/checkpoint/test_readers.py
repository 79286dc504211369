"""What other programs make of our folders, by their own rules for names."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import CANNOT, DENSE_EXPERTS, funnel, mamba, mixtral, packed
from small_models import Packed, converted

import fp4pass
from fp4pass.checkpoint.layouts import LAYOUTS, PackedLayer, written_layouts
from fp4pass.checkpoint.readers import READERS, who_reads
from fp4pass.errors import CheckpointError
from fp4pass.record.config import LinearConfig

match_name = pytest.importorskip("compressed_tensors.utils.match").match_name


@pytest.mark.filterwarnings(f"ignore:{CANNOT}")
@pytest.mark.parametrize("make", [mamba, funnel, mixtral])
def test_what_stays_dense_is_listed_and_covers_nothing_packed(make: Any, tmp_path: Path) -> None:
    model = make()
    declared, names = packed(model, tmp_path / "q")
    ignore = declared["ignore"]
    linears = [name for name, each in model.named_modules() if type(each) is torch.nn.Linear]
    assert names and not [n for n in names if any(match_name(n, each) for each in ignore)]
    assert all(any(match_name(name, each) for each in ignore) for name in linears)


def test_a_linear_of_each_expert_is_listed_for_every_reader(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.3.down_proj"
    declared, _ = packed(mixtral(), tmp_path / "a", DENSE_EXPERTS)
    assert any(match_name(expert, each) for each in declared["ignore"])
    packed(mixtral(), tmp_path / "b", DENSE_EXPERTS, layout="modelopt")
    side = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())
    excluded = side["quantization"]["exclude_modules"]
    for name in (expert, "model.layers.0.mlp.experts", "lm_head"):
        assert any(fnmatch.fnmatchcase(name, each) for each in excluded)
    assert not any(fnmatch.fnmatchcase("model.layers.0.self_attn.q_proj", e) for e in excluded)


def test_a_packed_head_is_named_among_the_targets(tmp_path: Path) -> None:
    """Engines have a class of their own for it, which is dense unless it is named."""
    model = converted(rules=[("lm_head", {})])
    fp4pass.save(model, tmp_path / "q")
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert declared["config_groups"]["group_0"]["targets"] == ["lm_head", "Linear"]
    fp4pass.save(converted(), tmp_path / "r")
    declared = json.loads((tmp_path / "r" / "config.json").read_text())["quantization_config"]
    assert declared["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("*.v_proj", {"weight_only": True}), "v_proj nvfp4a16"),
        (("*.up_proj", None), "gate_proj nvfp4, up_proj dense"),
    ],
)
def test_layers_that_engines_fuse_have_one_scheme(
    layout: str, rule: Any, message: str, tmp_path: Path
) -> None:
    model = converted("nvfp4", False, rules=[rule])
    with pytest.raises(CheckpointError, match=message):
        fp4pass.save(model, tmp_path / "q", layout=layout)
    with pytest.raises(CheckpointError, match=message):
        model.save_pretrained(tmp_path / "q")
    assert not (tmp_path / "q").exists()
    fp4pass.save(model, tmp_path / "q", layout="fp4pass")
    ids = torch.arange(4, 28)[None]
    with torch.no_grad():
        assert torch.equal(fp4pass.load(tmp_path / "q")(ids).logits, model(ids).logits)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_layers_that_engines_fuse_are_declared_by_the_name_of_all(
    layout: str, tmp_path: Path
) -> None:
    """SGLang looks for that name where a config names layers."""
    model = converted("nvfp4", False, rules=[("*.down_proj", {"weight_only": True})])
    fp4pass.save(model, tmp_path / "q", layout=layout)
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    named = declared.get("quantized_layers")
    if named is None:
        first, second = (set(each["targets"]) for each in declared["config_groups"].values())
        assert all(each.endswith(".down_proj") for each in second)
        named = first
    for layer in range(4):
        assert f"model.layers.{layer}.self_attn.qkv_proj" in named
        assert f"model.layers.{layer}.mlp.gate_up_proj" in named
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    ids = torch.arange(4, 28)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.core
@pytest.mark.parametrize(
    ("layout", "formats", "architecture", "problem", "wanted"),
    [
        ("compressed-tensors", "nvfp4", "ACausalLM", "", "transformers, vLLM, SGLang"),
        (
            "compressed-tensors",
            "nvfp4 mxfp4",
            "ACausalLM",
            "no weight",
            "vLLM; not by transformers (no weight), SGLang (it reads no dense mxfp4)",
        ),
        ("modelopt", "nvfp4", "ACausalLM", "", "vLLM, SGLang; not by transformers (it does not"),
        (
            "compressed-tensors",
            "nvfp4",
            "A",
            "",
            "transformers; not by vLLM (it may not have A), S",
        ),
    ],
)
def test_who_reads_a_folder(
    layout: str, formats: str, architecture: str, problem: str, wanted: str
) -> None:
    architecture = architecture.replace("ACausal", "AForCausal")
    layers = {
        fmt: PackedLayer(LinearConfig(fmt, None, True), "bfloat16", False, (32, 64))
        for fmt in formats.split()
    }
    words = str(who_reads(layout, layers, architecture, problem))
    assert words.startswith(f"read by fp4pass, {wanted}")
    assert str(who_reads("fp4pass", layers, architecture)) == "read by fp4pass alone"
    assert str(who_reads(layout, layers, "")) == "read by fp4pass alone"


def test_save_logs_who_reads_the_folder(
    packed: Packed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fp4pass")
    fp4pass.save(packed("mxfp4"), tmp_path / "q")
    line, command = caplog.messages[-2:]
    assert line.startswith(f"{tmp_path / 'q'}: read by fp4pass, transformers, vLLM; not by SGLang")
    assert command == f"Serve it: vllm serve {tmp_path / 'q'}"
    fp4pass.save(packed("mxfp4"), tmp_path / "a folder", layout="fp4pass")
    assert caplog.messages[-1] == f"Serve it: fp4pass serve '{tmp_path / 'a folder'}'"


@pytest.mark.core
def test_only_programs_that_read_a_folder_serve_it() -> None:
    layers = {"a": PackedLayer(LinearConfig("nvfp4", None, True), "bfloat16", False, (32, 64))}

    def commands(layout: str, architecture: str) -> list[str]:
        return who_reads(layout, layers, architecture).commands("out")

    engines = ["vllm serve out", "python -m sglang.launch_server --model-path out"]
    assert commands("compressed-tensors", "AForCausalLM") == engines
    assert commands("compressed-tensors-hadamard", "AForCausalLM") == engines[:1]
    assert commands("fp4pass", "AForCausalLM") == ["fp4pass serve out"]
    assert commands("fp4pass", "AForMaskedLM") == commands("compressed-tensors", "") == []


PAGE = Path(__file__).parents[2] / "docs" / "readers.md"
BEGIN = "<!-- Written by tests/checkpoint/test_readers.py; do not edit by hand. -->\n"
REFUSALS = Path(__file__).parents[2] / "eval" / "results" / "vllm-loading.json"
BEGIN_REFUSALS = (
    "<!-- Written by tests/checkpoint/test_readers.py from eval/results/vllm-loading.json; "
    "do not edit by hand. -->\n"
)
END = "<!-- End of what tests/checkpoint/test_readers.py wrote. -->\n"


def table_of_readers() -> str:
    layouts = [name for name in written_layouts() if LAYOUTS[name].engines]
    rows = [["layout", *READERS], ["---"] * (1 + len(READERS))]
    for layout in layouts:
        cells = []
        for each in READERS.values():
            reads = each[layout]
            held = {*LAYOUTS[layout].formats}
            for fmt, inputs in LAYOUTS[layout].inputs.items():
                held |= {LinearConfig(fmt, inputs=each).scheme for each in inputs}  # type: ignore[arg-type]
            whole = set(reads.formats) == held
            no = "" if reads.remark == "not tested" else "no"
            words = "yes" if whole else ", ".join(reads.formats) or no
            cells.append("; ".join(filter(None, (words, reads.remark))))
        rows.append([f"`{layout}`", *cells])
    lines = ("|".join(("", *row, "")) if "---" in row else f"| {' | '.join(row)} |" for row in rows)
    return "".join(f"{line}\n" for line in lines)


def table_of_refusals() -> str:
    """The folders that vLLM does not load, those with one error in one row."""
    found = json.loads(REFUSALS.read_text("utf-8"))
    rows: dict[tuple[str, str], list[str]] = {}
    for row in found["rows"]:
        if row["outcome"] != "equal":
            error = (
                f"`{row['error']}`" if "error" in row else f"none: `{'`, `'.join(row['wrong'])}`"
            )
            case = f"{row['case']} ({row['model']})"
            rows.setdefault((row["layout"], error), []).append(case)
    count = sum(row["outcome"] == "equal" for row in found["rows"])
    lines = [
        f"vLLM {found['versions']['vllm']} holds the tensors of {count} of {len(found['rows'])} "
        "folders, bit for bit. The others, by the small model that was saved:",
        "",
        "| layout | scheme (model) | error of vLLM |",
        "|---|---|---|",
        *(
            f"| `{layout}` | {'; '.join(cases)} | {error} |"
            for (layout, error), cases in rows.items()
        ),
    ]
    return "".join(f"{line}\n" for line in lines)


def written(page: str) -> str:
    for begin, make in ((BEGIN, table_of_readers), (BEGIN_REFUSALS, table_of_refusals)):
        before, _, rest = page.partition(begin)
        page = before + begin + make() + END + rest.partition(END)[2]
    return page


@pytest.mark.core
def test_the_page_has_the_table_of_readers() -> None:
    """`python tests/checkpoint/test_readers.py` writes it."""
    page = PAGE.read_text("utf-8")
    assert BEGIN in page and BEGIN_REFUSALS in page and page == written(page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
