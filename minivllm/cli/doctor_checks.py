"""The single checks of `minivllm doctor`; each is bounded in time and says what to do.

vLLM 0.25.1: vllm/collect_env.py
Articles: part 2 §2.3.1, §2.7
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minivllm import envs
from minivllm.exceptions import ConfigError
from minivllm.timeline import text as words
from minivllm.tracing import failpoints

DEFAULT_TP = 2
_OTLP_TIMEOUT_S = 0.5
_TORCH_TIMEOUT_S = 60.0
_REQUIREMENTS = (
    "cloudpickle",
    "msgspec",
    "numpy",
    "opentelemetry-sdk",
    "pyzmq",
    "rich",
    "safetensors",
    "setproctitle",
    "tokenizers",
)

# Runs in a process of its own: importing torch takes seconds and can crash on a broken driver.
_TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch, torch.distributed as dist
found = {"import_s": time.perf_counter() - start, "version": torch.__version__,
         "gloo": dist.is_available() and dist.is_gloo_available(),
         "nccl": dist.is_available() and dist.is_nccl_available(),
         "cuda_build": torch.version.cuda, "threads": torch.get_num_threads(), "devices": []}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found["devices"].append({"name": p.name, "bytes": p.total_memory})
    if found["nccl"]:
        found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


class Status(Enum):
    FINE = "ok"
    NOTE = "note"
    SKIPPED = "skipped"
    MISSING = "missing"


@dataclass(slots=True)
class Finding:
    """One line of the report; only MISSING makes the machine unusable."""

    check: str
    status: Status
    found: str
    to_do: str = ""


def all_checks(clean: bool, asked: dict[str, Any]) -> list[Finding]:
    """Run every check. A check that itself fails is reported as skipped, with the reason.

    Args:
        asked: arguments of the engine that is asked about; `model` among them.
    """
    torch_found = _probe_torch()
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("torch", lambda: _torch(torch_found)),
        ("devices", lambda: _devices(torch_found)),
        ("collectives", lambda: _collectives(torch_found)),
        ("start method", _start_method),
        ("shared memory", lambda: _shared_memory(torch_found, asked)),
        ("stale segments", lambda: _stale_segments(clean)),
        ("loopback", _loopback),
        ("checkpoint", lambda: _checkpoint(asked["model"])),
        ("OTLP endpoint", _otlp),
        ("environment", _environment),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except ConfigError as e:
            findings.append(Finding(name, Status.SKIPPED, str(e)))
        except Exception as e:
            findings.append(Finding(name, Status.SKIPPED, f"the check failed: {type(e).__name__}: {e}"))
    return findings


def _python() -> list[Finding]:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}, {words.count(os.cpu_count() or 1, 'core')}"
    return [Finding("Python", Status.FINE, found)]


def _packages() -> list[Finding]:
    versions, absent = [], []
    for name in _REQUIREMENTS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        return [
            Finding(
                "packages",
                Status.MISSING,
                f"not installed: {', '.join(absent)}",
                f"pip install {' '.join(absent)}",
            )
        ]
    return [Finding("packages", Status.FINE, ", ".join(versions))]


def _probe_torch() -> dict[str, Any] | str:
    """What torch says about itself, or one line on why it says nothing."""
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
            return found
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"import fails: {lines[-1]}"
    except subprocess.TimeoutExpired:
        return f"import did not end within {_TORCH_TIMEOUT_S:.0f} s"


def _torch(found: dict[str, Any] | str) -> list[Finding]:
    if isinstance(found, str):
        return [
            Finding(
                "torch", Status.MISSING, found, "pip install torch (make sure the version fits this machine)"
            )
        ]
    text = (
        f"{found['version']}, CUDA build {found['cuda_build'] or 'none'}; importing it took "
        f"{found['import_s']:.1f} s, which each worker pays when it starts"
    )
    return [Finding("torch", Status.FINE, text)]


def _devices(found: dict[str, Any] | str) -> list[Finding]:
    if isinstance(found, str):
        return [Finding("devices", Status.SKIPPED, "needs torch")]
    devices = found["devices"]
    if not devices:
        return [Finding("devices", Status.FINE, "no CUDA device: workers compute on the CPU")]
    names = ", ".join(f"cuda:{i} {d['name']} ({words.size(d['bytes'])})" for i, d in enumerate(devices))
    return [Finding("devices", Status.FINE, names)]


def _collectives(found: dict[str, Any] | str) -> list[Finding]:
    if isinstance(found, str):
        return [Finding("collectives", Status.SKIPPED, "needs torch")]
    if found["devices"]:
        if found["nccl"]:
            return [Finding("collectives", Status.FINE, f"nccl {found.get('nccl_version', '')}".strip())]
        return [
            Finding(
                "collectives",
                Status.NOTE,
                "CUDA devices, but this torch has no NCCL",
                "run with --device cpu, or install a torch build with NCCL",
            )
        ]
    if found["gloo"]:
        return [Finding("collectives", Status.FINE, "gloo (CPU)")]
    return [
        Finding(
            "collectives", Status.MISSING, "this torch has no gloo", "install a torch build with distributed"
        )
    ]


def _start_method() -> list[Finding]:
    method = os.environ.get("MINIVLLM_WORKER_MULTIPROC_METHOD", "spawn")
    available = multiprocessing.get_all_start_methods()
    if method not in available:
        return [
            Finding(
                "start method",
                Status.MISSING,
                f"MINIVLLM_WORKER_MULTIPROC_METHOD={method} does not exist here",
                f"set it to one of {', '.join(available)}",
            )
        ]
    return [Finding("start method", Status.FINE, f"{method} (available: {', '.join(available)})")]


def _shared_memory(torch_found: dict[str, Any] | str, asked: dict[str, Any]) -> list[Finding]:
    from minivllm.distributed.shm_sizes import engine_bytes, engine_need
    from minivllm.engine.arg_utils import EngineArgs

    # Whether there is a device is known by now; asking again would import torch.
    on_cpu = isinstance(torch_found, str) or not torch_found["devices"]
    defaults = {"tensor_parallel_size": DEFAULT_TP, "device": "cpu" if on_cpu else "auto"}
    try:
        config = EngineArgs.from_kwargs(**{**defaults, **asked}).create_engine_config()
    except ConfigError:
        # What is wrong with its checkpoint is another check's matter.
        config = EngineArgs.from_kwargs(**{**defaults, **asked, "model": None}).create_engine_config()
    need = engine_need(config)
    if not os.path.isdir("/dev/shm"):
        return [
            Finding(
                "shared memory",
                Status.SKIPPED,
                f"this system has no /dev/shm to measure; an engine of {need}",
            )
        ]
    stat = os.statvfs("/dev/shm")
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"/dev/shm: {words.size(total)}, {words.size(free)} free; {need}"
    if free < engine_bytes(config):
        return [
            Finding(
                "shared memory",
                Status.MISSING,
                found,
                "make /dev/shm larger (docker run --shm-size=1g, or mount -o remount,size=1G /dev/shm), "
                "or set MINIVLLM_MQ_MAX_CHUNK_BYTES lower",
            )
        ]
    return [Finding("shared memory", Status.FINE, found)]


def _stale_segments(clean: bool) -> list[Finding]:
    from minivllm.distributed.shm_segment import clean_stale_segments, list_stale_segments

    stale = clean_stale_segments() if clean else list_stale_segments()
    if not stale:
        return [Finding("stale segments", Status.FINE, "none")]
    names = ", ".join(stale)
    if clean:
        return [Finding("stale segments", Status.FINE, f"removed {names}")]
    return [
        Finding(
            "stale segments",
            Status.NOTE,
            f"{words.count(len(stale), 'segment')} of engines that are gone: {names}",
            "`minivllm doctor --clean` removes them",
        )
    ]


def _loopback() -> list[Finding]:
    address = "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
            s.bind((address, 0))
    except OSError as e:
        return [
            Finding(
                "loopback",
                Status.MISSING,
                f"{address} cannot be used: {e.strerror}",
                "bring the loopback interface up, on Linux with `ip link set lo up`: the ranks talk over it",
            )
        ]
    return [Finding("loopback", Status.FINE, f"{address} (the ranks talk over it)")]


def _checkpoint(model: str | None) -> list[Finding]:
    from minivllm.config.model import BUNDLED_CHECKPOINT, ModelConfig

    to_do = "install minivllm again: its bundled checkpoint is incomplete"
    if model is not None:
        to_do = "give the directory of a local Qwen3 or Llama checkpoint"
    folder = Path(model or BUNDLED_CHECKPOINT)
    try:
        config = ModelConfig(model=model)
    except ConfigError as e:
        return [Finding("checkpoint", Status.MISSING, str(e), to_do)]
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    if not weights:
        return [Finding("checkpoint", Status.MISSING, f"{folder} has no weights (*.safetensors)", to_do)]
    name = "bundled" if model is None else f"{model}:"
    text = f"{name} {config.architecture}, {config.num_hidden_layers} layers, {words.size(weights)}"
    if not (folder / "tokenizer.json").is_file():
        return [Finding("checkpoint", Status.NOTE, f"{text}, no tokenizer.json", "give prompts as token ids")]
    return [Finding("checkpoint", Status.FINE, text)]


def _otlp() -> list[Finding]:
    variable = next(
        (
            v
            for v in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
            if os.environ.get(v)
        ),
        None,
    )
    if variable is None:
        return [
            Finding(
                "OTLP endpoint",
                Status.FINE,
                "OTEL_EXPORTER_OTLP_ENDPOINT is not set: traces go to files only (`minivllm export DIR` sends them later)",
            )
        ]
    endpoint = os.environ[variable]
    parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 4318)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        return [
            Finding(
                "OTLP endpoint",
                Status.NOTE,
                f"{variable}={endpoint} is no address",
                "set it to http://HOST:4318",
            )
        ]
    error = _connect(parts.hostname, port)
    if error:
        return [
            Finding(
                "OTLP endpoint",
                Status.NOTE,
                f"{variable}={endpoint}: {error}",
                "start a collector or Jaeger there, or unset the variable; trace files are written all the same",
            )
        ]
    installed = any(
        _installed(p)
        for p in ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-otlp-proto-grpc")
    )
    if not installed:
        return [
            Finding(
                "OTLP endpoint",
                Status.NOTE,
                f"{endpoint} answers, but no exporter is installed",
                "pip install 'minivllm[otlp]'",
            )
        ]
    return [Finding("OTLP endpoint", Status.FINE, f"{endpoint} answers")]


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _connect(host: str, port: int) -> str:
    """Empty when something accepts a connection in time, else why not. Name resolution has no deadline of
    its own, hence the thread."""
    result = [f"no answer within {_OTLP_TIMEOUT_S} s"]

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=_OTLP_TIMEOUT_S).close()
            result[0] = ""
        except TimeoutError:
            pass
        except OSError as e:
            result[0] = f"does not answer ({e.strerror or e})"

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_OTLP_TIMEOUT_S)
    return result[0]


def _environment() -> list[Finding]:
    findings: list[Finding] = []
    known, set_here = envs.environment_variables, []
    for name in sorted(n for n in os.environ if n.startswith("MINIVLLM_")):
        if name not in known:
            findings.append(
                Finding(
                    "environment",
                    Status.NOTE,
                    f"{name} is unknown and has no effect",
                    "`minivllm doctor --env` lists the variables",
                )
            )
            continue
        try:
            known[name].parse(os.environ[name])
            if name == "MINIVLLM_FAILPOINTS":
                failpoints.parse(os.environ[name])
            set_here.append(f"{name}={os.environ[name]}")
        except ValueError as e:
            findings.append(
                Finding(
                    "environment",
                    Status.MISSING,
                    f"{name}={os.environ[name]!r} is not valid: {str(e).removeprefix(name + ': ')}",
                    f"{name}: {known[name].help}",
                )
            )
    if set_here or not findings:
        text = ", ".join(set_here) or "no MINIVLLM_* variable is set (--env lists them)"
        findings.insert(0, Finding("environment", Status.FINE, text))
    return findings
