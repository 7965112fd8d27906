"""Example 8: vLLM over a store reads a document once, and not again after a restart.

python examples/vllm_restart.py CHECKPOINT DOCUMENT
python examples/vllm_restart.py CHECKPOINT DOCUMENT     # again: its KV comes from the store
"""
# ruff: noqa: T201 - an example prints to standard output

import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

CONNECTOR = {
    "kv_connector": "UnifiedCacheConnector",
    "kv_connector_module_path": "unified_cache.integrations.vllm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"url": "file:kv-store", "cpu_bytes_to_use": 1 << 30},
}


def main(checkpoint: str, document: str) -> None:
    """Ask two questions about a document; only the first of all reads it."""
    llm = LLM(checkpoint, kv_transfer_config=CONNECTOR, shutdown_timeout=30)
    for question in ("What is this text about?", "Whom is it written for?"):
        started_s = time.perf_counter()
        prompt = f"{Path(document).read_text()}\n\n{question}\n"
        (answer,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        tokens, cached = len(answer.prompt_token_ids), answer.num_cached_tokens
        print(f"{question} {answer.outputs[0].text!r}")
        print(f"{time.perf_counter() - started_s:.2f} s, {cached} of {tokens} tokens not computed", flush=True)
    llm.llm_engine.engine_core.shutdown(timeout=30)  # what was computed is stored


if __name__ == "__main__":
    main(*sys.argv[1:])
