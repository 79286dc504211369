"""Students sharded by FSDP2: two processes train what one does, and go on where they ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run

pytest.importorskip("transformers")


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    two = run(Path(__file__).with_name("training.py"), "distilled", tmp_path)
    for found in two:
        alone, shared, resumed = found["histories"]
        assert [each.step for each in alone] == [each.step for each in shared] == list(range(7))
        # Sums of gradients have another order.
        for a, b in zip(alone, shared, strict=True):
            assert b.kl == pytest.approx(a.kl, rel=1e-3)
            assert b.loss == (None if a.loss is None else pytest.approx(a.loss, rel=1e-3))
        assert resumed == shared and 0 < found["best"][0] == found["best"][1]
        for name, tensor in found["states"][0].items():
            same = (each.view(torch.uint8) for each in (tensor, found["states"][2][name]))
            assert torch.equal(*same), name
        # Of what the processes gathered a student is made that freezes to the codes of one process.
        for name, tensor in found["alone"].items():
            if name.endswith("weight_packed"):
                assert (tensor != found["packed"][name]).float().mean() < 1e-3
        assert found["files"] == ["distillation-0.pt", "distillation-1.pt"]
        assert "is sharded over processes. Load the whole state dict" in found["frozen"]
        assert "a multiple of the 2 processes, got 3" in found["batch"]
    assert two[0]["histories"] == two[1]["histories"]
