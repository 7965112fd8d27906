"""Opens a demo engine: a model, its device pools, a cache over them and a store beneath."""

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import transformers

from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.config import CacheConfig, Retention
from unified_cache.core.pool import Identity
from unified_cache.forward import SwaTranslation
from unified_cache.integrations.transformers import KeptState, greedy
from unified_cache.sizing.demo.engine import DemoEngine, EngineSettings
from unified_cache.sizing.demo.write_locator import PagedWriteLocator, WriteLocator
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.tiny_models import TINY_MODELS, tiny_model

__all__ = ["TierSizes", "load_model", "opened", "translation_of"]


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Capacity of each tier, and the retention of windows and states."""

    device_pages: int
    """Device pages of every component."""
    host_pages: int = 0
    """The same; 0 for no host tier, and then no storage."""
    retention: Retention = field(default_factory=Retention)


def load_model(name: str) -> KeptState:
    """Build one of the tiny models and look at what it keeps.

    Raises:
        ConfigError: no model has this name.
    """
    model = tiny_model(name)
    return KeptState.of(model, TINY_MODELS[name].page_size)


def identity_of(name: str) -> Identity:
    """Return whose pages these are: all that decides their last bit is part of the name."""
    capability = torch.backends.cpu.get_cpu_capability()
    revision = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()} {capability}"
    return Identity(name, revision)


def translation_of(cache: UnifiedCache, device: torch.device) -> SwaTranslation | None:
    """Return the translation of Full locations to SWA locations; None for a model without sliding windows."""
    paired = cache.pairing
    return None if paired is None else SwaTranslation.of(paired, cache.layout.page_size, device)


@contextmanager
def opened(
    name: str,
    kept: KeptState,
    sizes: TierSizes,
    storage: str | None = None,
    settings: EngineSettings = EngineSettings(),
    *,
    place: Callable[[SwaTranslation | None], WriteLocator] = PagedWriteLocator,
    choose: Callable[[torch.Tensor], int] = greedy,
) -> Iterator[DemoEngine]:
    """Open an engine for the length of a ``with`` block, over the store that a URL names; it backs up what it inserts.

    ``place`` is given what translates Full locations, None where nothing does.

    Raises:
        ConfigError, StorageError: as ``open_storage`` and ``UnifiedCache.open``.
    """
    components = len(kept.layout.components)
    config = CacheConfig(
        device_pages=(sizes.device_pages,) * components,
        host_pages=(sizes.host_pages,) * components,
        retention=sizes.retention,
    )
    pages = kept.allocate(config.device_pages)
    with ExitStack() as opened_here:
        store = None if storage is None else open_storage(storage)
        if store is not None:
            opened_here.callback(store.close)
        cache = opened_here.enter_context(
            UnifiedCache.open(kept.layout, config, pages.pools, identity=identity_of(name), storage=store)
        )
        engine = DemoEngine(cache, pages, place(translation_of(cache, kept.model.device)), settings, choose=choose)
        opened_here.callback(engine.close)
        yield engine
