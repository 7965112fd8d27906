"""API reference as HTML, from the docstrings: every module that gives the package a public name, and those beside them.

python scripts/api_reference.py build/api
"""

import sys
from importlib import import_module
from importlib.metadata import version as version_of
from inspect import getmodule
from pathlib import Path

import pdoc

import unified_cache

BESIDE = (
    "unified_cache.core.errors",
    "unified_cache.integrations.engine_store",
    "unified_cache.observe.events",
    "unified_cache.integrations.transformers",
    "unified_cache.observe.metrics",
    "unified_cache.forward",
    "unified_cache.storage_backends.wrappers.guard",
    "unified_cache.testing.storage_contract",
)
"""Modules that programs import from by their own names."""


def modules() -> list[str]:
    """Return the modules to describe, each once, in order; those of base classes, too, since calls are inherited."""
    public = [getattr(unified_cache, name) for name in unified_cache.__all__]
    described = [base for value in public for base in (value.__mro__ if isinstance(value, type) else (value,))]
    homes = {module.__name__ for module in map(getmodule, described) if module is not None}
    return sorted({home for home in homes if home.split(".")[0] == "unified_cache"}.union(BESIDE))


def main(directory: Path) -> None:
    """Write the pages into ``directory``."""
    names = modules()
    for name in names:
        import_module(name)  # a module that is gone is an error here, and a warning in pdoc
    version = version_of("unified-cache")
    pdoc.render.configure(docformat="google", footer_text=f"unified-cache {version}", show_source=False)
    pdoc.pdoc(*names, output_directory=directory)
    sys.stdout.write(f"{directory / 'index.html'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/api"))
