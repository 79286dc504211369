"""What each layout holds, declares and calls its tensors; and a new layout in a few lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import foreign
import pytest
import torch
from safetensors.torch import load_file
from small_models import Packed, Saved, assert_same_bits, bits, converted, linears, logits

import fp4pass
from fp4pass import LinearConfig
from fp4pass.checkpoint import LAYOUTS, Layout, PackedLayer, Scheme, register_layout, transcode
from fp4pass.checkpoint.layouts import (
    Piece,
    expected_shapes,
    join_layers,
    layout_of,
    read_layers,
    split_layer,
    written_layouts,
)
from fp4pass.core.packing import unpack_codes
from fp4pass.errors import CheckpointError
from fp4pass.nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")


@pytest.mark.parametrize("weight_only", [True, False])
def test_the_modelopt_layout_tensor_by_tensor(
    saved: Saved, packed: Packed, weight_only: bool
) -> None:
    model, folder = packed("nvfp4", weight_only), saved("nvfp4", weight_only, "modelopt")
    stored = load_file(folder / "model.safetensors")
    seen = set()
    for name, linear in linears(model).items():
        parts = {part: stored[f"{name}.{part}"] for part in ("weight", "weight_scale")}
        second = stored[f"{name}.weight_scale_2"]
        rows, columns = linear.out_features, linear.in_features
        assert parts["weight"].dtype == torch.uint8
        assert parts["weight"].shape == (rows, columns // 2)
        assert parts["weight_scale"].dtype == torch.float8_e4m3fn
        assert parts["weight_scale"].shape == (rows, columns // 16)
        assert second.dtype == torch.float32 and second.shape == () and 0 < second < 1
        # What ModelOpt dequantizes: code * (weight_scale * weight_scale_2).
        step = (parts["weight_scale"].float() * second).repeat_interleave(16, 1)
        grid = torch.tensor(foreign.GRID + [-value for value in foreign.GRID])
        values = grid[unpack_codes(parts["weight"]).int()]
        assert torch.equal((values * step).bfloat16(), linear.weight)
        seen |= {f"{name}.{part}" for part in (*parts, "weight_scale_2")}
        if not weight_only:
            scale = stored[f"{name}.input_scale"]
            assert scale.shape == () and torch.equal(1 / scale, linear.input_global_scale[0])
            seen.add(f"{name}.input_scale")
    assert not any(t.dtype == torch.uint8 for n, t in stored.items() if n not in seen)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    facts = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    algorithm = "W4A16_NVFP4" if weight_only else "NVFP4"
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == algorithm
    assert facts["quant_algo"] == algorithm and facts["kv_cache_quant_algo"] is None
    assert config["ignore"] == facts["exclude_modules"] == ["lm_head"]
    assert facts["group_size"] == 16
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["weights"]["group_size"] == 16
    assert ("input_activations" in group) is not weight_only
    loaded = fp4pass.load(folder)
    assert_same_bits(model, loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_mixed_rules_have_a_place(tmp_path: Path) -> None:
    rules = [("*.down_proj", {"fmt": "mxfp4"}), ("*.o_proj", None)]
    model = converted(rules=rules)
    fp4pass.save(model, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    assert {m.config.format.key for m in linears(loaded).values()} == {"nvfp4", "mxfp4"}
    with pytest.raises(CheckpointError, match=r"down_proj: modelopt has no place for mxfp4"):
        transcode(tmp_path / "q", tmp_path / "m", "modelopt")
    with pytest.raises(CheckpointError, match="down_proj"):
        fp4pass.save(model, tmp_path / "m", layout="modelopt")
    assert not (tmp_path / "m").exists()


def test_modelopt_names_the_layers_of_two_algorithms(tmp_path: Path) -> None:
    rules = [("*.down_proj", {"weight_only": True})]
    model = converted(weight_only=False, rules=rules)
    fp4pass.save(model, tmp_path / "m", layout="modelopt")
    facts = json.loads((tmp_path / "m" / "hf_quant_config.json").read_text())["quantization"]
    assert facts["quant_algo"] == "MIXED_PRECISION"
    algorithms = {n: each["quant_algo"] for n, each in facts["quantized_layers"].items()}
    fused = {n for n in algorithms if n.endswith((".qkv_proj", ".gate_up_proj"))}
    assert set(algorithms) - fused == set(linears(model)) and len(fused) == 8
    assert algorithms["model.layers.0.mlp.down_proj"] == "W4A16_NVFP4"
    assert algorithms["model.layers.0.mlp.up_proj"] == "NVFP4"
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert sorted(name for names in targets for name in names) == sorted(linears(model))
    (tmp_path / "m" / "fp4pass.json").unlink()
    assert_same_bits(model, fp4pass.load(tmp_path / "m"))


@pytest.fixture
def toy() -> Iterator[str]:
    """A layout of another library, registered for one test."""

    @register_layout
    class Toy(Layout):
        name = "toy"
        parts: ClassVar = {PACKED: "codes", SCALE: "steps", GLOBAL: "unit", INPUT_GLOBAL: "seen"}
        formats = ("nvfp4", "nvfp4:32")
        multiplies = True

        def config(self, layers: Any, ignore: Any) -> dict[str, Any]:
            alone = {name: layer.config.weight_only for name, layer in layers.items()}
            return {"quant_method": "toy", "float_inputs": alone, "ignore": list(ignore)}

        def scheme(self, name: str, declared: Any) -> Scheme:
            return Scheme("nvfp4", declared["float_inputs"][name])

    yield Toy.name
    del LAYOUTS[Toy.name]


@pytest.mark.parametrize("weight_only", [True, False])
def test_a_new_layout_is_a_class(
    toy: str, saved: Saved, packed: Packed, tmp_path: Path, weight_only: bool
) -> None:
    model = packed("nvfp4", weight_only)
    fp4pass.save(model, tmp_path / "t", layout=toy)
    stored = load_file(tmp_path / "t" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    assert stored[f"{name}.unit"].shape == () and stored[f"{name}.codes"].dtype == torch.uint8
    assert (f"{name}.seen" in stored) is not weight_only
    assert_same_bits(fp4pass.load(tmp_path / "t"), model)
    # As another library would have written it.
    (tmp_path / "t" / "fp4pass.json").unlink()
    assert_same_bits(fp4pass.load(tmp_path / "t"), model)
    transcode(tmp_path / "t", tmp_path / "c", "compressed-tensors")
    found, expected = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "c", saved("nvfp4", weight_only))
    )
    assert set(found) == set(expected)
    assert all(torch.equal(bits(found[each]), bits(expected[each])) for each in expected)
    with pytest.raises(CheckpointError, match=r"toy has no place for mxfp4; it holds nvfp4 and"):
        fp4pass.save(packed("mxfp4"), tmp_path / "m", layout=toy)


SCHEMES = [
    (fmt, block, weight_only, experts)
    for fmt, block in (
        *(("nvfp4", 16), ("nvfp4", 32), ("mxfp4", 32), ("mxfp4", 16)),
        *(("fp8", 0), ("fp8_block", 128), ("fp8_tensor", 0), ("mxfp8", 32)),
    )
    for weight_only in (True, False)
    for experts in (0, 3)
]


def packed_state(layer: PackedLayer, name: str = "a") -> dict[str, torch.Tensor]:
    """Return the buffers of a layer, with numbers of no meaning; float scales are powers of two."""
    fmt, (*rows, columns) = layer.fmt, layer.shape
    scale = torch.randint(1, 100, layer.scale_shape, dtype=torch.uint8)
    last = 1 << min(fmt.element.bits, 7)
    state = {
        PACKED: torch.randint(0, last, (*rows, fmt.packed_columns(columns)), dtype=torch.uint8),
        SCALE: 2.0 ** (scale % 8).float() if fmt.has_float_scale else scale.view(fmt.scale.storage),
    }
    if fmt.has_global_scale:
        state[GLOBAL] = 2.0 ** torch.arange(max(layer.shape[0] * layer.is_stacked, 1))
        state |= {} if layer.config.weight_only else {INPUT_GLOBAL: torch.tensor([0.25])}
    return {f"{name}.{part}": tensor for part, tensor in state.items()}


@pytest.mark.core
@pytest.mark.parametrize("name", sorted(written_layouts()))
@pytest.mark.parametrize(("fmt", "block", "weight_only", "experts"), SCHEMES)
def test_a_layout_stores_and_declares_what_it_holds(
    name: str, fmt: str, block: int, weight_only: bool, experts: int
) -> None:
    layout, config = LAYOUTS[name], LinearConfig(fmt, "sse", weight_only, block)
    shape = (experts, 32, 64) if experts else (32, 64)
    layer = PackedLayer(config, "bfloat16", bool(experts and layout.stacks), shape)
    own = "a.0"
    if layout.problem(layer):
        with pytest.raises(CheckpointError, match=f"{own}: {name} has no place for"):
            layout.require({own: layer})
        return
    # Both functions, exact; what is stored has the shapes that a folder is checked for.
    state = packed_state(layer, own)
    stored = layout.to_stored(state | {"b.weight": torch.ones(2)}, {own: layer})
    assert torch.equal(stored.pop("b.weight"), torch.ones(2))
    again = layout.from_stored(stored, {own: layer})
    assert again.keys() == state.keys()
    assert all(torch.equal(bits(again[each]), bits(state[each])) for each in state)
    kinds = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    kinds |= {torch.int8: "I8", torch.float8_e8m0fnu: "F8_E8M0"}
    shapes = {each: (tuple(x.shape), kinds[x.dtype]) for each, x in stored.items()}
    for part, (allowed, dtypes) in expected_shapes(layout, layer).items():
        if f"{own}.{part}" in state:
            found, dtype = shapes[layout.tensor_name(own, part, layer.fmt)]
            assert found in allowed and dtype in dtypes
    # What others see, and what is read of it.
    declared = layout.config({own: layer}, ["lm_head"])
    if not layout.engines:
        with pytest.raises(CheckpointError, match=r"fp4pass.json.* is missing"):
            read_layers(layout, declared, shapes, "bfloat16")
        return
    # A transform_config is written where something is rotated.
    wanted = "compressed-tensors" if name == "compressed-tensors-hadamard" else name
    assert layout_of(declared, Path("q")).name == wanted
    for data in (declared, *layout.files({own: layer}, ["lm_head"]).values()):
        assert layout_of(data, Path("q")).name == wanted
        assert layout.ignored(data) == ["lm_head"]
        (read,) = read_layers(layout, data, shapes, "bfloat16").values()
        assert read.config.scheme == config.scheme and read.config.block == block
        assert (read.shape, read.transposed) == (layer.shape, layer.transposed)


@pytest.mark.core
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("each_part", [False, True])
@pytest.mark.parametrize("inputs", [None, [0.5], [0.5, 0.25, 0.125]], ids=str)
def test_a_stack_is_split_stored_and_joined_to_the_bit(
    layout: str, each_part: bool, inputs: list[float] | None
) -> None:
    config = LinearConfig("nvfp4", "sse", weight_only=inputs is None)
    whole = PackedLayer(config, "bfloat16", False, (3, 32, 64))
    state = packed_state(whole)
    if each_part:
        state[f"a.{GLOBAL}"] = 2.0 ** torch.arange(6).view(3, 2)
    state.pop(f"a.{INPUT_GLOBAL}", None)
    state |= {} if inputs is None else {f"a.{INPUT_GLOBAL}": torch.tensor(inputs)}
    pieces = [
        Piece(f"a.{expert}.{part}", expert, start, start + 16)
        for expert in range(3)
        for part, start in (("gate", 0), ("up", 16))
    ]
    layers = {
        piece.name: dataclasses.replace(whole, shape=(piece.stop - piece.start, 64))
        for piece in pieces
    }
    split = {
        f"{path}.{name.removeprefix('a.')}": share
        for name, tensor in state.items()
        for path, share in split_layer(pieces, name.removeprefix("a."), tensor, whole.fmt)
    }
    stored = LAYOUTS[layout].to_stored(split, layers)
    again = LAYOUTS[layout].from_stored(stored, layers)
    record, joined = join_layers("a", pieces, layers, whole, again)
    assert record == whole and joined.keys() == state.keys()
    assert all(torch.equal(bits(joined[name]), bits(state[name])) for name in state)
    # What reads one input has one scale of it.
    if inputs is not None:
        again[f"a.1.up.{INPUT_GLOBAL}"] = torch.tensor([8.0])
        with pytest.raises(CheckpointError, match="got two for expert 1"):
            join_layers("a", pieces, layers, whole, again)


PROBLEMS = [
    ("compressed-tensors", {"block": 32}, "nvfp4:32"),
    ("compressed-tensors", {"rotation": 64}, "nvfp4 with rotated weights"),
    ("modelopt", {"fmt": "mxfp4"}, "mxfp4"),
    ("compressed-tensors-hadamard", {"rotation": 64}, ""),
    (
        "compressed-tensors-hadamard",
        {"rotation": 64, "fmt": "nvfp4", "weight_only": False},
        "4-bit inputs in nvfp4",
    ),
    ("compressed-tensors-hadamard", {"rotation": 32, "folded": True}, "folded"),
    ("fp4pass", {"rotation": 64, "block": 32}, ""),
]


@pytest.mark.parametrize(("name", "options", "problem"), PROBLEMS)
def test_what_a_layout_has_no_place_for(name: str, options: dict[str, Any], problem: str) -> None:
    config = LinearConfig(**{"method": "sse", "weight_only": True} | options)
    layer = PackedLayer(config, "bfloat16", False, (64, 128))
    found = LAYOUTS[name].problem(layer)
    assert problem in found and bool(found) is bool(problem)
    turned = PackedLayer(config, "bfloat16", True, (64, 128))
    assert bool(LAYOUTS[name].problem(turned)) is (name != "fp4pass")
