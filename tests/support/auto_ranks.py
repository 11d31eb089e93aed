"""What ranks run in the tests of "auto"."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.parity import measure_links_once, mse, share_groups, topology
from support.precision_ranks import cast
from support.reference import Unpartitioned, train
from support.toy import toy_batch, toy_layers

GLOBAL_BATCH = 8
STEPS = 3
TOLERANCE = 1e-5


def config_of(pulse: dict[str, Any], **keys: Any) -> dict[str, Any]:
    found = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "pulse": {"solver_seconds": 0, "waves": "auto", **pulse},
        **keys,
    }
    return {key: value for key, value in found.items() if value is not None}


def batch_of(step: int, samples: range) -> Any:
    """Some samples of a step's global batch."""
    parts = [toy_batch(step, sample, 0, size=1) for sample in samples]
    inputs = {name: torch.cat([part[0][name] for part in parts]) for name in parts[0][0]}
    return inputs, torch.cat([labels for _, labels in parts])


def engine_of(config: Any, *, stages: Any = "auto", **arguments: Any) -> tuple[Any, str]:
    """An engine and what this rank printed while its module was made."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module = PipelineModule(
            layers=toy_layers(), num_stages=stages, loss_fn=mse, seed_layers=True, config=config, **arguments
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, printed.getvalue()


def data_of(engine: Any, step: int) -> Iterator[Any]:
    size, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for m in itertools.count(engine.grid.data_parallel_id * count):
        yield batch_of(step, range(m * size, (m + 1) * size))


def losses_of(engine: Any, steps: range) -> list[float]:
    return [float(engine.train_batch(data_of(engine, step)).detach()) for step in steps]


def expected_losses(num_samples: int = GLOBAL_BATCH) -> list[float]:
    model = Unpartitioned(toy_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = [[batch_of(step, range(i, i + 1)) for i in range(num_samples)] for step in range(STEPS)]
    return [train(model, optimizer, samples, mse, 0.0)[0] for samples in steps]


def close(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True))


def shape_of(engine: Any) -> tuple[Any, ...]:
    """Pipeline ranks, replicas, microbatch size and their number: the same on all ranks."""
    mine = (
        engine.num_stages,
        engine.dp_world_size,
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.module.plan,
    )
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    assert all(other == mine for other in found), found
    ranks, replicas, size, count, _ = mine
    assert ranks * replicas == len(found)
    assert size * count * replicas == engine.train_batch_size()
    return mine


def chooses(case: dict[str, Any]) -> None:
    """World of 4."""
    torch.set_num_threads(1)
    share_groups()
    measure_links_once()
    import deepspeed

    deepspeed.init_distributed()
    fast, slow = ({"profile": case["profile"], "cluster": case[name]} for name in ("fast", "slow"))
    everything_measured()
    measured_as_it_trains()
    keeps_what_is_given(fast, slow)
    resumes_under_another_choice(fast, slow, Path(case["folder"]))
    print("PASSED", flush=True)


def everything_measured() -> None:
    engine, printed = engine_of(config_of({}), example_batch=batch_of(0, range(2)))
    assert shape_of(engine)[0] in (1, 2, 4)
    assert engine.module.planned.measured
    assert close(losses_of(engine, range(STEPS)), expected_losses())
    if torch.distributed.get_rank() == 0:
        table = " ".join(printed.split())
        assert table.count("chosen for num_stages, train_micro_batch_size_per_gpu") == 1, printed
        assert "8 samples a step on 4 ranks" in table and "the fastest" in table, printed
    else:
        assert "chosen for" not in printed, printed
    engine.destroy()


def measured_as_it_trains() -> None:
    """Layers are built in fp32 and train in bf16: costs are those of bf16."""

    def in_bf16(batch: Any) -> Any:
        return cast(batch, torch.bfloat16)

    config = config_of({}, bf16={"enabled": True})
    engine, _ = engine_of(config, example_batch=in_bf16(batch_of(0, range(2))))
    assert engine.module.planned.profile.dtype == "bfloat16"
    engine.train_batch(map(in_bf16, data_of(engine, 0)))
    planned = engine.module.plan.estimate.peak_bytes[engine.stage_id]
    assert abs(engine.pulse_stats()["peak_live_bytes"] / planned - 1) <= 0.1
    engine.destroy()


def keeps_what_is_given(fast: dict[str, Any], slow: dict[str, Any]) -> None:
    """(pulse, config, arguments) and the shape that follows; None where it is free."""
    data_major = topology(data=2, pipe=2)
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[Any, ...]]] = [
        (fast, {}, {}, (1, 4, None, None)),
        (slow, {}, {}, (4, 1, None, None)),
        (slow | {"waves": 1}, {"train_micro_batch_size_per_gpu": 2}, {"stages": 2}, (2, 2, 2, 2)),
        (fast, {"pipeline": {"stages": 4}, "gradient_accumulation_steps": 4}, {"stages": None}, (4, 1, 2, 4)),
        (fast | {"placement": "linear"}, {"zero_optimization": {"stage": 1}}, {"stages": 2}, (2, 2, None, None)),
        (fast, {}, {"stages": None, "topology": data_major}, (2, 2, None, None)),
        (fast | {"placement": "wave"}, {}, {"activation_checkpoint_interval": 1}, (1, 4, None, None)),
        (
            fast,
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            {"stages": 2},
            (2, 2, 2, 2),
        ),
        (fast, {"train_batch_size": None, "train_micro_batch_size_per_gpu": 2}, {}, (1, 4, 2, 1)),
    ]
    expected = expected_losses()
    for pulse, keys, arguments, shape in cases:
        engine, _ = engine_of(config_of(pulse, **keys), **arguments)
        found = shape_of(engine)
        assert all(b in (None, a) for a, b in zip(found, shape, strict=False)), (keys, arguments, found[:4])
        assert int(engine.zero_optimization_stage()) == keys.get("zero_optimization", {"stage": 0})["stage"]
        assert close(losses_of(engine, range(STEPS)), expected), (keys, arguments, found[:4])
        engine.destroy()


def resumes_under_another_choice(fast: dict[str, Any], slow: dict[str, Any], folder: Path) -> None:
    expected = expected_losses()
    engine, _ = engine_of(config_of(fast))
    losses_of(engine, range(1))
    engine.save_checkpoint(folder)
    engine.destroy()
    path = folder / "slow.json"
    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps(config_of(slow)))
    torch.distributed.barrier()
    engine, _ = engine_of(str(path))
    engine.load_checkpoint(folder)
    assert engine.num_stages > 1
    assert close(losses_of(engine, range(1, 2)), expected[1:2])
    engine.save_checkpoint(folder)
    last, shape = losses_of(engine, range(2, STEPS)), shape_of(engine)
    assert close(last, expected[2:])
    engine.destroy()
    pinned = folder / "global_step2" / "pulse_ds_config.json"
    note = json.loads(pinned.read_text())["pulse_choice"]
    assert note["options"][0]["num_stages"] == shape[0]
    assert note["options"][0]["why"] == "the fastest"
    engine, printed = engine_of(str(pinned))
    assert shape_of(engine)[:4] == shape[:4] and "chosen for" not in printed, printed
    assert engine.module.plan.schedule == shape[4].schedule
    engine.load_checkpoint(folder)
    assert losses_of(engine, range(2, STEPS)) == last
    engine.destroy()
