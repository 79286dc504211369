"""Learn what a converted model stores: codes, block scales, norms and biases.

`distill` trains a whole model to predict what the original predicts. For a loop of one's own, `trainable`
gives the quantized layers of a converted model latent weights to learn, `parameter_groups` a rate
to each parameter, `kl_loss` is the loss, and `freeze` makes the student a converted model again.
"""

from .distilling import distill
from .loss import kl_loss
from .optimizer import parameter_groups
from .record import Distillation, Evaluated
from .student import freeze, trainable

__all__ = [
    "Distillation",
    "Evaluated",
    "distill",
    "freeze",
    "kl_loss",
    "parameter_groups",
    "trainable",
]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
