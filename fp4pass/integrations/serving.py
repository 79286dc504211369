"""transformers' server with packed folders: the command line of `transformers serve`.

python -m fp4pass.integrations.serving DIR --continuous-batching
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._compat.transformers_serving import manager_with, run_server
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..errors import Fp4PassError, OptionError


def load_packed(name: str, device: Any, dtype: Any) -> Any:
    """Return the model of a packed folder, or None. Raises OptionError for another dtype."""
    if not is_packed(name):
        return None
    whole = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = load(name, device_map=whole if device == "auto" else device)
    if dtype not in (None, "auto", model.config.dtype):
        stored = str(model.config.dtype).removeprefix("torch.")
        raise OptionError(
            f"{name}: expected --dtype {stored}, in which it holds what is not packed, "
            f"got {dtype}. Leave the option out."
        )
    return model


def main() -> None:
    """Serve until it is stopped."""
    try:
        run_server(manager_with(load_packed))
    except Fp4PassError as error:
        print(f"fp4pass: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
