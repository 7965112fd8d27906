"""Names of settings: what each section has, how flags and variables are called, and what an unknown name may mean."""

import re
from collections.abc import Iterable, Iterator, Mapping

from unified_cache.core.errors import did_you_mean
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.describe import is_known, settings_of
from unified_cache.core.settings.section import NESTED, PREFIX, Settings
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.core.settings.toml import SettingPath

__all__ = [
    "FILE_VARIABLE",
    "SECTIONS",
    "SHORT_FLAGS",
    "flag_name",
    "is_known_variable",
    "is_setting_variable",
    "nearest_names",
    "nearest_variables",
    "section_of",
    "variable_name",
]

SECTIONS: Mapping[str, type[Settings]] = {
    "cache": EmbeddedSettings,
    "serve": ServiceSettings,
}
"""Sections of the file: the settings of a service, and of a cache that an engine embeds."""

SHORT_FLAGS: Mapping[str, str] = {
    "retention.tail_tokens": "--keep-tail",
    "retention.branches": "--keep-branches",
    "eviction.device": "--evict-device",
    "eviction.host": "--evict-host",
    "prefetching.threshold_tokens": "--prefetch-min-tokens",
    "prefetching.host_share": "--prefetch-host-share",
}
"""Flags of settings in tables."""

FILE_VARIABLE = f"{PREFIX}CONFIG"

OTHERS = re.compile(
    r"UNIFIED_CACHE_(CONFIG|(TEST|SGLANG|VLLM)_\w+"
    # Links that Kubernetes puts into every pod where a Service is called unified-cache.
    r"|SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables with our prefix that are no settings."""


def section_of(model: type[Settings]) -> str:
    """Return the name of the section that has these settings."""
    return next(name for name, each in SECTIONS.items() if each is model)


def flag_name(path: SettingPath) -> str:
    """Return the flag of a setting: ``--host-bytes``; some in tables have shorter ones."""
    return SHORT_FLAGS.get(".".join(path), f"--{'-'.join(path).replace('_', '-')}")


def variable_name(path: SettingPath, section: str | None = None) -> str:
    """Return the variable of a setting; with ``section``, the one that is for this section alone."""
    return "".join((PREFIX, f"{section}_".upper() if section else "", NESTED.join(path).upper()))


def is_setting_variable(variable: str) -> bool:
    """Return whether a variable must name a setting."""
    return variable.startswith(PREFIX) and OTHERS.fullmatch(variable) is None


def is_known_variable(variable: str) -> bool:
    """Return whether a variable names a setting of any section."""
    return any(
        is_known(model, path)
        for section, path in _readings(variable)
        for model in (SECTIONS.values() if section is None else [SECTIONS[section]])
    )


def _readings(variable: str) -> Iterator[tuple[str | None, SettingPath]]:
    """Yield the sections that a variable may be for, None for all, and the setting that it then names."""
    first, *rest = variable.removeprefix(PREFIX).lower().split(NESTED)
    yield None, (first, *rest)
    for section in SECTIONS:
        if first.startswith(f"{section}_"):
            yield section, (first.removeprefix(f"{section}_"), *rest)


def nearest_names(path: SettingPath) -> str:
    """Return the end of a message about a name that no section has: what is like it, or all names."""
    of_all = _names(SECTIONS.values())
    within = [f"{section}.{name}" for section, model in SECTIONS.items() for name in _names([model])]
    name = ".".join(path)
    if path[0] in SECTIONS:
        known = [each for each in within if each.startswith(f"{path[0]}.")]
    else:
        known = [*SECTIONS, *(within if did_you_mean(path[0], SECTIONS) else of_all)]
    return (
        did_you_mean(name, known)
        or did_you_mean(name, within)
        or "; unified-cache config init prints all settings there are"
    )


def nearest_variables(variable: str) -> str:
    """Return the end of a message about a variable that names no setting."""
    of_all: list[tuple[str | None, str]] = [(None, each) for each in _names(SECTIONS.values())]
    of_one = [(section, each) for section, model in SECTIONS.items() for each in _names([model])]
    return did_you_mean(variable, [variable_name(tuple(each.split(".")), section) for section, each in of_all + of_one])


def _names(models: Iterable[type[Settings]]) -> list[str]:
    """Return the names of all settings, and of the tables that they are in."""
    paths = [setting.path for model in models for setting in settings_of(model)]
    return list(dict.fromkeys(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)))
