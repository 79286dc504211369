"""Facts of the model that batches are made for: its inputs and its context."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..checkpoint import float_models
from ..errors import CalibrationError, OptionError, ShapeError
from ..record.state import PreparedState, get_state, unwrap

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The facts of a model that batches are made for.

    Attributes:
        config: of a model of transformers, None for others.
        main_input: the first argument of its forward.
        sequential: whether it was prepared with sequential=True.
    """

    config: Any = None
    main_input: str = "input_ids"
    sequential: bool = False

    @staticmethod
    def of(model: nn.Module | None) -> Target:
        """Return the facts of a model; of None those of any model that reads tokens."""
        if model is None:
            return Target()
        root: Any = unwrap(model)
        config, state = getattr(root, "config", None), get_state(root)
        return Target(
            config if hasattr(config, "get_text_config") else None,
            getattr(root, "main_input_name", "input_ids"),
            isinstance(state, PreparedState) and state.recording is not None,
        )

    @staticmethod
    def of_config(config: Any, *, sequential: bool = False) -> Target:
        """Return the facts of a model that is not loaded."""
        reads = getattr(float_models.model_class(config), "main_input_name", "input_ids")
        return Target(config, reads, sequential)

    @property
    def context(self) -> int | None:
        """The number of positions that the model has, None where its config does not say it."""
        if self.config is None:
            return None
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def require_text(self) -> None:
        """Raise OptionError for a model that text alone cannot run."""
        starts = getattr(self.config, "decoder_start_token_id", None) is not None
        is_pair = getattr(self.config, "is_encoder_decoder", False)
        if self.main_input != "input_ids" or (is_pair and not starts):
            kind = "" if self.config is None else f" of type {self.config.model_type}"
            raise OptionError(
                f"A model{kind} needs more than text. Calibrate it in Python on batches of what "
                "it reads, with fp4pass.prepare and fp4pass.calibrate, or choose a method that "
                "needs no data."
            )

    def fitting(self, seq_len: int) -> int:
        """Return tokens of a window that the model has positions for."""
        if self.context is None or seq_len <= self.context:
            return seq_len
        _log.info(
            "windows have %s tokens, the context of the model, and not %s.", self.context, seq_len
        )
        return self.context

    def require_context(self, windows: Tensor) -> None:
        """Raise ShapeError for token windows [n, length] that the model has no positions for."""
        if not windows.numel():
            raise CalibrationError(f"data: expected token windows, got {list(windows.shape)}.")
        if self.context is not None and windows.shape[1] > self.context:
            raise ShapeError(
                f"data: windows have {windows.shape[1]} tokens, but the context of the model is "
                f"{self.context}. Cut them: data.reshape(-1, {self.context}), or give token ids "
                "[tokens] and seq_len."
            )
