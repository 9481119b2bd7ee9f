"""The client's side of EngineCore: in the same process, or at the other end of a socket.

vLLM 0.25.1: vllm/v1/engine/core_client.py (EngineCoreClient, InprocClient, SyncMPClient, BackgroundResources)
Articles: part 1 intro
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import secrets
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    StartupMessage,
    UtilityRequest,
)
from minivllm.engine.core import EngineCore, EngineCoreProc
from minivllm.engine.core_process import (
    ENGINE_CORE_DEAD,
    HURRY_SIGNAL,
    STARTUP_ERRORS,
    describe_failure,
    make_socket,
    remove_socket_directory,
)
from minivllm.engine.known_workers import KnownWorkers, open_pidfd
from minivllm.engine.serial_utils import FunctionByValue, decode_exception
from minivllm.exceptions import ConfigError, EngineDeadError, ExecutorFailedError
from minivllm.executor.leftovers import remove_leftovers
from minivllm.executor.status_page import StatusPage
from minivllm.utils import ownership
from minivllm.utils.first_watch import Later, run_watched
from minivllm.utils.system_utils import (
    MAIN_GUARD_ERROR,
    MAIN_GUARD_EXIT_CODE,
    check_main_file,
    check_main_guard,
    explain_exit,
    undisturbed_start,
)

if TYPE_CHECKING:
    from minivllm.executor.abstract import Executor

_T = TypeVar("_T")
OnProgress = Callable[[str], None]
_PROGRESS_INTERVAL_MS = 100
_LAST_WORDS_MS = 50
# A signal that comes just before a wait begins does not interrupt it; its handler runs when Python is next at work.
_LOOK_FOR_SIGNALS_MS = 250
_KILL_AFTER_S = 2.0
SHUT_DOWN = "the engine has been shut down"


class EngineCoreClient(ABC):
    """What LLMEngine needs of EngineCore, wherever it runs.

    Every method except shutdown() raises EngineDeadError in a child that was forked after the client was made.
    """

    def __init__(self) -> None:
        self._owner = ownership.Owner()

    def check_owner(self) -> None:
        """Raises EngineDeadError in a forked child."""
        if self._owner.generation != ownership.generation:
            raise EngineDeadError(self._owner.refusal("engine"))

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        trace_parent: bytes = b"",
    ) -> EngineCoreClient:
        client_class = SyncMPClient if multiprocess_mode else InprocClient
        return client_class(vllm_config, executor_class, trace_parent)

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """What the engine died of; None while it lives, and when it was shut down in good health."""

    @abstractmethod
    def wait_until_ready(self, on_progress: OnProgress | None = None) -> EngineCoreReadyResponse:
        """Block until requests can be taken; `on_progress` is told what is being done.

        Raises:
            ConfigError, WorkerStartupError, EngineDeadError: the reason why it will never be ready.
        """

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None: ...

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    def get_output(self) -> list[EngineCoreOutput]:
        """The outputs of the next step. Raises EngineDeadError."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on all workers; one result per rank. Raises what the call raised, or EngineDeadError."""

    @abstractmethod
    def shutdown(self) -> None:
        """End EngineCore and its workers. Idempotent."""


class InprocClient(EngineCoreClient):
    """EngineCore in the caller's process, for looking at it with a debugger.

    Attributes:
        engine_core: the EngineCore itself.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], trace_parent: bytes = b""
    ) -> None:
        super().__init__()
        self.engine_core = EngineCore(vllm_config, executor_class)
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        return None if self._failure == SHUT_DOWN else self._failure

    def wait_until_ready(self, on_progress: OnProgress | None = None) -> EngineCoreReadyResponse:
        return self.engine_core.limits

    def add_request(self, request: EngineCoreRequest) -> None:
        self.check_owner()
        self.engine_core.add_request(self.engine_core.preprocess_add_request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        self.check_owner()
        self.engine_core.abort_requests(request_ids)
        self._run(self._let_go)

    def get_output(self) -> list[EngineCoreOutput]:
        outputs = self._run(self.engine_core.step_fn)
        self._run(self._let_go)
        return outputs

    def _let_go(self) -> None:
        """Without requests nobody will call for a step, but the workers must hear of the ends of the last ones."""
        core = self.engine_core
        while core.has_work() and not core.scheduler.has_unfinished_requests():
            core.step_fn()

    def _run(self, action: Callable[[], _T]) -> _T:
        if self._owner.generation != ownership.generation:
            self.check_owner()
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        try:
            return action()
        except Exception as e:
            # The scheduler has counted the step as done; going on would give wrong tokens.
            self._failure = describe_failure(e)
            raise EngineDeadError(self._failure) from e
        except BaseException:
            self._failure = "a step was interrupted half-way"
            raise

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self.check_owner()
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        try:
            return self.engine_core.collective_rpc(method, timeout, args, kwargs)
        except ExecutorFailedError as e:
            self._failure = self._failure or describe_failure(e)
            raise EngineDeadError(self._failure) from e

    def shutdown(self) -> None:
        hurried = self._failure is not None
        self._failure = self._failure or SHUT_DOWN
        self.engine_core.shutdown(hurried)


class BackgroundResources:
    """The EngineCore process and the socket to it; knows nothing of the client, so that it can be its finalizer.

    Attributes:
        failure: why the engine is dead, the first cause only.
        waiting: somebody waits for EngineCore, or was interrupted while waiting; then it may be busy for long.
        workers: the processes that EngineCore has said are its workers.
    """

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], trace_parent: bytes) -> None:
        self.failure: str | None = None
        self.waiting = False
        self.workers = KnownWorkers()
        # Held around every use of the socket, also while waiting at it.
        self.socket_lock = threading.RLock()
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._pidfd = -1
        # EngineCore makes the directory: what a client left that is killed before then, nobody would remove.
        name = f"minivllm-engine-{os.getpid()}-{secrets.token_hex(8)}"
        self._address = f"ipc://{_socket_base()}/{name}/engine"
        self._context = zmq.Context()
        self.socket = make_socket(self._context)
        self.socket.setsockopt(zmq.LINGER, 0)
        mp_context = multiprocessing.get_context("spawn")
        # One line, in which EngineCore says what it is doing.
        self.status_page = StatusPage(1)
        death_reader, self._death_writer = mp_context.Pipe(duplex=False)
        arguments = (vllm_config, executor_class, self._address, self.status_page)
        self.process = mp_context.Process(
            target=run_watched,
            args=(
                os.getpid(),
                death_reader,
                "minivllm-client-monitor",
                Later((EngineCoreProc.run_engine_core, arguments)),
            ),
            name="EngineCore",
        )
        try:
            self.socket.connect(self._address)
            with tracing.span("engine_core.spawn", parent=trace_parent or None) as span:
                # A Ctrl-C must not hit the child before it has said that it leaves SIGINT to its client.
                with tracing.child_environment(parent=trace_parent or None), undisturbed_start(mp_context):
                    self.process.start()
                ownership.remain_the_parents(self.process)
                span.set(pid=self.process.pid)
        except BaseException:
            self.close()
            raise
        finally:
            death_reader.close()
            self.status_page.close_descriptor()
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self._pidfd = open_pidfd(self.process.pid)
        # Workers that EngineCore forks hold the sentinel's other end, too; a pidfd does not care.
        self.poller.register(self.process.sentinel if self._pidfd < 0 else self._pidfd, zmq.POLLIN)

    def remove_socket_files(self) -> None:
        remove_socket_directory(self._address)

    def open_steps(self) -> list[str]:
        """What EngineCore is doing, outermost step first."""
        return tracing.read_board(self.status_page.board(0))

    def describe_death(self) -> str:
        """How the process ended; call it only after its sentinel has fired."""
        self.process.join()
        steps = self.open_steps()
        where = f" while in {steps[-1]}" if steps else ""
        return f"EngineCore (pid {self.process.pid}) {explain_exit(self.process.exitcode)}{where}"

    def close(self) -> None:
        """End the process and remove what it leaves. Idempotent, from any thread; a forked copy does nothing."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.failure = self.failure or SHUT_DOWN
            try:
                self._end_process()
                self.workers.end()
            finally:
                self.workers.close()
                self._death_writer.close()
                self.remove_socket_files()
                if self.process.pid is not None and self.process.exitcode != 0:
                    remove_leftovers(self.process.pid)
                # The end of the process has woken whoever waited at the socket in another thread.
                if self.socket_lock.acquire(timeout=_KILL_AFTER_S):
                    self.socket.close()
                    self._context.term()
                    if self._pidfd >= 0:
                        os.close(self._pidfd)
                    self.socket_lock.release()
        atexit.unregister(self.close)

    def _end_process(self) -> None:
        process = self.process
        if process.pid is None:
            return
        patience = _KILL_AFTER_S
        if self.waiting:
            if process.is_alive():
                os.kill(process.pid, HURRY_SIGNAL)
        else:
            process.terminate()
            # That long EngineCore itself waits for its workers.
            patience += envs.MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S + envs.MINIVLLM_WORKER_SIGTERM_TIMEOUT_S
        limit = tracing.Patience(patience)
        while process.is_alive() and (left := limit.left()) > 0:
            process.join(left)
        if process.is_alive():
            process.kill()
            process.join()


class SyncMPClient(EngineCoreClient):
    """EngineCore in a process of its own.

    Deviation from vLLM: no thread receives outputs. The caller waits for the socket and for the death of the
    process at once, so that an answer needs no hand-over between threads and a death is noticed in every wait.

    Safe to call from several threads; calls then take turns.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], trace_parent: bytes = b""
    ) -> None:
        super().__init__()
        check_main_guard()
        check_main_file()
        self._startup_timeout_s = (
            vllm_config.parallel_config.startup_timeout_s or envs.MINIVLLM_STARTUP_TIMEOUT_S
        )
        self._trace_parent = trace_parent
        self.resources = BackgroundResources(vllm_config, executor_class, trace_parent)
        self._finalizer = weakref.finalize(self, self.resources.close)
        # multiprocessing joins its children at exit, possibly before the finalizer's turn, and would wait for ever.
        atexit.register(self.resources.close)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._lock = self.resources.socket_lock
        self._outputs: deque[list[EngineCoreOutput]] = deque()
        self._utility_results: dict[int, tuple[bool, bytes]] = {}
        self._pending_calls: set[int] = set()
        self._next_call_id = 0

    # --- start-up

    def wait_until_ready(self, on_progress: OnProgress | None = None) -> EngineCoreReadyResponse:
        with tracing.span("engine_core.ready", parent=self._trace_parent or None):
            return self._wait_until_ready(on_progress)

    def _wait_until_ready(self, on_progress: OnProgress | None) -> EngineCoreReadyResponse:
        resources = self.resources
        # The executor has the same deadline and knows more about what is late, so it may speak first.
        patience = tracing.Patience(self._startup_timeout_s + 10)
        shown = ""
        ranks: list[str] = []
        said_hello = False
        resources.waiting = True
        while True:
            ready = dict(resources.poller.poll(_PROGRESS_INTERVAL_MS))
            if on_progress is not None:
                now = self._describe_progress(ranks)
                if now and now != shown:
                    shown = now
                    on_progress(now)
            # The last words may still be on their way when the process has gone.
            if resources.socket in ready or (ready and resources.socket.poll(_LAST_WORDS_MS)):
                data = resources.socket.recv()
                self._raise_if_last_words(data)
                message = msgspec.msgpack.decode(data, type=StartupMessage)
                if message.kind == "hello":
                    said_hello = True
                    resources.remove_socket_files()
                elif message.kind == "progress":
                    ranks = message.rank_steps
                    resources.workers.add(message.rank_pids)
                elif message.kind == "failed":
                    self._fail(message.error)
                    raise _startup_error(message)
                elif message.ready is not None:
                    resources.waiting = False
                    return message.ready
            elif ready:
                raise self._startup_death(said_hello)
            elif patience.left() < 0:
                steps = " > ".join(resources.open_steps()) or "nothing yet"
                self._fail(
                    f"EngineCore was not ready after {self._startup_timeout_s:g} s; it was in: {steps}"
                )
                raise EngineDeadError(str(resources.failure))

    def _describe_progress(self, ranks: list[str]) -> str:
        """One line; of the steps that ranks are in, the one that most of them share comes first."""
        if ranks:
            return "; ".join(
                f"rank{'s' if count > 1 else ''} "
                f"{', '.join(str(rank) for rank, other in enumerate(ranks) if other == step)}: {step}"
                for step, count in Counter(ranks).most_common()
            )
        steps = self.resources.open_steps()
        return f"EngineCore: {steps[-1]}" if steps else ""

    def _startup_death(self, said_hello: bool) -> Exception:
        resources = self.resources
        text = resources.describe_death()
        begun = said_hello or bool(resources.open_steps())
        self._fail(text)
        if resources.process.exitcode == MAIN_GUARD_EXIT_CODE:
            return ConfigError(MAIN_GUARD_ERROR)
        # Its hello can be lost with a process that is killed. One that could not import anything has left by itself, and in no step.
        if begun or (resources.process.exitcode or 0) < 0:
            return EngineDeadError(f"{text} during start-up")
        return EngineDeadError(
            f"{text} before its first instruction: it could not import the main module or what its arguments "
            "need; its own message stands on stderr"
        )

    # --- requests

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def _send(self, kind: EngineCoreRequestType, payload: Any) -> None:
        self.check_owner()
        with self._lock:
            self._raise_if_dead()
            # From the moment on in which it is sent: an interrupt may come before anybody waits for the answer.
            self.resources.waiting |= kind is EngineCoreRequestType.UTILITY
            try:
                # Without a peer the socket would block; then the process is gone or going.
                self.resources.socket.send(kind.value + self._encoder.encode(payload), zmq.NOBLOCK)
                return
            except zmq.Again:
                pass
            while True:
                self._receive()

    def get_output(self) -> list[EngineCoreOutput]:
        # Before the lock, which another thread may have held when this process was forked.
        if self._owner.generation != ownership.generation:
            self.check_owner()
        with self._lock:
            while not self._outputs:
                self._receive()
            return self._outputs.popleft()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        target = method if isinstance(method, str) else FunctionByValue.of(method)
        results: list[Any] = self._call_utility("collective_rpc", target, timeout, args, kwargs)
        return results

    def _call_utility(self, name: str, *args: Any) -> Any:
        self.check_owner()
        arguments = pickle.dumps((args, {}))
        with self._lock:
            self._next_call_id += 1
            call_id = self._next_call_id
            self._pending_calls.add(call_id)
        try:
            self._send(EngineCoreRequestType.UTILITY, UtilityRequest(call_id, name, arguments))
            with self._lock:
                while call_id not in self._utility_results:
                    self._receive()
                failed, result = self._utility_results.pop(call_id)
        finally:
            # An answer that comes after the caller was interrupted is dropped.
            self._pending_calls.discard(call_id)
        if failed:
            raise decode_exception(result)
        return pickle.loads(result)

    # --- receiving

    def _receive(self) -> None:
        """Take one message, and sort it. Raises EngineDeadError, also while waiting."""
        resources = self.resources
        self._raise_if_dead()
        resources.waiting = True
        while not (ready := resources.poller.poll(_LOOK_FOR_SIGNALS_MS)):
            pass
        if ready[0][0] is not resources.socket and not resources.socket.poll(_LAST_WORDS_MS):
            self._fail(resources.describe_death())
            self._raise_if_dead()
        data = resources.socket.recv()
        resources.waiting = bool(self._pending_calls)
        self._raise_if_last_words(data)
        message = self._decoder.decode(data)
        if message.outputs:
            self._outputs.append(message.outputs)
        answer = message.utility_output
        if answer is not None and answer.call_id in self._pending_calls:
            self._utility_results[answer.call_id] = answer.failed, answer.result
            resources.waiting = len(self._pending_calls) > 1

    def _raise_if_last_words(self, data: bytes) -> None:
        if data.startswith(ENGINE_CORE_DEAD):
            self._fail(data.removeprefix(ENGINE_CORE_DEAD).decode())
            self._raise_if_dead()

    @property
    def failure(self) -> str | None:
        failure = self.resources.failure
        return None if failure == SHUT_DOWN else failure

    def _fail(self, cause: str) -> None:
        self.resources.failure = self.resources.failure or cause

    def _raise_if_dead(self) -> None:
        if self.resources.failure is not None:
            raise EngineDeadError(self.resources.failure)

    def shutdown(self) -> None:
        self._finalizer()
        self.resources.close()


def _socket_base() -> str:
    """A directory for the socket: its address must fit into about 100 characters, whatever TMPDIR says."""
    base = tempfile.gettempdir()
    return base if len(base) < 60 else "/tmp"


def _startup_error(message: StartupMessage) -> Exception:
    kinds = {kind.__name__: kind for kind in STARTUP_ERRORS}
    return kinds.get(message.error_type, EngineDeadError)(message.error)
