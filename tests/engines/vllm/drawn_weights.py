"""Loader of weights that are drawn, registered with vLLM when this is imported. Runs where vLLM is installed."""

# pyright: reportMissingImports=false
import hashlib

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

from tests.engines.vllm.deepseek_v4 import DRAWN


@register_model_loader(DRAWN)
class DrawnWeights(BaseModelLoader):  # type: ignore[misc]  # vLLM's, untyped where it is not installed
    """Draws each weight from its name and the seed in ``model_loader_extra_config``: two seeds, two models."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: there is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Draw what ``model`` is made of; what is no number stays as the model made it."""
        seed = self.load_config.model_loader_extra_config["seed"]
        for name, weight in model.state_dict().items():
            if torch.is_floating_point(weight):
                weight.copy_(drawn(weight.shape, name, seed))


def drawn(shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    """Return a weight, float32, large enough that attention to the wrong bytes changes the answer."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
    if len(shape) >= 2:
        return numbers * float(shape[-1] ** -0.5)
    return 1 + 0.1 * numbers if name.endswith("norm.weight") else 0.3 * numbers
