"""Converted models on several processes: what one computes, and errors instead of wrong numbers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import OptionError, ShapeError, StateError
from fp4pass.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

pytest.importorskip("transformers")

SPLITS = Path(__file__).with_name("splits.py")

CASES = [
    "weight only",
    "static",
    "dynamic",
    "rotated",
    "tied",
    "experts",
    "dynamic experts",
    "experts of tokens",
    "dense experts",
    "biased experts",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run(SPLITS, "quick", folder)


@pytest.fixture
def lone_mesh(tmp_path: Path) -> Iterator[Any]:
    """The mesh of a process that is alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def assert_near(found: Tensor, expected: Tensor, ulps: int = 8) -> None:
    """Equal but for the order of float32 sums: so many last places of the largest number."""
    assert found.shape == expected.shape
    bound = ulps * 2**-23 * expected.abs().max().item()
    assert (found - expected).abs().max().item() <= bound


def assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", CASES)
def test_a_split_model_computes_what_the_whole_does(two: list[dict[str, Any]], name: str) -> None:
    first, second = (found["models"][name] for found in two)
    for facts in (first, second):
        for each in ("split", "loaded"):
            assert_near(facts[each]["logits"], facts["whole"]["logits"])
            # q, k and v, gate and up still share the quantization of their input.
            assert facts[each]["quantizations"] == facts["whole"]["quantizations"]
        assert facts["frozen"]
    # Every process has the same logits, or they would choose other tokens.
    assert torch.equal(first["split"]["logits"], second["split"]["logits"])
    assert_bits(first["after"], first["before"])


def test_float32_sums_are_as_near_to_the_truth_as_the_whole_models(
    two: list[dict[str, Any]],
) -> None:
    facts = two[0]["models"]["weight only"]
    assert_near(facts["split"]["logits"].double(), facts["exact"])
    assert_near(facts["whole"]["logits"].double(), facts["exact"])


@pytest.mark.parametrize("name", ["static", "experts"])
def test_a_split_model_generates(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        whole, dynamic, static = found["models"][name]["tokens"]
        assert torch.equal(dynamic, whole) and torch.equal(static, whole)


def assert_reduced(found: dict[str, Any], shared: bool) -> None:
    assert found.pop("shared memory") == shared
    assert {name for name, right in found.items() if right != (True, True)} == set()


def test_processes_reduce_tensors(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert_reduced(dict(found["models"]["reductions"]), shared=False)


def test_inputs_are_quantized_once(two: list[dict[str, Any]]) -> None:
    counts = {name: two[0]["models"][name]["split"]["quantizations"] for name in CASES}
    # Two layers of q/k/v, o, gate/up and down.
    assert counts["static"] == counts["dynamic"] == 8
    assert counts["weight only"] == 0


def test_each_process_has_a_part(two: list[dict[str, Any]]) -> None:
    dense, experts = (two[0]["models"][name]["shapes"] for name in ("dynamic", "experts"))
    layer = "model.layers.1."
    assert dense[f"{layer}self_attn.q_proj.weight_packed"] == ((128, 32), (64, 32))
    assert dense[f"{layer}self_attn.q_proj.bias"] == ((128,), (64,))
    assert f"{layer}self_attn.o_proj.bias" not in dense
    assert dense[f"{layer}self_attn.o_proj.weight_scale"] == ((64, 8), (64, 4))
    assert dense[f"{layer}mlp.up_proj.weight_packed"] == ((96, 32), (48, 32))
    assert dense[f"{layer}mlp.down_proj.weight_packed"] == ((64, 48), (64, 24))
    assert dense["lm_head.weight"] == ((96, 64), (48, 64))
    assert experts[f"{layer}mlp.experts.gate_up_proj.weight_packed"] == ((4, 64, 32), (2, 64, 32))
    assert experts[f"{layer}mlp.experts.down_proj.weight_global_scale"] == ((4,), (2,))
    biased = two[0]["models"]["biased experts"]["shapes"]
    assert biased[f"{layer}mlp.experts.gate_up_proj_bias"] == ((4, 64), (2, 64))
    # Left whole by each process.
    assert not any("experts" in name for name in two[0]["models"]["dense experts"]["shapes"])


@pytest.mark.parametrize("name", ["W4A16", "rotated", "W4A4"])
def test_styles_compute_what_the_whole_layer_does(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        facts = found["styles"][name]
        assert_near(facts["split"], facts["whole"], 16)
        for whole, gathered in facts["weights"]:
            assert torch.equal(whole, gathered)


def test_layers_with_a_whole_tensor_between_them(two: list[dict[str, Any]]) -> None:
    for found in two:
        whole, split = found["styles"]["between"]
        assert_near(split, whole)


@pytest.mark.parametrize("name", ["columns", "experts"])
def test_inputs_of_all_processes_share_a_global_scale(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        whole, split = found["styles"]["scales"][name]
        assert torch.equal(whole, split) and whole.item() < 1


@pytest.mark.parametrize("name", ["dynamic experts", "tied"])
def test_a_split_model_is_saved_as_the_whole(
    two: list[dict[str, Any]], folder: Path, name: str
) -> None:
    whole, split = ([*(folder / f"{name}, {kind}").iterdir()] for kind in ("whole", "split"))
    assert sorted(each.name for each in whole) == sorted(each.name for each in split)
    for file in whole:
        assert file.read_bytes() == (folder / f"{name}, split" / file.name).read_bytes(), file.name
    for found in two:
        expected, loaded = found["saved"][name]
        assert_bits(loaded, expected)
        message = found["saved"]["save_pretrained"]
        assert message.startswith("StateError: model.layers.0.self_attn.q_proj: save_pretrained")
        assert "fp4pass.save(model, directory) in every process" in message


@pytest.mark.parametrize("name", ["static", "rotated", "experts"])
def test_fsdp_shards_packed_weights_and_changes_no_bit(
    two: list[dict[str, Any]], name: str
) -> None:
    for found in two:
        facts = found["sharded"][name]
        for each in ("split", "loaded"):
            assert torch.equal(facts[each]["logits"], facts["whole"]["logits"])
        packed = [each for key, each in facts["shapes"].items() if "weight_packed" in key]
        assert len(packed) == (12 if name == "experts" else 14)
        assert all(whole[0] == 2 * part[0] for whole, part in packed)
        assert set(key for key in facts["before"] if key.endswith("weight_scale")) <= set(
            facts["shapes"]
        )
    assert_bits(two[0]["sharded"][name]["after"], two[0]["sharded"][name]["before"])


def test_fsdp_in_bfloat16(two: list[dict[str, Any]]) -> None:
    for name in ("static", "rotated", "experts"):
        found = two[0]["sharded"][name]["bfloat16"]
        if isinstance(found, str):
            # torch before 2.13 casts codes too.
            assert found.startswith("StateError: fully_shard of this torch casts packed codes")
        else:
            replicated, sharded = found
            assert torch.equal(replicated, sharded)


def test_a_sharded_model_is_saved_whole(two: list[dict[str, Any]]) -> None:
    for found in two:
        expected = found["sharded"]["experts"]["whole"]["logits"]
        assert torch.equal(found["sharded"]["reloaded"], expected)
        assert found["sharded"]["split"].startswith("StateError: model.layers.0.self_attn.q_proj")


ERRORS = {
    "columns": "ShapeError: model.layers.0.mlp.down_proj: in_features=80 is not a multiple of "
    "2 ranks x 16 (the block of nvfp4a16)",
    "heads": "ShapeError: model.layers.0.self_attn.k_proj: 1 heads cannot be divided among 2",
    "experts": "ShapeError: model.layers.0.mlp.experts: 5 experts cannot be divided among 2 ranks",
    "vocabulary": "ShapeError: lm_head: out_features=97 is not a multiple of 2 ranks",
    "no plan": "OptionError: Mlp has no plan of its own. Give plan={name: style}",
    "unknown": "OptionError: plan: lm_heads matches nothing in the model",
    "a style": "OptionError: The style of model.layers.0.mlp: expected a ParallelStyle or one of ",
    "a norm": "OptionError: model.norm: expected a linear layer, got Qwen3RMSNorm",
    "a parameter": "OptionError: model.norm.weight: only linear layers and experts can be split",
    "mesh": "OptionError: mesh: expected a DeviceMesh of one dimension, got",
    "rows": "ShapeError: QuantizedLinear: out_features=63 is not a multiple of 2 ranks",
    "other weights": "StateError: The model to split is not the same in all processes: rank 1",
    "tokens": "OptionError: QuantizedLinear: expected layouts (Replicate(), Shard(dim=-1)) or",
    "twice": "StateError: The model is split already",
    "dense": "StateError: The model is not converted",
    "input": "StateError: The input of QuantizedLinear: expected a tensor, got a DTensor. Split",
    "gradient": "StateError: A layer that is split over processes computes no gradients",
    "state": "expected weight_packed of (48, 32) torch.uint8, got (96, 32) torch.uint8",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_split_is_an_error_of_all(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        assert ERRORS[name] in found["errors"][name]


def test_a_split_model_is_one_graph(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert_near(found["traced"]["split"], found["traced"]["whole"])


@pytest.mark.slow
def test_a_split_model_compiles(tmp_path: Path) -> None:
    for found in run(SPLITS, "compiled", tmp_path):
        for name in ("dynamic", "dynamic experts"):
            assert_near(found[name]["split"], found[name]["whole"])
        # q, k and v, gate and up: one quantization of what they read, and one launch.
        dense, experts = found["report"].splitlines()
        assert "quantize 7 -> 4" in dense and "linear_quantized_group 0 -> 2" in dense
        assert "quantize 6 -> 4" in experts and "experts_linear_quantized 2 -> 2" in experts


@pytest.mark.slow
def test_transformers_splits_what_it_loads(tmp_path: Path) -> None:
    for found in run(SPLITS, "transformers_loads", tmp_path):
        for each in ("split", "saved", "kept packed"):
            assert_near(found[each]["logits"], found["whole"]["logits"])
        packed = found["shapes"]["model.layers.0.mlp.down_proj.weight_packed"]
        assert packed == ((64, 48), (64, 24))
        assert found["kept shapes"] == found["shapes"]
        for name in ("own plan", "fsdp"):
            assert found[name].startswith("OptionError: distributed_config: expected tp_size and")
        assert found["their plan"].startswith("StateError: Qwen3MoeExperts: transformers would sum")


@pytest.mark.slow
def test_adapters_are_trained_on_sharded_models(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for found in run(SPLITS, "adapters", tmp_path):
        assert len(found["whole"]) == 28
        assert_bits(found["sharded"], found["whole"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ON_GPU", "1")
    # Both at one time, for most of it compiles kernels.
    with ThreadPoolExecutor() as pool:
        (first, second), (sharded, _) = pool.map(
            lambda name: run(SPLITS, name, tmp_path), ("models", "sharded")
        )
    for found in (first, second):
        assert_reduced(found["reductions"], shared=True)
    for name in ("weight only", "dynamic", "dynamic experts"):
        assert torch.equal(first[name]["split"]["logits"], second[name]["split"]["logits"])
        assert_bits(first[name]["after"], first[name]["before"])
    # Without codes of inputs, which another order of sums may change.
    assert_near(first["weight only"]["split"]["logits"], first["weight only"]["whole"]["logits"])
    for name in ("static", "experts"):
        assert torch.equal(sharded[name]["split"]["logits"], sharded[name]["whole"]["logits"])


@pytest.mark.core
def test_rotations_are_not_cut() -> None:
    layer = fp4pass.convert(nn.Linear(96, 32), "nvfp4", "sse", rotation=32)
    with pytest.raises(ShapeError, match=r"x: in_features=96 .* 2 ranks x 32 .* rotated by 32"):
        RowwiseParallel().check("x", layer, 2)
    RowwiseParallel().check("x", layer, 3)
    with pytest.raises(ShapeError, match="x: out_features=32 is not a multiple of 3 ranks"):
        ColwiseParallel().check("x", layer, 3)


@pytest.mark.core
def test_graphs_and_offloaded_models_are_refused(lone_mesh: Any) -> None:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    fp4pass.convert(model, method="sse", weight_only=True)
    graph = torch.export.export(model, (torch.randn(2, 32),)).module()
    graph.__dict__.update(_fp4pass_state=model.__dict__["_fp4pass_state"])
    with pytest.raises(OptionError, match="Split the model of modules"):
        fp4pass.parallelize(graph, lone_mesh, plan)
    x = torch.randn(2, 32)
    y = model(x)
    # One process has all.
    assert torch.equal(fp4pass.parallelize(model, lone_mesh, plan)(x), y)
    meta = fp4pass.convert(nn.Sequential(nn.Linear(32, 32)), method="sse").to("meta")
    with pytest.raises(StateError, match="it is on the meta device"):
        fp4pass.parallelize(meta, lone_mesh, {"0": ColwiseParallel()})


@pytest.mark.core
def test_only_packed_experts_are_divided() -> None:
    with pytest.raises(OptionError, match="x: expected a mixture of which all stacks are packed"):
        ExpertParallel().check("x", nn.Linear(32, 32), 2)
