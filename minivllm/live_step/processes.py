"""Which processes a run will have, and which of them takes a step: a command that waits for another one never ends.

vLLM 0.25.1: none
Articles: part 2 §2.3.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm import envs
from minivllm.timeline import text as words
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.spec import CLIENT, ENGINE_CORE, WORKER

if TYPE_CHECKING:
    from minivllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, before it begins.

    Attributes:
        has_engine: EngineCore has a process of its own.
        ranks: the worker processes of this host; none when the only worker runs inside EngineCore.
    """

    has_engine: bool
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Processes:
        from minivllm.executor.abstract import Executor
        from minivllm.executor.uniproc_executor import UniProcExecutor

        parallel = vllm_config.parallel_config
        if issubclass(Executor.get_class(vllm_config), UniProcExecutor):
            ranks: tuple[int, ...] = ()
        else:
            first = parallel.node_rank * parallel.local_world_size
            ranks = tuple(range(first, first + parallel.local_world_size))
        return cls(envs.MINIVLLM_ENABLE_MULTIPROCESSING, ranks)

    def lack(self, who: str) -> str:
        """Why nobody of this run answers to `who` ("client", "engine", "rankN", "all"); "" when somebody does."""
        if who == "engine" and not self.has_engine:
            return "EngineCore runs in the client's process; say client"
        if who.startswith("rank") and int(who.removeprefix("rank")) not in self.ranks:
            if self.ranks:
                return f"the run has {words.ranks(self.ranks)}"
            host = "engine" if self.has_engine else "client"
            return f"the only worker runs in {_PLAIN[host]}'s process; say {host}"
        return ""

    def lack_of_step(self, span: str, who: str) -> str:
        """Why `who`, who is there, never comes to a step of the catalogue; "" when it may come."""
        takers = {self._taker(role) for role in SPANS[span].process}
        if who == "all" or who.rstrip("0123456789") in takers:
            return ""
        names = [words.ranks(self.ranks) if taker == "rank" else _PLAIN[taker] for taker in sorted(takers)]
        return f"{span} is a step of {words.listing(names)}"

    def _taker(self, role: str) -> str:
        """Who takes the steps of a role: "client", "engine" or "rank"."""
        if role == WORKER and self.ranks:
            return "rank"
        if role in (WORKER, ENGINE_CORE) and self.has_engine:
            return "engine"
        assert role in (WORKER, ENGINE_CORE, CLIENT)
        return "client"


_PLAIN = {"client": "the client", "engine": "EngineCore"}
