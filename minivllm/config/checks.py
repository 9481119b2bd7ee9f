"""Settings held against what they may be: one line that names the setting, its value and what is allowed.

vLLM 0.25.1: vllm/config/utils.py (config)
Articles: –
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterable
from typing import Any

from minivllm.envs import LONGEST_S
from minivllm.exceptions import ConfigError

INT_MAX = (1 << 31) - 1


def is_integer(value: Any) -> bool:
    """Whether this is an integer and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is an integer or a finite float."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def check_integers(config: object, names: Iterable[str], least: int, most: int = INT_MAX) -> None:
    """Raises ConfigError for the first of these attributes that is no integer in that range."""
    for name in names:
        value = getattr(config, name)
        if not (is_integer(value) and least <= value <= most):
            raise ConfigError(f"{name}={value!r} is not valid: an integer from {least} to {most} is needed")


def check_flags(config: object, names: Iterable[str]) -> None:
    """Raises ConfigError for the first of these attributes that is neither True nor False."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} is not valid: True or False is needed")


def check_seconds(name: str, value: Any) -> None:
    """Raises ConfigError for what is no number of seconds that a clock can count."""
    if not (is_number(value) and 0 < value <= LONGEST_S):
        raise ConfigError(
            f"{name}={value!r} is not valid: a number of seconds above 0 and up to {LONGEST_S:.0f} (30 days) is needed"
        )


def check_class_name(setting: str, value: Any) -> None:
    """Check the qualified name of a class as far as this goes without importing anything.

    Raises:
        ConfigError: it is no such name, there is no such package, or what it means here is no class.
    """
    if isinstance(value, type):
        raise ConfigError(
            f"{setting} is the class {value.__qualname__} itself: give its name, "
            f"{value.__module__ + '.' + value.__qualname__!r}, with which each worker imports it"
        )
    if (
        not isinstance(value, str)
        or not all(part.isidentifier() for part in value.split("."))
        or "." not in value
    ):
        raise ConfigError(
            f"{setting}={value!r} is not valid: the qualified name of a class is needed, such as 'package.module.Class'"
        )
    module_name, _, name = value.rpartition(".")
    found = getattr(sys.modules.get(module_name), name, None)
    if found is not None and not isinstance(found, type):
        raise ConfigError(f"{setting}={value!r} is no class, but a {type(found).__name__}")
    package = module_name.partition(".")[0]
    # Of a name with dots Python would import the packages around it.
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting}={value!r} cannot be found: there is no module named {package!r}")
