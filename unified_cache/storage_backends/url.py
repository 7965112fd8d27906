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
from importlib import import_module
from typing import cast

from unified_cache import storage_backends
from unified_cache.core.errors import ConfigError, StorageError, did_you_mean, foreign_code, without_secrets
from unified_cache.core.extras import import_with_extra
from unified_cache.core.sizes import parse_bytes
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import capability_of
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice, PageCoder

__all__ = ["open_storage"]

STORES = {
    "az": ("object.store", "open_az_url", "object"),
    "file": ("file.store", "open_url", None),
    "grpc": ("remote.store", "open_url", "remote"),
    "grpcs": ("remote.store", "open_secure_url", "remote"),
    "gs": ("object.store", "open_gs_url", "object"),
    "keys_only": ("memory", "open_keys_only_url", None),
    "memory": ("memory", "open_url", None),
    "mooncake": ("mooncake.store", "open_url", None),
    "packed": ("packed.store", "open_url", None),
    "s3": ("object.store", "open_s3_url", "object"),
}
"""Scheme of a URL: the module of this package that opens such a store, its factory, and the extra that it needs."""

KNOWN = ", ".join(f"{scheme}:" for scheme in STORES)

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
    with foreign_code(f"{without_secrets(url)} must open as factory(rest, bytes_max), or raise StorageError"):
        return _opened(url, None if bytes_max is None else parse_bytes("bytes_max", bytes_max), must_write)


def _opened(url: str, bytes_max: int | None, must_write: bool) -> Store:
    bare, choice = split_choice(url)
    factory, rest = _factory_of(bare)
    if choice is not None:
        PageCoder(choice)  # keys that cannot be had leave no store behind
    backend = factory(rest, bytes_max)
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
            return CodedStorage(backend, choice) if choice is not None or capability_of(backend).durable else backend
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
        raise ConfigError(f"a store is named as {KNOWN} or package.module:factory, found {without_secrets(url)!r}")
    if "." in scheme and not scheme.startswith("."):  # which begins a path
        module_name = scheme
        name, _, rest = rest.partition(":")
    elif scheme in STORES:
        module, name, extra = STORES[scheme]
        module_name = f"{storage_backends.__name__}.{module}"
        if extra is not None:
            import_with_extra(module_name, extra, f"{scheme}:")
    else:
        raise ConfigError(
            f"{without_secrets(url)!r} must begin with one of {KNOWN} or package.module:, found {scheme}:"
            f"{did_you_mean(f'{scheme}:', (f'{known}:' for known in STORES))}"
        )
    try:
        found: object = vars(import_module(module_name)).get(name)
    except Exception as error:
        raise ConfigError(f"cannot import {module_name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{without_secrets(url)!r} must name a callable after the colon, {scheme} has no {name!r}")
    return cast("_Factory", found), rest
