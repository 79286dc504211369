"""Workflows on converted models that use the public API alone: learn, merge, allocate.

`distill` trains the codes of a whole model to predict what the original predicts. For a loop of
your own, `trainable` gives the layers of a converted model latent weights to learn, `kl_loss` is
the loss, and `freeze` makes the student a converted model again. `merge` takes LoRA adapters into
packed weights. `allocate` chooses a scheme for each layer under a budget.
"""

from .allocate import SCHEMES, Allocation, allocate
from .distill import Distillation, distill
from .divergence import kl_loss
from .latent import freeze, trainable
from .merge import Merged, merge

__all__ = [
    "SCHEMES",
    "Allocation",
    "Distillation",
    "Merged",
    "allocate",
    "distill",
    "freeze",
    "kl_loss",
    "merge",
    "trainable",
]
