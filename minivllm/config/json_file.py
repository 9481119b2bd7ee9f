"""The small JSON files of a checkpoint, read field by field: an error names file, field and what is allowed.

vLLM 0.25.1: vllm/transformers_utils/repo_utils.py (get_hf_file_to_dict)
Articles: –
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minivllm.config.checks import is_integer, is_number
from minivllm.exceptions import ConfigError


class JsonFile:
    """A JSON object in a file. A field that is null counts as missing, as in the files that transformers writes.

    Attributes:
        data: the object.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
        FileNotFoundError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as e:
            raise ConfigError(f"{path} cannot be read: {e}") from None
        if not isinstance(self.data, dict):
            raise ConfigError(f"{path} is not a JSON object, but a {type(self.data).__name__}")

    def integer(self, field: str, default: int | None = None) -> int:
        """A size or number of something, at least 1. Raises ConfigError, also when it is missing without a default."""
        value = self._value(field, default)
        if not (is_integer(value) and value >= 1):
            raise self.error(field, "an integer of at least 1 is needed")
        return int(value)

    def number(self, field: str, default: float) -> float:
        """A finite number above 0. Raises ConfigError."""
        value = self._value(field, default)
        if not (is_number(value) and value > 0):
            raise self.error(field, "a number above 0 is needed")
        return float(value)

    def flag(self, field: str) -> bool:
        """A truth value, false when it is missing. Raises ConfigError."""
        value = self._value(field, False)
        if not isinstance(value, bool):
            raise self.error(field, "true or false is needed")
        return value

    def token_ids(self, field: str) -> list[int]:
        """One token or several, none when it is missing. Raises ConfigError."""
        value = self._value(field, [])
        ids = value if isinstance(value, list) else [value]
        if not all(is_integer(token_id) and token_id >= 0 for token_id in ids):
            raise self.error(field, "a token id or a list of token ids is needed")
        return ids

    def table(self, field: str) -> dict[str, Any]:
        """A JSON object, empty when it is missing. Raises ConfigError."""
        value = self._value(field, {})
        if not isinstance(value, dict):
            raise self.error(field, "an object is needed")
        return value

    def error(self, field: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self.path}: {field}={self.data[field]!r} is not valid: {allowed}")

    def _value(self, field: str, default: Any) -> Any:
        value = self.data.get(field)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.path} lacks {field}")
        return default
