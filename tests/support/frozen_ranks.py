"""What ranks run in the tests of frozen parts: a model that reads encoders, and the same with results in the data."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import run_each
from support.parity import TOLERANCE, share_groups
from support.reference import error
from torch import Tensor, nn

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.device import runs_at_once
from deepspeed_pulse.runtime.payload import tensors_in

WIDTH, SIZE = 8, 2


class Mix(nn.Module):
    """Adds what it pops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden) + sum(more))


class Noised(nn.Module):
    """A frozen layer that reads the batch and another part."""

    def forward(self, hidden: Tensor, noise: Tensor, text: Tensor) -> Tensor:
        return hidden + 0.1 * noise + text


class Split(nn.Module):
    """Hands on two tensors."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden * 2


class Joined(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] - 0.5 * pair[1].tanh()


def frozen_modules() -> dict[str, list[Any]]:
    torch.manual_seed(7)
    pixels = [nn.Linear(12, 24), nn.Dropout(0.5), nn.Linear(24, WIDTH), Split(), Joined(), Noised()]
    text = [nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)]
    for module in (*pixels, *text):
        module.requires_grad_(False)
    return {"sample": pixels, "text": text}


def frozen_parts() -> dict[str, Any]:
    from deepspeed_pulse import FrozenSpec, spec

    modules = frozen_modules()
    # a chain: no layer of the model reads the first of these
    return {
        "moments": FrozenSpec(modules["sample"][:-1], input="pixel_values"),
        "sample": FrozenSpec([spec(modules["sample"][-1], pop=("noise", "text"))], input="moments"),
        "text": FrozenSpec(modules["text"], input="ids"),
    }


def raw_batch(step: int, microbatch: int, replica: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + replica)
    inputs = {
        "pixel_values": torch.randn(SIZE, 12, generator=generator),
        "ids": torch.randint(20, (SIZE,), generator=generator),
        "noise": torch.randn(SIZE, WIDTH, generator=generator),
        "scale": torch.rand(SIZE, 1, generator=generator),
    }
    return inputs, torch.randn(SIZE, WIDTH, generator=generator)


@torch.no_grad()
def encoded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the parts give, in one go."""
    modules = frozen_modules()
    text: Any = inputs["ids"]
    for module in modules["text"]:
        text = module.eval()(text)
    sample: Any = inputs["pixel_values"]
    for module in modules["sample"][:-1]:
        sample = module.eval()(sample)
    return {"sample": modules["sample"][-1](sample, inputs["noise"], text), "text": text}


def encoded_batch(step: int, microbatch: int, replica: int) -> tuple[dict[str, Tensor], Tensor]:
    inputs, labels = raw_batch(step, microbatch, replica)
    return {**encoded(inputs), "scale": inputs["scale"]}, labels


def layers() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    found: list[Any] = [LayerSpec(Mix, WIDTH, stash=(), pop=("scale",))]
    found += [LayerSpec(Mix, WIDTH, pop=("text",) if index in (2, 7) else ()) for index in range(1, 10)]
    return found


def mse(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, labels)


def engine_of(ranks: int, microbatches: int, *, frozen: bool, **pulse: Any) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, **pulse},
    }
    module = PipelineModule(
        layers=layers(),
        num_stages=ranks,
        loss_fn=mse,
        seed_layers=True,
        config=config,
        input="sample",
        partition_method="uniform",
        example_batch=(raw_batch if frozen else encoded_batch)(0, 0, 0),
        frozen=frozen_parts() if frozen else None,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def data_from(engine: Any, first: int, *, frozen: bool) -> Iterator[Any]:
    batch, microbatches = raw_batch if frozen else encoded_batch, engine.micro_batches
    for step in itertools.count(first):
        for m in range(microbatches):
            yield batch(step, m, engine.grid.data_parallel_id)


def trains(arguments: dict[str, Any]) -> None:
    """Five steps with evaluation between and a resume in the middle, against encoded data."""
    share_groups()
    run_each(arguments["cases"], partial(train_case, Path(arguments["folder"])))


def train_case(folder: Path, case: dict[str, Any]) -> None:
    ranks, microbatches = case["P"], case["M"]
    engine = engine_of(ranks, microbatches, frozen=True, placement=case.get("placement", "wave"))
    twin = engine_of(ranks, microbatches, frozen=False, placement=case.get("placement", "wave"))
    data, plain = data_from(engine, 0, frozen=True), data_from(twin, 0, frozen=False)
    for step in range(5):
        if step == 3:
            tag = f"{ranks}-{microbatches}-{case.get('placement', 'wave')}"
            engine.save_checkpoint(str(folder), tag=tag)
            engine = engine_of(ranks, microbatches, frozen=True, placement=case.get("placement", "wave"))
            engine.load_checkpoint(str(folder), tag=tag)
            assert engine.microbatches_ahead == 0
            data = data_from(engine, step, frozen=True)
        loss, expected = engine.train_batch(data), twin.train_batch(plain)
        assert error(loss.detach(), expected.detach()) < TOLERANCE, (case, step, loss, expected)
        # an engine's first step on a device has nothing encoded beside it: kernels may be loaded
        begins = step in (0, 3) and not runs_at_once(torch.device(engine.device))
        assert engine.microbatches_ahead == (0 if begins else microbatches)
        if not begins:
            check_ahead(engine, step + 1)
            check_held(engine, step)
        for count in (1, 3) if step in (0, 2) else ():
            evaluated = engine.eval_batch(data_from(engine, 50, frozen=True), num_micro_batches=count)
            reference = twin.eval_batch(data_from(twin, 50, frozen=False), num_micro_batches=count)
            assert error(evaluated, reference) < TOLERANCE, (case, step, count)
    check_sampling(engine, twin)
    mine, other = all_weights(engine), all_weights(twin)
    assert mine.keys() == other.keys()
    for name, weight in mine.items():
        assert error(weight, other[name]) < TOLERANCE, (case, name)
    timeline = engine.pulse_timeline()
    if timeline is not None:
        assert sum(span.work.end - span.work.first for span in timeline.frozen) == 8 * microbatches
    engine.destroy()
    twin.destroy()


def all_weights(engine: Any) -> dict[str, Tensor]:
    """Of all ranks, by name: what is measured for each engine anew may cut them in different places."""
    mine = {name: parameter.detach().cpu() for name, parameter in engine.module.named_parameters()}
    return {name: weight for told in told_by_all(mine) for name, weight in told.items()}


def check_ahead(engine: Any, step: int) -> None:
    """What this rank reads of the next step is there, bit for bit."""
    found = engine._ahead._ahead.values
    replica = engine.grid.data_parallel_id
    for (name, m), value in found.items():
        assert torch.equal(value.cpu(), encoded(raw_batch(step, m, replica)[0])[name]), (name, m)
    reads = {name for name, _ in found}
    mine = engine.module._local_layers
    assert reads == {*(["sample"] if 0 in mine else []), *(["text"] if {2, 7} & set(mine) else [])}


def check_held(engine: Any, step: int) -> None:
    """Results count among what the rank holds; after a step those for the next one are left."""
    of_next = sum(x.nbytes for value in engine._ahead._ahead.values.values() for x in tensors_in(value))
    assert engine._runtime.holdings.live["frozen"] == of_next, step
    assert "frozen" in engine.pulse_stats()["peak_parts"], step


def check_sampling(engine: Any, twin: Any) -> None:
    """Forward only, on data that has the parts' results, given to the first rank alone: as a sampler calls it."""
    found = []
    for each in (engine, twin):
        data = data_from(each, 70, frozen=False) if each.is_first_stage() else None
        found.append(each.eval_batch(data, compute_loss=False, reduce_output=None, num_micro_batches=2))
    for mine, other in zip(*(parts or () for parts in found), strict=True):
        assert error(mine, other) < TOLERANCE
    assert (found[0] is not None) == engine.is_last_stage()


def ends_with_its_data(_: Any) -> None:
    """An epoch's iterator may end: the last step has nothing ahead, the next epoch begins with its own data.

    What is left of an epoch and is no whole step is nobody's, as without frozen parts. At the end a part is thawed,
    which every rank is told.
    """
    from deepspeed_pulse.errors import GraphError

    share_groups()
    engine, twin = engine_of(2, 2, frozen=True), engine_of(2, 2, frozen=False)
    for epoch, microbatches in enumerate((4, 5, 4)):
        data = itertools.islice(data_from(engine, 10 * epoch, frozen=True), microbatches)
        plain = data_from(twin, 10 * epoch, frozen=False)
        for step in range(2):
            assert error(engine.train_batch(data).detach(), twin.train_batch(plain).detach()) < TOLERANCE
            assert engine.microbatches_ahead == (2 if step == 0 else 0)
    print("SO FAR NO WARNING", flush=True)
    for step in range(3):  # a new one in each step, that begins with it: it is told once
        engine.train_batch(data_from(engine, step, frozen=True))
    parts = engine.module.frozen._layers.values()
    next(
        p for layers in parts for m in layers if isinstance(m, torch.nn.Module) for p in m.parameters()
    ).requires_grad_()
    with pytest.raises(GraphError, match=r"frozen part .*: parameter .* is trainable, and what runs without gradient"):
        engine.train_batch(data_from(engine, 3, frozen=True))
    print("PASSED", flush=True)


def differ_in_weights(folder: str) -> None:
    """Ranks that drew encoders of their own are told before the first step; the same job plans once.

    Which ranks hold a part is told by measured times, so all are compared as if each rank held them.
    """
    from deepspeed_pulse.engine.data import frozen_ahead
    from deepspeed_pulse.engine.frozen import check_same_weights
    from deepspeed_pulse.errors import ConfigError

    share_groups()
    compared: list[set[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        compare = frozen_ahead.check_same_weights
        patch.setattr(
            frozen_ahead, "check_same_weights", lambda parts, held: [compared.append({*held}), compare(parts, held)]
        )
        engine = engine_of(2, 2, frozen=True)
    assert compared == [{*engine.module.plan.fill.held_on(engine.stage_id)}], "at the start, what a rank holds"
    declared = engine.module.frozen
    check_same_weights(declared.build(declared.names, torch.device("cpu")), declared.names)
    drawn = engine_of(2, 2, frozen=True).module.frozen
    torch.manual_seed(int(os.environ["RANK"]))
    torch.nn.init.normal_(drawn.described["text"][1][1].weight)
    told = r"frozen part 'text': expected the same weights on every rank, found others in layer 1.Linear on rank 1 than"
    with pytest.raises(ConfigError, match=told):
        check_same_weights(drawn.build(drawn.names, torch.device("cpu")), drawn.names)
    found = [engine_of(2, 2, frozen=True, plan_cache=folder) for _ in range(2)]
    fills = [engine.module.plan.fill for engine in found]
    assert fills[0] == fills[1], "measured anew"
    assert found[0].pulse_timeline() is None, "before the first step"
    assert len(list(Path(folder).glob("frozen-*.json"))) == 1
    print("PASSED", flush=True)


def split_by_hand(plan: Any) -> Any:
    """The plan of two ranks; each part but the last is begun on one and ended on the other, for all microbatches."""
    from deepspeed_pulse.ir.fill import Filling, parse_work

    begun = [f"text[0:1]@{m} text[1]@{m}>1".split() for m in range(plan.microbatches)]
    taken = [f"text[1:2]@{m} text[2]@{m}>0 moments[0:2]@{m} moments[2]@{m}>0".split() for m in range(plan.microbatches)]
    ended = [f"moments[2:5]@{m} sample[0:1]@{m}".split() for m in range(plan.microbatches)]
    first = [Filling(0, parse_work(work)) for row in begun for work in row]
    first += [Filling(1 + m, parse_work(work)) for m, row in enumerate(ended) for work in row]
    second = [Filling(0, parse_work(work)) for row in taken for work in row]
    return replace(plan, fill=replace(plan.fill, rows=(tuple(first), tuple(second))))


def runs_a_plan_file(folder: str) -> None:
    """A plan with frozen work from a file, and one by hand; without frozen parts in the module it is refused."""
    from deepspeed_pulse.errors import ConfigError, PlanError
    from deepspeed_pulse.ir.carried import Part

    share_groups()
    engine = engine_of(2, 2, frozen=True)
    path, by_hand = Path(folder) / "plan.json", Path(folder) / "hand.json"
    if engine.global_rank == 0:
        path.write_text(engine.module.plan.to_json())
        by_hand.write_text(split_by_hand(engine.module.plan).to_json())
    torch.distributed.barrier()
    given = engine_of(2, 2, frozen=True, plan=str(path))
    assert given.module.plan == engine.module.plan
    split = engine_of(2, 2, frozen=True, plan=str(by_hand))
    assert split.module.plan.fill.rows == split_by_hand(engine.module.plan).fill.rows
    over = [str(work) for works in split._ahead._in_steps(Part.WHOLE)[1].values() for work in works]
    assert over and (split.stage_id == 1 or over == ["text[1]@0>1", "text[1]@1>1"]), over
    for each in (engine, given, split):
        data = data_from(each, 0, frozen=True)
        each.losses_seen = [each.train_batch(data).item() for _ in range(3)]
        check_ahead(each, 3)
        check_held(each, 2)
    assert engine.losses_seen == given.losses_seen == split.losses_seen
    with pytest.raises(PlanError, match="the plan has frozen parts, the module has none"):
        engine_of(2, 2, frozen=False, plan=str(path))
    with pytest.raises(ConfigError, match="3 microbatches: with frozen parts expected 2 as planned"):
        given.set_train_batch_size(3 * SIZE)
    print("PASSED", flush=True)
