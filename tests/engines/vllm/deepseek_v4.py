"""DeepSeek-V4 on a CPU without AMX: ``python -m tests.engines.vllm.deepseek_v4 MODULE`` runs a module's engine so.

vLLM 0.32 computes this model on CPUs with kernels made for AMX. Those of attention, of its caches and of experts run
with AVX-512 as well, and five things around them do not. Each is made up for here, or by the model's configuration in
``models``, and changes only what such a CPU lacks: which groups and blocks the KV cache has, what they hold, and how
they are found, copied and offloaded is vLLM's own.

1. Products with FP8 weights have a kernel for AMX only. So the checkpoint names no quantization, and its weights are
   bfloat16. The KV cache has the model's own format all the same, fp8_ds_mla.
2. A few kernels that prepare metadata of attention are in Triton, which has no backend for CPUs: vLLM turns Triton off,
   and the model stops at the first of them. Triton's interpreter runs them on tensors in host memory, so it is named to
   vLLM as the backend (``offer_interpreter``). torch cannot trace it, so nothing is compiled; and the model runner that
   vLLM takes where it finds Triton is one for GPUs, so the other is asked for.
3. On a CPU the builder of windows' metadata returns the plans of three kinds of layers, and the class that it derives
   from reads five: ``KeyError: 'c1a'``. There are plans on GPUs only: the two missing ones are None as the three are
   (``complete_plans``).
4. The kernel that routes tokens by their ids takes 256 experts and no other number. So the model has 256, small ones.
5. Where there is no AMX, vLLM takes this model for one without kernels, and turns prefix caching and chunked prefill
   off. Both stay as the user said (``keep_prefix_caching``).

Weights are drawn by a loader that vLLM is told of in its own way (``drawn_weights``): transformers writes no checkpoint
of this model that vLLM reads, and vLLM's own dummy weights are so small that an answer hardly depends on the KV cache.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}

DRAWN = "drawn"
"""Load format of weights that are drawn from the seed in ``model_loader_extra_config``."""

LAYERS_WITHOUT_PLAN = ("c1a", "c2a")


class InterpreterDriver:
    """As much of a driver of Triton as vLLM asks a backend for."""

    @staticmethod
    def is_active() -> bool:
        return True


def offer_interpreter() -> None:
    """Name Triton's interpreter as its backend for CPUs, before vLLM looks for one."""
    os.environ.update(ENVIRONMENT)
    triton = importlib.import_module("triton.backends")
    triton.backends.setdefault("cpu", triton.Backend(compiler=None, driver=InterpreterDriver))


def complete_plans() -> None:
    """Have the builder for CPUs return an absent plan for the layers that it forgets."""
    builder = importlib.import_module("vllm.models.deepseek_v4.cpu.cpu_mla").DeepseekV4CPUSparseSWAMetadataBuilder
    planned: Callable[[object, int], dict[str, None]] = builder.build_tile_scheduler

    def build_tile_scheduler(self: object, num_decode_tokens: int) -> dict[str, None]:
        return {**dict.fromkeys(LAYERS_WITHOUT_PLAN), **planned(self, num_decode_tokens)}

    builder.build_tile_scheduler = build_tile_scheduler


def keep_prefix_caching() -> None:
    """Have the platform leave prefix caching and chunked prefill as the user said."""
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    checked = platform.check_and_update_config

    def check_and_update_config(_platform: type, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        said = cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        checked(vllm_config)
        cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = said

    platform.check_and_update_config = classmethod(check_and_update_config)


if __name__ == "__main__":
    offer_interpreter()
    complete_plans()
    keep_prefix_caching()
    importlib.import_module("tests.engines.vllm.drawn_weights")
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
