"""The records of a model: options, schemes and qualities, its state, and rows of a report."""

# ruff: noqa: F401

from .config import LinearConfig, LinearOptions, Rule, Rules, check_options, check_rules
from .rows import Report, Row, table_lines
from .schemes import SCHEME_FIELDS, Scheme, scheme_fields, scheme_name
from .state import ModelState, forget_state, get_state, remember_tokenizer, set_state, unwrap
