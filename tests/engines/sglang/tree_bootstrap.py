"""SGLang made importable on a machine without GPU: packages that are not installed become inert modules.

Only third-party packages are replaced, never a module of the engine; ``INERT`` says which were asked for.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["INERT", "install"]

_NAMES = """
transformers triton sgl_kernel flashinfer deep_gemm deep_ep xgrammar outlines llguidance compressed_tensors
torchvision torchaudio tokenizers sentencepiece tvm_ffi quack cutlass cuda tilelang torch_memory_saver
huggingface_hub datasets modelscope soundfile scipy gguf IPython openai openai_harmony anthropic tiktoken
decord av timm mistral_common blobfile uvloop kernels hf_transfer pynvml cloudpickle flash_attn flash_mla
nvidia watchfiles zstandard easydict yaml distro torchcodec mooncake boto3 setuptools_rust lark aiter
safetensors diskcache smg_grpc_servicer pandas pyarrow nvshmem apache_tvm_ffi sgl_kernel_npu torch_npu
torch_musa mori humming vllm llama_models
"""

PACKAGES = frozenset(_NAMES.split())
"""Third-party packages that the engine imports somewhere and that a scheduler without a model does not use."""

INERT: list[str] = []
"""Modules that were imported in place of packages that are not there."""


class InertType(type):
    """Type of anything taken from an inert module: subclassed, called, subscripted and united without effect."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, object], **_: object) -> "InertType":
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, object], **_: object) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> "InertType":
        if name.startswith("__"):
            raise AttributeError(name)
        return inert(name)

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __contains__(cls, _: object) -> bool:
        return False

    def __setitem__(cls, _: object, __: object) -> None:
        pass

    def __getitem__(cls, _: object) -> "InertType":
        return cls

    def __or__(cls, _: object) -> "InertType":
        return cls

    __ror__ = __or__


def inert(name: str) -> InertType:
    """Make a class without effect; called on one function it is a decorator that returns it."""

    def new(cls: Any, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else object.__new__(cls)

    body: dict[str, object] = {
        "__new__": new,
        "__init__": lambda *_, **__: None,
        "__init_subclass__": classmethod(lambda *_, **__: None),
        "__call__": lambda *args, **_: args[-1],
        "__get_pydantic_core_schema__": classmethod(lambda *_: {"type": "any"}),
        "__getattr__": lambda _, name: getattr(InertType(name, (), {}), name),
    }
    return InertType(name, (), body)


class InertModule(types.ModuleType):
    """Module whose every attribute is an inert class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in {"jit", "autotune", "heuristics"}:
            return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda function: function)
        value = inert(name)
        setattr(self, name, value)
        return value


class InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of last resort for the packages named above."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top not in PACKAGES or (rest and not isinstance(sys.modules.get(top), InertModule)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        INERT.append(spec.name)
        return InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(wheel: str, **server: object) -> None:
    """Make the unpacked wheel at ``wheel`` importable and publish a configuration for the CPU."""
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    sys.path.insert(0, wheel)
    sys.meta_path.append(InertFinder())
    torch.set_num_threads(1)
    vars(torch)["compile"] = lambda *args, **_: args[0] if args and callable(args[0]) else (lambda function: function)
    # The package's own __init__ patches transformers and exports the user's API; the scheduler needs neither.
    package = types.ModuleType("sglang")
    package.__path__ = [f"{wheel}/sglang"]
    vars(package)["__version__"] = "0.5.23"
    sys.modules.setdefault("sglang", package)
    runtime = importlib.import_module("sglang.srt.runtime_context")
    runtime.get_context().override_server_args(device="cpu", **server).install()
    runtime.get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dcp_rank=0)
