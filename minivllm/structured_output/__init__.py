"""Grammars of requests: compiled when a request comes, asked for a bitmask in each of its steps.

vLLM 0.25.1: vllm/v1/structured_output/__init__.py (StructuredOutputManager)
Articles: part 2 §2.3.5

All this happens in EngineCore. The workers see nothing of a grammar but one bit per token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.config import VllmConfig
from minivllm.exceptions import RequestError
from minivllm.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

if TYPE_CHECKING:
    import numpy as np

    from minivllm.core.request import Request


class StructuredOutputManager:
    """Makes grammars, and masks of them.

    Deviation from vLLM: a grammar is compiled when its request is added, and not in a thread while the request waits
    in a state of its own. That takes about a millisecond for a schema of usual size, a grammar that was used before
    is only copied, and a wrong one is refused before the request exists.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.model_config = vllm_config.model_config
        self._backend: GuidanceBackend | None = None

    def grammar_init(self, request: Request) -> None:
        """Give a request with structured_outputs its grammar.

        Raises:
            RequestError: what is wrong with the schema or the expression, or which package is missing.
        """
        params = request.sampling_params.structured_outputs
        if params is not None:
            request.grammar = self.backend.compile_grammar(params)

    @property
    def backend(self) -> GuidanceBackend:
        """Made for the first request that needs it: most engines never see one."""
        if self._backend is None:
            model_config = self.model_config
            path = Path(str(model_config.model)) / "tokenizer.json" if model_config is not None else None
            if model_config is None or path is None or not path.is_file():
                raise RequestError(
                    "structured_outputs needs a tokenizer, but the checkpoint has no tokenizer.json"
                )
            self._backend = GuidanceBackend(path, model_config.vocab_size, model_config.eos_token_ids)
        return self._backend

    def grammar_bitmask(self, grammars: Sequence[tuple[GuidanceGrammar, list[int]]]) -> np.ndarray:
        """Which tokens may come next, and which after each of the drafts that are to be verified.

        Args:
            grammars: each with its drafts, which it allows.

        Returns:
            `[num_rows, ceil(vocab_size / 32)]` int32; bit = token allowed. A grammar with n drafts has n + 1 rows.
        """
        bitmask = self.backend.allocate_token_bitmask(sum(1 + len(drafts) for _, drafts in grammars))
        row = 0
        for grammar, drafts in grammars:
            grammar.fill_bitmask(bitmask, row)
            advanced = 0
            # Behind the end of a grammar no token is wanted, and the rows there may say anything.
            while advanced < len(drafts) and not grammar.is_terminated():
                grammar.accept_token(drafts[advanced])
                advanced += 1
                grammar.fill_bitmask(bitmask, row + advanced)
            grammar.rollback(advanced)
            row += 1 + len(drafts)
        return bitmask
