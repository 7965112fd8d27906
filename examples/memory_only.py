"""Example 1: one engine, device memory alone. A second turn computes only its new tokens.

python examples/memory_only.py
"""
# ruff: noqa: T201 - an example prints to standard output

from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel
from unified_cache.testing.tiny_models import tiny_model


def main() -> None:
    """Ask twice; the second prompt begins with the first one and its answer."""
    model = tiny_model("tiny-llama")  # any stock model: AutoModelForCausalLM.from_pretrained(...)
    config = CacheConfig(device_pages=(64,), host_pages=(0,))
    pages = KeptState.of(model, page_size=32).allocate(config.device_pages)
    with UnifiedCache.open(pages.layout, config, pages.pools, identity=Identity("tiny-llama")) as cache:
        engine = PrefixCachedModel(model, cache, pages)
        spoken = list(b"You are the clerk of a small library of machines. Answer in one line. Who are you?")
        for question in (b"", b" And who was here before you?"):
            spoken += question
            run = engine.generate(spoken, tokens_max=16)
            spoken += list(run)  # tokens come one by one, as they are generated
            assert run.answer is not None
            print(f"{run.answer.reused.device} tokens reused, {run.answer.computed_tokens} computed")


if __name__ == "__main__":
    main()
