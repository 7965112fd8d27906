"""Keep the engine's calls for tests without it: growing conversations with prefix keys, and two prompts.

python -m tests.engines.sglang.record
"""

from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import ROOT, STACKS, EngineRunner

RECORDINGS = ROOT / "tests" / "unit" / "integrations" / "sglang_recordings"


def main() -> None:
    """Record every stack."""
    with EngineRunner.running(["file"]) as runner:
        for stack in STACKS:
            for name, grows in (("prompts", False), ("conversation", True)):
                stores = [runner.fresh("file") | {"hicache_storage_pass_prefix_keys": grows}]
                record = str(RECORDINGS / f"{stack}_{name}.json")
                sizes = EngineJob(stack, stores=stores, grows=grows, pages=5, window_pages=2, layers=2, record=record)
                runner.run(sizes)


if __name__ == "__main__":
    main()
