"""Stores by URL: what a command line or a configuration file names, opened.

    memory:                        in this process
    file:DIR                       in a directory, relative or absolute
    packed:DIR                     in a directory, for one process at a time; faster for small pages
    file:DIR?free=SIZE             either of these, leaving that much of the file system free
    grpc://HOST:PORT               behind a service, see ``remote.url``; grpcs:// with TLS
    mooncake://MASTER:PORT         in a Mooncake cluster, see ``mooncake.address``; with several masters
    mooncake:etcd://HOST:PORT,...  etcd says which of them leads
    s3://BUCKET/PREFIX             in a bucket, also gs:// and az://; see ``object.address``
    keys_only:                     names and sizes without bytes, for replay and sizing
    package.module:factory         a third party's store
    package.module:factory:REST    the same, with an argument

    URL#compress=lossless          pages are compressed without changing a bit, see ``wrappers.compression``
    URL#keys=SOURCE                pages are encrypted, see ``wrappers.page_keys``; with both an & stands between

What stands before the first colon is a third party's module if there is a dot in it, else one of ``STORES``. Both
ends have one signature: ``open_url(rest, bytes_max)`` and ``factory(rest, bytes_max)``, where ``rest`` is the
text after the last colon that the forms above show, empty if there is none.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import cast

from unified_cache import storage_backends
from unified_cache.core.errors import ConfigError, StorageError, did_you_mean, without_secrets
from unified_cache.core.extras import import_with_extra
from unified_cache.core.sizes import parse_bytes
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice, PageCoder

__all__ = ["open_storage"]

STORES = {
    "az": ("object.store", "open_az_url"),
    "file": ("file.store", "open_url"),
    "grpc": ("remote.store", "open_url"),
    "grpcs": ("remote.store", "open_secure_url"),
    "gs": ("object.store", "open_gs_url"),
    "keys_only": ("memory", "open_keys_only_url"),
    "memory": ("memory", "open_url"),
    "mooncake": ("mooncake.store", "open_url"),
    "packed": ("packed.store", "open_url"),
    "s3": ("object.store", "open_s3_url"),
}
"""Scheme of a URL: the module of this package that opens such a store, and its factory."""

EXTRAS = {"az": "object", "grpc": "remote", "grpcs": "remote", "gs": "object", "s3": "object"}
"""Scheme of a URL: the extra of this package without which its module cannot be imported."""

logger = logging.getLogger(__name__)

_Factory = Callable[[str, int | None], Store]


def open_storage(url: str, *, bytes_max: str | int | None = None, must_write: bool = False) -> Store:
    """Open the store that ``url`` names, see the module, with a cap as in ``10TiB``. The caller closes it.

    A directory that may not be written is read, and what is put into it declined, unless ``must_write``. A URL imports
    the module that it names: take it from who runs the process, never from a client.

    Raises:
        ConfigError: no such scheme, module or factory, a package that it needs is not installed, or no size.
        StorageError: the store itself cannot be opened.
    """
    bare, choice = split_choice(url)
    factory, rest = _factory_of(bare)
    if choice is not None:
        PageCoder(choice)  # keys that cannot be had leave no store behind
    backend = factory(rest, None if bytes_max is None else parse_bytes("bytes_max", bytes_max))
    if not isinstance(backend, Store):
        raise ConfigError(
            f"{without_secrets(url)} must open a Store of unified_cache.storage_backends.protocol, "
            f"found {type(backend).__name__}"
        )
    try:
        if backend.is_read_only:
            if must_write:
                raise StorageError(f"{without_secrets(url)} may not be written by this process", retryable=False)
            logger.warning("%s may not be written by this process: it is read, nothing is put", without_secrets(url))
        if backend.lengths(()) is not None:
            return CodedStorage(backend, choice) if choice is not None or backend.capability().durable else backend
        if choice is None:
            return backend
        raise ConfigError(
            f"compress= and keys= need a store that says how long its objects are, {type(backend).__name__} does not; "
            f"where it is a service, give them to the service"
        )
    except BaseException:
        backend.close()
        raise


def check_storage_url(url: str) -> None:
    """Raise as ``open_storage`` for what names no store, without opening one."""
    _factory_of(split_choice(url)[0])


def split_choice(url: str) -> tuple[str, CodingChoice | None]:
    """Return the store that ``url`` names, and what is done to the pages in it; None where it does not say.

    Raises:
        ConfigError: it says what nobody knows.
    """
    for name in ("#compress=", "#keys="):
        bare, mark, _ = url.partition(name)
        if mark:
            return bare, CodingChoice.of(url[len(bare) + 1 :])
    return url, None


def _factory_of(url: str) -> tuple[_Factory, str]:
    """Return what opens the store that ``url`` names, and the text for it."""
    scheme, colon, rest = url.partition(":")
    if not colon or not scheme:
        raise ConfigError(f"a store is named as {_known()} or package.module:factory, found {without_secrets(url)!r}")
    if "." in scheme and not scheme.startswith("."):  # which begins a path
        name, _, rest = rest.partition(":")
        factory = _factory_in(scheme, name)
        if factory is None:
            raise ConfigError(
                f"{without_secrets(url)!r} must name a callable after the colon, {scheme} has none called {name!r}"
            )
        return factory, rest
    factory = _own_factory(scheme) if scheme in STORES else None
    if factory is None:
        raise ConfigError(
            f"{without_secrets(url)!r} must begin with one of {_known()} or package.module:, found {scheme}:"
            f"{did_you_mean(f'{scheme}:', (f'{known}:' for known in STORES))}"
        )
    return factory, rest


def _factory_in(module_name: str, name: str) -> _Factory | None:
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name}: {error}") from error
    found: object = vars(module).get(name)
    # Who writes a plug-in vouches for its signature; the contract suite tests the rest.
    return cast("_Factory", found) if callable(found) else None


def _own_factory(scheme: str) -> _Factory | None:
    module, factory = STORES[scheme]
    module_name = f"{storage_backends.__name__}.{module}"
    if scheme in EXTRAS:
        import_with_extra(module_name, EXTRAS[scheme], f"{scheme}:")
    return _factory_in(module_name, factory)


def _known() -> str:
    """List the schemes that work here: those whose packages are installed."""
    known: list[str] = []
    for scheme in STORES:
        with suppress(ConfigError):
            _own_factory(scheme)
            known.append(f"{scheme}:")
    return ", ".join(known)
