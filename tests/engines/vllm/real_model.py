"""A model whose answers are words, the prompts it is asked, and the servers that it answers from."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer

from tests.engines.vllm.engine import ENVIRONMENT, connected
from tests.engines.vllm.installation import engine_python, home
from tests.engines.vllm.server import VllmServer, running_server
from tests.sources import ROOT
from unified_cache.sizing.demo.run import DEFAULT_MODEL, model_path
from unified_cache.sizing.demo.serving import load

BLOCK_TOKENS = 128
"""As vLLM has it on a CPU; a chunk of the tier is one block."""

HOST_BYTES = 1 << 30

OPTIONS = (
    "--dtype=float32",  # so that a batch of another size does not change a word
    "--max-model-len=2048",
    "--max-num-batched-tokens=1024",
    "--max-num-seqs=8",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
    "--shutdown-timeout=30",
)

DOCUMENT = (ROOT / "LICENSE").read_text()[:5000]
"""A thousand tokens: a machine whose processors others use has to compute them, too."""

QUESTIONS = (
    "What may I do with the work?",
    "Who grants the license?",
    "What must I keep?",
    "Is there a warranty?",
    "May I sell copies?",
    "What is a contribution?",
    "What ends the license?",
    "Which marks may I use?",
)


@cache
def real_model() -> Path:
    """Return the checkpoint of the model that the demo runs, its weights plain; written once."""
    written = home() / "models" / DEFAULT_MODEL
    if not written.exists():
        unfinished = written.with_suffix(f".{os.getpid()}")
        load(model_path(DEFAULT_MODEL), unfinished)
        unfinished.rename(written)
    return written


@cache
def real_prompt(reader: str, question: int = 0, length: int | None = None) -> list[int]:
    """Return tokens: a reader, a document, and a question about it, or so many of them. A reader shares no block."""
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    text = f"I am {reader}.\n\n{DOCUMENT}\n\n{QUESTIONS[question]}"
    messages = [{"role": "user", "content": text}]
    words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer(words, add_special_tokens=False).input_ids
    return tokens[:length]


def real_variables() -> dict[str, str]:
    """Return the environment of an engine of this tree's package."""
    return {
        **os.environ,
        **ENVIRONMENT,
        "KMP_BLOCKTIME": "0",  # threads of the engine that have nothing to do leave the processor to the store
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # to reset its caches
    }


@contextmanager
def serving(log: Path, url: str) -> Iterator[VllmServer]:
    """Run a server over our store."""
    transfer = connected({"on_reset": "keep", "cpu_bytes_to_use": HOST_BYTES}, url)
    command = [str(engine_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(real_model())]
    command += [*OPTIONS, "--kv-transfer-config", json.dumps(transfer)]
    with running_server(command, real_variables(), log) as each:
        yield each
