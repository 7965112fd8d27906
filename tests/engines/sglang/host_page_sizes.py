"""Bytes of SGLang's host pages for a model's configuration, read and laid out by SGLang itself, as a store gets them.

SGLang reads a ``config.json``, chooses and makes its device pools for a few pages, and its host pools beside them.
Nothing is computed, so no weights are made. Imported once the engine can be, with transformers as it is.
"""

from types import SimpleNamespace

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_deepseek_v4
from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator, _PoolSizes
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
from sglang.srt.model_executor.model_runner_components.load_model_utils import resolve_sliding_window_size
from sglang.srt.runtime_context import get_context, get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.engines.sglang.stacks import Parts, build_tree, tree_params
from unified_cache.integrations.sglang.host_pools import rows_of_pool

PAGES = 2
"""Of every device pool; what a page takes does not depend on it."""

REQUESTS = 2
RING_ROWS = 8
"""Rows of DeepSeek-V4's compressor state for each page of its window, without speculative decoding."""


def host_page_bytes(directory: str, page_tokens: int) -> dict[str, int]:
    """Return the bytes of one host page by the names of SGLang's pools, K and V in bfloat16."""
    get_context().override("a configuration", page_size=page_tokens, max_mamba_cache_size=REQUESTS)
    model = ModelConfig(directory, dtype="bfloat16")
    window_tokens = resolve_sliding_window_size(None, model)
    tree = build_tree(tree_params(_parts(model, page_tokens), "python", page_tokens, window_tokens))
    pools = {str(entry.name): rows_of_pool(entry.host_pool) for entry in tree.host_pool_group.entries}
    return {name: 0 if rows is None else sum(rows.buffers_bytes) for name, rows in pools.items()}


def _parts(model: ModelConfig, page_tokens: int) -> Parts:
    """Make the device pools that SGLang's configurator chooses, and name the tree's components as its builder does."""
    tokens = PAGES * page_tokens
    is_v4 = is_deepseek_v4(model.hf_config)
    windowed_tokens = tokens if model.is_hybrid_swa else None
    sizes = _PoolSizes(
        max_total_num_tokens=tokens,
        max_running_requests=REQUESTS,
        full_max_total_num_tokens=windowed_tokens,
        swa_max_total_num_tokens=windowed_tokens,
        c4_max_total_num_tokens=tokens // 4,
        c128_max_total_num_tokens=tokens // 128,
        c4_state_pool_size=PAGES * RING_ROWS,
        c128_state_pool_size=(REQUESTS + 1) * 128,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
    )
    configurator = KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=model,
        server_args=get_server_args(),
        kv_cache_dtype=torch.float8_e4m3fn if is_v4 else torch.bfloat16,
        model_dtype=torch.bfloat16,
        page_size=page_tokens,
        sliding_window_size=resolve_sliding_window_size(None, model),
        spec_algorithm=SpeculativeAlgorithm.from_string(None),
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SimpleNamespace(draft_model_config=None, dflash_draft_num_layers=None),
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=model.is_hybrid_swa_compress,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=None, model_config=model, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )
    made = configurator._init_pools(sizes=sizes, req_to_token_pool=None, token_to_kv_pool_allocator=None)
    components = [ComponentType.FULL]
    components += [ComponentType.SWA] if model.is_hybrid_swa else []
    components += [ComponentType.MAMBA] if uses_ssm_state(model) else []
    requests = made.req_to_token_pool if uses_ssm_state(model) else None
    return Parts(made.token_to_kv_pool, made.token_to_kv_pool_allocator, tuple(components), requests)
