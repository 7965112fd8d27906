"""Arguments that several commands share, and what they name."""

from typing import Annotated

import typer

from unified_cache.offline.stores import StoredIdentity, choose, identities_of
from unified_cache.storage_backends.protocol import StorageBackend

__all__ = ["IdentityOption", "JsonOption", "StoreArgument", "selected"]

StoreArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Store: file:DIR, packed:DIR or package.module:factory.")
]
IdentityOption = Annotated[
    str | None, typer.Option(metavar="DIGEST", help="One identity alone, by the first digits of its digest.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def selected(storage: StorageBackend, url: str, wanted: str | None) -> list[StoredIdentity]:
    """Return the identities of a store, or the one whose digest begins with ``wanted``.

    Raises:
        ConfigError: there is no such identity, or the store cannot say.
    """
    found = identities_of(storage)
    return found if wanted is None else [choose(found, url, wanted)]
