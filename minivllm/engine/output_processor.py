"""From EngineCore's outputs to RequestOutput.

vLLM 0.25.1: vllm/v1/engine/output_processor.py (OutputProcessor, RequestState)
Articles: part 1 intro
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm import tracing
from minivllm.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.logprobs import LogprobsProcessor
from minivllm.exceptions import RequestError
from minivllm.request_output import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class RequestState:
    """What the client keeps of a request while it runs."""

    __slots__ = ("detokenizer", "logprobs_processor", "prompt", "request", "span")

    def __init__(
        self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer | None, trace_parent: bytes
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.prompt = prompt
        self.detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params)
        self.logprobs_processor: LogprobsProcessor | None = None
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self.logprobs_processor = LogprobsProcessor(tokenizer, params)
        self.span = tracing.start_span(
            "request",
            parent=trace_parent or None,
            attrs={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "minivllm.request_id": request.request_id,
            },
        )

    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput:
        logprobs = self.logprobs_processor
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=logprobs.prompt_logprobs if logprobs is not None else None,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=self.detokenizer.output_text,
                    token_ids=self.detokenizer.token_ids,
                    cumulative_logprob=logprobs.cumulative_logprob if logprobs is not None else None,
                    logprobs=logprobs.logprobs if logprobs is not None else None,
                    finish_reason=None if finish_reason is None else str(finish_reason),
                    stop_reason=stop_reason,
                )
            ],
            finished=finish_reason is not None,
        )

    def end_span(self, finish_reason: str, error: str | None = None) -> None:
        if error is not None:
            self.span.error(error)
        self.span.set(
            attrs={
                "gen_ai.response.finish_reasons": [finish_reason],
                "gen_ai.usage.output_tokens": len(self.detokenizer.token_ids),
            }
        )
        self.span.end()


class OutputProcessor:
    """Detokenizes, finds stop strings, collects log-probabilities; one RequestState per live request."""

    def __init__(self, tokenizer: Tokenizer | None, trace_parent: bytes = b"") -> None:
        self.tokenizer = tokenizer
        self._trace_parent = trace_parent
        self.request_states: dict[str, RequestState] = {}

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        self.request_states[request.request_id] = RequestState(
            request, prompt, self.tokenizer, self._trace_parent
        )

    def abort_requests(self, request_ids: list[str], error: str | None = None) -> list[RequestOutput]:
        """Forget requests; what they had produced comes back with finish reason "abort".

        Args:
            error: why they failed; None: they were given up.
        """
        outputs = []
        for request_id in request_ids:
            state = self.request_states.pop(request_id, None)
            if state is not None:
                state.detokenizer.finish()
                outputs.append(state.make_output(FinishReason.ABORT, None))
                state.end_span("abort", error)
        return outputs

    def process_outputs(self, outputs: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take the outputs of one step.

        Returns:
            The requests that ended in this step, and the ids of those that EngineCore must abort because a stop
            string was found here.

        Raises:
            RequestError: EngineCore refused a request (all other outputs have been processed by then).

        Deviation from vLLM: an output object is built only when a request ends; while it runs nobody reads
        one, since LLM.generate is the only caller.
        """
        finished: list[RequestOutput] = []
        to_abort: list[str] = []
        refused: RequestError | None = None
        states = self.request_states
        for output in outputs:
            request_id = output.request_id
            state = states.get(request_id)
            if state is None:
                # Aborted while this step ran.
                continue
            finish_reason: FinishReason | None = output.finish_reason
            stop_reason: int | str | None = output.stop_reason
            if finish_reason is FinishReason.ERROR:
                states.pop(request_id)
                refused = RequestError(output.error or "EngineCore refused the request")
                state.end_span("error", str(refused))
                continue
            stop_terminated = finish_reason is FinishReason.STOP and not output.ended_by_grammar
            stop_string = state.detokenizer.update(output.new_token_ids, stop_terminated)
            if state.logprobs_processor is not None:
                num_tokens = len(state.detokenizer.token_ids)
                state.logprobs_processor.update(output.logprobs, output.prompt_logprobs, num_tokens)
            if stop_string is not None:
                if finish_reason is None:
                    to_abort.append(request_id)
                finish_reason, stop_reason = FinishReason.STOP, stop_string
            if finish_reason is not None:
                states.pop(request_id)
                if stop_string is None:
                    state.detokenizer.finish()
                finished.append(state.make_output(finish_reason, stop_reason))
                state.end_span(str(finish_reason))
        if refused is not None:
            raise refused
        return finished, to_abort
