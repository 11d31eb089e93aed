"""What ranks run in the tests of self-conditioning: a pipeline, and one process that draws the same microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import backbone_apart_ranks as apart
from support.cases import run_each
from support.frozen_ranks import WIDTH, Mix, encoded, frozen_parts, raw_batch
from support.parity import run_sharing, share_groups
from support.reference import BASE_SEED, Unpartitioned, error
from support.selfcond import ENTRY, batch_of, conditioned_layers, estimate, loss_of

from deepspeed_pulse.ir.carried import carried_actions
from deepspeed_pulse.ir.conditioning import drawn

STEPS = 3
TOLERANCE = 1e-5
RATE, MOMENTUM = 0.05, 0.9


def frozen_layers() -> list[Any]:
    """Eight layers behind encoders, one of which makes the input that estimates have the form of."""
    from deepspeed_pulse import LayerSpec

    pops: list[Any] = [(ENTRY,), ("text",), (), ("text",), (ENTRY,), (), (), ()]
    return [LayerSpec(Mix, WIDTH, pop=pop) for pop in pops]


def frozen_batch(step: int, microbatch: int, replica: int) -> Any:
    return raw_batch(step, microbatch, replica)


def frozen_estimate(output: torch.Tensor, entries: Any) -> torch.Tensor:
    return entries["sample"] - entries["scale"] * output


def model_of(case: dict[str, Any]) -> tuple[Callable[[], list[Any]], Callable[..., Any], Callable[..., Any], str]:
    """Layers, batch, estimate, and the name of the input."""
    if case.get("frozen"):
        return frozen_layers, frozen_batch, frozen_estimate, "sample"
    layers = partial(conditioned_layers, tuple(case.get("readers", (0,))), case.get("dropout", 0.0))
    return layers, batch_of, estimate, "hidden"


def probabilities(case: dict[str, Any]) -> dict[str | None, float]:
    """By name of the backbone; of one that is not self-conditioned there is none."""
    return dict(case["several"]) if "several" in case else {None: case.get("p", 0.5)}


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["M"],
        "gradient_clipping": case.get("clip", 0.0),
        "zero_optimization": {"stage": case.get("zero", 0)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        # halves where they are asked for: which are faster is told by times of a millisecond
        "pulse": {
            "solver_seconds": 0,
            "placement": case["placement"],
            "split_backward": False,
            **case.get("pulse", {}),
        },
    }


def engine_of(case: dict[str, Any]) -> Any:
    import deepspeed

    from deepspeed_pulse import Backbone, PipelineModule, SelfConditioning

    layers, batch, made, first = model_of(case)
    given: dict[str, Any] = {"loss_fn": loss_of, "layers": layers(), "input": first}
    chances = probabilities(case)
    conditioning: Any = {n: SelfConditioning(ENTRY, p, made) for n, p in chances.items() if p is not None}
    if "several" in case:
        lists = {name: conditioned_layers(()) if p is None else layers() for name, p in chances.items()}
        given = {"backbones": {name: Backbone(own, loss_fn=loss_of, input=first) for name, own in lists.items()}}
    else:
        conditioning = conditioning[None]
    if case.get("frozen"):
        given |= {"frozen": frozen_parts(), "example_batch": batch(0, 0, 0)}
    module = PipelineModule(
        num_stages=case["P"],
        seed_layers=True,
        config=config_of(case),
        activation_checkpoint_interval=case.get("interval", 0),
        self_conditioning=conditioning,
        **given,
    )
    optimizer = torch.optim.SGD(list(module.parameters()), lr=RATE, momentum=MOMENTUM)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config_of(case))
    return engine


def data(case: dict[str, Any], step: int, replica: int) -> Iterator[Any]:
    """Every backbone of several has data of its own."""
    _, batch, _, _ = model_of(case)
    for m in itertools.count():
        if "several" not in case:
            yield batch(step, m, replica)
        else:
            found = {name: batch(step + 100 * k, m, replica) for k, name in enumerate(probabilities(case))}
            yield tuple({name: pair[i] for name, pair in found.items()} for i in (0, 1))


def training_data(case: dict[str, Any], replica: int, first: int = 0) -> Iterator[Any]:
    """Of all steps, one after the other: frozen parts read a step ahead."""
    for step in itertools.count(first):
        yield from itertools.islice(data(case, step, replica), case["M"])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Of all ranks of the pipeline by name, on its first rank."""
    named = [(name, engine.module.full_precision(p).cpu()) for name, p in engine.module.named_parameters()]
    mine = {name: value.clone() for name, value in named if "placeholder" not in name}
    rows = engine.module.ranks.gather_to_first(mine) or []
    return {name: value for row in rows for name, value in row.items()}


class Alone:
    """One backbone in one process."""

    def __init__(self, case: dict[str, Any], name: str | None, start: int, initial: dict[str, torch.Tensor]) -> None:
        self.case, self.name, self.start = case, name, start
        layers, self.batch, self.estimate, self.first = model_of(case)
        self.model = Unpartitioned(conditioned_layers(()) if probabilities(case)[name] is None else layers())
        self.offset = 0 if name is None else 100 * list(probabilities(case)).index(name)
        self.p = probabilities(case)[name]
        with torch.no_grad():
            for own, value in self.model.named_parameters():
                value.copy_(initial[self.theirs(own)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)

    def theirs(self, own: str) -> str:
        """What the engine calls a parameter."""
        index, _, rest = own.partition(".")
        if rest == "weight" and index == "1" and not self.case.get("frozen"):
            return f"tied_modules.{'' if self.name is None else self.name + '/'}square.weight"
        return f"{int(index) + self.start}.{rest}"

    def loss(self, step: int, draw: int, replicas: int, *, seeded: bool) -> torch.Tensor:
        """The mean over microbatches and replicas; ``draw``: number of the step by which estimates are drawn."""
        M = self.case["M"]
        chosen = drawn(BASE_SEED, draw, M)[: round((self.p or 0.0) * M)]
        total = torch.zeros(())
        for replica, m in itertools.product(range(replicas), range(M)):
            inputs, labels = self.batch(step + self.offset, m, replica)
            if self.case.get("frozen"):
                inputs = {**inputs, **encoded(inputs)}
            number = draw * M + m if seeded else None
            value = torch.zeros_like(inputs[self.first])
            if m in chosen:
                with torch.no_grad():
                    before = None if number is None else -3 - number
                    output = self.model({**inputs, ENTRY: value}, self.first, before)
                    value = self.estimate(output, inputs)
            output = self.model({**inputs, ENTRY: value}, self.first, number)
            total = total + loss_of(output, labels) / (M * replicas)
        return total

    def train(self, step: int, replicas: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(step, step, replicas, seeded=not self.start and bool(self.case.get("dropout")))
        loss.backward()
        if self.case.get("clip"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case["clip"])
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, step: int, replicas: int) -> float:
        self.model.eval()
        found = float(self.loss(step, -1, replicas, seeded=False))
        self.model.train()
        return found


def trains_alike(case: dict[str, Any]) -> None:
    """Losses in training and evaluation, and weights, are those of one process."""
    engine = engine_of(case)
    module, replica, replicas = engine.module, engine.grid.data_parallel_id, engine.dp_world_size
    initial = weights(engine)
    names = list(probabilities(case))
    starts = [head.layers.start for head in module.job.heads]
    _check_plan(case, module.plan)
    alone = [Alone(case, n, s, initial) for n, s in zip(names, starts, strict=True)] if initial else []
    stream = training_data(case, replica)
    for step in range(STEPS):
        loss = float(engine.train_batch(stream))
        losses: dict[Any, float] = {None: loss}
        if module.has_several:
            losses = {name: float(value) for name, value in engine.losses.items()}
        for one in alone:
            expected = one.train(step, replicas)
            assert abs(losses[one.name] - expected) <= TOLERANCE * expected, (step, one.name, losses, expected)
        if step == 0:
            evaluated = [float(engine.eval_batch(data(case, 9, replica))) for _ in range(2)]
            assert evaluated[0] == evaluated[1]
            expected = sum(one.evaluate(9, replicas) for one in alone)
            assert not alone or abs(evaluated[0] - expected) <= TOLERANCE * expected, (evaluated, expected)
    found = weights(engine)
    for one in alone:
        for name, value in one.model.named_parameters():
            mine = found[one.theirs(name)]
            assert error(mine, value) < TOLERANCE, (one.name, name, error(mine, value))
    engine.destroy()


def trains_apart(case: dict[str, Any]) -> None:
    """The same of backbones that make steps of their own; evaluated in the midst."""
    engine = engine_of({**case, "pulse": {"backbone_steps": "each"}})
    assert carried_actions(engine.module.plan)
    replica, replicas, names = engine.grid.data_parallel_id, engine.dp_world_size, list(probabilities(case))
    initial, starts = weights(engine), [head.layers.start for head in engine.module.job.heads]
    alone = [Alone(case, n, s, initial) for n, s in zip(names, starts, strict=True)] if initial else []
    losses: dict[str, list[float]] = {str(name): [] for name in names}
    stream, evaluated = training_data(case, replica), 0.0
    for step in range(apart.STEPS):
        engine.train_batch(stream)
        apart.note(losses, engine)
        if step == 1:
            engine.finish_backbones()
            apart.note(losses, engine, step + 1)
            evaluated = float(engine.eval_batch(data(case, 9, replica)))
    engine.finish_backbones()
    apart.note(losses, engine)
    found = weights(engine)
    engine.destroy()
    for one in alone:
        for step, loss in enumerate(losses[str(one.name)]):
            expected = one.train(step, replicas)
            assert abs(loss - expected) <= TOLERANCE * expected, (step, one.name, losses, expected)
            evaluated -= one.evaluate(9, replicas) if step == 1 else 0.0
        for name, value in one.model.named_parameters():
            mine = found[one.theirs(name)]
            assert error(mine, value) < TOLERANCE, (one.name, name, error(mine, value))
    assert not alone or abs(evaluated) <= TOLERANCE, evaluated


def _check_plan(case: dict[str, Any], plan: Any) -> None:
    """It has as many extra forwards as were asked for, and halves where those were."""
    counts = [round(p * case["M"]) for p in probabilities(case).values() if p is not None]
    assert [len(one.microbatches) for one in plan.conditioning] == counts, plan.conditioning
    texts = "".join(str(action) for row in plan.schedule for action in row)
    assert ("E" in texts) == any(counts), texts
    assert ("I" in texts) == bool(case.get("pulse", {}).get("split_backward")), texts


def run_cases(cases: list[dict[str, Any]]) -> None:
    run_sharing(cases, lambda case: trains_apart(case) if case.get("apart") else trains_alike(case))


def resumes(arguments: dict[str, Any]) -> None:
    """Training goes on from a checkpoint under another plan and number of ranks, and draws what it would have."""
    run_sharing(arguments["cases"], lambda case: _resumes(case, Path(arguments["folder"])))


def _resumes(case: dict[str, Any], folder: Path) -> None:
    straight = engine_of(case)
    replica = straight.grid.data_parallel_id
    for step in range(2):
        straight.train_batch(data(case, step, replica))
    names = [str(folder / f"{case['P']}{case['placement']}{case['M']}")]
    torch.distributed.broadcast_object_list(names)
    straight.save_checkpoint(names[0])
    expected = [float(straight.train_batch(data(case, step, replica))) for step in (2, 3)]
    straight.destroy()
    other = engine_of({**case, **case["then"]})
    replica = other.grid.data_parallel_id
    other.load_checkpoint(names[0])
    found = [float(other.train_batch(data(case, step, replica))) for step in (2, 3)]
    other.destroy()
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= TOLERANCE * b, (found, expected)


def _refused(name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What an error says, and what of a right case is changed: arguments of a module, keys of its batches."""
    from deepspeed_pulse import SelfConditioning

    def one(**changes: Any) -> SelfConditioning:
        return SelfConditioning(**{"entry": ENTRY, "probability": 0.5, "estimate": estimate, **changes})

    cases: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "nobody pops it": ("expected an entry that a layer pops, found 'x_self_con'", one(entry="x_self_con"), {}),
        "stashed": ("which layer 0.Conditioned stashes; rename one of them", one(entry="temb"), {}),
        "probability": ("probability: expected a number from 0 to 1, found 1.5", one(probability=1.5), {}),
        "no probability": ("probability: expected a number from 0 to 1, found 'half'", one(probability="half"), {}),
        "no function": ("estimate: expected a function of output and entries, found 3", one(estimate=3), {}),
        "a dict": ("self_conditioning: expected a SelfConditioning, found a dict", {"base": one()}, {}),
        "a number": ("self_conditioning: expected a SelfConditioning, found float", 0.5, {}),
        "disabled": ('"pulse" block that is not disabled', one(), {"pulse": {"enabled": False}}),
        "shape": ("to return the shape of the first layer's input [2, 8], found [2]", one(estimate=_narrow), {}),
        "no tensor": ("expected a tensor from estimate(output, entries), found tuple", one(estimate=_pair), {}),
        "in the data": (
            "the batch has an entry 'x_self_cond', and layer (self-conditioning) stashes",
            one(),
            {"more": ENTRY},
        ),
        "tuple": ("expected one tensor as the first layer's input", one(), {"tuple": True}),
        "not all read": ("pipeline rank 1 was given none; pass data_iter on every rank", one(), {"first": True}),
    }
    told, conditioning, more = cases[name]
    return told, {"self_conditioning": conditioning}, more


REFUSED = (
    *("nobody pops it", "stashed", "probability", "no probability", "no function", "a dict", "a number", "disabled"),
    *("shape", "no tensor", "in the data", "tuple", "not all read"),
)


def _narrow(output: torch.Tensor, entries: Any) -> torch.Tensor:
    return output[:, 0]


def _pair(output: torch.Tensor, entries: Any) -> Any:
    return output, output


def _bad_data(more: dict[str, Any]) -> Iterator[Any]:
    for m in itertools.count():
        inputs, labels = batch_of(0, m)
        if more.get("tuple"):
            inputs = {**inputs, "hidden": (inputs["hidden"], inputs["hidden"])}
        yield {**inputs, **({more["more"]: inputs["hidden"]} if "more" in more else {})}, labels


def _refuses(name: str) -> None:
    """One clear error, the same on every rank."""
    import deepspeed

    from deepspeed_pulse import PipelineModule, PulseError

    told, given, more = _refused(name)
    config = config_of({"M": 2, "placement": "linear"})
    config["pulse"] = more.get("pulse", config["pulse"])
    try:
        module = PipelineModule(
            layers=conditioned_layers(), num_stages=2, loss_fn=loss_of, config=config, seed_layers=True, **given
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        reads = not more.get("first") or torch.distributed.get_rank() == 0
        engine.train_batch(_bad_data(more) if reads else None)
    except PulseError as problem:
        found = str(problem)
    else:
        raise AssertionError("nothing was refused")
    assert told in found, found
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, found)
    assert len(set(texts)) == 1, texts


def refuses(names: list[str]) -> None:
    from deepspeed import comm

    share_groups()
    comm.init_distributed(dist_backend="gloo", verbose=False)
    run_each(names, _refuses)
