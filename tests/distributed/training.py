"""What two processes train together: python training.py NAME FOLDER."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from scenarios import DEVICE, SIZE, decoder, failure, main
from students import cut_off
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import fp4pass
from fp4pass.lab.learning import freeze, trainable


def windows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(96, (12, 24), generator=generator)


def converted(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    original = decoder().to(DEVICE, dtype)
    model = fp4pass.convert(copy.deepcopy(original), method="sse", weight_only=True)
    return model, original


def sharded(student: Any) -> Any:
    mesh = init_device_mesh(DEVICE.type, (SIZE,))
    for layer in student.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(student, mesh=mesh)


def distilled(folder: Path) -> dict[str, Any]:
    options = {"steps": 6, "batch_size": 4, "travel": 0.3, "progress": False}
    model, original = converted()
    alone = copy.deepcopy(model)
    whole = fp4pass.distill(alone, original, windows(), **options)
    students = [sharded(trainable(copy.deepcopy(model), original)) for _ in range(3)]
    found = fp4pass.distill(students[0], original, windows(), **options)
    kept = {"resume": folder / "run", **options}
    with cut_off(original, 6):
        fp4pass.distill(students[1], original, windows(), **kept)
    resumed = fp4pass.distill(students[2], original, windows(), **kept)
    states = [
        get_model_state_dict(each, options=StateDictOptions(full_state_dict=True))
        for each in students
    ]
    plain = trainable(copy.deepcopy(model), original)
    plain.load_state_dict(states[0])
    return {
        "histories": [whole.history, found.history, resumed.history],
        "best": [found.best.step, resumed.best.step],
        "states": states,
        "files": sorted(each.name for each in (folder / "run").iterdir()),
        "packed": freeze(plain).state_dict(),
        "alone": alone.state_dict(),
        "frozen": failure(lambda: freeze(students[0])),
        "batch": failure(
            lambda: fp4pass.distill(
                students[0], original, windows(), **{**options, "batch_size": 3}
            )
        ),
    }


if __name__ == "__main__":
    main(globals())
