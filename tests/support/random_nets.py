"""Random networks as people write them in plain PyTorch: loops, branches on the config, skips over any distance.

``RandomNet(seed)`` draws a program of steps; its forward is ordinary code that walks through it. Every step is a block,
or something that stands between blocks in real models.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
LEAVES_OUT = 5
"""A branch whose number this divides leaves out its block."""


class Block(nn.Module):
    """A residual block with dropout; ``kind`` says what it takes and gives."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(dropout)
        self.condition = nn.Linear(WIDTH, WIDTH) if kind == "conditioned" else None

    def forward(self, x: Tensor, condition: Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = self.down(self.drop(self.act(self.up(self.norm(x))))) * scale
        if self.condition is not None and condition is not None:
            y = y + self.condition(condition)[:, None]
        if self.kind == "tuple":
            return x + y, y.mean(1)
        return {"hidden": x + y, "extra": [y]} if self.kind == "dict" else x + y


STEPS = (
    "block", "block", "block", "listed", "push", "push", "add", "cat", "shared", "in place", "view", "sizes", "scale",
    "table", "mask", "dropout", "frozen", "checkpointed", "branch", "tuple", "positions", "chunks", "autocast",
)  # fmt: skip


class RandomNet(nn.Module):
    """A network drawn from ``seed``; ``checkpoints``: whether it runs blocks again in backward, where it draws that."""

    checkpoints = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.steps = [draw.choice(STEPS) for _ in range(draw.randint(5, 16))]
        self.numbers = [draw.randrange(1000) for _ in self.steps]
        dropout = draw.choice((0.0, 0.2))
        kinds = ("plain", "plain", "conditioned", "tuple", "dict")
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.embed = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        blocks = [Block(draw.choice(kinds), dropout) for _ in self.steps]
        self.blocks = nn.ModuleList(blocks[:1] if draw.random() < 0.3 else blocks)
        if len(self.blocks) < len(blocks):
            for number, block in enumerate(blocks[1:], start=1):
                self.add_module(f"stage_{number}", block)
        self.joins = nn.ModuleDict(
            {str(i): nn.Linear(2 * WIDTH, WIDTH) for i, s in enumerate(self.steps) if s == "cat"}
        )
        self.listed = nn.ModuleList(Block("plain", dropout) for _ in range(draw.randint(1, 3)))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("table", torch.rand(WIDTH) + 0.5, persistent=draw.random() < 0.5)
        self.constant = torch.polar(torch.ones(WIDTH // 2), torch.rand(WIDTH // 2))

    def block(self, index: int) -> Any:
        return self.blocks[index] if index < len(self.blocks) else getattr(self, f"stage_{index}")

    def leaves_out_a_block(self, tokens: int) -> list[int]:
        """Steps that do nothing for so many tokens."""
        branches = (i for i, step in enumerate(self.steps) if step == "branch" and self.numbers[i] % LEAVES_OUT == 0)
        return [i for i in branches if tokens % 2 == self.numbers[i] % 2]

    def run(self, index: int, x: Tensor, condition: Tensor, scale: float = 1.0) -> Tensor:
        found = self.block(index)(x, condition, scale=scale)
        if isinstance(found, tuple):
            return found[0] + found[1][:, None]
        return found["hidden"] * 1.5 + found["extra"][0] if isinstance(found, dict) else found

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Any:
        condition, skips, extra = self.embed(t[:, None]), [], None
        x = self.stem(x)
        for index, (step, number) in enumerate(zip(self.steps, self.numbers, strict=True)):
            if step in ("block", "branch", "shared", "checkpointed", "tuple"):
                if step == "branch" and x.shape[1] % 2 == number % 2:
                    if number % LEAVES_OUT == 0:
                        continue
                    x = x * 0.9
                which = number % (index + 1) if step == "shared" else index
                if step == "checkpointed" and self.checkpoints:
                    x = checkpoint(self.run, which, x, condition, use_reentrant=bool(number % 2))
                else:
                    x = self.run(which, x, condition, scale=1.0 if step == "checkpointed" else 1.0 + number / 1000)
                if step == "tuple":
                    extra = x[:, :1] * 2
            elif step == "listed":
                for block in self.listed:
                    x = block(x)
            elif step == "push":
                skips.append(x)
            elif step in ("add", "cat") and skips:
                skip = skips.pop(number % len(skips))
                x = x + skip if step == "add" else self.joins[str(index)](torch.cat([x, skip], dim=-1))
            elif step == "in place":
                x = x * 1.01
                x += 0.1 * condition[:, None]
                x[:, :1].mul_(0.5) if number % 2 else F.relu_(x[:, :1])
            elif step == "view":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            elif step == "sizes":
                samples, tokens, width = x.shape
                x = x.reshape(samples * tokens, width).view(samples, tokens, -1) / tokens**0.5
            elif step == "scale":
                x = x * self.gain
            elif step == "table":
                waved = torch.view_as_complex(x.float().contiguous().reshape(*x.shape[:-1], -1, 2)) * self.constant
                x = torch.view_as_real(waved).flatten(-2).type_as(x) * self.table
            elif step == "mask":
                x = x * mask.to(x.dtype)[:, : x.shape[1], None] + 0.1
            elif step == "dropout":
                x = F.dropout(x, 0.1, training=self.training)
            elif step == "frozen":
                with torch.no_grad():
                    level = x.mean(dim=1, keepdim=True)
                x = x - level
            elif step == "positions":
                x = x + torch.arange(x.shape[1], device=x.device)[None, :, None] / 10
            elif step == "chunks":
                x = torch.cat([one * (1 + place) for place, one in enumerate(x.chunk(2, dim=-1))], dim=-1)
            elif step == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(number % 2)):
                    x = (x @ x.transpose(1, 2) @ x).float() / 10
        out = self.head(x)
        return out if extra is None else {"sample": out, "extra": (extra,)}


def net_batch(samples: int = 2, tokens: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, tokens, WIDTH, generator=generator),
        "t": torch.rand(samples, generator=generator),
        "mask": torch.randint(0, 2, (samples, 9), generator=generator),
    }
