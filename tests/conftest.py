"""What every test runs under."""

from __future__ import annotations

import os

import torch

# Kernels run in Triton's interpreter where there is no GPU; it reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The tests are many and small; threads cost them more than they bring.
torch.set_num_threads(1)
