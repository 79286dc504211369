"""Runs that real_model.py measures, by the name of their grid."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fp4pass.methods import method_from_dict

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """A conversion to measure.

    Attributes:
        by: its name in the table.
        scheme: as `convert` takes it.
        method: name and options; None where `options` has the quality.
        options: of `convert`, beside.
        data: what to calibrate on.
        tokens: how many; 0 for none.
        window: tokens of a window.
        seed: of the data.
        smoothing: the strength of `smooth` before it; 0 for none.
    """

    KEY: ClassVar[tuple[str, ...]] = ("by", "scheme", "data", "tokens", "window", "seed")

    by: str
    scheme: str = "nvfp4a16"
    method: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "own"
    tokens: int = 1 << 15
    window: int = 512
    seed: int = 0
    smoothing: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the values that tell runs apart."""
        return tuple(getattr(self, name) for name in self.KEY)

    def arguments(self) -> dict[str, Any]:
        """Return the keywords of `convert`."""
        method = {} if self.method is None else {"method": method_from_dict(self.method)}
        return {**method, **self.options}

    def row(self) -> dict[str, Any]:
        """Return the run as JSON has it."""
        return dataclasses.asdict(self)


GRIDS: dict[str, list[Run]] = {}


def methods(scheme: str) -> dict[str, dict[str, Any]]:
    """Return what of a method and of `convert` each row of the main table has, by its name."""
    cross = {"name": "gptq", "target": "cross"}
    found: dict[str, dict[str, Any]] = {
        "naive": {"method": {"name": "naive"}},
        "sse": {"method": {"name": "sse"}},
        "hessian": {"method": {"name": "hessian"}},
        "hessian, joint codes": {"method": {"name": "hessian", "codes": "joint"}},
        "gptq": {"method": {"name": "gptq"}},
        "cross": {"method": cross},
    }
    if not scheme.endswith("a16"):
        searched = {"activation_scales": "sse"}
        found |= {
            f"{name}, inputs sse": {"method": found[name]["method"], "options": searched}
            for name in ("hessian", "gptq", "cross")
        }
    return found


def _runs(scheme: str, names: tuple[str, ...] = (), **data: Any) -> list[Run]:
    """Return a run of each method, or of some; those that need no data have none."""
    weights = scheme.endswith("a16")
    found = []
    for name, given in methods(scheme).items():
        if names and name not in names:
            continue
        is_free = weights and name in ("naive", "sse")
        own = {"data": "none", "tokens": 0, "seed": 0} if is_free else {}
        found.append(Run(by=name, scheme=scheme, **given, **{**data, **own}))
    return found


def _one(found: list[Run]) -> list[Run]:
    """Return runs without those that are there already."""
    return list({run.key: run for run in found}.values())


_SCHEMES = ("nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4")
_CALIBRATED = ("hessian", "gptq", "cross")
_KINDS = ("own", "chats", "documents", "wiki", "mixed")


def _of_gptq(by: str, data: str, **options: Any) -> Run:
    return Run(by=by, method={"name": "gptq", **options}, data=data)


# Every method in each scheme, on text that the model writes.
GRIDS["methods"] = _one([r for s in _SCHEMES for n in SEEDS for r in _runs(s, seed=n)])
# What it is calibrated on.
GRIDS["kinds"] = _one(
    [r for k in _KINDS for n in SEEDS for r in _runs("nvfp4a16", _CALIBRATED, data=k, seed=n)]
)
# How much of it.
GRIDS["amounts"] = [
    run
    for power in (13, 14, 15, 16, 17, 18)
    for run in _runs("nvfp4a16", _CALIBRATED, tokens=1 << power)
]
# In which windows.
GRIDS["windows"] = [
    run
    for window in (128, 512, 2048)
    for run in _runs("nvfp4a16", _CALIBRATED, data="wiki", window=window)
]
# How far the Hessian is trusted.
GRIDS["shrinkage"] = [
    run
    for data in ("own", "documents")
    for run in (
        *(
            _of_gptq(f"gptq, shrinkage {share:g}", data, shrinkage=share)
            for share in (0.0, 0.1, 0.25, 0.5, 1.0)
        ),
        *(
            _of_gptq(f"gptq, damping {value:g}", data, damping=value, shrinkage=0.0)
            for value in (0.05, 0.5, 1.0)
        ),
        *(
            _of_gptq(f"cross, shrinkage {share:g}", data, target="cross", shrinkage=share)
            for share in (0.0, 0.5)
        ),
        *(
            _of_gptq(f"cross, target damping {value:g}", data, target="cross", target_damping=value)
            for value in (0.1, 2.0)
        ),
    )
]
# The recipes with a name, to be timed. Their noise is that of the methods behind them.
GRIDS["qualities"] = [
    Run(
        by=f'quality="{name}"',
        scheme=scheme,
        options={"quality": name},
        tokens=0 if name == "fast" and scheme.endswith("a16") else 1 << 15,
    )
    for scheme in _SCHEMES
    for name in ("fast", "good", "best")
]
# What a processor takes for them.
GRIDS["cpu"] = [
    *(run for run in GRIDS["qualities"] if run.scheme.startswith("nvfp4")),
    *(
        Run(
            by="naive",
            scheme=scheme,
            method={"name": "naive"},
            tokens=0 if scheme.endswith("a16") else 1 << 12,
        )
        for scheme in _SCHEMES
    ),
]
# With inputs in 4 bits: smoothed or not, how the inputs' scales are chosen, and how far what
# layers before did wrong counts.
_INPUTS: dict[str, dict[str, Any]] = {
    "sse": {"name": "sse"},
    "hessian": {"name": "hessian"},
    "gptq": {"name": "gptq"},
    **{
        f"cross, target damping {value:g}": {
            "name": "gptq",
            "target": "cross",
            "target_damping": value,
        }
        for value in (0.5, 2.0, 5.0, 20.0)
    },
}
GRIDS["inputs"] = [
    Run(
        by=", ".join([name, *(["smoothed"] if smoothing else []), f"inputs {inputs}"]),
        scheme=scheme,
        method=method,
        options={"activation_scales": inputs},
        smoothing=smoothing,
    )
    for scheme in ("nvfp4", "mxfp4")
    for smoothing in (0.0, 0.5)
    for inputs in ("naive", "sse")
    for name, method in _INPUTS.items()
]
# With inputs in FP8, beside weights alone; and a target that inputs in 4 bits gain by.
_CROSS = {"name": "gptq", "target": "cross"}
GRIDS["fp8_inputs"] = [
    *(
        Run(by=name, scheme=f"{fmt}{end}", method=method, tokens=1 << (12 if name == "sse" else 15))
        for fmt in ("mxfp4", "nvfp4")
        for name, method in (("sse", {"name": "sse"}), ("cross", _CROSS))
        for end in ("a16", "a8", "a8_block", "a8_tensor")
    ),
    Run(by="cross, target damping 2", scheme="mxfp4a8", method={**_CROSS, "target_damping": 2.0}),
]
# What tasks are measured of.
GRIDS["recovery"] = _one(
    [
        run
        for seed in SEEDS
        for scheme in ("nvfp4a16", "nvfp4", "mxfp4a16")
        for run in (
            *_runs(scheme, ("naive",), seed=seed),
            *(
                Run(by=f'quality="{name}"', scheme=scheme, options={"quality": name}, seed=seed)
                for name in ("good", "best")
            ),
        )
    ]
)
