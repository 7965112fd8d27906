"""Names of settings: what each section has, how flags and variables are called, and what an unknown name may mean."""

import re
from collections.abc import Iterable, Mapping

from unified_cache.arguments import did_you_mean
from unified_cache.gone import GONE, section_instead, setting_instead
from unified_cache.settings.cache import EmbeddedSettings
from unified_cache.settings.describe import is_known, settings_of
from unified_cache.settings.programs import PlanChoices, ReplayChoices
from unified_cache.settings.section import Section
from unified_cache.settings.service import ServiceSettings
from unified_cache.settings.toml import SettingPath

__all__ = [
    "FILE_VARIABLE",
    "PREFIX",
    "SECTIONS",
    "SHORT_FLAGS",
    "flag_name",
    "is_setting_variable",
    "named_by_variable",
    "nearest_names",
    "nearest_variables",
    "section_of",
    "variable_name",
]

SECTIONS: Mapping[str, type[Section]] = {
    "cache": EmbeddedSettings,
    "serve": ServiceSettings,
    "replay": ReplayChoices,
    "plan": PlanChoices,
}
"""Sections of the file: each has the settings of one command, or of a cache that an engine embeds."""

SHORT_FLAGS: Mapping[str, str] = {
    "retention.tail_tokens": "--keep-tail",
    "retention.branches": "--keep-branches",
    "eviction.device": "--evict-device",
    "eviction.host": "--evict-host",
    "prefetching.threshold_tokens": "--prefetch-min-tokens",
    "prefetching.host_share": "--prefetch-host-share",
    "live.listen": "--live-port",
    "record.file": "--record",
}
"""Flags of settings in tables."""

PREFIX = "UNIFIED_CACHE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
NESTED = "__"

OTHERS = re.compile(
    r"UNIFIED_CACHE_(CONFIG|COMPILE|(TEST|SGLANG|VLLM)_\w+"
    # Links that Kubernetes puts into every pod where a Service is called unified-cache.
    r"|SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables with our prefix that are no settings."""


def section_of(model: type[Section]) -> str:
    """Return the name of the section that has these settings."""
    return next(name for name, each in SECTIONS.items() if each is model)


def flag_name(path: SettingPath) -> str:
    """Return the flag of a setting: ``--host-bytes``; some in tables have shorter ones."""
    return SHORT_FLAGS.get(".".join(path), f"--{'-'.join(path).replace('_', '-')}")


def variable_name(path: SettingPath, section: str | None = None) -> str:
    """Return the variable of a setting; with ``section``, the one that is for this section alone."""
    return "".join((PREFIX, f"{section}_".upper() if section else "", NESTED.join(path).upper()))


def is_setting_variable(variable: str) -> bool:
    """Tell whether a variable must name a setting."""
    return variable.startswith(PREFIX) and OTHERS.fullmatch(variable) is None


def named_by_variable(variable: str) -> tuple[str | None, SettingPath]:
    """Return the section that a variable is for, None for all, and the setting that it names, () for none."""
    path = tuple(variable.removeprefix(PREFIX).lower().split(NESTED))
    for section, model in SECTIONS.items():
        first = path[0].removeprefix(f"{section}_")
        if first != path[0] and is_known(model, (first, *path[1:])):
            return section, (first, *path[1:])
    return None, path if any(is_known(model, path) for model in SECTIONS.values()) else ()


def nearest_names(path: SettingPath) -> str:
    """Return the end of a message about a name that no section has: its successor, what is like it, or all names."""
    of_all = _names(SECTIONS.values())
    within = [f"{section}.{name}" for section, model in SECTIONS.items() for name in _names([model])]
    name = ".".join(path)
    of_one = ".".join(path[1:] if path[0] in SECTIONS else path)
    instead = section_instead(path[0]) or setting_instead(of_one) or setting_instead(name)
    if instead:
        return instead
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
    for name in (name for each in GONE for name in each.settings):
        first, *rest = name.split(".")
        sections = (first,) if first in SECTIONS else (None, *SECTIONS)
        if variable in [variable_name(tuple(rest if first in SECTIONS else (first, *rest)), each) for each in sections]:
            return setting_instead(name)
    for section in (section for each in GONE for section in each.sections):
        if variable.startswith(variable_name(("",), section)):
            return section_instead(section)
    known = [variable_name(tuple(each.split("."))) for each in _names(SECTIONS.values())]
    known += [
        variable_name(tuple(each.split(".")), name) for name, model in SECTIONS.items() for each in _names([model])
    ]
    meant = did_you_mean(variable.lower(), [each.lower() for each in known])
    return re.sub(f"{PREFIX}\\w+", lambda found: found[0].upper(), meant, flags=re.IGNORECASE)


def _names(models: Iterable[type[Section]]) -> list[str]:
    """Return the names of all settings, and of the tables that they are in."""
    names: dict[str, None] = {}
    for model in models:
        for setting in settings_of(model):
            names.update(dict.fromkeys(".".join(setting.path[:length]) for length in range(1, len(setting.path) + 1)))
    return list(names)
