"""Tests of processes of their own, which take half a minute to start."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what reads the results of several processes as slow."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if is_here and not {"one", "two"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
