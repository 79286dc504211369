"""Have a model write the text that it is calibrated on."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import is_compiled
from ..core.machine import memory_limits
from ..core.progress import current, shown
from ..errors import ABOVE_0, OptionError, expected, require_number
from ..quantization.observers.batches import device_of, require_loaded
from ..quantization.observers.observer import unobserved
from ..record.state import unwrap
from .processor import Target

_log = logging.getLogger(__name__)

# Windows that are written at once, at most: on a GPU, and elsewhere.
_GPU_ROWS, _CPU_ROWS = 1024, 64

# Windows from which on compiling a step, 40 s, gains time on a GPU.
_COMPILED = 1 << 12

# Tokens of a config that stand for images and sound, which are no text.
_KINDS = ("image", "video", "audio", "vision")

_GIVE_DATA = (
    'Give calibration data: fp4pass.calibrate(model, data=["a text", "another", ...], ...).'
)

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """The tokens of a window that are given, and where the model writes."""

    prompt: Tokens
    ends: frozenset[int]  # tokens that end a text: the next one begins behind
    # Of a conversation, round after round: the tokens that end what the model writes, and for each
    # the tokens that follow from the template; () for one text until it ends.
    turns: tuple[Mapping[Tokens, Tokens], ...] = ()

    def follow(self) -> Generator[int | None, int, None]:
        """Yield each token that comes next, None where the model chooses: it is sent then."""
        turn, own = 0, list[int]()
        while True:
            token = yield None
            own.append(token)
            ended = self.turns[turn] if self.turns else {}
            given = next((ended[stop] for stop in ended if tuple(own[-len(stop) :]) == stop), None)
            if given is not None:
                turn, own = (turn + 1) % len(self.turns), []
            elif token in self.ends:
                turn, own = 0, []
                # A model whose texts end and begin with one token has begun the next one.
                given = () if self.prompt == (token,) else self.prompt
            yield from given or ()


def sample(
    model: nn.Module,
    tokenizer: Any,
    *,
    tokens: int = 65536,
    seq_len: int = 512,
    chat_share: float = 0.5,
    batch_size: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Let a causal language model write text to calibrate it on.

    Each window begins with the token that begins texts: `bos`, or where there is none what the
    generation config or the tokenizer has in its place, at last `eos`. Where a text ends, the next
    one begins behind it in the same window. With a chat template, a share of the windows are
    conversations of which the model writes both sides. A prepared model does not count what it
    writes, and the model, its settings and the state of random numbers are as before.

    Args:
        model: a causal language model of transformers: float, prepared or converted.
        tokenizer: its tokenizer or processor.
        tokens: how many to write, rounded up to whole windows.
        seq_len: tokens of a window; the context of the model if that is shorter.
        chat_share: of windows that are conversations, in [0, 1]; none without a chat template.
        batch_size: windows that are written at once; by default what half of the free memory holds,
            at most 1024 on a GPU and 64 elsewhere.
        temperature: of the distribution of the next token, which nothing else changes.
        seed: of the random numbers. The same seed gives the same tokens; another batch size may
            change some, where the model rounds in another way.
        progress: as for `convert`.

    Returns:
        windows: [ceil(tokens / seq_len), seq_len] int64, on the CPU.

    Raises:
        OptionError: the model cannot write text, or a number is out of range.

    Example:
        >>> sample = fp4pass.calibration.sample
        >>> windows = sample(model, tokenizer, tokens=32, seq_len=16, progress=False)
        >>> windows.shape
        torch.Size([2, 16])
    """
    root = unwrap(model)
    numbers = {"tokens": tokens, "seq_len": seq_len, "batch_size": batch_size or 1}
    for name, number in numbers.items():
        require_number(name, "a positive number", number, least=1)
    require_number("seed", "an integer", seed)
    require_number("temperature", "a positive number", temperature, float, ABOVE_0)
    require_number("chat_share", "a number in [0, 1]", chat_share, float, 0, 1)
    _require_writer(root)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "decode"):
        wanted = "the tokenizer or processor of the model"
        raise OptionError(expected("tokenizer", wanted, type(tokenizer).__name__))
    require_loaded(root)
    seq_len = Target.of(root).fitting(seq_len)
    count = math.ceil(tokens / seq_len)
    device = device_of(root) or torch.device("cpu")
    rows = batch_size or _rows_at_once(root, seq_len, device)
    # transformers compiles a step on a cache of this kind.
    is_long = count >= _COMPILED and device.type == "cuda"
    cache = "static" if is_long and getattr(root, "_can_compile_fullgraph", False) else None
    scripts = _scripts(root, tokenizer, seq_len, count, round(chat_share * count))
    # Of its own, so that random numbers elsewhere are as before.
    drawn = torch.rand(count, seq_len, generator=torch.Generator().manual_seed(seed)).to(device)
    found: list[Tensor] = []
    with shown("sample", progress) as bar, _as_before(root):
        bar.expect(count * seq_len, "tokens")
        barred = _barred(root, tokenizer).to(device)
        size = _batch_size([number for _, number in scripts], rows)
        for script, number in scripts:
            for part in drawn[:number].split(size):
                # A compiled step is for batches of one size.
                missing = size - len(part) if cache else 0
                filled = torch.cat([part, part.new_zeros(missing, seq_len)])
                written = _write(root, script, filled, temperature, barred, cache)
                found.append(written[: len(part)])
            drawn = drawn[number:]
    return in_turn(torch.cat(found).split([number for _, number in scripts]))


def in_turn(kinds: Sequence[Tensor]) -> Tensor:
    """Return windows of several kinds, each [n, seq_len], mixed evenly from the start."""
    places = [((i + 0.5) / len(each), k) for k, each in enumerate(kinds) for i in range(len(each))]
    order = sorted(range(len(places)), key=lambda i: places[i])
    return torch.cat(list(kinds))[torch.tensor(order)]


def _require_writer(root: nn.Module) -> None:
    """Raise OptionError for a model that cannot write a text from its first token on."""
    config: Any = getattr(root, "config", None)
    can = getattr(root, "can_generate", lambda: False)
    problem = ""
    if config is None or not hasattr(root, "generate"):
        problem = "is no language model of transformers (it has no `generate`)"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "writes answers to a text that its encoder reads"
    elif not can() or root.get_output_embeddings() is None:  # type: ignore[operator]
        problem = "has no head that predicts the next token"
    if problem:
        raise OptionError(
            f"A {type(root).__name__} {problem}, so it cannot write text. {_GIVE_DATA}"
        )


def _rows_at_once(root: Any, seq_len: int, device: torch.device) -> int:
    """Return how many windows to write at once."""
    config = root.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads = getattr(config, "num_key_value_heads", None) or heads
    keys = 2 * config.num_hidden_layers * heads * width * root.dtype.itemsize * seq_len
    # Logits in float32, and the tensors that are computed from them for a token.
    row = keys + 6 * 4 * config.vocab_size
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)[0], _GPU_ROWS
    else:
        most = _CPU_ROWS
        free = min((each.available for each in memory_limits()), default=2 * most * row)
    return max(1, min(most, free // 2 // row))


def _batch_size(numbers: Sequence[int], most: int) -> int:
    """Return the size of batches that fills them best: a small one takes as long."""
    parts = math.ceil(max(numbers) / most)
    sizes = [math.ceil(max(numbers) / each) for each in range(parts, parts + 4)]
    return min(sizes, key=lambda size: sum(math.ceil(n / size) * size for n in numbers))


def _barred(root: Any, tokenizer: Any) -> Tensor:
    """Return the tokens that no text has: beyond the tokenizer, and those of images and sound."""
    size = root.config.get_text_config().vocab_size
    barred = set(range(len(tokenizer), size))
    for config in (root.config, root.config.get_text_config()):
        for name, value in vars(config).items():
            is_token = name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
            if is_token and any(kind in name for kind in _KINDS) and 0 <= value < size:
                barred.add(value)
    return torch.tensor(sorted(barred), dtype=torch.int64)


@contextmanager
def _as_before(root: Any) -> Iterator[None]:
    """Have a model write in eval mode, unobserved and without settings of its own; undo that."""
    from transformers import GenerationConfig

    training = [module for module in root.modules() if module.training]
    settings = root.generation_config
    # Code that is compiled has the observers inside.
    eager = torch.compiler.set_stance("force_eager") if is_compiled(root) else nullcontext()
    with eager, unobserved():
        try:
            root.eval()
            # generate takes its defaults from them.
            root.generation_config = GenerationConfig()
            yield
        finally:
            root.generation_config = settings
            for module in training:
                module.training = True


def _write(
    root: Any, script: Script, drawn: Tensor, temperature: float, barred: Tensor, cache: str | None
) -> Tensor:
    """Return windows that follow a script, of numbers in [0, 1) of their shape."""
    from transformers import GenerationConfig, LogitsProcessorList

    rows, seq_len = drawn.shape
    prompt = torch.tensor([script.prompt[:seq_len]] * rows, device=barred.device)
    length = prompt.shape[1]
    current().step(rows * length)
    if length == seq_len:
        return prompt.cpu()
    following = [script.follow() for _ in range(rows)]
    given = [next(each) for each in following]

    def step(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] that are -inf but for the next token of each row.

        Drawing here and not in `generate` takes a number a row, not one for each token.
        """
        current().step(rows)
        logits = scores.float() / temperature
        logits[:, barred] = float("-inf")
        total = logits.softmax(-1).cumsum(-1)
        place = input_ids.shape[1]
        point = drawn[:, place : place + 1].to(total) * total[:, -1:]
        # Behind the point, so that it is not one of probability 0.
        chosen = torch.searchsorted(total, point, right=True).flatten()
        tokens = chosen.clamp_(max=total.shape[-1] - 1).tolist()
        for i, each in enumerate(following):
            known = given[i]
            if known is None:
                given[i] = each.send(tokens[i])
            else:
                tokens[i], given[i] = known, next(each)
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, torch.tensor(tokens, device=scores.device).unsqueeze(1), 0.0)

    # `step` leaves one token to choose from.
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=seq_len - length,
        use_cache=True,
        eos_token_id=None,
        cache_implementation=cache,
    )
    written: Tensor = root.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=settings,
        logits_processor=LogitsProcessorList([step]),
    )
    return written.cpu()


def _scripts(
    root: Any, tokenizer: Any, seq_len: int, count: int, chats: int
) -> list[tuple[Script, int]]:
    """Return the scripts to write, and the number of windows of each.

    There are no conversations where the chat template does not render a user's message, or takes
    more than half of a window before the first word.
    """
    own: Any = root.generation_config
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    stops = frozenset(each for each in (*ends, tokenizer.eos_token_id) if each is not None)
    chat = chat_script(tokenizer, stops) if chats else None
    if chat is None or len(chat.prompt) > seq_len // 2:
        if chats and getattr(tokenizer, "chat_template", None):
            _log.warning(
                "The chat template does not render a user's message, or takes more than half of a "
                "window of %d tokens: the model writes plain text alone.",
                seq_len,
            )
        chat, chats = None, 0
    found = [] if chat is None else [(chat, chats)]
    if chats == count:
        return found
    first = (tokenizer.bos_token_id, own.bos_token_id, *tokenizer.encode("")[:1])
    starts = [each for each in (*first, tokenizer.eos_token_id) if each is not None]
    if not starts:
        raise OptionError(
            f"The tokenizer has no token that texts begin with (bos or eos). {_GIVE_DATA} Or set "
            "tokenizer.bos_token."
        )
    return [(Script((int(starts[0]),), stops), count - chats), *found]


def chat_script(tokenizer: Any, ends: frozenset[int]) -> Script | None:
    """Return the script of a conversation in which the model writes both sides.

    None without a template, or with one that does not show the messages that it is given.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    first, second, third = "fp4pass-first", "fp4pass-second", "fp4pass-third"
    opened = _rendered(tokenizer, [("user", first)], is_answered=False)
    if opened is None or opened.count(first) != 1:
        return None
    before, _, behind = opened.partition(first)
    prompt, answer = _encode(tokenizer, before), _encode(tokenizer, behind)
    if not prompt or not answer:
        return None
    again = _rendered(tokenizer, [("user", first), ("assistant", second), ("user", third)])
    following: Tokens = ()
    if again is not None and second in again and third in again:
        following = _encode(tokenizer, again.partition(second)[2].partition(third)[0])
    # The user's turn ends with the token that the template puts there; or, where that is a word
    # like others, with all that it puts there.
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    stop = answer[:1] if answer[0] in marks else answer
    stops: dict[Tokens, Tokens] = {stop: answer[len(stop) :]}
    answered: dict[Tokens, Tokens] = {
        (end,): following[following.index(end) + 1 :] for end in ends if end in following
    }
    return Script(prompt, ends, (stops, answered))


def _rendered(
    tokenizer: Any, turns: Sequence[tuple[str, str]], is_answered: bool = True
) -> str | None:
    """Return a conversation as the template has it, None if it refuses all forms of it."""
    from jinja2 import TemplateError

    options = {"tokenize": False, "add_generation_prompt": not is_answered}
    plain = [{"role": role, "content": text} for role, text in turns]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    system = {"role": "system", "content": "You are a helpful assistant."}
    for messages in (plain, parts, [system, *plain]):
        try:
            text: str = tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError, ValueError, KeyError):
            continue
        if turns[0][1] in text:
            return text
    return None


def _encode(tokenizer: Any, text: str) -> Tokens:
    # A space belongs to the word behind it, which the model writes.
    return tuple(tokenizer.encode(text.rstrip(" "), add_special_tokens=False))
