"""Policies of a replay: what is evicted first, when pages are copied down, what is worth a prefetch."""

from dataclasses import dataclass, field

from unified_cache.config import EvictionConfig, EvictionPolicy, Prefetching, WritePolicy
from unified_cache.errors import ConfigError

__all__ = ["ReplayPolicies"]


@dataclass(frozen=True, slots=True)
class ReplayPolicies:
    """Policies of the caches of a replay. A patience in seconds is none of them: a run must not depend on time."""

    device: EvictionPolicy = EvictionPolicy.LRU
    """Order of eviction on the device, of every component."""
    host: EvictionPolicy = EvictionPolicy.LRU
    """Order of eviction in host memory, of every component."""
    write: WritePolicy = WritePolicy.ON_CALL
    """Time of the backup; on call, the engine of a replay backs up every prompt that it has served."""
    prefetching: Prefetching = field(default_factory=Prefetching)
    """Bounds on prefetches."""

    @classmethod
    def evicting(cls, eviction: EvictionConfig) -> "ReplayPolicies":
        """Take the policies of a cache's configuration; those of a replay are the same for all components of a tier.

        Raises:
            ConfigError: components of a tier have different policies.
        """
        return cls(_one_policy("device", eviction.device), _one_policy("host", eviction.host))

    def check(self, *, has_host: bool) -> None:
        """Refuse a write policy where there is nothing to write to.

        Raises:
            ConfigError: there is no host tier.
        """
        if self.write is not WritePolicy.ON_CALL and not has_host:
            raise ConfigError(f"the write policy {self.write.value} needs host memory, found none")

    def eviction(self, components_count: int) -> EvictionConfig:
        """Return the same policies, component by component."""
        return EvictionConfig(device=(self.device,) * components_count, host=(self.host,) * components_count)

    def as_json(self) -> dict[str, object]:
        """Return them as values that JSON has."""
        return {
            "evict_device": self.device.value,
            "evict_host": self.host.value,
            "write": self.write.value,
            "prefetch_min_tokens": self.prefetching.threshold_tokens,
            "prefetch_host_share": self.prefetching.host_share,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return those that are not the usual ones, in words."""
        usual = ReplayPolicies().as_json()
        return [(name.replace("_", " "), str(value)) for name, value in self.as_json().items() if value != usual[name]]


def _one_policy(tier: str, policies: tuple[EvictionPolicy, ...]) -> EvictionPolicy:
    if len(set(policies)) > 1:
        found = ", ".join(each.value for each in policies)
        raise ConfigError(f"eviction.{tier} must be one policy for all components of a replay, found {found}")
    return policies[0] if policies else EvictionPolicy.LRU
