"""Example 3: two engine processes and one store. The second engine restores what the first has computed.

python examples/two_engines.py
python examples/two_engines.py --storage file:/tmp/kv
"""
# ruff: noqa: T201 - an example prints to standard output

import argparse
from multiprocessing import get_context
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory

from unified_cache.demo.opening import TierSizes, load_model, opened
from unified_cache.demo.request import DemoRequest
from unified_cache.integrations.transformers import Reused

MODEL = "tiny-gemma3"
SYSTEM = b"You are the clerk of a small library of machines. Answer in one line. " * 3
QUESTIONS = (b"Where is the map of the harbour?", b"Who has drawn the map of the harbour?")
WAIT_S = 120.0

Said = tuple[list[int], Reused, int]
"""An answer, what was reused of its prompt, and how many tokens were computed."""


def engine_process(storage: str, line: Connection) -> None:
    """Serve a continuous-batching engine: all prompts of a message at once, until an empty message comes."""
    with opened(MODEL, load_model(MODEL), TierSizes(device_pages=64, host_pages=256), storage) as engine:
        while prompts := line.recv():
            requests = [DemoRequest(prompt, tokens_max=16) for prompt in prompts]
            for request in requests:
                engine.submit(request)
            engine.run()
            engine.cache.wait_all(timeout_s=WAIT_S)  # what was inserted is in the store now
            said: list[Said] = [(each.generated, each.reused, each.computed_tokens) for each in requests]
            line.send(said)


def ask(name: str, line: Connection, prompts: list[list[int]]) -> list[Said]:
    """Have one engine answer prompts; say what it took."""
    line.send(prompts)
    assert line.poll(WAIT_S), f"{name} does not answer"
    answers: list[Said] = line.recv()
    for _, reused, computed_tokens in answers:
        print(f"{name}: {reused.storage_tokens} tokens from storage, {computed_tokens} computed")
    return answers


def main(storage: str) -> None:
    """Let one engine answer; then the other, while the first is still there."""
    prompts = [list(SYSTEM + question) for question in QUESTIONS]
    spawn = get_context("spawn")
    lines, engines = [], []
    for _ in range(2):
        ours, theirs = spawn.Pipe()
        lines.append(ours)
        engines.append(spawn.Process(target=engine_process, args=(storage, theirs), daemon=True))
        engines[-1].start()
    first = ask("engine 1", lines[0], prompts)
    second = ask("engine 2", lines[1], prompts)
    for line, engine in zip(lines, engines, strict=True):
        line.send([])
        engine.join(WAIT_S)
        assert engine.exitcode == 0, "an engine has failed"
    assert [answer for answer, *_ in first] == [answer for answer, *_ in second], "a hit is never wrong bytes"
    assert all(reused.storage_tokens for _, reused, _ in second), "the store was not shared"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--storage", metavar="URL", help="store (L3); a temporary directory if absent")
    given: str | None = parser.parse_args().storage
    if given is not None:
        main(given)
    else:
        with TemporaryDirectory() as directory:
            main(f"file:{directory}")
