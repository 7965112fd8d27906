"""``python -m tests.fuzz TARGET CORPUS [options of libFuzzer]``: fuzz one target, beginning with its seeds."""

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["unified_cache"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz; libFuzzer ends the process."""
    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"{__doc__}\nTARGET is one of {', '.join(TARGETS)}; found {sys.argv[1:]}")
    name, corpus = sys.argv[1], Path(sys.argv[2])
    target = TARGETS[name]()
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:02}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], target.take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
