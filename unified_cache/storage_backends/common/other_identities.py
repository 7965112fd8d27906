"""Other identities of a model that a store had: an engine that finds none of its pages is warned once what differs."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from unified_cache.core.errors import CacheError
from unified_cache.core.shards import are_cut_otherwise
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.manifest import Description, described_by, is_sound, model_without_tenant
from unified_cache.storage_backends.protocol import Store

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OtherIdentities:
    """Identities that a store had when an engine opened it."""

    before: Mapping[bytes, Manifest | None]
    """Manifests by digest."""
    _is_said: bool = False

    @classmethod
    def of(cls, store: Store) -> "OtherIdentities":
        """Ask a durable store what it has; another one may have to list all its pages for the answer."""
        with suppress(CacheError):
            if store.capability().durable:
                return cls(store.manifests() or {})
        return cls({})

    def warn(self, registered: Manifest) -> None:
        """Log what an identity that the store did not have has otherwise than the nearest one of its model there.

        Once for an engine, and not of one that is another rank's of the same group.
        """
        if self._is_said or registered.identity in self.before:
            return
        here = described_by(registered)
        others = [
            described_by(each)
            for digest, each in self.before.items()
            if each is not None and each.model == registered.model and is_sound(each, digest)
        ]
        nearest = min(others, key=lambda other: _distance(here, other), default=None)
        if nearest is not None and not _is_other_rank(here, nearest):
            self._is_said = True
            logger.warning(
                "the store has %s under another identity, whose pages are misses under this one: %s",
                model_without_tenant(registered.model),
                ", ".join(here.differences(nearest)),
            )


def _distance(here: Description, other: Description) -> tuple[int, bool]:
    """Order identities by what they have otherwise; of two alike, first the one that is no other rank's."""
    return len(here.differences(other)), _is_other_rank(here, other)


def _is_other_rank(here: Description, other: Description) -> bool:
    """Return whether two identities differ by nothing but the shards of two ranks of one group."""
    names = here.identity.shard.text, other.identity.shard.text
    is_shard_alone = replace(other.identity, shard=here.identity.shard) == here.identity
    return is_shard_alone and names[0] != names[1] and not are_cut_otherwise(*names)
