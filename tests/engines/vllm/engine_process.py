"""The process an engine runs in: reads a JSON command a line, answers with a JSON line. Runs where vLLM is installed.

{"do": "open", ...}   make the engine          {"do": "generate", "prompts": [[...]]}   tokens and logprobs
{"do": "settle"}      step until it is idle    {"do": "reset", "connector": true}       drop cached prefixes
{"do": "metrics"}     vLLM's own metrics       {"do": "close"}                          shut it down, say what is left
"""

# pyright: reportMissingImports=false
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from vllm import LLM, SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
from vllm.config import KVEventsConfig

from unified_cache.integrations.engine_store.buffers import BounceMemory

REGIONS = Path("/dev/shm")
"""Where vLLM keeps its host memory."""

EVENTS = "kv_events_config"
"""The one option that vLLM takes as no plain values."""


Generated = tuple[list[int], int, list[list[tuple[int, float]]]]
"""One completion: its tokens, how many of the prompt were not computed, and by position the logprobs of the likeliest
tokens, in the order of their ids."""


class EngineHost:
    """One engine of this process."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    @property
    def llm(self) -> LLM:
        """The engine, which is open."""
        assert self._llm is not None
        return self._llm

    def open(self, model: str, transfer: Mapping[str, object] | None, options: Mapping[str, object]) -> float:
        """Make the engine; return for how many seconds that took."""
        started_s = time.monotonic()
        events = options.get(EVENTS)
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            seed=0,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(**events) if isinstance(events, Mapping) else None,
            **{name: value for name, value in options.items() if name != EVENTS},
        )
        return time.monotonic() - started_s

    def generate(self, prompts: list[list[int]], tokens: int = 8) -> list[Generated]:
        """Complete prompts at once, greedily."""
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=5, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [
            (
                list(output.outputs[0].token_ids),
                output.num_cached_tokens,
                [
                    sorted((token, entry.logprob) for token, entry in position.items())
                    for position in output.outputs[0].logprobs
                ],
            )
            for output in outputs
        ]

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Step the engine, as it does by itself where it has a process of its own, until its connector is idle."""
        engine = self.llm.llm_engine
        until_s = time.monotonic() + timeout_s
        # A copy is submitted in the step after the one that decided on it, and told in a third.
        idle_steps = 0
        while idle_steps < 5:
            if time.monotonic() > until_s:
                return False
            engine.step()
            idle_steps = 0 if engine.engine_core.engine_core.scheduler.has_requests() else idle_steps + 1
            time.sleep(0.001)
        return True

    def reset(self, connector: bool) -> bool:
        """Drop cached prefixes on the device, and in host memory as well if ``connector``."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """Return vLLM's own metrics of offloading by name and labels."""
        # What an idle engine has counted is told with its next step.
        self.generate([[3, 4]], tokens=1)
        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            labels = ",".join(
                f"{key}={value}" for key, value in sorted(metric.labels.items()) if key not in {"engine", "model_name"}
            )
            if "value" in vars(metric) and ("unified_cache" in metric.name or "offload" in metric.name):
                values[f"{metric.name}{{{labels}}}"] = float(metric.value)
        return values

    def close(self) -> tuple[float, list[str], list[str], int]:
        """Shut the engine down; return how long that took, and what of it is left: threads, regions, bytes of ours."""
        started_s = time.monotonic()
        self.llm.llm_engine.engine_core.shutdown()
        self._llm = None
        return (
            time.monotonic() - started_s,
            [thread.name for thread in threading.enumerate() if thread.name.startswith("unified-cache")],
            [str(path) for path in REGIONS.glob("vllm_offload_*") if _is_mapped(path)],
            sum(len(each.whole) for each in gc.get_objects() if type(each) is BounceMemory),
        )


def _is_mapped(path: Path) -> bool:
    """Tell whether this process still has a file mapped: a view that was not let go of keeps it so."""
    return str(path) in Path("/proc/self/maps").read_text()


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Do what is asked until there are no more commands."""
    host = EngineHost()
    todo: Mapping[str, Callable[..., object]] = {
        "open": host.open,
        "generate": host.generate,
        "settle": host.settle,
        "reset": host.reset,
        "metrics": host.metrics,
        "close": host.close,
    }
    for line in commands:
        command = json.loads(line)
        answer = todo[command.pop("do")](**command)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What vLLM prints goes to the log with its errors.
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, own)
