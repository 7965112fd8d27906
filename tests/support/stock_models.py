"""Every causal language model of transformers at a tiny size, and whether it resumes bit by bit from pages.

A configuration is made from the class's own fields with small numbers in them, one layer of each kind that the class
lays out by default; ``FIELDS`` has what single classes need beside that.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.exactness import go_on, greedily, is_equal
from tests.support.one_thread import one_thread
from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.core.errors import LayoutError
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel

VOCABULARY_SIZE = 256
PARAMETERS_MAX = 40_000_000
"""Largest model that is built: some multimodal ones have a vision part of their own."""
PROMPT_PAGES, MORE_TOKENS, STEPS_COUNT = 4, 5, 6
PAGE_TOKENS = 16
HEADS = 4
LAYERS_COUNT = 2

FAILURES = (
    *(AttributeError, ImportError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError),
    StrictDataclassError,
)
"""What classes of transformers raise of a configuration, or of a forward, that they cannot have."""

SMALL: Mapping[str, object] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), VOCABULARY_SIZE),
    "hidden_size": 64,
    "num_hidden_layers": LAYERS_COUNT,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 40,
    "attention_chunk_size": 40,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "q_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "index_topk": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": HEADS,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    "mamba_expand": 2,
    "rotary_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
    "hidden_size_per_layer_input": 16,
}
"""Numbers of a tiny model, for the fields of these that a class has."""

FULL_AND_LINEAR = ["linear_attention", "full_attention"]

FIELDS: Mapping[str, Mapping[str, object]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": FULL_AND_LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mamba2": {"num_heads": HEADS, "head_dim": 32, "expand": 2},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "zamba2": {"head_dim": 32},
}
"""What single classes need: layers of both kinds where the default has one, and numbers that belong together."""

PAGE_TOKENS_OF: Mapping[str, int] = {"deepseek_v4": 128}
"""Page size of models whose rows stand for groups of tokens."""


class Resume(Enum):
    """Outcome of having a model resume from pages."""

    EXACT = "exact"
    """Bit by bit as one that was never interrupted."""
    INEXACT = "inexact"
    """Otherwise: that is a fault of ours."""
    NO_DECODER = "no decoder alone"
    """The class reads what an encoder has made of another text."""
    REFUSED = "refused"
    """``KeptState.of`` says why."""
    NOT_BUILT = "not built"
    """There is no tiny model of it here."""


@dataclass(frozen=True)
class StockModel:
    """One model that was tried."""

    model_type: str
    resume: Resume
    reason: str = ""
    kept: KeptState | None = None


def causal_model_types() -> tuple[str, ...]:
    """Return the types of all causal language models of the installed transformers."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of two layers, or of as many as the class has kinds of layers."""
    base = CONFIG_MAPPING[model_type]()
    text = base.get_text_config(decoder=True)
    fields = text.to_dict()
    has = {*fields, *text.attribute_map}
    values = {name: value for name, value in SMALL.items() if name in has}
    layers_count = LAYERS_COUNT
    if "kv_lora_rank" in has:
        values["num_key_value_heads"] = HEADS  # latent attention has a key for each head
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name):
            kinds = list(dict.fromkeys(fields[name]))
            values[name] = kinds * (2 if len(kinds) == 1 else 1)
            values["num_hidden_layers"] = layers_count = max(len(kinds), LAYERS_COUNT)
    if "is_decoder" in fields:
        values["is_decoder"] = True
    values |= FIELDS.get(model_type, {})
    if fields.get("mlp_layer_types"):
        kinds = list(dict.fromkeys(fields["mlp_layer_types"]))
        values["mlp_layer_types"] = [kinds[min(at, len(kinds) - 1)] for at in range(layers_count)]
    if text is not base:
        part = next(name for name, kind in base.sub_configs.items() if kind is type(text))
        values = {part: values}
    return AutoConfig.for_model(model_type, **values)


def build(model_type: str) -> PreTrainedModel:
    """Build a tiny model of random weights, the same in every process.

    Raises:
        ValueError: it would not be tiny.
    """
    config = tiny_config(model_type)
    with torch.device("meta"):
        count = sum(each.numel() for each in of_config(config).parameters())
    if count > PARAMETERS_MAX:
        raise ValueError(f"it has {count:,} parameters at its smallest")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = of_config(config)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def of_config(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the causal language model of a configuration."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def tokens_of_prompt(page_size: int) -> list[int]:
    """Return a prompt of some pages and a part of one."""
    return random.Random(1).choices(range(3, 250), k=PROMPT_PAGES * page_size + MORE_TOKENS)


def uninterrupted(kept: KeptState, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits of a prompt and of some greedy tokens, over the model's own cache object alone, in pages."""
    page_size = kept.layout.page_size
    past = kept.new_cache()
    for start, end in pairwise([*range(0, len(tokens), page_size), len(tokens)]):
        logits = kept.run(past, tokens[start:end])
    return greedily(logits, lambda token: kept.run(past, [token]), STEPS_COUNT)


def resumed(kept: KeptState, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the same logits over a prefix cache that has the prompt's pages on the device alone."""
    count = len(kept.layout.components)
    config = CacheConfig(device_pages=(3 * PROMPT_PAGES,) * count, host_pages=(1,) * count)
    pages = kept.allocate(config.device_pages)
    with UnifiedCache.open(kept.layout, config, pages.pools, identity=Identity("tiny")) as cache:
        engine = PrefixCachedModel(kept.model, cache, pages, chunk_tokens=kept.layout.page_size)
        with engine.prefill(tokens) as first:
            assert first.reused.total == 0
        with engine.prefill(tokens) as second:
            assert second.reused.device == PROMPT_PAGES * kept.layout.page_size
            return go_on(second, STEPS_COUNT)


def try_model(model_type: str) -> StockModel:
    """Build a model and have it resume."""
    try:
        if CONFIG_MAPPING[model_type]().is_encoder_decoder:
            return StockModel(model_type, Resume.NO_DECODER)
        model = build(model_type)
    except FAILURES as error:
        return StockModel(model_type, Resume.NOT_BUILT, first_line(error))
    with one_thread():
        try:
            kept = KeptState.of(model, PAGE_TOKENS_OF.get(model_type, PAGE_TOKENS))
            tokens = tokens_of_prompt(kept.layout.page_size)
            expected = uninterrupted(kept, tokens)
        except LayoutError as error:
            return StockModel(model_type, Resume.REFUSED, first_line(error))
        except FAILURES as error:
            # The model's own forward: it takes no such cache object, or no such sizes.
            return StockModel(model_type, Resume.NOT_BUILT, first_line(error))
        found = resumed(kept, tokens)
    return StockModel(model_type, Resume.EXACT if is_equal(found, expected) else Resume.INEXACT, "", kept)


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]
