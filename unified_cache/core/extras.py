"""Packages that only an extra installs, and the command to type where one is missing.

They are imported when they are used: a service runs without torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from unified_cache.core.errors import MissingExtraError

__all__ = ["needs_extra"]

PACKAGE = "unified_cache"


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Guard imports of what the extra ``extra`` installs; ``purpose`` is what cannot do without.

        with needs_extra("engine", "unified_cache.controller.memory"):
            import torch

    Around a module that is guarded itself, the outer extra is named: it must install what the inner one does.

    Raises:
        MissingExtraError: a package is not installed, or does not have what is imported from it; the message names both
            the package and the extra.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or PACKAGE).split(".")[0]
        if package == PACKAGE:
            raise
        command = f"pip install 'unified-cache[{extra}]'"
        if isinstance(error, ModuleNotFoundError | MissingExtraError):
            reason = f"{purpose} needs {package}, which is not installed: {command}"
        else:
            reason = f"{purpose} needs another version of {package}, {error}: {command}"
        raise MissingExtraError(reason, name=package) from error


def import_with_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of this package, guarded as by ``needs_extra``."""
    with needs_extra(extra, purpose):
        return import_module(module)
