"""One call of `convert` for a model that is not prepared: its recipe and its data."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .. import calibration
from ..calibration.processor import SEQ_LEN, Target
from ..core.machine import require_device
from ..core.names import covering_globs
from ..distributed import ranks
from ..engine.recording import stacks_of
from ..errors import OptionError, StateError, as_option
from ..quantization.observers.batches import call_arguments, device_of, size_of
from ..quantization.observers.observer import OBSERVERS
from ..quantization.plan import matching_rule, plan_layers, require_float, require_layers
from ..quantization.recipe import require_undecided, with_quality
from ..quantization.scan import caller_of
from ..record.config import LinearConfig, Rule, check_rules
from ..record.schemes import INPUT_TOKENS, QUALITY, Quality, get_quality
from ..record.state import config_of, get_state, set_state, smoothing_of, unwrap

_log = logging.getLogger(__name__)

# Windows of a batch.
_BATCH = 8


@dataclass(frozen=True)
class OwnText:
    """Text of `calibration.mixture` in place of data."""

    samples: int | None = None  # windows; None for the tokens of the recipe
    seq_len: int = SEQ_LEN
    seed: int = 0


class OneCall:
    """Decide a conversion from the float model to the end, before anything is done."""

    def __init__(
        self,
        model: nn.Module,
        quality: str | None,
        given: Mapping[str, Any],
        rules: Sequence[Rule] = (),
        kv_cache: str | None = None,
        device: torch.device | str | None = None,
        stream: Any = None,
    ) -> None:
        """Take the arguments of `convert`."""
        root, rules = unwrap(model), check_rules(rules)
        if require_float(root, "convert") is not None:
            raise StateError(
                "The model is prepared, and quality=, data= and tokenizer= are for one that is "
                "not. Give the data to fp4pass.calibrate(model, data, tokenizer=...) and leave "
                "them out here, or convert a fresh copy of the model."
            )
        if device is not None:
            require_device(str(device), "device=")
        options = {name: value for name, value in given.items() if value is not None}
        config = config_of(options, None)
        recipe: Quality | None = None
        if quality is not None:
            recipe = get_quality(quality)
            require_undecided(quality, options)
            config = with_quality(config, quality)
            rules = (*_rules_alone(root, config, rules, quality, recipe), *rules)
        plan = plan_layers(root, config, rules)
        require_layers(plan)
        configs = [layer.config for layer in plan.layers]
        # Options that only serve layers one after the other ask for that.
        cross = any("cross" in each.needs for each in configs)
        by_layers = not (device is None and stream is None)
        self.sequential = by_layers or cross or (recipe is not None and recipe.sequential)
        # For a scale of inputs that `save` needs.
        scaled = any(each.has_input_scale for each in configs)
        self.tokens = INPUT_TOKENS if scaled else 0
        if kv_cache is not None or any(each.needs for each in configs):
            self.tokens = max(INPUT_TOKENS, recipe.tokens if recipe is not None else 1 << 15)
        is_smoothed = recipe is not None and any(each.has_own_inputs for each in configs)
        self.smoothing = recipe.smoothing if recipe is not None and is_smoothed else 0.0
        self.distilled = 0 if recipe is None else recipe.distilled
        is_graph = isinstance(root, fx.GraphModule)
        if self.distilled and (stream is not None or ranks().size > 1 or is_graph):
            raise OptionError(
                f"{as_option('quality', quality)} trains the whole model: expected a live model in "
                "one process, and no stream. Choose another quality."
            )
        self.root, self.quality, self.config, self.kv_cache = root, quality, config, kv_cache
        self.device = device
        # Those given, and those of the recipe for layers that it does not fit.
        self.rules, self.plan = rules, plan

    def original(self, batches: Sequence[Any]) -> nn.Module | None:
        """Return a copy of the float model to learn from, None without that; say how long it takes.

        Raises StateError for a model without logits.
        """
        if not self.distilled:
            return None
        # Where it learns, which is where its time is measured.
        place = device_of(self.root) if self.device is None else torch.device(self.device)
        model, batch = copy.deepcopy(self.root).to(place), batches[-1]
        args, kwargs = call_arguments(batch, place)
        seconds = 0.0
        for _ in range(2):
            began = time.perf_counter()
            with torch.no_grad():
                output: Any = model(*args, **kwargs)
            logits = getattr(output, "logits", output)
            if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
                raise StateError(
                    f"{self._label}: expected a model with logits [batch, tokens, vocabulary], got "
                    f'{type(output).__name__} without them. Choose quality="best".'
                )
            # A GPU has computed what one waits for.
            logits.flatten()[0].item()
            seconds = time.perf_counter() - began
        # A pass of the original, and of the student forward and backward.
        minutes = 4.5 * seconds * self.distilled * SEQ_LEN / size_of(batch) / 60
        _log.warning("%s trains for about %.1f minutes after the search.", self._label, minutes)
        return model

    def distill(self, original: nn.Module, data: Any, tokenizer: Any) -> None:
        """Train the converted model on the given data, or on a larger mixture."""
        from .. import distill

        home = device_of(self.root)
        self.root.to(device_of(original))
        if data is None or isinstance(data, OwnText):
            text = data or OwnText()
            tokens = self.distilled * text.seq_len
            data = calibration.mixture(
                original, tokenizer, tokens=tokens, seq_len=text.seq_len, seed=text.seed
            )
        _log.info("%s: %s", self._label, distill(self.root, original, data, tokenizer=tokenizer))
        self.root.to(home)

    @property
    def needs_data(self) -> bool:
        """Whether a method, or the cache, cannot do without data."""
        needs = any(layer.config.needs for layer in self.plan.layers)
        return needs or self.kv_cache is not None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords of `prepare`, and of `convert` where nothing is prepared."""
        return {**self.config.options(), "rules": self.rules, "kv_cache": self.kv_cache}

    def batches(self, data: Any, tokenizer: Any) -> list[Any] | None:
        """Return batches to calibrate on; None for no data. Some models write their own."""
        text = data if isinstance(data, OwnText) else None
        if not self.tokens:
            if data is not None and text is None:
                _log.info("%s needs no data: %s is not read.", self._label, as_option("data"))
            return None
        if data is not None and text is None:
            made = calibration.batches(data, tokenizer, model=self.root)
            found = list(made)
            return found if made is data else self._in_turn(found)
        if tokenizer is None and not self.needs_data:
            return None
        text, tokens, group = text or OwnText(), self.tokens, ranks()
        if text.samples is not None:
            tokens = text.samples * Target.of(self.root).fitting(text.seq_len)
        # Each process writes its part.
        tokens, seed = max(tokens // group.size, text.seq_len), text.seed * group.size + group.rank
        windows = calibration.mixture(
            self.root, tokenizer, tokens=tokens, seq_len=text.seq_len, seed=seed
        )
        return self._in_turn(list(windows.split(_BATCH)))

    def smoothed(self, batches: Sequence[Any]) -> AbstractContextManager[None]:
        """Smooth the model if the recipe has that; after an error its bits are as before."""
        if not self.smoothing or smoothing_of(self.root):
            return nullcontext()
        # Late, for tracing takes a while to import.
        from ..calibration.smoothing import smoothed_unless_it_fails

        # The first batches, so many that they have the tokens together.
        ends = [0, *itertools.accumulate(map(size_of, batches))]
        few = [each for each, end in zip(batches, ends, strict=False) if end < INPUT_TOKENS]
        return smoothed_unless_it_fails(self.root, self.smoothing, few, self._label)

    def _in_turn(self, batches: list[Any]) -> list[Any]:
        """Return batches with the first window alone where that runs through whole layers."""
        sizes = {each.shape[1:] if isinstance(each, torch.Tensor) else None for each in batches}
        if not self.sequential or len(sizes) > 1 or None in sizes:
            return batches
        windows = torch.cat(batches)
        return [windows[:1], *windows[1:].split(_BATCH)] if len(windows) > 1 else batches

    @property
    def _label(self) -> str:
        if self.quality is not None:
            return f'quality "{self.quality}"'
        return f'method "{self.config.method_name}"'

    def rules_beside_text(self) -> list[Rule]:
        """Return rules that skip layers beside the text part that data did not reach; log them."""
        model: Any = self.root
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config") or config.get_text_config() is config:
            return []
        recording = getattr(get_state(self.root), "recording", None)
        inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
        passed, stacked = set[str](), set[nn.Module]()
        if recording is not None:
            passed = {each.name for each in recording.passed_by(self.plan).layers}
            stacked = {m for s in recording.stacks for layer in s.layers for m in layer.modules()}
        unreached: list[str] = []
        others: list[str] = []
        for layer in self.plan.layers:
            own, observers = layer.config, layer.module.__dict__.get(OBSERVERS, ())
            seen = any(each.has_seen for each in observers) or layer.module in inside
            seen = seen or (layer.module in stacked and layer.name not in passed)
            # Some need nothing of calibration, and for others the user has decided.
            kept = (own.weight_only and not own.needs) or own.unreached != "error"
            (others if seen or kept else unreached).append(layer.name)
        globs = covering_globs(unreached, others)
        if globs:
            names = ", ".join(globs)
            _log.warning("text does not reach %s: these layers are skipped", names)
        # Recorded layers have no statistics before convert runs them.
        skips = bool(self.config.needs) and recording is None
        return [(glob, {"unreached": "skip"} if skips else None) for glob in globs]

    def record(self) -> None:
        """Have the recipe of the converted model name the quality."""
        state = get_state(self.root)
        assert state is not None, "the model is converted"
        if self.quality is not None:
            recipe = {QUALITY: self.quality, **state.recipe}
            set_state(self.root, dataclasses.replace(state, recipe=recipe))


def _rules_alone(
    root: nn.Module, config: LinearConfig, rules: Sequence[Rule], quality: str, recipe: Quality
) -> list[Rule]:
    """Return rules for layers that are not calibrated one after the other, before those given."""
    if not recipe.sequential:
        return []
    alone = config.override(recipe.alone)
    plan = plan_layers(root, alone, rules)
    require_layers(plan)
    stacks = list(stacks_of(root, {caller_of(layer.module) for layer in plan.layers}))
    if not stacks:
        raise OptionError(
            f"{as_option('quality', quality)} calibrates one layer after the other: expected a "
            f"model with a list of layers (nn.ModuleList), got {type(root).__name__} without one. "
            "Choose another quality."
        )
    inside = {m for stack in stacks for layer in stack.layers for m in layer.modules()}
    by_rule: dict[int | None, list[str]] = {}
    others = []
    for layer in plan.entries:
        fits = not layer.stage and layer.module in inside
        planned = getattr(layer, "config", None)
        if planned is None or fits or planned.method != alone.method:
            others.append(layer.name)
        else:
            rule = matching_rule(layer.name, rules)
            index = None if rule is None else list(rules).index(rule)
            by_rule.setdefault(index, []).append(layer.name)
    found: list[Rule] = []
    for index, names in by_rule.items():
        given = {} if index is None else rules[index][1]
        rest = [*others, *(n for key, each in by_rule.items() if key != index for n in each)]
        found += [(glob, {**(given or {}), **recipe.alone}) for glob in covering_globs(names, rest)]
    return found
