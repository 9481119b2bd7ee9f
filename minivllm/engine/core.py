"""EngineCore: the inner loop of the engine, and the process it usually runs in.

vLLM 0.25.1: vllm/v1/engine/core.py (EngineCore, EngineCoreProc)
Articles: part 1 intro, §1, §8.3, §9, part 2 §2.3.10
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import zmq

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_utils import get_kv_cache_configs
from minivllm.core.request import Request, RequestStatus
from minivllm.core.sched.output import SchedulerOutput
from minivllm.core.sched.scheduler import AsyncScheduler, Scheduler
from minivllm.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    StartupMessage,
    UtilityOutput,
    UtilityRequest,
)
from minivllm.engine.core_process import (
    HURRY_SIGNAL,
    Ending,
    leave,
    make_socket,
    make_socket_directory,
    on_client_death,
    say_goodbye,
    send_startup_message,
)
from minivllm.engine.held_outputs import HeldOutputs
from minivllm.engine.input_processor import check_request
from minivllm.engine.serial_utils import FunctionByValue, encode_exception, pickle_result
from minivllm.exceptions import ExecutorFailedError
from minivllm.executor.status_page import StatusPage
from minivllm.structured_output import StructuredOutputManager
from minivllm.utils.first_watch import ParentWatch
from minivllm.utils.system_utils import (
    configure_logging,
    decorate_logs,
    leave_terminal_signals_to_parent,
    set_process_title,
)

if TYPE_CHECKING:
    from minivllm.executor.abstract import Executor, ProgressCallback
    from minivllm.executor.status_page import RankStatus
    from minivllm.outputs import DraftTokenIds, ModelRunnerOutput

    OutputFuture: TypeAlias = Future[ModelRunnerOutput | None]
    DraftsFuture: TypeAlias = Future[DraftTokenIds | None]


class EngineCore:
    """Scheduler and executor, one step at a time.

    Start-up, in this order: the executor with its workers, what their KV caches need, how much memory they have,
    the caches, and the scheduler that hands out their blocks.

    Attributes:
        limits: what a request may ask for.
        batch_queue: batches in flight, newest first; None when only one can be.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        executor_fail_callback: Callable[[], None] | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        with tracing.span("engine_core.init", pid=os.getpid()) as span:
            self.vllm_config = vllm_config
            self.model_executor = executor_class(vllm_config, on_progress)
            try:
                if executor_fail_callback is not None:
                    self.model_executor.register_failure_callback(executor_fail_callback)
                num_gpu_blocks = self._initialize_kv_caches()
                self._init_scheduler(num_gpu_blocks)
            except BaseException:
                # Nobody gets a reference to this object, so nobody else could end the workers.
                self.model_executor.shutdown(hurried=True)
                raise
            span.set(num_gpu_blocks=num_gpu_blocks)
        self._shut_down = False

    def _initialize_kv_caches(self) -> int:
        with tracing.span("engine_core.init_kv_caches") as span:
            executor = self.model_executor
            kv_cache_specs = executor.get_kv_cache_specs()
            available_memory = executor.determine_available_memory()
            kv_cache_configs = get_kv_cache_configs(self.vllm_config, kv_cache_specs, available_memory)
            executor.initialize_from_config(kv_cache_configs)
            num_gpu_blocks = kv_cache_configs[0].num_blocks
            span.set(
                num_gpu_blocks=num_gpu_blocks,
                available_bytes=min(available_memory),
                kv_cache_bytes=[config.total_bytes for config in kv_cache_configs],
            )
            return num_gpu_blocks

    def _init_scheduler(self, num_gpu_blocks: int) -> None:
        config = self.vllm_config
        with tracing.span("engine_core.init_scheduler") as span:
            scheduler_class = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
            self.structured_output_manager = StructuredOutputManager(config)
            self.use_spec_decode = config.speculative_config is not None
            self.async_scheduling = config.scheduler_config.async_scheduling
            self.scheduler = scheduler_class(config, num_gpu_blocks, self.structured_output_manager)
            # With pipeline stages, or with scheduling one step ahead, several batches are under way at once.
            self.batch_queue_size = config.max_concurrent_batches
            self.batch_queue: deque[_BatchInFlight] | None = deque() if self.batch_queue_size > 1 else None
            self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue
            span.set(scheduler=scheduler_class.__name__, batch_queue_size=self.batch_queue_size)
        model_config = config.model_config
        self._eos_token_ids = frozenset(model_config.eos_token_ids if model_config is not None else ())
        no_limit = 1 << 31
        self.limits = EngineCoreReadyResponse(
            num_gpu_blocks=num_gpu_blocks,
            block_size=config.cache_config.block_size,
            max_model_len=(model_config.max_model_len if model_config is not None else None) or no_limit,
            vocab_size=model_config.vocab_size if model_config is not None else no_limit,
        )

    # --- requests

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """Raises RequestError: the client has checked the request, but EngineCore must survive any client."""
        max_tokens = check_request(request.prompt_token_ids, request.sampling_params, self.limits)
        accepted = Request.from_engine_core_request(request, max_tokens, self._eos_token_ids)
        self.structured_output_manager.grammar_init(accepted)
        return accepted

    def add_request(self, request: Request) -> None:
        """Raises ValueError for an id that is in use."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; their blocks are free at once, their slots in the workers with the next step."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.batch_queue)

    # --- one step

    def step(self) -> list[EngineCoreOutput]:
        """Schedule, execute, sample, and say what came of it."""
        if not self.scheduler.has_requests():
            return []
        if tracing.calls:
            with tracing.hot_span("engine_core.step"):
                return self._step()
        return self._step()

    def _step(self) -> list[EngineCoreOutput]:
        scheduler_output = self.scheduler.schedule()
        return self._finish_batch(self._start_batch(scheduler_output))

    def step_with_batch_queue(self) -> list[EngineCoreOutput]:
        """One step with several batches in flight: fill the queue first, wait for its oldest batch only then.

        Returns:
            The outputs of the oldest batch; nothing while the queue is being filled.
        """
        if tracing.calls:
            with tracing.hot_span("engine_core.step") as span:
                return self._step_with_batch_queue(span)
        return self._step_with_batch_queue(None)

    def _step_with_batch_queue(self, span: tracing.Span | None) -> list[EngineCoreOutput]:
        batch_queue = self.batch_queue
        assert batch_queue is not None
        if self.scheduler.has_requests():
            scheduler_output = self.scheduler.schedule()
            # All requests may be waiting for tokens in flight; then there is nothing to send.
            if _has_news(scheduler_output):
                batch_queue.appendleft(self._start_batch(scheduler_output))
                if span is not None:
                    span.set(
                        scheduled_step=scheduler_output.step,
                        scheduled=len(scheduler_output.num_scheduled_tokens),
                        in_flight=len(batch_queue),
                    )
                if len(batch_queue) < self.batch_queue_size and scheduler_output.num_scheduled_tokens:
                    return []
        if not batch_queue:
            return []
        batch = batch_queue.pop()
        if span is not None:
            span.set(
                awaited_step=batch.scheduler_output.step,
                awaited=len(batch.scheduler_output.num_scheduled_tokens),
            )
        return self._finish_batch(batch)

    def _start_batch(self, scheduler_output: SchedulerOutput) -> _BatchInFlight:
        """Send a batch to the workers without waiting.

        Deviation from vLLM: sample_tokens is sent right behind execute_model, also with one batch in flight, and
        not after its result; that saves the workers a wait for this process. Only the masks of grammars, if there
        are any, are computed in between, while the workers are at the forward pass. Drafts, too, are asked for right
        behind; with several batches in flight, a later question would be answered with a later batch's drafts.
        """
        executor = self.model_executor
        executed = cast("OutputFuture", executor.execute_model(scheduler_output, non_block=True))
        sampled = drafts = None
        # Without tokens there is only news of finished or preempted requests.
        if scheduler_output.num_scheduled_tokens:
            grammar_output = self.scheduler.get_grammar_bitmask(scheduler_output)
            sampled = cast("OutputFuture", executor.sample_tokens(grammar_output, non_block=True))
            # With asynchronous scheduling the next step verifies drafts that nobody here has seen; only grammars must.
            if self.use_spec_decode and (
                not self.async_scheduling or scheduler_output.has_structured_output_requests
            ):
                drafts = cast("DraftsFuture", executor.take_draft_token_ids(non_block=True))
        return _BatchInFlight(scheduler_output, executed, sampled, drafts)

    def _finish_batch(self, batch: _BatchInFlight) -> list[EngineCoreOutput]:
        """Wait for a batch, and say what came of it."""
        model_output = batch.result()
        if model_output is None:
            return []
        outputs = self.scheduler.update_from_output(batch.scheduler_output, model_output)
        if batch.drafts is not None and (drafts := batch.drafts.result()) is not None:
            self.scheduler.update_draft_token_ids(drafts)
        return outputs

    # --- calls and the end

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on all workers; one result per rank."""
        results: list[Any] = self.model_executor.collective_rpc(method, timeout, args, kwargs)
        return results

    def shutdown(self, hurried: bool = False) -> None:
        """End the workers. Idempotent.

        Args:
            hurried: nobody waits for what the workers are at; see Executor.shutdown.
        """
        if self._shut_down:
            return
        self._shut_down = True
        with tracing.span("engine_core.shutdown", hurried=hurried) as span:
            in_flight = list(self.scheduler.requests)
            self.abort_requests(in_flight)
            span.set(requests_in_flight=len(in_flight), outcome="aborted" if in_flight else "none in flight")
            self.model_executor.shutdown(hurried)


class _BatchInFlight:
    """The RPCs of one batch."""

    __slots__ = ("drafts", "executed", "sampled", "scheduler_output")

    def __init__(
        self,
        scheduler_output: SchedulerOutput,
        executed: OutputFuture,
        sampled: OutputFuture | None,
        drafts: DraftsFuture | None,
    ) -> None:
        self.scheduler_output = scheduler_output
        self.executed = executed
        self.sampled = sampled
        self.drafts = drafts

    def result(self) -> ModelRunnerOutput | None:
        """Wait for the batch. None when there was nothing to compute."""
        # In this order: when execute_model has failed, sample_tokens fails, too, and only for that reason.
        self.executed.result()
        if self.sampled is None:
            return None
        output = self.sampled.result()
        if output is None:
            raise RuntimeError("the workers were asked for tokens and gave none")
        return output


def _has_news(scheduler_output: SchedulerOutput) -> bool:
    return bool(
        scheduler_output.num_scheduled_tokens
        or scheduler_output.finished_req_ids
        or scheduler_output.preempted_req_ids
    )


class EngineCoreProc(EngineCore):
    """EngineCore in a process of its own, at the other end of a socket.

    Deviation from vLLM: one thread does everything and looks at the socket between two steps. vLLM's threads for
    input and output hand the GIL to and fro on each step, which costs more than the copying they take over.
    Requests and aborts that arrive while a step runs are handled right after it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        socket: zmq.Socket[bytes],
    ) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._utility_decoder = msgspec.msgpack.Decoder(UtilityRequest)
        # The failure callback comes from a thread of the executor; this wakes the loop out of its poll.
        self._wake_reader, self._wake_writer = os.pipe()
        self._signal_reader, self._signal_writer = os.pipe()
        os.set_blocking(self._signal_writer, False)
        self._poller = zmq.Poller()
        for source in (socket, self._wake_reader, self._signal_reader):
            self._poller.register(source, zmq.POLLIN)
        self._held_outputs = HeldOutputs()
        self._progress: tuple[list[str], list[int]] = [], []
        super().__init__(vllm_config, executor_class, self._on_executor_failure, self._on_progress)
        # The start-up heap lives as long as the process: no need to look through it again and again.
        gc.collect()
        gc.freeze()
        envs.enable_envs_cache()

    def wake_on_signals(self) -> None:
        """Let every signal that has a handler end a poll; in the main thread.

        One that comes after the interpreter's last look for signals and before the kernel waits interrupts no call, and
        its handler would run when the next message comes: for SIGTERM, mostly never.
        """
        signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False)

    def _on_executor_failure(self) -> None:
        os.write(self._wake_writer, b"\x00")

    def _on_progress(self, ranks: list[RankStatus]) -> None:
        progress = [rank.step for rank in ranks], [rank.pid for rank in ranks if rank.pid != os.getpid()]
        if progress != self._progress:
            self._progress = steps, pids = progress
            send_startup_message(self._socket, StartupMessage("progress", rank_steps=steps, rank_pids=pids))

    def run_busy_loop(self) -> None:
        """Serve until an exception ends it: SystemExit on SIGTERM, anything else is a failure of the engine."""
        while True:
            if not self.has_work():
                self._send_outputs(self._held_outputs.take())
                # Blocks without a time-out: an idle engine uses no CPU.
                self._poll()
            self._process_input()
            if self.has_work():
                self._send_outputs(self._held_outputs.add(self.step_fn()))

    def _poll(self) -> None:
        tracing.write_ended()
        ready = dict(self._poller.poll())
        if self._wake_reader in ready:
            os.read(self._wake_reader, 1)
            # Raises with the cause.
            self.model_executor.check_health()
            raise ExecutorFailedError("the executor has failed")
        if self._signal_reader in ready:
            # Its handler has run, and has not ended the process.
            os.read(self._signal_reader, 4096)

    def _process_input(self) -> None:
        socket = self._socket
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator, arg-type]
            message = socket.recv()
            kind, payload = message[:1], memoryview(message)[1:]
            if kind == EngineCoreRequestType.ADD.value:
                self._handle_add(payload)
            elif kind == EngineCoreRequestType.ABORT.value:
                request_ids = msgspec.msgpack.decode(payload, type=list[str])
                self.abort_requests(request_ids)
                self._held_outputs.forget(request_ids)
            else:
                self._handle_utility(payload)

    def _handle_add(self, payload: memoryview) -> None:
        try:
            request = self._request_decoder.decode(payload)
            self.add_request(self.preprocess_add_request(request))
            if request.sampling_params.stop:
                self._held_outputs.watch(request.request_id)
        except (msgspec.MsgspecError, ValueError) as e:
            self._send(
                EngineCoreOutputs(
                    [
                        EngineCoreOutput(
                            _request_id(payload), [], finish_reason=FinishReason.ERROR, error=str(e)
                        )
                    ]
                )
            )

    def _handle_utility(self, payload: memoryview) -> None:
        request = self._utility_decoder.decode(payload)
        try:
            args, kwargs = pickle.loads(request.arguments)
            if request.method != "collective_rpc":
                raise ValueError(f"EngineCore has no utility method {request.method!r}")
            method, *rest = args
            if isinstance(method, FunctionByValue):
                method = method.as_callable()
            result = pickle_result(self.collective_rpc(method, *rest, **kwargs))
        except ExecutorFailedError:
            raise
        except Exception as e:
            output = UtilityOutput(request.call_id, True, encode_exception(e))
        else:
            output = UtilityOutput(request.call_id, False, result)
        # What was there before the call is with the client before the call's result.
        self._send(EngineCoreOutputs(self._held_outputs.take(), output))

    def _send_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        if outputs:
            self._send(EngineCoreOutputs(outputs))

    def _send(self, outputs: EngineCoreOutputs) -> None:
        self._socket.send(self._encoder.encode(outputs))

    # --- the process

    @staticmethod
    def run_engine_core(
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        address: str,
        status_page: StatusPage,
        client_watch: ParentWatch,
    ) -> None:
        """Body of the EngineCore process.

        Invariants:
            1. The client's death is watched from the first instruction on, before this module is imported (first_watch.py).
            2. SIGINT and SIGHUP are the client's business: a terminal sends them to the whole process group, and the
               client then ends this process in order.
            3. SIGTERM ends it in order, HURRY_SIGNAL without patience for busy workers; a second one during the
               clean-up changes nothing.
            4. Whatever ends it, the client is told why before the workers are ended, as that may take seconds.

        Args:
            address: where this process binds its socket, and the client connects to.
            status_page: its only line is where the client reads what this process is doing.
        """
        ending = Ending()
        client_watch.on_death = partial(on_client_death, address, ending)
        leave_terminal_signals_to_parent()
        signal.signal(signal.SIGTERM, ending.on_signal)
        signal.signal(HURRY_SIGNAL, ending.on_signal)
        status_page.enter(0)
        set_process_title("EngineCore")
        decorate_logs("EngineCore")

        context = zmq.Context()
        socket = make_socket(context)
        # Time for the last message to leave when the process ends.
        socket.setsockopt(zmq.LINGER, 300)
        exit_code = 0
        engine_core: EngineCoreProc | None = None
        try:
            make_socket_directory(address)
            socket.bind(address)
            send_startup_message(socket, StartupMessage("hello"))
            # From here on the client hears of what goes wrong, such as a disk that has no room for the trace.
            configure_logging()
            tracing.configure("engine_core")
            engine_core = EngineCoreProc(vllm_config, executor_class, socket)
            engine_core.wake_on_signals()
            send_startup_message(socket, StartupMessage("ready", ready=engine_core.limits))
            engine_core.run_busy_loop()
        except BaseException as e:
            # An exception is a failure, after which no worker is worth waiting for.
            ending.hurried |= not ending.begun
            ending.begun = True
            exit_code = e.code if isinstance(e, SystemExit) and isinstance(e.code, int) else 1
            say_goodbye(socket, engine_core is not None, e)
        finally:
            if engine_core is not None:
                engine_core.shutdown(ending.hurried)
            tracing.shutdown()
            socket.close()
            context.term()
        leave(exit_code)


def _request_id(payload: memoryview) -> str:
    """The id of a request that cannot be decoded as a whole, so that its sender can be told."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return ""
    return fields[0] if isinstance(fields, list) and fields and isinstance(fields[0], str) else ""
