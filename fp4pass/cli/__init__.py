"""The command line `fp4pass`: a thin layer over the functions of the library."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line of this process, and exit."""
    names = {"transformers": "transformers", "jinja2": "jinja2", "yaml": "pyyaml"}
    missing = [package for name, package in names.items() if not importlib.util.find_spec(name)]
    if missing:
        print(
            f"fp4pass: {', '.join(missing)} is missing: pip install 'fp4pass[cli]'", file=sys.stderr
        )
        raise SystemExit(2)
    from .app import run

    raise SystemExit(run())
