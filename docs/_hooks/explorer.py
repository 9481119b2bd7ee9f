"""What the ring's explorer finds, on a page: run at each build, so that it cannot differ from the protocol's model.

A block

    ```ring-model
    written-before-data
    ```

becomes the command and its output; the line may hold any arguments of `python -m minivllm.distributed.ring_model`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re

from mkdocs.structure.pages import Page

_BLOCK = re.compile(r"^```ring-model\n(?P<arguments>.*)\n```$", re.M)


def expand(markdown: str, page: Page) -> str:
    """Replace every block by a command and what it prints."""
    return _BLOCK.sub(lambda match: _run(match["arguments"]), markdown)


@functools.cache  # a page in two languages shows the same output twice
def _run(line: str) -> str:
    from minivllm.distributed import ring_model

    arguments = line.split()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        ring_model.main(arguments)
    command = " ".join(["python -m minivllm.distributed.ring_model", *arguments])
    return f"```text\n$ {command}\n{output.getvalue().rstrip()}\n```"
