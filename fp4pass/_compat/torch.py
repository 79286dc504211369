"""Private APIs of torch, tested with 2.11 to 2.13."""

from __future__ import annotations

import torch


def intercepts_operators() -> bool:
    """Return whether a mode or a transform sees the operators of this thread.

    Fake tensors and make_fx are such modes, vmap and grad of torch.func such transforms.
    """
    transforms = torch._C._functorch.peek_interpreter_stack()
    return transforms is not None or torch._C._len_torch_dispatch_stack() > 0
