"""Stores by URL: what a command line or a configuration file names, opened.

    memory:                        in this process
    file:DIR                       in a directory, relative or absolute
    packed:DIR                     in a directory, for one process at a time; faster for small pages
    file:DIR?free=SIZE             either of these, leaving that much of the file system free
    grpc://HOST:PORT               behind a service, see ``remote``; grpcs:// with TLS
    NAME:REST                      any module of unified_cache.storage_backends that offers ``open_url``
    package.module:factory         a third party's store
    package.module:factory:REST    the same, with an argument

What stands before the first colon is a third party's module if there is a dot in it, else one of ours or an alias. Both
ends have one signature: ``open_url(rest, bytes_max)`` and ``factory(rest, bytes_max)``, where ``rest`` is the
text after the last colon that the forms above show, empty if there is none.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import cast

from unified_cache import storage_backends
from unified_cache.errors import ConfigError
from unified_cache.storage_backends.protocol import StorageBackend

__all__ = ["check_storage_url", "open_storage"]

OPEN_URL = "open_url"
"""What a module in this package offers to be named in a URL."""

ALIASES = {"grpc": ("remote", "open_url"), "grpcs": ("remote", "open_secure_url")}
"""Schemes that have a name of their own elsewhere: the module that serves each, and what it offers."""

_Factory = Callable[[str, int | None], StorageBackend]


def open_storage(url: str, *, bytes_max: int | None = None) -> StorageBackend:
    """Open the store that ``url`` names, see the module for its forms. The caller closes it.

    A URL imports the module that it names: take it from who runs the process, never from a client.

    Raises:
        ConfigError: no such scheme, module or factory, or a package that it needs is not installed.
        StorageError: the store itself cannot be opened.
    """
    factory, rest = _factory_of(url)
    return factory(rest, bytes_max)


def check_storage_url(url: str) -> None:
    """Refuse what ``open_storage`` could not name a store by, without opening one; imports the module as it does.

    Raises:
        ConfigError: no such scheme, module or factory, or a package that it needs is not installed.
    """
    _factory_of(url)


def _factory_of(url: str) -> tuple[_Factory, str]:
    """Return what opens the store that ``url`` names, and the text for it."""
    scheme, colon, rest = url.partition(":")
    if not colon or not scheme:
        raise ConfigError(f"a store is named as {_known()} or package.module:factory, found {url!r}")
    if "." in scheme:
        name, _, rest = rest.partition(":")
        factory = _factory_in(scheme, name)
        if factory is None:
            raise ConfigError(f"{url!r} must name a callable after the colon, {scheme} has none called {name!r}")
        return factory, rest
    module, offer = ALIASES.get(scheme, (scheme, OPEN_URL))
    factory = _factory_in(f"{storage_backends.__name__}.{module}", offer) if module in _modules() else None
    if factory is None:
        raise ConfigError(f"{url!r} must begin with one of {_known()} or package.module:, found {scheme}:")
    return factory, rest


def _factory_in(module_name: str, name: str) -> _Factory | None:
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name}: {error}") from error
    found: object = vars(module).get(name)
    # Who writes a plug-in vouches for its signature; the contract suite tests the rest.
    return cast("_Factory", found) if callable(found) else None


def _modules() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(storage_backends.__path__))


def _known() -> str:
    """List the schemes that work here: modules whose own needs are installed, and that offer ``open_url``."""
    known: list[str] = []
    served = {module for module, _ in ALIASES.values()}
    named = [(name, name, OPEN_URL) for name in _modules() if name not in served]
    named += [(scheme, module, offer) for scheme, (module, offer) in ALIASES.items()]
    for name, module, offer in named:
        try:
            offers = _factory_in(f"{storage_backends.__name__}.{module}", offer) is not None
        except ConfigError:
            offers = False
        if offers:
            known.append(f"{name}:")
    return ", ".join(known)
