"""What ranks run in the tests of weights and checkpoints of one of several backbones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.backbone_ranks import alone_data, alone_engine, engine_of, joint_data, joint_engine, parts_of, weights
from support.cases import run_each
from support.parity import mse, share_groups
from support.reference import error

ELSEWHERE = 77
"""Of weights that are loaded over: drawn by another seed."""


def together(folder: str, case: dict[str, Any]) -> Path:
    """A folder of the case, the same on all ranks."""
    return Path(folder) / "_".join(f"{key}-{value}" for key, value in case.items()).replace(" ", "-").replace("/", "-")


def crosses(arguments: dict[str, Any]) -> None:
    """A backbone goes on in another run than the one that trained it, as if nothing had been between."""
    share_groups()
    run_each(arguments["cases"], partial(_crosses, arguments["folder"]))


def _crosses(folder: str, case: dict[str, Any]) -> None:
    (from_alone if case["from"] == "alone" else from_joint)(together(folder, case), case)


def ran(engine: Any, data: Callable[[int], Any], steps: range) -> list[float]:
    return [float(engine.train_batch(data(step))) for step in steps]


def from_alone(where: Path, case: dict[str, Any]) -> None:
    """Each was trained alone, under ``zero alone`` if the case has that; the joint run loads one after the other."""
    names, expected = list(parts_of(case)), {}
    for name in names:
        engine = alone_engine({**case, "zero": case.get("zero alone", case.get("zero", 0))}, name, 0)
        data = partial(alone_data, case, name, replica=engine.grid.data_parallel_id)
        ema = averages(engine, None)
        ran(engine, data, range(2))
        stepped(ema)
        engine.save_checkpoint(str(where / name), ema=ema, client_state={"of": name})
        expected[name] = ran(engine, data, range(2, 4)), weights(engine), state_of(ema)
        engine.destroy()
    joint = joint_engine(case)
    averaged = [averages(joint, name) for name in names]
    for name, ema in zip(names, averaged, strict=True):
        _, client = joint.load_checkpoint(str(where / name), backbone=name, ema=ema)
        assert client == {"of": name}, client
        check_averages(ema, expected[name][2])
    assert joint.global_steps == 0
    for index, step in enumerate((2, 3)):
        joint.train_batch(joint_data(case, step, joint.grid.data_parallel_id))
        for name in names:
            found, wanted = float(joint.losses[name]), expected[name][0][index]
            assert abs(found - wanted) <= tolerance(case) * wanted, (name, step, found, wanted)
    found, heads = weights(joint), joint.module.job.heads
    joint.destroy()
    for name, head in zip(names, heads, strict=True):
        check_weights(case, found, expected[name][1], name, head.layers.start)


def from_joint(where: Path, case: dict[str, Any]) -> None:
    """All were trained together; a run of each alone loads it."""
    names = list(parts_of(case))
    joint = joint_engine(case)
    heads, replica = joint.module.job.heads, joint.grid.data_parallel_id
    averaged = [averages(joint, name) for name in names]
    ran(joint, lambda step: joint_data(case, step, replica), range(2))
    for ema in averaged:
        ema.step()
    joint.save_checkpoint(str(where), ema=averaged)
    again = [averages(joint, name) for name in names]
    joint.load_checkpoint(str(where), ema=again)
    for before, after in zip(averaged, again, strict=True):
        check_averages(after, state_of(before))
    losses = []
    for step in (2, 3):
        joint.train_batch(joint_data(case, step, replica))
        losses.append({name: float(value) for name, value in joint.losses.items()})
    found = weights(joint)
    states = [state_of(ema) for ema in averaged]
    joint.destroy()
    for name, head, state in zip(names, heads, states, strict=True):
        engine = alone_engine(case, name, ELSEWHERE)
        ema = averages(engine, None)
        engine.load_checkpoint(str(where), backbone=name, ema=ema)
        check_averages(ema, state)
        data = partial(alone_data, case, name, replica=engine.grid.data_parallel_id)
        for before, loss in zip(losses, ran(engine, data, range(2, 4)), strict=True):
            assert abs(loss - before[name]) <= tolerance(case) * loss, (name, loss, before[name])
        check_weights(case, found, weights(engine), name, head.layers.start)
        engine.destroy()


def tolerance(case: dict[str, Any]) -> float:
    return 1e-3 if case.get("precision") == "bf16" else 1e-5


def check_weights(case: Any, found: Any, expected: Any, name: str, start: int) -> None:
    for weight, value in expected.items():
        index, _, rest = weight.partition(".")
        mine = found[f"{int(index) + start}.{rest}" if index.isdigit() else f"{index}.{name}/{rest}"]
        assert error(mine, value) < tolerance(case), (name, weight, error(mine, value))


def averages(engine: Any, backbone: str | None) -> Any:
    from deepspeed_pulse.models import EMA

    return EMA(engine, decay=0.5, backbone=backbone)


def stepped(ema: Any) -> None:
    ema.step()


def state_of(ema: Any) -> dict[str, torch.Tensor]:
    """Averages of all ranks, by name; on every rank."""
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    mine = {name: value.detach().cpu().clone() for name, value in ema.averages().items()}
    torch.distributed.all_gather_object(rows, mine)
    return {name: value for row in rows for name, value in row.items()}


def check_averages(ema: Any, expected: dict[str, torch.Tensor]) -> None:
    found = state_of(ema)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def exports(folder: str) -> None:
    """Each of two U-Nets is written as if it had been trained alone, averages too; ``from_pretrained`` reads both."""
    from deepspeed_pulse.errors import ConfigError
    from deepspeed_pulse.models import gather_model, save_pretrained

    share_groups()
    case = {"P": 2, "M": 2, "set": "two unets", "directions": "opposite"}
    joint, out = joint_engine(case), Path(folder)
    names = list(parts_of(case))
    averaged = [averages(joint, name) for name in names]
    joint.train_batch(joint_data(case, 0, 0))
    for name, ema in zip(names, averaged, strict=True):
        ema.step()
        save_pretrained(joint, out / name, backbone=name, ema=ema)
        model = gather_model(joint, backbone=name)
        torch.distributed.barrier()
        if model is not None:
            check_file(out / name, model.state_dict())
    refused = {
        "save_pretrained": lambda: save_pretrained(joint, out / "x"),
        "gather_model": lambda: gather_model(joint),
        "EMA": lambda: averages(joint, None),
    }
    for what, call in refused.items():
        message = told(ConfigError, call)
        assert message == f"{what}(): this engine trains several backbones; pass backbone=, one of unet0, unet1", (
            message
        )
    assert "ema: expected averages of backbone unet1, found those of unet0" in told(
        ConfigError, lambda: save_pretrained(joint, out / "x", backbone="unet1", ema=averaged[0])
    )
    assert 'did you mean "unet1"' in told(ConfigError, lambda: save_pretrained(joint, out / "x", backbone="unet2"))
    check_lazy(joint, case, out)
    check_copies(case, out)
    print("EXPORTED", flush=True)


def check_lazy(joint: Any, case: dict[str, Any], out: Path) -> None:
    """Of folders, each rank reads its own layers."""
    from deepspeed_pulse import Backbone
    from deepspeed_pulse.models import from_pretrained
    from deepspeed_pulse.models.weights.folder import WeightFiles

    read, keys = WeightFiles.read, set[tuple[str, str]]()

    def noting(self: WeightFiles, wanted: Any) -> Any:
        keys.update((self.folder.name, key) for key in wanted)
        return read(self, wanted)

    names = list(parts_of(case))
    WeightFiles.read = noting  # type: ignore[method-assign]
    try:
        lists = {name: from_pretrained(out / name) for name in names}
        backbones = {name: Backbone(lists[name], loss_fn=mse, input="sample") for name in names}
        engine = engine_of(case, backbones=backbones)
    finally:
        WeightFiles.read = read  # type: ignore[method-assign]
    mine = {
        (names[engine.module.graph.backbone_of(index)], key)
        for index, layer in engine.module.local_layers()
        for key in layer.state_dict()
    }
    assert keys == mine, keys ^ mine
    found, expected = (float(each.eval_batch(joint_data(case, 9, 0))) for each in (engine, joint))
    assert abs(found - expected) <= 1e-6 * expected, (found, expected)
    engine.destroy()


def timed(case: dict[str, Any], timestep: Any) -> Any:
    """Batches of backbones a and b, the second with this timestep."""
    for inputs, labels in joint_data(case, 9, 0):
        first, second = inputs
        found = {"a": inputs[first], "b": {**inputs[second], "timestep": timestep}}
        yield found, {"a": labels[first], "b": labels[second]}


def check_copies(case: dict[str, Any], out: Path) -> None:
    """Two backbones of one list, the second a copy: their layers come from one model, and each is written.

    A model's rule of entries, that a timestep may be a number, is one for its own backbone's part.
    """
    from deepspeed_pulse import Backbone
    from deepspeed_pulse.models import save_pretrained

    layers = parts_of(case)["unet0"][0]()
    backbones = {
        n: Backbone(x, loss_fn=mse, input="sample") for n, x in zip("ab", (layers, deepcopy(layers)), strict=True)
    }
    engine = engine_of(case, backbones=backbones)
    one, other = (float(engine.eval_batch(timed(case, given))) for given in (7, torch.tensor(7)))
    assert one == other, (one, other)
    with torch.no_grad():
        for parameter in engine.module.backbone_parameters("b"):
            parameter.fill_(0.5)
    for name in backbones:
        save_pretrained(engine, out / name, backbone=name)
    torch.distributed.barrier()
    a, b = (load_file(out / name / "diffusion_pytorch_model.safetensors") for name in backbones)
    assert a.keys() == b.keys()
    assert all(bool((value == 0.5).all()) for value in b.values())
    assert not all(bool((value == 0.5).all()) for value in a.values())
    engine.destroy()


def check_file(folder: Path, state: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in found.items())
    assert load_file(Path(f"{folder}_ema") / "diffusion_pytorch_model.safetensors").keys() == state.keys()


def told(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as problem:
        return str(problem)
    raise AssertionError(f"no {kind.__name__}")
