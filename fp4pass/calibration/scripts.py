"""Follow the script of a text that a model writes: some tokens are given, others drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError

# Messages that a template is rendered with, to find the tokens that it puts around them.
_MARKS = ("fp4pass-first", "fp4pass-second", "fp4pass-third")

# Of windows, those that are conversations.
CHAT_SHARE = 0.5

GIVE_DATA = 'Give calibration data: fp4pass.calibrate(model, data=["a text", "another", ...], ...).'

Tokens = tuple[int, ...]


# Of a part of a conversation that the model writes freely: the tokens that end it, and for each the
# tokens that follow from the template.
Turn = Mapping[Tokens, Tokens]


@dataclass(frozen=True)
class Script:
    """The tokens of a text that are given, and where the model writes.

    Attributes:
        prompt: the first tokens.
        ends: tokens that end a text: the next one begins behind.
        turns: those that the model writes, round after round; () for one text until it ends.
    """

    prompt: Tokens
    ends: frozenset[int]
    turns: tuple[Turn, ...] = ()


class Row:
    """One window of a batch: its place in the script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._turn = 0
        self._own: list[int] = []
        self._given: list[int] = []

    def given(self) -> int | None:
        """Return the token that comes next by the script, None where the model chooses."""
        return self._given.pop(0) if self._given else None

    def add(self, token: int) -> None:
        """Take a token that the model chose."""
        self._own.append(token)
        turns = self.script.turns
        if turns:
            for stop, following in turns[self._turn].items():
                if tuple(self._own[-len(stop) :]) == stop:
                    self._turn = (self._turn + 1) % len(turns)
                    self._own, self._given = [], list(following)
                    return
        if token in self.script.ends:
            # A model whose texts end and begin with one token has begun the next one.
            prompt = self.script.prompt
            self._turn, self._own = 0, []
            self._given = [] if prompt == (token,) else list(prompt)


class Follow:
    """A logits processor of `generate` that draws the next token of each row, or takes a given one.

    Drawing here and not in `generate` takes a number a row, not one for each token that there is.
    """

    def __init__(
        self, script: Script, drawn: Tensor, barred: Tensor, temperature: float, length: int
    ) -> None:
        """Begin a batch of rows.

        drawn: numbers in [0, 1) [rows, steps], of which each step takes a column; barred: tokens
        that are never written; length: of the prompt.
        """
        self._rows = [Row(script) for _ in drawn]
        self._drawn, self._barred = drawn, barred
        self._temperature, self._length = temperature, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] that are -inf but for the next token of each row."""
        logits = scores.float() / self._temperature
        logits[:, self._barred] = float("-inf")
        total = logits.softmax(-1).cumsum(-1)
        step = input_ids.shape[1] - self._length
        point = self._drawn[:, step : step + 1].to(total) * total[:, -1:]
        # Behind the point, so that it is not one of probability 0.
        chosen = torch.searchsorted(total, point, right=True).flatten()
        tokens = chosen.clamp_(max=total.shape[-1] - 1).tolist()
        for i, row in enumerate(self._rows):
            given = row.given()
            if given is None:
                row.add(tokens[i])
            else:
                tokens[i] = given
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, torch.tensor(tokens, device=scores.device).unsqueeze(1), 0.0)


def scripts_of(
    root: Any, tokenizer: Any, seq_len: int, count: int, chat_share: float = CHAT_SHARE
) -> list[tuple[Script, int]]:
    """Return the scripts to write, and the number of windows of each.

    There are no conversations where the chat template does not render a user's message, or takes
    more than half of a window before the first word.
    """
    own = getattr(root, "generation_config", None)
    ends: Any = getattr(own, "eos_token_id", None)
    listed = [ends] if isinstance(ends, int) else list(ends or ())
    if tokenizer.eos_token_id is not None:
        listed.append(tokenizer.eos_token_id)
    stops = frozenset(listed)
    chats = round(chat_share * count)
    chat = chat_script(tokenizer, stops) if chats else None
    if chat is not None and len(chat.prompt) > seq_len // 2:
        chat = None
    chats = 0 if chat is None else chats
    found = [] if chat is None else [(chat, chats)]
    if chats < count:
        found.insert(0, (Script((_first_token(own, tokenizer),), stops), count - chats))
    return found


def _first_token(own: Any, tokenizer: Any) -> int:
    """Return the token that texts begin with."""
    usual = tokenizer.encode("")
    candidates = (
        *(tokenizer.bos_token_id, getattr(own, "bos_token_id", None)),
        *(usual[:1] or (None,)),
        tokenizer.eos_token_id,
    )
    for token in candidates:
        if token is not None:
            return int(token)
    raise OptionError(
        f"The tokenizer has no token that texts begin with (bos or eos). {GIVE_DATA} Or set "
        "tokenizer.bos_token."
    )


def chat_script(tokenizer: Any, ends: frozenset[int]) -> Script | None:
    """Return the script of a conversation in which the model writes both sides.

    None without a template, or with one that does not show the messages that it is given.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    first, second, third = _MARKS
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
    stops: Turn = {stop: answer[len(stop) :]}
    answered: Turn = {
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
