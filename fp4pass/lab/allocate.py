"""allocate: choose a scheme for each layer under a budget of bytes or of KL, by measuring."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from .. import quantization as qn
from .. import record as rec
from ..api import convert
from ..core.names import covering_globs
from ..core.progress import current, shown
from ..distributed import ranks
from ..errors import ABOVE_0, CalibrationError, OptionError, StateError, expected, some
from ..errors import require_number as require
from ..evaluation import SUMS, bootstrap_intervals, fast_dtype, require_evaluating
from ..methods import MethodChoice, Sse
from ..quantization import LayerPlan, Recipe
from ..record import SCHEME_FIELDS, LinearConfig, LinearOptions, Rule, Rules, Scheme, scheme_fields
from . import divergence as kls

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)

# The schemes to choose from, where none are given.
SCHEMES: Final = ("nvfp4a16", "fp8a16", "bf16")

# The scheme of layers that stay as they are, in a report, and its names.
FLOAT = "float"
_FLOATS = (FLOAT, "bf16", "bfloat16")

# Windows beside those that are measured, for methods that need text; conversions for a KL.
_MORE, _TRIES = 128, 6

# The scheme of each group, in order.
Schemes = tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """The cost of a group in a scheme."""

    bytes: int  # of codes and block scales, or of the float weights
    kl: float  # KL(original || model with this group alone in the scheme), nats per token


@dataclass(frozen=True)
class GroupScheme:
    """A group of layers that engines fuse, and its scheme."""

    layers: tuple[str, ...]
    weights: int
    scheme: str  # "float" for layers that stay as they are
    costs: Mapping[str, Cost] = field(hash=False)  # by scheme

    @property
    def bits(self) -> float:
        """Bits of a weight in the chosen scheme."""
        return 8 * self.costs[self.scheme].bytes / self.weights


@dataclass(frozen=True)
class Candidate:
    """A whole model that was converted and measured on held-out text."""

    label: str  # "allocated", or the name of a uniform one
    bits: float  # of a weight, codes and block scales included
    bytes: int  # of all weights
    predicted: float  # the sum of the KL of the groups
    kl: float  # KL(original || model) on held-out text, nats per token
    low: float | None  # end of the interval of `kl`; None for a single window
    high: float | None
    schemes: tuple[str, ...] = field(repr=False)  # of each group


@dataclass(frozen=True)
class Allocation:
    """The scheme of each layer under a budget; print it for a table.

    Attributes:
        budget: what was asked for, {"bits": ...} or {"kl": ...}.
        recipe: of the model, for `convert(model, **allocation.recipe.arguments())`.
        groups: each with `layers`, `weights`, its `scheme`, its `bits`, and its `costs` by scheme,
            each with `bytes` and `kl`, as measured with this group alone.
        chosen: the model that was converted and measured: its `label`, `bits` of a weight, `bytes`,
            `predicted` KL, `kl`, `low` and `high` of its interval, `schemes` of the groups.
        uniform: the best uniform model of at most the same bytes, None if there is none; a uniform
            one has one scheme, or a larger one for the first layers.
        measured: all models that were measured, `chosen` and `uniform` among them.
        text: tokens of the parts of the data.

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
    text: Mapping[str, int] = field(hash=False)

    @property
    def is_uniform(self) -> bool:
        """Whether a uniform model was no worse, and is chosen."""
        return self.chosen == self.uniform

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
            ['budget', 'chosen', 'groups', 'measured']
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
        return "\n".join([f"{text}.", "", *rec.table_lines(models), "", *rec.table_lines(groups)])


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
    rec.check_options(options)
    budget = {name: float(x) for name, x in (("bits", bits), ("kl", kl)) if x is not None}
    if len(budget) != 1:
        raise OptionError(
            f"{expected('The budget', 'bits= or kl=', 'both' if budget else 'neither')} bits=5.0 "
            "is for the best model of 5 bits a weight, kl=0.02 for the smallest one within that KL."
        )
    for name, limit in budget.items():
        require(name, "a positive number", limit, float, ABOVE_0)
    for name, number in (("windows", windows), ("held_out", held_out), ("seq_len", seq_len)):
        require(name, "at least 1", number, least=1)
    given: dict[str, Any] = {"method": Sse() if method is None else method, **options}
    search = _search(model, schemes, rec.check_rules(rules), given)
    root = search.root
    with shown("allocate", progress), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        more = _MORE if any(_needs_text(each.config) for each in search.planned) else 0
        parts = _parts(root, (windows, held_out, more), data, tokenizer, seq_len)
        search.finished, search.data = folder, parts["calibration"]
        with _finely(root):
            original = kls.predictions(root, parts["measured"])
            groups = search.groups = _groups(search, parts["measured"])
        room = math.floor((bits or 0.0) * search.weights / 8 + 1e-6)
        sizes = [math.fsum(f(x.bytes.values()) for x in groups) for f in (min, max)]
        least, most = (8 * size / search.weights for size in sizes)
        if bits is not None and not least <= bits < (most if search.keeps_float else math.inf):
            raise OptionError(
                f"bits={bits:g}: expected from {least:.4f}, the bits of the smallest schemes, to "
                f"below {most:.4f}, those of the largest. Give others, or other schemes."
            )
        costs = search.costs = _measure(search, original)
        with fast_dtype(root):
            search.original = kls.predictions(root, parts["held_out"])
        if kl is not None:
            chosen = search.smallest(kl)
            room = chosen.bytes
        else:
            chosen = search.measure(cheapest(costs, room, "bytes") or (), "allocated")
        every = (*search.plans, *((FLOAT,) if search.keeps_float else ()))
        uniforms = [search.measure(x, name) for name, x in _uniform(costs, every, room).items()]
    uniform = min(uniforms, key=lambda each: (each.kl, each.bytes), default=None)
    if uniform is not None and uniform.kl <= chosen.kl:
        _log.info("no mixture is better than %s", uniform.label)
        chosen = uniform
    return Allocation(
        budget=budget,
        recipe=search.recipe(chosen.schemes),
        groups=tuple(
            GroupScheme(group.names, group.weights, scheme, cost)
            for group, scheme, cost in zip(groups, chosen.schemes, costs, strict=True)
        ),
        chosen=chosen,
        uniform=uniform,
        measured=tuple(search.found.values()),
        text={name: kls.token_count(part) for name, part in parts.items()},
    )


def _search(
    model: nn.Module, schemes: Sequence[str], rules: tuple[Rule, ...], options: dict[str, Any]
) -> _Search:
    """Return what searches for the schemes of a model. Raises OptionError, StateError."""
    root = rec.unwrap(model)
    if qn.require_float(root, "allocate") is not None or isinstance(root, fx.GraphModule):
        raise StateError(
            "The model is prepared, or a graph. allocate converts copies of a live float model: "
            "start from that; the rules fit its graph, too."
        )
    require_evaluating(root)
    if ranks().size > 1:
        raise OptionError("allocate runs in one process. Convert with its rules in all of them.")
    names = tuple(dict.fromkeys(each for each in schemes if each not in _FLOATS))
    fields = {name: scheme_fields(name) for name in names}
    keeps_float = any(each in _FLOATS for each in schemes)
    if not names or len(names) + keeps_float < 2:
        got = ", ".join(map(str, schemes)) or "none"
        raise OptionError(
            f"{expected('schemes', 'two or more, at least one that quantizes', got)} Add 'bf16' to "
            "leave layers as they are, or call convert for a single scheme."
        )
    for where, given in (("the options", options), *rules):
        if beside := [name for name in SCHEME_FIELDS if name in (given or {})]:
            raise OptionError(f"schemes decides {beside[0]}. Leave it out of {where}.")
    plans = {name: qn.plan_layers(root, LinearConfig(name, **options), rules) for name in fields}
    for plan in plans.values():
        qn.require_layers(plan)
    return _Search(root, plans, keeps_float, rules, options)


def _parts(
    root: nn.Module, counts: tuple[int, int, int], data: Any, tokenizer: Any, seq_len: int
) -> dict[str, list[Any]]:
    """Return batches to measure groups on, to measure models on, and to calibrate on."""
    windows, held_out, _ = counts
    found = kls.read_windows(root, data, tokenizer, sum(counts), seq_len=seq_len)
    if len(found) < 2:
        raise CalibrationError(
            "data: expected two windows or more, one to measure on and one to hold out, got "
            f"{len(found)} of up to {seq_len} tokens. Give more text, or a smaller seq_len."
        )
    apart, rest = kls.divided(found, min(held_out, len(found) // 2))
    measured, _ = kls.divided(rest, min(windows, len(rest)))
    parts = {"measured": measured, "held_out": apart, "calibration": rest}
    return {name: kls.together(root, part) for name, part in parts.items()}


def _needs_text(config: LinearConfig) -> bool:
    return bool(config.needs or config.has_input_scale)


@dataclass
class _Search:
    """A float model, its plan in each scheme, its groups, and whole models that were measured."""

    root: nn.Module
    plans: Mapping[str, qn.Plan]
    keeps_float: bool
    rules: tuple[Rule, ...]  # of the user
    options: Mapping[str, Any]  # of LinearConfig
    finished: str = ""  # a folder for finished searches
    data: Sequence[Any] = ()  # to calibrate on
    groups: Sequence[_Group] = ()
    costs: Costs = ()
    original: kls.Predictions = ()  # on held-out text
    found: dict[Schemes, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = {each.name: each for plan in self.plans.values() for each in plan.layers}
        self.names = [each.name for each in next(iter(self.plans.values())).entries]
        self.planned = [found[name] for name in self.names if name in found]

    @property
    def weights(self) -> int:
        """The weights of all groups."""
        return sum(group.weights for group in self.groups)

    def recipe(self, schemes: Sequence[str]) -> Recipe:
        """Return the recipe of a model with a scheme for each group."""
        chosen = {layer.name: FLOAT for layer in self.planned}
        for group, scheme in zip(self.groups, schemes, strict=True):
            chosen |= dict.fromkeys(group.names, scheme)
        # The options of the rule of the user stay.
        alike: dict[str, tuple[dict[str, Any] | None, list[str]]] = {}
        for name, scheme in chosen.items():
            own = (qn.matching_rule(name, self.rules) or ("", None))[1] or {}
            options = None if scheme == FLOAT else {**own, **scheme_fields(scheme)}
            alike.setdefault(repr(options), (options, []))[1].append(name)
        members: dict[str, set[str]] = {}
        for name in self.names:
            members.setdefault(_pattern(name), set()).add(name)
        found: list[Rule] = []
        left = set(self.names)
        # The first match wins, so that patterns of the most common scheme, the last, may be wide.
        for options, names in sorted(alike.values(), key=lambda each: len(each[1])):
            left -= set(names)
            # Of experts one pattern is for all that have one scheme.
            short = {n: _pattern(n) if members[_pattern(n)] <= set(names) else n for n in names}
            globs = covering_globs(list(dict.fromkeys(short.values())), {*map(_pattern, left)})
            found += [(glob, options) for glob in globs]
        main = max(self.plans, key=list(chosen.values()).count)
        return Recipe(LinearConfig(main, **self.options), (*found, *self.rules))

    def convert(self, schemes: Sequence[str]) -> nn.Module:
        """Return a converted copy of the model."""
        # Inference tensors could not be written to.
        with torch.inference_mode(False):
            model = copy.deepcopy(self.root)
        recipe = self.recipe(schemes)
        data = list(self.data) if any(map(_needs_text, recipe.configs())) else None
        return convert(model, **recipe.arguments(), data=data, resume=self.finished)

    def measure(self, schemes: Schemes, label: str) -> Candidate:
        """Return a model, once it is measured, with the last label that is given for it."""
        known = self.found.get(schemes)
        if known is None:
            cost = total(self.costs, schemes)
            model = self.convert(schemes)
            with fast_dtype(model):
                sums = kls.compare(model, self.original)
            table = np.full((len(sums), len(SUMS)), np.nan)
            table[:, [SUMS.index("kl"), SUMS.index("tokens")]] = sums
            low, high = bootstrap_intervals(table).get("kl", (None, None))
            facts = (8 * cost.bytes / self.weights, cost.bytes, cost.kl)
            known = Candidate(label, *facts, kls.mean_kl(sums), low, high, schemes)
        self.found[schemes] = dataclasses.replace(known, label=label)
        return self.found[schemes]

    def smallest(self, kl: float) -> Candidate:
        """Return the smallest of a few models that is measured to be within a KL."""
        asked, tried = kl, list[Candidate]()
        while len(tried) < _TRIES:
            schemes = cheapest(self.costs, asked, "kl")
            if schemes is None or set(schemes) == {FLOAT} or schemes in self.found:
                break
            each = self.measure(schemes, "allocated")
            tried.append(each)
            # Other predictions are off by about as much.
            asked = each.predicted * kl / each.kl if each.kl else 2 * asked
            asked *= 1 if each.kl <= kl else 0.97
        within = [each for each in tried if each.kl <= kl]
        if not within:
            one = (c.kl for each in self.costs for s, c in each.items() if s != FLOAT)
            least = math.fsum(min(c.kl for c in each.values()) for each in self.costs) or min(one)
            nearest = min((each.kl for each in tried), default=least)
            raise OptionError(
                f"kl={kl:g}: the nearest model has {nearest:.6g}. Give a larger kl, or schemes of "
                "more bits."
            )
        return min(within, key=lambda each: (each.bytes, each.kl))


class _Group(NamedTuple):
    """Layers that get one scheme: they read one input, share a weight, or are all experts."""

    names: tuple[str, ...]
    weights: int
    bytes: dict[str, int]  # by the schemes that all of them can have
    callers: set[nn.Module]  # the modules that read the weights when they are called


def _pattern(name: str) -> str:
    """Return a name with a * for each number below the first, as those of experts in a layer."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(
        "*" if first < i < len(parts) - 1 and part.isdigit() else part
        for i, part in enumerate(parts)
    )


def _groups(search: _Search, batches: Sequence[Any]) -> list[_Group]:
    """Return the groups of the layers that batches reach. Raises StateError without any."""
    inputs = _inputs(search.root, {qn.caller_of(each.module) for each in search.planned}, batches)

    def keys(layer: LayerPlan) -> set[object]:
        pattern = _pattern(layer.name)
        parent = pattern.rpartition(".")[0]
        found: set[object] = {("weight", layer.weight_key)}
        if layer.stage:
            return found | {("stage", parent, layer.stage)}
        found |= {("experts", pattern)} if "*" in pattern else set()
        return found | {(parent, each) for each in inputs.get(layer.module, ())}

    groups, unreached = [], list[str]()
    plans = {name: {each.name: each for each in plan.layers} for name, plan in search.plans.items()}
    for members in qn.joined(search.planned, keys):
        names = tuple(each.name for each in members)
        callers = {qn.caller_of(each.module) for each in members}
        if callers.isdisjoint(inputs):
            unreached += names
            continue
        alone = {each.weight_key: each for each in reversed(members)}.values()
        bits: dict[str, float] = {}
        for scheme, plan in plans.items():
            if all(name in plan for name in names):
                found = [plan[each.name] for each in alone]
                sizes = [
                    math.prod(x.shape) * x.config.format.bits_per_weight(x.shape) for x in found
                ]
                bits[scheme] = sum(sizes)
        if search.keeps_float or not bits:
            bits[FLOAT] = sum(8 * x.module.get_parameter("weight").nbytes for x in alone)
        weights = sum(math.prod(each.shape) for each in alone)
        groups.append(_Group(names, weights, {k: round(n / 8) for k, n in bits.items()}, callers))
    if not groups:
        raise StateError(
            f"No window reaches {some(unreached)}. Give data that does, as batches of the model."
        )
    if unreached:
        _log.warning("the text does not reach %s: these layers stay as they are", some(unreached))
    return groups


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
            kls.logits_of(root, batch)
    return found


@contextmanager
def _finely(*models: nn.Module) -> Iterator[None]:
    """Have models compute in float32, if there is memory for it."""
    # Where bfloat16 rounds otherwise after a group, that alone has a KL as large as 8 bits do.
    needed: dict[torch.device, int] = {}
    for each in {tensor for model in models for tensor in model.parameters() if tensor.is_cuda}:
        size = 2 * each.nbytes if each.element_size() == 2 else 0
        needed[each.device] = needed.get(each.device, 0) + size
    fits = all(size < torch.cuda.mem_get_info(where)[0] / 2 for where, size in needed.items())
    with qn.in_float32(*models) if fits else fast_dtype(*models):
        yield


def _measure(search: _Search, original: kls.Predictions) -> list[dict[str, Cost]]:
    """Return the costs of each group in its schemes."""
    groups, root = search.groups, search.root
    found = [{s: Cost(n, 0.0) for s, n in group.bytes.items()} for group in groups]
    current().expect(sum(len(group.bytes.keys() - {FLOAT}) for group in groups), "groups")
    for scheme in search.plans:
        left = [i for i, group in enumerate(groups) if scheme in group.bytes]
        while left:
            # No two that have weights in one module of experts.
            part: list[int] = []
            for i in left:
                if all(groups[i].callers.isdisjoint(groups[j].callers) for j in part):
                    part.append(i)
            left = [i for i in left if i not in part]
            schemes = [scheme if i in part else FLOAT for i in range(len(groups))]
            converted = search.convert(schemes)
            with _finely(root, converted):
                for i in part:
                    with _swapped(root, groups[i].callers, converted):
                        kl = kls.mean_kl(kls.compare(root, original))
                    # Infinite where a model rules out what the original allows.
                    found[i][scheme] = Cost(groups[i].bytes[scheme], min(kl, 1e6))
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


def _uniform(costs: Costs, schemes: Sequence[str], room: float) -> dict[str, Schemes]:
    """Return uniform choices within a number of bytes, by name."""
    # They have one scheme; or the largest that fits, and the next larger one for the first groups,
    # as many as fit. A group that cannot have the scheme has the smallest that it can.
    smallest = [min(each, key=lambda s: each[s].bytes) for each in costs]
    alike = {
        scheme: [scheme if scheme in x else s for x, s in zip(costs, smallest, strict=True)]
        for scheme in schemes
    }
    sized = sorted((total(costs, each).bytes, scheme) for scheme, each in alike.items())
    fitting = [scheme for size, scheme in sized if size <= room]
    found = {f"uniform {scheme}": tuple(alike[scheme]) for scheme in fitting if scheme != FLOAT}
    if 0 < len(fitting) < len(sized):
        (size, low), (_, high) = sized[len(fitting) - 1 :][:2]
        mixed = list(alike[low])
        for i, scheme in enumerate(alike[high]):
            more = costs[i][scheme].bytes - costs[i][mixed[i]].bytes
            if size + more <= room:
                mixed[i], size = scheme, size + more
        if mixed != alike[low]:
            found[f"{high} first, then {low}"] = tuple(mixed)
    return found


Costs = Sequence[Mapping[str, Cost]]


def total(costs: Costs, chosen: Sequence[str]) -> Cost:
    """Return the sums over groups of their costs in the chosen schemes."""
    each = [cost[scheme] for cost, scheme in zip(costs, chosen, strict=True)]
    return Cost(sum(one.bytes for one in each), math.fsum(one.kl for one in each))


def cheapest(costs: Costs, limit: float, limited: Literal["bytes", "kl"]) -> Schemes | None:
    """Return the scheme of each group with the least sum: the multiple-choice knapsack, exactly."""
    # costs: of each group by scheme, finite from 0 on. `limit` is of the sum of bytes, or of KL;
    # the sum of the other is the least; None if the smallest costs exceed it.
    # Importing scipy.optimize takes a while.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    # Sums in another order differ by as much.
    room = limit * (1 + 1e-12)
    weights = [[getattr(cost, limited) for cost in each.values()] for each in costs]
    if math.fsum(map(min, weights)) > room:
        return None
    owner = np.repeat(np.arange(len(costs)), [len(each) for each in costs])
    table = [(cost.bytes, cost.kl) for each in costs for cost in each.values()]
    # The solver's tolerances are absolute.
    largest = np.maximum(np.max(table, axis=0), 1e-300)
    weight, value = (np.array(table) / largest).T[:: 1 if limited == "bytes" else -1]
    one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    within = room / largest[0 if limited == "bytes" else 1]
    found = milp(
        1e3 * value,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(weight[None], ub=within)],
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    places = [int(found.x[owner == i].argmax()) for i in range(len(costs))]
    size = math.fsum(each[place] for each, place in zip(weights, places, strict=True))
    if size > room:
        # Within its tolerance the solver may be above the limit.
        return cheapest(costs, limit - (size - limit), limited)
    return tuple(list(each)[place] for each, place in zip(costs, places, strict=True))
