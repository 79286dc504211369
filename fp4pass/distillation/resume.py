"""How far a distillation is: its history, its best weights, and the file that keeps them."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.paths import path_of
from ..errors import CheckpointError, StateError
from ..quantization.search_cache import digest_of
from .optimizer import Optimizer, local
from .record import Evaluated

# For the number of the process.
_FILE = "distillation-{}.pt"


@dataclass
class Progress:
    """How far a distillation is.

    Attributes:
        student: whose weights are trained.
        history: the start and every evaluation.
        weights: the best so far, on the CPU, by name.
        call: what tells one distillation from another.
        file: where to keep it, None for nowhere.
        step: steps that were taken.
        seconds: that they took.
        stopped: whether evaluations have stopped improving.
    """

    student: nn.Module
    history: list[Evaluated]
    weights: dict[str, Tensor]
    call: str
    file: Path | None
    step: int = 0
    seconds: float = 0.0
    stopped: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> Evaluated:
        """The model as it was converted."""
        return self.history[0]

    @property
    def best(self) -> Evaluated:
        """The evaluation with the least KL, the first of equal ones."""
        return min(self.history, key=lambda each: each.kl)

    def add(self, found: Evaluated, patience: int) -> None:
        """Note an evaluation, and stop if so many in a row are not the best since the start."""
        self.history.append(found)
        if self.best is found:
            self.weights = _trained(self.student)
        later = self.history[1:]
        least = min(range(len(later)), key=lambda i: later[i].kl)
        self.stopped = len(later) - 1 - least >= patience

    def keep_best(self) -> None:
        """Give the student the best weights."""
        _fill(self.student, self.weights)

    def save(self, optimizer: Optimizer) -> None:
        """Write everything to the file, which a kill leaves whole."""
        if self.file is None:
            return
        kept = {
            "call": self.call,
            "step": self.step,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "history": [astuple(each) for each in self.history],
            "best": self.weights,
            "weights": _trained(self.student),
            "optimizer": optimizer.state(),
        }
        new = self.file.with_suffix(".new")
        try:
            torch.save(kept, new)
            os.replace(new, self.file)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.file} cannot be written: {error}.") from error

    def restore(self, optimizer: Optimizer) -> None:
        """Go on where the file ended, if there was one."""
        if not self.kept:
            return
        for name in ("step", "seconds", "stopped"):
            setattr(self, name, self.kept[name])
        self.history = [Evaluated(*each) for each in self.kept["history"]]
        self.weights = self.kept["best"]
        _fill(self.student, self.kept["weights"])
        optimizer.load(self.kept["optimizer"])
        self.kept = {}


def progress_in(
    folder: str | os.PathLike[str] | None,
    student: nn.Module,
    start: Evaluated,
    rank: int,
    call: Any,
) -> Progress:
    """Return the progress that a folder keeps, or that of a start.

    Raises StateError if it keeps that of another call, CheckpointError if it cannot be read.
    """
    weights = _trained(student)
    if folder is None:
        return Progress(student, [start], weights, "", None)
    root = path_of(folder, "resume")
    digest = digest_of(call, weights)
    file = root / _FILE.format(rank)
    found = Progress(student, [start], weights, digest, file)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            found.kept = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Delete the folder.") from error
    if found.kept and found.kept["call"] != digest:
        raise StateError(
            f"{file} keeps another distillation: of another model, other batches or other options. "
            "Make the same call as before, or delete the folder."
        )
    return found


@torch.no_grad()
def _trained(student: nn.Module) -> dict[str, Tensor]:
    """Return copies of what is trained, on the CPU."""
    named = student.named_parameters()
    own = {name: local(each.detach()) for name, each in named if each.requires_grad}
    return {name: each.cpu().clone() for name, each in own.items()}


@torch.no_grad()
def _fill(student: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, each in student.named_parameters():
        if name in weights:
            local(each.detach()).copy_(weights[name])
