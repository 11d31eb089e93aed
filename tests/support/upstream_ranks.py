"""What upstream's own pipeline tests ask for, asked of our module."""

from __future__ import annotations

import copy
import gc
import math
from functools import partialmethod
from typing import Any

import torch
from support.parity import TOLERANCE, mse, share_groups
from support.reference import Unpartitioned, train
from support.toy import WIDTH
from support.versions import has_checkpoints, plain_microbatches
from torch import nn

WAVE = {"solver_seconds": 0, "placement": "wave"}
LINEAR = {"solver_seconds": 0, "placement": "linear"}
THEIRS = "theirs"
"""In place of a block: upstream's own module."""
WITHOUT_A_PLAN = (False, THEIRS) if plain_microbatches() > 1 else (False,)
EVERY = (WAVE, LINEAR, *WITHOUT_A_PLAN)
CONFIG = {"gradient_clipping": 0.0, "steps_per_print": 10**9}


def engine_of(layers: Any, config: dict[str, Any], *, initialize: Any = None, lr: float = 0.1, **arguments: Any) -> Any:
    """Former engines end here: upstream's wait for the whole device, which in a step may wait for another rank."""
    import deepspeed

    import deepspeed_pulse

    gc.collect()
    if config["pulse"] == THEIRS:
        config = {key: value for key, value in config.items() if key != "pulse"}
        module = deepspeed.pipe.PipelineModule(layers=layers, **arguments)
    else:
        module = deepspeed_pulse.PipelineModule(layers=layers, config=config, **arguments)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, **(initialize or {}))[0]


def on_two_ranks(_: Any) -> None:
    share_groups()
    sequential()
    scaling()
    not_a_number()
    print("PASSED", flush=True)


# -- module equals sequential ----------------------------------------------------------------


def sequential() -> None:
    """An ``nn.Sequential`` gives what it gives by itself; no parameter is lost; recomputed and compiled too."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)], nn.Linear(32, 1))
    given = torch.randn(1, 32)
    with torch.no_grad():
        expected = model(given)
    for pulse in EVERY:
        for interval in (0, 1) if pulse not in WITHOUT_A_PLAN or has_checkpoints() else (0,):
            for compiled in (False, True):
                found = evaluated_sequential(copy.deepcopy(model), given, pulse, interval, compiled)
                assert torch.allclose(found, expected, atol=1e-6), (pulse, interval, compiled, found, expected)


def evaluated_sequential(model: nn.Sequential, given: torch.Tensor, pulse: Any, interval: int, compiled: bool) -> Any:
    from deepspeed.utils import RepeatingLoader

    config = {
        **CONFIG,
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "pulse": pulse,
        "pipeline": {"activation_checkpoint_interval": interval},
    }
    method = {"partition_method": "uniform"} if pulse in WITHOUT_A_PLAN else {}
    engine = engine_of(model, config, num_stages=2, **method)
    if compiled:
        engine.module.compile(backend="eager")
    count = torch.tensor(sum(p.numel() for p in engine.module.parameters()), device=engine.device)
    torch.distributed.all_reduce(count, group=engine.grid.get_pipe_parallel_group())
    assert int(count) == sum(p.numel() for p in model.parameters())
    found = engine.eval_batch(iter(RepeatingLoader([(given, 0)])))
    engine.destroy()
    return found.cpu()


# -- gradient-accumulation scaling -----------------------------------------------------------


def scaling() -> None:
    """Ones through four weights of one, towards zero: each weight's gradient is 2, however often it is added up."""
    lr = 0.1
    for microbatches in (1, 2, 5):
        for settings in ({}, {"zero_optimization": {"stage": 1}}):
            for pulse in EVERY:
                config = {
                    **CONFIG,
                    **settings,
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": microbatches,
                    "zero_allow_untested_optimizer": True,
                    "pulse": pulse,
                }
                for weight in trained_once(config, lr):
                    assert torch.allclose(weight, torch.tensor(1.0 - 2.0 * lr)), (config, weight)


def trained_once(config: dict[str, Any], lr: float) -> list[torch.Tensor]:
    layers = [nn.Linear(1, 1, bias=False) for _ in range(4)]
    for layer in layers:
        layer.weight.data.fill_(1.0)
    engine = engine_of(layers, config, num_stages=2, loss_fn=nn.MSELoss(), lr=lr)
    engine.train_batch(iter([(torch.ones(1, 1), torch.zeros(1, 1))] * config["gradient_accumulation_steps"]))
    engine.destroy()
    return [weight.detach().cpu() for weight in engine.module.parameters()]


# -- training data, topologies, dynamic shapes -----------------------------------------------

SAMPLES, STEPS, MICROBATCHES = 20, 3, 3
LENGTHS = (2, 5, 3, 7, 4)


class Shifted(nn.Module):
    """Adds an entry of the batch, and remembers the shapes it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        self.shapes.add(tuple(x.shape))
        return torch.tanh(self.inner(x) + shift)


def shifted_layers() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    return [LayerSpec(Shifted, pop="shift") for _ in range(8)]


class Sentences(torch.utils.data.Dataset):
    """Samples of different lengths."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = [
            (
                {"hidden": torch.randn(length, WIDTH, generator=generator), "shift": torch.randn(1, WIDTH)},
                torch.randn(length, WIDTH, generator=generator),
            )
            for length in (LENGTHS[i % len(LENGTHS)] for i in range(SAMPLES))
        ]
        torch.manual_seed(3)
        for inputs, _ in self.rows:
            inputs["shift"] = torch.randn(1, WIDTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def doubled(batch: Any) -> Any:
    """A ``set_batch_fn``."""
    inputs, labels = batch
    return {**inputs, "hidden": 2 * inputs["hidden"]}, labels


def expected_losses(replicas: int) -> list[float]:
    """In one process: each replica reads every ``replicas``-th sample, again and again."""
    twin, data = Unpartitioned(shifted_layers()), Sentences()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        numbers = [step * MICROBATCHES + m for m in range(MICROBATCHES)]
        rows = [data[(replicas * n + replica) % SAMPLES] for replica in range(replicas) for n in numbers]
        batches = [doubled(({k: v[None] for k, v in inputs.items()}, labels[None])) for inputs, labels in rows]
        found.append(train(twin, optimizer, batches, mse, 0.0)[0])
    return found


def topologies() -> dict[str, Any]:
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology

    found = {f"pp{p}dp{d}": PipeDataParallelTopology(num_pp=p, num_dp=d) for p, d in ((1, 4), (2, 2), (4, 1))}
    return {**found, "dp2pp2": ProcessTopology(axes=["data", "pipe"], dims=[2, 2])}


def training_data(_: Any) -> None:
    """``training_data=``, ``set_batch_fn`` and ``set_dataloader`` feed every topology, with shapes that change."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    share_groups()
    # without processes of the loader's own
    DeepSpeedEngine.deepspeed_io = partialmethod(DeepSpeedEngine.deepspeed_io, num_local_io_workers=0)  # type: ignore
    import deepspeed

    deepspeed.init_distributed()
    for name, topology in topologies().items():
        for pulse in (WAVE, False):
            feeds(name, topology, pulse)
    print("PASSED", flush=True)


def feeds(name: str, topology: Any, pulse: Any) -> None:
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "pulse": pulse,
    }
    engine = engine_of(
        shifted_layers(),
        config,
        topology=topology,
        loss_fn=mse,
        seed_layers=True,
        dynamic_shape=True,
        initialize={"training_data": Sentences()},
    )
    engine.set_batch_fn(doubled)
    replicas = topology.get_dim("data")
    for step, expected in enumerate(expected_losses(replicas)):
        loss = float(engine.train_batch())
        assert abs(loss - expected) <= TOLERANCE * expected, (name, pulse, step, loss, expected)
    for layer in engine.module.modules():
        if isinstance(layer, Shifted):
            assert len(layer.shapes) > 1, (name, layer.shapes)
    sets_a_loader(engine)
    engine.destroy()


def sets_a_loader(engine: Any) -> None:
    """Batches of a loader, again from the start when it is over."""
    from deepspeed.utils import RepeatingLoader

    drawn = []

    def noting(batch: Any) -> Any:
        drawn.append(batch[2])
        return batch[:2]

    engine.set_batch_fn(noting)
    inputs, labels = Sentences()[0]
    rows = [({k: v[None] for k, v in inputs.items()}, labels[None], number) for number in range(2)]
    engine.set_dataloader(RepeatingLoader(rows))
    loss = engine.train_batch()
    reads = engine.module.pulse_enabled or engine.is_first_stage() or engine.is_last_stage()
    assert torch.isfinite(loss) and drawn == ([0, 1, 0] if reads else []), drawn


# -- losses that are no numbers --------------------------------------------------------------


def not_a_number() -> None:
    """As upstream: a loss of NaN is returned on every rank, nothing is raised or skipped, and weights are lost."""
    for pulse in (WAVE, *WITHOUT_A_PLAN):
        loses_its_weights(pulse)


def loses_its_weights(pulse: Any) -> None:
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "pulse": pulse}
    config["gradient_clipping"] = 1.0
    engine = engine_of([nn.Linear(2, 2) for _ in range(4)], config, num_stages=2, loss_fn=mse)
    bad = [(torch.full((1, 2), math.nan), torch.zeros(1, 2)), (torch.ones(1, 2), torch.zeros(1, 2))]
    good = [bad[1], bad[1]]
    losses = [float(engine.train_batch(iter(batches))) for batches in (good, bad, good)]
    assert [math.isnan(loss) for loss in losses] == [False, True, True], (pulse, losses)
    assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    assert all(p.isnan().all() for p in engine.module.parameters())
    engine.destroy()
