"""LLMEngine: input processing, EngineCore and output processing put together.

vLLM 0.25.1: vllm/v1/engine/llm_engine.py (LLMEngine)
Articles: part 1 intro
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm import envs
from minivllm.config import VllmConfig
from minivllm.engine import EngineCoreRequest
from minivllm.engine.core_client import EngineCoreClient, OnProgress
from minivllm.engine.input_processor import InputProcessor, load_tokenizer
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.serial_utils import BoundCall
from minivllm.exceptions import ConfigError
from minivllm.executor.abstract import Executor
from minivllm.request_output import RequestOutput
from minivllm.sampling_params import SamplingParams


class LLMEngine:
    """Attributes:
    engine_core: the client; its own `engine_core` is EngineCore when that runs in this process.
    """

    def __init__(
        self, vllm_config: VllmConfig, on_progress: OnProgress | None = None, trace_parent: bytes = b""
    ) -> None:
        self.vllm_config = vllm_config
        executor_class = Executor.get_class(vllm_config)
        if vllm_config.scheduler_config.async_scheduling and not executor_class.supports_async_scheduling():
            raise ConfigError(f"async_scheduling does not work with {executor_class.__name__}; leave it out")
        self.engine_core = EngineCoreClient.make_client(
            envs.MINIVLLM_ENABLE_MULTIPROCESSING, vllm_config, executor_class, trace_parent
        )
        try:
            # The tokenizer is read while the processes start.
            tokenizer = load_tokenizer(vllm_config.model_config)
            self.input_processor = InputProcessor(tokenizer, self.engine_core.wait_until_ready(on_progress))
            self.output_processor = OutputProcessor(tokenizer, trace_parent)
        except BaseException:
            self.engine_core.shutdown()
            raise

    def process_input(
        self, request_id: str, prompt: Any, params: SamplingParams
    ) -> tuple[str | None, EngineCoreRequest]:
        """Tokenize and validate, without adding. Raises RequestError."""
        return self.input_processor.process(request_id, prompt, params)

    def add_request(self, prompt: str | None, request: EngineCoreRequest) -> None:
        """Add a processed request. Raises EngineDeadError."""
        self.output_processor.add_request(request, prompt)
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> list[RequestOutput]:
        """Give requests up; returns what they had produced, with finish reason "abort"."""
        self.engine_core.check_owner()  # also when none of them is left to be given up
        outputs = self.output_processor.abort_requests(request_ids, self.engine_core.failure)
        self.engine_core.abort_requests([output.request_id for output in outputs])
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.request_states)

    def step(self) -> list[RequestOutput]:
        """Wait for the next outputs of EngineCore; returns the requests that ended with them, at once when none runs."""
        if not self.has_unfinished_requests():
            return []
        finished, to_abort = self.output_processor.process_outputs(self.engine_core.get_output())
        if to_abort:
            self.engine_core.abort_requests(to_abort)
        return finished

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if BoundCall.is_needed(args, kwargs):
            method, args, kwargs = BoundCall(method, args, kwargs), (), None
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        self.engine_core.shutdown()
