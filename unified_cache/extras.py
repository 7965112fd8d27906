"""Modules that need an extra of the package: ``pip install 'unified-cache[EXTRA]'``.

They are imported when they are used, so that the base installation works without what only they need.
"""

from importlib import import_module
from types import ModuleType

from unified_cache.errors import ConfigError

__all__ = ["import_with_extra"]


def import_with_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of this package whose dependencies the extra ``extra`` installs; ``purpose`` is what needs it.

    Raises:
        ConfigError: a dependency is not installed; the message names it, and the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] == __package__:
            raise
        raise ConfigError(
            f"{purpose} needs {error.name}, which is not installed: pip install 'unified-cache[{extra}]'"
        ) from error
