"""What every test runs under."""

from __future__ import annotations

import torch

# The tests are many and small; threads cost them more than they bring.
torch.set_num_threads(1)
