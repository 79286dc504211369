"""Small models of many kinds, and plain references to check fp4pass against.

A `Case` says how to build a model, how to run it, and which of its matrices must be left alone.
Every model has random float32 weights, about two layers, hidden size 64 and a vocabulary of 96.
Nothing here imports fp4pass, and transformers and accelerate are imported by the builders only,
so that the cases that need neither run without them (see `Case.requires`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import expert_classes
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
HIDDEN = 64
VOCAB = 96
BLOCK = 32

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One model and what a test needs to know about it.

    build: a new model, the same weights on every call, in eval mode.
    run: runs batch number i on the model's device and returns a float tensor. Shapes differ from
        one i to the next; the same i gives the same batch.
    generate: greedy generation with a cache; returns token ids [batch, tokens].
    skipped: glob on a module or parameter name -> a word (any case) of the reason why.
    example: args and kwargs for torch.export; None where the float model does not export.
    compiles: the float model compiles with fullgraph=True.
    grad: `run` leaves gradients on, so its result can be backpropagated.
    requires: modules without which the case must be skipped.
    """

    name: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, int], Tensor]
    generate: Callable[[nn.Module], Tensor] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    example: Callable[[], Inputs] | None = None
    compiles: bool = True
    grad: bool = False
    requires: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def tensor_of(output: Any) -> Tensor:
    """The float tensor to compare: a tensor itself, else logits, else the last hidden state."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def device_of(model: nn.Module) -> torch.device:
    """The device a model runs on, whether its weights are parameters, buffers or offloaded."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            if tensor.device.type != "meta":
                return tensor.device
    return torch.device("cpu")


def _built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Seed it, and leave no bias zero, which would hide that a layer forgot it, and no norm one."""

    @functools.wraps(make)
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = make()
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval()

    return build


def _generator(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + i)


def _sizes(i: int) -> tuple[int, int]:
    """Batch and sequence length of batch i: 2 x 9, 3 x 15, 1 x 21, 2 x 27, 3 x 9, ...

    The longest ones exceed the sliding windows and the chunk of the state space models, both 16.
    """
    return (2, 3, 1)[i % 3], 9 + 6 * (i % 4)


def _ids(i: int, batch: int, length: int) -> Tensor:
    # 0 and 1 are padding and end of text.
    return torch.randint(2, VOCAB, (batch, length), generator=_generator(i))


def _padding_mask(batch: int, length: int) -> Tensor:
    """1 for a token, 0 for padding on the right: row r has r paddings. [batch, length] int64."""
    return (torch.arange(length) < length - torch.arange(batch).unsqueeze(1)).long()


def _text(i: int) -> Inputs:
    """Token ids, every other time with padding and its mask."""
    batch, length = _sizes(i)
    kwargs = {"input_ids": _ids(i, batch, length)}
    if i % 2:
        kwargs["attention_mask"] = _padding_mask(batch, length)
    return (), kwargs


def _floats(i: int) -> Inputs:
    """[batch, length, HIDDEN] floats, every other time [batch, HIDDEN]."""
    batch, length = _sizes(i)
    shape = (batch, HIDDEN) if i % 2 else (batch, length, HIDDEN)
    return (torch.randn(shape, generator=_generator(i)),), {}


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    args, kwargs = inputs

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return tuple(map(move, args)), {k: move(v) for k, v in kwargs.items()}


def _runner(
    inputs: Callable[[int], Inputs], call: Callable[..., Any] | None = None, grad: bool = False
) -> Callable[[nn.Module, int], Tensor]:
    def run(model: nn.Module, i: int) -> Tensor:
        args, kwargs = _moved(inputs(i), device_of(model))
        with torch.set_grad_enabled(grad):
            return tensor_of(call(model, *args, **kwargs) if call else model(*args, **kwargs))

    return run


def _greedy(prompt: Callable[[int], Inputs]) -> Callable[[nn.Module], Tensor]:
    def generate(model: nn.Module) -> Tensor:
        args, kwargs = _moved(prompt(0), device_of(model))
        with torch.no_grad(), warnings.catch_warnings():
            # Some versions of transformers take an offloaded model to be on meta.
            warnings.filterwarnings("ignore", "You are calling .generate")
            return model.generate(
                *args, **kwargs, do_sample=False, use_cache=True, max_new_tokens=4, min_new_tokens=4
            )

    return generate


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **_SPECIAL,
}
_OUTPUT_LEFT = {"lm_head": "embedding"}


def _transformers(
    kind: str, task: str = "ForCausalLM", config: str = "Config", **options: Any
) -> Callable[[], nn.Module]:
    """A model of transformers by its class, and the options of its config."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, kind + config)(**options)
        return getattr(transformers, kind + task)(made)

    return _built(make)


def _decoder(kind: str, config: str = "Config", **options: Any) -> Callable[[], nn.Module]:
    return _transformers(kind, config=config, **_DECODER | options)


_llama = functools.partial(_decoder, "Llama", head_dim=16)


def _text_example() -> Inputs:
    return (), {"input_ids": _ids(0, 2, 9), "use_cache": False}


def _causal(name: str, build: Callable[[], nn.Module], **changes: Any) -> Case:
    options = {"run": _runner(_text), "generate": _greedy(_text), "skipped": _OUTPUT_LEFT}
    options |= {"example": _text_example, "requires": ("transformers",)}
    return Case(name, build, **options | changes)


def _gradient_checkpointing() -> nn.Module:
    model = _llama()()
    model.config.use_cache = False
    # Newer versions of transformers call it activation checkpointing.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    return model.train()


def _cpu_offload() -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(_llama()(), execution_device=torch.device("cpu"))


_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
_YARN["original_max_position_embeddings"] = 64
_GPT2 = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 128}
_STATE_SPACE = {"expand": 2, "num_heads": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16}
_STATE_SPACE |= {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "head_dim": 16}
_EXPERTS = {"head_dim": 16, "num_experts_per_tok": 2}


def _routers(pattern: str) -> dict[str, str]:
    return {"lm_head": "embedding", f"model.layers.*.{pattern}": "router"}


_CAUSAL_CASES = (
    _causal("llama", _llama()),
    _causal("llama_tied", _llama(tie_word_embeddings=True)),
    _causal("qwen3", _decoder("Qwen3", head_dim=16)),
    _causal(
        "gemma3",
        _decoder("Gemma3", "TextConfig", head_dim=16, query_pre_attn_scalar=16, **_SLIDING),
    ),
    _causal("phi3", _decoder("Phi3")),
    _causal("gpt2", _transformers("GPT2", "LMHeadModel", **_GPT2, **_SPECIAL)),
    _causal(
        "qwen3_moe",
        _decoder("Qwen3Moe", moe_intermediate_size=32, num_experts=4, **_EXPERTS),
        skipped=_routers("mlp.gate*"),
    ),
    _causal(
        "gpt_oss",
        _decoder("GptOss", num_local_experts=4, rope_parameters=_YARN, **_SLIDING, **_EXPERTS),
        skipped=_routers("mlp.router*"),
    ),
    _causal(
        "llama4",
        _decoder(
            "Llama4", "TextConfig", head_dim=16, intermediate_size_mlp=64, num_local_experts=4
        ),
        skipped=_routers("feed_forward.router"),
    ),
    _causal("mamba2", _transformers("Mamba2", **_STATE_SPACE, **_SPECIAL)),
    # Hooks wrap the instance's forward and stay outside compiled graphs; weights are on meta.
    _causal(
        "llama_cpu_offload",
        _cpu_offload,
        example=None,
        compiles=False,
        requires=("transformers", "accelerate"),
    ),
    _causal(
        "llama_gradient_checkpointing",
        _gradient_checkpointing,
        run=_runner(_text, grad=True),
        generate=None,
        grad=True,
    ),
)


def _images(i: int) -> Inputs:
    """Images of the size the model was made for, every other time larger."""
    size = 48 if i % 2 else 32
    pixels = torch.randn(_sizes(i)[0], 3, size, size, generator=_generator(i))
    return (), {"pixel_values": pixels, "interpolate_pos_encoding": size != 32}


def _text_pair(i: int) -> Inputs:
    batch, length = _sizes(i)
    kwargs = _text(i)[1] | {"decoder_input_ids": _ids(i + 100, batch, length - 4)}
    return (), kwargs


# Their decoders copy a config, which Dynamo of torch 2.11 cannot.
_DYNAMO_COPIES = TORCH_VERSION > (2, 11)


_ENCODER = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER["intermediate_size"] = 96
_T5 = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 16, "d_ff": 96, "num_layers": 2}
_T5 |= {"num_heads": 4, "feed_forward_proj": "gated-gelu"}
_T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


_ENCODER_CASES = (
    Case(
        "bert",
        _transformers(
            "Bert",
            "ForMaskedLM",
            vocab_size=VOCAB,
            max_position_embeddings=128,
            pad_token_id=0,
            **_ENCODER,
        ),
        _runner(_text),
        skipped={"cls.predictions.decoder": "embedding", "cls.predictions.transform.dense": "head"},
        example=lambda: ((), {"input_ids": _ids(0, 2, 9)}),
        requires=("transformers",),
    ),
    Case(
        "vit",
        _transformers(
            "ViT", "ForImageClassification", image_size=32, patch_size=8, num_labels=10, **_ENCODER
        ),
        _runner(_images),
        skipped={"classifier": "head", "*.position_embeddings": "dimensions"},
        example=lambda: ((), {"pixel_values": _images(0)[1]["pixel_values"]}),
        requires=("transformers",),
    ),
    Case(
        "t5",
        _transformers("T5", "ForConditionalGeneration", **_T5),
        _runner(_text_pair),
        generate=_greedy(_text),
        skipped=_OUTPUT_LEFT,
        example=lambda: ((), _text_pair(0)[1] | {"use_cache": False}),
        compiles=_DYNAMO_COPIES,
        requires=("transformers",),
    ),
)


class UsedTwice(nn.Module):
    """One Linear, called twice with inputs of different statistics, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(input=F.gelu(self.proj(x)))


class SharedWeight(nn.Module):
    """Two Linears with one weight Parameter and different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(HIDDEN, 128),
        nn.GELU(),
        nn.Linear(128, HIDDEN, bias=False),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )


def _transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, dim_feedforward=96, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


def _sequences(i: int) -> Inputs:
    return (torch.randn(*_sizes(i), HIDDEN, generator=_generator(i)),), {}


def _padded_sequences(i: int) -> Inputs:
    return _sequences(i)[0], {"src_key_padding_mask": _padding_mask(*_sizes(i)) == 0}


def _padded_example() -> Inputs:
    # No padding in it, so that the fused and the plain path agree (see _call_padded).
    args, kwargs = _padded_sequences(0)
    return args, {name: torch.zeros_like(mask) for name, mask in kwargs.items()}


def _call_padded(model: nn.Module, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:
    """Torch's fused path returns zeros for padding, its plain path does not: zeros for both."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        output = model(src, src_key_padding_mask=src_key_padding_mask)
    return output.masked_fill(src_key_padding_mask.unsqueeze(-1), 0.0)


_ATTENTION_LEFT = {
    "layers.*.self_attn.in_proj_weight": "MultiheadAttention",
    "layers.*.self_attn.out_proj": "MultiheadAttention",
}

# In torch 2.11 the fused operator of nn.TransformerEncoderLayer takes no dynamic shapes.
_FUSED_COMPILES = TORCH_VERSION > (2, 11)


def _plain(name: str, make: Callable[[], nn.Module]) -> Case:
    return Case(name, _built(make), _runner(_floats), example=lambda: _floats(0))


_TORCH_CASES = (
    _plain("mlp", _mlp),
    _plain("linear", lambda: nn.Linear(HIDDEN, 96)),
    _plain("used_twice", UsedTwice),
    _plain("shared_weight", SharedWeight),
    # In eval mode the layers hand their weights to one fused operator, call no child, and with a
    # padding mask they feed it nested tensors.
    Case(
        "transformer_encoder_padded",
        _built(_transformer_encoder),
        _runner(_padded_sequences, call=_call_padded),
        skipped=_ATTENTION_LEFT,
        example=_padded_example,
        compiles=_FUSED_COMPILES,
    ),
)

CASES: tuple[Case, ...] = (*_CAUSAL_CASES, *_ENCODER_CASES, *_TORCH_CASES)


def eligible_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears of an unprepared model that must be converted, by their first name.

    nn.Linear with its own forward, and Conv1D of transformers. Not: the output embeddings and what
    else stands beside a base model, a weight tied to an embedding, the out_proj of
    nn.MultiheadAttention, routers.
    """
    base = model._modules.get(getattr(model, "base_model_prefix", ""))
    inside = set((model if base is None else base).modules())
    left = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    left.add(id(getattr(model, "get_output_embeddings", lambda: None)()))
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}

    found = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not is_linear and type(module).__name__ != "Conv1D":
            continue
        if module not in inside or id(module) in left or id(module.weight) in embeddings:
            continue
        if name.rpartition(".")[2] in {"lm_head", "gate", "router"}:
            continue
        found[name] = module
    return found


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The stacked weights of an unprepared model's experts, each with the module that has it."""
    return {
        f"{name}.{key}": module
        for name, module in expert_classes.owners(model).items()
        for key in expert_classes.stack_names(module)
    }


@dataclass
class InputStatistics:
    """hessian: float64 [ceil(K / 32), 32, 32], sum of x x^T; count: how many rows x it holds;
    amax: the largest magnitude in them."""

    hessian: Tensor
    count: int = 0
    amax: float = 0.0

    def add(self, x: Tensor, mask: Tensor | None) -> None:
        """x: [..., K], without the tokens that a mask [B, T] hides, if it is of that size."""
        rows = x.detach().reshape(-1, x.shape[-1]).to("cpu", torch.float64)
        if mask is not None and x.shape[:-1] in (mask.shape, (mask.numel(),)):
            rows = rows[mask.flatten() == 1]
        rows = F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        self.hessian += torch.einsum("tbi,tbj->bij", rows, rows)
        self.count += len(rows)
        self.amax = max(self.amax, float(rows.abs().amax()))


def in_features(linear: nn.Module) -> int:
    return linear.weight.shape[1 if isinstance(linear, nn.Linear) else 0]


@contextmanager
def hook_reference(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, InputStatistics]]:
    """Collect the block Hessian of every call of the named linears while the context is open.

    Torch's fused attention paths are off meanwhile: nn.TransformerEncoderLayer calls its children,
    and nn.TransformerEncoder does not drop padding, just as when it is compiled or exported.
    """
    statistics: dict[str, InputStatistics] = {}
    # The mask of the call that runs; of no case are a decoder and its encoder of one size.
    masks: list[Tensor | None] = [None]

    def note_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "input_ids" in kwargs and (module is model or kwargs.get("attention_mask") is not None):
            masks[0] = kwargs.get("attention_mask")

    def adding_to(found: InputStatistics) -> Callable[..., None]:
        return lambda _, args, kwargs: found.add([*args, *kwargs.values()][0], masks[0])

    hooks: list[tuple[nn.Module, Callable[..., None]]] = [(m, note_mask) for m in model.modules()]
    for name in names:
        module = model.get_submodule(name)
        blocks = -(-in_features(module) // BLOCK)
        statistics[name] = InputStatistics(torch.zeros(blocks, BLOCK, BLOCK, dtype=torch.float64))
        hooks.append((module, adding_to(statistics[name])))
    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m, hook in hooks]
    try:
        with unfused():
            yield statistics
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unfused() -> Iterator[None]:
    """Turn torch's fused attention paths off, which call no linear, while the context is open."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
