"""Experts without the decorator of transformers: what others run through, they do too."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from mixtures import UNDECORATED, UNREAD, build, ids, logits, modules, twin

import fp4pass
from fp4pass.nn.experts import QuantizedExperts, QuantizedExpertStack
from fp4pass.quantization.observers.observer import ExpertObserver

pytest.importorskip("transformers")

every_model = pytest.mark.parametrize("name", UNDECORATED)


def converted(name: str, fmt: str = "nvfp4", **options: Any) -> Any:
    options = {"method": "sse", "weight_only": True, "rules": UNREAD.get(name, ()), **options}
    return fp4pass.convert(build(name), fmt, **options)


def stacks(model: Any) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedExpertStack)}


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_it_generates_copies_and_computes_gradients(name: str) -> None:
    """Also one with the decorator, biases, and a gate of its own."""
    model = converted(name)
    reference = twin(build(name), model)
    options = {"max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4}
    prompt = {"input_ids": ids(0, 2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    wanted = reference.generate(**prompt, **options)
    one = [logits(each, ids(0, 1, 1)) for each in (model, reference)]
    torch.testing.assert_close(*one, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.generate(**prompt, **options), wanted)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(**prompt, **options, **static), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    for each in (copy.deepcopy(model), again, converted(name, method="naive")):
        each.load_state_dict(model.state_dict())
        assert torch.equal(logits(each), logits(model))
        assert any(isinstance(m, QuantizedExperts) for m in each.modules())
    grads = []
    for each in (model, reference):
        x = each.get_input_embeddings()(ids(0, 1, 9)).detach().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3 * float(grads[1].abs().max()))


@pytest.mark.slow
@every_model
def test_it_compiles_whole(name: str) -> None:
    model = converted(name, weight_only=False)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        # With a cache, torch 2.11 cannot trace what transformers makes for Step 3.7.
        return model(x, use_cache=False).logits

    for x in (ids(), ids(1, 3, 17)):
        with torch.no_grad():
            torch.testing.assert_close(run(x), logits(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
@every_model
def test_it_is_quantized_while_it_is_read_and_made_dense_again(name: str, tmp_path: Path) -> None:
    from fp4pass.integrations import Fp4PassConfig

    original, model = build(name), converted(name)
    original.save_pretrained(tmp_path)
    config = Fp4PassConfig(rules=UNREAD.get(name, ()))
    read = (
        type(original)
        .from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
        .eval()
    )
    assert torch.equal(logits(read), logits(model))
    for key, stack in stacks(model).items():
        assert torch.equal(modules(read)[key].weight_packed, stack.weight_packed)
    dense = read.dequantize() or read
    reference = twin(original, model)
    assert list(dense.state_dict()) == list(reference.state_dict())
    assert [type(m) for m in dense.modules()] == [type(m) for m in reference.modules()]
    for key, tensor in reference.state_dict().items():
        assert torch.equal(dense.state_dict()[key], tensor), key
    assert torch.equal(logits(dense), logits(reference))


@pytest.mark.quick(1)
@every_model
def test_a_stack_beside_packed_ones_stays_dense(name: str, tmp_path: Path) -> None:
    """Also one that a child of the module of experts holds."""
    keys = list(zoo.stacks(build(name)))
    rules = [*UNREAD.get(name, ()), *((key, None) for key in keys[1::2])]
    model = converted(name, rules=rules)
    assert list(stacks(model)) == keys[::2]
    reference = twin(build(name), model)
    fp4pass.save(model, tmp_path / "q", layout="fp4pass")
    for each in (model, copy.deepcopy(model), fp4pass.load(tmp_path / "q")):
        assert torch.equal(logits(each), logits(reference))
        assert list(each.state_dict()) == list(model.state_dict())
    assert all(key in model.state_dict() for key in keys[1::2])


def test_inputs_that_are_of_no_expert_are_not_kept() -> None:
    """Of Llama 4 most are, for each expert has a copy of all tokens."""
    observer = ExpertObserver(("hessian",), 4, 64, second=False, keep=True)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[4], [1], [4], [0], [4], [3]])
    observer.hook(torch.nn.Module(), (x, chosen, torch.ones(6, 1)), {})
    ((kept, experts),) = observer._inputs
    assert torch.equal(kept, x[[1, 3, 5]]) and experts.flatten().tolist() == [1, 0, 3]


def test_gate_and_up_that_are_apart_share_a_global_scale() -> None:
    """As linears that read one input do: for each expert, from the larger of both magnitudes."""
    original = build("dbrx")
    experts = original.transformer.blocks[0].ffn.experts
    with torch.no_grad():
        experts.mlp.w1[32:64] *= 8
    stored = fp4pass.convert(original, method="sse", weight_only=True).transformer.blocks[0]
    gate, up = (getattr(stored.ffn.experts.mlp, key).weight_global_scale for key in ("w1", "v1"))
    assert torch.equal(gate, up) and gate[1] == gate[0] / 8
    assert not torch.equal(gate, stored.ffn.experts.mlp.w2.weight_global_scale)
