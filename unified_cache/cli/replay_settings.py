"""From the settings that users give to those of a run: a replay of plain pages, or of a model."""

from dataclasses import replace
from typing import TypeVar

from unified_cache.cli.layout import size_named
from unified_cache.config import Prefetching
from unified_cache.errors import ConfigError
from unified_cache.replay.plan import ReplayPolicies
from unified_cache.replay.settings import DEVICE_BYTES, HOST_BYTES, SCALE, STORAGE_BYTES, ModelSettings, ReplaySettings
from unified_cache.settings.loading import LoadedSettings, SettingSource
from unified_cache.settings.names import flag_name
from unified_cache.settings.programs import ReplayChoices
from unified_cache.settings.section import NONE

__all__ = ["replay_settings"]

_T = TypeVar("_T")
_Loaded = LoadedSettings[ReplayChoices]


def replay_settings(loaded: _Loaded) -> ReplaySettings | ModelSettings:
    """Return the settings of a run.

    Raises:
        ConfigError: settings that do not go together, with where each was given; or sizes that cannot be met.
        LayoutError: there is no such model.
    """
    model = loaded.settings.model
    return _plain(loaded) if model is None else _of_model(loaded, model)


def _plain(loaded: _Loaded) -> ReplaySettings:
    _refuse(loaded, "need --model", "device_bytes", "host_bytes", "scale_bytes", "retention.tail_tokens", "dtype")
    found, defaults = loaded.settings, ReplaySettings()
    return ReplaySettings(
        page_size=_given(found.page_size, defaults.page_size),
        device_pages=_of_one_pool("device_pages", found.device_pages, defaults.device_pages),
        host_pages=_of_one_pool("host_pages", found.host_pages, defaults.host_pages),
        storage=None if found.storage == NONE else found.storage,
        storage_bytes=found.storage_bytes,
        page_bytes=_given(found.page_bytes, defaults.page_bytes),
        with_bytes=found.bytes,
        policies=_policies(found),
        engines=found.engines,
    )


def _of_model(loaded: _Loaded, model: str) -> ModelSettings:
    reason = "do not go with --model, whose tiers are sized in bytes"
    _refuse(loaded, reason, "device_pages", "host_pages", "page_bytes")
    found = loaded.settings
    host_bytes = _given(found.host_bytes, HOST_BYTES)
    storage = found.storage or ("memory:" if host_bytes else NONE)
    return ModelSettings(
        name=model,
        sized=size_named(model, page_size=found.page_size, dtype=found.dtype),
        retention=found.retention,
        device_bytes=_given(found.device_bytes, DEVICE_BYTES),
        host_bytes=host_bytes,
        storage=None if storage == NONE else storage,
        storage_bytes=_given(found.storage_bytes, None if found.storage else STORAGE_BYTES),
        scale=_given(found.scale_bytes, SCALE),
        with_bytes=found.bytes,
        policies=_policies(found),
        engines=found.engines,
    )


def _policies(found: ReplayChoices) -> ReplayPolicies:
    """Return the policies of a run, which must not depend on time.

    Raises:
        ConfigError: one is in seconds, or components of a tier have different ones.
    """
    timed = Prefetching(found.prefetching.threshold_tokens, host_share=found.prefetching.host_share)
    if found.prefetching != timed:
        raise ConfigError(
            "prefetching.patience_s must be unset in a replay, whose hits must not depend on time; put it into [cache]"
        )
    return replace(ReplayPolicies.evicting(found.eviction), write=found.write, prefetching=found.prefetching)


def _of_one_pool(name: str, counts: tuple[int, ...] | None, default: int) -> int:
    if counts is None:
        return default
    if len(counts) != 1:
        raise ConfigError(f"{name} must be one number without a model, found {list(counts)}")
    return counts[0]


def _refuse(loaded: _Loaded, reason: str, *names: str) -> None:
    """Refuse settings that were given and mean nothing here; the message says where.

    Raises:
        ConfigError: there are such.
    """
    places: list[str] = []
    for name in names:
        path = tuple(name.split("."))
        origin = loaded.origin(path)
        if origin.source is SettingSource.FLAG:
            places.append(flag_name(path))
        elif origin.source is not SettingSource.DEFAULT:
            places.append(f"{name} ({origin.place})")
    if places:
        raise ConfigError(f"{', '.join(places)} {reason}")


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value
