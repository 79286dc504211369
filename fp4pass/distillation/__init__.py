"""Distillation: train the quantized weights of a model to say what the original says.

`distill` is the whole of it. For a loop of one's own, `trainable` gives the quantized linear layers
of a converted model float weights to train, `parameter_groups` a learning rate to each, `kl_loss`
is the loss, and `freeze` makes the student a converted model again.
"""

from .linear import TrainableLinear
from .loop import distill
from .loss import kl_loss
from .optimizer import parameter_groups
from .record import Distillation, Evaluated
from .student import freeze, trainable

__all__ = [
    "Distillation",
    "Evaluated",
    "TrainableLinear",
    "distill",
    "freeze",
    "kl_loss",
    "parameter_groups",
    "trainable",
]
