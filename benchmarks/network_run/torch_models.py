"""The models of `benchmarks/workloads.py` in PyTorch, variable for variable."""

import torch
from torch import nn
from torch.nn import functional


class CausalAttention(nn.Module):
    """Causal self-attention; the four projections have biases, as in Keras."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attends within `x`, `[batch, sequence, width]`."""
        batch, sequence, _ = x.shape
        parts = (
            project(x).view(batch, sequence, self._heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two dense layers, each with pre-normalization and a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.dense_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[batch, sequence, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(functional.gelu(self.widen(self.dense_norm(x))))


class Transformer(nn.Module):
    """A decoder-only transformer over tokens."""

    def __init__(self, vocabulary: int, sequence: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.05 * torch.randn(sequence, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens, `[batch, sequence]`, to logits, `[batch, sequence, vocabulary]`."""
        x = self.blocks(self.embedding(tokens) + self.positions)
        return self.logits(self.norm(x))


def build_cnn() -> nn.Module:
    """Builds six convolutions and two dense layers, for images `[batch, 3, 32, 32]`."""
    layers: list[nn.Module] = []
    channels = 3
    for filters in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            channels = filters
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))


def build_mlp() -> nn.Module:
    """Builds 784-2048-2048-2048-10."""
    widths = (784, 2048, 2048, 2048)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def build_text() -> nn.Module:
    """Builds the transformer of two blocks over 8000 tokens."""
    return Transformer(vocabulary=8000, sequence=64, width=128, blocks=2, heads=4)


MODELS = {"cnn": build_cnn, "mlp": build_mlp, "text": build_text}
