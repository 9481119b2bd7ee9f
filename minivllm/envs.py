"""Every MINIVLLM_* variable in one table, read when asked for; enable_envs_cache() freezes them.

vLLM 0.25.1: vllm/envs.py (environment_variables, enable_envs_cache)
Articles: part 2 §2.4.2

Add a row here when code needs a variable; `minivllm doctor` and the docs page are generated from this table.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Parse = Callable[[str], Any]

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
# What clocks in C code take as a time that never comes; they know no infinity.
LONGEST_S = 30 * 86400.0

# Each of these raises ValueError, which says what is allowed.


def _flag(text: str) -> bool:
    value = _FLAGS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"one of {', '.join(_FLAGS)} is needed")
    return value


def _one_of(*allowed: str) -> Parse:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is needed")
        return text

    return parse


def _trace_level(text: str) -> str:
    return str(_one_of("off", "lifecycle", "rpc", "message")(text or "off"))


def _log_level(text: str) -> str:
    return str(_one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")(text.upper()))


def _integer(least: int) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ValueError(f"an integer of at least {least} is needed")
        return value

    return parse


def _number(least: float, most: float, above: bool = False) -> Parse:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Also what is not a number.
        if not (least < value <= most or (value == least and not above)):
            raise ValueError(
                f"a number {'above' if above else 'from'} {least:.0f} {'and up ' if above else ''}to {most:.0f} is needed"
            )
        return value

    return parse


def _optional(parse: Parse) -> Parse:
    """Nothing but blanks is None."""
    return lambda text: parse(text) if text.strip() else None


_limit_s = _number(0, LONGEST_S, above=True)
_patience_s = _number(0, LONGEST_S)


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: how its text becomes a value, its default text, and what it does."""

    parse: Parse
    default: str
    help: str


# fmt: off
environment_variables: dict[str, EnvVar] = {
    "MINIVLLM_ENABLE_MULTIPROCESSING": EnvVar(_flag, "1", "0 keeps EngineCore in the caller's process (InprocClient)"),
    "MINIVLLM_WORKER_MULTIPROC_METHOD": EnvVar(_one_of("spawn", "fork", "forkserver"), "spawn", "start method of workers: spawn, fork or forkserver"),
    "MINIVLLM_USE_V2_MODEL_RUNNER": EnvVar(_optional(_flag), "", "1 or 0 forces or forbids Model Runner V2"),
    "MINIVLLM_TRACE": EnvVar(_trace_level, "off", "trace level: off, lifecycle, rpc or message; unset, a trace directory means rpc"),
    "MINIVLLM_TRACE_DIR": EnvVar(str, "", "directory that receives the trace files of a run"),
    "MINIVLLM_TRACE_ANCHOR": EnvVar(str, "", "set for child processes: the clock that all processes of a run share"),
    "MINIVLLM_TRACE_START": EnvVar(str, "", "set for child processes: when the parent started them"),
    "MINIVLLM_LIVE_STEP": EnvVar(str, "", "set for child processes: where the reader's live step-through listens"),
    "MINIVLLM_FAILPOINTS": EnvVar(str, "", "span[@rankN|@engine|@client][#occurrence]=kill|exit:N|raise|sleep:S|hang, separated by ';'"),
    "MINIVLLM_LOG_LEVEL": EnvVar(_log_level, "WARNING", "log level of the engine and worker processes"),
    "MINIVLLM_MQ_MAX_CHUNK_BYTES": EnvVar(_integer(256), str(1 << 20), "slot size of a message queue, in bytes"),
    "MINIVLLM_MQ_MAX_CHUNKS": EnvVar(_integer(1), "10", "number of slots of a message queue"),
    "MINIVLLM_MQ_MAX_OVERFLOW_BYTES": EnvVar(_integer(0), str(256 << 20), "bytes of messages larger than a slot that may wait for readers"),
    "MINIVLLM_MQ_SPIN_US": EnvVar(_number(0, 1e6), "200", "how long a waiting reader or writer polls at most before it sleeps, in microseconds"),
    "MINIVLLM_MQ_WARNING_INTERVAL_S": EnvVar(_limit_s, "60", "seconds between warnings that name a peer that is late"),
    "MINIVLLM_STARTUP_TIMEOUT_S": EnvVar(_limit_s, "600", "deadline for all workers to become ready, in seconds"),
    "MINIVLLM_EXECUTE_MODEL_TIMEOUT_S": EnvVar(_limit_s, "300", "deadline of one execute_model or sample_tokens, in seconds"),
    "MINIVLLM_COLLECTIVE_TIMEOUT_S": EnvVar(_limit_s, "120", "how long a rank waits for another one in one collective, in seconds"),
    "MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": EnvVar(_patience_s, "5", "time for workers to leave by themselves, in seconds"),
    "MINIVLLM_WORKER_SIGTERM_TIMEOUT_S": EnvVar(_patience_s, "4", "time between SIGTERM and SIGKILL, in seconds"),
    "MINIVLLM_WORKER_ORPHAN_GRACE_S": EnvVar(_patience_s, "0.5", "time for a worker to leave by itself after its parent's death, in seconds"),
    "MINIVLLM_WORKER_STUCK_TIMEOUT_S": EnvVar(_patience_s, "5", "how long a rank may stay in a call that has failed on another rank, in seconds"),
    "MINIVLLM_MAX_CONCURRENT_BATCHES": EnvVar(_optional(_integer(1)), "", "batches in flight, in place of the number that stages and async scheduling ask for; 1: no batch queue"),
    "MINIVLLM_CPU_KVCACHE_BYTES": EnvVar(_integer(1), str(64 << 20), "KV cache budget of one rank on a CPU, in bytes"),
    "MINIVLLM_CPU_BIND_CORES": EnvVar(_flag, "1", "0 lets the ranks of an engine on a CPU move between cores"),
}
# fmt: on


def _read(name: str) -> Any:
    variable = environment_variables.get(name)
    if variable is None:
        raise AttributeError(f"minivllm.envs has no variable {name}")
    text = os.environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as e:
        from minivllm.exceptions import ConfigError

        raise ConfigError(f"{name}={text!r} is not valid: {e}") from None


def check_all() -> None:
    """Refuse a wrong value before anything is started: some are read by child processes only, some seldom.

    Raises:
        ConfigError: names the variable, its value and what is allowed.
    """
    for name in environment_variables:
        if name in os.environ:
            _read(name)


_lookup: Callable[[str], Any] = _read


def __getattr__(name: str) -> Any:
    return _lookup(name)


def enable_envs_cache() -> None:
    """Freeze each variable at its first use from now on.

    Workers call it once they are initialised: settings must not change between two steps, and os.environ
    is too slow for a hot path.
    """
    global _lookup
    if _lookup is _read:
        # Deviation from vLLM: there all variables are read and kept at once, which would make a wrong value of one that
        # nobody uses here an error of every worker.
        _lookup = functools.cache(_read)


def disable_envs_cache() -> None:
    """Read the environment on each use again (used by tests and by in-process executors at shutdown)."""
    global _lookup
    _lookup = _read
