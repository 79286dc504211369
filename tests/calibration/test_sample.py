"""Text that a model writes itself: its windows, and what it leaves as it was."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import zoo
from small_models import TINY, language_model

import fp4pass
from fp4pass.calibration import mixture, sample
from fp4pass.calibration.sample import Script, _batch_size, chat_script
from fp4pass.errors import OptionError
from fp4pass.quantization.observers.observer import OBSERVERS
from fp4pass.record.state import get_state

transformers = pytest.importorskip("transformers")


BOS, EOS, USER, ANSWER, END = range(5)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<end>"
    "{% else %}<answer>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
SMALL = {"tokens": 48, "seq_len": 12, "progress": False}


def tokenizer(template: str | None = TEMPLATE, **options: Any) -> Any:
    """Words w5 to w19, and five tokens of their own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    marks = ["<s>", "</s>", "<user>", "<answer>", "<end>"]
    words = {mark: i for i, mark in enumerate(marks)} | {f"w{i}": i for i in range(5, 20)}
    made = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>"} | options
    names = {key: value for key, value in names.items() if value}
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    found.add_special_tokens({"additional_special_tokens": marks[2:]})
    found.chat_template = template
    return found


def writer(positions: int = 64, layers: int = 1) -> Any:
    """A Llama whose next token is any of its vocabulary, nearly."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes, **heads, vocab_size=24, max_position_embeddings=positions
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = EOS
    return model


def kinds(windows: torch.Tensor) -> list[bool]:
    """Return which windows are conversations."""
    return (windows[:, 1] == USER).tolist()


def test_windows_are_full_and_begin_with_bos_and_half_of_them_are_conversations() -> None:
    windows = sample(writer(), tokenizer(), **SMALL)
    assert windows.shape == (4, 12) and windows.dtype == torch.int64
    assert (windows[:, 0] == BOS).all()
    # The first of them have both kinds.
    assert kinds(windows) == [False, True, False, True]
    assert sample(writer(), tokenizer(), **{**SMALL, "tokens": 49}).shape == (5, 12)
    plain = sample(writer(), tokenizer(), chat_share=0, **SMALL)
    assert torch.equal(sample(writer(), tokenizer(None), **SMALL), plain)


def test_a_text_begins_behind_the_end_of_another_in_the_same_window() -> None:
    windows = sample(writer(), tokenizer(None), tokens=1280, seq_len=40, progress=False)
    # Tokens that the tokenizer lacks are never written.
    assert windows.max() == 19
    ends = (windows[:, :-1] == EOS).nonzero()
    assert len(ends) > 20
    assert (windows[ends[:, 0], ends[:, 1] + 1] == BOS).all()


@pytest.mark.core
def test_a_conversation_follows_the_template_of_the_tokenizer() -> None:
    tokens = tokenizer()
    windows = sample(writer(), tokens, tokens=1280, seq_len=40, chat_share=1, progress=False)
    assert all(kinds(windows))
    script = chat_script(tokens, frozenset({EOS}))
    assert script is not None and script.prompt == (BOS, USER)
    rounds = 0
    for row in windows.tolist():
        place, turn = 2, 0
        while place < 39:
            token = row[place]
            if turn == 0 and token == END:
                turn = 1
                assert row[place + 1] == ANSWER
                place += 1
            elif turn == 1 and token == EOS:
                rounds, turn = rounds + 1, 0
                assert row[place + 1] == USER
                place += 1
            elif turn == 0 and token == EOS:
                # Not where a turn ends: the next conversation.
                assert row[place + 1 : place + 3] == [BOS, USER][: 39 - place]
                place += 2
            place += 1
    assert rounds > 3


@pytest.mark.core
def test_a_turn_without_a_token_of_its_own_ends_with_what_the_template_puts_there() -> None:
    plain = "<s> w5 {{ messages[0].content }} w6 w7 {% if add_generation_prompt %}w8{% endif %}"
    script = chat_script(tokenizer(plain), frozenset({EOS}))
    assert script == Script((BOS, 5), frozenset({EOS}), ({(6, 7, 8): ()}, {}))
    following = script.follow()
    assert next(following) is None
    assert [following.send(token) for token in (6, 7, 9, 6, 7, 8)] == [None] * 6
    # The template has no second round, so the next conversation begins.
    assert [following.send(EOS), next(following), next(following)] == [BOS, 5, None]


def test_a_template_with_a_system_prompt_or_parts_of_content_is_read() -> None:
    system = "{{ bos_token }} w9 w9 " + TEMPLATE.removeprefix("{{ bos_token }}")
    assert chat_script(tokenizer(system), frozenset({EOS})).prompt == (BOS, 9, 9, USER)
    parts = TEMPLATE.replace("m.content", "m.content[0].text")
    assert chat_script(tokenizer(parts), frozenset({EOS})).prompt == (BOS, USER)
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    found = chat_script(tokenizer(strict + TEMPLATE), frozenset({EOS}))
    assert found.prompt[-1] == USER and len(found.prompt) > 2


def test_a_template_that_renders_no_user_is_said_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    windows = sample(writer(), tokenizer("{{ bos_token }} w5"), **SMALL)
    assert "does not render a user's message" in caplog.text
    assert (windows[:, 0] == BOS).all() and len(windows) == 4


@pytest.mark.parametrize(
    ("options", "own", "first"),
    [({}, None, BOS), ({"bos_token": None}, 7, 7), ({"bos_token": None}, None, EOS)],
    ids=["bos", "of the generation config", "eos"],
)
def test_the_first_token_is_bos_or_what_stands_for_it(
    options: dict[str, Any], own: int | None, first: int
) -> None:
    model = writer()
    model.generation_config.bos_token_id = own
    windows = sample(model, tokenizer(None, **options), **SMALL)
    assert (windows[:, 0] == first).all()


def test_a_tokenizer_without_a_first_token_is_an_error_that_says_what_to_pass() -> None:
    model = writer()
    model.generation_config.bos_token_id = None
    with pytest.raises(OptionError, match=r"no token that texts begin with.*data=\["):
        sample(model, tokenizer(None, bos_token=None, eos_token=None), **SMALL)


@pytest.mark.core
def test_the_same_seed_gives_the_same_tokens_and_random_numbers_are_left_alone() -> None:
    model, tokens = writer(), tokenizer()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = sample(model, tokens, **SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(sample(model, tokens, **SMALL), first)
    assert torch.equal(sample(model, tokens, batch_size=1, **SMALL), first)
    assert not torch.equal(sample(model, tokens, seed=1, **SMALL), first)


def test_a_mixture_is_a_third_each_of_texts_conversations_and_packaged_text() -> None:
    made = mixture(writer(), tokenizer(), tokens=144, seq_len=12)
    # A word that the tokenizer does not know is its first token.
    packaged = [bool((row == BOS).all()) for row in made]
    assert made.shape == (12, 12) and sum(packaged) == 4 and sum(kinds(made)) == 4
    # From the start on all kinds.
    assert any(packaged[:3]) and not all(packaged[:3]) and any(kinds(made[:3]))
    assert torch.equal(made, mixture(writer(), tokenizer(), tokens=144, seq_len=12))
    assert not torch.equal(made, mixture(writer(), tokenizer(), tokens=144, seq_len=12, seed=1))


def test_batches_of_one_size_are_nearly_full() -> None:
    assert _batch_size([10], 64) == 10 and _batch_size([64, 64], 64) == 64
    # Six and four batches of 724 leave 3 % of their rows without use, of 1,024 five and three 15 %.
    assert _batch_size([4341, 2731], 1024) == 724


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_many_windows_are_written_by_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fp4pass.calibration.sample"], "_COMPILED", 1)
    made = sample(writer().cuda(), tokenizer(), tokens=12 * 7, seq_len=12, batch_size=4)
    assert made.shape == (7, 12) and 0 < sum(kinds(made)) < 7 and made.unique(dim=0).shape[0] == 7


def test_a_mixture_takes_no_piece_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def written(model: Any, reader: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return torch.full((options["tokens"] // options["seq_len"], options["seq_len"]), -1)

    monkeypatch.setattr("fp4pass.calibration.to_batches.sample", written)
    reader = transformers.AutoTokenizer.from_pretrained(TINY)
    made = mixture(language_model(), reader, tokens=8192 * 512)
    found, times = made[(made >= 0).all(1)].unique(dim=0, return_counts=True)
    assert times.max() == 2 and len(made) == 8192 and 2 * len(found) == int(times.sum())
    assert asked[0]["tokens"] == 512 * (8192 - 2 * len(found))
    assert asked[0]["chat_share"] == pytest.approx(8192 / 3 / (8192 - 2 * len(found)))
    # All of many kinds: half a million tokens of this tokenizer.
    assert len(found) > 500


def test_the_settings_of_the_model_change_nothing_and_stay() -> None:
    model, tokens = writer(), tokenizer()
    plain = sample(model, tokens, **SMALL)
    own = model.generation_config
    own.top_k, own.temperature, own.repetition_penalty, own.do_sample = 1, 0.01, 5.0, True
    own.suppress_tokens, own.max_new_tokens = [7, 8], 3
    before = own.to_dict()
    model.train()
    model.lm_head.eval()
    assert torch.equal(sample(model, tokens, **SMALL), plain)
    assert model.generation_config is own and own.to_dict() == before
    assert model.training and model.model.training and not model.lm_head.training
    assert model.config.use_cache


def test_tokens_are_drawn_as_the_model_predicts_them() -> None:
    model = writer()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
        expected = model(torch.tensor([[BOS]])).logits[0, -1, :20].softmax(-1)
    windows = sample(
        model, tokenizer(None), tokens=8000, seq_len=2, batch_size=4000, progress=False
    )
    found = windows[:, 1].bincount(minlength=20) / len(windows)
    assert expected.max() > 3 / 20
    # Three standard errors.
    assert ((found - expected).abs() <= 3 * (expected * (1 - expected) / 4000).sqrt() + 1e-4).all()


@pytest.mark.core
@pytest.mark.parametrize("sequential", [False, True])
def test_a_prepared_model_does_not_count_what_it_writes(sequential: bool) -> None:
    tokens = tokenizer()
    plain = sample(writer(layers=2), tokens, **SMALL)
    model = fp4pass.prepare(
        writer(layers=2), "hessian", sequential=sequential, kv_cache="fp8_tensor"
    )
    hooks = {name: list(m._forward_pre_hooks.values()) for name, m in model.named_modules()}
    state = get_state(model)
    assert torch.equal(sample(model, tokens, **SMALL), plain)
    after = {name: list(m._forward_pre_hooks.values()) for name, m in model.named_modules()}
    assert after == hooks and get_state(model) is state
    observers = [o for m in model.modules() for o in m.__dict__.get(OBSERVERS, ())]
    assert not any(observer.has_seen for observer in observers)
    if sequential:
        assert not any(stack.calls for stack in state.recording.stacks)
    fp4pass.calibrate(model, [plain], progress=False)
    fp4pass.convert(model, "nvfp4", "hessian", weight_only=True)
    assert {row.tokens for row in fp4pass.report(model).converted} == {plain.numel()}


def test_windows_are_no_longer_than_the_context() -> None:
    windows = sample(writer(positions=8), tokenizer(), tokens=20, progress=False)
    assert windows.shape == (3, 8)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: next(case for case in zoo.CASES if case.name == "t5").build(),
            "A T5ForConditionalGeneration writes answers",
        ),
        (lambda: torch.nn.Linear(16, 16), "A Linear is no language model"),
    ],
)
def test_models_that_cannot_write_are_refused_with_what_to_pass(make: Any, problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as error:
        sample(make(), tokenizer(), **SMALL)
    assert 'data=["a text"' in str(error.value)


def test_numbers_out_of_range_are_refused() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"tokens": 0}, {"temperature": 0}, {"chat_share": 2})
    for each in wrong:
        with pytest.raises(OptionError, match=f"{next(iter(each))}: expected a .*number"):
            sample(writer(), tokenizer(), **{**SMALL, **each})
    with pytest.raises(OptionError, match="tokenizer: expected the tokenizer or processor"):
        sample(writer(), None, **SMALL)
