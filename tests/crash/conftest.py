"""All cells with `-m crash`; otherwise the spread that stands for them."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "crash: a cell of the crash matrix (make test-crash runs all of them)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests.crash import cells

    if "crash" in (config.getoption("markexpr") or ""):
        return
    spread = {cell.id for cell in cells.SPREAD}
    dropped = [
        item for item in items if item.name.startswith("test_kill[") and item.name[10:-1] not in spread
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
