"""Stages of a request, as its steps tell them."""

from enum import Enum

__all__ = ["Stage"]


class Stage(Enum):
    """Stage of a request after its last step."""

    FETCH = "fetch"
    """Storage is being read; nothing to do but step again later."""
    LOAD = "load"
    """Host memory is being copied to the device; the same."""
    RESTORE = "restore"
    """The prefix that is reused is in the model's own cache object."""
    COMPUTE = "compute"
    """A chunk of the prompt was computed."""
    READY = "ready"
    """The prompt is computed and its pages are kept; ``logits`` say what follows."""
