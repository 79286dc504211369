"""Measure models: perplexity, KL divergence, agreement and output errors, with intervals.

`evaluate` runs a causal language model on a text and returns an `Evaluation`; two of them on the
same tokens have a `Difference`, whose fields are `Change`s. `output_errors` measures the converted
linear layers one by one. `token_windows` and `cut_windows` cut a text into windows of tokens.
Within `fast_dtype` models compute in the dtype that their CPU is fast in.
"""

from ..calibration.windows import cut_windows, token_windows
from ..quantization.observers.batches import fast_dtype
from .intervals import SUMS as SUMS
from .intervals import Change
from .intervals import intervals as bootstrap_intervals  # noqa: F401, for the lab
from .measure import Difference, Evaluation, evaluate, output_errors
from .measure import fitting_batch_size as fitting_batch_size
from .measure import logits_in as logits_in
from .measure import require_evaluating as require_evaluating
from .measure import token_kl as token_kl

__all__ = [
    "Change",
    "Difference",
    "Evaluation",
    "cut_windows",
    "evaluate",
    "fast_dtype",
    "output_errors",
    "token_windows",
]
