"""Formulas of pages as MathML, which browsers draw by themselves.

Pages have TeX between dollar signs, as GitHub reads it. Arithmatex keeps it from Markdown.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# Bars of magnitudes, which browsers would space as signs between two terms.
BAR = re.compile(r"<mo>(&#x0007C;|&#x02016;)</mo>")

# What arithmatex makes of $...$ and of $$...$$.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put MathML in place of TeX."""

    def inline(found: re.Match[str]) -> str:
        return mathml(found[1], page.file.src_uri)

    def block(found: re.Match[str]) -> str:
        return f'<div class="formula">{mathml(found[1], page.file.src_uri, "block")}</div>'

    return BLOCK.sub(block, INLINE.sub(inline, html))


def mathml(text: str, page: str, display: str = "inline") -> str:
    """Return the MathML of a formula; one that is no TeX ends the build."""
    tex = unescape(text).strip()
    try:
        made = convert(tex, display=display)
    except Exception as error:
        raise PluginError(f"{page}: no formula of TeX: {tex} ({error!r})") from error
    return BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', made)
