"""Linear layers of one module that serving engines multiply by as one matrix (vLLM, SGLang)."""

from __future__ import annotations

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
