"""LLM: the engine as a Python object.

vLLM 0.25.1: vllm/entrypoints/llm.py (LLM)
Articles: part 1 intro
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.config.checks import is_number
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import OnProgress
from minivllm.engine.llm_engine import LLMEngine
from minivllm.exceptions import ConfigError, RequestError
from minivllm.request_output import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.tracing.failpoints import never_reached
from minivllm.utils.system_utils import open_standard_descriptors

if TYPE_CHECKING:
    from minivllm.live_step import LiveStep


logger = logging.getLogger(__name__)


class LLM:
    """One model, served over as many processes as the arguments ask for.

    Use it as a context manager, call shutdown(), or just drop it: each ends all processes.

    Attributes:
        llm_engine: the engine behind it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
        live_step: bool | str = False,
        **kwargs: Any,
    ) -> None:
        """Start the engine and wait until it is ready.

        Args:
            model: local Hugging Face checkpoint (None: the bundled one).
            on_progress: called with a line of text whenever start-up reaches another step.
            live_step: stop every process before each lifecycle step until it is let go, by keys at the terminal, or by
                the commands in this text (minivllm.live_step.script). While anybody stands no deadline of the engine
                runs, and no `timeout` of a call.
            kwargs: the fields of EngineArgs: tensor_parallel_size, dtype, max_model_len, trace, …

        Raises:
            ConfigError: an argument or a MINIVLLM_* variable that cannot work, or an unknown argument.
            WorkerStartupError: a worker did not become ready; the text names rank and step.
            EngineDeadError: EngineCore did not become ready.
        """
        open_standard_descriptors()
        envs.check_all()
        if not isinstance(live_step, (bool, str)):
            raise ConfigError(
                f"live_step={live_step!r} is not valid: True, False or a text of commands is needed"
            )
        if live_step:
            # torch's rendezvous waits in C code, where no clock can be stopped.
            kwargs["startup_timeout_s"] = envs.LONGEST_S
        vllm_config = EngineArgs.from_kwargs(model=model, **kwargs).create_engine_config()
        live = _step_live(live_step, vllm_config) if live_step else None
        try:
            self._run = _start_trace(vllm_config)
            try:
                self.llm_engine = LLMEngine(vllm_config, on_progress, self._run.context)
            except BaseException as e:
                self._run.record_exception(e)
                _end_trace(self._run, vllm_config)
                raise
        except BaseException:
            if live is not None:
                live.close()
            raise
        self._request_counter = itertools.count()
        # A step's outputs go to whoever asked for the step, so only one caller may be at it.
        self._generate_lock = threading.Lock()
        at_exit: list[Callable[[], Any]] = []
        self._finalizer = weakref.finalize(self, _shutdown, self.llm_engine, self._run, live, at_exit)
        # Exit hooks run last in, first out, and all finalizers in one hook, which the first of the process has registered: torch
        # has one. Left to that hook, this one would come after the end of the recording, which would call the run left open.
        at_exit.append(self._finalizer)
        atexit.register(self._finalizer)

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate a continuation for each prompt.

        Args:
            prompts: a string, a list of token ids, a dict with `prompt_token_ids`, or a list of such.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show progress on stderr when that is a terminal.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter that cannot be served; nothing has been started then.
            EngineDeadError: the engine has failed; the text says why.

        An exception on the way, KeyboardInterrupt above all, takes the requests back and leaves the engine usable.
        """
        engine = self.llm_engine
        engine.engine_core.check_owner()
        items = _as_list(prompts)
        params = _params_for(sampling_params, len(items))
        requests = []
        for index, (prompt, prompt_params) in enumerate(zip(items, params, strict=True)):
            try:
                requests.append(engine.process_input(str(next(self._request_counter)), prompt, prompt_params))
            except RequestError as e:
                raise RequestError(f"prompt {index}: {e}" if len(items) > 1 else str(e)) from None
        order = {request.request_id: index for index, (_, request) in enumerate(requests)}
        outputs: list[RequestOutput | None] = [None] * len(requests)
        try:
            with self._generate_lock, _progress(len(requests), use_tqdm) as advance:
                for text, request in requests:
                    engine.add_request(text, request)
                missing = len(requests)
                while missing:
                    for output in engine.step():
                        if output.request_id in order:
                            outputs[order[output.request_id]] = output
                            missing -= 1
                            advance(output)
        except BaseException:
            _take_back(engine, list(order))
            raise
        return [output for output in outputs if output is not None]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on all ranks.

        Args:
            method: a name, or a function that is given the worker as its first argument.
            timeout: seconds (None: no limit).

        Returns:
            One result per rank.

        Raises:
            RemoteError: it raised on a rank. TimeoutError: a rank is late. EngineDeadError: the engine has failed.
            RequestError: a method or timeout that cannot be; nothing has been called then.
        """
        if not (isinstance(method, str) or callable(method)):
            raise RequestError(
                f"method={method!r} is not valid: the name of a worker's method, or a function, is needed"
            )
        if timeout is not None and not (is_number(timeout) and 0 <= timeout <= envs.LONGEST_S):
            raise RequestError(
                f"timeout={timeout!r} is not valid: a number of seconds from 0 to {envs.LONGEST_S:.0f}, or None for no limit, "
                "is needed"
            )
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def get_tokenizer(self) -> Any:
        """The checkpoint's `tokenizers.Tokenizer`; None when it has none."""
        return self.llm_engine.input_processor.tokenizer

    def shutdown(self) -> None:
        """End all processes; the trace is complete when it returns. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _shutdown(
    engine: LLMEngine, run: tracing.Span, live: LiveStep | None, at_exit: list[Callable[[], Any]]
) -> None:
    """The finalizer of an LLM; must not refer to it. at_exit: what is not needed at exit any more."""
    while at_exit:
        atexit.unregister(at_exit.pop())
    if live is not None:
        live.begin_end()
    failure = engine.engine_core.failure
    if failure is not None:
        run.error(failure)
    try:
        engine.shutdown()
    finally:
        _end_trace(run, engine.vllm_config)
        if live is not None:
            live.close()


def _step_live(live_step: bool | str, vllm_config: VllmConfig) -> LiveStep:
    from minivllm.live_step import LiveStep

    return LiveStep(live_step, vllm_config)


_traced: dict[tuple[int, int], str | None] = {}
"""Directories of the runs that are being traced, by process and span: recording ends with the last of them.

Other threads start and end engines, too, and so does the garbage collector: look at a copy."""


def _start_trace(vllm_config: VllmConfig) -> tracing.Span:
    observability = vllm_config.observability_config
    # An engine without a trace must not end the recording of another one in this process.
    if observability.trace_level != "off" or tracing.level == tracing.OFF:
        tracing.configure("client", trace_dir=observability.trace_dir, level=observability.trace_level)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    run = tracing.start_span(
        "run",
        model=os.path.basename(str(model.model)) if model is not None else "none",
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        world_size=parallel.world_size,
        backend=str(parallel.distributed_executor_backend),
        device=vllm_config.device,
        trace_level=observability.trace_level,
        instance_id=vllm_config.instance_id,
    )
    if observability.trace_level != "off":
        others = {there for (pid, _), there in list(_traced.items()) if pid == os.getpid()}
        for there in others - {observability.trace_dir}:
            logger.warning(
                "the engine that is traced in %s is still there: what this process does for it is recorded in %s from here on; "
                "shut it down before, or give both one directory",
                there,
                observability.trace_dir,
            )
        _traced[os.getpid(), run.span_id] = observability.trace_dir
    return run


def _end_trace(run: tracing.Span, vllm_config: VllmConfig) -> None:
    run.end()
    observability = vllm_config.observability_config
    if observability.trace_level != "off":
        _traced.pop((os.getpid(), run.span_id), None)
        if any(pid == os.getpid() for pid, _ in list(_traced)):
            tracing.flush()  # another engine goes on
        else:
            tracing.shutdown()
        if envs.MINIVLLM_FAILPOINTS and observability.trace_dir is not None:
            _note_idle_failpoints(observability.trace_dir, observability.trace_level)


def _note_idle_failpoints(trace_dir: str, trace_level: str) -> None:
    """Say which failpoints nobody came to: the run then went as if they had not been set."""
    try:
        idle = never_reached(envs.MINIVLLM_FAILPOINTS, trace_dir, trace_level)
    except OSError:
        # A trace that cannot be read tells nothing.
        return
    if idle:
        logger.warning("the trace shows no process that came to the failpoint %s", ", ".join(idle))


def _take_back(engine: LLMEngine, request_ids: list[str]) -> None:
    try:
        engine.abort_requests(request_ids)
    except Exception:
        # A dead engine has nothing to take back, and its failure is being raised already.
        pass


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several: a list of integers is one prompt, everything else in a list is several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts must be a string, a list of token ids, a dict or a list of such, not {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _params_for(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise RequestError(
            f"sampling_params must be SamplingParams or a list of them, not {type(sampling_params).__name__}"
        )
    if len(sampling_params) != num_prompts:
        raise RequestError(f"{len(sampling_params)} sampling_params were given for {num_prompts} prompts")
    return list(sampling_params)


@contextmanager
def _progress(num_requests: int, wanted: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Yields a function to call with each output."""
    import sys

    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generating", total=num_requests, tokens=0)
        num_tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            progress.update(task, advance=1, tokens=num_tokens)

        yield advance
