"""Private API of transformers (5.17, 5.23): what it makes of weights of a folder, made later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from .transformers import require_transformers


class Later(NamedTuple):
    """What makes a weight of a model, and what it is made of, mapped from files."""

    make: Callable[[], Tensor]
    sources: Sequence[Tensor]


@contextmanager
def made_later() -> Iterator[dict[str, Later]]:
    """Have `from_pretrained` leave what it merges or splits on the meta device.

    Yields what makes each such weight, by its name in the model.
    """
    require_transformers()
    from transformers.core_model_loading import WeightConverter

    convert: Any = WeightConverter.convert
    found: dict[str, Later] = {}

    def later(converter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        stored = converter.materialize_tensors()
        converter.collected_tensors = {
            key: [each.to("meta") for each in tensors] for key, tensors in stored.items()
        }
        empty = convert(converter, name, *args, **kwargs)
        own = {key: kwargs.get(key) for key in ("model", "config")}

        def make(target: str) -> Tensor:
            converter.collected_tensors = {key: list(each) for key, each in stored.items()}
            made: Any = convert(converter, name, **own)[target]
            tensor: Tensor = made[0] if isinstance(made, list) else made
            return tensor

        sources = [each for tensors in stored.values() for each in tensors]
        found.update({key: Later(functools.partial(make, key), sources) for key in empty})
        return empty

    WeightConverter.convert = later  # type: ignore
    try:
        yield found
    finally:
        WeightConverter.convert = convert  # type: ignore
