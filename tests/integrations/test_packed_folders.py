"""`from_pretrained` of folders that others packed: kept packed, and what `load` makes of them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import fp8_folders
import native
import pytest
import torch
from mixtures import build
from safetensors.torch import load_file, save_file
from saved_models import deepseek, mixtral
from small_models import TINY, assert_same_bits, change_json, language_model, tokens

import fp4pass
from fp4pass.checkpoint import open_checkpoint
from fp4pass.errors import CheckpointError, UnreadError, VersionError
from fp4pass.integrations import PackedConfig
from fp4pass.nn.experts import QUANTIZED

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*scales of a quantized key-value cache"),
    pytest.mark.filterwarnings("ignore:transformers cannot load this folder"),
]

AUTO = transformers.AutoModelForCausalLM
IDS = tokens(2, 12) % 150 + 1


def pretrained(folder: Path, cls: Any = AUTO, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model and what transformers says of its keys."""
    return cls.from_pretrained(folder, output_loading_info=True, **options)


def assert_whole(info: dict[str, Any]) -> None:
    assert not any(info.values()), info


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes | options)
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


def projections(model: Any) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith("_proj")]


Writer = Callable[[Path], dict[str, torch.Tensor]]


def modelopt(algorithm: str) -> Writer:
    def write(folder: Path) -> dict[str, torch.Tensor]:
        model = llama()
        model.save_pretrained(folder.parent / "float")
        names = projections(model)
        dense = foreign.modelopt(folder.parent / "float", folder, names, algorithm)
        facts = json.loads((folder / "hf_quant_config.json").read_text())
        kind = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
        group = {"weights": kind, "targets": ["Linear"]}
        group |= {"input_activations": kind} if algorithm == "NVFP4" else {}
        declared = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
        declared |= {"config_groups": {"group_0": group}, "producer": facts["producer"]}
        native.change_config(folder, quantization_config=declared)
        return dense

    return write


def compressed_tensors(scheme: str) -> Writer:
    return lambda folder: foreign.compressed_tensors(llama(), folder, scheme, IDS)


PACKED: dict[str, tuple[Writer, Any]] = {
    "ModelOpt NVFP4": (modelopt("NVFP4"), None),
    "ModelOpt W4A16_NVFP4": (modelopt("W4A16_NVFP4"), None),
    "Quark MXFP4": (lambda folder: native.quark(llama(), folder, True), None),
    "compressed-tensors NVFP4A16": (compressed_tensors("NVFP4A16"), PackedConfig()),
    "compressed-tensors NVFP4": (compressed_tensors("NVFP4"), PackedConfig()),
    "compressed-tensors MXFP4A16": (compressed_tensors("MXFP4A16"), PackedConfig()),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.filterwarnings("ignore:.*pkg_resources|.*treespec:FutureWarning")
def test_linear_layers_stay_packed(name: str, tmp_path: Path) -> None:
    write, config = PACKED[name]
    dense = write(tmp_path / "q")
    options = {} if config is None else {"quantization_config": config}
    model, info = pretrained(tmp_path / "q", dtype=torch.bfloat16, **options)
    assert_whole(info)
    assert len(dense) == 14 and set(dense) == {
        n for n, each in model.named_modules() if isinstance(each, QUANTIZED)
    }
    # What the writer dequantizes.
    for layer, weight in dense.items():
        assert torch.equal(model.get_submodule(layer).weight, weight.bfloat16()), layer
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    assert [str(row) for row in fp4pass.report(model).rows] == [
        str(row) for row in fp4pass.report(loaded).rows
    ]
    # It is a converted model: saved, compiled, made dense.
    fp4pass.save(model, tmp_path / "again", layout=open_checkpoint(tmp_path / "q").layout.name)
    assert_same_bits(fp4pass.load(tmp_path / "again"), model)
    assert fp4pass.dequantize(model).state_dict().keys() == llama().state_dict().keys()


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "minimax_m2", "mixtral"])
def test_experts_stay_packed(layout: str, kind: str, tmp_path: Path) -> None:
    """As a layer for each expert, under the names of each type of model."""
    model = build(kind, torch.bfloat16) if kind == "qwen3_moe" else own(kind)
    fp4pass.convert(model, "nvfp4a16", "naive")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp4pass.save(model, tmp_path / "q", layout=layout)
    for own_facts in (True, False):
        if not own_facts:
            (tmp_path / "q" / "fp4pass.json").unlink()
        again, info = pretrained(tmp_path / "q", quantization_config=PackedConfig())
        assert_whole(info)
        loaded = fp4pass.load(tmp_path / "q")
        assert_same_bits(again, loaded)
        ids = IDS % model.config.vocab_size
        with torch.no_grad():
            assert torch.equal(again(ids).logits, loaded(ids).logits)


def own(kind: str) -> Any:
    if kind == "mixtral":
        return mixtral().bfloat16().eval()
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16}
    torch.manual_seed(0)
    config = transformers.MiniMaxM2Config(**sizes)
    return transformers.MiniMaxM2ForCausalLM(config).bfloat16().eval()


@pytest.fixture(scope="module")
def deepseek_v4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("deepseek") / "q"
    torch.manual_seed(0)
    return folder, native.deepseek_v4(deepseek().bfloat16(), folder)


@pytest.mark.filterwarnings("ignore:The folder has no tokenizer")
def test_deepseek_v4(deepseek_v4: Any, tmp_path: Path) -> None:
    """Experts and FP8 beside them stay packed, and are written to the bit."""
    folder, values = deepseek_v4
    reader = open_checkpoint(folder)
    assert reader.layout.name == "deepseek-v4"
    assert {layer.fmt.key for layer in reader.layers.values()} == {"mxfp4", "fp8_block"}
    for name, weight in values.items():
        layer = name.removesuffix(".weight")
        assert torch.equal(reader.dense(layer, torch.bfloat16), weight), name
    options = {"dtype": torch.bfloat16}
    model, info = pretrained(folder, quantization_config=PackedConfig(), **options)
    assert_whole(info)
    loaded = fp4pass.load(folder)
    assert_same_bits(model, loaded)
    left = [r.skip_reason for r in fp4pass.report(model).skipped if r.name.startswith("mtp.")]
    assert len(left) == 3 and all(each.endswith("place for it: not copied") for each in left)
    # A linear layer of groups computes what a packed one would not.
    grouped = [row for row in fp4pass.report(model).skipped if "no linear layer" in row.skip_reason]
    assert {row.name.rpartition(".")[2] for row in grouped} == {"o_a_proj"}
    stock = AUTO.from_pretrained(folder, **options)
    with torch.no_grad():
        theirs_logits, our_logits = stock(IDS).logits.float(), model(IDS).logits.float()
    assert (our_logits - theirs_logits).norm() < 0.1 * theirs_logits.norm()
    # V4.1 declares it among the others.
    shutil.copytree(folder, tmp_path / "v41")

    def moved(config: Any) -> None:
        config["quantization_config"]["expert_dtype"] = config.pop("expert_dtype")

    change_json(tmp_path / "v41" / "config.json", moved)
    assert_same_bits(fp4pass.load(tmp_path / "v41"), loaded)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", fp8_folders.KINDS)
def test_layers_in_fp8_stay_packed(kind: str, tmp_path: Path) -> None:
    dense = fp8_folders.make(fp8_folders.dense_model(256), tmp_path / "q", kind)
    options = {} if kind.startswith("mo-") else {"quantization_config": PackedConfig()}
    model, info = pretrained(tmp_path / "q", dtype=torch.bfloat16, **options)
    assert_whole(info)
    for layer, weight in dense.items():
        assert torch.equal(model.get_submodule(layer).weight, weight.bfloat16()), layer
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)


def test_stacks_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    native.gpt_oss(tmp_path / "q")
    model, info = pretrained(
        tmp_path / "q", dtype=torch.bfloat16, quantization_config=PackedConfig()
    )
    assert_whole(info)
    assert_same_bits(model, fp4pass.load(tmp_path / "q"))


def test_device_maps_and_offloading(tmp_path: Path) -> None:
    PACKED["ModelOpt W4A16_NVFP4"][0](tmp_path / "q")
    wanted = fp4pass.load(tmp_path / "q")
    split = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    split |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    for device_map in ("cpu", "auto", split):
        folder = tmp_path / "offload"
        model, info = pretrained(tmp_path / "q", device_map=device_map, offload_folder=folder)
        assert_whole(info)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, wanted(IDS).logits)


def test_sizes_that_a_device_map_sees(tmp_path: Path) -> None:
    """Packed sizes: the memory that the dense model would need is not asked for."""
    PACKED["ModelOpt W4A16_NVFP4"][0](tmp_path / "q")
    dense = sum(p.nbytes for p in llama().parameters())
    packed = sum(t.nbytes for t in fp4pass.load(tmp_path / "q").state_dict().values())
    assert packed < 0.6 * dense
    memory = {"cpu": packed + 40_000}
    model = AUTO.from_pretrained(tmp_path / "q", device_map="auto", max_memory=memory)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_other_classes(tmp_path: Path) -> None:
    PACKED["ModelOpt W4A16_NVFP4"][0](tmp_path / "q")
    whole = fp4pass.load(tmp_path / "q")
    base, _ = pretrained(tmp_path / "q", transformers.AutoModel)
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)
    kind = transformers.AutoModelForSequenceClassification
    head, info = pretrained(tmp_path / "q", kind, num_labels=3)
    assert info["missing_keys"] == {"score.weight"}
    head(IDS).logits.sum().backward()
    assert head.score.weight.grad is not None and head.score.weight.isfinite().all()


def test_a_packed_head_that_was_tied(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    fp4pass.convert(model, "nvfp4a16", "naive", rules=[("lm_head", {})])
    fp4pass.save(model, tmp_path / "q", layout="modelopt")
    again, info = pretrained(tmp_path / "q")
    assert_whole(info)
    assert_same_bits(again, fp4pass.load(tmp_path / "q"))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_our_own_folders_keep_what_they_say_of_the_model(kind: str, tmp_path: Path) -> None:
    model = llama() if kind == "llama" else build(kind, torch.bfloat16)
    rules = [("*.0.self_attn.*", None)]
    fp4pass.convert(model, "mxfp4a16", "sse", rules=rules, progress=False)
    fp4pass.save(model, tmp_path / "q")
    found, info = pretrained(tmp_path / "q", quantization_config=PackedConfig())
    assert_whole(info)
    assert fp4pass.report(found).to_dict() == fp4pass.report(model).to_dict()
    fp4pass.save(found, tmp_path / "r")
    before, after = (open_checkpoint(tmp_path / name).own for name in ("q", "r"))
    assert before and after and before["recipe"] == after["recipe"]
    assert before["report"] == after["report"]
    # The checksums count, too.
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_packed"))
    tensors[name][0, 0] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="it is not what was saved"):
        pretrained(tmp_path / "q", quantization_config=PackedConfig())


def test_scales_of_a_cache(tmp_path: Path) -> None:
    model = fp4pass.prepare(llama(), "naive", kv_cache="fp8_tensor")
    fp4pass.calibrate(model, [IDS], progress=False)
    fp4pass.convert(model, "nvfp4a16", kv_cache="fp8_tensor")
    for layout in ("modelopt", "compressed-tensors"):
        fp4pass.save(model, tmp_path / layout, layout=layout)
        again, info = pretrained(tmp_path / layout, quantization_config=PackedConfig())
        assert_whole(info)
        assert_same_bits(again, model)
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        assert torch.equal(again.generate(IDS, **options), model.generate(IDS, **options))


def test_what_cannot_be_kept_packed(tmp_path: Path) -> None:
    modelopt("NVFP4")(tmp_path / "q")
    shutil.copytree(tmp_path / "q", tmp_path / "fp8")
    change_json(
        tmp_path / "fp8" / "config.json",
        lambda config: config["quantization_config"].update(quant_algo="FP8"),
    )
    with pytest.raises(UnreadError, match=r"does not read 14 of its .* layers: .*weight U8"):
        AUTO.from_pretrained(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=r"is not quantized.* Load it with transformers"):
        AUTO.from_pretrained(TINY, quantization_config=PackedConfig())
    # A config for floats that meets packed weights.
    with pytest.raises(ValueError, match="Fp4PassConfig"):
        AUTO.from_pretrained(
            tmp_path / "q", quantization_config=fp4pass.integrations.Fp4PassConfig()
        )
    kind = transformers.LlamaForCausalLM
    config = transformers.AutoConfig.from_pretrained(tmp_path / "q")
    with pytest.raises(CheckpointError, match="expected a folder of packed weights"):
        kind.from_pretrained(None, config=config, state_dict=llama().state_dict())
    language_model().save_pretrained(tmp_path / "gptq")
    native.change_config(tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnreadError, match=r"quant_method: expected that of .*, got 'gptq'"):
        AUTO.from_pretrained(tmp_path / "gptq", quantization_config=PackedConfig())
    change_json(tmp_path / "q" / "config.json", lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(
        CheckpointError,
        match=r"layers\.1\..*: expected a linear layer with .* got a model without one",
    ):
        AUTO.from_pretrained(tmp_path / "q")


def test_a_model_that_transformers_does_not_have_filled_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packed layers would have no numbers."""

    def not_called(model: Any, *args: Any) -> None:
        name = "_adjust_missing_and_unexpected_keys"
        model.__dict__[name] = getattr(model, name)

    fp4pass.save(fp4pass.convert(llama(), "nvfp4a16", "sse"), tmp_path / "q")
    monkeypatch.setattr("fp4pass.integrations.transformers.when_loaded", not_called)
    with pytest.raises(VersionError, match=r"transformers .* where packed layers are filled"):
        pretrained(tmp_path / "q", quantization_config=PackedConfig())
