"""What ranks run in the tests of ranks that disagree, and of planned modules in other engines.

Two ranks; the second one differs. Each rank prints the error of every case, as in ``bad_ranks``.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.bad_ranks import (
    MICROBATCHES,
    Case,
    batches,
    config_with,
    engine,
    layers_with,
    module,
    rank,
    run_cases,
)
from support.toy import WIDTH, Down, Up, UpTime, loss_fn, toy_batch, toy_layers
from torch import nn


def mine(usual: Any, other: Any) -> Any:
    """``other`` on the second rank."""
    return other if rank() == 1 else usual


class Moody(nn.Linear):
    """A layer that cannot be built on the second rank."""

    def __init__(self, *arguments: Any) -> None:
        if rank() == 1 and torch.get_default_device().type != "meta":
            raise ValueError("no such shard")
        super().__init__(*arguments)


def moody_layers() -> list[Any]:
    """The ends of a wave are the first rank's, the middle is the second's."""
    from deepspeed_pulse import LayerSpec

    return layers_with(4, LayerSpec(Moody, WIDTH, WIDTH, layer_name="moody"))


def squared(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((output - labels) ** 2).mean()


def broken_list() -> Any:
    yield from toy_layers()[:4]
    raise OSError("the shard index is not there")


def frozen_module(width: int) -> Any:
    from deepspeed_pulse.engine.frozen import FrozenSpec

    layers = [nn.Linear(WIDTH, width).requires_grad_(False), nn.Linear(width, WIDTH).requires_grad_(False)]
    inputs, labels = toy_batch(0, 0, 0)
    example = {"pixels": inputs.pop("hidden"), **inputs}, labels
    return module(frozen={"hidden": FrozenSpec(layers, input="pixels")}, example_batch=example)


def construction_cases() -> dict[str, Case]:
    from deepspeed_pulse import LayerSpec, spec

    plain = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(8)]

    def with_layer(index: int, usual: Any, other: Any) -> Any:
        return module(layers=layers_with(index, mine(usual, other)))

    up = {"pop": "s3"}
    return {
        "eight layers and six": lambda: module(layers=plain[: mine(8, 6)]),
        "other classes": lambda: with_layer(3, LayerSpec(Down, stash="s3"), LayerSpec(Up2, stash="s3")),
        "other names": lambda: with_layer(6, LayerSpec(Up, **up), LayerSpec(Up, **up, layer_name="ascent")),
        "other arguments": lambda: module(
            layers=[*plain[:7], LayerSpec(nn.Linear, WIDTH, WIDTH, bias=mine(True, False))]
        ),
        "other pops": lambda: module(
            layers=layers_with(4, mine(toy_layers()[4], LayerSpec(UpTime, pop=("c", "t"), layer_name="4.Middle")))
        ),
        "other shapes": lambda: module(layers=[*plain[:7], spec(nn.Linear(WIDTH, mine(WIDTH, 3)), name="head")]),
        "frozen on one rank": lambda: module(
            layers=[*plain[:7], nn.Linear(WIDTH, WIDTH).requires_grad_(mine(True, False))]
        ),
        "other functions": lambda: module(layers=[*plain, mine(torch.tanh, torch.relu)]),
        "other cuts": lambda: module({"placement": "linear"}, partition_method=[mine(4, 5)]),
        "another number of stages": lambda: module(stages=mine(2, 1)),
        "another block": lambda: module(mine({}, {"waves": 2})),
        "a plan on one rank": lambda: module(mine({}, {"plan": "/nowhere/plan.json"})),
        "pulse on one rank": lambda: module(mine({}, {"enabled": False})),
        "no config on one rank": lambda: module(config=mine(config_with(), "/nowhere/config.json")),
        "other accumulation": lambda: module(config=config_with(gradient_accumulation_steps=mine(2, 4))),
        "other clipping": lambda: module(config=config_with(gradient_clipping=mine(0.0, 1.0))),
        "another loss": lambda: module(loss_fn=mine(loss_fn, squared)),
        "another loss module": lambda: module(loss_fn=mine(nn.MSELoss(), nn.L1Loss())),
        "another seed": lambda: module(base_seed=mine(1, 2)),
        "seeded on one rank": lambda: module(seed_layers=mine(True, False)),
        "another interval": lambda: module(activation_checkpoint_interval=mine(0, 1)),
        "a list that ends in an error": lambda: module(layers=mine(toy_layers(), broken_list())),
        "a misspelt key on one rank": lambda: module(mine({}, {"wavs": 1})),
        "an unknown name on one rank": lambda: module(layers=layers_with(9, mine(toy_layers()[9], plain[0]))),
        "a constructor that fails on one rank": lambda: module(layers=moody_layers()),
        "another frozen part": lambda: frozen_module(mine(WIDTH, 3)),
        "an example on one rank": lambda: module(example_batch=mine(toy_batch(0, 0, 0), None)),
    }


class Up2(Down):
    """Another class with the same parameters."""


@dataclass
class Settings:
    """What scripts hand to every layer: whose rank it is among the rest."""

    rank: int
    seed: int


class Configured(nn.Linear):
    def __init__(self, settings: Settings) -> None:
        super().__init__(WIDTH, WIDTH)


def settings_of_one_rank() -> None:
    from deepspeed_pulse import LayerSpec

    settings = Settings(rank=rank(), seed=1234 + rank())
    made = module(layers=[LayerSpec(Configured, settings) for _ in range(4)])
    assert made.plan is not None
    raise RuntimeError("accepted")


def accepted() -> None:
    """What may differ: paths, and where logs go."""
    config = config_with({"plan_cache": f"/tmp/nowhere-{rank()}"})
    made = module(
        config={**config, "local_rank": rank(), "tensorboard": {"enabled": False, "output_path": f"/tmp/logs-{rank()}"}}
    )
    assert made.plan is not None
    raise RuntimeError("accepted")


def monitored_by_one(block: Any) -> None:
    """Only the second rank's config says nothing of a monitor, as where the first one alone writes."""
    with tempfile.TemporaryDirectory() as folder:
        monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "one"}}
        made = engine(config={**config_with(block, steps_per_print=2), **mine(monitor, {})})
        for _ in range(4):
            made.train_batch(batches())
        made.eval_batch(batches(), bcast_loss=False)
        written = [path.name for path in Path(folder).rglob("*.csv")]
        assert any("Pulse_step_ms" in name for name in written) == (rank() == 0), written
    raise RuntimeError("accepted")


def resized_on_one() -> None:
    made = engine()
    made.train_batch(batches())
    if rank() == 1:
        made.set_train_batch_size(2 * MICROBATCHES * 2)
    made.train_batch(batches())


def evaluated_otherwise() -> None:
    engine().eval_batch(batches(), num_micro_batches=mine(2, 3))


def one_trains() -> None:
    made = engine()
    (made.eval_batch if rank() == 1 else made.train_batch)(batches())


def resized_twice() -> None:
    """Plans are kept by number of microbatches, and asking for a timeline waits for nobody."""
    from deepspeed_pulse.engine.plans import planning

    made, made_plans = engine(), []
    genuine = planning.reorder
    planning.reorder = lambda *given: made_plans.append(given[-1]) or genuine(*given)
    try:
        for count in (2, 4, 2, 4, 4, 3):
            made.set_train_batch_size(2 * count)
            if rank() == 1:
                made.pulse_planned_timeline()
            made.train_batch(batches())
            assert made._orders.made(count).microbatches == count
            assert made._orders.made(count).boundaries == made.module.plan.boundaries
    finally:
        planning.reorder = genuine
    assert made_plans == ([4, 3] if rank() == 0 else []), made_plans
    raise RuntimeError("planned once each")


def initialized_otherwise() -> None:
    engine(initialize=config_with(gradient_accumulation_steps=mine(2, 4)))


def cases(_: Any) -> None:
    run_cases(
        {
            **construction_cases(),
            "what may differ": accepted,
            "settings with a rank": settings_of_one_rank,
            "a monitor of one rank": partial(monitored_by_one, {}),
            "a monitor of one rank, pulse off": partial(monitored_by_one, {"enabled": False}),
            "another accumulation in initialize": initialized_otherwise,
            "resized on one rank": resized_on_one,
            "evaluated with another number": evaluated_otherwise,
            "one trains and one evaluates": one_trains,
            "plans are kept": resized_twice,
        }
    )


# -- other engines ---------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def by_subclass() -> None:
    """A plugin's own engine in place of upstream's."""
    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    class PluginEngine(PipelineEngine):
        pass

    genuine = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = PluginEngine
    try:
        engine()
    finally:
        deepspeed.PipelineEngine = genuine


def by_new() -> None:
    """A plugin that replaced what makes engines after this package did."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    genuine = PipelineEngine.__dict__.get("__new__")
    PipelineEngine.__new__ = lambda cls, *args, **kwargs: object.__new__(cls)
    try:
        engine()
    finally:
        PipelineEngine.__new__ = genuine


def by_plain_engine() -> None:
    import deepspeed

    made = Wrapped(module())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    deepspeed.initialize(model=made, optimizer=optimizer, config=config_with())


def directly() -> None:
    module()(toy_batch(0, 0, 0)[0])


def own_subclass() -> None:
    """A user's subclass of this package's engine is its own."""
    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.engine.engine import PulseEngine

    class Engine(PulseEngine):
        pass

    class Module(PipelineModule):
        def engine_class(self) -> Any:
            return Engine

    import deepspeed

    made = Module(layers=toy_layers(), num_stages=2, loss_fn=loss_fn, config=config_with())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    found = deepspeed.initialize(model=made, optimizer=optimizer, config=config_with())[0]
    assert type(found) is Engine
    found.train_batch(batches())
    raise RuntimeError("trained")


def engines(_: Any) -> None:
    run_cases(
        {
            "a subclass of PipelineEngine": by_subclass,
            "a plugin's __new__": by_new,
            "a plain engine around it": by_plain_engine,
            "called directly": directly,
            "a subclass of its own engine": own_subclass,
        }
    )
