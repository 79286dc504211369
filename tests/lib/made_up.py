"""Results that nobody measured, for the tests of the pages: what both kinds have in common."""

from __future__ import annotations

from typing import Any

# What the results are about, but for their command, texts, original and rows.
ABOUT: dict[str, Any] = {
    "machine": "an abacus",
    "versions": {"python": "9.8"},
    "model": "nobody",
    "parameters": 1234567,
    "dtype": "float32",
    "window": 77,
    "calibration": {"file": "calib.txt", "windows": 5, "tokens": 385},
    "output_error_tokens": 154,
    "confidence": 0.875,
}


def value(middle: float, **more: Any) -> dict[str, Any]:
    """A number and its interval."""
    return {"value": middle, "low": middle - 0.25, "high": middle + 0.25, **more}
