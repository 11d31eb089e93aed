"""What ranks run in the tests of gradient reduction: early against upstream's way, options, what falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from support.engine_ranks import as_bf16, data_of, make_engine, torch_world
from support.parity import RecordingSGD, mse, run_case, share_groups

from deepspeed_pulse.errors import PulseError
from deepspeed_pulse.ir.buckets import BUCKET_BYTES

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_clipping": 0.1},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 4.0},
    {"gradient_allreduce_op": "sum"},
    {"communication_data_type": "bf16"},
    {"bf16": {"enabled": True}},
    {"bf16": {"enabled": True}, "communication_data_type": "fp32", "gradient_clipping": 0.1},
    {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
]

SMALL_BUCKET = 300
"""Bytes: weights of the toy network go alone, biases together."""


def reduces(cases: Any) -> None:
    """One launch of four ranks."""
    share_groups()
    torch.set_num_threads(1)
    assert torch_world() == 4
    as_at_the_end({}, bucket_bytes=BUCKET_BYTES, waves=2)
    for options in OPTIONS:
        as_at_the_end(options, bucket_bytes=SMALL_BUCKET, waves=1)
    stages_leave_before_the_last_action()
    for options in OPTIONS[0], OPTIONS[6], OPTIONS[8]:
        buckets_leave_while_the_last_backward_runs(options)
    gradients_stay_in_their_buckets(lambda gradient: gradient)
    gradients_stay_in_their_buckets(lambda gradient: gradient.detach().view(-1))
    sums_of_a_failed_step_are_dropped()
    several_backwards_in_a_layer()
    for case in cases:
        run_case(case)
    uneven_batches()
    falls_back()
    print("PASSED", flush=True)


def trained(engine: Any, steps: int = 2) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and what the optimizer saw and left."""
    cast = as_bf16 if engine.bfloat16_enabled() else lambda batch: batch
    losses = [float(engine.train_batch(map(cast, data_of(engine, step))).detach()) for step in range(steps)]
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return losses, [*optimizer.seen.values(), *(p.detach().clone() for p in engine.module.parameters())]


def as_at_the_end(options: dict[str, Any], *, bucket_bytes: int, waves: int) -> None:
    """Two replicas: not a bit differs from upstream's reduction, tied weights and the last stage's included."""
    found = []
    for early in (True, False):
        pulse = {"solver_seconds": 0, "placement": "wave", "waves": waves}
        engine = make_engine(2, 3, pulse=pulse, optimizer=lambda p: RecordingSGD(p, lr=0.05, momentum=0.9), **options)
        engine._reduction.sums.bucket_bytes = bucket_bytes
        if not early:
            engine._reduction.sums = None
        found.append(trained(engine))
        engine.destroy()
    (losses, tensors), (others_losses, others) = found
    assert losses == others_losses, (options, losses, others_losses)
    assert len(tensors) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True)), (options, bucket_bytes, waves)


def stages_leave_before_the_last_action() -> None:
    """On the first rank of a wave the last stage's gradients leave while the first stage still has backwards to do."""
    engine = make_engine(2, 3)
    counts, start = [], engine._reduction.sums.start

    def counting(stage: int) -> None:
        counts.append((stage, len(engine._runtime.stopwatch.works)))
        start(stage)

    engine._reduction.sums.start = counting
    engine.train_batch(data_of(engine, 0))
    mine = engine.module.plan.stages_of(engine.stage_id)
    assert sorted(stage for stage, _ in counts) == sorted(mine)
    assert counts[0][1] < counts[-1][1] == len(engine.module.plan.schedule[engine.stage_id]), counts
    engine.destroy()


def buckets_leave_while_the_last_backward_runs(options: dict[str, Any]) -> None:
    """From the second step on, which knows what a backward adds to once; in the same order on all replicas."""
    engine = make_engine(2, 3, optimizer=lambda p: RecordingSGD(p, lr=0.05, momentum=0.9), **options)
    sums, started = engine._reduction.sums, []
    sums.bucket_bytes = SMALL_BUCKET
    start = sums._start

    def noted(bucket: Any) -> None:
        started.append((torch._C._current_graph_task_id() != -1, [sums._names[p] for p in bucket]))
        start(bucket)

    sums._start = noted
    trained(engine, 1)
    first = list(started)
    assert first and not any(within for within, _ in first), first
    trained(engine, 1)
    second = started[len(first) :]
    assert [names for _, names in second] == [names for _, names in first]
    assert sum(within for within, _ in second) > len(second) / 2, second
    everybody: list[Any] = [None] * torch_world()
    torch.distributed.all_gather_object(everybody, (engine.stage_id, [names for _, names in second]))
    assert all(names == [n for _, n in second] for stage, names in everybody if stage == engine.stage_id), everybody
    engine.destroy()


def gradients_stay_in_their_buckets(keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """They are gathered once; what the program keeps of a step is left as it is: gradients themselves, or views."""
    engine = make_engine(2, 3)
    places: list[list[int]] = []
    held: list[torch.Tensor] = []
    frozen: list[torch.nn.Parameter] = []
    sums, step = engine._reduction.sums, engine.optimizer.step
    sums.bucket_bytes = BUCKET_BYTES

    def noted(*args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for kept in sums._kept.values() for p in kept.parameters]
        assert gradients and all(p.grad is None for p in frozen)
        places.append([g.data_ptr() for g in gradients])
        if len(places) == 3:
            held.extend(map(keep, gradients))
        return step(*args, **kwargs)

    engine.optimizer.step = noted
    for number in range(3):
        engine.train_batch(data_of(engine, number))
    values = [h.clone() for h in held]
    for number in range(2):
        engine.train_batch(data_of(engine, number))
    assert places[0] == places[1] == places[2], places
    assert set(places[3]).isdisjoint(places[2]) and places[3] == places[4], places
    assert all(torch.equal(a, b) for a, b in zip(held, values, strict=True))
    frozen.append(next(iter(sums._kept.values())).parameters[0].requires_grad_(False))
    engine.train_batch(data_of(engine, 0))
    assert len(places[5]) == len(places[4]) - 1
    engine.destroy()


def sums_of_a_failed_step_are_dropped() -> None:
    """A step that fails behind its sums leaves nothing that the next one would put into its own."""
    from deepspeed_pulse.engine.step import Steps

    found = []
    for fails in (False, True):
        engine = make_engine(2, 3, optimizer=lambda p: RecordingSGD(p, lr=0.05, momentum=0.9))
        engine._reduction.sums.bucket_bytes = BUCKET_BYTES
        trained(engine, 2)
        if fails:
            genuine, Steps.finish = Steps.finish, broken
            try:
                engine.train_batch(data_of(engine, 9))
            except PulseError:
                assert engine._reduction.sums._under_way
            else:
                raise AssertionError("the step did not fail")
            finally:
                Steps.finish = genuine
            engine.zero_grad()
        found.append(trained(engine, 1))
        engine.destroy()
    (losses, tensors), (again, others) = found
    assert losses == again and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def broken(steps: Any) -> None:
    raise PulseError("the data was not the same everywhere")


class Twice(torch.nn.Module):
    """Runs a weight in two checkpoints that run backwards of their own, so it gets two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if not x.requires_grad else x
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return x


def several_backwards_in_a_layer() -> None:
    """Such a weight leaves with the end of the stage's backward, in every step."""
    from deepspeed_pulse import LayerSpec

    found = []
    for early in (True, False):
        layers = [LayerSpec(torch.nn.Linear, 4, 4), *(LayerSpec(Twice) for _ in range(3))]
        engine = plain_engine(layers)
        if not early:
            engine._reduction.sums = None
        for _ in range(3):
            engine.train_batch(iter(batches_for(engine.grid.data_parallel_id)))
        found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Choice(torch.nn.Module):
    """Uses one of two weights, as its input says; a third one is frozen, a fourth never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.frozen, self.idle = (torch.nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen((self.left if x[0, 0] > 0 else self.right)(x))


def batches_for(replica: int) -> list[Any]:
    generator = torch.Generator().manual_seed(replica)
    x = torch.rand(2, 2, 4, generator=generator) * (1 if replica == 0 else -1)
    return [(x[m], torch.zeros(2, 4)) for m in range(2)]


def plain_engine(layers: list[Any], *, optimizer: Any = None, **config: Any) -> Any:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
        **config,
    }
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=mse, config=config, seed_layers=True)
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))([p for p in module.parameters() if p.requires_grad])
    return deepspeed.initialize(model=module, optimizer=made, config=config)[0]


def uneven_batches() -> None:
    """A weight that only one replica's data uses has zeros on the other, a frozen one takes no part."""
    from deepspeed_pulse import LayerSpec

    engine = plain_engine([LayerSpec(Choice), *(LayerSpec(torch.nn.Linear, 4, 4) for _ in range(3))])
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.train_batch(iter(batches_for(engine.grid.data_parallel_id)))
    after = dict(engine.module.named_parameters())
    if engine.stage_id == 0:
        moved = {name for name in before if name.startswith("0.") and not torch.equal(before[name], after[name])}
        assert moved == {"0.left.weight", "0.left.bias", "0.right.weight", "0.right.bias"}, moved
    for name, parameter in after.items():
        mean = parameter.detach().clone()
        torch.distributed.all_reduce(mean, group=engine.grid.get_data_parallel_group())
        assert torch.equal(mean / 2, parameter), name
    engine.destroy()


class SparseFirst(torch.nn.Module):
    """An embedding whose gradient is sparse; ``says_so``: as a module of its own, which tells."""

    def __init__(self, says_so: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4, sparse=says_so)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x)) + (x[:, 0] > 0)
        return x + torch.nn.functional.embedding(rows, self.table.weight, sparse=True)


class Borrower(torch.nn.Module):
    """Uses a weight that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ LENT[-1].weight


class Lender(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        if not self.weight.is_meta:  # as which layers are counted
            LENT.append(self)


LENT: list[Lender] = []


def falls_back() -> None:
    """Where early reduction would be inexact, upstream's at the end runs; what nobody could foresee is an error."""
    from deepspeed_pulse import LayerSpec

    def linears(count: int) -> list[Any]:
        return [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(count)]

    sparse = plain_engine([LayerSpec(SparseFirst, True), *linears(3)])
    assert (sparse._reduction.sums is None) == (sparse.stage_id == 0)
    sparse.train_batch(iter(batches_for(sparse.grid.data_parallel_id)))
    sparse.destroy()
    for more in ({}, {"bf16": {"enabled": True}}):
        engine = plain_engine(linears(4), optimizer=torch.optim.AdamW, zero_optimization={"stage": 1}, **more)
        assert engine._reduction.sums is None and not engine.module.plan.rules.reduce_early, more
        engine.destroy()
    one_bit = plain_engine(linears(4))
    one_bit.pipeline_enable_backward_allreduce = False  # as a 1-bit optimizer does
    one_bit._reduction.sums.begin = one_bit._reduction.sums.start = None
    one_bit.train_batch(iter(batches_for(one_bit.grid.data_parallel_id)))
    one_bit.destroy()
    hidden = plain_engine([LayerSpec(SparseFirst, False), *linears(3)])
    expect("parameter 0.table.weight has a sparse gradient", hidden, fails=hidden.stage_id == 0)
    for more in ({}, {"bf16": {"enabled": True}}):
        lent = plain_engine([LayerSpec(Borrower), *linears(2), LayerSpec(Lender)], **more)
        expect("3.weight got a gradient after the last backward of its stage", lent, fails=lent.stage_id == 0)


def as_bf16_pair(batch: Any) -> Any:
    return tuple(t.bfloat16() for t in batch)


def expect(text: str, engine: Any, *, fails: bool) -> None:
    """The step fails on the ranks that know why; the others, which have no part in it, end theirs."""
    # collectives that ranks which failed do not come to
    engine._aggregate_total_loss = lambda: torch.zeros(1)
    engine._take_model_step = lambda *_: None
    engine._steps.reading._steps["train"] = 10
    batches = batches_for(engine.grid.data_parallel_id)
    try:
        engine.train_batch(iter(map(as_bf16_pair, batches) if engine.bfloat16_enabled() else batches))
    except PulseError as problem:
        assert fails and text in str(problem), problem
    else:
        assert not fails, text
    engine.destroy()
