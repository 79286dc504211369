"""The progress of a distillation: its history, its best state, and the file that keeps them."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ...core.files import path_of
from ...core.fingerprint import digest_of
from ...distributed import reshard
from ...errors import CheckpointError, StateError
from .optimizer import Optimizer, local
from .record import Evaluated

# For the number of the process.
_FILE = "distillation-{}.pt"


@dataclass(frozen=True)
class Kept:
    """The file of a distillation.

    Attributes:
        file: where it is, or will be.
        call: the digest that tells one distillation from another.
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
        digest, data = digest_of(call, tensors), dict[str, Any]()
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


class Run:
    """The progress of a distillation.

    Attributes:
        student: whose weights are trained.
        history: the start and every evaluation.
        first: what is trained at the start, on the CPU, by name.
        best_state: the same at the best of them.
        step: steps that were taken.
        seconds: that they took.
    """

    def __init__(self, student: nn.Module, start: Evaluated, kept: Kept | None) -> None:
        self.student, self.history, self.kept = student, [start], kept
        self.best_state = self.first = trained_state(student)
        self.step, self.seconds = 0, 0.0

    @property
    def start(self) -> Evaluated:
        """The model as it was converted."""
        return self.history[0]

    @property
    def best(self) -> Evaluated:
        """The evaluation with the least KL, the first of equal ones."""
        return min(self.history, key=lambda each: each.kl)

    def add(self, found: Evaluated) -> None:
        """Note an evaluation of the student as it is."""
        self.history.append(found)
        if self.best is found:
            self.best_state = trained_state(self.student)

    def save(self, optimizer: Optimizer) -> None:
        """Write everything to the file, if there is one."""
        if self.kept is None:
            return
        self.kept.write(
            {
                "step": self.step,
                "seconds": self.seconds,
                "history": [astuple(each) for each in self.history],
                "best": self.best_state,
                "now": trained_state(self.student),
                "optimizer": optimizer.state(),
            }
        )

    def restore(self, optimizer: Optimizer) -> None:
        """Go on where the file ended, if there was one."""
        if self.kept is None or not self.kept.data:
            return
        data = self.kept.data
        self.step, self.seconds = data["step"], data["seconds"]
        self.history = [Evaluated(*each) for each in data["history"]]
        self.best_state = data["best"]
        fill(self.student, data["now"])
        optimizer.load(data["optimizer"])


@torch.no_grad()
def trained_state(student: nn.Module) -> dict[str, Tensor]:
    """Return copies of all that training changes, on the CPU."""
    named = student.named_parameters()
    own = {name: local(each.detach()) for name, each in named if each.requires_grad}
    return {name: each.to("cpu", copy=True) for name, each in own.items()}


@torch.no_grad()
def fill(student: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the result of `trained_state` into a student."""
    reshard(student)
    named = student.named_parameters()
    own = {name: local(each.detach()) for name, each in named}
    for name, each in state.items():
        own[name].copy_(each)
