"""Things that a flag names by their place in Python."""

import importlib
from typing import Any

from vllm_clone.errors import ConfigError


def import_named(flag: str, name: str) -> Any:
    """What ``package.module.Name`` or ``package.module:Name`` is.

    Raises:
        ConfigError: it cannot be imported; names the flag.
    """
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"{flag} {name}: give the module too, as in package.module.Name.")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError:
        raise ConfigError(f"{flag} {name}: the module {module_name} has no {attribute}.") from None
    except Exception as error:  # the module's own code may raise anything
        raise ConfigError(f"{flag} {name}: cannot be imported ({type(error).__name__}: {error}).") from error
