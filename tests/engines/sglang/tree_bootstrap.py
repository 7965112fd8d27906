"""The engine's scheduler made importable, and a configuration of it for the CPU."""

import os
from importlib import import_module

from tests.engines.sglang import absent

__all__ = ["install"]


def install() -> None:
    """Publish a configuration; from then on modules that import the engine may be imported."""
    absent.provide(os.environ["SGLANG_WHEEL"])
    runtime = import_module("sglang.srt.runtime_context")
    runtime.get_context().override_server_args(device="cpu", attention_backend="torch_native").install()
    runtime.get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dcp_rank=0)
