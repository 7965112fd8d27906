"""Example 6: what `unified-cache demo` does, by hand: a checkpoint of yours, a document, two questions, two processes.

python examples/real_model.py CHECKPOINT DOCUMENT
python examples/real_model.py CHECKPOINT DOCUMENT     # again: its pages come from storage
"""
# ruff: noqa: T201 - an example prints to standard output

import sys
from pathlib import Path

from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.core.extras import needs_extra
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel

with needs_extra("transformers", "this example"):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PAGES = 64  # of 64 tokens, on the device and on the host


def main(checkpoint: str, document: str) -> None:
    """Ask two questions about a document; the second one computes only itself."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    kept = KeptState.of(model)
    config = CacheConfig(device_pages=(PAGES,), host_pages=(PAGES,))
    pages = kept.allocate(config.device_pages)
    with UnifiedCache.open(
        kept.layout, config, pages.pools, identity=Identity(checkpoint), storage="file:kv-store"
    ) as cache:
        engine = PrefixCachedModel(model, cache, pages)
        for question in ("What is this text about?", "Whom is it written for?"):
            tokens: list[int] = tokenizer(f"{Path(document).read_text()[:4000]}\n\n{question}\n").input_ids
            run = engine.generate(tokens, tokens_max=32, stop={tokenizer.eos_token_id})
            print(question, tokenizer.decode(list(run)))
            assert run.answer is not None
            print(
                f"{run.answer.first_token_s:.2f} s, reused: {run.answer.reused}; {run.answer.computed_tokens} computed"
            )
        cache.wait_all(timeout_s=60)  # what was computed is stored


if __name__ == "__main__":
    main(*sys.argv[1:])
