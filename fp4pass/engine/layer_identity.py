"""What decides the packed weights of a layer, as a digest that a later run finds again."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence

from torch import nn

from .._version import __version__
from ..core.describe import Description, Unknown
from ..core.fingerprint import digest_of
from ..distributed import ranks
from ..methods import resolve_method
from ..quantization.plan import LayerPlan, Plan
from .layer_stack import Stack

_log = logging.getLogger(__name__)


class Identities:
    """Digests of the layers of a model, in the order in which they are quantized.

    Where layers run, a layer depends on those before it, on what its stack is called with, and on
    all that it computes with; else on its weights and their statistics.
    """

    def __init__(self, runs: bool) -> None:
        self._runs = runs
        self._before = ""
        self._said = set[str]()

    def of(self, stack: Stack, index: int, own: Sequence[LayerPlan]) -> str:
        """Return the digest of a layer, whose tensors are where they are worked on.

        What cannot be identified has one that no other run finds.

        Args:
            stack: whose layer it is.
            index: which one.
            own: what is quantized in it.
        """
        group = ranks()
        with group.together():
            found = self._own(stack, index, own)
        found = digest_of(group.gather(found))
        if self._runs:
            self._before = found
        return found

    def _own(self, stack: Stack, index: int, own: Sequence[LayerPlan]) -> str:
        """Return what this process knows of it."""
        name = f"{stack.name}.{index}"
        description = Description()
        try:
            description.add([__version__, name, self._before])
            _add_plan(description, own)
            if self._runs:
                description.add(stack.layers[index])
                _add_calls(description, stack, index)
            else:
                _add_tensors(description, stack.layers[index])
            return description.digest()
        except Unknown as unknown:
            if str(unknown) not in self._said:
                self._said.add(str(unknown))
                _log.warning(
                    "stream: %s has %s, which cannot be told from another one: it is quantized "
                    "again by every call.",
                    name,
                    unknown,
                )
            return secrets.token_hex()


def _add_plan(description: Description, own: Sequence[LayerPlan]) -> None:
    for members in Plan(tuple(own)).by_weight():
        description.add([(each.name, each.shape, each.transposed) for each in members])
        config, stats = members[0].config, members[0].stats
        description.add([config, resolve_method(config.method)[0], stats])


def _add_calls(description: Description, stack: Stack, index: int) -> None:
    """Add what a layer is called with, as far as the layers before it do not decide it."""
    for call in stack.calls:
        if index == 0:
            description.add(call.hidden)
        if index == 0 or len(call.arguments) > 1:
            description.add(call.of(index))


def _add_tensors(description: Description, layer: nn.Module) -> None:
    for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers()):
        description.add([name, tensor])
