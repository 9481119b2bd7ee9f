"""What the client and EngineCore say to each other: requests one way, outputs the other.

vLLM 0.25.1: vllm/v1/engine/__init__.py (EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason)
Articles: part 1 intro

Structs travel as msgpack arrays: names of fields are not sent, trailing defaults are left out.
"""

from __future__ import annotations

import enum

import msgspec

from minivllm.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives the text of the public API.

    STOP: end-of-text token, stop token or stop string. LENGTH: max_tokens or the model's length reached.
    ABORT: the client took it back. ERROR: EngineCore refused it; the output carries the reason.
    """

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequestType(enum.Enum):
    """First byte of each message from the client; one frame costs half of what two do."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request, validated and tokenized by the client.

    Attributes:
        arrival_time: seconds on the client's monotonic clock.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float = 0.0


class EngineCoreLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of `n` positions; the wire form of outputs.LogprobsLists.

    Attributes:
        token_ids: `[n][k + 1]`, the token itself first.
        logprobs: `[n][k + 1]`.
        ranks: `[n]`, rank of the first token of each row.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request, or several steps together (see held_outputs.py).

    Attributes:
        finish_reason: set in the last output of a request.
        stop_reason: the stop token that ended it, if one did.
        error: why EngineCore refused the request (finish_reason is ERROR).
        ended_by_grammar: the last token is no stop token, but the end of what the grammar allows.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: EngineCoreLogprobs | None = None
    prompt_logprobs: EngineCoreLogprobs | None = None
    error: str | None = None
    ended_by_grammar: bool = False


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """A call of a method of EngineCore itself, for instance collective_rpc.

    Attributes:
        call_id: returned with the result.
        arguments: pickled `(args, kwargs)`. Both ends belong to one user and share a private directory.
    """

    call_id: int
    method: str
    arguments: bytes


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a UtilityRequest.

    Attributes:
        failed: whether `result` is the pickled exception instead of the pickled return value.
    """

    call_id: int
    failed: bool
    result: bytes


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message from EngineCore: the outputs of steps, the answer to a utility call, or both."""

    outputs: list[EngineCoreOutput] = []
    utility_output: UtilityOutput | None = None


class EngineCoreReadyResponse(msgspec.Struct, array_like=True, gc=False):
    """What EngineCore found out during start-up and the client needs to check requests.

    Attributes:
        num_gpu_blocks: blocks in the pool, the null block included.
        max_model_len: prompt plus output, in tokens.
    """

    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int


class StartupMessage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """From EngineCore to the client, until the one with `ready`; from then on only EngineCoreOutputs follow.

    Attributes:
        kind: "hello" (the socket is connected), "progress", "ready" or "failed".
        rank_steps: what each rank is doing, as a name of the span catalogue.
        rank_pids: process of each rank, 0 while there is none; nothing with one rank in EngineCore itself.
        error_type: name of the class in minivllm.exceptions to raise, "" for any other error.
    """

    kind: str
    ready: EngineCoreReadyResponse | None = None
    error: str = ""
    error_type: str = ""
    rank_steps: list[str] = []
    rank_pids: list[int] = []
