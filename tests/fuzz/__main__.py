"""``python -m tests.fuzz TARGET CORPUS [options of libFuzzer]``: fuzz one target, beginning with its seeds."""

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["unified_cache"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz; libFuzzer ends the process."""
    name, corpus = sys.argv[1], Path(sys.argv[2])
    target = TARGETS[name]()
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:02}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], target.take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
