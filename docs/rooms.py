"""The drawing of the architecture page, from the code: rooms, and who imports whom."""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fp4pass"

# The bands of the drawing from top to bottom: name, and its first room in the order of imports.
BANDS = {
    "what a user calls": "cli",
    "from a model to packed weights": "api",
    "layers and graphs": "graph",
    "numbers": "methods",
    "ground": "_compat",
}
ROW, BAND, LEFT, DOTS, COLUMN, TOP = 22, 24, 12, 520, 17, 100


def order() -> list[str]:
    """Return the rooms from top to bottom, as pyproject.toml orders their imports."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (layers,) = re.findall(r"^layers = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"fp4pass\.(\w+)", layers)


def about(room: str) -> str:
    """Return what a room says of itself in its first line."""
    path = PACKAGE / room / "__init__.py"
    path = path if path.exists() else PACKAGE / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".")


def imports(room: str, rooms: list[str]) -> set[str]:
    """Return the other rooms that a room imports from, anywhere in it."""
    folder = PACKAGE / room
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]:
        package = path.relative_to(PACKAGE).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
                named = [base[0]] if base[0] else [alias.name for alias in node.names]
                found.update(name for name in named if name in rooms)
    return found - {room}


def svg() -> str:
    """Return the drawing, in the colors of the page."""
    rooms = order()
    names = {first: name for name, first in BANDS.items()}
    width = DOTS + COLUMN * len(rooms) + 24
    height = TOP + ROW * len(rooms) + BAND * len(names) + 6
    parts = [
        f'<svg class="rooms" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        'aria-label="The rooms of fp4pass from top to bottom, with a dot for each import">'
    ]
    y = TOP
    for j, room in enumerate(rooms):
        x = DOTS + COLUMN * j + COLUMN / 2
        if room in names:
            parts.append(
                f'<line class="rule" x1="0" y1="{y + 2}" x2="{width}" y2="{y + 2}"/>'
                f'<text class="band" x="{LEFT}" y="{y + 18}">{names[room]}</text>'
            )
            y += BAND
        middle = y + ROW / 2
        parts.append(
            f'<text class="head" transform="translate({x + 3} {TOP - 6}) rotate(-60)">{room}</text>'
            f'<text class="room" x="{LEFT}" y="{middle + 4}">{room}</text>'
            f'<text class="about" x="{LEFT + 112}" y="{middle + 4}">{escape(short(room))}</text>'
            f'<rect class="self" x="{x - 4}" y="{middle - 4}" width="8" height="8"/>'
        )
        for other in sorted(imports(room, rooms)):
            at = DOTS + COLUMN * rooms.index(other) + COLUMN / 2
            parts.append(
                f'<circle class="dot" cx="{at}" cy="{middle}" r="4"><title>{room} imports {other}'
                "</title></circle>"
            )
        y += ROW
    return "".join([*parts, "</svg>"])


def short(room: str) -> str:
    """Return what a room is, without what stands before a colon, cut where it would not fit."""
    text = about(room).replace("`", "")
    text = text.partition(": ")[2] or text
    text = text if len(text) <= 66 else text[:64].rsplit(" ", 1)[0].rstrip(",") + " ..."
    return text[:1].lower() + text[1:]
