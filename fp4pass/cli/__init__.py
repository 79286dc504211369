"""The command line `fp4pass`: a thin layer over the functions of the library."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = {"typer": "typer", "rich": "rich", "yaml": "pyyaml"}


def main() -> None:
    """Run the command line of this process, and exit."""
    missing = [
        package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(
            f"fp4pass: {', '.join(missing)} is missing: pip install 'fp4pass[cli]'", file=sys.stderr
        )
        raise SystemExit(2)
    from .app import app

    app()
