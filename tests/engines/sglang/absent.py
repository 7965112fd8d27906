"""Empty names for packages that SGLang imports and that this machine lacks: kernels, tokenizers, other engines.

Nothing of SGLang itself is replaced. A name of such a package can be imported, subclassed, called and used as a
decorator, and does nothing; the code that is run here uses none of it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, MutableSequence, Sequence
from pathlib import Path
from types import ModuleType

import torch
from pydantic_core import core_schema

ABSENT = frozenset(Path(__file__).with_name("absent.txt").read_text(encoding="utf-8").split())
"""Packages that may be missing. One that is installed is used as it is."""


class _EmptyMeta(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __or__(cls, other: object) -> type:  # type: ignore[override]  # any annotation will do
        return cls

    def __ror__(cls, other: object) -> type:  # type: ignore[override]  # any annotation will do
        return cls

    def __getitem__(cls, key: object) -> type:
        return cls

    def __setitem__(cls, key: object, value: object) -> None: ...

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return True

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __contains__(cls, item: object) -> bool:
        return False


class _Empty(metaclass=_EmptyMeta):
    """A name that does nothing; called with a function alone it returns that, as a decorator would."""

    def __new__(cls, *args: object, **options: object) -> object:  # type: ignore[misc]  # a decorator's result
        if len(args) == 1 and not options and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    def __init__(self, *args: object, **options: object) -> None: ...

    def __init_subclass__(cls, **options: object) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> core_schema.AnySchema:
        return core_schema.any_schema()

    def __call__(self, *args: object, **options: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)


def _empty(name: str) -> type:
    return _EmptyMeta(name, (_Empty,), {"__module__": __name__})


class _EmptyModule(ModuleType):
    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: MutableSequence[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _empty(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        loaded = sys.modules.get(package)
        if package not in ABSENT or (loaded is not None and not isinstance(loaded, _EmptyModule)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _uncompiled(function: object = None, **options: object) -> object:
    return _uncompiled if function is None else function


def provide(wheel: str) -> None:
    """Make the unpacked wheel importable, with empty names for what is missing. Once, before anything of SGLang."""
    sys.path.insert(0, wheel)
    # Compiling needs triton; nothing of what runs here is compiled, but some of it is wrapped while it is imported.
    torch.compile = _uncompiled  # type: ignore[assignment]  # as much of it as is used
    # The package's own __init__ patches tokenizers and starts servers; its modules do not need it.
    package = ModuleType("sglang")
    package.__path__ = [f"{wheel}/sglang"]
    sys.modules["sglang"] = package
    sys.meta_path.append(_Finder())
