"""The half of the demo that computes, in a process of its own, asked through a pipe.

    ("ask", QUESTION, SALT)              a DemoAnswer over the cache
    ("drop", "device" or "memory", "")   nothing: what is asked next comes from a slower tier
    ("compare", QUESTION, "")            a DemoAnswer by the model alone

First it sends a Ready; where it cannot go on, (TEXT, IS_INPUT). It ends when the pipe does, and holds nothing that a
kill would leave behind.
"""

import copy
import hashlib
import platform
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.config import CacheConfig, Retention
from unified_cache.core.errors import CacheError, InputError
from unified_cache.core.page import Namespace
from unified_cache.core.pool import Identity
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel, Stage, greedy
from unified_cache.integrations.weights import weights_digest
from unified_cache.sizing.demo.result import SOURCES, DemoAnswer, DemoSettings, Ready
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.tiny_models import TINY_MODELS, tiny_model

SETTLE_S = 120.0
"""Longest wait for backups between two questions."""
PROMPTS_MAX = 4
"""Prompts that device and host have room for: those of two users, and what is under way."""
PAUSE_S = 0.0005
"""Pause between two polls of a transfer."""
DOCUMENT_MARK, QUESTION_MARK = "\u2402", "\u2403"
"""Stand for document and question in a chat template, until it is cut there; no template has these characters."""

Request = tuple[str, str, str]
Send = Callable[[Ready | DemoAnswer], None]


@dataclass(frozen=True, slots=True)
class Language:
    """Text and tokens of a model, and the parts of its chat template around a document and a question."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    head: list[int]
    middle: str
    tail: str
    stop: frozenset[int] = frozenset()

    @classmethod
    def of_bytes(cls) -> "Language":
        """Return the language of the tiny models: a token is a byte, and an answer any bytes."""
        return cls(
            lambda text: list(text.encode()),
            lambda tokens: bytes(tokens).decode("ascii", "backslashreplace"),
            head=[],
            middle="\n> ",
            tail="\n",
        )

    @classmethod
    def of(cls, tokenizer: transformers.PreTrainedTokenizerBase, stop: frozenset[int]) -> "Language":
        """Return the language of a tokenizer: its chat template, or a plain question where it has none."""

        def encode(text: str) -> list[int]:
            return cast("list[int]", tokenizer(text, add_special_tokens=False).input_ids)

        def decode(tokens: list[int]) -> str:
            return cast("str", tokenizer.decode(tokens, skip_special_tokens=True))

        if not tokenizer.chat_template:
            return cls(encode, decode, list(tokenizer("").input_ids), "\n\nQuestion: ", "\nAnswer:", stop)
        messages = [{"role": "user", "content": f"{DOCUMENT_MARK}\n\n{QUESTION_MARK}"}]
        text = cast("str", tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        head, _, rest = text.partition(DOCUMENT_MARK)
        middle, _, tail = rest.partition(QUESTION_MARK)
        return cls(encode, decode, encode(head), middle, tail, stop)


@dataclass(frozen=True, slots=True)
class DemoServer:
    """Answers questions about one document over a prefix cache."""

    settings: DemoSettings
    language: Language
    kept: KeptState
    cache: UnifiedCache
    engine: PrefixCachedModel
    document: list[int]
    """Tokens of the document and of those before it: whole pages, so that only a question is computed again."""
    send: Send

    def serve(self, requests: Iterable[Request]) -> None:
        """Do what each request asks."""
        alone: tuple[transformers.DynamicCache, float] | None = None
        for verb, what, salt in requests:
            match verb:
                case "ask":
                    self.send(self.answer(what, salt or None))
                case "drop":
                    self.drop(what)
                case _:
                    alone = alone or self.computed_document()
                    self.send(self.reference(what, *alone))

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of the document and a question about it."""
        return [*self.document, *self.language.encode(f"{self.language.middle}{question}{self.language.tail}")]

    def answer(self, question: str, salt: str | None) -> DemoAnswer:
        """Answer over the cache; what was computed is stored when it returns."""
        tokens = self.prompt(question)
        flawed_before = self.cache.stats().flawed_pages
        started_s = time.perf_counter()
        with self.engine.start(tokens, Namespace(cache_salt=salt)) as sequence:
            while (stage := sequence.step()) is not Stage.READY:
                if stage not in {Stage.COMPUTE, Stage.RESTORE}:
                    time.sleep(PAUSE_S)
            assert sequence.logits is not None, "a prompt that is ready has been computed"
            found = self._generate(question, started_s, sequence.logits, sequence.feed)
        self.cache.wait_all(SETTLE_S)
        reused = sequence.reused
        by_source = (reused.device, reused.host, reused.storage, sequence.computed_tokens)
        return replace(
            found,
            prompt_tokens=dict(zip(SOURCES, by_source, strict=True)),
            flawed_pages=self.cache.stats().flawed_pages - flawed_before,
        )

    def drop(self, tier: str) -> None:
        """Evict every page of the device, or of device and host."""
        self.cache.wait_all(SETTLE_S)
        if tier == "memory":
            self.cache.reset()
            return
        taken = self.cache.allocate([np.ones(count, np.bool_) for count in self.cache.config.device_pages])
        assert taken is not None, "nothing is pinned between two requests"
        self.cache.free(taken)

    @torch.no_grad()
    def computed_document(self) -> tuple[transformers.DynamicCache, float]:
        """Compute the document by the model alone, in the same chunks; return its state and the seconds it took."""
        started_s = time.perf_counter()
        past = self.kept.new_cache()
        chunk_tokens = self.kept.layout.page_size
        for start in range(0, len(self.document), chunk_tokens):
            self.kept.run(past, self.document[start : start + chunk_tokens])
        return past, time.perf_counter() - started_s

    @torch.no_grad()
    def reference(self, question: str, document: transformers.DynamicCache, seconds: float) -> DemoAnswer:
        """Answer by the model alone, after a copy of the document, which took so many seconds to compute."""
        past, tokens = copy.deepcopy(document), self.prompt(question)
        started_s = time.perf_counter() - seconds
        logits = torch.empty(0)
        for start in range(len(self.document), len(tokens), self.kept.layout.page_size):
            logits = self.kept.run(past, tokens[start : start + self.kept.layout.page_size])
        found = self._generate(question, started_s, logits, lambda token: self.kept.run(past, [token]))
        return replace(found, prompt_tokens={**dict.fromkeys(SOURCES, 0), "computed": len(tokens)})

    def _generate(
        self, question: str, started_s: float, logits: torch.Tensor, feed: Callable[[int], torch.Tensor]
    ) -> DemoAnswer:
        """Generate greedily after a prompt, which began at ``started_s``; the caller adds its tokens by source."""
        stop, digest = self.language.stop, hashlib.sha256()
        tokens: list[int] = []
        first_token_s = 0.0
        while not tokens or (tokens[-1] not in stop and len(tokens) < self.settings.answer_tokens_max):
            if tokens:
                logits = feed(tokens[-1])
            tokens.append(greedy(logits))
            digest.update(logits.float().numpy().tobytes())
            first_token_s = first_token_s or time.perf_counter() - started_s
        text = self.language.decode([each for each in tokens if each not in stop])
        return DemoAnswer(question, text, tokens, digest.hexdigest(), first_token_s, prompt_tokens={})


def loaded(directory: Path, file: str | None) -> tuple[PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Load what lies on this machine, in fp32; ``file`` is a GGUF file."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=file, dtype=torch.float32, local_files_only=True
    )
    tokenizer: transformers.PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, gguf_file=file, local_files_only=True
    )
    return model, tokenizer


def load(name: str, saved: Path) -> tuple[KeptState, Language, Identity]:
    """Load a model, its language, and the name of its pages: a tiny one, or a checkpoint that lies on this machine.

    The weights of a GGUF file are saved for the next process, which loads them in a fifth of the time.

    Raises:
        InputError: there is no such checkpoint.
        LayoutError: its state cannot be resumed from pages.
    """
    # All that decides the last bit of a page is in its identity.
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if name in TINY_MODELS:
        kept = KeptState.of(tiny_model(name), TINY_MODELS[name].page_size)
        return kept, Language.of_bytes(), Identity(name, f"{versions}, {machine}")
    path = Path(name)
    directory, file = (path.parent, path.name) if path.is_file() else (path, None)
    if saved.exists():
        directory, file = saved, None
    try:
        model, tokenizer = loaded(directory, file)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(f"{name} must be a checkpoint that transformers loads: {error}") from error
    if file is not None:
        vars(model).pop("hf_quantizer", None)  # its weights are plain by now, and so saved as such
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        model, tokenizer = loaded(saved, None)  # as the next process does: layouts of weights show in the last bits
    stop = model.generation_config.eos_token_id if model.generation_config else None
    named = [tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])]
    stops = frozenset(token for token in named if isinstance(token, int))
    model.eval()  # type: ignore[no-untyped-call]
    identity = Identity(path.name, f"{weights_digest(path.parent if path.is_file() else path)}, {versions}, {machine}")
    return KeptState.of(model), Language.of(tokenizer, stops), identity


def whole_document(settings: DemoSettings, language: Language, page_size: int) -> list[int]:
    """Return the document's tokens after those before it, cut to whole pages.

    Raises:
        InputError: it does not fill two pages.
        OSError: it cannot be read.
    """
    text = settings.document.read_text(encoding="utf-8", errors="replace")
    tokens = [*language.head, *language.encode(text)][: settings.document_tokens_max]
    count = len(tokens) // page_size * page_size
    if count < 2 * page_size:
        raise InputError(f"the document must have {2 * page_size} tokens or more, found {len(tokens)}")
    return tokens[:count]


def serve(settings: DemoSettings, saved: Path, requests: Iterable[Request], send: Send) -> None:
    """Load the model, open the cache, and do what each request asks; ``saved`` is for a converted model."""
    assert settings.storage is not None, "the process that shows the demo names it"
    torch.set_num_threads(1)  # how a sum is split among threads shows in its last bits
    kept, language, identity = load(settings.model, saved)
    page_size = kept.layout.page_size
    document = whole_document(settings, language, page_size)
    tail_tokens = page_size + max(
        len(language.encode(f"{language.middle}{question}{language.tail}")) for question in settings.questions
    )
    pages_max = (len(document) + tail_tokens + settings.answer_tokens_max) // page_size + 1
    counts = (PROMPTS_MAX * pages_max,) * len(kept.layout.components)
    # So that a question can follow the document where state is recurrent.
    config = CacheConfig(device_pages=counts, host_pages=counts, retention=Retention(tail_tokens))
    pages = kept.allocate(config.device_pages)
    storage = open_storage(settings.storage)
    with UnifiedCache.open(kept.layout, config, pages.pools, identity=identity, storage=storage) as cache:
        engine = PrefixCachedModel(kept.model, cache, pages, chunk_tokens=page_size)
        page_bytes = sum(pool.page_bytes for pool in kept.layout.pools)
        last_key = cache.prompt([*document, 0]).keys[len(document) // page_size - 1].hex()
        send(Ready(len(document), page_size, page_bytes, last_key))
        DemoServer(settings, language, kept, cache, engine, document, send).serve(requests)


def main() -> None:
    """Serve what comes through a pipe until it ends: first the settings, and a directory for a converted model."""
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):
        try:
            settings, saved = pipe.recv()
            serve(settings, saved, iter(pipe.recv, None), pipe.send)
        except (CacheError, OSError) as error:
            pipe.send((str(error), isinstance(error, InputError | OSError)))


if __name__ == "__main__":
    main()
