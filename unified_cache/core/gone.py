"""Names that earlier versions had, and what to use in their place: the text of the error that a use of one raises.

Whatever is taken out gets a row here and one in docs/migrating.md.
"""

from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

__all__ = [
    "GONE",
    "MOVED",
    "Gone",
    "GoneModules",
    "command_instead",
    "import_instead",
    "method_instead",
    "section_instead",
    "setting_instead",
    "value_instead",
]


class Gone(NamedTuple):
    """Names of one thing that was taken out."""

    instead: str
    """What to use in its place: one sentence, without a full stop."""
    settings: tuple[str, ...] = ()
    """As in a file, without the section; with it, what is still a setting of another section: ``serve.host_bytes``."""
    sections: tuple[str, ...] = ()
    """Sections of the file whose settings are all gone."""
    commands: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    """Modules, and names of ``unified_cache`` itself, in full."""
    methods: tuple[str, ...] = ()
    """Of ``UnifiedCache``."""
    values: tuple[str, ...] = ()
    """Values that a setting or an option had."""


GONE: Sequence[Gone] = (
    Gone(
        "clients on the service's machine call it over gRPC as all others do: take the setting out; to do without a "
        "service, have the processes of one machine name the same file: store",
        settings=("limits.links_max", "limits.regions_max", "limits.region_bytes_max", "limits.region_idle_s"),
    ),
    Gone(
        "the page cache of the system keeps pages of file: and packed: stores in memory that is free: take it out, and "
        "give the memory to the system",
        settings=("serve.host_bytes", "limits.lease_s_max", "limits.leases_max", "limits.leased_share"),
    ),
    Gone(
        "the routers of vLLM, SGLang, llm-d and Dynamo read the KV events that engines publish, see docs/events.md",
        commands=("router",),
        imports=(
            "unified_cache.observe.events.index",
            "unified_cache.observe.events.follower",
            "unified_cache.observe.events.subscriber",
            "unified_cache.observe.events.router_calls",
            "unified_cache.observe.events.router_client",
            "unified_cache.observe.events.router_server",
            "unified_cache.observe.events.schema",
            "unified_cache.proto.router_pb2",
        ),
    ),
    Gone(
        "import EngineStore, EngineStoreConfig, EngineStoreCounts, EnginePage and Unavailable from "
        "unified_cache.integrations.engine_store",
        imports=("unified_cache.external",),
    ),
    Gone("import PrefetchProgress from unified_cache.controller.prefetch", imports=("unified_cache.prefetches",)),
    Gone(
        "open the live page in a browser, or read its figures.json, with Authorization: Bearer TOKEN where it needs a "
        "token, see docs/live.md",
        settings=("live_token",),
        commands=("top",),
        imports=("unified_cache.cli.top",),
    ),
    Gone(
        "set MC_LOG_LEVEL or MC_LOG_DIR, which the Mooncake library reads itself",
        imports=("unified_cache.storage_backends.mooncake.own_log",),
    ),
    Gone(
        "use SGLang's own tree, without --radix-cache-backend, over UnifiedCacheHiCache, see docs/sglang.md",
        imports=(
            "unified_cache.integrations.sglang.tree",
            "unified_cache.integrations.sglang.tree_hicache",
            "unified_cache.integrations.sglang.tree_plugin",
            "unified_cache.integrations.sglang.tree_slots",
            "unified_cache.integrations.sglang.tree_tiers",
        ),
    ),
    Gone(
        "prefetch reads a prompt from its start, see docs/policies.md",
        imports=("unified_cache.tails", "unified_cache.integrations.transformers.head_start"),
        methods=("prefetch_tail", "landed_tail", "join_tail"),
    ),
    Gone(
        "nothing: adaptive eviction reports no expectations; explain says what became of pages that are missing",
        imports=("unified_cache.cache.explain.outlooks", "unified_cache.tree.outlook", "unified_cache.tree.shadow_lru"),
    ),
    Gone(
        "use lru, or adaptive for prompts that sessions continue; to keep something longer, use priority or prefer",
        settings=("eviction.lfu_half_life_touches", "eviction.slru_protected_share", "eviction.ttl_s"),
        values=("lfu", "slru", "fifo"),
    ),
    Gone(
        "Mooncake's own mooncake_master and mooncake_client run a cluster and its storage nodes, see docs/cluster.md",
        sections=("node", "cluster"),
        commands=("node", "cluster"),
        imports=(
            "unified_cache.cluster",
            "unified_cache.cli.cluster",
            "unified_cache.cli.node",
            "unified_cache.core.settings.mooncake",
        ),
    ),
    Gone(
        "explain(prompt) says why the hit of a prompt is as long as it is",
        imports=("unified_cache.cache.explain.short_hits",),
        methods=("recent_explanations", "look_at_explanations"),
    ),
    Gone(
        "TransferPolicy.FASTEST measures how long reading and computing take, in unified_cache.controller.cost_model",
        imports=("unified_cache.PrefillCurve", "unified_cache.estimates", "unified_cache.controller.estimates"),
    ),
    Gone(
        "ping says what stat said; explain --storage URL, backup, prefetch and storage clear take the URL of a service",
        commands=("stat", "lookup", "get", "put", "clear"),
        imports=("unified_cache.storage_backends.remote.inquiry",),
    ),
    Gone(
        "opentelemetry-instrument unified-cache serve makes spans of its calls, see docs/service.md",
        sections=("tracing",),
        settings=("tracing.exporter", "tracing.spans_waiting_max"),
        imports=("unified_cache.service.operations.tracing",),
    ),
    Gone(
        "files of tokens and of certificates have the same pace: set access.check_s and access.stale_s_max",
        settings=("access.tokens_check_s", "access.tokens_stale_s_max", "tls.check_s", "tls.stale_s_max"),
    ),
    Gone(
        "every server does as the default did: take the setting out",
        sections=("log",),
        settings=(
            *("log.burst", "log.every_s", "audit.burst", "audit.every_s"),
            *("limits.message_bytes_max", "limits.metadata_bytes_max", "limits.connection_idle_s"),
            *("quota.active_s", "quota.retry_s", "quota.running_max", "access.tokens_max"),
            *("metrics.request_s_max", "metrics.tenants_max", "metrics.pools_max"),
            *("limits.counted_pages_max", "quota.tenants_max"),
        ),
    ),
    Gone(
        "no figure of a plan came from the speed of writes to storage: take it out of the hardware file",
        settings=("storage_write_bytes_per_s",),
    ),
    Gone(
        "give a StorageLayer of unified_cache.storage_backends.wrappers.layer the faults that a test needs, and run "
        "unified_cache.testing.storage_contract over a store of your own",
        imports=("unified_cache.testing.faulty_storage", "unified_cache.testing.seeded_workers"),
    ),
    Gone(
        "the engine is examples/continuous_batching.py, and the demo asks one model about one document",
        settings=("demo.users",),
    ),
)


MOVED: Mapping[str, tuple[str, ...]] = {
    "core": (
        "byte_sizes",
        "config",
        "drain",
        "errors",
        "extras",
        "files",
        "miss_reason",
        "nesting",
        "page",
        "pool",
        "seal",
        "settings",
        "shards",
        "slots",
        "slowest",
        "tier_sizes",
        "window",
    ),
    "proto": ("wire",),
    "controller": (
        "backup",
        "backup_scheduler",
        "copies",
        "ledger",
        "memory",
        "page_changes",
        "prefetch",
        "ranks",
    ),
    "cache": ("explain", "recording", "stats"),
    "storage_backends": ("offline",),
    "observe": ("events", "live", "metrics"),
    "sizing": ("demo", "plan", "replay", "report"),
}
"""By room, the modules that lay at the root of the package in earlier versions."""


PACKAGE = __name__.partition(".")[0]


class GoneModules:
    """Finder of modules, asked after all others: says of one that is gone what to import in its place."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing: return None, or raise ModuleNotFoundError for a module that is gone."""
        instead = import_instead(fullname)
        if instead:
            raise ModuleNotFoundError(f"No module named {fullname!r}{instead}", name=fullname)
        return None


def setting_instead(name: str) -> str:
    """Return the end of an error about a setting, named as in ``Gone``; empty where no version had one of that name."""
    return _end([each.instead for each in GONE if name in each.settings])


def section_instead(name: str) -> str:
    """Return the end of an error about a section of the file; empty where no version had one of that name."""
    return _end([each.instead for each in GONE if name in each.sections])


def command_instead(name: str) -> str:
    """Return the end of an error about a command; empty where no version had one of that name."""
    return _end([each.instead for each in GONE if name in each.commands])


def value_instead(value: object) -> str:
    """Return the end of an error about a value; empty where no version had one of that name."""
    return _end([each.instead for each in GONE if value in each.values])


def import_instead(name: str) -> str:
    """Return the end of an error about an import; empty where no version had one of that name."""
    package, _, rest = name.partition(".")
    for room, names in MOVED.items():
        if package == PACKAGE and rest.partition(".")[0] in names:
            return f"; it has moved to {package}.{room}.{rest}"
    return _end([each.instead for each in GONE if name in each.imports])


def method_instead(name: str) -> str:
    """Return the end of an error about a method of ``UnifiedCache``; empty where no version had one of that name."""
    return _end([each.instead for each in GONE if name in each.methods])


def _end(found: Sequence[str]) -> str:
    return f"; it is gone: {found[0]}" if found else ""
