"""A picture of what the console printed: text as text, block and line glyphs as shapes.

vLLM 0.25.1: no counterpart
Articles: –

Rich's own export depends on a font that has every block glyph (it loads one from the network). Here bars are
rectangles, so a picture looks the same everywhere and needs nothing but the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len
from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.segment import Segment
from rich.style import Style

from minivllm.timeline.paint import PIECES, WAIT_OPACITY

FONT_FAMILY = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
_BACKGROUND = ColorTriplet(0x10, 0x14, 0x1B)
_FOREGROUND = ColorTriplet(0xD5, 0xDB, 0xE3)
_FONT_PX = 14.0
_CELL_W = 8.4
_CELL_H = 21.0
_BAR_TOP, _BAR_H = 4.0, 13.0
_MARGIN = 18.0

_FROM_LEFT = {c: n / 8 for n, c in enumerate(" ▏▎▍▌▋▊▉█")}
_FROM_RIGHT = {"▐": 0.5, "▕": 0.125}
_WAIT, _ERROR = "░", "▓"
# Line glyphs as (dx, dy) ends of strokes in units of half a cell, from the centre.
_LINES = {
    "─": ((-1, 0), (1, 0)),
    "│": ((0, -1), (0, 1)),
    "├": ((0, -1), (0, 1), (1, 0)),
    "└": ((0, -1), (1, 0)),
}
_POLYGONS = {
    "◆": ((0.0, -5.5), (4.6, 0.0), (0.0, 5.5), (-4.6, 0.0)),
    "▶": ((-4.0, -5.0), (4.5, 0.0), (-4.0, 5.0)),
    "■": ((-3.8, -3.8), (3.8, -3.8), (3.8, 3.8), (-3.8, 3.8)),
}


@dataclass(slots=True)
class _Rect:
    x: float
    end: float
    fill: str
    opacity: float


def to_svg(lines: Iterable[list[Segment]], width: int, title: str, description: str) -> str:
    """An SVG document of `lines` of styled segments, `width` cells wide, without any external reference.

    Args:
        title, description: what a screen reader says.
    """
    body: list[str] = []
    rows = 0
    for rows, line in enumerate(lines, start=1):
        body.extend(_draw_line(line, _MARGIN + (rows - 1) * _CELL_H))
    total_w = width * _CELL_W + 2 * _MARGIN
    total_h = rows * _CELL_H + 2 * _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w:.0f} {total_h:.0f}" '
            f'width="{total_w:.0f}" height="{total_h:.0f}" role="img" font-size="{_FONT_PX:g}" '
            f'font-family="{escape(FONT_FAMILY)}" xml:space="preserve">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f'<rect width="100%" height="100%" rx="10" fill="{_BACKGROUND.hex}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _colors(style: Style) -> tuple[str, str | None]:
    """Foreground and background (None: the picture's) as hexadecimal colours."""

    def triplet(color: Color | None, default: ColorTriplet) -> ColorTriplet:
        return default if color is None or color.is_default else color.get_truecolor()

    fg, bg = triplet(style.color, _FOREGROUND), triplet(style.bgcolor, _BACKGROUND)
    has_bg = style.bgcolor is not None and not style.bgcolor.is_default
    if style.reverse:
        fg, bg, has_bg = bg, fg, True
    if style.dim:
        fg = blend_rgb(fg, bg, 0.5)
    return fg.hex, bg.hex if has_bg else None


def _draw_line(line: list[Segment], top: float) -> Iterator[str]:
    rects: list[_Rect] = []
    shapes: list[str] = []
    texts: list[str] = []
    column = 0
    for segment in line:
        style = segment.style or Style()
        fg, bg = _colors(style)
        plain, plain_at = "", 0
        pieces = style.meta.get(PIECES) if style.meta else None
        for character in segment.text:
            x = _MARGIN + column * _CELL_W
            if pieces is not None:
                rects += [
                    _Rect(x + a * _CELL_W, x + b * _CELL_W, color, opacity) for a, b, color, opacity in pieces
                ]
                if character in _POLYGONS:
                    _shape(character, x, top, fg, bg, rects, shapes)
                elif not _is_shape(character) and character != " ":
                    texts.append(_text(character, column, top, fg, style))
            elif _is_shape(character):
                if plain:
                    texts.append(_text(plain, plain_at, top, fg, style))
                    plain = ""
                _shape(character, x, top, fg, bg, rects, shapes)
            else:
                if not plain:
                    plain_at = column
                plain += character
            column += cell_len(character)
        if plain.strip():
            texts.append(_text(plain, plain_at, top, fg, style))
    for rect in _merged(rects):
        opacity = f' fill-opacity="{rect.opacity:g}"' if rect.opacity < 1 else ""
        yield (
            f'<rect x="{rect.x:.2f}" y="{top + _BAR_TOP:.1f}" width="{rect.end - rect.x:.2f}" '
            f'height="{_BAR_H:g}" fill="{rect.fill}"{opacity}/>'
        )
    yield from shapes
    yield from texts


def _is_shape(character: str) -> bool:
    return (
        (character in _FROM_LEFT and character != " ")
        or character in _FROM_RIGHT
        or character in (_WAIT, _ERROR, "┊", "┬")
        or character in _LINES
        or character in _POLYGONS
    )


def _shape(
    character: str, x: float, top: float, fg: str, bg: str | None, rects: list[_Rect], shapes: list[str]
) -> None:
    centre_x, centre_y = x + _CELL_W / 2, top + _BAR_TOP + _BAR_H / 2
    if character in _FROM_LEFT:
        split = x + _FROM_LEFT[character] * _CELL_W
        # A reversed cell shows the picture's background where the glyph is: only the rest is drawn.
        if fg != _BACKGROUND.hex:
            rects.append(_Rect(x, split, fg, 1))
        if bg is not None:
            rects.append(_Rect(split, x + _CELL_W, bg, 1))
    elif character in _FROM_RIGHT:
        rects.append(_Rect(x + (1 - _FROM_RIGHT[character]) * _CELL_W, x + _CELL_W, fg, 1))
    elif character in (_WAIT, _ERROR):
        rects.append(_Rect(x, x + _CELL_W, fg, WAIT_OPACITY if character == _WAIT else 1))
    elif character == "┊":
        # Ticks belong to the left edge of their cell, where the scale has put their time.
        shapes.append(
            f'<path d="M{x:.1f} {top:.1f}v{_CELL_H:g}" stroke="{fg}" stroke-opacity=".55" stroke-dasharray="2 4"/>'
        )
    elif character == "┬":
        middle = top + _CELL_H / 2
        shapes.append(
            f'<path d="M{x:.1f} {middle:.1f}h{_CELL_W:g}M{x:.1f} {middle:.1f}v{_CELL_H / 2:g}" stroke="{fg}"/>'
        )
    elif character in _LINES:
        for dx, dy in _LINES[character]:
            length_x, length_y = dx * _CELL_W / 2, dy * _CELL_H / 2
            shapes.append(
                f'<path d="M{centre_x:.1f} {top + _CELL_H / 2:.1f}l{length_x:.2f} {length_y:.2f}" stroke="{fg}"/>'
            )
    else:
        points = " ".join(f"{centre_x + dx:.1f},{centre_y + dy:.1f}" for dx, dy in _POLYGONS[character])
        shapes.append(
            f'<polygon points="{points}" fill="{fg}" stroke="{_BACKGROUND.hex}" paint-order="stroke" stroke-width="2"/>'
        )


def _merged(rects: list[_Rect]) -> list[_Rect]:
    """Touching rectangles of one colour as one: seams would shimmer."""
    merged: list[_Rect] = []
    for rect in rects:
        if rect.end - rect.x < 0.01:
            continue
        last = merged[-1] if merged else None
        if last and last.fill == rect.fill and last.opacity == rect.opacity and abs(last.end - rect.x) < 0.01:
            last.end = rect.end
        else:
            merged.append(rect)
    return merged


def _text(text: str, column: int, top: float, fg: str, style: Style) -> str:
    # Leading spaces move the start instead: renderers disagree on what to do with them.
    stripped = text.lstrip(" ")
    column += len(text) - len(stripped)
    stripped = stripped.rstrip(" ")
    weight = ' font-weight="bold"' if style.bold else ""
    return (
        f'<text x="{_MARGIN + column * _CELL_W:.1f}" y="{top + _CELL_H * 0.72:.1f}" fill="{fg}"{weight} '
        f'textLength="{cell_len(stripped) * _CELL_W:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{escape(stripped).replace(' ', chr(0xA0))}</text>"
    )
