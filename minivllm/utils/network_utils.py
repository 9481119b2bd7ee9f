"""Where the ranks of one executor meet: a file in a private directory.

vLLM 0.25.1: vllm/utils/network_utils.py (get_distributed_init_method, get_loopback_ip, get_open_port)
Articles: part 2 §2.3.1
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


class Rendezvous:
    """A directory that only this user can enter, and in it the file through which the ranks find each other.

    Deviation from vLLM: 0.25.1 takes the loopback address and a port that was free a moment ago, which another
    start may take before the store binds it. A file in a new directory cannot clash.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"minivllm-rendezvous-{os.getpid()}-"))

    @property
    def distributed_init_method(self) -> str:
        """The address in torch.distributed's notation."""
        return f"file://{self.directory / 'store'}"

    def remove(self) -> None:
        """Remove the directory; again is fine."""
        shutil.rmtree(self.directory, ignore_errors=True)
