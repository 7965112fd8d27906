"""Tables of settings: frozen values of which each key is known and each number finite."""

from typing import Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field

__all__ = ["TENANT_PATTERN", "Bytes", "Count", "Seconds", "Section"]

TENANT_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names that tenants may have."""

Bytes = Annotated[ByteSize, Field(gt=0, le=1 << 60)]
Count = Annotated[int, Field(gt=0, le=1 << 31)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 365, allow_inf_nan=False)]


class Section(BaseModel):
    """One table of settings; a key that it does not have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
