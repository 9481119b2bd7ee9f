"""The `minivllm` command as a user meets it: a process with a terminal or a pipe, exit codes, signals."""

from __future__ import annotations

import base64
import codecs
import http.server
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len
from scenario import wait_until
from trace_fixtures import write_run

from minivllm.cli import timeline as timeline_command
from minivllm.config.model import BUNDLED_CHECKPOINT
from minivllm.timeline import SOMETIMES, VIEWS
from minivllm.trace_store import TraceStore
from minivllm.tracing.catalogue import SPANS

LIMIT_S = 60.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINIVLLM_T", "MINIVLLM_F", "OTEL_"))}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING", "MINIVLLM_LOG_LEVEL"):
        env.pop(name, None)
    return {**env, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **changes}


RUNS = Path(__file__).resolve().parents[1] / "docs" / "runs"


def minivllm(
    *args: str, cwd: Path | None = None, stdin: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", *args],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LIMIT_S,
        cwd=cwd,
        env=environment(**env),
        check=False,
    )


def in_terminal(*args: str, columns: int = 100, cwd: Path | None = None, **env: str) -> tuple[int, str]:
    """Run with a terminal on stdin, stdout and stderr; returns exit code and everything that was shown."""
    terminal = Terminal(*args, columns=columns, cwd=cwd, **env)
    return terminal.wait(), terminal.shown


class Terminal:
    """A `minivllm` process in a pseudo-terminal and in a session of its own, so that Ctrl-C reaches all its children."""

    def __init__(self, *args: str, columns: int = 100, cwd: Path | None = None, **env: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                if cwd is not None:
                    os.chdir(cwd)
                command = [sys.executable, "-m", "minivllm.cli.main", *args]
                os.execve(sys.executable, command, environment(COLUMNS=str(columns), **env))
            finally:
                os._exit(127)
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_until(self, text: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not appear in:\n{self.shown[-3000:]}"
            assert self._read(), f"ended before {text!r} appeared:\n{self.shown[-3000:]}"

    def press_ctrl_c(self) -> None:
        os.write(self.fd, b"\x03")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Exit code, 128 + n for a signal; reads what is left."""
        deadline = time.monotonic() + limit_s
        while True:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                pytest.fail(f"still running after {limit_s} s:\n{self.shown[-3000:]}")
        while self._read():
            pass
        os.close(self.fd)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _read(self) -> bool:
        """Read what is there, waiting a moment for it; False at the end."""
        if not select.select([self.fd], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.shown += self._decoder.decode(data)
        return bool(data)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("cli") / "trace")


# --- the command itself


def test_help_answers_at_once() -> None:
    # CPU time of the child: what else the machine does is not the point.
    assert min(_cpu_s("--help") for _ in range(4)) < 0.2


def _cpu_s(*args: str) -> float:
    before = os.times()
    assert minivllm(*args).returncode == 0
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("command", ["demo", "generate", "timeline", "doctor", "export", "spans"])
def test_each_subcommand_explains_itself(command: str) -> None:
    done = minivllm(command, "--help")
    assert done.returncode == 0 and "usage: minivllm" in done.stdout


def test_without_a_subcommand_help_is_shown_and_the_exit_code_says_so() -> None:
    done = minivllm()
    assert done.returncode == 2 and "subcommands" in done.stdout


def test_view_names_are_those_of_the_timelines() -> None:
    assert tuple(VIEWS) == timeline_command.VIEW_NAMES


def test_each_run_of_a_directory_can_be_shown(tmp_path: Path) -> None:
    for name in ("tp2", "runner-v1"):
        shutil.copytree(RUNS / name, tmp_path, dirs_exist_ok=True)
    for command in (["step", "--print", "--count", "1"], ["timeline", "--view", "failure"]):
        done = minivllm(command[0], ".", *command[1:], cwd=tmp_path)
        assert done.returncode == 0 and "this is run 2 of the 2 that the directory holds" in done.stderr
        assert minivllm(command[0], ".", *command[1:], "--run", "1", cwd=tmp_path).stderr == ""
    done = minivllm("timeline", ".", "--run", "1", "--compare", ".", "--view", "step", cwd=tmp_path)
    assert done.stdout.startswith("run 1 and run 2\n") and "run 1: One engine step" in done.stdout
    ids = {
        json.loads(minivllm("export", ".", "--otlp-json", "-", *number, cwd=tmp_path).stdout)[
            "resourceSpans"
        ][0]["scopeSpans"][0]["spans"][0]["traceId"]
        for number in ([], ["--run", "1"], ["--run", "2"])
    }
    assert len(ids) == 2


# --- bad input: one line that says what to do, exit code 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate"], "give at least one"),
        (["generate", "-"], "give at least one"),
        (["generate", "x", ""], "prompt 2 is empty"),
        (["generate", "caf\udcff"], "prompt 1 is not text"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0 is not valid"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0 is not valid"),
        (["generate", "x", "--model", "/nowhere"], "is not a directory"),
        (["generate", "x", "--tp", "3"], "cannot be divided"),
        (["generate", "x", "--tp", "0"], "tensor_parallel_size=0"),
        (["generate", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--device", "tpu"], "tpu"),
        (["generate", "x", "--top-p", "2"], "top_p=2.0"),
        (["generate", "x", "--top-k", "99999999999999999999"], "top_k=99999999999999999999 is not valid"),
        (["generate", "x", "--max-num-batched-tokens", "0"], "max_num_batched_tokens=0 is not valid"),
        (["demo", "--max-tokens", "-3"], "max_tokens=-3 is not valid"),
        (["timeline", "/nowhere"], "is not a directory"),
        (["timeline", "."], "holds no trace"),
        (["timeline", str(RUNS / "tp2"), "--run", "2"], "tp2 has no run 2: it holds 1 run"),
        (["spans", "--name", "nonsense"], "no step has 'nonsense'"),
        (["export", "/nowhere", "--otlp-json", "-"], "is not a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], said: str, tmp_path: Path) -> None:
    done = minivllm(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("minivllm: error: ")
    assert not list(tmp_path.glob("traces/*")), "a refused run leaves no directory"


@pytest.mark.parametrize(
    "args",
    [
        ["timeline", "x", "--view"],
        ["timeline", "x", "--width", "7"],
        ["timeline", "x", "--from", "soon"],
        ["timeline", "x", "--rank", "one"],
        ["timeline", "x", "--svg", "a", "--html", "b"],
        ["generate", "x", "--max-tokens", "many"],
        ["export", "x"],
        ["nonsense"],
    ],
)
def test_unreadable_options_are_explained(args: list[str]) -> None:
    done = minivllm(*args)
    assert done.returncode == 2 and "usage:" in done.stderr and "Traceback" not in done.stderr


def test_a_level_without_a_trace_is_refused() -> None:
    done = minivllm("generate", "x", "--trace-level", "rpc")
    assert done.returncode == 2 and "give --trace DIR" in done.stderr


def test_traceback_is_shown_when_asked_for() -> None:
    assert "Traceback" in minivllm("timeline", "/nowhere", "--traceback").stderr
    assert "Traceback" in minivllm("timeline", "/nowhere", MINIVLLM_LOG_LEVEL="DEBUG").stderr


# --- spans


def test_spans_lists_the_whole_catalogue() -> None:
    shown = minivllm("spans").stdout
    assert all(name in shown for name in SPANS)
    data = json.loads(minivllm("spans", "--json").stdout)
    assert [row["name"] for row in data] == list(SPANS)
    assert {row["level"] for row in data} == {"lifecycle", "rpc", "message"}


def test_spans_of_one_name_show_every_field() -> None:
    shown = minivllm("spans", "--name", "worker.init_device").stdout
    spec = SPANS["worker.init_device"]
    for text in (spec.vllm_span, spec.method, *spec.articles):
        assert text in shown


# --- timeline


def test_timeline_of_every_view(trace: Path) -> None:
    done = minivllm("timeline", str(trace))
    assert done.returncode == 0, done.stderr
    assert "before the first was waited for" in done.stdout
    assert "One broadcast and its responses" in done.stdout and "Shutdown" in done.stdout
    assert max(cell_len(line.rstrip()) for line in done.stdout.splitlines()) <= 100
    assert not ANSI.search(done.stdout), "no colours in a pipe"


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_timeline_fits_the_terminal(trace: Path, columns: int) -> None:
    code, shown = in_terminal("timeline", str(trace), "--view", "spawn,rpc", columns=columns)
    assert code == 0
    lines = [ANSI.sub("", line).rstrip() for line in shown.splitlines()]
    assert max(map(cell_len, lines)) <= columns
    assert "\x1b[38;2" in shown or "\x1b[38;5" in shown
    assert "█" in shown and any("waited for" in line for line in lines)


def test_columns_is_honoured_in_a_pipe(trace: Path) -> None:
    done = minivllm("timeline", str(trace), "--view", "init", COLUMNS="60")
    assert max(cell_len(line.rstrip()) for line in done.stdout.splitlines()) <= 60
    wide = minivllm("timeline", str(trace), "--view", "init", "--width", "140").stdout
    assert 120 < max(cell_len(line.rstrip()) for line in wide.splitlines()) <= 140


@pytest.mark.parametrize("columns", [20, 40, 50])
def test_values_are_whole_at_any_width(trace: Path, columns: int) -> None:
    def values(width: int) -> list[str]:
        done = minivllm("timeline", str(trace), "--view", "spawn,rpc", COLUMNS=str(width))
        # Rows only: axes have fewer numbers where there is less room, and sentences break elsewhere.
        return re.findall(r"^(?=[├└│]|.*pid).* (\d\S* (?:s|ms|µs|ns)|pid \d+)$", done.stdout, re.M)

    assert len(values(140)) > 20 and values(columns) == values(140)


def test_no_color_is_honoured_in_a_terminal(trace: Path) -> None:
    code, shown = in_terminal("timeline", str(trace), "--view", "spawn", NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]);", shown)


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_other_encodings_get_plain_ascii(trace: Path, env: dict[str, str]) -> None:
    for args in (["timeline", str(trace)], ["spans"], ["spans", "--name", "mq"], ["doctor"]):
        done = minivllm(*args, **env)
        assert done.returncode == 0, done.stderr
        done.stdout.encode("ascii")


def test_svg_html_and_json_files(trace: Path, tmp_path: Path) -> None:
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    assert minivllm("timeline", str(trace), "--view", "spawn", "--svg", str(svg)).returncode == 0
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert minivllm("timeline", str(trace), "--html", str(html)).returncode == 0
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    views = json.loads(minivllm("timeline", str(trace), "--json").stdout)["views"]
    assert [v["name"] for v in views] == [n for n in VIEWS if n not in SOMETIMES]
    assert ET.fromstring(minivllm("timeline", str(trace), "--view", "rpc", "--svg", "-").stdout)
    bad = minivllm("timeline", str(trace), "--svg", "/nowhere/a.svg")
    assert bad.returncode == 2 and "there is no folder /nowhere; make it first" in bad.stderr
    bad = minivllm("timeline", str(trace), "--html", str(tmp_path))
    assert bad.returncode == 2 and "it is a folder" in bad.stderr and len(bad.stderr.splitlines()) == 1


def test_timeline_options_reach_the_views(trace: Path) -> None:
    assert "call number 12" in minivllm("timeline", str(trace), "--view", "rpc", "--focus", "12").stdout
    rank = minivllm("timeline", str(trace), "--view", "init", "--rank", "1").stdout
    assert "Worker_TP1" in rank and "Worker_TP0" not in rank
    short = minivllm("timeline", str(trace), "--view", "init", "--min-duration", "50ms").stdout
    assert "device.bind" not in short and "left out" in short
    for args, said in (
        (["--view", "nonsense"], "there are spawn"),
        (["--focus", "4711", "--view", "rpc"], "calls are numbered 10 to 18"),
        (["--rank", "7"], "the run has ranks 0 and 1"),
        (["--from", "2s", "--to", "1s"], "--from must be earlier"),
        (["--from", "100s"], "--from 100.000 s: the run ends at"),
    ):
        done = minivllm("timeline", str(trace), *args)
        assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("args", "unbuffered"),
    [
        ("timeline {trace}", ""),
        ("spans --json", ""),
        ("spans --json", "1"),
        ("learn solution 1", "1"),
        ("--help", ""),
        ("--help", "1"),
        ("spans --help", "1"),
        ("--version", ""),
        ("", "1"),
    ],
)
def test_a_full_disk_behind_standard_output_is_named(trace: Path, args: str, unbuffered: str) -> None:
    words = (word.format(trace=trace) for word in args.split())
    command = [sys.executable, "-m", "minivllm.cli.main", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PYTHONUNBUFFERED=unbuffered),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "minivllm: error: standard output: No space left on device\n"


def test_a_full_disk_behind_a_file_is_named(trace: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    done = minivllm("timeline", str(trace), "--view", "spawn", "--svg", "/dev/full")
    assert done.returncode == 1 and done.stderr == "minivllm: error: /dev/full: No space left on device\n"


@pytest.mark.parametrize("args", [["spans"], ["learn", "list"]])
def test_a_table_is_whole_at_any_width(args: list[str], tmp_path: Path) -> None:
    """In a pipe no line ends with blanks; in a narrow terminal no column is lost."""
    wide = minivllm(*args, cwd=tmp_path)
    narrow = minivllm(*args, cwd=tmp_path, COLUMNS="40")
    for done, columns in ((wide, 100), (narrow, 40)):
        assert done.returncode == 0 and "…" not in done.stdout
        assert not re.search(r"[ \t]$", done.stdout, re.M)
        assert max(map(cell_len, done.stdout.splitlines())) <= columns
    words = set(re.findall(r"[\w.]{4,}", wide.stdout))
    missing = words - set(re.findall(r"[\w.]{4,}", narrow.stdout))
    assert missing <= {
        "chapter",
        "exercise",
        "minutes",
        "here",
        "what",
        "wrong",
        "shows",
        "span",
        "level",
        "where",
    }


@pytest.mark.parametrize("args", [["timeline", "{trace}"], ["spans"]])
def test_a_closed_pipe_is_no_error(trace: Path, args: list[str]) -> None:
    command = [sys.executable, "-m", "minivllm.cli.main", *(a.format(trace=trace) for a in args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(LIMIT_S) == 141
    assert stderr == b""


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closing: str) -> None:
    command = f"{sys.executable} -m minivllm.cli.main spans {closing}"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment(), timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# --- doctor


def test_doctor_finds_this_machine_usable() -> None:
    done = minivllm("doctor", "--env")
    assert done.returncode == 0, done.stdout
    for word in ("torch", "gloo", "spawn", "/dev/shm", "MINIVLLM_MQ_SPIN_US", "usable here"):
        assert word in done.stdout, word


def test_doctor_says_what_to_do() -> None:
    started = time.monotonic()
    done = minivllm(
        "doctor",
        "--json",
        MINIVLLM_WORKER_MULTIPROC_METHOD="teleport",
        MINIVLLM_MQ_MAX_CHUNKS="ten",
        MINIVLLM_ENABLE_MULTIPROCESSING="maybe",
        MINIVLLM_FAILPOINTS="garbage",
        MINIVLLM_TYPO="1",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
    )
    assert done.returncode == 1 and time.monotonic() - started < 30
    report = json.loads(done.stdout)
    assert report["usable"] is False
    wrong = {f["check"]: f for f in report["findings"] if f["status"] in ("missing", "note")}
    start_method = next(f for f in report["findings"] if f["check"] == "start method")
    assert "spawn" in start_method["found"] + start_method["to_do"]
    assert "does not answer" in wrong["OTLP endpoint"]["found"] and wrong["OTLP endpoint"]["to_do"]
    assert any("MINIVLLM_TYPO" in f["found"] for f in report["findings"])
    for name in ("MINIVLLM_MQ_MAX_CHUNKS", "MINIVLLM_ENABLE_MULTIPROCESSING", "MINIVLLM_FAILPOINTS"):
        assert any(name in f["found"] and f["status"] == "missing" for f in report["findings"])
    assert all(f["to_do"] for f in report["findings"] if f["status"] in ("missing", "note"))


def test_doctor_refuses_settings_that_no_engine_can_have() -> None:
    done = minivllm("doctor", "--set", "tensor_parallel_size=3")
    assert done.returncode == 2 and "cannot be divided" in done.stderr


def test_doctor_waits_half_a_second_for_an_endpoint_that_swallows_packets() -> None:
    # 192.0.2.0/24 is reserved for documentation: nothing answers there.
    done = minivllm("doctor", "--json", OTEL_EXPORTER_OTLP_ENDPOINT="http://192.0.2.1:4318")
    finding = next(f for f in json.loads(done.stdout)["findings"] if f["check"] == "OTLP endpoint")
    assert finding["status"] == "note"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm to leave a segment in")
def test_doctor_finds_and_cleans_stale_segments() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    segment = Path("/dev/shm") / f"minivllm-{done.stdout.strip()}-test"
    segment.write_bytes(b"\0" * 64)
    try:
        found = minivllm("doctor").stdout
        assert segment.name in found and "--clean" in found
        assert minivllm("doctor", "--clean").returncode == 0
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


# --- export


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP/HTTP receiver: keeps the bodies, answers as it was told."""

    bodies: list[bytes]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces" and self.headers["Content-Type"] == "application/json":
            self.bodies.append(body)
        answer = b"{}" if self.status == 200 else b"no room"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[tuple[str, type[Collector]]]:
    handler = type("Handler", (Collector,), {"bodies": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def span_ids(bodies: list[bytes]) -> list[str]:
    return [
        span["spanId"]
        for body in bodies
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_export_sends_every_span_once(tmp_path: Path, collector: tuple[str, type[Collector]]) -> None:
    url, handler = collector
    directory = write_run(tmp_path / "trace", steps=150)
    done = minivllm("export", str(directory), "--otlp", url)
    assert done.returncode == 0, done.stderr
    sent = span_ids(handler.bodies)
    assert sorted(sent) == sorted(span.span_id for span in TraceStore.open(directory).spans())
    assert f"sent {len(sent):,} spans" in done.stderr
    assert len(handler.bodies) > 4, "a long run goes in several requests"


def test_exported_file_is_valid_otlp(trace: Path, tmp_path: Path) -> None:
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    file = tmp_path / "run.json"
    assert minivllm("export", str(trace), "--otlp-json", str(file)).returncode == 0
    data = json.loads(file.read_text(encoding="utf-8"))
    assert json.loads(minivllm("export", str(trace), "--otlp-json", "-").stdout) == data
    # protobuf's JSON has base64 where OTLP/JSON has hexadecimal ids; the structure is the same.
    for resource in data["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
                for link in span.get("links", ()):
                    for key in ("traceId", "spanId"):
                        link[key] = base64.b64encode(bytes.fromhex(link[key])).decode()
    request = json_format.ParseDict(data, ExportTraceServiceRequest())
    assert sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans) == len(
        TraceStore.open(trace).spans()
    )


def test_export_to_nowhere_is_one_line(trace: Path, collector: tuple[str, type[Collector]]) -> None:
    """An endpoint that never answers: test_trace_export.py."""
    done = minivllm("export", str(trace), "--otlp", "http://127.0.0.1:9")
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    url, handler = collector
    handler.status = 503
    done = minivllm("export", str(trace), "--otlp", url)
    assert done.returncode == 1 and "refused the trace: HTTP 503" in done.stderr and "no room" in done.stderr
    for bad in ("localhost:4318", "ftp://x", "http://", "http://x:port"):
        assert minivllm("export", str(trace), "--otlp", bad).returncode == 2


# --- the engine behind the command


def left_over(processes: list[psutil.Process]) -> list[str]:
    """What of these processes still lives a moment later."""
    _, alive = psutil.wait_procs(processes, timeout=2)
    return [f"{p.pid} {p.name()}" for p in alive]


def segments(processes: list[psutil.Process]) -> set[str]:
    """Shared memory that these processes made and left; its name holds the pid of its maker."""
    return {p.name for process in processes for p in Path("/dev/shm").glob(f"minivllm-{process.pid}-*")}


def test_generate_prints_text_and_json(tmp_path: Path) -> None:
    done = minivllm("generate", "The for statement", "-", "--max-tokens", "5", stdin="A class\n\nAn import\n")
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.split("\n\n")
    assert len(blocks) >= 3 and blocks[0].startswith("The for statement")
    args = (
        "generate",
        "The for statement",
        "--max-tokens",
        "5",
        "--tp",
        "2",
        "--json",
        "--trace",
        str(tmp_path / "t"),
    )
    done = minivllm(*args)
    (answer,) = json.loads(done.stdout)
    assert blocks[0] == "The for statement" + answer["text"], "the same tokens with TP=1 and TP=2"
    assert len(answer["token_ids"]) == 5 and answer["finish_reason"] == "length"
    assert "minivllm timeline" in done.stderr
    again = minivllm(*args)
    assert again.returncode == 2 and "not empty" in again.stderr, "a recorded run is never written over"


def test_a_trace_directory_in_the_environment_that_cannot_be_used_is_bad_input() -> None:
    done = minivllm("generate", "x", MINIVLLM_TRACE_DIR="/dev/null/x")
    assert done.returncode == 2
    assert done.stderr.startswith("minivllm: error: MINIVLLM_TRACE_DIR='/dev/null/x' cannot be used")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("tp", ["1", "2"])
def test_a_checkpoint_without_weights_is_bad_input(tp: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((BUNDLED_CHECKPOINT / name).read_bytes())
    done = minivllm("generate", "x", "--model", str(tmp_path), "--tp", tp, "--device", "cpu")
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("minivllm: error: ") and "has no *.safetensors file" in last
    assert tp == "1" or ("rank" in last and "worker.load_model" in last)


def test_a_prompt_that_is_too_long_is_bad_input() -> None:
    for prompts, length, said in (
        (["word " * 3000], "1024", "error: the prompt has 3001 tokens, but"),
        (
            ["x", "a class of words"],
            "3",
            "error: prompt 2: the prompt has 4 tokens, but prompt and output together may have 3",
        ),
        (["x"], "1", "error: max_model_len=1 is not valid"),
    ):
        done = minivllm("generate", *prompts, "--max-model-len", length)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1, "no engine is started for it"


def test_a_checkpoint_without_a_tokenizer_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((BUNDLED_CHECKPOINT / "config.json").read_bytes())
    done = minivllm("generate", "x", "--model", str(tmp_path), "--trace", str(tmp_path / "trace"))
    assert done.returncode == 2 and "tokenizer.json does not exist" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "trace").exists()


def test_demo_in_a_terminal_shows_progress_text_timelines_and_what_to_do_next(tmp_path: Path) -> None:
    terminal = Terminal("demo", columns=80, cwd=tmp_path)
    assert terminal.wait() == 0, terminal.shown
    shown = ANSI.sub("", terminal.shown)
    assert "starting EngineCore and 2 workers" in shown
    assert "worker rank 0" in shown and "worker rank 1" in shown, "each rank's step is shown while it starts"
    for text in (
        "The for statement is used to iterate over",
        "24 tokens, length:",
        "Spawn: who was started when",
        "Initialisation: what each rank did",
        "One broadcast and its responses: execute_model",
        "docker run",
        "--otlp http://localhost:4318",
        "--view all",
        "minivllm step",
    ):
        assert text in shown, text
    (trace,) = (tmp_path / "traces").iterdir()
    store = TraceStore.open(trace)
    assert {p.rank for p in store.processes() if p.role == "worker"} == {0, 1}
    assert not store.orphans()
    done = minivllm("timeline", str(trace))
    assert done.returncode == 0 and "Failure" not in done.stdout, "a healthy run shows no failure"


def test_demo_into_a_pipe_and_onto_an_unwritable_directory(tmp_path: Path) -> None:
    trace = tmp_path / "deep" / "trace"
    done = minivllm(
        "demo", "--tp", "1", "--max-tokens", "4", "--trace-level", "lifecycle", "--trace", str(trace)
    )
    assert done.returncode == 0, done.stderr
    assert not ANSI.search(done.stdout + done.stderr)
    assert done.stderr.startswith("starting EngineCore and 1 worker") and "ready after" in done.stderr
    assert "recorded at level lifecycle: no rpc spans; record with --trace-level rpc" in done.stdout
    assert any(trace.glob("worker-*.jsonl"))


@pytest.mark.parametrize("when", ["starting", 0.6, 1.5, "generating", "between"])
def test_ctrl_c_ends_everything_within_a_second(when: float | str, tmp_path: Path) -> None:
    if when == "generating":
        # Slowed down, so that the key is pressed in the middle of it.
        slow = ";".join(f"model.forward@rank0#{n}=sleep:0.2" for n in range(8, 60))
        terminal = Terminal("demo", cwd=tmp_path, MINIVLLM_FAILPOINTS=slow)
        terminal.read_until("ready after")
        time.sleep(0.4)
    elif when == "starting":
        terminal = Terminal("demo", cwd=tmp_path)
        terminal.read_until("starting")
    elif when == "between":
        terminal = Terminal("demo", cwd=tmp_path)
        terminal.read_until("ready after")
    else:
        # Slowed down: a fast machine is ready before the last of these moments.
        terminal = Terminal("demo", cwd=tmp_path, MINIVLLM_FAILPOINTS="worker.load_model@rank0=sleep:3")
        time.sleep(float(when))
    family = terminal.descendants()
    terminal.press_ctrl_c()
    pressed = time.monotonic()
    code = terminal.wait(20)
    took = time.monotonic() - pressed
    assert code == 130, terminal.shown[-2000:]
    last = [line for line in ANSI.sub("", terminal.shown).splitlines() if line.strip()][-1]
    assert last.strip().removeprefix("^C") == "minivllm: interrupted"
    assert "Traceback" not in terminal.shown
    assert not left_over(family)
    assert not segments(family)
    # A second is what a user waits; this machine may be busy with other tests.
    assert took < 2.5, f"{took:.1f} s"


def test_ctrl_c_twice_leaves_nothing_either(tmp_path: Path) -> None:
    terminal = Terminal("demo", cwd=tmp_path, MINIVLLM_FAILPOINTS="worker.load_model@rank0=sleep:3")
    time.sleep(1.2)
    family = terminal.descendants()
    for _ in range(3):
        terminal.press_ctrl_c()
        time.sleep(0.05)
    assert terminal.wait(20) == 130
    assert not left_over(family)


def journals(trace: Path) -> str:
    """What each worker of a run has begun."""
    return "".join(path.read_text(encoding="utf-8") for path in trace.glob("worker-*.journal.jsonl"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_ends_everything(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """While rank 0 stands in a step, as its journal says."""
    command = [sys.executable, "-m", "minivllm.cli.main", "demo", "--trace", str(tmp_path / "trace")]
    standing = environment(MINIVLLM_FAILPOINTS="worker.load_model@rank0=hang")
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=standing,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Under nohup all of this run would ignore it.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    wait_until(lambda: "worker.load_model" in journals(tmp_path / "trace"), LIMIT_S, "rank 0 loads its model")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert stderr.strip().splitlines()[-1] == f"minivllm: ended by {number.name}"
    assert not left_over(family)


def test_a_reader_that_leaves_ends_the_demo_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minivllm.cli.main", "demo", "--max-tokens", "3"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(LIMIT_S) == 141
    assert [line.split(" ")[0] for line in stderr.splitlines()] == ["starting", "ready"], stderr


@pytest.mark.parametrize("step", ["worker.load_model@rank1=kill", "model.forward@rank1#4=kill"])
def test_a_dead_worker_is_one_clear_message_and_exit_code_1(step: str, tmp_path: Path) -> None:
    done = minivllm("demo", cwd=tmp_path, MINIVLLM_FAILPOINTS=step)
    assert done.returncode == 1
    name = step.partition("@")[0]
    said = [line for line in done.stderr.splitlines() if line.startswith("minivllm: ")]
    assert said[0].startswith("minivllm: the engine failed: worker rank 1")
    assert "SIGKILL" in said[0] and name in said[0]
    assert len(said) == 2 and "--view failure" in said[1]
    assert "Traceback" not in done.stderr
    (trace,) = (tmp_path / "traces").iterdir()
    shown = minivllm("timeline", str(trace), "--view", "failure").stdout
    assert f"rank 1 was killed by SIGKILL in {name}" in shown
