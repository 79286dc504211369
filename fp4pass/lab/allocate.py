"""allocate: choose a scheme for each layer under a budget of bytes or of KL, by measuring."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..api import convert
from ..core import covering_globs, current, shown, without_numbers
from ..distributed import ranks
from ..errors import (
    ABOVE_0,
    CalibrationError,
    OptionError,
    StateError,
    expected,
    require_number,
    some,
)
from ..evaluation import SUMS, Bootstrap, bootstrap_intervals, fast_dtype
from ..methods import MethodChoice, Sse
from ..nn import PACKED, SCALE
from ..quantization import (
    LayerPlan,
    Plan,
    Recipe,
    caller_of,
    in_float32,
    joined,
    matching_rule,
    plan_layers,
    require_float,
    require_layers,
)
from ..record import (
    LinearConfig,
    LinearOptions,
    Rule,
    Rules,
    Scheme,
    check_options,
    check_rules,
    scheme_fields,
    table_lines,
    unwrap,
)
from .divergence import Reference, logits_of, mean_kl, read_windows, spread, together, token_count

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)

# The schemes to choose from, where none are given.
SCHEMES: Final = ("nvfp4a16", "fp8a16", "bf16")

# The scheme of layers that stay as they are, in a report, and its names.
FLOAT = "float"
_FLOATS = (FLOAT, "bf16", "bfloat16")

# Windows beside those that are measured, for methods that need text.
_MORE = 128

# Budgets of the curve.
_POINTS = 24

# Conversions of a search for a KL; a model within so much of it is near enough.
_TRIES, _NEAR = 6, 0.02

# The scheme of each group, in order.
Schemes = tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """The cost of a group in a scheme.

    Attributes:
        bytes: of codes and block scales; of the weights as they are, for a group that stays so.
        kl: KL(original || model with this group alone in the scheme), nats per token.

    Example:
        >>> fp4pass.lab.Cost(bytes=576, kl=0.01).bytes
        576
    """

    bytes: int
    kl: float


@dataclass(frozen=True)
class GroupScheme:
    """A group of layers that engines fuse, and its scheme.

    Attributes:
        layers: their names.
        weights: how many they have.
        scheme: the chosen one; "float" for layers that stay as they are.
        costs: bytes and KL by scheme, as measured with this group alone.

    Example:
        >>> costs = {"nvfp4a16": fp4pass.lab.Cost(bytes=576, kl=0.01)}
        >>> fp4pass.lab.GroupScheme(("q", "k", "v"), 1024, "nvfp4a16", costs).bits
        4.5
    """

    layers: tuple[str, ...]
    weights: int
    scheme: str
    costs: Mapping[str, Cost] = field(hash=False)

    @property
    def bits(self) -> float:
        """Bits of a weight in the chosen scheme."""
        return 8 * self.costs[self.scheme].bytes / self.weights


@dataclass(frozen=True)
class Candidate:
    """A whole model that was converted and measured on held-out text.

    Attributes:
        label: of the kind of choice: "allocated", or the name of a uniform one.
        bits: of a weight, codes and block scales included.
        bytes: the same for all weights.
        predicted: the sum of the KL of the groups.
        kl: KL(original || model) on held-out text, nats per token.
        low: lower end of the interval of `kl`; None for a single window.
        high: its upper end.
        schemes: of each group, in order.

    Example:
        >>> found = fp4pass.allocate(model, bits=6, schemes=("nvfp4a16", "bf16"), data=batches)
        >>> found.uniform.label
        'uniform nvfp4a16'
    """

    label: str
    bits: float
    bytes: int
    predicted: float
    kl: float
    low: float | None
    high: float | None
    schemes: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Allocation:
    """The scheme of each layer under a budget; print it for a table.

    Attributes:
        budget: what was asked for, {"bits": ...} or {"kl": ...}.
        recipe: of the model, for `convert(model, **allocation.recipe.arguments())`.
        groups: each with its scheme, in the order of layers.
        chosen: the model that was converted and measured.
        uniform: the best uniform model of at most the same bytes, None if there is none; a uniform
            one has one scheme, or a larger one for the first layers.
        measured: all models that were measured, `chosen` and `uniform` among them.
        curve: bits, bytes and predicted KL of the best choices by prediction, the smallest first.
        text: tokens of the parts of the data.
        is_uniform: whether a uniform model was no worse, and is chosen.

    Example:
        >>> found = fp4pass.allocate(model, bits=6, schemes=("nvfp4a16", "bf16"), data=batches)
        >>> found.chosen.kl <= found.uniform.kl, found.bits <= 6
        (True, True)
    """

    budget: Mapping[str, float] = field(hash=False)
    recipe: Recipe
    groups: tuple[GroupScheme, ...]
    chosen: Candidate
    uniform: Candidate | None
    measured: tuple[Candidate, ...]
    curve: tuple[Mapping[str, float], ...] = field(hash=False)
    text: Mapping[str, int] = field(hash=False)
    is_uniform: bool = False

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules for `convert`, those of the user after them; `recipe` has the method, too."""
        return self.recipe.rules

    @property
    def bits(self) -> float:
        """Bits of a weight of the chosen model, codes and block scales included."""
        return self.chosen.bits

    @property
    def kl(self) -> float:
        """The KL of the chosen model on held-out text, nats per token."""
        return self.chosen.kl

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it.

        Example:
            >>> found = fp4pass.allocate(model, bits=6, schemes=("nvfp4a16", "bf16"), data=batches)
            >>> sorted(found.to_dict())[:4]
            ['budget', 'chosen', 'curve', 'groups']
        """
        found = dataclasses.asdict(self)
        found["recipe"] = self.recipe.to_dict()
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain

    def __str__(self) -> str:
        asked = " ".join(f"{name}={value:g}" for name, value in self.budget.items())
        text = f"{asked}: {self.bits:.3f} bits a weight, KL {self.kl:.5f} on held-out text"
        if self.is_uniform:
            text += f". No mixture was better at this size: {self.chosen.label}"
        elif self.uniform is not None:
            text += f", {self.kl / self.uniform.kl:.2f} of uniform's {self.uniform.kl:.5f}"
        models = [("model", "bits", "KL predicted", "KL held out", "interval")]
        for each in self.measured:
            ends = "-" if each.low is None else f"{each.low:.5f} to {each.high:.5f}"
            numbers = (f"{each.bits:.3f}", f"{each.predicted:.5f}", f"{each.kl:.5f}")
            models.append((each.label, *numbers, ends))
        groups = [("layers", "scheme", "bits", "KL alone")]
        for group in self.groups:
            first, *others = group.layers
            name = ", ".join([first, *(each.rpartition(".")[2] for each in others)])
            name = f"{first} and {len(others)} more" if len(others) > 3 else name
            kl = f"{group.costs[group.scheme].kl:.6f}"
            groups.append((name, group.scheme, f"{group.bits:.2f}", kl))
        return "\n".join([f"{text}.", "", *table_lines(models), "", *table_lines(groups)])


def allocate(
    model: nn.Module,
    *,
    bits: float | None = None,
    kl: float | None = None,
    schemes: Sequence[Scheme | Literal["bf16", "float"]] = SCHEMES,
    data: Any = None,
    tokenizer: Any = None,
    method: MethodChoice | None = None,
    rules: Rules = (),
    windows: int = 8,
    held_out: int = 16,
    seq_len: int = 512,
    progress: bool = True,
    **options: Unpack[LinearOptions],
) -> Allocation:
    """Choose a scheme for each group of layers under a budget, and leave the model as it is.

    Groups are what serving engines fuse: q, k and v; gate and up; all experts of a mixture. The
    cost of each group in each scheme is measured: KL(original || model with that group alone in the
    scheme). Of all choices within the budget the one with the least sum is found exactly. It is
    converted and measured on held-out text, beside uniform models of at most the same bytes; if one
    of these is better, it is returned.

    Args:
        model: a causal language model in floating point, with memory for a second one.
        bits: of a weight of the layers that are quantized or may be, codes and block scales
            included.
        kl: the largest KL on held-out text, nats per token; the smallest model within it is looked
            for, with at most 6 conversions.
        schemes: to choose from, as `convert` takes them; "bf16" or "float" leaves layers as they
            are.
        data: text, as for `calibrate`; by default the model writes its own.
        tokenizer: of the texts in `data`, or of those that the model writes.
        method: as for `convert`; default "sse", which is quick.
        rules: as for `convert`, without `fmt`.
        windows: on which groups are measured.
        held_out: windows of the rest of the text, on which whole models are measured.
        seq_len: tokens of a window, at most the context of the model.
        progress: as for `convert`.
        **options: fields of `LinearConfig` beside the scheme.

    Returns:
        The choice: `convert(model, **allocation.recipe.arguments())` quantizes the model so.

    Raises:
        OptionError: not one of bits and kl is given, a scheme does not exist, or the budget cannot
            be met; it says what can be.
        StateError: the model is prepared or converted, has no linear layer, or is a graph.
        CalibrationError: there is too little text.

    Example:
        >>> schemes = ("nvfp4a16", "fp8a16", "bf16")
        >>> found = fp4pass.allocate(model, bits=6.5, schemes=schemes, data=batches)
        >>> model = fp4pass.convert(model, **found.recipe.arguments())
        >>> found.bits <= 6.5, found.kl <= found.uniform.kl
        (True, True)
    """
    check_options(options)
    budget = {name: each for name, each in (("bits", bits), ("kl", kl)) if each is not None}
    if len(budget) != 1:
        raise OptionError(
            f"{expected('The budget', 'bits= or kl=', 'both' if budget else 'neither')} bits=5.0 "
            "is for the best model of 5 bits a weight, kl=0.02 for the smallest one within that KL."
        )
    ((name, value),) = budget.items()
    require_number(name, "a positive number", value, float, ABOVE_0)
    given: dict[str, Any] = {"method": method, "rules": rules, **options}
    text = {"data": data, "tokenizer": tokenizer, "seq_len": seq_len}
    measuring = measured(model, schemes, windows, held_out, text, given, bits)
    with shown("allocate", progress), measuring as trials:
        return trials.choose({name: float(value)})


@contextmanager
def measured(
    model: nn.Module,
    schemes: Sequence[str],
    windows: int,
    held_out: int,
    text: Mapping[str, Any],
    given: Mapping[str, Any],
    bits: float | None = None,
) -> Iterator[Trials]:
    """Measure all groups of a model, for budgets chosen in the body of `with`.

    The arguments are those of `allocate`: `text` has data, tokenizer and seq_len, `given` all that
    says how layers are quantized. `bits` is refused at once where no scheme is as small.
    """
    root = unwrap(model)
    if require_float(root, "allocate") is not None or isinstance(root, fx.GraphModule):
        raise StateError(
            "The model is prepared, or a graph. allocate converts copies of a live float model: "
            "start from that; the rules fit its graph, too."
        )
    if root.training:
        raise StateError(
            "Expected a model in evaluation mode, got one in training mode, in which dropout is "
            "on. Call model.eval() first."
        )
    if ranks().size > 1:
        raise OptionError("allocate runs in one process. Convert with its rules in all of them.")
    for name, value in (("windows", windows), ("held_out", held_out), ("seq_len", text["seq_len"])):
        require_number(name, "at least 1", value, least=1)
    names, keeps_float = _scheme_names(schemes)
    options = {name: value for name, value in given.items() if value is not None}
    rules = check_rules(options.pop("rules", ()))
    if beside := [name for name in ("fmt", "weight_only", "block") if name in options]:
        raise OptionError(f"schemes decides {beside[0]}. Leave {beside[0]} out.")
    if deciding := [glob for glob, each in rules if "fmt" in (each or {})]:
        raise OptionError(
            f"schemes decides the scheme of every layer, and a rule that of {deciding[0]!r}. Leave "
            "fmt out of it, or skip these layers with None."
        )
    options.setdefault("method", Sse())
    configs = {name: LinearConfig(name, **options) for name in names}
    plans = {name: plan_layers(root, config, rules) for name, config in configs.items()}
    for plan in plans.values():
        require_layers(plan)
    least = min(map(_bits_of, plans.values()))
    if bits is not None and bits < least:
        raise _too_few(bits, least)
    more = _MORE if any(map(_needs_text, configs.values())) else 0
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        parts = _parts(root, windows, held_out, more, text)
        source = _Model(root, plans, rules, options, folder, parts["calibration"])
        with _finely(root):
            reference = Reference(root, parts["measured"])
            groups = source.groups(_inputs(root, source.callers, parts["measured"]))
        unreached = source.unreached(groups)
        if not groups:
            raise StateError(
                f"No window reaches {some(unreached)}. Give data that does, as batches of the "
                "model."
            )
        if unreached:
            _log.warning(
                "the text does not reach %s: these layers stay as they are", some(unreached)
            )
        costs = _measure(source, groups, reference, names)
        for cost, group in zip(costs, groups, strict=True):
            if keeps_float or not cost:
                cost[FLOAT] = Cost(group.dense_bytes, 0.0)
        with fast_dtype(root):
            reference = Reference(root, parts["held_out"])
        candidates = (*names, FLOAT) if keeps_float else names
        tokens = {name: token_count(part) for name, part in parts.items()}
        yield Trials(source, groups, costs, reference, candidates, tokens)


def _parts(
    root: nn.Module, windows: int, held_out: int, more: int, text: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Return batches to measure groups on, to measure models on, and to calibrate on."""
    count = windows + held_out + more
    found = read_windows(root, text["data"], text["tokenizer"], count, seq_len=text["seq_len"])
    if len(found) < 2:
        raise CalibrationError(
            "data: expected two windows or more, one to measure on and one to hold out, got "
            f"{len(found)} of up to {text['seq_len']} tokens. Give more text, or a smaller seq_len."
        )
    apart = spread(len(found), min(held_out, len(found) // 2))
    rest = [each for i, each in enumerate(found) if i not in apart]
    return {
        "measured": together(root, [rest[i] for i in spread(len(rest), min(windows, len(rest)))]),
        "held_out": together(root, [found[i] for i in apart]),
        "calibration": together(root, rest),
    }


def _scheme_names(schemes: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the schemes that quantize, and whether layers may stay as they are."""
    found = tuple(dict.fromkeys(each for each in schemes if each not in _FLOATS))
    for name in found:
        scheme_fields(name)
    keeps_float = any(each in _FLOATS for each in schemes)
    if not found or len(found) + keeps_float < 2:
        got = ", ".join(map(str, schemes)) or "none"
        raise OptionError(
            f"{expected('schemes', 'two or more, at least one that quantizes', got)} Add 'bf16' to "
            "leave layers as they are, or call convert for a single scheme."
        )
    return found, keeps_float


def _too_few(bits: float, least: float) -> OptionError:
    return OptionError(
        f"bits={bits:g}: the smallest of the schemes takes {least:.4f} bits a weight here. Give at "
        "least that, or a smaller scheme."
    )


def _bits_of(plan: Plan) -> float:
    """Return the bits of a weight of the layers of a plan."""
    layers = [members[0] for members in plan.by_weight()]
    sizes = [math.prod(layer.shape) for layer in layers]
    bits = [layer.config.format.bits_per_weight(layer.shape) for layer in layers]
    return sum(n * each for n, each in zip(sizes, bits, strict=True)) / sum(sizes)


def _needs_text(config: LinearConfig) -> bool:
    return bool(config.needs or (not config.weight_only and config.format.has_global_scale))


class _Group:
    """Layers that get one scheme: they read one input, share a weight, or are all experts.

    Attributes:
        names: of the layers.
        owners: of one layer for each weight.
        schemes: those that all of them can have.
        callers: the modules that read the weights when they are called.
    """

    def __init__(self, layers: Sequence[LayerPlan], schemes: tuple[str, ...]) -> None:
        self.schemes = schemes
        self.names = tuple(layer.name for layer in layers)
        each = {layer.weight_key: layer for layer in reversed(layers)}.values()
        self.owners = [layer.name for layer in each]
        self.weights = sum(math.prod(layer.shape) for layer in each)
        self.dense_bytes = sum(layer.module.get_parameter("weight").nbytes for layer in each)
        self.callers = {caller_of(layer.module) for layer in layers}


class _Model:
    """A float model that is quantized in parts: its plan in each scheme, and conversions of it.

    Attributes:
        root: the model.
        plans: by the name of the scheme.
        rules: of the user.
        options: fields of `LinearConfig` beside the scheme.
        searches: a folder for finished searches.
        data: batches to calibrate on.
    """

    def __init__(
        self,
        root: nn.Module,
        plans: Mapping[str, Plan],
        rules: tuple[Rule, ...],
        options: Mapping[str, Any],
        searches: str,
        data: Sequence[Any],
    ) -> None:
        self.root, self.plans, self.rules = root, plans, rules
        self.options, self.searches, self.data = options, searches, data
        entries = next(iter(plans.values())).entries
        found = {each.name: each for plan in plans.values() for each in plan.layers}
        self.names = [each.name for each in entries]
        self.planned = [found[name] for name in self.names if name in found]
        self.callers = {caller_of(layer.module) for layer in self.planned}
        # The layer of the outermost list that each module is in, as "model.layers.3.".
        self._places: list[str] = []
        for name, module in root.named_modules():
            if isinstance(module, nn.ModuleList) and not name.startswith(tuple(self._places)):
                self._places += [f"{name}.{i}." for i in range(len(module))]

    def groups(self, inputs: Mapping[nn.Module, Collection[object]]) -> list[_Group]:
        """Return the groups of the layers that were reached.

        inputs: the identities of the tensors that modules were called with.
        """

        def keys(layer: LayerPlan) -> set[object]:
            pattern = self.pattern(layer.name)
            parent = pattern.rpartition(".")[0]
            found: set[object] = {("weight", layer.weight_key)}
            if layer.stage:
                return found | {("stage", parent, layer.stage)}
            if "*" in pattern:
                found.add(("experts", pattern))
            return found | {(parent, each) for each in inputs.get(layer.module, ())}

        found = []
        for members in joined(self.planned, keys):
            if not any(caller_of(each.module) in inputs for each in members):
                continue
            names = {each.name for each in members}
            fitting = tuple(
                scheme
                for scheme, plan in self.plans.items()
                if names <= {layer.name for layer in plan.layers}
            )
            found.append(_Group(members, fitting))
        return found

    def unreached(self, groups: Sequence[_Group]) -> list[str]:
        """Return the layers that are in no group."""
        inside = {name for group in groups for name in group.names}
        return [layer.name for layer in self.planned if layer.name not in inside]

    def recipe(self, main: str, chosen: Mapping[str, str]) -> Recipe:
        """Return the recipe of a model with a scheme for each layer, `main` for all others."""
        return Recipe(LinearConfig(main, **self.options), tuple(self.rules_for(chosen)))

    def convert(self, recipe: Recipe) -> nn.Module:
        """Return a converted copy of the model."""
        # Inference tensors could not be written to.
        with torch.inference_mode(False):
            model = copy.deepcopy(self.root)
        data = list(self.data) if any(map(_needs_text, recipe.configs())) else None
        return convert(model, **recipe.arguments(), data=data, resume=self.searches)

    def rules_for(self, chosen: Mapping[str, str]) -> list[Rule]:
        """Return rules that give layers a scheme, FLOAT for none, and then all other rules."""
        by_rule: dict[tuple[int, str], list[str]] = {}
        for name, scheme in chosen.items():
            rule = matching_rule(name, self.rules)
            index = -1 if rule is None else self.rules.index(rule)
            by_rule.setdefault((index, scheme), []).append(name)
        # Of experts one pattern is for all that have one scheme.
        others = {self.pattern(name) for name in set(self.names) - {*chosen}}
        kinds: dict[str, set[object]] = {}
        for key, names in by_rule.items():
            for name in names:
                kinds.setdefault(self.pattern(name), set()).add(key)
        shared = {each for each, keys in kinds.items() if len(keys) == 1 and each not in others}
        every = {self._short(name, shared) for name in self.names}
        found: list[Rule] = []
        # The first match wins, so that patterns of the most common scheme, the last, may be wide.
        for (index, scheme), names in sorted(by_rule.items(), key=lambda item: len(item[1])):
            own = {} if index < 0 else dict(self.rules[index][1] or {})
            options = None if scheme == FLOAT else {**own, **scheme_fields(scheme)}
            short = list(dict.fromkeys(self._short(name, shared) for name in names))
            every -= set(short)
            found += [(glob, options) for glob in covering_globs(short, every)]
        return [*found, *self.rules]

    def pattern(self, name: str) -> str:
        """Return a name with a * for each number below the layer of a list, as of experts."""
        place = next((each for each in self._places if name.startswith(each)), "")
        parent, dot, last = name.removeprefix(place).rpartition(".")
        return f"{place}{without_numbers(parent)}{dot}{last}" if place else name

    def _short(self, name: str, shared: Collection[str]) -> str:
        pattern = self.pattern(name)
        return pattern if pattern in shared else name


def _inputs(
    root: nn.Module, modules: Collection[nn.Module], batches: Sequence[Any]
) -> dict[nn.Module, set[object]]:
    """Return the identities of the tensors that modules are called with in some batches."""
    found: dict[nn.Module, set[object]] = {}
    # Tensors that live as long as the runs, so that no other one gets their identity.
    alive: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if x is not None:
            alive.append(x)
            found.setdefault(module, set()).add((id(x), x._version))

    with ExitStack() as stack:
        for each in modules:
            handle = each.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(handle.remove)
        for batch in batches:
            logits_of(root, batch)
    return found


@contextmanager
def _finely(*models: nn.Module) -> Iterator[None]:
    """Have models compute in float32, if there is memory for it.

    Where bfloat16 rounds otherwise after a group, that alone has a KL as large as 8 bits do.
    """
    needed: dict[torch.device, int] = {}
    for each in {tensor for model in models for tensor in model.parameters() if tensor.is_cuda}:
        size = 2 * each.nbytes if each.element_size() == 2 else 0
        needed[each.device] = needed.get(each.device, 0) + size
    fits = all(size < torch.cuda.mem_get_info(where)[0] / 2 for where, size in needed.items())
    if not fits:
        _log.info("no memory for groups to be measured in float32: they are in the model's dtype")
    with in_float32(*models) if fits else fast_dtype(*models):
        yield


def _measure(
    model: _Model,
    groups: Sequence[_Group],
    reference: Reference,
    schemes: Sequence[str],
) -> list[dict[str, Cost]]:
    """Return the costs of each group in its schemes; one whose KL is not finite is left out."""
    found: list[dict[str, Cost]] = [{} for _ in groups]
    current().expect(sum(len(group.schemes) for group in groups), "groups")
    for scheme in schemes:
        left = [i for i, group in enumerate(groups) if scheme in group.schemes]
        while left:
            # No two that have weights in one module of experts.
            part: list[int] = []
            for i in left:
                if all(groups[i].callers.isdisjoint(groups[j].callers) for j in part):
                    part.append(i)
            left = [i for i in left if i not in part]
            chosen = {name: FLOAT for group in groups for name in group.names}
            chosen |= {name: scheme for i in part for name in groups[i].names}
            converted = model.convert(model.recipe(scheme, chosen))
            with _finely(model.root, converted):
                for i in part:
                    with _swapped(model.root, groups[i].callers, converted):
                        sums = reference.compare(model.root)
                    packed = [converted.get_submodule(name) for name in groups[i].owners]
                    tensors = [x.get_buffer(name) for x in packed for name in (PACKED, SCALE)]
                    if math.isfinite(kl := mean_kl(sums)):
                        found[i][scheme] = Cost(sum(each.nbytes for each in tensors), kl)
                    current().step()
    return found


@contextmanager
def _swapped(
    root: nn.Module, callers: Collection[nn.Module], converted: nn.Module
) -> Iterator[None]:
    """Have a float model call some modules of a model converted from it."""
    found = list(root.named_modules(remove_duplicate=False))
    with ExitStack() as stack:
        for path in [path for path, module in found if path and module in callers]:
            parent, _, last = path.rpartition(".")
            holder = root.get_submodule(parent)
            stack.callback(holder._modules.__setitem__, last, holder._modules[last])
            holder._modules[last] = converted.get_submodule(path)
        yield


@dataclass
class Trials:
    """Whole models, each converted and measured once.

    Attributes:
        schemes: to choose from.
        text: tokens of the parts of the data.
        found: those that were measured for a budget, in order.
    """

    model: _Model
    groups: Sequence[_Group]
    costs: Sequence[Mapping[str, Cost]]
    reference: Reference
    schemes: Sequence[str]
    text: Mapping[str, int]
    found: dict[Schemes, Candidate] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """The weights of all groups."""
        return sum(group.weights for group in self.groups)

    def choose(self, budget: Mapping[str, float]) -> Allocation:
        """Return the best model within a budget, {"bits": ...} or {"kl": ...}.

        Raises OptionError if there is none.
        """
        self.found.clear()
        if "kl" in budget:
            chosen = self._smallest(budget["kl"])
            if chosen.kl > budget["kl"]:
                raise OptionError(
                    f"kl={budget['kl']:g}: the nearest model has {chosen.kl:.6g} on held-out text, "
                    f"at {chosen.bits:.3f} bits a weight. Give a larger kl, or schemes of more "
                    "bits."
                )
            limit = chosen.bytes
        else:
            limit = math.floor(budget["bits"] * self.weights / 8 + 1e-6)
            best = best_within(self.costs, limit)
            if best is None:
                least = total(self.costs, _ends(self.costs)[0]).bytes
                raise _too_few(budget["bits"], 8 * least / self.weights)
            if set(best) == {FLOAT}:
                bits = 8 * total(self.costs, best).bytes / self.weights
                raise OptionError(
                    f"bits={budget['bits']:g}: the model as it is has {bits:.4f} bits a weight, so "
                    "nothing is to be quantized. Give fewer."
                )
            chosen = self._measure(best, "allocated")
        others = _uniform(self.costs, self.schemes, limit)
        uniforms = [self._measure(each, label) for label, each in others.items()]
        uniform = min(uniforms, key=lambda each: (each.kl, each.bytes), default=None)
        if uniform is not None and uniform.kl <= chosen.kl:
            if uniform.schemes != chosen.schemes:
                _log.warning(
                    "%s has KL %.6g on held-out text, the mixture %.6g: it is returned",
                    *(uniform.label, uniform.kl, chosen.kl),
                )
            chosen = uniform
        low, high = (total(self.costs, each).bytes for each in _ends(self.costs))
        budgets = [low + (high - low) * i / _POINTS for i in range(_POINTS + 1)]
        points = {total(self.costs, best_within(self.costs, each) or ()) for each in budgets}
        return Allocation(
            budget=dict(budget),
            recipe=self.recipe(chosen.schemes),
            groups=tuple(
                GroupScheme(group.names, group.weights, scheme, dict(costs))
                for group, scheme, costs in zip(
                    self.groups, chosen.schemes, self.costs, strict=True
                )
            ),
            chosen=chosen,
            uniform=uniform,
            measured=tuple(self.found.values()),
            curve=tuple(
                {
                    "bits": 8 * each.bytes / self.weights,
                    "bytes": each.bytes,
                    "predicted": each.kl,
                }
                for each in sorted(points, key=lambda each: each.bytes)
            ),
            text=self.text,
            is_uniform=chosen.schemes in others.values(),
        )

    def recipe(self, schemes: Schemes) -> Recipe:
        """Return the recipe of a model, whose main scheme is that of most of its weights."""
        sizes = dict.fromkeys(self.model.plans, 0)
        chosen = dict.fromkeys(self.model.unreached(self.groups), FLOAT)
        for group, scheme in zip(self.groups, schemes, strict=True):
            if scheme != FLOAT:
                sizes[scheme] += group.weights
            chosen |= dict.fromkeys(group.names, scheme)
        return self.model.recipe(max(sizes, key=lambda each: sizes[each]), chosen)

    def _measure(self, schemes: Schemes, label: str) -> Candidate:
        """Return a model, once it is measured; one that stays as it is has no KL.

        The last label that is given for its schemes is that of the model.
        """
        if schemes not in self.found:
            cost = total(self.costs, schemes)
            facts = (8 * cost.bytes / self.weights, cost.bytes, cost.kl)
            measured: tuple[float, float | None, float | None] = (0.0, 0.0, 0.0)
            if set(schemes) != {FLOAT}:
                model = self.model.convert(self.recipe(schemes))
                with fast_dtype(model):
                    sums = self.reference.compare(model)
                table = np.full((len(sums), len(SUMS)), np.nan)
                table[:, [SUMS.index("kl"), SUMS.index("tokens")]] = sums
                low, high = bootstrap_intervals(table, Bootstrap()).get("kl", (None, None))
                measured = (mean_kl(sums), low, high)
            self.found[schemes] = Candidate(label, *facts, *measured, schemes)
        self.found[schemes] = dataclasses.replace(self.found[schemes], label=label)
        return self.found[schemes]

    def _smallest(self, kl: float) -> Candidate:
        """Return the smallest model that is measured to be within a KL, or else the nearest one."""
        # The predictions between which the wanted one is, and how far they are off.
        good, bad = 0.0, math.inf
        asked, least = kl, _ends(self.costs)[0]
        for _ in range(_TRIES):
            schemes = smallest_within(self.costs, asked)
            if schemes is None or set(schemes) == {FLOAT}:
                break
            known = schemes in self.found
            each = self._measure(schemes, "allocated")
            if each.kl <= kl:
                good = max(good, asked, each.predicted)
                if each.kl >= (1 - _NEAR) * kl or schemes == least:
                    break
            else:
                bad = min(bad, each.predicted)
            scaled = each.predicted * kl / each.kl if each.kl else 2 * asked
            if known or not good < scaled < bad:
                scaled = good + (bad - good) / 2 if bad < math.inf else 2 * asked
            asked = scaled
        within = [each for each in self.found.values() if each.kl <= kl]
        if within:
            return min(within, key=lambda each: (each.bytes, each.kl))
        # The choice with the least predicted KL that quantizes something.
        best = [min(each, key=lambda s: each[s].kl) for each in self.costs]
        if set(best) == {FLOAT}:
            options = [
                (cost.kl, i, scheme)
                for i, each in enumerate(self.costs)
                for scheme, cost in each.items()
                if scheme != FLOAT
            ]
            best[min(options)[1]] = min(options)[2]
        return self._measure(tuple(best), "allocated")


Costs = Sequence[Mapping[str, Cost]]


def total(costs: Costs, chosen: Sequence[str]) -> Cost:
    """Return the sums over groups of their costs in the chosen schemes."""
    each = [cost[scheme] for cost, scheme in zip(costs, chosen, strict=True)]
    return Cost(sum(one.bytes for one in each), math.fsum(one.kl for one in each))


def best_within(costs: Costs, limit: float) -> Schemes | None:
    """Return the schemes of least total KL within a number of bytes, or None if all are larger."""
    return _solved(costs, limit, lambda cost: (cost.bytes, cost.kl))


def smallest_within(costs: Costs, kl: float) -> Schemes | None:
    """Return the schemes of fewest bytes within a total KL, or None if there are none."""
    return _solved(costs, kl, lambda cost: (cost.kl, cost.bytes))


def _solved(
    costs: Costs, limit: float, pair: Callable[[Cost], tuple[float, float]]
) -> Schemes | None:
    places = cheapest([[pair(cost) for cost in each.values()] for each in costs], limit)
    if places is None:
        return None
    return tuple(list(each)[place] for each, place in zip(costs, places, strict=True))


def cheapest(groups: Sequence[Sequence[tuple[float, float]]], limit: float) -> list[int] | None:
    """Return the choice of each group with the least sum of values: the multiple-choice knapsack.

    Args:
        groups: the choices (weight, value) of each, finite numbers from 0 on.
        limit: of the sum of weights.

    Returns:
        The place of the choice in each group, exactly; None if the lightest ones are too heavy.
    """
    # Importing scipy.optimize takes a while.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    # Sums in another order differ by as much.
    room = limit * (1 + 1e-12)
    if math.fsum(min(choice[0] for choice in choices) for choices in groups) > room:
        return None
    owner = np.repeat(np.arange(len(groups)), [len(choices) for choices in groups])
    table = np.array([choice for choices in groups for choice in choices], dtype=np.float64)
    # The solver's tolerances are absolute.
    weight, value = (each / max(each.max(), 1e-300) for each in table.T)
    one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    within = room / max(table[:, 0].max(), 1e-300)
    found = milp(
        1e3 * value,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(weight[None], ub=within)],
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    places = [int(found.x[owner == i].argmax()) for i in range(len(groups))]
    sums = math.fsum(choices[place][0] for choices, place in zip(groups, places, strict=True))
    # Within its tolerance the solver may be above the limit.
    return places if sums <= room else cheapest(groups, limit - (sums - limit))


def _ends(costs: Costs) -> tuple[Schemes, Schemes]:
    """Return the smallest choice of all, and the largest."""
    low, high = (
        tuple(end(each, key=lambda s: each[s].bytes) for each in costs) for end in (min, max)
    )
    return low, high


def _uniform(costs: Costs, schemes: Sequence[str], limit: float) -> dict[str, Schemes]:
    """Return uniform choices within a number of bytes, by name.

    They have one scheme; or the largest that fits, and the next larger one for the first groups,
    as many as fit. A group that cannot have the scheme has the smallest that it can.
    """
    smallest = _ends(costs)[0]
    alike = {
        scheme: tuple(scheme if scheme in x else s for x, s in zip(costs, smallest, strict=True))
        for scheme in schemes
    }
    sized = sorted(schemes, key=lambda each: total(costs, alike[each]).bytes)
    fitting = [each for each in sized if total(costs, alike[each]).bytes <= limit]
    found = {f"uniform {scheme}": alike[scheme] for scheme in fitting if scheme != FLOAT}
    if fitting and len(fitting) < len(sized):
        low, high = fitting[-1], sized[len(fitting)]
        mixed, size = list(alike[low]), total(costs, alike[low]).bytes
        for i, scheme in enumerate(alike[high]):
            more = costs[i][scheme].bytes - costs[i][mixed[i]].bytes
            if size + more <= limit:
                mixed[i], size = scheme, size + more
        if tuple(mixed) != alike[low]:
            found[f"{high} first, then {low}"] = tuple(mixed)
    return found
