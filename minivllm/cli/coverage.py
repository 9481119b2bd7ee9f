"""`minivllm spans --coverage DIR …`: recorded runs against the catalogue.

vLLM 0.25.1: no counterpart
Articles: part 1, part 2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.cli import common

if TYPE_CHECKING:
    from rich.console import Console

    from minivllm.trace_store.coverage import Coverage, Report


def run(directories: list[str], as_json: bool) -> int:
    """Print the report; the exit code says whether anything is missing."""
    from minivllm.cli.timeline import open_store
    from minivllm.trace_store.coverage import cover

    report = cover([open_store(directory) for directory in directories], directories)
    if as_json:
        import json

        print(json.dumps(_as_data(report), indent=1, ensure_ascii=False))
    else:
        _print(report, common.console())
    return common.OK if report.complete else common.FAILED


def _as_data(report: Report) -> dict[str, Any]:
    return {
        "complete": report.complete,
        "runs": report.runs,
        "unknown": report.unknown,
        "steps": [
            {
                "name": row.spec.name,
                "status": row.status,
                "counts": list(row.counts),
                "reasons": list(row.reasons),
                "note": row.note,
            }
            for row in report.rows
        ],
    }


def _print(report: Report, console: Console) -> None:
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from minivllm.timeline import text as words
    from minivllm.timeline import theme
    from minivllm.trace_store.coverage import EXCUSED, MISSING, SHOWN

    glyphs = theme.glyphs_for(console.encoding)
    faint = Style(color=theme.FAINT)

    def section(title: str, rows: list[Coverage], style: Style) -> None:
        if not rows:
            return
        console.print(Text(title, Style(bold=True) + style))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold", style=faint)
        for row in rows:
            table.add_row(Text("  " + row.spec.name), Text(glyphs.spell(_remark(row, len(report.runs)))))
        console.print(table)
        console.print()

    shown, excused, missing = (report.with_status(status) for status in (SHOWN, EXCUSED, MISSING))
    section("shown", shown, Style())
    section("could not be shown", excused, Style())
    section("missing", missing, Style(color=theme.ERROR))
    if report.unknown:
        names = ", ".join(report.unknown)
        console.print(Text(f"not in the catalogue: {names}", Style(color=theme.ERROR)))
    of = words.count(len(report.runs), "run")
    console.print(
        f"{len(shown)} of {len(report.rows)} steps are shown by {of}, {len(excused)} could not be shown, "
        f"{len(missing)} are missing"
    )


def _remark(row: Coverage, runs: int) -> str:
    from minivllm.trace_store.coverage import MISSING, SHOWN

    if row.status == SHOWN:
        times = f"{row.count:,}×"
        if runs > 1:
            times += f" in {sum(1 for count in row.counts if count)} of {runs} runs"
        return f"{times}  {row.note}".rstrip()
    if row.status == MISSING:
        return "in " + ", ".join(row.reasons)
    return "; ".join(row.reasons)
