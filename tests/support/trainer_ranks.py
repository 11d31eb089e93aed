"""A trainer of diffusion models written for DeepSpeed's pipelines: what it does around its layers, in small.

A U-Net whose layers drag a tuple, and the same with names; a loader of which only the first and the last rank draw, all
microbatches before the step, noise from the global generator and the target sent from first to last; evaluation between
steps with another number of microbatches; checkpoint functions, adapters, parameter groups and saves of its own.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.versions import mend_upstream, plain_microbatches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, MICROBATCHES, STEPS = 8, 4, 3
LENGTHS = (8, 6, 7)  # the last one does not halve evenly
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}
QUICK = {"solver_seconds": 0, "timeout_seconds": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "no block": {},
    "a block at initialize": {"pulse": QUICK},
    "linear": {"pulse": {**QUICK, "placement": "linear"}},
    "names in a wave": {"pulse": {**QUICK, "placement": "wave"}},
    "names, off": {"pulse": {"enabled": False}},
}


# -- layers that drag a tuple ----------------------------------------------------------------


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.text, self.clock = nn.Linear(3, WIDTH), nn.Embedding(10, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for entry in batch:
            if entry.is_floating_point():
                entry.requires_grad_(True)  # or a reentrant checkpoint gives this layer no gradient
        noisy, time, words, size = batch
        hidden = self.inner(noisy)
        context = self.clock(time[:, None] / 1000 + size) + self.text(words).mean(1)
        return hidden, time, context[:, None], hidden, torch.tensor(noisy.shape[1] % 2 > 0)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def work(self, hidden: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.inner(hidden) + context)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, time, context, *skips, odd = inputs
        hidden = self.work(hidden, context)
        return hidden, time, context, *skips, hidden, odd


class Halve(nn.Module):
    def work(self, hidden: Tensor) -> Tensor:
        return nn.functional.avg_pool1d(hidden.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2).contiguous()

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, time, context, *skips, odd = inputs
        hidden = self.work(hidden)
        return hidden, time, context, *skips, hidden, odd


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)

    def work(self, hidden: Tensor, context: Tensor, skip: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.cat([hidden, skip], dim=2)) + context)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, time, context, *skips, skip, odd = inputs
        return self.work(hidden, context, skip), time, context, *skips, odd


class Double(nn.Module):
    def work(self, hidden: Tensor, odd: Tensor, following: Tensor) -> Tensor:
        """As long as the skip that comes next; only the skip's shape is read."""
        hidden = hidden.repeat_interleave(2, dim=1)
        return hidden[:, : following.shape[1]].contiguous() if odd else hidden

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, time, context, *skips, odd = inputs
        return self.work(hidden, odd, skips[-1]), time, context, *skips, odd


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        hidden, time, *_ = inputs
        return self.inner(hidden), time


# -- the same with names ---------------------------------------------------------------------


class NamedDown(Down):
    def forward(self, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.work(hidden, context)
        return hidden, hidden


class NamedHalve(Halve):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.work(hidden)
        return hidden, hidden


class NamedUp(Up):
    forward = Up.work  # type: ignore[assignment]


class NamedDouble(Double):
    forward = Double.work  # type: ignore[assignment]


class NamedLast(Last):
    def forward(self, hidden: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.inner(hidden), time


def dragging() -> list[nn.Module]:
    torch.manual_seed(1)
    return marked([First(), Down(), Halve(), Down(), Up(), Up(), Double(), Up(), Up(), Last()])


def named() -> list[Any]:
    from deepspeed_pulse import spec

    torch.manual_seed(1)
    layers: list[nn.Module] = [First(), NamedDown(), NamedHalve(), NamedDown(), NamedUp(), NamedUp()]
    first, *inner, last = marked([*layers, NamedDouble(), NamedUp(), NamedUp(), NamedLast()])
    names = (
        {"pop": "context", "stash": "a"},
        {"stash": "b"},
        {"pop": "context", "stash": "c"},
        {"pop": ("context", "c")},
        {"pop": ("context", "b")},
        {"pop": ("odd", "a")},
        {"pop": ("context", "a")},
        {"pop": ("context", "stem")},
    )
    stem = spec(first, stash=("time", "context", "stem", "odd"))
    return [stem, *(spec(m, **n) for m, n in zip(inner, names, strict=True)), spec(last, pop="time")]


def marked(layers: list[nn.Module]) -> list[nn.Module]:
    """Parameters know the names under which the model is saved."""
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameter.original_name = f"unet.{index}.{name}"  # type: ignore[attr-defined]
    return layers


def loss_of(output: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
    """Weighted by the time, masked where there is a mask; an empty one means none."""
    (found, time), (target, mask) = output, labels
    loss = nn.functional.mse_loss(found.float(), target.float(), reduction="none")
    if mask.numel():
        loss = loss * mask
    return (loss.mean([1, 2]) * (1 + time / 1000)).mean()


# -- data ------------------------------------------------------------------------------------


class Loader:
    """Microbatches of changing lengths; what it draws comes from the global generator, so the target must travel."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.number = engine, 0
        torch.manual_seed(100 + engine.global_rank)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        picture = torch.Generator().manual_seed(self.number)
        clean = torch.randn(2, LENGTHS[self.number // MICROBATCHES % 3], 3, generator=picture)
        words = torch.randint(10, (2, 4), generator=picture)
        mask = torch.empty(0) if self.number % 2 else (clean > 0).float()
        self.number += 1
        noise, time = torch.randn_like(clean), torch.randint(1000, (2,))
        return (clean + noise, time, words, torch.full((2, 1), clean.shape[1] / 8)), (self.sent(noise), mask)

    def sent(self, target: Tensor) -> Tensor:
        from deepspeed import comm as dist

        engine = self.engine
        if engine.is_first_stage() and engine.is_last_stage():
            return target
        if engine.is_first_stage():
            dist.send(target, engine.grid.stage_to_global(engine.num_stages - 1))
        else:
            dist.recv(target, engine.grid.stage_to_global(0))
        return target


def drawn(loader: Loader, engine: Any, count: int | None = None) -> Iterator[Any] | None:
    """A step's microbatches, all before the step."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return iter([next(loader) for _ in range(count or engine.gradient_accumulation_steps())])


# -- training --------------------------------------------------------------------------------


class NothingToTrain(torch.optim.Optimizer):
    """What the trainer gives to a rank without trainable parameters."""

    def __init__(self) -> None:
        self.state, self.param_groups = {}, []  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def optimizer_of(parameters: list[Any]) -> torch.optim.Optimizer:
    """A rate for each part and no decay of vectors; groups that are empty on this rank are dropped."""
    if not parameters:
        return NothingToTrain()
    groups = []
    for decay, rows in ((0.01, [p for p in parameters if p.ndim > 1]), (0.0, [p for p in parameters if p.ndim == 1])):
        for lr, own in ((0.1, [p for p in rows if named_as(p, 0)]), (0.2, [p for p in rows if not named_as(p, 0)])):
            if own:
                groups.append({"params": own, "lr": lr, "weight_decay": decay})
    return torch.optim.SGD(groups, momentum=0.9)


def named_as(parameter: Any, index: int) -> bool:
    return str(parameter.original_name).startswith(f"unet.{index}.")


def started(variant: str | None, layers: list[Any], **options: Any) -> Any:
    """An engine; ``variant``: None for upstream's class."""
    import deepspeed

    import deepspeed_pulse

    config = {**CONFIG, **VARIANTS.get(variant or "", {})}
    if variant in ("linear", "names in a wave", "names, off"):
        options["config"] = config
    base = deepspeed.pipe.PipelineModule if variant is None else deepspeed_pulse.PipelineModule
    module = base(layers=layers, num_stages=2, loss_fn=loss_of, dynamic_shape=True, **options)
    trained = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, config=copy.deepcopy(config))
    engine._configure_optimizer(optimizer_of, trained)
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=1.0)
    return engine


def layers_for(variant: str | None) -> list[Any]:
    return named() if variant is not None and variant.startswith("names") else dragging()


def trained(engine: Any, loader: Loader, steps: int = STEPS) -> list[float]:
    found = []
    for _ in range(steps):
        engine.reset_activation_shape()
        found.append(engine.train_batch(drawn(loader, engine)).item())
    return found


def evaluated(engine: Any, count: int) -> float:
    with torch.no_grad():
        state = torch.get_rng_state()
        loss = engine.eval_batch(drawn(Loader(engine), engine, count), num_micro_batches=count).item()
        torch.set_rng_state(state)
    return float(loss)


def evaluations(variant: str | None) -> list[float]:
    """Before the first step and after, with fewer and more microbatches than a step has."""
    engine = started(variant, layers_for(variant))
    before, loader = evaluated(engine, 3), Loader(engine)
    return [before, *trained(engine, loader), evaluated(engine, 6), *trained(engine, loader, 1)]


def with_function(function: Any, variant: str | None) -> list[float]:
    """The classes that the trainer's own function runs again in backward."""
    names = ["First", "Down", "Up", "NamedDown", "NamedUp", "Last"]
    engine = started(
        variant,
        layers_for(variant),
        activation_checkpoint_interval=1,
        activation_checkpoint_func=function,
        checkpointable_layers=names,
    )
    return trained(engine, Loader(engine))


class Offloaded(torch.autograd.Function):
    """Keeps inputs elsewhere and runs again in backward; gives a gradient to what has one."""

    @staticmethod
    def forward(ctx: Any, function: Any, *inputs: Any) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, *(x.grad for x in inputs)


def adapters(variant: str | None) -> list[float]:
    """Only the second half of the model has something to train."""
    layers = layers_for(variant)
    for index, layer in enumerate(layers):
        module = getattr(layer, "layer", layer)
        module.requires_grad_(index in (1, 8))
    engine = started(variant, layers)
    return trained(engine, Loader(engine))


def resumed(variant: str | None) -> list[float]:
    """A checkpoint without frozen weights, loaded by a new engine."""
    folder = str(Path(os.environ["TRAINER_FOLDER"], str(variant).replace(" ", "_")))
    engines = []
    for _ in range(2):
        layers = layers_for(variant)
        getattr(layers[1], "layer", layers[1]).requires_grad_(False)
        engines.append(started(variant, layers))
    found = trained(engines[0], Loader(engines[0]), 2)
    engines[0].save_checkpoint(folder, client_state={"step": 2}, save_latest=True, exclude_frozen_parameters=True)
    path, state = engines[1].load_checkpoint(folder, load_module_strict=False)
    assert path is not None and state["step"] == 2
    return [*found, *trained(engines[1], Loader(engines[1]))]


CASES: dict[str, Callable[[str | None], list[float]]] = {
    "evaluations": evaluations,
    "checkpoint": partial(with_function, partial(checkpoint, use_reentrant=False)),
    "reentrant checkpoint": partial(with_function, partial(checkpoint, use_reentrant=True)),
    "own checkpoint": partial(with_function, Offloaded.apply),
    "adapters": adapters,
    "resume": resumed,
}
if plain_microbatches() == 1:  # upstream itself fails there: "does not require grad"
    del CASES["reentrant checkpoint"], CASES["own checkpoint"]


def trainer(folder: str) -> None:
    """Every case with upstream's class, then with ours in every variant, each told by its name."""
    import deepspeed

    mend_upstream()
    os.environ["TRAINER_FOLDER"] = folder
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    for case, run in CASES.items():
        expected = run(None)
        for variant in VARIANTS:
            found = run(variant)
            close = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
            verdict = "right" if close else f"expected {expected}, found {found}"
            print("CASE", json.dumps([f"{case}, {variant}", verdict]), flush=True)
