"""Choose a precision for each layer under a budget, by measuring the cost of each.

`allocate` returns an `Allocation`: rules for `convert`, predicted and measured KL, and the curve.
"""

from .allocating import SCHEMES, allocate
from .result import Allocation, Candidate, GroupScheme, Point
from .sensitivity import Cost

__all__ = ["SCHEMES", "Allocation", "Candidate", "Cost", "GroupScheme", "Point", "allocate"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
