"""Models that keep their keys and values quantized: calibration, generate, files, and refusals."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import mlp
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.errors import (
    CalibrationError,
    CheckpointError,
    NonFiniteError,
    OptionError,
    ShapeError,
    StateError,
)
from fp4pass.integrations import quantized_cache
from fp4pass.nn.kv_cache import CACHE_FORMATS, CacheCodec

transformers = pytest.importorskip("transformers")
caches = pytest.importorskip("caches")

NAMES = list(CACHE_FORMATS)


def decoder(kind: str = "Qwen3", **options: Any) -> Any:
    """Two layers of two key-value heads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    sizes |= {"pad_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def ids(count: int = 2, length: int = 12) -> Tensor:
    return torch.randint(1, 160, (count, length), generator=torch.Generator().manual_seed(1))


def prepared(model: Any = None, **options: Any) -> Any:
    model = decoder() if model is None else model
    fp4pass.prepare(model, "naive", **{"kv_cache": "fp8"} | options)
    return fp4pass.calibrate(model, [ids(), ids(3, 20)], progress=False)


def converted(name: str = "fp8", model: Any = None, **options: Any) -> Any:
    return fp4pass.convert(prepared(model), weight_only=True, kv_cache=name, **options)


@torch.no_grad()
def cached_logits(model: Any, cache: Any, parts: tuple[int, ...] = (20,)) -> Tensor:
    batches = ids(2, sum(parts)).split(parts, dim=1)
    return torch.cat([model(part, **caches.given(cache)).logits for part in batches], dim=1)


def float_keys(model: Any, batch: Tensor) -> list[tuple[Tensor, Tensor]]:
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(batch, **caches.given(cache))
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("sequential", [False, True])
def test_scales_are_those_of_what_calibration_saw(sequential: bool) -> None:
    """The largest keys, after their rotation, and values, of each head and over all batches."""
    model = decoder()
    seen = [float_keys(model, batch) for batch in (ids(), ids(3, 20))]
    model = prepared(model, sequential=sequential)
    fp4pass.convert(model, weight_only=True)
    for i, layer in enumerate(model.model.layers):
        # Of layers one after the other the first has the same inputs.
        if sequential and i:
            continue
        for part, name in enumerate(("k_scale", "v_scale")):
            amax = [batch[i][part].abs().amax(dim=(0, 2, 3)) for batch in seen]
            expected = CACHE_FORMATS["fp8"].scale_for(torch.stack(amax).amax(0))
            found = getattr(layer.self_attn, name)
            assert torch.equal(found, expected) and found.shape == (2, 1, 1)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_returns_what_its_bytes_stand_for(name: str) -> None:
    """However a text is cut into calls, and wherever the bytes lie."""
    model = converted(name)
    fmt, cache = CACHE_FORMATS[name], quantized_cache(model)
    whole = cached_logits(model, cache)
    assert [layer.keys.shape for layer in cache.layers] == [(2, 2, 20, fmt.width(16))] * 2
    assert all(layer.keys.dtype == torch.uint8 for layer in cache.layers)
    for length in (None, 32):
        parts = cached_logits(model, quantized_cache(model, length), (7, 1, 1, 11))
        torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)
    attention = model.model.layers[0].self_attn
    keys, values = float_keys(model, ids(2, 20))[0]
    of_keys, of_values = (getattr(attention, each) for each in fmt.scales)
    assert torch.equal(cache.layers[0].keys, CacheCodec(fmt, of_keys).encode(keys))
    assert torch.equal(cache.layers[0].values, CacheCodec(fmt, of_values).encode(values))
    with torch.no_grad():
        plain = model(ids(2, 20), use_cache=False).logits
    # Half a step of the format, and not nothing.
    error = (whole - plain).norm() / plain.norm()
    assert 0 < error < (0.15 if fmt.blocks else 0.05)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_generate_uses_the_cache(name: str) -> None:
    model = converted(name)
    cache = quantized_cache(model)
    options = {"max_new_tokens": 8, "do_sample": False}
    given = model.generate(ids(), **caches.given(cache), **options)
    found = model.generate(ids(), return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, given)
    kept = caches.kept(found).layers
    assert torch.equal(kept[1].keys, cache.layers[1].keys) and kept[1].keys.dtype == torch.uint8
    static = model.generate(ids(), cache_implementation="static", **options)
    assert torch.equal(static, given)
    # Beams reorder the bytes, and each text is as it is alone.
    beams = model.generate(ids(), num_beams=3, **options)
    alone = [model.generate(row[None], num_beams=3, **options) for row in ids()]
    assert torch.equal(beams, torch.cat(alone))
    with pytest.raises(OptionError, match="cache_implementation: expected None, 'dynamic'"):
        model.generate(ids(), cache_implementation="quantized", **options)


def through_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("copied", [through_file, copy.deepcopy])
def test_copies_have_a_cache_of_their_own(copied: Callable[[Any], Any]) -> None:
    options = {"max_new_tokens": 4, "do_sample": False}
    before = prepared(sequential=copied is through_file)
    model = fp4pass.convert(copied(before), weight_only=True)
    twin = copied(model)
    expected = model.generate(ids(), **options)
    for other in (fp4pass.convert(before, weight_only=True), twin):
        assert torch.equal(other.generate(ids(), **options), expected)
    # By its own scales, and without the model it came of.
    for module in model.modules():
        if hasattr(module, "k_scale"):
            module.k_scale.fill_(torch.nan)
    made = twin.generate(ids(), return_dict_in_generate=True, **options)
    assert torch.equal(made.sequences, expected)
    scales = [layer.codecs[0].scale for layer in caches.kept(made).layers]
    own = [m.k_scale for m in twin.modules() if hasattr(m, "k_scale")]
    assert all(a is b for a, b in zip(scales, own, strict=True))


def test_evaluate_reads_from_the_cache() -> None:
    model = converted("nvfp4")
    windows = ids(2, 20)
    found = fp4pass.evaluate(model, None, windows, window=20, progress=False).perplexity
    logits = cached_logits(model, quantized_cache(model))[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).exp()
    assert found == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_the_scales(name: str, tmp_path: Path) -> None:
    model = converted(name)
    fp4pass.save(model, tmp_path / "a")
    scheme = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    strategies = {"fp8": "attn_head", "fp8_tensor": "tensor"}
    if name in strategies:
        expected = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        assert scheme["kv_cache_scheme"] == {**expected, "strategy": strategies[name]}
    else:
        assert scheme["kv_cache_scheme"] is None
    of_values = CACHE_FORMATS[name].scales[1]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    where = f"model.layers.1.self_attn.{of_values}"
    if name in strategies:
        stored = tensors[where]
    else:
        apart = json.loads((tmp_path / "a" / "fp4pass.json").read_text())["cache_scales"]
        stored = torch.tensor([apart[where]])
    assert torch.equal(stored, getattr(model.model.layers[1].self_attn, of_values))
    expected = cached_logits(model, quantized_cache(model))
    loaded = fp4pass.load(tmp_path / "a")
    assert torch.equal(cached_logits(loaded, quantized_cache(loaded)), expected)
    given = loaded.generate(ids(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert caches.kept(given).layers[0].keys.dtype == torch.uint8
    fp4pass.save(loaded, tmp_path / "own", layout="fp4pass")
    again = fp4pass.load(tmp_path / "own", model=prepared())
    assert not any(module._forward_pre_hooks for module in again.modules())
    assert torch.equal(cached_logits(again, quantized_cache(again)), expected)
    if name != "fp8_tensor":
        with pytest.raises(CheckpointError, match=f"kv_cache='{name}': modelopt holds fp8_tensor"):
            fp4pass.save(model, tmp_path / "modelopt", layout="modelopt")
        with pytest.raises(CheckpointError, match="modelopt holds fp8_tensor"):
            transcode(tmp_path / "a", tmp_path / "b", "modelopt")
    transcode(tmp_path / "a", tmp_path / "dense", "bf16")
    assert not any("_scale" in key for key in load_file(tmp_path / "dense/model.safetensors"))


@pytest.mark.filterwarnings("ignore:.*are rounded to the dtype that config.json")
@pytest.mark.quick(1)
@pytest.mark.parametrize("configs", ["both", "config.json", "hf_quant_config.json"])
def test_modelopt_has_scales_beside_projections(configs: str, tmp_path: Path) -> None:
    """Read with fp4pass.json, and as NVIDIA's folders are without, from either config."""
    model = converted("fp8_tensor")
    fp4pass.save(model, tmp_path / "a", layout="modelopt")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    attention = model.model.layers[1].self_attn
    for name in "kv":
        stored = tensors[f"model.layers.1.self_attn.{name}_proj.{name}_scale"]
        assert stored.ndim == 0 and stored == getattr(attention, f"{name}_scale")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    side = json.loads((tmp_path / "a" / "hf_quant_config.json").read_text())
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config["quantization_config"]["kv_cache_scheme"] == scheme
    assert side["quantization"]["kv_cache_quant_algo"] == "FP8"
    factor = 1.0
    if configs != "both":
        (tmp_path / "a" / "fp4pass.json").unlink()
        # Of others it is no power of two.
        factor = 0.75
        changed = {
            k: t * factor if k.endswith(("k_scale", "v_scale")) else t for k, t in tensors.items()
        }
        save_file(changed, path)
    if configs == "config.json":
        (tmp_path / "a" / "hf_quant_config.json").unlink()
    if configs == "hf_quant_config.json":
        del config["quantization_config"]
        (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    loaded = fp4pass.load(tmp_path / "a")
    assert torch.equal(loaded.model.layers[1].self_attn.k_scale, attention.k_scale * factor)
    expected = cached_logits(loaded, quantized_cache(loaded))
    if factor == 1:
        assert torch.equal(expected, cached_logits(model, quantized_cache(model)))
    # To the other layout, and back.
    transcode(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    there = fp4pass.load(tmp_path / "b")
    assert torch.equal(cached_logits(there, quantized_cache(there)), expected)
    assert load_file(tmp_path / "b/model.safetensors")[
        "model.layers.0.self_attn.k_scale"
    ].shape == (1,)
    transcode(tmp_path / "b", tmp_path / "c", "modelopt")
    again = load_file(tmp_path / "c" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[k].view(-1), t.view(-1)) for k, t in load_file(path).items())


@pytest.mark.filterwarnings("ignore:.*are rounded to the dtype that config.json")
def test_a_folder_without_ours_is_read(tmp_path: Path) -> None:
    """As llm-compressor writes it: in the dtype of the model, and no power of two."""
    model = converted()
    fp4pass.save(model, tmp_path / "a")
    (tmp_path / "a" / "fp4pass.json").unlink()
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    for key in tensors:
        if key.endswith(("k_scale", "v_scale")):
            tensors[key] = (tensors[key] * 0.75).bfloat16()
    save_file(tensors, path)
    loaded = fp4pass.load(tmp_path / "a")
    scale = loaded.model.layers[0].self_attn.k_scale
    assert torch.equal(scale, model.model.layers[0].self_attn.k_scale * 0.75)
    assert quantized_cache(loaded).layers[0].codecs[0].fmt is CACHE_FORMATS["fp8"]


def test_calls_out_of_order() -> None:
    with pytest.raises(StateError, match="not prepared for it"):
        fp4pass.convert(decoder(), method="sse", weight_only=True, kv_cache="fp8")
    with pytest.raises(StateError, match="not prepared for it"):
        fp4pass.convert(fp4pass.prepare(decoder(), "naive"), weight_only=True, kv_cache="fp8")
    untouched = fp4pass.prepare(decoder(), "naive", kv_cache="fp8")
    with pytest.raises(CalibrationError, match="self_attn: calibration has not seen its keys"):
        fp4pass.convert(untouched, weight_only=True)
    # Nothing was converted, so calibration may still come.
    fp4pass.calibrate(untouched, [ids()], progress=False)
    fp4pass.convert(untouched, weight_only=True)
    assert quantized_cache(untouched, 8).layers[0].max_cache_len == 8
    with pytest.raises(OptionError, match="max_cache_len: expected a positive number"):
        quantized_cache(untouched, 0)
    plain = fp4pass.convert(decoder(), method="sse", weight_only=True)
    with pytest.raises(StateError, match="no scales of a key-value cache"):
        quantized_cache(plain)
    with pytest.raises(OptionError, match=r"kv_cache.*fp9"):
        fp4pass.prepare(decoder(), "naive", kv_cache="fp9")


def test_models_without_such_a_cache() -> None:
    with pytest.raises(OptionError, match="expected a decoder of transformers"):
        fp4pass.prepare(mlp(), "naive", kv_cache="fp8")
    with pytest.raises(OptionError, match="got DynamicSlidingWindowLayer"):
        fp4pass.prepare(decoder("Mistral", sliding_window=8), "naive", kv_cache="fp8")
    odd = prepared(decoder(head_dim=24))
    with pytest.raises(ShapeError, match="24 numbers of a head are not a multiple of 16"):
        fp4pass.convert(odd, weight_only=True, kv_cache="nvfp4")
    broken = decoder()
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight[0] = float("inf")
    with pytest.raises(NonFiniteError, match="keys or values held NaN"):
        fp4pass.convert(prepared(broken), rules=[("*.1.*", None)], weight_only=True)


def test_recipes_have_it(tmp_path: Path) -> None:
    recipe = fp4pass.Recipe(
        fp4pass.LinearConfig(method="naive", weight_only=True), (), "fp8_tensor"
    )
    model = fp4pass.prepare(decoder(), **recipe.arguments())
    fp4pass.calibrate(model, [ids()], progress=False)
    fp4pass.convert(model, **recipe.arguments())
    fp4pass.save(model, tmp_path / "a")
    assert fp4pass.Recipe.read(tmp_path / "a" / "fp4pass.json") == recipe
    with pytest.raises(OptionError, match="The recipe: kv_cache 'fp9' does not exist"):
        fp4pass.Recipe.from_dict({"kv_cache": "fp9"})


@pytest.mark.filterwarnings("ignore:.*are rounded to the dtype that config.json")
def test_a_damaged_scale_is_an_error(tmp_path: Path) -> None:
    model = converted()
    fp4pass.save(model, tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_scale"
    save_file({**tensors, name: -tensors[name]}, path)
    with pytest.raises(CheckpointError, match=r"k_scale"):
        fp4pass.load(tmp_path / "a")
    (tmp_path / "a" / "fp4pass.json").unlink()
    # Of others what cannot be used is not.
    loaded = fp4pass.load(tmp_path / "a")
    with pytest.raises(StateError, match="no scales of a key-value cache"):
        quantized_cache(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_compiled_in_one_graph(name: str) -> None:
    model = converted(name)
    eager, compiled = quantized_cache(model, 32), quantized_cache(model, 32)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for cache in (eager, compiled):
            model(ids(), **caches.given(cache))
        for i in range(3):
            token = ids(2, 3)[:, i : i + 1]
            expected = model(token, **caches.given(eager)).logits
            found = step(token, **caches.given(compiled)).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert torch.equal(eager.layers[1].keys, compiled.layers[1].keys)
