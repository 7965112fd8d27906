"""An engine in a process of its own, as the checks see it."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.engines.vllm.installation import engine_python
from tests.engines.vllm.models import MODELS, TOKENS
from tests.sources import ROOT

ANSWER_S = 300.0
"""Longest wait for an answer; reached only where something hangs."""

HOST_BYTES = 64 << 20

CPU_SPEC = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.cpu"}
"""Of the connector's configuration: where there is a GPU, vLLM's own TieringOffloadingSpec."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),  # 1 where others have the processors
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

PREFIX = "vllm:unified_cache"


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One completion, comparable bit by bit."""

    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[tuple[tuple[int, float], ...], ...]

    def difference(self, other: "EngineAnswer") -> float:
        """Return the largest difference of two logprobs, infinite where the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        apart = 0.0
        for ours, theirs in pairs:
            found = dict(theirs)
            apart = max([apart, *(abs(value - found.get(token, float("inf"))) for token, value in ours)])
        return apart


@dataclass(frozen=True, slots=True)
class EngineLeftovers:
    """Leftovers of an engine after its shut-down, and how long that took."""

    seconds: float
    threads: tuple[str, ...]
    regions: tuple[str, ...]
    """Files of vLLM's host memory that are still mapped."""
    slab_bytes: int
    """Bounce buffers of ours that were not released."""


class EngineGroup:
    """A process group with an engine in it, and its log."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self.log = log

    def kill(self) -> None:
        """End all of its processes at once, as a power cut does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(ANSWER_S)

    def tail(self) -> str:
        """Return the end of what the engine printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def regions(self) -> list[Path]:
        """Return the files of vLLM's host memory that its log names and that are there: a killed one leaves its."""
        made = re.findall(r"Created mmap file (\S+)", self.log.read_text(errors="replace"))
        return [Path(path) for path in made if Path(path).exists()]


@contextmanager
def running_group(
    command: Sequence[str], variables: Mapping[str, str], log: Path, *, is_asked: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a group of its own until the block ends; what it prints goes to the log.

    One that ``is_asked`` reads commands, and prints answers and nothing else.
    """
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_asked else output,
            stderr=output,
            text=True,
            env=variables,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
    ):
        group = EngineGroup(process, log)
        try:
            yield process
        finally:
            if process.poll() is None:
                group.kill()
            for region in group.regions():
                region.unlink()


class VllmEngine(EngineGroup):
    """A process with one engine in it."""

    def ask(self, do: str, **values: object) -> object:
        """Have the process do something and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        timer = threading.Timer(ANSWER_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise AssertionError(f"the engine ended at {do}:\n{self.tail()}")
        answer: object = json.loads(line)
        return answer

    def generate(self, *prompts: Sequence[int], tokens: int = 8) -> list[EngineAnswer]:
        """Complete prompts at once."""
        answers = self.ask("generate", prompts=[list(prompt) for prompt in prompts], tokens=tokens)
        assert isinstance(answers, list)
        return [
            EngineAnswer(tuple(tokens), cached, tuple(tuple(map(tuple, position)) for position in logprobs))
            for tokens, cached, logprobs in answers
        ]

    def completion(self, prompt: Sequence[int]) -> EngineAnswer:
        """Complete one prompt."""
        (only,) = self.generate(prompt)
        return only

    def settle(self) -> None:
        """Have everything that was computed stored."""
        assert self.ask("settle"), self.tail()

    def reset(self, *, connector: bool = True) -> None:
        """Drop what the device caches, and what host memory does."""
        assert self.ask("reset", connector=connector), self.tail()

    def counted(self, name: str, **labels: str) -> float:
        """Return one of our metrics, as vLLM reports it; 0 if it never came."""
        values = self.ask("metrics")
        assert isinstance(values, dict)
        text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return float(values.get(f"{PREFIX}_{name}{{{text}}}", 0.0))

    def loaded(self) -> float:
        """Return how many chunks the store has served, verified."""
        return self.counted("load_chunks", answer="hit")

    def close(self) -> EngineLeftovers:
        """Shut the engine down."""
        answer = self.ask("close")
        assert isinstance(answer, list)
        seconds, threads, regions, slab_bytes = answer
        return EngineLeftovers(seconds, tuple(threads), tuple(regions), slab_bytes)


def connected(settings: Mapping[str, object], url: str) -> Mapping[str, object]:
    """Configure vLLM with our connector over a store."""
    return {
        "kv_connector": "UnifiedCacheConnector",
        "kv_connector_module_path": "unified_cache.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": url, "cpu_bytes_to_use": HOST_BYTES, **CPU_SPEC, **settings},
    }


def tiered(tiers: Sequence[Mapping[str, object]], host_bytes: int = HOST_BYTES) -> Mapping[str, object] | None:
    """Configure vLLM with its own connector over secondary tiers; None if there are none."""
    if not tiers:
        return None
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **CPU_SPEC,
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": list(tiers),
        },
    }


@contextmanager
def running_engine(
    model: Path,
    name: str,
    url: str | None,
    log: Path,
    *,
    settings: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    tiers: Sequence[Mapping[str, object]] = (),
) -> Iterator[VllmEngine]:
    """Run an engine; ``url`` is its store, None for vLLM alone; ``settings`` are the tier's, ``options`` vLLM's.

    With ``tiers`` it has these secondary tiers, without our connector.
    """
    family = MODELS[name]
    transfer = connected({**family.settings, **(settings or {})}, url) if url is not None else tiered(tiers)
    modules = (*family.runner, "tests.engines.vllm.engine_process")
    variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with running_group([str(engine_python()), "-m", *modules], variables, log, is_asked=True) as process:
        engine = VllmEngine(process, log)
        engine.ask(
            "open",
            model=str(model),
            transfer=transfer,
            options={
                "dtype": family.dtype,
                "max_model_len": 1024,
                "block_size": family.block_size,
                **family.options,
                **(options or {}),
            },
        )
        yield engine


def prompt_of(length: int, seed: int) -> list[int]:
    """Draw a prompt."""
    rng = Random(seed)
    return [rng.randrange(3, TOKENS - 4) for _ in range(length)]
