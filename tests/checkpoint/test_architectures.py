"""Every architecture of transformers that can be made small: stock transformers reads our folder.

Either each tensor comes back to the bit, or `save` has warned that it cannot, or loading raises;
never random weights in silence. eval/architectures.py keeps what is found.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import bits
from torch import nn

import fp4pass
from fp4pass.checkpoint.layouts import Piece
from fp4pass.checkpoint.model_layers import describe_layers, split_stacks
from fp4pass.nn.experts import QuantizedExpertStack as ExpertStacks
from fp4pass.nn.linear import QuantizedLinear
from fp4pass.record.state import get_state

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

# What makes a config small, by the names that configs have for it.
SIZES = {
    64: """hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim
        encoder_hidden_size decoder_hidden_size q_lora_rank projection_dim max_position_embeddings
        n_positions seq_length hidden_dim""",
    96: """intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dim_feedforward
        ffn_hidden_size intermediate_size_mlp encoder_intermediate_size decoder_intermediate_size
        d_inner""",
    32: """moe_intermediate_size shared_expert_intermediate_size kv_lora_rank expert_ffn_hidden_size
        image_size index_head_dim""",
    16: """head_dim d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim state_size d_head
        patch_size attention_head_size global_head_dim""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads num_experts
        decoder_attention_heads num_local_experts n_routed_experts moe_num_experts""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_key_value_heads num_decoder_layers num_encoder_layers num_experts_per_tok moe_k
        num_kv_heads n_head_kv encoder_num_hidden_layers decoder_num_hidden_layers moe_topk""",
    160: "vocab_size",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
MOST_PARAMETERS = 3_000_000

FORMATS = ("nvfp4", "mxfp4")
# For what has experts that transformers cannot read.
RULE = ("*.experts.*", {"fmt": "mxfp4a16"})
RULED, DROPPED = "nvfp4, experts mxfp4", "said: it drops the global scales of experts"
CANNOT = "transformers cannot load this folder by itself"


def shrink(data: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config with its sizes made small, those of nested configs too."""
    found = {}
    for name, value in data.items():
        if isinstance(value, dict):
            value = shrink(value)
        elif type(value) is int and name in SMALL:
            value = min(value, SMALL[name])
        elif type(value) is int and name.endswith("_token_id") and value >= SMALL["vocab_size"]:
            value = 3
        elif name == "layer_types" and isinstance(value, list):
            value = value[-2:]
        found[name] = value
    return found


def architectures() -> Iterator[tuple[str, str]]:
    """Yield the name of a class of a model, and that of its config."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        for kind, classes in names.items():
            for name in [classes] if isinstance(classes, str) else classes:
                if kind not in seen and hasattr(transformers, name):
                    seen.add(kind)
                    yield kind, name


def small_model(kind: str, name: str) -> nn.Module | None:
    """Return a small model with random weights in bfloat16, None for what cannot be made so."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    # Configs of 400 kinds have their own ways to refuse sizes that do not fit each other, and warn.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = cls.config_class.from_dict(shrink(cls.config_class().to_dict()))
            with torch.device("meta"):
                size = sum(each.numel() for each in cls(config).parameters())
            return None if size > MOST_PARAMETERS else cls(config).bfloat16().eval()
        except Exception:
            return None


def outcome(fmt: str, kind: str, name: str, folder: Path, rules: Sequence[Any] = ()) -> str:
    """Return what becomes of a model in a few words, "-" if it cannot be made small."""
    shutil.rmtree(folder, ignore_errors=True)
    model = small_model(kind, name)
    if model is None:
        return "-"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fp4pass.convert(model, fmt, method="sse", weight_only=True, rules=rules)
            fp4pass.save(model, folder)
        except fp4pass.errors.StateError:
            return "no linear layer"
    if not (folder / "model.safetensors").exists():
        return "own layout"
    said = [str(each.message).partition(f"{CANNOT}: ")[2] for each in caught]
    if any(said):
        return f"said: {re.split('; | [(]|[.] ', ''.join(said))[0]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = type(model).from_pretrained(folder)
        except Exception as error:
            return f"raises: {type(error).__name__}: {str(error)[:100]}"
    there = dict(loaded.named_modules())
    wrong = [name for name, each in packed(model) if not is_same(each, there[name])]
    there = dict(loaded.state_dict())
    stacks = [(n, each) for n, each in model.named_modules() if isinstance(each, ExpertStacks)]
    state = get_state(model)
    assert state is not None
    split = split_stacks(model, describe_layers(model, state))
    for n, each in stacks:
        if n in there:
            same = torch.equal(there[n], each.weight.to(there[n].dtype))
        else:
            same = is_same_in_pieces(split[n].pieces, each, there)
        wrong += [] if same else [n]
    dense = [
        name
        for name, each in model.named_parameters()
        if name in there and not torch.equal(each, there[name].to(each.dtype))
    ]
    missing = [name for name, _ in model.named_parameters() if name not in there]
    if problems := [*wrong, *dense, *missing]:
        return f"silent: {len(problems)}: {', '.join(problems[:3])}"
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    return "equal: dequantized" if declared.get("dequantize") else "equal"


def is_same_in_pieces(pieces: Sequence[Piece], stack: ExpertStacks, there: Any) -> bool:
    """Whether a linear layer for each expert has its share of what a stack stores."""
    for piece in pieces:
        rows = slice(piece.start, piece.stop)
        for part in ("weight_packed", "weight_scale"):
            ours = stack.get_buffer(part)[piece.expert, rows].view(torch.uint8)
            if not torch.equal(ours, there[f"{piece.name}.{part}"].view(torch.uint8)):
                return False
        scales = stack.weight_global_scale
        theirs = there.get(f"{piece.name}.weight_global_scale")
        if scales is not None and not torch.equal(scales[piece.expert, None], theirs):
            return False
    return True


def packed(model: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    return [(n, each) for n, each in model.named_modules() if isinstance(each, QuantizedLinear)]


def is_same(ours: QuantizedLinear, theirs: Any) -> bool:
    """Whether a layer that transformers loaded has the tensors of ours."""
    if getattr(theirs, "weight_packed", None) is None:
        weight = getattr(theirs, "weight", None)
        return weight is not None and torch.equal(weight, ours.weight.to(weight.dtype))
    pairs = [(getattr(theirs, name, None), getattr(ours, name)) for name in ours.packed_buffers]
    return all(b is None or (a is not None and has_same_bits(a, b)) for a, b in pairs)


def has_same_bits(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether tensors are equal; a class that keeps every `scale` in float32 widens scales."""
    if theirs.dtype == torch.float32 and ours.dtype == torch.float8_e4m3fn:
        theirs = theirs.to(ours.dtype)
    return torch.equal(bits(theirs), bits(ours))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_architecture_is_read_wrongly_in_silence(fmt: str, tmp_path: Path) -> None:
    found = {kind: outcome(fmt, kind, name, tmp_path / "q") for kind, name in architectures()}
    assert not {kind: what for kind, what in found.items() if what.startswith("silent")}
    assert sum(each.startswith("equal") for each in found.values()) >= 250
    names = dict(architectures())
    for kind in (kind for kind, what in found.items() if what == DROPPED):
        assert outcome(fmt, kind, names[kind], tmp_path / "q", [RULE]).startswith("equal")
