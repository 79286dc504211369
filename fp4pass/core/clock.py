"""A clock that waits for a GPU."""

from __future__ import annotations

import time

import torch


class Clock:
    """Tells how long things take, on a GPU to their end."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.began = device, 0.0
        self.lap()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self.began = self.began, time.perf_counter()
        return self.began - before
