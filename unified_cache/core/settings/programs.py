"""Settings of a replay and of a plan; sizes, store and policies are named as those of a cache."""

from typing import Annotated

from pydantic import Field

from unified_cache.core.config import EvictionConfig, Prefetching, Retention, WritePolicy
from unified_cache.core.settings.section import (
    Bytes,
    BytesOrNone,
    Count,
    Eviction,
    FilePath,
    PageCounts,
    PageCountsOrNone,
    Prefetches,
    Retained,
    Settings,
    StoreUrl,
    Texts,
)

__all__ = ["PlanChoices", "ReplayChoices"]


class ReplayChoices(Settings):
    """Sizes, store and policies of a replay; with ``model`` its tiers are sized in bytes, else in pages."""

    model: str | None = None
    """A preset, a config.json or a directory with one; unset, there is one pool of full attention."""
    dtype: str | None = None
    """What the model's K and V are kept in; its own dtype if unset."""
    page_size: Count | None = None
    """Tokens per page; a block of the trace, or the model's usual, if unset."""
    device_bytes: Bytes | None = None
    """True bytes of the model's device pools (L1); 64GiB if unset."""
    device_pages: PageCounts | None = None
    """Pages of the device (L1), without a model; 2000 if unset."""
    host_bytes: BytesOrNone | None = None
    """True bytes of host memory (L2), headers included; 0 for none; 256GiB if unset."""
    host_pages: PageCountsOrNone | None = None
    """Pages of host memory (L2), without a model; 0 for none; 20000 if unset."""
    storage: StoreUrl | None = None
    """URL of the store (L3): ``memory:``, ``file:DIR``, ``packed:DIR``, or ``none``; if unset none, with a model
    ``memory:`` of 2TiB."""
    storage_bytes: Bytes | None = None
    """Cap on the store; a model's true bytes, headers included."""
    page_bytes: Bytes | None = None
    """Payload of one page, without a model; 4KiB if unset."""
    scale_bytes: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of a page's true bytes that moves; 1/1024 if unset."""
    retention: Retained = Retention()
    eviction: Eviction = EvictionConfig()
    write: WritePolicy = WritePolicy.ON_CALL
    """When prompts go to host memory and storage; on_call: once served."""
    prefetching: Prefetches = Prefetching()
    engines: Count = 1
    """Engines that take the requests in turn, each with tiers of its own, over one store."""
    limit: Count | None = None
    """The trace's first N requests only."""
    explain: bool | None = None
    """Break missed tokens down by reason and component; with a report if unset."""
    report: FilePath | None = None
    """Write a page with pictures into this directory."""
    bytes: bool = True
    """Move and verify payloads; without them the same hits at full speed, for sizing."""


class PlanChoices(Settings):
    """Model, hardware and sizes that a plan compares."""

    model: str | None = None
    """A preset, a config.json or a directory with one."""
    dtype: str | None = None
    """What the model's K and V are kept in; its own dtype if unset."""
    page_size: Count | None = None
    """Tokens per page; the model's usual if unset."""
    devices: Count = 1
    """Devices of one engine, each of the size swept."""
    engines: Count = 1
    """Engines that take the requests in turn, each with memory of these sizes, over one store; full attention alone."""
    sweep: Texts = ()
    """Sizes of ``device``, ``host`` or ``storage``: ``TIER=FROM..TO``, ``TIER=FROM..TO:STEPS``, or ``TIER=`` a list;
    else ``device=16GiB..64GiB``, ``host=0..2TiB`` and ``storage=0..20TiB``."""
    hardware: str = "h100"
    """h100, h200, b200, laptop, or a TOML file of speeds and prices."""
    active_parameters: Annotated[float, Field(gt=0)] | None = None
    """Parameters that a token passes through, for the speed of prefill."""
    storage_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Bytes that storage keeps for each byte of a page: 0.7 for bfloat16 with ``compress=lossless``."""
    retention: Retained = Retention()
    eviction: Eviction = EvictionConfig()
    check: Annotated[int, Field(ge=0)] = 0
    """Combinations that are replayed in full, to say how far off the plan is."""
    report: FilePath | None = None
    """Write a page with pictures into this directory."""
    limit: Count | None = None
    """The trace's first N requests only."""
