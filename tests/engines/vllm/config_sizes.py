"""Sizes that vLLM itself reads off configurations: a program for the engine's interpreter.

    python -m tests.engines.vllm.config_sizes DIRECTORY...

Each directory has a config.json. What is printed is a JSON object by directory: layers of attention and bytes of one
token in one of them, and the bytes of each tensor of a recurrent state in one layer, in bfloat16. No weights are made.
"""

# pyright: reportMissingImports=false
import json
import math
import sys
from pathlib import Path

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

__all__: list[str] = []

ATTENTION = ("attention", "full_attention", "hybrid")
"""Kinds of layers that keep K and V."""


def sizes_of(directory: Path) -> dict[str, object]:
    """Return what the engine makes of one configuration."""
    model = ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    parallel = ParallelConfig()
    kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    spec = kind(
        block_size=1,
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=torch.bfloat16,
    )
    found: dict[str, object] = {"architecture": model.architecture, "row_bytes": spec.page_size_bytes, "state": None}
    if not model.is_hybrid:
        found["attention_layers"] = model.get_num_layers_by_block_type(parallel, "attention")
        return found
    # The engine's own count goes by names of layers that were usual before transformers 5.
    found["attention_layers"] = sum(kind in ATTENTION for kind in model.hf_text_config.layer_types)
    known, _ = ModelRegistry.resolve_model_cls(model.architectures, model)
    config = VllmConfig(model_config=model, parallel_config=parallel)
    with set_current_vllm_config(config):
        shapes = known.get_mamba_state_shape_from_config(config)
        dtypes = known.get_mamba_state_dtype_from_config(config)
    found["state"] = [[math.prod(shape), dtype.itemsize] for shape, dtype in zip(shapes, dtypes, strict=True)]
    return found


def main() -> None:
    """Print what the engine makes of the configurations in the directories named."""
    said: dict[str, object] = {}
    for name in sys.argv[1:]:
        try:
            said[name] = sizes_of(Path(name))
        except Exception as error:  # a refusal is an answer, for this configuration alone
            said[name] = {"refused": f"{type(error).__name__}: {error}"[:300]}
    sys.stdout.write("\n" + json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
