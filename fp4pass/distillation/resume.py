"""How far a distillation is: its history, its best weights, and the file that keeps them."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from pickle import UnpicklingError
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


@dataclass(frozen=True)
class Kept:
    """The file of a distillation.

    Attributes:
        file: where it is, or will be.
        call: what tells one distillation from another.
        data: what it has, {} for a new one.
    """

    file: Path
    call: str
    data: dict[str, Any]

    @staticmethod
    def open(folder: str | os.PathLike[str], rank: int, model: nn.Module, call: Any) -> Kept:
        """Read the file of a process, if there is one.

        Args:
            folder: where it is; made if it does not exist.
            rank: the number of the process.
            model: before anything is trained.
            call: the other arguments.

        Raises:
            StateError: it is of another call.
            CheckpointError: it cannot be read.
        """
        file = path_of(folder, "resume") / _FILE.format(rank)
        tensors = {name: local(tensor) for name, tensor in model.state_dict().items()}
        digest, data = digest_of(call, tensors), {}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_file():
                data = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Delete the folder.") from error
        if data and data["call"] != digest:
            raise StateError(
                f"{file} keeps another distillation: of another model, other batches or other "
                "options. Make the same call as before, or delete the folder."
            )
        return Kept(file, digest, data)

    def write(self, data: dict[str, Any]) -> None:
        """Replace the file, which a kill leaves whole. Raises CheckpointError if it cannot be."""
        new = self.file.with_suffix(".new")
        try:
            torch.save({**data, "call": self.call}, new)
            os.replace(new, self.file)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.file} cannot be written: {error}.") from error


class Progress:
    """How far a distillation is.

    Attributes:
        student: whose weights are trained.
        history: the start and every evaluation.
        weights: the best so far, on the CPU, by name.
        step: steps that were taken.
        seconds: that they took.
        stopped: whether evaluations have stopped improving.
    """

    def __init__(self, student: nn.Module, history: list[Evaluated], kept: Kept | None) -> None:
        self.student, self.history, self.kept = student, history, kept
        self.weights = _trained(student)
        self.step, self.seconds, self.stopped = 0, 0.0, False

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
        """Write everything to the file, if there is one."""
        if self.kept is None:
            return
        data = {
            "step": self.step,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "history": [astuple(each) for each in self.history],
            "best": self.weights,
            "weights": _trained(self.student),
            "optimizer": optimizer.state(),
        }
        self.kept.write(data)

    def restore(self, optimizer: Optimizer) -> None:
        """Go on where the file ended, if there was one."""
        if self.kept is None or not self.kept.data:
            return
        data = self.kept.data
        self.step, self.seconds, self.stopped = data["step"], data["seconds"], data["stopped"]
        self.history = [Evaluated(*each) for each in data["history"]]
        self.weights = data["best"]
        _fill(self.student, data["weights"])
        optimizer.load(data["optimizer"])


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
