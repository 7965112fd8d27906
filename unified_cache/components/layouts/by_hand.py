"""A layout without a configuration: plain attention of given sizes."""

from unified_cache.components.layouts.attention import plain
from unified_cache.components.layouts.fields import Fields
from unified_cache.components.layouts.sizes import AUTO, Choice, SizedLayout

__all__ = ["size_by_hand"]


def size_by_hand(
    layers: int, heads: int, head_dim: int, *, page_size: int | None = None, dtype: str | None = None
) -> SizedLayout:
    """Return the layout of full attention in ``layers`` layers, each with ``heads`` of K and V of ``head_dim`` values.

    ``page_size`` is in tokens, None for 64; ``dtype`` is what K and V are kept in, None for bfloat16.

    Raises:
        LayoutError: a number that is not positive, or a dtype that is not known.
    """
    fields = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": head_dim}
    choice = Choice(page_size, None if dtype == AUTO else dtype)
    return plain(Fields({**fields, "model_type": "plain attention"}), choice)
