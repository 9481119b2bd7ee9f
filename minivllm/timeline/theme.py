"""Colours and glyphs: one colour per process that never changes, and a plain-ASCII set for other encodings.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from dataclasses import dataclass

# Middle luminance, so that they read on light and on dark backgrounds; red is kept for errors.
_CLIENT = "#8b949e"
_ENGINE_CORE = "#b07fe0"
_WORKERS = ("#3f9fe0", "#3fb068", "#e0a030", "#e878b0", "#38b2ac", "#c58a5c", "#9aab3c", "#7d8ff0")
ERROR = "#e5484d"
FAINT = "#6e7681"

CLIENT_SLOT = 0
ENGINE_CORE_SLOT = 1
FIRST_WORKER_SLOT = 2


def color(slot: int) -> str:
    """Colour of a process: slot 0 is the client, 1 EngineCore, 2 + rank a worker."""
    if slot == CLIENT_SLOT:
        return _CLIENT
    if slot == ENGINE_CORE_SLOT:
        return _ENGINE_CORE
    return _WORKERS[(slot - FIRST_WORKER_SLOT) % len(_WORKERS)]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of one picture.

    Attributes:
        eighths: fillings of a cell from the left, 0/8 to 8/8.
        right_half, right_eighth: fillings from the right, for output that cannot show reversed cells.
        wait: a cell of waiting time.
        marks: symbol name -> character.
    """

    eighths: str
    right_half: str
    right_eighth: str
    wait: str
    error: str
    gap: str
    axis: str
    axis_tick: str
    grid: str
    branch: str
    last: str
    trunk: str
    bullet: str
    ellipsis: str
    legend: str
    marks: dict[str, str]
    # Replacements for characters that sentences and units use.
    spelling: dict[str, str]

    def spell(self, text: str) -> str:
        for original, replacement in self.spelling.items():
            text = text.replace(original, replacement)
        return text


UNICODE = Glyphs(
    eighths=" ▏▎▍▌▋▊▉█",
    right_half="▐",
    right_eighth="▕",
    wait="░",
    error="▓",
    gap="≈",
    axis="─",
    axis_tick="┬",
    grid="┊",
    branch="├ ",
    last="└ ",
    trunk="│ ",
    bullet="•",
    ellipsis="…",
    legend="■",
    marks={"start": "▶", "ready": "◆", "died": "✖", "ended": "●"},
    spelling={},
)

ASCII = Glyphs(
    eighths="    #####",
    right_half="#",
    right_eighth="#",
    wait=".",
    error="!",
    gap="~",
    axis="-",
    axis_tick="+",
    grid="|",
    branch="|-",
    last="`-",
    trunk="| ",
    bullet="*",
    ellipsis="...",
    legend="#",
    marks={"start": ">", "ready": "R", "died": "X", "ended": "o"},
    spelling={
        "µ": "u",
        "§": "section ",
        "–": "-",
        "—": "-",
        "…": "...",
        "→": "->",
        "·": "-",
        "×": "x",
        "≥": ">=",
        "≈": "~",
    },
)


def glyphs_for(encoding: str | None) -> Glyphs:
    """The richest set that `encoding` can write."""
    try:
        "".join(
            [UNICODE.eighths, UNICODE.wait, UNICODE.grid, UNICODE.branch, *UNICODE.marks.values()]
        ).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE
