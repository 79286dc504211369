"""What two processes train together: python training.py NAME FOLDER."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from scenarios import DEVICE, SIZE, decoder, failure, main
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import fp4pass
from fp4pass.distillation import freeze, trainable


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
    options = {"steps": 6, "batch_size": 4, "lr": 0.02, "progress": False}
    model, original = converted()
    alone = copy.deepcopy(model)
    whole = fp4pass.distill(alone, original, windows(), **options)
    student = sharded(trainable(copy.deepcopy(model), original))
    found = fp4pass.distill(student, original, windows(), resume=folder / "run", **options)
    again = sharded(trainable(copy.deepcopy(model), original))
    resumed = fp4pass.distill(again, original, windows(), resume=folder / "run", **options)
    states = [
        get_model_state_dict(each, options=StateDictOptions(full_state_dict=True))
        for each in (student, again)
    ]
    plain = trainable(copy.deepcopy(model), original)
    plain.load_state_dict(states[0])
    freeze(plain)
    half, of_half = converted(torch.bfloat16)
    in_half = fp4pass.distill(sharded(trainable(half, of_half)), of_half, windows(), **options)
    return {
        "whole": whole.history,
        "sharded": found.history,
        "resumed": resumed.history,
        "bfloat16": in_half.history,
        "states": states,
        "packed": plain.state_dict(),
        "alone": alone.state_dict(),
        "frozen": failure(lambda: freeze(student)),
    }


if __name__ == "__main__":
    main(globals())
