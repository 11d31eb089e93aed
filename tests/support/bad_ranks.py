"""What ranks run in the tests of bad input and of failures.

Most cases share one launch: each rank prints the error of every case as ``CASE [name, class, text]``.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.nested import nested_batch, scalar_layers
from support.parity import measure_links_once, plan_once, share_groups, topology
from support.patched import Patch
from support.toy import WIDTH, DownTime, loss_fn, toy_batch, toy_layers
from torch import nn

MICROBATCHES = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "steps_per_print": 10**9,
}
Case = Callable[[], Any]


def config_with(pulse: Any = None, **keys: Any) -> dict[str, Any]:
    block = {"solver_seconds": 0, **pulse} if isinstance(pulse, dict) else {"solver_seconds": 0}
    return {**CONFIG, "pulse": block, **keys}


def module(pulse: Any = None, *, layers: Any = None, stages: Any = 2, config: Any = None, **arguments: Any) -> Any:
    from deepspeed_pulse import PipelineModule

    return PipelineModule(
        layers=toy_layers() if layers is None else layers,
        num_stages=stages,
        config=config_with(pulse) if config is None else config,
        **{"loss_fn": loss_fn, "seed_layers": True, **arguments},
    )


def patched_layers() -> list[Any]:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    Patch(layers[2])
    return layers


def engine(pulse: Any = None, *, initialize: Any = None, **arguments: Any) -> Any:
    """A toy engine; ``initialize``: the config that ``deepspeed.initialize`` is given, if another."""
    import deepspeed

    made = module(pulse, **arguments)
    config = initialize or arguments.get("config") or config_with(pulse)
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    return deepspeed.initialize(model=made, optimizer=optimizer, config=config)[0]


def batches(step: int = 0, count: int | None = None) -> Iterator[Any]:
    return (toy_batch(step, m, 0) for m in (itertools.count() if count is None else range(count)))


def without(name: str) -> Iterator[Any]:
    """Batches that lack an entry."""
    for inputs, labels in batches():
        yield {key: value for key, value in inputs.items() if key != name}, labels


def with_entry(name: str) -> Iterator[Any]:
    for inputs, labels in batches():
        yield {**inputs, name: torch.zeros(1)}, labels


def rank() -> int:
    return int(os.environ["RANK"])


def run_cases(cases: dict[str, Case]) -> None:
    """Every case raises; print what."""
    torch.set_num_threads(1)
    share_groups()
    measure_links_once()
    plan_once()
    for name, act in cases.items():
        found: Exception | None = None
        try:
            act()
        except Exception as problem:
            found = problem
        text = "\n".join([str(found), *getattr(found, "__notes__", ())])
        print("CASE", json.dumps([name, type(found).__name__, text]), flush=True)


# -- before the first step -------------------------------------------------------------------


class ThreeForTwo(DownTime):
    """Returns one value too many."""

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> Any:  # type: ignore[override]
        return (*super().forward(x, temb), x)


def layers_with(index: int, layer: Any) -> list[Any]:
    found = toy_layers()
    found[index] = layer
    return found


def changed_view() -> list[Any]:
    """A layer changes the hidden state, of which a later layer pops a view."""
    from deepspeed_pulse import spec

    found = layers_with(3, spec(lambda x: (y := 2 * x, y.t()), stash="s3"))
    found[4] = spec(lambda x, c, temb: x.add_(1), pop=("c", "temb"), name="changer")
    return found


def wrong_count() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    return layers_with(2, LayerSpec(ThreeForTwo, pop="temb", stash="s2", layer_name="down_2"))


class Decaying(DownTime):
    """Its weight is another one after every forward."""

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> Any:  # type: ignore[override]
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        return super().forward(x, temb)


def decaying() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    return layers_with(2, LayerSpec(Decaying, pop="temb", stash="s2", layer_name="down_2"))


def recomputes_decaying(pulse: Any) -> None:
    """On one rank, where no other microbatch waits."""
    engine(pulse, layers=decaying(), stages=1, activation_checkpoint_interval=1).train_batch(batches())


def without_local_rank() -> None:
    local_rank = os.environ.pop("LOCAL_RANK")
    try:
        module()
    finally:
        os.environ["LOCAL_RANK"] = local_rank


def own_forward() -> None:
    from deepspeed_pulse import PipelineModule

    class Wrapping(PipelineModule):
        def forward(self, forward_input: Any) -> Any:
            return super().forward(forward_input)

    Wrapping(layers=toy_layers(), num_stages=2, loss_fn=loss_fn, config=config_with())


def late_cases() -> dict[str, Case]:
    """The block comes only with ``deepspeed.initialize``."""
    weight = nn.Parameter(torch.ones(WIDTH))

    def late(pulse: Any, extra: Any = None) -> Any:
        layers = [*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), *([] if extra is None else [extra])]
        block = {} if pulse is None else {"pulse": pulse}
        return engine(layers=layers, config=CONFIG, initialize={**CONFIG, **block})

    def other_cuts() -> None:
        plain = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/plan.json"
            Path(path).write_text(module({"placement": "linear"}, layers=plain, partition_method=[1]).plan.to_json())
            late({"plan": path})

    return {
        "a wave only at initialize": lambda: late({"placement": "wave"}),
        "two waves only at initialize": lambda: late({"waves": 2}),
        "an unknown key only at initialize": lambda: late({"wave": 2}),
        "a block on one rank only": lambda: late({} if rank() else None),
        "a plan of other cuts only at initialize": other_cuts,
        "a subclass with a forward": own_forward,
        "a trained function only at initialize": lambda: late({}, lambda x: x * weight),
    }


def auto_cases(paths: dict[str, str]) -> dict[str, Case]:
    """ "auto" that says too little, too much, or what nothing can satisfy."""
    size, steps = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, auto = {"train_batch_size": 8}, {size: "auto", steps: "auto"}
    example = toy_batch(0, 0, 0)
    profile = paths["profile of microbatches of 2"]

    def choose(pulse: Any = None, *, given: Any = None, stages: Any = "auto", **arguments: Any) -> Any:
        block = {"solver_seconds": 0, **(pulse or {})}
        keys = {**batch, **auto} if given is None else given
        return module(stages=stages, config={"steps_per_print": 10**9, "pulse": block, **keys}, **arguments)

    return {
        "auto without a batch": lambda: choose(given=auto),
        "auto without pulse": lambda: choose({"enabled": False}, stages=2),
        "auto without costs": lambda: choose(),
        "auto with cuts": lambda: choose(partition_method=[2, 3, 4], example_batch=example),
        "auto and a batch that nothing divides": lambda: choose(given={"train_batch_size": 7, size: 3, steps: "auto"}),
        "auto and numbers that contradict": lambda: choose(
            given={**batch, size: 2, steps: 8},
        ),
        "two numbers of stages": lambda: choose(stages=2, given={**batch, "pipeline": {"stages": 1}}),
        "auto and a batch of a word": lambda: choose(given={"train_batch_size": "many", size: "auto"}),
        "auto and autotuning": lambda: choose(given={**batch, **auto, "autotuning": {"enabled": True}}),
        "auto and tensor parallel": lambda: choose(given={**batch, **auto, "tensor_parallel": {"autotp_size": 2}}),
        "auto and a topology": lambda: choose(topology=topology(pipe=2, data=1)),
        "auto and too little memory": lambda: choose({"memory_gb": 1e-7, "profile": profile}),
        "auto and a profile of larger microbatches": lambda: choose(
            {"profile": profile}, given={**batch, size: 1, steps: "auto"}
        ),
        "auto and a plan of other numbers": lambda: choose(
            {"plan": paths["plan of other microbatches"]}, given={size: "auto", steps: 4}
        ),
        "auto in initialize only": lambda: engine(initialize={**config_with(), size: "auto"}),
        "auto of another batch": lambda: engine(
            {"profile": profile},
            stages="auto",
            config={**config_with({"profile": profile}), **auto, **batch},
            initialize={**config_with({"profile": profile}), **auto, "train_batch_size": 16},
        ),
        "auto and an mpu": lambda: initialized_with_mpu(
            {**config_with({"profile": profile}), **auto, **batch},
        ),
    }


def on_a_device_without_fp16() -> None:
    """Some CPUs have it."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: False):
        engine(config=config_with(fp16={"enabled": True}))


DROPPED_TOKENS = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}


def counted_groups() -> None:
    """The script leaves out empty groups, so that a rank has fewer; its schedule has counted them."""
    import deepspeed

    config = config_with(zero_optimization={"stage": 1}, zero_allow_untested_optimizer=True)
    made = module(config=config)
    mine = list(made.parameters())
    groups = [{"params": mine}] if rank() else [{"params": mine[:1]}, {"params": mine[1:]}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0] * len(groups))
    deepspeed.initialize(model=made, optimizer=optimizer, lr_scheduler=schedule, config=config)


def unequal_halves() -> None:
    """The first rank has matrices only, so that Muon makes one group there and two on the other."""
    import deepspeed

    from deepspeed_pulse import LayerSpec

    muon = {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}}
    config = config_with({"placement": "linear"}, zero_optimization={"stage": 1}, optimizer=muon)
    layers = [LayerSpec(nn.Linear, 2, 2, bias=number > 1) for number in range(4)]
    made = module(config=config, layers=layers, partition_method=[2])
    deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)


def with_a_curriculum() -> None:
    import deepspeed

    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
    config = config_with(data_efficiency={"enabled": True, "data_sampling": sampling})
    made = module(config=config)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    data = [toy_batch(0, m, 0, size=1) for m in range(4)]
    deepspeed.initialize(model=made, optimizer=optimizer, training_data=data, config=config)


def initialized_with_mpu(config: dict[str, Any]) -> None:
    import deepspeed

    made = module(stages="auto", config=config)
    deepspeed.initialize(model=made, model_parameters=made.parameters(), mpu=made.mpu(), config=config)


def uncompiled() -> None:
    """The second rank has no compiler; the first has the kernel already."""
    from unittest.mock import patch

    from deepspeed.ops.op_builder.cpu import FusedAdamBuilder

    def load(self: Any) -> None:
        if rank() == 1:
            raise RuntimeError("Ninja is required to load C++ extensions")

    import deepspeed

    config = config_with(optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    made = module(config=config)
    with patch.object(FusedAdamBuilder, "load", load):
        deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)


def construction(paths: dict[str, str]) -> None:
    """Two ranks; errors at ``PipelineModule(...)`` and at ``deepspeed.initialize``."""
    import deepspeed

    from deepspeed_pulse import LayerSpec, spec

    inputs, labels = toy_batch(0, 0, 0)
    lacking = next(without("c"))
    cases: dict[str, Case] = {
        "no LOCAL_RANK": without_local_rank,
        "misspelt key": lambda: module({"wavs": 1}),
        "never popped": lambda: module(layers=layers_with(9, LayerSpec(nn.Linear, WIDTH, 3))),
        "no world of that size": lambda: module(stages=3),
        "no stages": lambda: module(stages=None),
        "zero stages": lambda: module(stages=0),
        **auto_cases(paths),
        "topology of another world": lambda: module(stages=None, topology=topology(pipe=2, data=2)),
        "an optimizer without a compiler": uncompiled,
        "tensor-parallel topology": lambda: module(stages=None, topology=topology(pipe=1, model=2)),
        "block is a word": lambda: module(config={**CONFIG, "pulse": "on"}),
        "zero waves": lambda: module({"waves": 0}),
        "unknown placement": lambda: module({"placement": "ring"}),
        "no time": lambda: module({"timeout_seconds": 0}),
        "popped before it is stashed": lambda: module(
            layers=layers_with(0, LayerSpec(nn.Linear, WIDTH, WIDTH, pop=("s2", "t")))
        ),
        "stashed twice": lambda: module(layers=layers_with(3, LayerSpec(DownTime, pop="temb", stash="s2"))),
        "popped twice": lambda: module(layers=layers_with(4, LayerSpec(nn.Identity, pop=("c", "c")))),
        "empty name": lambda: LayerSpec(nn.Identity, pop=""),
        "negative interval": lambda: module(activation_checkpoint_interval=-1),
        "reentrant in the tuple": lambda: module(
            {"enabled": False}, activation_checkpoint_func=deepspeed.checkpointing.checkpoint
        ),
        "an adapter that no layer has": lambda: module(layers=patched_layers()),
        "no layers": lambda: module(layers=[]),
        "one layer": lambda: module(layers=[LayerSpec(nn.Linear, 2, 2)]),
        "three layers in a wave": lambda: module(
            {"placement": "wave"}, layers=[LayerSpec(nn.Linear, 2, 2) for _ in range(3)]
        ),
        "spec of no function": lambda: spec(3),
        "unknown method": lambda: module(partition_method="perfect"),
        "method without match": lambda: module(partition_method="type:transformer"),
        "cut at no layer": lambda: module(partition_method=["stem", 2, 3]),
        "too few cuts": lambda: module(partition_method=[2, 3]),
        "cuts backwards": lambda: module(partition_method=[5, 3, 7]),
        "too little memory": lambda: module({"memory_gb": 1e-6}),
        "schedule of another placement": lambda: module({"schedule": "1f1b", "placement": "wave"}),
        "example without entry": lambda: module(example_batch=lacking),
        "example with a stashed name": lambda: module(example_batch=({**inputs, "s1": labels}, labels)),
        "example is no pair": lambda: module(example_batch=inputs),
        "example of another width": lambda: module(example_batch=({**inputs, "hidden": torch.zeros(2, 3)}, labels)),
        "wrong count in the example": lambda: module(layers=wrong_count(), example_batch=(inputs, labels)),
        "config of no batch size": lambda: module(config={"pulse": True}),
        **{f"config {name}": lambda name=name: module(config=paths[name]) for name in ("missing", "broken", "a list")},
        **{
            f"plan {name}": lambda name=name: module({"plan": paths[f"plan {name}"]})
            for name in (
                "missing",
                "truncated",
                "of another format",
                "of another model",
                "with unknown routes",
                "in deadlock",
                "without weights' halves",
                "of other ranks",
                "of other replicas",
                "of other microbatches",
            )
        },
        "profile missing": lambda: module({"profile": paths["missing"]}),
        "profile of other layers": lambda: module({"profile": paths["profile of other layers"]}),
        "profile of other widths": lambda: module({"profile": paths["profile of other widths"]}),
        "profile of other values": lambda: module({"profile": paths["profile of other values"]}),
        "cluster missing": lambda: module({"cluster": paths["missing"]}),
        "cluster too small": lambda: module({"cluster": paths["cluster too small"]}),
        "zero 2": lambda: engine(config=config_with(zero_optimization={"stage": 2})),
        "zero 3": lambda: engine(config=config_with(zero_optimization={"stage": 3})),
        "fp16": on_a_device_without_fp16,
        "batches cast to fp16": lambda: engine(config=config_with(fp16={"enabled": True, "auto_cast": True})),
        "autocast": lambda: engine(config=config_with(torch_autocast={"enabled": True, "dtype": "bfloat16"})),
        "a breakdown that is never printed": lambda: engine(
            config={**config_with(wall_clock_breakdown=True), "steps_per_print": None}
        ),
        "a profiler that is never printed": lambda: engine(
            config={**config_with(flops_profiler={"enabled": True}), "steps_per_print": None}
        ),
        "tensor parallel": lambda: engine(config=config_with(tensor_parallel={"autotp_size": 2})),
        "sequence parallel": lambda: engine(config=config_with(sequence_parallel_size=2)),
        "dropped tokens": lambda: engine(config=config_with(data_efficiency=DROPPED_TOKENS)),
        "a curriculum of samples": with_a_curriculum,
        "weights stepped within a backward": lambda: engine(
            config=config_with(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {}})
        ),
        "elastic checkpoints": lambda: engine(
            config=config_with(
                zero_optimization={"stage": 1, "elastic_checkpoint": True}, zero_allow_untested_optimizer=True
            )
        ),
        "storage of each host": lambda: engine(config=config_with(checkpoint={"use_node_local_storage": True})),
        "storage of each host without pulse": lambda: engine(
            config=config_with({"enabled": False}, checkpoint={"use_node_local_storage": True})
        ),
        "unequal halves": unequal_halves,
        "groups that a schedule has not counted": counted_groups,
        "another interval in the config": lambda: engine(
            initialize=config_with(pipeline={"activation_checkpoint_interval": 1})
        ),
        "another block": lambda: engine(initialize=config_with({"waves": 2})),
        "no block": lambda: engine(initialize=CONFIG),
        **late_cases(),
    }
    run_cases(cases)


# -- data ------------------------------------------------------------------------------------


def replaced_instruction() -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import ForwardPass

    before = PipelineEngine._INSTRUCTION_MAP[ForwardPass]
    PipelineEngine._INSTRUCTION_MAP[ForwardPass] = lambda self, buffer_id: None
    try:
        engine().train_batch(batches())
    finally:
        PipelineEngine._INSTRUCTION_MAP[ForwardPass] = before


def noise_by_rank() -> Iterator[Any]:
    for inputs, labels in batches():
        yield {**inputs, "c": (inputs["c"] + rank()) % 5}, labels


def labels_by_rank() -> Iterator[Any]:
    return ((inputs, labels + rank()) for inputs, labels in batches())


def broken_on_last() -> Iterator[Any]:
    if rank() == 1:
        raise KeyError("sample 17")
    yield from batches()


def empty_on_last() -> Iterator[Any]:
    return batches(count=0 if rank() == 1 else None)


def second_step(data: Iterator[Any] | None) -> None:
    made = engine()
    made.train_batch(batches())
    made.train_batch(data)


def only_reader(data: Callable[[], Iterator[Any]]) -> None:
    """Only the first rank has data, for each epoch anew; the other is told what comes of it, and goes on."""
    from deepspeed_pulse.errors import BatchError

    made = engine()
    ended = []
    for _ in range(2):
        found = data() if made.is_first_stage() else None
        try:
            for _ in range(2):
                made.train_batch(found)
        except (StopIteration, BatchError) as problem:
            ended.append(f"{type(problem).__name__} {problem}")
    assert made.global_steps == 2, made.global_steps
    raise RuntimeError("; ".join(ended))


def without_optimizer() -> Any:
    import deepspeed

    made = deepspeed.initialize(model=module(), config=config_with())[0]
    made.eval_batch(batches())  # which needs none
    return made


def loader_on_one() -> None:
    """As upstream, which ignores it in the middle; here the first rank reads for the other."""
    made = engine()
    made.set_dataloader(list(batches(count=2)) if made.is_first_stage() else None)
    made.train_batch()
    raise RuntimeError("trained")


def broken_off() -> None:
    """A step that fails in its midst leaves no gradient to the next one, which trains as if it were the first."""
    from deepspeed_pulse.errors import BatchError

    def trained(after: Iterator[Any] | None) -> list[torch.Tensor]:
        made = engine({"placement": "linear"})
        try:
            made.train_batch(after or batches())
        except BatchError:
            made.train_batch(batches())
        return [p.detach().clone() for p in made.module.parameters()]

    assert all(map(torch.equal, trained(labels_by_rank()), trained(None)))
    raise RuntimeError("the same")


def breaking(sound: int) -> Iterator[Any]:
    yield from batches(count=sound)
    raise KeyError("sample 17")


def no_data_now() -> None:
    made = engine()
    made.train_batch(batches())
    made.data_iterator = None
    made.train_batch(None)


def no_data_on_one_rank(*, evaluates: bool = False) -> None:
    """The second rank has an iterator in the first step of a kind and none in the next."""
    made = engine()
    for step in range(2):
        given = batches(step) if step == 0 or rank() == 0 else None
        made.data_iterator = given
        (made.eval_batch if evaluates else made.train_batch)(given)


def frozen_from_step(step: int, freezes: Callable[[str], bool], *, evaluates: bool = False, **arguments: Any) -> None:
    """From a step on, the parameters of such names are frozen on this rank."""
    made = engine(**arguments)
    for number in range(step + 1):
        for name, parameter in made.module.named_parameters():
            parameter.requires_grad_(number < step or not freezes(name))
        if evaluates:
            made.eval_batch(batches())
        made.train_batch(batches())


def stepped_but_not_there() -> None:
    """One rank's optimizer is given a parameter that its module did not have."""
    made = engine()
    made.train_batch(batches())
    if rank():
        made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    made.train_batch(batches())


def with_averages(act: Callable[[Any, Any], Any], averages: Callable[[Any], Any]) -> None:
    from deepspeed_pulse.models import to_layers

    inputs = torch.zeros(2, WIDTH)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers = to_layers(model, example_batch=inputs)
    made = engine({"placement": "linear"}, layers=layers, loss_fn=nn.functional.mse_loss)
    made.train_batch(iter([(inputs, inputs)] * MICROBATCHES))
    act(made, averages(made))


def on_one_rank(made: Any) -> Any:
    from deepspeed_pulse.models import EMA

    return None if rank() else EMA(made)


def of_diffusers(made: Any) -> Any:
    from diffusers.training_utils import EMAModel

    return EMAModel(list(made.module.parameters()))


def saved_with(made: Any, ema: Any) -> None:
    made.save_checkpoint(tempfile.mkdtemp(), tag="one", ema=ema)


def gathered_with(made: Any, ema: Any) -> None:
    from deepspeed_pulse.models import gather_model

    gather_model(made, ema=ema)


def wider(sizes: tuple[int, ...]) -> Iterator[Any]:
    return (toy_batch(1, m, 0, size) for m, size in enumerate(sizes))


def resized(plan: str) -> None:
    made = engine({"plan": plan})
    made.train_batch(batches())
    made.set_train_batch_size(2 * MICROBATCHES * 2)


def still_trains(plan: str) -> None:
    """After the refusal the engine is as before."""
    from deepspeed_pulse.errors import ConfigError

    made = engine({"plan": plan})
    try:
        made.set_train_batch_size(2 * MICROBATCHES * 2)
    except ConfigError:
        assert (made.micro_batches, made.train_batch_size()) == (MICROBATCHES, 2 * MICROBATCHES)
        made.train_batch(batches())
        raise RuntimeError("trained") from None


def mended_batch() -> None:
    """After a batch was refused a good one trains."""
    from deepspeed_pulse.errors import BatchError

    made = engine()
    try:
        made.train_batch(without("c"))
    except BatchError:
        made.train_batch(batches())
        raise RuntimeError("trained") from None


def number_without_data() -> None:
    """A layer of rank 1 reads a number; only the first rank is given data."""
    made = engine(layers=scalar_layers(), input="latents.noisy")
    made.train_batch((nested_batch(0, m, 0) for m in itertools.count()) if made.is_first_stage() else None)


def relayed_number() -> None:
    made = engine({"enabled": False}, layers=scalar_layers(), input="latents.noisy", stages=2)
    made.data_iterator = (nested_batch(0, m, 0) for m in itertools.count())
    made._next_batch()


def with_batch_fn(function: Any) -> Any:
    made = engine()
    made.set_batch_fn(function)
    return made


def without_gradients() -> None:
    with torch.no_grad():
        engine().train_batch(batches())


def buckets(data: Iterator[Any]) -> None:
    """Only the first rank has data; the other is told."""
    made = engine(dynamic_shape=True)
    for _ in range(2):
        made.train_batch(data if made.is_first_stage() else None)


def first_steps(plan: str) -> None:
    """Two ranks; errors in ``train_batch`` that every rank finds or is told of."""
    given = rank() != 0
    cases: dict[str, Case] = {
        "an instruction that never runs": replaced_instruction,
        "entry missing": lambda: engine().train_batch(without("c")),
        "entry with a stashed name": lambda: engine().train_batch(with_entry("s1")),
        "no pair": lambda: engine().train_batch(iter([torch.zeros(2, WIDTH)] * 2)),
        "no dict": lambda: engine().train_batch(iter([(torch.zeros(2, WIDTH), torch.zeros(2, 3))] * 2)),
        "empty dict": lambda: engine().train_batch(iter([({}, torch.zeros(2, 3))] * 2)),
        "input is a number": lambda: engine().train_batch(iter([({**toy_batch(0, 0, 0)[0], "hidden": 1}, None)] * 2)),
        "no data on the first rank": lambda: engine().train_batch(batches() if given else None),
        "no data": lambda: engine().train_batch(),
        "loader broken on one rank": lambda: engine().train_batch(broken_on_last()),
        "loader empty on one rank": lambda: engine().train_batch(empty_on_last()),
        "a number for a rank without data": number_without_data,
        "a number in the tuple": relayed_number,
        "all frozen": lambda: frozen_engine().train_batch(batches()),
        "noise by rank": lambda: engine().train_batch(noise_by_rank()),
        "labels by rank": lambda: engine({"placement": "linear"}).train_batch(labels_by_rank()),
        "another shape in step 2": lambda: second_step(wider((3, 3))),
        "no data in step 2": no_data_now,
        "no data on one rank in step 2": no_data_on_one_rank,
        "no data on one rank in evaluation 2": lambda: no_data_on_one_rank(evaluates=True),
        "all frozen in step 2": lambda: frozen_from_step(1, lambda _: True),
        "all frozen after an evaluation": lambda: frozen_from_step(1, lambda _: True, evaluates=True),
        "a parameter that is none of the module's": stepped_but_not_there,
        "averages saved on one rank": lambda: with_averages(saved_with, on_one_rank),
        "averages gathered on one rank": lambda: with_averages(gathered_with, on_one_rank),
        "averages of diffusers saved": lambda: with_averages(saved_with, of_diffusers),
        "averages of diffusers gathered": lambda: with_averages(gathered_with, of_diffusers),
        "frozen on one replica": lambda: frozen_from_step(1, lambda name: given and name.startswith("3."), stages=1),
        "frozen on one replica from the start": lambda: frozen_from_step(0, lambda _: given, stages=1),
        "a tied copy frozen on one rank": lambda: frozen_from_step(
            1, lambda name: given and "square" in name, pulse={"placement": "wave"}
        ),
        "other microbatches than the plan": lambda: resized(plan),
        "refused, then trains": lambda: still_trains(plan),
        "batch refused, then trains": mended_batch,
        "a view of what is changed": lambda: engine(layers=changed_view()).train_batch(batches()),
        "a view of what is changed, linear": lambda: engine({"placement": "linear"}, layers=changed_view()).train_batch(
            batches()
        ),
        **{
            f"a weight that every forward changes, recomputed, {way}": partial(recomputes_decaying, pulse)
            for way, pulse in (("on", {"placement": "linear"}), ("off", {"enabled": False}))
        },
        "a weight that every forward changes": lambda: engine({"placement": "linear"}, layers=decaying()).train_batch(
            batches()
        ),
        "batch size that is no multiple": lambda: engine().set_train_batch_size(3),
        "batch size of nothing": lambda: engine().set_train_batch_size(0),
        "a list for an iterator": lambda: engine().train_batch([toy_batch(0, 0, 0)] * 2),
        "input of another name": lambda: engine(input="latents").train_batch(batches()),
        "batch function broken": lambda: with_batch_fn(lambda batch: batch["hidden"]).train_batch(batches()),
        "training without gradients": without_gradients,
        "backward by hand": lambda: engine().backward(torch.ones(1, requires_grad=True)),
        "step by hand": lambda: engine().step(),
        "evaluation by another reduction": lambda: engine().eval_batch(batches(), reduce_output="sum"),
        "list of losses for every rank": lambda: engine().eval_batch(batches(), reduce_output=None),
        "evaluation of no microbatches": lambda: engine().eval_batch(batches(), num_micro_batches=0),
        "evaluation without data": lambda: engine().eval_batch(None),
        "relayed evaluation of no microbatches": lambda: engine({"enabled": False}).eval_batch(
            batches(), num_micro_batches=-1
        ),
        "evaluation of other microbatches": lambda: engine({"plan": plan}).eval_batch(batches(), num_micro_batches=5),
        "data over in a step of changing shapes": lambda: buckets(batches(count=1)),
        "data over before a step of changing shapes": lambda: buckets(batches(count=2)),
        "no optimizer": lambda: without_optimizer().train_batch(batches()),
        "weights of a part": lambda: engine().save_16bit_model("out"),
        "state of a part": lambda: engine().module_state_dict(),
        "a loader on one rank": loader_on_one,
        "broken off, then trains": broken_off,
        "data over before step 2": lambda: second_step(batches(count=0)),
        "data over on the only rank that reads": lambda: only_reader(lambda: batches(count=2)),
        "loader broken in step 2 on the only rank that reads": lambda: only_reader(lambda: breaking(2)),
    }
    run_cases(cases)


def frozen(layers: list[Any]) -> list[Any]:
    found = []
    for layer in layers:
        built = layer.build().requires_grad_(False)
        from deepspeed_pulse import spec

        forward_fn = getattr(layer, "forward_fn", None)
        function = built if forward_fn is None else (lambda *x, f=forward_fn, b=built: f(b, *x))
        found.append(spec(function, stash=layer.stash, pop=layer.pop))
    return found


def frozen_engine() -> Any:
    import deepspeed

    made = module(layers=frozen(toy_layers()))
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    return deepspeed.initialize(model=made, optimizer=optimizer, config=config_with())[0]


def broken() -> Iterator[Any]:
    raise OSError("shard 3 cannot be read")
    yield


def double_labels() -> Iterator[Any]:
    return ((inputs, labels.double()) for inputs, labels in batches())


def wide_entries() -> Iterator[Any]:
    return (({**inputs, "t": torch.zeros(2, 3)}, labels) for inputs, labels in batches())


def by_class(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Wants whole numbers, and is given none."""
    return nn.functional.nll_loss(output, labels[:, 0])


def two_losses(output: torch.Tensor, labels: torch.Tensor) -> Any:
    return loss_fn(output, labels), output.mean()


def in_a_step(_: Any) -> None:
    """One rank; errors in the middle of a step, where other ranks could only be told by a silence."""
    from deepspeed_pulse import spec

    def step_of(data: Any = None, **arguments: Any) -> Any:
        return engine(stages=1, **arguments).train_batch(data or batches())

    def evaluation_of(**arguments: Any) -> Any:
        return engine(stages=1, **arguments).eval_batch(batches())

    cases: dict[str, Case] = {
        "wrong count": lambda: step_of(layers=wrong_count()),
        "no loss": lambda: step_of(loss_fn=None),
        "two losses": lambda: step_of(loss_fn=two_losses),
        "loss of no gradient": lambda: step_of(loss_fn=lambda output, labels: loss_fn(output.detach(), labels)),
        "data ends in the step": lambda: step_of(batches(count=1)),
        "another shape in the step": lambda: step_of(wider((2, 3))),
        "an entry missing later": lambda: step_of(itertools.chain(batches(count=1), without("c"))),
        "loader broken in the step": lambda: step_of(itertools.chain(batches(count=1), broken())),
        "another dtype in the step": lambda: step_of(itertools.chain(batches(count=1), double_labels())),
        "labels of a dtype the loss refuses": lambda: step_of(loss_fn=by_class),
        "no labels": lambda: step_of((inputs, None) for inputs, _ in batches()),
        "an entry of another width": lambda: step_of(wide_entries()),
        "a word for a hidden state": lambda: step_of(layers=layers_with(5, lambda x: "word")),
        "a word for a stashed value": lambda: step_of(layers=layers_with(3, spec(lambda x: (x, "word"), stash="s3"))),
        "several losses for every rank": lambda: evaluation_of(loss_fn=two_losses),
        "outputs for every rank": lambda: evaluation_of(loss_fn=None),
    }
    run_cases(cases)


# -- failures --------------------------------------------------------------------------------


class Failing(DownTime):
    """Does something bad in its third forward: the first microbatch of step 2; none of it where data is at fault."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count = how, 0

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> Any:  # type: ignore[override]
        self.count += 1
        if self.count == MICROBATCHES + 1 and self.how not in ("data", "loader"):
            print("FAILING", os.getpid(), flush=True)
            if self.how == "exception":
                raise ValueError("the layer had enough")
            if self.how == "stop":
                wait_until_told()
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        return super().forward(x, temb)


def wait_until_told() -> None:
    """Until this rank's watchdog has told the others where it is, from now on."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, key, now = _get_default_store().clone(), f"deepspeed_pulse/whereabouts/{rank()}", time.time()
    while not store.check([key]) or json.loads(store.get(key))["at"] <= now:
        time.sleep(0.05)


def fail(case: dict[str, Any]) -> None:
    """Train 4 steps on 3 ranks; in step 2 one goes bad (``case["how"]``: exception, kill, stop), or the data.

    The data ends there on every rank ("data"), or the loader of the last rank fails ("loader").
    """
    from deepspeed_pulse import LayerSpec

    torch.set_num_threads(1)
    os.write(1, f"PID {os.getpid()}\n".encode())  # one write: lines of ranks do not mix
    bad = LayerSpec(Failing, case["how"], pop="temb", stash="s2", layer_name="moody")
    pulse = {"timeout_seconds": case["timeout_seconds"], "placement": "wave"}  # where each rank waits is known
    made = engine(pulse, layers=layers_with(2, bad), stages=3)
    for step in range(4):
        ends = step == 1 and (case["how"] == "data" or (case["how"] == "loader" and rank() == 2))
        data = batches(step, 1 if ends else None)
        made.train_batch(itertools.chain(data, broken()) if ends and case["how"] == "loader" else data)
        print("STEP", step, flush=True)


if __name__ == "__main__":
    fail(json.loads(sys.argv[-1]))
