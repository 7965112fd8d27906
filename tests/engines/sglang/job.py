"""One run of the engine in a process of its own: a description as JSON comes in, what happened as JSON goes out.

    python -m tests.engines.sglang.job '{"stack": "full", "stores": [{"url": "packed:/dev/shm/x"}]}'

It runs in the engine's environment, with the repository on its path.
"""

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from importlib import import_module

from tests.engines.sglang import absent
from tests.engines.sglang.outcome import EngineJob

__all__: list[str] = []


def main() -> None:
    """Run the job named by the first argument."""
    warnings.filterwarnings("ignore")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
    absent.provide(os.environ["SGLANG_WHEEL"])
    # Only now can anything be imported that imports the engine.
    run_job = vars(import_module("tests.engines.sglang.running"))["run_job"]
    said = [
        asdict(outcome) | {"is_whole": outcome.is_whole} for outcome in run_job(EngineJob(**json.loads(sys.argv[1])))
    ]
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    # SGLang's threads are daemons that wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
