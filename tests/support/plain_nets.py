"""Networks written as plain PyTorch, as people write them: no list of blocks, in-place operations, shared weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class DoubleConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        nn.init.constant_(self.net[2].bias, 0.3)  # else units may be dead, and their gradients prove nothing

    def forward(self, hidden: Tensor) -> Tensor:
        return self.net(hidden)


class PlainUNet(nn.Module):
    """Three levels; a block called twice, a scale read in two places, changes in place between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 16))
        self.inc, self.down1, self.down2 = DoubleConv(3, 8), DoubleConv(8, 16), DoubleConv(16, 16)
        self.mid = DoubleConv(16, 16)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.up2, self.up1, self.up0 = DoubleConv(32, 16), DoubleConv(32, 8), DoubleConv(16, 8)
        self.out = nn.Conv2d(8, 3, 1)
        self.scale = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x0 = self.inc(x)
        x1 = self.down1(self.pool(x0)) + self.time(t[:, None])[:, :, None, None]
        x2 = self.down2(self.pool(x1))
        y = self.mid(self.mid(self.pool(x2))) * self.scale
        y = self.up2(self._up(y, x2))
        y = y - 0.1
        self.relu(y)
        y = self.up1(self._up(y, x1)) + 0
        y += 1
        return self.out(self.up0(self._up(y, x0)) * self.scale)

    @staticmethod
    def _up(y: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([F.interpolate(y, size=skip.shape[-2:]), skip], dim=1)


class NamedAsLayers(nn.Module):
    """Its parts have names that layers of a list have for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.skip, self.shared, self.number = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.keywords = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.given = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("leave", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.skip(x)
        for keyword in self.keywords:
            x = torch.tanh(keyword(x))
        return self.part(self.number(self.shared(x)) * self.given + self.leave) + skipped


class PlainLevel(nn.Module):
    """The smallest U-Net of such blocks, with the same entries: its trace takes a third of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.mid, self.up = DoubleConv(3, 8), DoubleConv(8, 8), DoubleConv(16, 3)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        kept = self.inc(x)
        hidden = self.mid(self.pool(kept)) * t[:, None, None, None]
        return self.up(torch.cat([F.interpolate(hidden, size=kept.shape[-2:]), kept], dim=1))


def plain_unet_batch(samples: int = 2, side: int = 16, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 3, side, side, generator=generator),
        "t": torch.rand(samples, generator=generator),
    }


class Straight(torch.autograd.Function):
    """Rounds; its gradient passes as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x * scale).round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 3, None


class State:
    """What a model and its blocks share."""

    height = 1
    _reads = 0

    @cached_property
    def twice(self) -> int:
        self._reads += 1
        return 2 * self.height


class Odd(nn.Module):
    """What tracing has to get right one by one; ``kind`` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("table", torch.linspace(-1, 1, 8), persistent=False)
        self.register_buffer("saved", torch.linspace(1, 2, 8))
        self.waves = torch.polar(torch.ones(4), torch.linspace(0, 3, 4))
        self.step = 0
        self.loose = [nn.Parameter(torch.ones(8))]
        self.cache: Tensor | None = None
        self.state = self.first.state = State()  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        return getattr(self, self.kind)(x, mask, scale)

    def buffers_and_constants(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x) * self.table + self.saved
        waved = torch.view_as_complex(y.float().reshape(*y.shape[:-1], 4, 2)) * self.waves
        y = self.second(torch.view_as_real(waved).flatten(-2).type_as(y))
        return self.third(y * self.saved)

    def dropout(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = F.dropout(self.first(x), 0.3, training=self.training)
        y = self.second(self.drop(y))
        return self.third(y * 2 if self.training else y)

    def head_dtype(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """Its first part is what the head may be, and looks at what the head is."""
        y = self.first(x) + torch.linspace(0, 1, 8, dtype=self.third.weight.dtype)
        y = self.second(y.to(self.second.weight.dtype))
        return self.third(y.to(self.third.weight.dtype))

    def dtypes(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """Code that asks for the dtypes of the weights and of the batch."""
        y = self.first(x.to(self.first.weight.dtype))
        y = self.second(y + torch.linspace(0, 1, 8, dtype=y.dtype))
        return self.third(y).to(x.dtype)

    def buffer_dtype(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """Widens by a buffer, and goes back as code that finds the dtypes alike does not."""
        y = self.first(x) * self.saved
        y = self.second(y if y.dtype == x.dtype else y.to(x.dtype))
        return self.third(y)

    def dropped_mask(self, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        bias = self.drop(mask)
        return self.third(self.second(self.first(x) + bias) * bias)

    def view_across(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x) * 1
        half = y[:, :4]
        z = self.second(y * 1)
        half += 1
        return self.third(z + y)

    def autocast(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(y) @ self.third.weight
        with torch.no_grad():
            z = self.table * y.float().mean()
        return self.third(y.float() + z)

    def island(self, x: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Its last part is in full precision, whatever is around the model; so is what it makes of a table."""
        y = self.second(self.first(x))
        with torch.autocast("cpu", enabled=False):
            waves = self.table[:, None] @ self.table[None]
            return self.third(y.float()), y @ waves.to(y.dtype)

    def asks_for_autocast(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.second(self.first(x))
        return self.third(y.float() * 2 if torch.is_autocast_enabled(device_type="cpu") else y)

    def device_kind(self, x: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Mixed precision of its own, and another way on the CPU; the model has a property, as diffusers' models do."""
        y = self.first(x)
        with torch.autocast(self.device.type, torch.bfloat16):
            y = self.second(y) @ self.third.weight
        return self.third(y.float()) * (1 if self.device.type == "cpu" else 2), y

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def batch_alone(self, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        bias = (1 - mask.to(x.dtype))[:, None] * -3
        return self.third(self.second(self.first(x) + bias) * bias + bias.sum()) * scale

    def sizes(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        if x.shape[0] % 2:
            y = y + 1
        y = self.second(y.reshape(-1, 8) if x.ndim > 2 else y)
        y = self.third(y + torch.arange(x.shape[0], device=x.device)[:, None])
        return y / x.shape[0] ** 0.5

    def checks(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """Sizes are compared as sizes, in a tuple, in a text and as a key."""
        y = self.first(x)
        samples, width = y.shape
        if samples < 1 or (samples, 8) != tuple(y.shape) or not {8: True}.get(width):
            raise ValueError(f"expected a width of 8, found {width}")
        if f"{list(x.shape)}, {samples:d}, {samples > 0}" != f"[{samples}, 8], {samples}, True":
            raise ValueError(f"expected {[samples, 8]}, found {list(x.shape)}")
        return self.third(self.second(y))

    def own_backward(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        return self.third(Straight.apply(self.second(self.first(x)), x.shape[0] + 1.0))  # type: ignore[no-untyped-call]

    def tensor_hook(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda grad: grad * 2)
        return self.second(y)

    def numpy_random(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        return self.second(self.first(x) * float(np.random.rand()))

    def late_input(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        return self.third(self.second(self.first(x))) + x

    def tuples(self, x: Tensor, mask: Any, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        found = {"a": self.first(x), "b": [self.second(x)]}
        return self.third(found["a"] + found["b"][0]), found

    def checkpointed(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = checkpoint(self.first, x, use_reentrant=False)
        return self.third(checkpoint(lambda one: self.second(one) * 2, y, use_reentrant=True))

    def reads_content(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        return self.second(y) if y.sum() > 0 else self.third(y)

    def reads_inside(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        return self.third(y if bool((y > 100).any()) else self.second(y))

    def counts(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        self.step += 1
        return self.second(self.first(x))

    def sets_a_block(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        self.first.height = x.shape[0]  # type: ignore[assignment]
        return self.second(self.first(x))

    def sets_a_state(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """An object that a block holds, too."""
        self.state.height = x.shape[0]
        return self.second(self.first(x))

    def hooks_a_block(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        self.first.register_forward_hook(lambda *_: None)
        return self.second(self.first(x))

    def swaps_weights(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        return self.second(torch.func.functional_call(self.first, {"weight": self.second.weight}, (x,)))

    def averages(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        self.saved = 0.9 * self.saved + 0.1 * x.mean(0).detach()
        return self.second(self.first(x) - self.saved)

    def counts_in_a_buffer(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        self.saved = self.saved + 1
        return self.second(self.first(x))

    def leaves_a_loss(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        self.step = (y**2).mean()  # type: ignore[assignment]
        return self.second(y)

    def leaves_another_loss(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        y = self.first(x)
        self.waves = (y**2).mean()
        return self.second(y)

    def fills_caches(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """Nobody reads them after the forward."""
        self.saved, self.table = self.saved.to(x), torch.linspace(-1, 1, x.shape[1])
        self.cache = self.first(x)
        return self.third(self.second(self.cache * self.saved) + self.table)

    def reads_a_state(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        """What an object caches of itself when it is read."""
        return self.third(self.second(self.first(x * self.state.twice)))

    def scale_or_none(self, x: Tensor, mask: Any, scale: float | None) -> Tensor:
        return self.third(self.second(self.first(x) * (3.0 if scale is None else scale)))

    def unregistered(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        return self.second(self.first(x) * self.loose[0])

    def shared_weight(self, x: Tensor, mask: Any, scale: float) -> Tensor:
        return F.linear(self.third(self.second(self.first(x))), self.first.weight)


def plain_unet_workload() -> Any:
    """What ``ds_pulse profile support.plain_nets:plain_unet_workload`` is given: nothing of it takes memory."""
    from deepspeed_pulse.models import to_layers

    batch = {name: value.to("meta") for name, value in plain_unet_batch().items()}
    return to_layers(PlainUNet().to("meta"), example_batch=batch), (batch, None)


class Experts(nn.Module):
    """Tokens go to the expert that a gate chooses, so the sizes of what experts get follow from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, mine, expert(x[mine]))
        return x + out


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": Experts()}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.stem(x)
        for block in self.blocks:
            x = block["mlp"](block["norm"](x))
        return self.head(x + kept)
