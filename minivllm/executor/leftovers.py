"""What a process that was killed leaves in the file system, and who removes it: those who notice.

vLLM 0.25.1: none (segments and socket files stay until the parent exits, or for ever)
Articles: part 2 §4.3
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from minivllm.distributed.shm_segment import SHM_DIR


def remove_leftovers(pid: int) -> None:
    """Remove shared memory and rendezvous of a process of ours that is dead or has closed its pipes by dying.

    Usually there is nothing: names are removed as soon as everybody has attached. A death before that leaves one.
    """
    for path in Path(SHM_DIR).glob(f"minivllm-{pid}-*"):
        path.unlink(missing_ok=True)
    for path in Path(tempfile.gettempdir()).glob(f"minivllm-rendezvous-{pid}-*"):
        shutil.rmtree(path, ignore_errors=True)
