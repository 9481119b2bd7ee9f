"""Starting an engine for a subcommand: where its trace goes, its options, its end.

vLLM 0.25.1: vllm/entrypoints/cli/main.py
Articles: –
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli import common

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

TRACE_LEVELS = ("lifecycle", "rpc", "message")
_TRACES = Path("traces")


def add_engine_options(parser: argparse.ArgumentParser, tp: int) -> None:
    """Options of every subcommand that starts an engine; values are checked by the engine's configuration."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", metavar="DIR", help="local Qwen3 or Llama checkpoint (default: the bundled one)"
    )
    group.add_argument(
        "--tp", type=int, default=tp, metavar="N", help=f"tensor parallel size (default: {tp})"
    )
    group.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument(
        "--trace", metavar="DIR", help="directory for the trace of this run; must be new or empty"
    )


@contextmanager
def running(args: argparse.Namespace, trace: Path | None, what: str, **settings: Any) -> Iterator[LLM]:
    """An engine that shows its start on stderr and is gone, with its processes, when the block ends."""
    from minivllm import envs
    from minivllm.cli.progress import starting
    from minivllm.engine.arg_utils import EngineArgs
    from minivllm.entrypoints.llm import LLM
    from minivllm.exceptions import ConfigError, RequestError

    settings = {
        "model": args.model,
        "tensor_parallel_size": args.tp,
        "device": args.device,
        "trace": trace,
        **settings,
    }
    try:
        # What cannot work is refused before anything is said about starting.
        envs.check_all()
        live_step = settings.pop("live_step", False)
        config = EngineArgs.from_kwargs(**settings).create_engine_config()
        if live_step:
            from minivllm.live_step import check

            check(live_step, config)
            llm = LLM(live_step=live_step, **settings)
        else:
            with starting(trace, what) as on_progress:
                llm = LLM(on_progress=on_progress, **settings)
        try:
            yield llm
        finally:
            llm.shutdown()
    except (ConfigError, RequestError, OSError):
        raise
    except Exception as e:
        if trace is None:
            raise
        raise common.TracedFailure(e, trace) from e
    finally:
        if trace is not None:
            _remove_if_empty(trace)


def _remove_if_empty(trace: Path) -> None:
    """A run that was refused before it began has recorded nothing and leaves nothing."""
    try:
        trace.rmdir()
        if trace.parent == _TRACES:
            _TRACES.rmdir()
    except OSError:
        pass


def new_trace_directory(wanted: str | None) -> Path:
    """An empty directory for a trace: the one that was asked for, or a new one under ./traces.

    Where the working directory cannot be written the trace goes to the system's temporary directory.

    Raises:
        ConfigError: the wanted directory holds something, or cannot be made.
    """
    from minivllm.exceptions import ConfigError

    if wanted is not None:
        path = Path(wanted)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError(f"--trace {wanted}: the directory is not empty; name a new one")
        except OSError as e:
            raise ConfigError(f"--trace {wanted}: cannot be used: {e.strerror}") from None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"--trace {wanted}: cannot be written to")
        return path
    name = time.strftime("%Y-%m-%dT%H-%M-%S")
    for base in (_TRACES, Path(tempfile.gettempdir()) / "minivllm-traces"):
        for attempt in range(1, 100):
            path = base / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                base.mkdir(parents=True, exist_ok=True)
                # Made here and not merely looked for: two runs in the same second must not share it.
                path.mkdir()
                return path
            except FileExistsError:
                if not base.is_dir():
                    break
            except OSError:
                break
    return Path(tempfile.mkdtemp(prefix="minivllm-trace-"))
