"""The models of `keras_models.py` in PyTorch, variable for variable, as sequences of parts that can be cut."""

import torch
from network_run.torch_models import Block
from torch import nn

from model_parallel_run.pipeline_variants import SIZES, MlpSizes, TransformerSizes


class TokenEmbedding(nn.Module):
    """Vectors of tokens and of positions."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(0.05 * torch.randn(sizes.sequence, sizes.width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens, `[batch, sequence]`, to `[batch, sequence, width]`."""
        return self.embedding(tokens) + self.positions


def build_model(name: str) -> nn.Sequential:
    """Builds the parts of the model of a workload."""
    sizes = SIZES[name]
    return build_mlp(sizes) if isinstance(sizes, MlpSizes) else build_transformer(sizes)


def build_mlp(sizes: MlpSizes) -> nn.Sequential:
    """Builds two parts for each hidden layer, and one of the logits."""
    widths = [sizes.inputs, *[sizes.width] * sizes.hidden]
    parts: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(sizes.width, sizes.classes))


def build_transformer(sizes: TransformerSizes) -> nn.Sequential:
    """Builds one part of the embedding, one for each block, and two for the logits."""
    blocks = [Block(sizes.width, sizes.heads) for _ in range(sizes.blocks)]
    logits = nn.Linear(sizes.width, sizes.vocabulary)
    return nn.Sequential(TokenEmbedding(sizes), *blocks, nn.LayerNorm(sizes.width), logits)
