"""Users' mistakes in arguments, layer lists, paths and optimizers, each refused alike on every rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from support.bad_ranks import Case, batches, config_with, engine, layers_with, module, rank, run_cases
from support.optimizers import Adapting, Exchanging
from support.toy import WIDTH, toy_batch
from torch import nn


def names() -> dict[str, Case]:
    """Of values and of layers."""
    from deepspeed_pulse import LayerSpec, TiedLayerSpec, spec

    odd: dict[str, Any] = {"None": None, "a number": 3, "a set": {"a", "b"}, "a list of numbers": [1], "bytes": b"x"}
    return {
        **{f"pop is {what}": lambda value=value: spec(nn.Identity(), pop=value) for what, value in odd.items()},
        **{f"stash is {what}": lambda value=value: LayerSpec(nn.Identity, stash=value) for what, value in odd.items()},
        "tied pop is None": lambda: TiedLayerSpec("key", nn.Linear, 2, 2, pop=None),
        "name is a number": lambda: spec(nn.Identity(), name=3),
        "layer_name is empty": lambda: LayerSpec(nn.Identity, layer_name=""),
        "LayerSpec of a number": lambda: LayerSpec(3),
        "LayerSpec of a module": lambda: LayerSpec(nn.Linear(2, 2)),
        "spec of a class": lambda: spec(nn.Linear),
        "tied key is None": lambda: TiedLayerSpec(None, nn.Linear, 2, 2),
        "forward_fn is a number": lambda: TiedLayerSpec("key", nn.Linear, 2, 2, forward_fn=3),
    }


def layer_lists() -> dict[str, Case]:
    from deepspeed_pulse import LayerSpec

    lists: dict[str, Any] = {
        "a number": 3,
        "a word": "layers",
        "a dict": {"a": nn.Identity()},
        "one module": nn.Linear(2, 2),
        "of None": [None] * 8,
        "of numbers": [1] * 8,
        "of classes": [nn.Identity] * 8,
        "a dict of modules": nn.ModuleDict({"a": nn.Identity()}),
        "with one None": layers_with(5, None),
        "of no arguments": [LayerSpec(nn.Linear) for _ in range(8)],
    }
    return {f"layers {what}": lambda value=value: module(layers=value) for what, value in lists.items()}


def arguments() -> dict[str, Case]:
    """Of another kind than ``PipelineModule`` takes."""
    from deepspeed_pulse import FrozenSpec

    example = toy_batch(0, 0, 0)
    cases: dict[str, Case] = {}
    wrong: dict[str, list[Any]] = {
        "loss_fn": [3, "mse"],
        "input": [3, None, ""],
        "frozen": [3, ["c"], {"c": 3}, {3: FrozenSpec([nn.Identity()], input="c")}],
        "example_batch": [3, "batch", {}],
        "seed_layers": ["yes", 1.5],
        "base_seed": ["seed", None, 1.5],
        "seed_fn": [3],
        "dynamic_shape": ["yes"],
        "activation_checkpoint_interval": [-1, "two", 1.5, True],
        "activation_checkpoint_func": [3],
        "checkpointable_layers": ["Middle", 3, [3]],
        "topology": [3],
        "partition_method": [3, {"a": 1}, [1.5, 3.0, 5.0], [True, 3, 5], [-3, 2, 5], [2, 2, 5], [2, 5, 99]],
    }
    for name, values in wrong.items():
        for value in values:
            cases[f"{name} is {value!r}"[:60]] = lambda name=name, value=value: module(**{name: value})
    cuts = {"at no layer": [2, "nowhere", 5], "of None": [None, 2, 5], "at the end": [2, 5, 10], "at the start": [0, 2]}
    cases.update({f"cuts {what}": lambda cuts=cuts: module(partition_method=cuts) for what, cuts in cuts.items()})
    cases["cuts of floats without pulse"] = lambda: module({"enabled": False}, partition_method=[4.0])
    cases["cuts out of range without pulse"] = lambda: module({"enabled": False}, partition_method=[10])
    for given in (0, -1, True, 1.5, "two", [2]):
        cases[f"num_stages is {given!r}"] = lambda given=given: module(stages=given)
        cases[f"num_stages is {given!r} without pulse"] = lambda given=given: module({"enabled": False}, stages=given)
    for what, part in {
        "of a number": FrozenSpec(3, input="c"),
        "of nothing": FrozenSpec([], input="c"),
        "reading a number": FrozenSpec([nn.Identity()], input=3),
        "of a dtype in words": FrozenSpec([nn.Identity()], input="c", dtype="float16"),
        "on ranks in words": FrozenSpec([nn.Identity()], input="c", ranks="both"),
    }.items():
        cases[f"frozen part {what}"] = lambda part=part: module(frozen={"c": part}, example_batch=example)
    return cases


def configs(folder: Path) -> dict[str, Case]:
    """What is no config, numbers that are none, and paths of every wrong kind."""
    cases: dict[str, Case] = {
        f"config is {what}": lambda value=value: module(config=value)
        for what, value in {
            "a list": [1],
            "a number": 3,
            "True": True,
            "bytes": b"ds.json",
            "empty": "",
            "a folder": str(folder),
            "binary": str(folder / "binary"),
            "nested for ever": str(folder / "nested.json"),
        }.items()
    }
    for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"):
        for value in ("2", 2.5, 0, -2, [2], True):
            keys = {**config_with(), key: value}
            cases[f"{key} is {value!r}"] = lambda keys=keys: module(config=keys)
    paths = {
        "a folder": str(folder),
        "binary": str(folder / "binary"),
        "missing": str(folder / "missing.json"),
        "below a file": str(folder / "binary" / "x"),
        "no path": "a\0b",
    }
    for key in ("plan", "profile", "cluster"):
        for what, path in paths.items():
            cases[f"{key} is {what}"] = lambda key=key, path=path: module({key: path})
        for value in (3, "", ["a"], True):
            cases[f"{key} is {value!r}"] = lambda key=key, value=value: module({key: value})
    caches = {"a file": str(folder / "binary"), "below a file": paths["below a file"], "no path": "a\0b"}
    caches["beyond reach"] = "/proc/nowhere/plans"
    for what, path in caches.items():
        cases[f"plan_cache is {what}"] = lambda path=path: module({"plan_cache": path})
    for value in (3, "", True):
        cases[f"plan_cache is {value!r}"] = lambda value=value: module({"plan_cache": value})
        cases[f"trace is {value!r}"] = lambda value=value: module({"trace": value})
    return cases


# -- optimizers ------------------------------------------------------------------------------


def initialized(made: Any, pulse: Any = None, **arguments: Any) -> Any:
    import deepspeed

    return deepspeed.initialize(model=made, config=config_with(pulse), **arguments)[0]


def sgd(*groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for group in groups for p in group], lr=0.1)


def foreign() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


def optimizers() -> dict[str, Case]:
    def on_rank_1(made: Any) -> Any:
        return sgd(made.parameters(), foreign() if made.stage_id == 1 else [])

    def of_rank_0(made: Any) -> Any:
        return Adapting([{"params": [] if rank() else list(made.parameters())}], fsdp_in_use=True)

    def waiting_for_losses(pulse: Any = None) -> Any:
        made = module(pulse)
        return initialized(made, pulse, optimizer=sgd, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)

    def with_all(make: Any) -> Any:
        made = module()
        return initialized(made, optimizer=make(made))

    return {
        "optimizer over foreign parameters": lambda: with_all(lambda made: sgd(foreign())),
        "optimizer over some foreign parameters": lambda: with_all(lambda made: sgd(made.parameters(), foreign())),
        "optimizer over foreign parameters on one rank": lambda: with_all(on_rank_1),
        "optimizer factory over foreign parameters": lambda: with_all(lambda made: lambda _: sgd(foreign())),
        "foreign model_parameters": lambda: initialized(
            module(), model_parameters=foreign(), optimizer=lambda given: sgd(given)
        ),
        "optimizer is a number": lambda: with_all(lambda made: 3),
        "optimizer that exchanges weights": lambda: with_all(lambda made: Exchanging(made.parameters())),
        "optimizer that sums an estimate of nothing": lambda: with_all(of_rank_0),
        "schedule of losses": waiting_for_losses,
        "schedule of losses without pulse": lambda: waiting_for_losses({"enabled": False}),
    }


# -- what layers hand on ---------------------------------------------------------------------

HANDED: dict[str, Any] = {
    "None": None,
    "a number": 2.5,
    "a word": "word",
    "an empty tuple": (),
    "a nested tuple": (torch.ones(2), (torch.ones(2),)),
    "a tuple with None": (torch.ones(2), None),
    "a dict": {"x": torch.ones(2)},
    "a list of numbers": [1, 2],
}


class Hands(nn.Linear):
    """Stashes ``value`` beside its output, or gives it in place of the output."""

    def __init__(self, value: Any, stashes: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.value, self.stashes = value, stashes

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return (super().forward(x), self.value) if self.stashes else self.value


class Ignores(nn.Linear):
    def forward(self, x: Any, value: Any = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x if isinstance(x, torch.Tensor) else torch.ones(2, WIDTH))


def handing(value: Any, stashes: bool) -> list[Any]:
    """Four layers; the second hands the value on, the third reads it."""
    from deepspeed_pulse import LayerSpec

    names = {"stash": "odd"} if stashes else {}
    reads = {"pop": "odd"} if stashes else {}
    return [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(Hands, value, stashes, layer_name="odd_one", **names),
        LayerSpec(Ignores, WIDTH, WIDTH, **reads),
        LayerSpec(nn.Linear, WIDTH, 3),
    ]


def handed_on(_: Any) -> None:
    """One rank; the cut lies before, between and behind the two layers, and both are recomputed."""
    cases: dict[str, Case] = {}
    ways = {"cut between": ([2], 0), "cut before": ([1], 0), "cut behind": ([3], 0), "recomputed": ([1], 1)}
    for stashes, (way, (cuts, interval)) in itertools.product((True, False), ways.items()):
        made = engine(
            {"placement": "wave"},
            layers=handing(None, stashes),
            stages=1,
            partition_method=cuts,
            activation_checkpoint_interval=interval,
        )
        hands = next(layer for layer in made.module.modules() if isinstance(layer, Hands))
        for what, value in HANDED.items():

            def act(made: Any = made, hands: Hands = hands, value: Any = value) -> None:
                hands.value = value
                made.train_batch(batches())

            cases[f"{'stash' if stashes else 'hidden state'} is {what}, {way}"] = act
    cases["measured on an example"] = lambda: module(
        layers=handing(None, True), stages=1, example_batch=toy_batch(0, 0, 0)
    )
    run_cases(cases)


# -- entry points ----------------------------------------------------------------------------


def write_files(folder: Path) -> None:
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "nested.json").write_text("[" * 100_000)


def mistakes(folder: str) -> None:
    """Two ranks; every case is refused before the first step."""
    run_cases({**names(), **layer_lists(), **arguments(), **configs(Path(folder)), **optimizers()})


def accepted(folder: str) -> None:
    """What looks odd and is right, and a folder for a trace, which ends no run."""
    torch.set_num_threads(1)
    sequential = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3))
    for layers in (sequential, (layer for layer in sequential), tuple(sequential)):
        module(layers=layers)
    pulse = {"trace": folder, "plan_cache": f"{folder}/plans"}
    made = module(pulse)
    left_out = [p for name, p in made.named_parameters() if "bias" not in name]
    trained = initialized(made, pulse, optimizer=sgd(left_out))
    before = {name: p.clone() for name, p in made.named_parameters()}
    for step in range(4):
        trained.train_batch(batches(step))
    for name, parameter in made.named_parameters():
        assert torch.equal(before[name], parameter) == ("bias" in name), name
    made = module()
    trained = initialized(made, optimizer=Adapting(made.parameters()))
    for step in range(2):
        with torch.autocast("cpu", torch.float16):
            trained.train_batch(batches(step))
    print("ACCEPTED", flush=True)
