"""The script that says what a few activation scales are worth, on the small model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EVAL = Path(__file__).parents[2] / "eval"
LINE = re.compile(r"(\w+) (\(.+\)|kernels|all scales): ([\d.]+)(?:, (\d+)% of the gain)?")


def test_more_candidates_are_better(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EVAL))
    for name in ("near_scales", "quality", "measuring"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import near_scales

    monkeypatch.setattr(sys, "argv", ["near_scales.py", "--window", "32", "--windows", "1"])
    near_scales.main()
    found = LINE.findall(capsys.readouterr().out)
    assert [name for name, *_ in found] == ["nvfp4"] * 6 + ["mxfp4"] * 2
    errors = [float(error) for _, _, error, _ in found]
    # Ordered from few to all, and none worse than naive.
    assert 1 > errors[0] > errors[1] > errors[2] > errors[3] > errors[4] > errors[5] > 0.5
    assert 1 > errors[6] >= errors[7]
    # What docs/quality.md says of those that the kernels try.
    assert found[2][1] == "kernels" and 80 <= int(found[2][3]) <= 90
