"""What fp4pass asks of Inductor; the only file that touches private parts of torch."""

from __future__ import annotations

import os
import sys


def follow_eager() -> None:
    """Have Inductor round to bfloat16 and float16 where eager does, in this process from now on.

    It would keep float32 in between. That moves the input of a quantizer by an ulp, and a code, and
    what follows, by a step: see `Compiled against eager` in docs/graphs.md.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.emulate_precision_casts = True  # type: ignore[attr-defined]
    else:
        # What it reads when it is imported, which takes a second or two and may never be needed.
        os.environ["TORCHINDUCTOR_EMULATE_PRECISION_CASTS"] = "1"
