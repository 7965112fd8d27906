"""Settings that are allowed each by itself, and together are hardly meant: one warning for each, with what to do."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from unified_cache.core.config import WritePolicy
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.loading import LoadedSettings, SettingSource
from unified_cache.core.settings.section import Settings
from unified_cache.core.settings.service import ServiceSettings

__all__ = ["warnings_about"]


def warnings_about(loaded: LoadedSettings[Settings]) -> Iterator[str]:
    """Yield a sentence for each contradiction between settings of one section."""
    settings = loaded.settings
    match settings:
        case EmbeddedSettings():
            yield from _of_cache(settings, loaded)
        case ServiceSettings():
            yield from _of_service(settings)


def _of_cache(settings: EmbeddedSettings, loaded: LoadedSettings[Settings]) -> Iterator[str]:
    has_host = bool(settings.host_bytes or any(settings.host_pages or ()))
    if settings.device_bytes is None and settings.device_pages is None and _is_embedded(loaded):
        yield "neither device_bytes nor device_pages is set: a cache that an engine embeds needs one of them"
    if settings.device_bytes is not None and settings.device_pages is not None:
        yield "device_bytes and device_pages are both set, and contradict each other: take one out"
    if settings.host_bytes and settings.host_pages is not None:
        yield "host_bytes and host_pages are both set, and contradict each other: take one out"
    if settings.store is not None and not has_host:
        yield "storage is reached through host memory, and host_bytes is 0: nothing will be stored; set host_bytes"
    if settings.device_bytes and 0 < settings.host_bytes < settings.device_bytes:
        yield "host_bytes is less than device_bytes: host memory can hold no more than the device has already"
    if settings.storage_bytes is not None and has_host and settings.storage_bytes < settings.host_bytes:
        yield "storage_bytes is less than host_bytes: the store can hold no more than host memory has already"
    if settings.storage_bytes is not None and settings.store is None:
        yield "storage_bytes caps a store, and storage is unset"
    if settings.dirty_share != EmbeddedSettings().dirty_share and settings.write is not WritePolicy.BACK:
        yield f'dirty_share has an effect with write = "back" alone, found "{settings.write.value}"'
    if settings.guard.deadline_s > settings.operation_timeout_s:
        yield "guard.deadline_s is more than operation_timeout_s: transfers end before their calls are late"


def _of_service(settings: ServiceSettings) -> Iterator[str]:
    tls = settings.tls
    files = {"access.tokens": settings.access.tokens, "metrics.client_ca": settings.metrics.client_ca}
    if tls is not None:
        files |= {"tls.certificate": tls.certificate, "tls.key": tls.key}
        files |= {"tls.client_ca": tls.client_ca, "tls.client_crl": tls.client_crl}
    for name, file in files.items():
        if file is not None and not file.exists():
            yield f"{name} names {file}, which is not there"
    if settings.storage_bytes is None and urlsplit(settings.storage).scheme in ("file", "packed"):
        yield "storage_bytes is unset: the store grows until 64 MiB of its file system are left"
    if settings.insecure and settings.address.is_local:
        yield "insecure changes nothing: no other machine can reach the service"
    if settings.guard.deadline_s > settings.limits.call_s_max:
        yield "guard.deadline_s is more than limits.call_s_max: calls end before the store is late"
    if settings.access.tokens is None and settings.tls is None and settings.quota.tenants:
        yield "quota.tenants names tenants, and every caller is local_tenant: set access.tokens or tls.client_ca"
    if settings.limits.batch_bytes > settings.quota.bytes_in_flight_max:
        yield "limits.batch_bytes is more than quota.bytes_in_flight_max: no tenant may have one batch in flight"


def _is_embedded(loaded: LoadedSettings[Settings]) -> bool:
    """Return whether a file has a setting that only an embedded cache has."""
    names = ("operations_max", "storage_workers", "dirty_share")
    return any(loaded.origin((name,)).source is not SettingSource.DEFAULT for name in names)
