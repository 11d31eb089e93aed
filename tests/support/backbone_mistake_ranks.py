"""Users' mistakes with several backbones, each refused alike on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.bad_ranks import CONFIG, Case, config_with, rank, run_cases
from support.toy import WIDTH, loss_fn, toy_batch, toy_layers
from torch import nn


def pair(**layers: Any) -> dict[str, Any]:
    from deepspeed_pulse import Backbone

    return {name: Backbone(layers.get(name) or toy_layers(), loss_fn=loss_fn) for name in ("base", "upper")}


def module(pulse: Any = None, *, config: Any = None, stages: Any = 2, **arguments: Any) -> Any:
    from deepspeed_pulse import PipelineModule

    return PipelineModule(
        num_stages=stages,
        config=config_with(pulse) if config is None else config,
        **{"seed_layers": True, "backbones": pair(), **arguments},
    )


def engine(config: Any = None, **arguments: Any) -> Any:
    import deepspeed

    made = module(config=config, **arguments)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    return deepspeed.initialize(model=made, optimizer=optimizer, config=config or config_with())[0]


def alone(**arguments: Any) -> Any:
    return engine(backbones=None, layers=toy_layers(), loss_fn=loss_fn, **arguments)


def batch(m: int = 0) -> Any:
    found = {name: toy_batch(0, m, 0) for name in ("base", "upper")}
    return {name: own[0] for name, own in found.items()}, {name: own[1] for name, own in found.items()}


def each(change: Callable[[Any, Any], Any] = lambda inputs, labels: (inputs, labels)) -> Iterator[Any]:
    return (change(*batch(m)) for m in itertools.count())


EACH = {"backbone_steps": "each"}


def own_schedule() -> Any:
    """A schedule that has counted the one group, which is of both backbones."""
    import deepspeed

    made = module(EACH)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return deepspeed.initialize(model=made, optimizer=optimizer, lr_scheduler=schedule, config=config_with(EACH))


def clip(engine: Any) -> None:
    """A program's own clipping."""
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())


def clipping_of_its_own() -> Any:
    """In the place of DeepSpeed's; which clips at 1 where the config says nothing."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    before = DeepSpeedEngine.clip_fp32_gradients
    DeepSpeedEngine.clip_fp32_gradients = clip
    try:
        return engine()
    finally:
        DeepSpeedEngine.clip_fp32_gradients = before


def sharing() -> dict[str, Any]:
    """One linear layer in both."""
    shared = nn.Linear(3, 3)
    return pair(base=[*toy_layers(), shared], upper=[*toy_layers(), shared])


def reading_the_other() -> dict[str, Any]:
    """``upper`` pops what only ``base`` stashes."""
    from deepspeed_pulse import LayerSpec, spec

    base = [LayerSpec(nn.Linear, WIDTH, WIDTH), spec(_twice, stash="found"), spec(_first, pop="found")]
    upper = [LayerSpec(nn.Linear, WIDTH, WIDTH), spec(_first, pop="found"), LayerSpec(nn.Linear, WIDTH, WIDTH)]
    return pair(base=base, upper=upper)


def _twice(x: torch.Tensor) -> Any:
    return x, x


def _first(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x + other


def construction(folder: Path) -> dict[str, Case]:
    from deepspeed_pulse import Backbone, FrozenSpec

    layers, example = toy_layers(), batch()
    one = Backbone(toy_layers(), loss_fn=loss_fn)
    frozen = FrozenSpec([nn.Identity()], input="base.t")
    return {
        "both": lambda: module(layers=layers),
        "neither": lambda: module(backbones=None),
        "one alone": lambda: module(backbones={"base": one}),
        "a list": lambda: module(backbones=[one, one]),
        "a name with a dot": lambda: module(backbones={"base": one, "up.per": one}),
        "a name with a slash": lambda: module(backbones={"base": one, "up/per": one}),
        "a number as a name": lambda: module(backbones={"base": one, 3: one}),
        "layers as a backbone": lambda: module(backbones={"base": one, "upper": toy_layers()}),
        "loss_fn beside": lambda: module(loss_fn=loss_fn),
        "input beside": lambda: module(input="sample"),
        "a loss_fn in words": lambda: module(backbones={"base": one, "upper": Backbone(toy_layers(), loss_fn="mse")}),
        "an input that is a number": lambda: module(backbones={"base": one, "upper": Backbone(layers, input=3)}),
        "layers a number": lambda: module(backbones={"base": one, "upper": Backbone(3)}),
        "no layers": lambda: module(backbones={"base": one, "upper": Backbone([])}),
        "a layer None": lambda: module(backbones={"base": one, "upper": Backbone([None])}),
        "a weight in both": lambda: module(backbones=sharing()),
        "pulse off": lambda: module({"enabled": False}),
        "no block": lambda: module(config=CONFIG),
        "num_stages auto": lambda: module(stages="auto", config=config_with(train_batch_size=4)),
        "waves auto": lambda: module({"waves": "auto"}),
        "cuts in the middle": lambda: module(partition_method=[2, 5, 15]),
        "example of one": lambda: module(example_batch=toy_batch(0, 0, 0)),
        "example without a part": lambda: module(example_batch=({"base": example[0]["base"]}, example[1])),
        "frozen of nobody": lambda: module(frozen={"text": frozen}, example_batch=example),
        "frozen of an unknown": lambda: module(frozen={"other.text": frozen}, example_batch=example),
        "frozen reads the other": lambda: module(frozen={"upper.t": frozen}, example_batch=example),
        "profile of one": lambda: module({"profile": str(folder / "profile.json")}),
        "plan of one": lambda: module({"plan": str(folder / "plan.json")}),
        "own steps of one": lambda: module(EACH, backbones=None, layers=toy_layers(), loss_fn=loss_fn),
        "own steps in words": lambda: module({"backbone_steps": "both"}),
        "own steps with fp16": lambda: module(config=config_with(EACH, fp16={"enabled": True})),
        "own steps with sums in backward": lambda: module(
            config=config_with(EACH, zero_optimization={"stage": 1, "overlap_comm": True})
        ),
        "groups of both beside a schedule": own_schedule,
        "clipping of its own": clipping_of_its_own,
        "parameters of an unknown": lambda: module().backbone_parameters("bese"),
        "on some ranks": lambda: module(backbones=pair() if rank() else {"lower": one, "upper": one}),
    }


def in_steps() -> dict[str, Case]:
    """One engine for all: a refused batch leaves it as it was."""
    made = engine()

    def trained(change: Any) -> Case:
        return lambda: made.train_batch(each(change))

    def clipped_on_one() -> None:
        if rank():
            made.clip_fp32_gradients = partial(clip, made)
        try:
            made.train_batch(each())
        finally:
            vars(made).pop("clip_fp32_gradients", None)

    def bare(x: Any, y: Any) -> Any:
        return x["base"], y["base"]

    def lacking(x: Any, y: Any) -> Any:
        return {"base": x["base"], "upper": {name: v for name, v in x["upper"].items() if name != "c"}}, y

    return {
        "clipping of one rank's own": clipped_on_one,
        "batch of one": trained(bare),
        "inputs lack a part": trained(lambda x, y: ({"base": x["base"]}, y)),
        "labels lack a part": trained(lambda x, y: (x, {"base": y["base"]})),
        "a part too much": trained(lambda x, y: ({**x, "other": x["base"]}, y)),
        "a part is None": trained(lambda x, y: ({**x, "upper": None}, y)),
        "labels a tensor": trained(lambda x, y: (x, y["base"])),
        "an entry is missing": trained(lacking),
        "three in a batch": trained(lambda x, y: (x, y, y)),
        "no data on one rank": lambda: engine().train_batch(None if rank() else each()),
        "no batches": lambda: made.train_batch(iter(())),
        "outputs asked for": lambda: made.eval_batch(each(), compute_loss=False),
        "logits asked for": lambda: made.eval_batch(each(), return_logits=True),
        "all losses asked for": lambda: made.eval_batch(each(), reduce_output=None),
        "loss on one rank": lambda: made.eval_batch(each(), bcast_loss=False),
        "names of the other": lambda: engine(backbones=reading_the_other()).train_batch(each()),
        "another number on one rank": resized_on_one,
        "evaluated on one rank": evaluated_on_one,
        "frozen while a step goes on": frozen_in_the_midst,
        "frozen wholly": lambda: engine(backbones=pair(upper=frozen_layers())).train_batch(each()),
    }


def resized_on_one() -> None:
    """While backbones are in the midst of their steps."""
    made = engine(config_with(EACH))
    made.train_batch(each())
    if rank():
        made.set_train_batch_size(2 * made.train_batch_size())
    made.train_batch(each())


def evaluated_on_one() -> None:
    made = engine(config_with(EACH))
    made.train_batch(each())
    (made.eval_batch if rank() else made.train_batch)(each())


def frozen_in_the_midst() -> None:
    made = engine(config_with(EACH))
    made.train_batch(each())
    for parameter in made.module.parameters():
        parameter.requires_grad_(False)
    made.train_batch(each())


def frozen_layers() -> list[Any]:
    return [nn.Linear(WIDTH, width).requires_grad_(False) for width in (WIDTH, WIDTH, WIDTH, 3)]


def with_schedule(pulse: Any) -> Any:
    """One that counts the groups of the optimizer when it is made: one, or one of each backbone."""
    import deepspeed

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    made, config = module(pulse), config_with(pulse)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    return deepspeed.initialize(model=made, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def checkpoints(folder: Path) -> dict[str, Case]:
    from deepspeed_pulse.models import EMA

    joint, single, scheduled = engine(), alone(), with_schedule({})
    scheduled.save_checkpoint(str(folder / "scheduled"))
    ema = EMA(joint, backbone="base")
    joint.save_checkpoint(str(folder / "joint"))
    single.save_checkpoint(str(folder / "alone"))
    wider = engine(backbones=pair(base=[*toy_layers(), nn.Linear(3, 3)]))
    return {
        "unknown here": lambda: joint.load_checkpoint(str(folder / "joint"), backbone="bese"),
        "unknown there": lambda: single.load_checkpoint(str(folder / "joint"), backbone="bese"),
        "both of one": lambda: single.load_checkpoint(str(folder / "alone"), backbone="base"),
        "joint from alone": lambda: joint.load_checkpoint(str(folder / "alone")),
        "joint from alone, weights": lambda: joint.load_checkpoint(str(folder / "alone"), load_optimizer_states=False),
        "alone from joint": lambda: single.load_checkpoint(str(folder / "joint"), load_module_only=True),
        "other layers": lambda: wider.load_checkpoint(str(folder / "alone"), backbone="base"),
        "other layers, weights": lambda: wider.load_checkpoint(str(folder / "joint"), load_module_only=True),
        "no name": lambda: joint.load_checkpoint(str(folder / "alone"), backbone=3),
        "other names": lambda: joint.load_checkpoint(str(folder / "joint"), backbone=("base", "upper")[rank()]),
        "a schedule of other groups": lambda: with_schedule(EACH).load_checkpoint(str(folder / "scheduled")),
        "no averages": lambda: joint.load_checkpoint(str(folder / "joint"), ema=ema),
        "two averages of one": lambda: joint.save_checkpoint(str(folder / "joint"), ema=[ema, ema]),
        "averages of another": lambda: joint.load_checkpoint(str(folder / "joint"), backbone="upper", ema=ema),
    }


def write_files(folder: Path) -> None:
    from support.toy import toy_profile

    from deepspeed_pulse.planner import Job, SearchOptions, make_plan
    from deepspeed_pulse.planner.cost import default_cluster

    profile = toy_profile(microbatch_size=2)
    job = Job(profile=profile, cluster=default_cluster(2, 2**40), pipeline_ranks=2, microbatches=2)
    plan = make_plan(job, SearchOptions(placement="wave", schedule="wave", solver_seconds=0))
    (folder / "profile.json").write_text(profile.to_json())
    (folder / "plan.json").write_text(plan.to_json())


def mistakes(name: str) -> None:
    folder = Path(name)
    run_cases(construction(folder))
    run_cases(in_steps())
    run_cases(checkpoints(folder))
