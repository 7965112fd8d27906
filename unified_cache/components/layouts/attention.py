"""Models of full-attention layers, alone or between sliding-window ones.

A window in a transformers configuration counts the query (``sliding_window_overlay`` in ``masking_utils.py``); the
model then looks back on one token less. Where other published code of the same model looks back on the whole
number, the larger is kept: a token too many costs at most a page, a token too few is wrong.
"""

from collections.abc import Callable, Sequence

from unified_cache.components.layouts.fields import LAYERS_MAX, Fields
from unified_cache.components.layouts.sizes import Choice, LayerBytes, SizedLayout
from unified_cache.core.errors import LayoutError

Rule = Callable[[Fields, Choice], SizedLayout]
"""What turns the fields of a text model into its layout."""

LayersWithWindow = Callable[[Fields, int], list[str]]
"""Kinds of the layers of a model, where its configuration does not list them in ``layer_types``."""

PAGE_SIZE = 64
"""Usual tokens per page; what most attention kernels take."""

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 and 4 is full; configuration_gemma3.py, configuration_gemma4.py."""


def layer_count(fields: Fields) -> int:
    """Return how many decoder layers a model has."""
    return fields.count("num_hidden_layers", most=LAYERS_MAX)


def kv_row_bytes(fields: Fields, choice: Choice, prefix: str = "") -> int:
    """Return the bytes of K and V of one token in one layer; ``prefix`` picks fields such as ``swa_head_dim``."""
    kv_heads, query_heads = f"{prefix}num_key_value_heads", f"{prefix}num_attention_heads"
    heads = fields.count(kv_heads)
    if query_heads in fields and fields.count(query_heads) % heads:
        raise fields.error(kv_heads, f"a divisor of {query_heads} {fields.count(query_heads)}")
    key_dim = fields.count(f"{prefix}head_dim")
    value_dim = fields.count(f"{prefix}v_head_dim", default=key_dim)
    return heads * (choice.head_bytes(key_dim) + choice.head_bytes(value_dim))


def with_heads(fields: Fields) -> Fields:
    """Return ``fields`` with what a model of plain attention may leave out.

    Without ``head_dim`` the hidden size is shared out among the heads; without ``num_key_value_heads`` each head has K
    and V of its own, or all share one under ``multi_query``.
    """
    known = fields
    # Falcon's newer decoders have groups of heads, whatever multi_query says of the older ones.
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        known = fields.with_values({"num_key_value_heads": 1})
    elif "num_key_value_heads" not in fields:
        known = fields.with_values({"num_key_value_heads": fields.count("num_attention_heads")})
    if "head_dim" in fields:
        return known
    heads = fields.count("num_attention_heads")
    head_dim, rest = divmod(fields.count("hidden_size"), heads)
    if rest or not head_dim:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
    return known.with_values({"head_dim": head_dim})


def layer_types(fields: Fields, layers: int, *, window: str = SLIDING, drafts: int = 0) -> list[str]:
    """Return ``layer_types`` of the decoder layers, each full or ``window``."""
    found = fields.texts("layer_types", (FULL, window))
    fields.of_layers("layer_types", layers, drafts)
    return found[:layers]


def periodic(name: str, default: int, other: str = SLIDING) -> LayersWithWindow:
    """Make each ``name``-th layer full and the others of another kind, with a window if none is named."""

    def kinds(fields: Fields, layers: int) -> list[str]:
        period = fields.count(name, default=default)
        return [other if (number + 1) % period else FULL for number in range(layers)]

    return kinds


def alternating(fields: Fields, layers: int) -> list[str]:
    """Give even layers a window; make odd ones full."""
    return [FULL if number % 2 else SLIDING for number in range(layers)]


def after_dense(fields: Fields, layers: int) -> list[str]:
    """Make every fourth layer full, counted from 1 again behind the first dense ones, which have their own period."""
    dense = fields.number("first_k_dense_replace", default=0)
    if dense > layers:
        raise fields.error("first_k_dense_replace", f"at most num_hidden_layers {layers}")
    first = periodic("prefix_dense_sliding_window_pattern", 1)(fields, dense)
    return first + periodic("sliding_window_pattern", 4)(fields, layers - dense)


def from_the_last(fields: Fields, layers: int) -> list[str]:
    """Make the last layer full, and every fourth before it."""
    return [SLIDING if (layers - 1 - number) % 4 else FULL for number in range(layers)]


def listed(fields: Fields, layers: int) -> list[str]:
    """Refuse a configuration that does not list its layers: there is no usual order."""
    raise fields.error("layer_types", "a list with the kind of each layer")


def no_layer(fields: Fields, layers: int) -> list[str]:
    """Make all layers full."""
    return [FULL] * layers


def where_named(fields: Fields, layers: int) -> list[str]:
    """Give all layers a window where the configuration has one, else make them full."""
    return [SLIDING if "sliding_window" in fields else FULL] * layers


def last_layers(fields: Fields, layers: int) -> list[str]:
    """Give the layers from ``max_window_layers`` on a window, if ``use_sliding_window`` is true."""
    if not fields.flag("use_sliding_window") or "sliding_window" not in fields:
        return [FULL] * layers
    start = fields.number("max_window_layers", default=0)
    return [FULL if number < start else SLIDING for number in range(layers)]


def exaone_pattern(fields: Fields, layers: int) -> list[str]:
    """Give layers a window as ``sliding_window_pattern`` says: by a period, or by letters L and G in turn."""
    name = "sliding_window_pattern"
    if "sliding_window" not in fields:
        return [FULL] * layers
    pattern = fields.values.get(name)
    if not isinstance(pattern, str):
        return periodic(name, 4)(fields, layers)
    if not pattern or set(pattern) - {"L", "G"}:
        raise fields.error(name, "a period, or a text of the letters L and G")
    found = [SLIDING if pattern[number % len(pattern)] == "L" else FULL for number in range(layers)]
    return [*found[:-1], FULL]


def hybrid(
    fields: Fields,
    choice: Choice,
    kinds: Sequence[str],
    window_tokens: int | None,
    sliding_row: Callable[[Fields], int] | None = None,
) -> SizedLayout:
    """Return the layout of layers of these kinds; ``sliding_row`` says what differs in sliding-window ones."""
    each = list(zip(fields.per_layer(len(kinds)), kinds, strict=True))
    row = sliding_row or (lambda layer: kv_row_bytes(layer, choice))
    layers = [{"kv": kv_row_bytes(layer, choice)} if kind == FULL else {"swa": row(layer)} for layer, kind in each]
    return LayerBytes(layers).sized(fields.text("model_type"), choice.page(PAGE_SIZE), window_tokens)


def one_window(fields: Fields, name: str, kinds: Sequence[str]) -> int | None:
    """Return the window that all sliding layers share; None where there is no sliding layer."""
    windows = [
        layer.count(name) for layer, kind in zip(fields.per_layer(len(kinds)), kinds, strict=True) if kind != FULL
    ]
    if len(set(windows)) > 1:
        raise LayoutError(f"per_layer_config must leave {name} alike in all layers, found {sorted(set(windows))}")
    return windows[0] if windows else None


def looked_back(fields: Fields, name: str, kinds: Sequence[str]) -> int | None:
    """Return the tokens that a window holds beside the query."""
    window = one_window(fields, name, kinds)
    if window == 1:
        raise fields.error(name, "at least 2, as it counts the query")
    return None if window is None else window - 1


def refuse_bidirectional(fields: Fields) -> None:
    """Refuse a model whose tokens look ahead: what it keeps of a prefix depends on what follows."""
    name = "use_bidirectional_attention"
    if fields.holds(name, True) or fields.holds(name, "all"):
        raise fields.error(name, "off, since a prefix of a model that looks ahead cannot be cached")


def plain(fields: Fields, choice: Choice) -> SizedLayout:
    """Read a model of full attention alone."""
    return hybrid(with_heads(fields), choice, [FULL] * layer_count(fields), None)


def windowed(kinds_of: LayersWithWindow, *, counts_query: bool = False, needs_head_dim: bool = False) -> Rule:
    """Make the rule of models whose layers are full or have a window: as ``layer_types`` lists them, else ``kinds_of``.

    ``counts_query`` is for models of which all published code looks back on one token less than the window;
    ``needs_head_dim`` for those whose class has a default of its own, which a configuration may mean by leaving it out.
    """

    def rule(fields: Fields, choice: Choice) -> SizedLayout:
        refuse_bidirectional(fields)
        layers = layer_count(fields)
        kinds = layer_types(fields, layers) if "layer_types" in fields else kinds_of(fields, layers)
        window = (looked_back if counts_query else one_window)(fields, "sliding_window", kinds)
        if needs_head_dim:
            fields.count("head_dim")
        return hybrid(with_heads(fields), choice, kinds, window)

    return rule


def gemma4(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Gemma4TextConfig: full layers have heads of their own; the last layers may borrow K and V of others."""
    refuse_bidirectional(fields)
    layers = layer_count(fields)
    if "layer_types" in fields:
        kinds = layer_types(fields, layers)
    else:
        kinds = periodic("sliding_window_pattern", GEMMA_PATTERN)(fields, layers)
    # As configuration_gemma4.py forces it.
    kinds[-1] = FULL
    borrowed = fields.number("num_kv_shared_layers", default=0)
    if borrowed >= layers:
        raise fields.error("num_kv_shared_layers", f"less than num_hidden_layers {layers}")
    kinds, borrowing = kinds[: layers - borrowed], kinds[layers - borrowed :]
    if not set(borrowing) <= set(kinds):
        raise fields.error("num_kv_shared_layers", f"so few that layers of each of {sorted(set(borrowing))} are left")
    window_tokens = looked_back(fields, "sliding_window", kinds)
    if "per_layer_config" in fields:
        every = fields.per_layer(layers)[: len(kinds)]
    else:
        full = {"head_dim": fields.count("global_head_dim", default=512)}
        if fields.flag("attention_k_eq_v") and "num_global_key_value_heads" in fields:
            full["num_key_value_heads"] = fields.count("num_global_key_value_heads")
        every = [fields.with_values(full) if kind == FULL else fields for kind in kinds]
    rows = [
        {"kv" if kind == FULL else "swa": kv_row_bytes(layer, choice)} for layer, kind in zip(every, kinds, strict=True)
    ]
    return LayerBytes(rows).sized(fields.text("model_type"), choice.page(PAGE_SIZE), window_tokens)


def gemma3(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Gemma3TextConfig: every sixth layer is full; the window counts the query."""
    # The smaller published configurations leave these to the class.
    known = fields.with_defaults({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256})
    return windowed(periodic("sliding_window_pattern", GEMMA_PATTERN), counts_query=True)(known, choice)


def dbrx(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DbrxConfig or MptConfig: full attention, with the heads of K and V in ``attn_config``."""
    if "attn_config" not in fields:
        return plain(fields, choice)
    heads = fields.inner("attn_config")
    known = {"num_key_value_heads": heads.count("kv_n_heads")} if "kv_n_heads" in heads else {}
    return plain(fields.with_values(known), choice)


def gemma3n(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Gemma3nTextConfig: every fifth layer is full, all with the same heads; the last layers borrow K and V."""
    known = fields.with_values({"global_head_dim": fields.count("head_dim")})
    if "layer_types" not in fields:
        known = known.with_values({"layer_types": periodic("sliding_window_pattern", 5)(fields, layer_count(fields))})
    return gemma4(known, choice)


def llama4(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Llama4TextConfig: every fourth layer is full, the others attend within chunks.

    A chunk is kept as a window of its size, as SGLang 0.5.23 does; at a chunk's end nothing of it is needed.
    """
    layers = layer_count(fields)
    if "layer_types" in fields:
        kinds = layer_types(fields, layers, window=CHUNKED)
    elif "no_rope_layers" in fields and fields.items("no_rope_layers"):
        rope = fields.numbers("no_rope_layers", (0, 1))
        fields.of_layers("no_rope_layers", layers)
        kinds = [CHUNKED if each else FULL for each in rope]
    else:
        kinds = periodic("no_rope_layer_interval", 4)(fields, layers)
    return hybrid(fields, choice, kinds, one_window(fields, "attention_chunk_size", kinds))


def mimo(fields: Fields, choice: Choice) -> SizedLayout:
    """Read the configuration of MiMo-V2 as published, or as MiMoV2FlashConfig of transformers saves it.

    Published ones give the tokens looked back on, in ``sliding_window_size`` or ``sliding_window``; the class of
    transformers counts the query, and doubles the heads of sliding-window layers (modeling_mimo_v2_flash.py).
    """
    layers = layer_count(fields)
    published = "hybrid_layer_pattern" in fields
    if published:
        pattern = fields.numbers("hybrid_layer_pattern", (0, 1))
        fields.of_layers("hybrid_layer_pattern", layers)
        kinds = [SLIDING if each else FULL for each in pattern]
    else:
        kinds = layer_types(fields, layers)
    name = fields.one_of(("sliding_window_size", "sliding_window"))
    if published or name == "sliding_window_size":
        window_tokens = one_window(fields, name, kinds)
    else:
        window_tokens = looked_back(fields, name, kinds)

    def sliding_row(layer: Fields) -> int:
        if published:
            return kv_row_bytes(layer, choice, "swa_")
        return 2 * kv_row_bytes(layer, choice)

    return hybrid(fields, choice, kinds, window_tokens, sliding_row)


def step3p5(fields: Fields, choice: Choice) -> SizedLayout:
    """Read the configuration of Step-3.5: ``layer_types`` may go on with draft (MTP) layers, which are not cached.

    The window is kept whole, as SGLang 0.5.23 does.
    """
    layers = layer_count(fields)
    kinds = layer_types(fields, layers, drafts=fields.number("num_nextn_predict_layers", default=0))
    heads = fields.one_of(("num_attention_groups", "num_key_value_heads"))
    known = fields.with_values({"num_key_value_heads": fields.count(heads)})
    window_tokens = one_window(fields, "sliding_window", kinds)
    if "attention_other_setting" not in fields:
        return hybrid(known, choice, kinds, window_tokens)
    other = fields.inner("attention_other_setting")
    sliding = {
        "num_key_value_heads": other.count(
            other.one_of(("num_attention_groups", "num_key_value_heads")), default=fields.count(heads)
        ),
        "num_attention_heads": other.count("num_attention_heads", default=fields.count("num_attention_heads")),
        "head_dim": other.count("head_dim", default=fields.count("head_dim")),
    }
    row = kv_row_bytes(other.with_values(sliding), choice)
    return hybrid(known, choice, kinds, window_tokens, lambda _: row)


def step3_text(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Step3TextConfig: full attention, with one head of K and V for all (MFA)."""
    fields.count("head_dim")
    return plain(fields.with_values({"num_key_value_heads": 1}), choice)


def decilm(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeciLMConfig of Nemotron-NAS: each block has heads of its own number, or no attention.

    The first DeciLM lists heads alone, in ``num_key_value_heads_per_layer``.
    """
    layers = layer_count(fields)
    query_heads = fields.count("num_attention_heads")
    known = with_heads(fields.with_values({"num_key_value_heads": query_heads}))
    heads = _heads_of_blocks(fields, layers, query_heads)
    rows = [
        {"kv": kv_row_bytes(known.with_values({"num_key_value_heads": count}), choice)} if count else {}
        for count in heads
    ]
    if not any(heads):
        raise LayoutError(f"{fields.text('model_type')} must have a layer with attention, found none")
    return LayerBytes(rows).sized(fields.text("model_type"), choice.page(PAGE_SIZE), None)


def _heads_of_blocks(fields: Fields, layers: int, query_heads: int) -> list[int]:
    """Return the heads of K and V of each layer; 0 for one without attention."""
    if "block_configs" not in fields:
        name = "num_key_value_heads_per_layer"
        fields.of_layers(name, layers)
        return fields.numbers(name, range(1, query_heads + 1))
    found: list[int] = []
    fields.of_layers("block_configs", layers)
    for block in fields.objects("block_configs"):
        attention = block.inner("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            found.append(0)
            continue
        group = attention.count("n_heads_in_group")
        if query_heads % group:
            raise attention.error("n_heads_in_group", f"a divisor of num_attention_heads {query_heads}")
        found.append(query_heads // group)
    return found
