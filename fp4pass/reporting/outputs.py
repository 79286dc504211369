"""The outputs of a packed model against those of a float model with the dequantized weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..evaluation import evaluate, fast_dtype
from ..kernels.experts.naive import chosen
from ..nn.experts import (
    QUANTIZED,
    QuantizedExperts,
    QuantizedExpertStack,
    convert_experts,
    packed_stacks,
    quantize_pairs,
    set_weight,
    stacks_of,
)
from ..nn.linear import QuantizedLinear, quantize_input
from .compare import relative_error

# Read in place of a text; their perplexity says nothing of a model.
RANDOM = "random tokens"


@dataclass(frozen=True)
class Outputs:
    """The distance of the outputs of a packed model from those of a dense one."""

    text: str
    tokens: int
    logits: float  # |difference| / |logits| of the dense one
    kl: float  # nats per token
    perplexity: float
    dense_perplexity: float
    # Rounding inputs to 4 bits turns a last bit into a step of the format.
    quantizes_inputs: bool

    def mismatches(self) -> dict[str, str]:
        """Return what is above its bound."""
        logits, kl, perplexity = (0.1, 1e-2, 2e-2) if self.quantizes_inputs else (0.02, 1e-3, 5e-3)
        change = abs(self.perplexity / self.dense_perplexity - 1)
        found = {"logits": (self.logits, logits), "KL": (self.kl, kl)}
        found["perplexity"] = (change, perplexity)
        return {
            name: f"{value:.3g} away from the dequantized weights, above {bound}"
            for name, (value, bound) in found.items()
            if not value <= bound
        }

    def __str__(self) -> str:
        found = (
            f"outputs on {self.tokens:,} tokens ({self.text}) against the dequantized weights: "
            f"logits differ by {self.logits:.2g}, KL {self.kl:.2g}"
        )
        if self.text == RANDOM:
            return found
        return f"{found}, perplexity {self.perplexity:,.5g} and {self.dense_perplexity:,.5g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them; of random tokens the perplexities are null."""
        found = asdict(self)
        if self.text == RANDOM:
            found |= {"perplexity": None, "dense_perplexity": None}
        return found


def random_tokens(model: Any, windows: int, length: int) -> Tensor | None:
    """Return tokens [windows, length] of any text; None for a model that is no causal one."""
    config = getattr(model, "config", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if config is None or head is None or getattr(config, "is_encoder_decoder", False):
        return None
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (windows, length), generator=generator)


@torch.no_grad()
def compare_outputs(model: nn.Module, reference: nn.Module, ids: Tensor, text: str) -> Outputs:
    """Run both on ids [windows, length]; the reference gets the dequantized weights, in place."""
    quantizes_inputs = False
    for name, module in model.named_modules(remove_duplicate=False):
        quantizes_inputs |= isinstance(module, QUANTIZED) and not module.config.weight_only
        if isinstance(module, QuantizedExperts):
            # The twin computes in the same way with the stored weights.
            _swap_experts(module, reference.get_submodule(name))
        elif isinstance(module, QuantizedLinear):
            dense: Any = reference.get_submodule(name)
            device = dense.weight.device
            # As it is stored: rotating it back would round once more than the packed model does.
            stored = module.stored_weight(module.weight_dtype).to(device)
            stored = stored.t() if module.transposed else stored
            dense.weight = nn.Parameter(stored, requires_grad=False)
            if module.config.rotation or not module.config.weight_only:
                dense.register_forward_pre_hook(partial(_stored_input, module))
    device = next(model.parameters()).device
    first = ids[:1].to(device)
    with fast_dtype(model, reference):
        wanted, given = reference(first).logits, model(first).logits
    found = evaluate(model, None, ids, reference)
    return Outputs(
        text=text,
        tokens=found.tokens,
        logits=relative_error(wanted, given),
        kl=found.kl or 0.0,
        perplexity=found.perplexity,
        dense_perplexity=evaluate(reference, None, ids).perplexity,
        quantizes_inputs=quantizes_inputs,
    )


def _swap_experts(packed: QuantizedExperts, dense: nn.Module) -> None:
    """Give the experts of the dense model the weights that those of the packed one store."""
    # A last bit may choose other experts, so that they must round as the packed ones do.
    convert_experts(dense)
    twins = stacks_of(dense)
    for name, stack in packed_stacks(packed).items():
        stored = stack.stored_weight(stack.weight_dtype).to(twins[name].dense.device)
        set_weight(twins[name], nn.Parameter(stack.view.parameter(stored), requires_grad=False))
        if stack.config.rotation or not stack.config.weight_only:
            twins[name].register_forward_pre_hook(partial(_stored_pairs, stack))


def _stored_pairs(
    packed: QuantizedExpertStack, dense: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    x, ids = args
    weight, config = packed.packed_weight, packed.config
    scales = weight.input_global_scale
    if config.weight_only or scales is None or len(scales) == 1:
        return _stored_input(packed, dense, args), ids
    # Experts with a scale each read rows of their own.
    codes, bits, _ = quantize_pairs(x, ids, weight, config)
    rows = torch.empty((*ids.shape, x.shape[-1]), dtype=x.dtype, device=x.device)
    for index, pairs in chosen(ids, len(scales)):
        own = scales[index : index + 1]
        rows[pairs] = ops.dequantize(codes[pairs], bits[pairs], own, config.format.key, x.dtype)
    return rows, ids


def _stored_input(
    packed: QuantizedLinear | QuantizedExpertStack, dense: nn.Module, args: tuple[Tensor, ...]
) -> Tensor:
    """Return the input that the packed layer multiplies its weight by, in float."""
    config = packed.config
    if config.weight_only:
        return ops.rotate(args[0], config.rotation)
    codes, scale, global_scale = quantize_input(args[0], packed.packed_weight, config)
    return ops.dequantize(codes, scale, global_scale, config.format.key, args[0].dtype)
