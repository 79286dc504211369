"""Padding: what attention_mask hides enters no statistic, whatever collects it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from calibration.readers import vision_model
from mixtures import build as mixture
from small_models import assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.evaluation import output_errors
from fp4pass.methods import Gptq, Stats
from fp4pass.quantization.observers.observer import OBSERVERS, collect

ROWS, LENGTH, PADDING = 3, 8, 5


def build(name: str) -> Any:
    pytest.importorskip("transformers")
    return next(case for case in zoo.CASES if case.name == name).build()


def texts() -> Tensor:
    return torch.randint(4, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def padded(side: str = "right", ids: Tensor | None = None) -> dict[str, Tensor]:
    """Texts with padding beside them, and their mask."""
    ids = texts() if ids is None else ids
    zeros = ids.new_zeros(len(ids), PADDING)
    order = (lambda a, b: (a, b)) if side == "right" else (lambda a, b: (b, a))
    mask = torch.cat(order(torch.ones_like(ids), zeros), 1)
    return {"input_ids": torch.cat(order(ids, zeros), 1), "attention_mask": mask}


def statistics(model: nn.Module) -> dict[str, Stats]:
    named = model.named_modules()
    return {
        name: collect([module], name) for name, module in named if module.__dict__.get(OBSERVERS)
    }


def assert_same_statistics(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> None:
    one, other = statistics(a), statistics(b)
    assert one and one.keys() == other.keys()
    for name, stats in one.items():
        same = other[name]
        assert stats.tokens == same.tokens > 0, name
        assert stats.input_amax == pytest.approx(same.input_amax, rel=tolerance), name
        for key, total in stats.collected_tensors().items():
            largest = float(total.abs().max())
            torch.testing.assert_close(
                total,
                same.collected_tensors()[key],
                rtol=0,
                atol=tolerance * largest,
                msg=f"{name} {key}",
            )


def calibrated(model: Any, *batches: dict[str, Any], **options: Any) -> Any:
    model = fp4pass.prepare(copy.deepcopy(model), **options)
    return fp4pass.calibrate(model, batches, progress=False)


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


class Straight(nn.Module):
    """Layers that compute row by row: what a token gives does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            # Bits of bfloat16, so that no order of sums shows.
            x = F.relu(layer(x)).bfloat16().float()
        return x


def rows(side: str = "right", hidden: float = float("nan")) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [B, T, K], the same with rows that are hidden, and the mask."""
    x = torch.randn(ROWS, LENGTH, 64, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    padding = torch.full((ROWS, PADDING, 64), hidden)
    parts = [(x, 1), (padding, 0)]
    parts = parts if side == "right" else parts[::-1]
    mask = torch.cat([torch.full(each.shape[:2], one) for each, one in parts], 1)
    return x, torch.cat([each for each, _ in parts], 1), mask


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("hessian", {}),
        pytest.param("gptq", {}, marks=pytest.mark.slow),
        ("hessian", {"sequential": True}),
        pytest.param("gptq", {"sequential": True}, marks=pytest.mark.slow),
        (Gptq(target="cross"), {"sequential": True}),
        ("naive", {}),
    ],
    ids=["hessian", "gptq", "hessian-sequential", "gptq-sequential", "cross", "amax"],
)
def test_right_padding_changes_no_packed_bit(
    model: Any, method: Any, options: dict[str, Any]
) -> None:
    found = [
        fp4pass.convert(calibrated(model, batch, method=method, **options), "nvfp4")
        for batch in ({"input_ids": texts()}, padded())
    ]
    assert_same_bits(*found)
    rows = fp4pass.report(found[1]).converted
    assert {row.tokens for row in rows} == {ROWS * LENGTH}


@pytest.mark.core
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_hidden_may_be_anything(side: str) -> None:
    x, long, mask = rows(side)
    for value in (1, True, 1.0):
        given = mask.to(torch.tensor(value).dtype)
        found = [
            fp4pass.convert(calibrated(Straight().eval(), batch), "nvfp4")
            for batch in ({"x": x}, {"x": long, "attention_mask": given})
        ]
        assert_same_bits(*found)


@pytest.mark.core
def test_masks_are_mapped_by_the_signature_and_found_in_a_mapping() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Straight().eval()

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return self.inner(features["x"], features["attention_mask"])

    x, long, mask = rows()
    once = calibrated(Straight().eval(), {"x": x})
    for batch in ((long, mask), [long, mask]):
        other = fp4pass.calibrate(fp4pass.prepare(Straight().eval()), [batch], progress=False)
        assert_same_statistics(once, other)
    wrapped = fp4pass.prepare(Wrapped().eval())
    wrapped({"x": long, "attention_mask": mask})
    assert_same_statistics(once, wrapped.inner)


@pytest.mark.core
def test_left_padding_is_left_out(model: Any) -> None:
    batch = padded("left")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = calibrated(model, {**batch, "position_ids": positions})
    assert_same_statistics(found, calibrated(model, {"input_ids": texts()}), 1e-4)


@pytest.mark.core
def test_tokens_that_a_mask_of_pairs_hides_are_said_to_count(model: Any) -> None:
    batch = padded()
    pairs = batch["attention_mask"].bool()[:, None, None, :].expand(-1, 1, LENGTH + PADDING, -1)
    with pytest.warns(UserWarning, match="all of these entered the statistics"):
        found = calibrated(model, {**batch, "attention_mask": pairs})
    assert {s.tokens for s in statistics(found).values()} == {ROWS * (LENGTH + PADDING)}


@pytest.mark.core
def test_packed_sequences_are_text_as_a_whole(model: Any) -> None:
    x = texts()
    batch = {"input_ids": x.view(1, -1), "position_ids": torch.arange(LENGTH).repeat(ROWS)[None]}
    assert {s.tokens for s in statistics(calibrated(model, batch)).values()} == {ROWS * LENGTH}
    # Numbers of sequences, with zero for padding behind them.
    numbers = torch.tensor([[1] * 8 + [2] * 12 + [0] * 4])
    found = calibrated(Straight().eval(), {"x": torch.randn(1, 24, 64), "attention_mask": numbers})
    assert {s.tokens for s in statistics(found).values()} == {20}


@pytest.mark.core
def test_generate_leaves_padding_out(model: Any) -> None:
    x = texts()[:1]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    once, other = (fp4pass.prepare(copy.deepcopy(model)) for _ in range(2))
    once.generate(x, attention_mask=torch.ones_like(x), **options)
    other.generate(**padded("left", x), **options)
    assert_same_statistics(once, other, 1e-4)


@pytest.mark.core
def test_scales_of_the_cache_are_of_visible_tokens(model: Any) -> None:
    with torch.no_grad():
        loud = copy.deepcopy(model)
        # Padding alone has a first number, which makes the largest keys and values.
        loud.model.embed_tokens.weight[:, 0] = 0
        loud.model.embed_tokens.weight[0] = torch.eye(64)[0]
        attention = loud.model.layers[0].self_attn
        attention.k_proj.weight[:, 0] = attention.v_proj.weight[:, 0] = 50
    batches = {"input_ids": texts()}, padded(), {"input_ids": padded()["input_ids"]}
    bare, hidden, shown = (
        fp4pass.convert(calibrated(loud, batch, kv_cache="fp8"), "nvfp4", kv_cache="fp8")
        for batch in batches
    )
    assert_same_bits(bare, hidden)
    # The largest of all batches, not of the last.
    both = fp4pass.convert(
        calibrated(loud, batches[2], batches[0], kv_cache="fp8"), "nvfp4", kv_cache="fp8"
    )
    scales = (each.model.layers[0].self_attn.k_scale for each in (both, shown))
    assert torch.equal(*scales)
    scales = (each.model.layers[0].self_attn.k_scale for each in (shown, hidden))
    assert torch.gt(*scales).all()


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("llama4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"sequential": True}, marks=pytest.mark.slow)],
    ids=["whole", "sequential"],
)
def test_padding_reaches_no_expert(kind: str, options: dict[str, Any]) -> None:
    model = build("llama4") if kind == "llama4" else mixture(kind)
    found = [
        fp4pass.convert(calibrated(model, batch, **options), "nvfp4")
        for batch in ({"input_ids": texts()}, padded())
    ]
    one, other = (fp4pass.report(each).converted for each in found)
    assert [row.tokens for row in one] == [row.tokens for row in other]
    assert [row.expert_tokens for row in one] == [row.expert_tokens for row in other]
    assert [row.unreached for row in one] == [row.unreached for row in other]
    assert_same_bits(*found)


def pair(side: str = "right") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Texts and answers bare, and both padded to one length."""
    x, y = texts(), texts()[:, :4].flip(0)
    long = padded(side, x)
    wide = y.new_zeros(ROWS, LENGTH + PADDING - 4)
    bare = {"input_ids": x, "decoder_input_ids": y}
    mask = torch.cat([torch.ones_like(y), torch.zeros_like(wide)], 1)
    answers = {"decoder_input_ids": torch.cat([y, wide], 1), "decoder_attention_mask": mask}
    return bare, {**long, **answers}


@pytest.mark.core
@pytest.mark.parametrize("masked", [True, False], ids=["both", "encoder"])
def test_encoder_and_decoder_have_masks_of_their_own(masked: bool) -> None:
    model = build("t5")
    bare, long = pair()
    if not masked:
        # All of the decoder's tokens count, though they are as many as the encoder's.
        del long["decoder_attention_mask"]
        bare["decoder_input_ids"] = long["decoder_input_ids"]
    one, other = calibrated(model, bare), calibrated(model, long)
    assert_same_statistics(one, other, 1e-4)
    found = [calibrated(model, batch, sequential=True) for batch in (bare, long)]
    reports = [fp4pass.report(fp4pass.convert(each, "nvfp4")).converted for each in found]
    assert [row.tokens for row in reports[0]] == [row.tokens for row in reports[1]]


@pytest.mark.core
def test_pooled_inputs_are_said_to_count() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = fp4pass.prepare(transformers.BertModel(config).eval())
    with pytest.warns(UserWarning, match="all of these entered the statistics"):
        fp4pass.calibrate(model, [padded(), padded(), padded()], progress=False)
    tokens = {name: stats.tokens for name, stats in statistics(model).items()}
    assert tokens.pop("pooler.dense") == 3 * ROWS
    assert set(tokens.values()) == {3 * ROWS * LENGTH}


def test_a_tower_of_images_counts_whole() -> None:
    model = vision_model()
    # As many tokens as the tower has patches and a class.
    ids = torch.tensor([[2048, 2048, 2048, 2048, 5]])
    images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    bare = {"input_ids": ids[:, :4], "pixel_values": images}
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    one = calibrated(model, bare)
    other = calibrated(model, {**bare, "input_ids": ids, "attention_mask": mask})
    assert_same_statistics(one, other, 1e-4)
    tokens = {name: stats.tokens for name, stats in statistics(other).items()}
    assert {n for name, n in tokens.items() if "language_model" in name} == {4}
    assert {n for name, n in tokens.items() if "encoder" in name} == {5}


def graphs(model: Any, example: Any, **options: Any) -> Iterator[Any]:
    for _ in range(2):
        yield fp4pass.prepare(fp4pass.trace(copy.deepcopy(model), example, **options))


def test_exported_graphs_and_copies_of_them_leave_padding_out() -> None:
    x, long, mask = rows()
    one, other = graphs(Straight().eval(), {"x": long, "attention_mask": mask})
    copied = copy.deepcopy(other)
    with torch.no_grad():
        one(x=x, attention_mask=torch.ones(x.shape[:2], dtype=torch.int64))
        for graph in (other, copied):
            graph(x=long, attention_mask=mask)
            assert_same_statistics(one, graph)


@pytest.mark.slow
def test_compiled_models_leave_padding_out() -> None:
    one, other = (fp4pass.prepare(Straight().eval()) for _ in range(2))
    code = torch.compile(other, backend="aot_eager", fullgraph=True)
    x, long, mask = rows()
    with torch.no_grad():
        for length in (LENGTH, LENGTH - 2):
            start = LENGTH - length
            one(x=x[:, start:])
            code(x=long[:, start:], attention_mask=mask[:, start:])
        one(x=x)
        code(x=x)
    assert_same_statistics(one, other)


@pytest.mark.core
def test_the_share_of_padding_is_told(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fp4pass"):
        found = fp4pass.convert(calibrated(model, padded(), {"input_ids": texts()}), "nvfp4")
    hidden = ROWS * PADDING
    assert f"hides {hidden} of {2 * ROWS * LENGTH + hidden} tokens (23.8 %)" in caplog.text
    calibration = found.__dict__["_fp4pass_state"].recipe["calibration"]
    assert calibration["hidden"] == hidden
    assert calibration["tokens"] == 2 * ROWS * LENGTH


@pytest.mark.core
def test_a_call_that_is_cut_off_leaves_no_mask_behind(model: Any) -> None:
    own = fp4pass.prepare(copy.deepcopy(model))
    handle = own.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        own(**padded())
    handle.remove()
    before = statistics(own)["model.layers.0.self_attn.q_proj"].tokens
    own.model.layers[0].self_attn.q_proj(torch.randn(ROWS, LENGTH + PADDING, 64))
    after = statistics(own)["model.layers.0.self_attn.q_proj"].tokens
    assert after - before == ROWS * (LENGTH + PADDING)


@pytest.mark.core
def test_layer_errors_are_of_visible_tokens() -> None:
    x, long, mask = rows(hidden=1e4)
    reference = Straight().eval()
    packed = fp4pass.convert(copy.deepcopy(reference), method="naive", weight_only=True)
    batches = ([{"x": x}], [{"x": long, "attention_mask": mask}])
    one, other = (output_errors(packed, reference, each, progress=False) for each in batches)
    assert one == pytest.approx(other, rel=1e-6)
    assert not reference._forward_pre_hooks and not reference._forward_hooks
