"""Traces kept by content: a second start runs no block, and finds the same layers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from support.plain_nets import DoubleConv, Odd, PlainLevel, PlainUNet, plain_unet_batch
from support.small_models import small_unet
from support.traced import assert_equal
from support.zoo import ZOO

from deepspeed_pulse.errors import FileError, GraphError
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.traced import keeping


@pytest.fixture(autouse=True)
def everything_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "WORTH_KEEPING_SECONDS", 0.0)


def traced(folder: Path, model: Any = None, batch: Any = None) -> Any:
    return to_layers(model or PlainLevel(), example_batch=batch or plain_unet_batch(), plan_cache=folder)


def told(layers: Any) -> Any:
    """All that a trace has found: what each layer does, and what it takes for given."""
    found = layers[0].layer.traced.base
    numbers = {symbol: sympy.Symbol(f"size{at}") for at, symbol in enumerate(found.trace.symbols)}

    def numbered(expr: Any) -> str:
        return str(sympy.sympify(expr).xreplace(numbers))

    shapes = [list(map(numbered, found.trace.shape(value.index))) for value in found.trace.values]
    guards = [numbered(guard) for guard in (*found.trace.guards, *found.trace.branches)]
    return [code.signature for code in found.codes], shapes, guards


def test_the_next_start_runs_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PlainUNet()
    first = traced(tmp_path, model)
    assert len(list(tmp_path.glob("*"))) == 1
    forward = DoubleConv.forward
    monkeypatch.setattr(DoubleConv, "forward", lambda *_: pytest.fail("a block ran"))
    again = traced(tmp_path, model)
    monkeypatch.setattr(DoubleConv, "forward", forward)
    assert told(again) == told(first)
    assert_equal(model, again, plain_unet_batch(), plain_unet_batch(3, 24), plain_unet_batch(1, 17))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["SanaTransformer2DModel", "StableCascadeUNet"])
def test_kept_traces_of_other_models(name: str, tmp_path: Path) -> None:
    """Blocks that meet guards, that give structures, and that cannot be kept."""
    model, batch = ZOO[name].model(name), ZOO[name].example()
    first, again = traced(tmp_path, model, batch), traced(tmp_path, model, batch)
    assert told(again) == told(first)
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())["leaves"]) > 2
    assert_equal(model, again, batch, ZOO[name].example(1))


def test_another_question_is_another_file(tmp_path: Path) -> None:
    """Of the sizes, the settings and the model's code; not of its weights."""
    model = PlainLevel()
    traced(tmp_path, model)
    traced(tmp_path)
    assert len(list(tmp_path.glob("*"))) == 1
    traced(tmp_path, model, plain_unet_batch(3))
    model.inc.net[1].inplace = False
    traced(tmp_path, model)
    model.half()
    traced(tmp_path, model, {name: value.half() for name, value in plain_unet_batch().items()})
    assert len(list(tmp_path.glob("*"))) == 4


def test_code_without_a_file_is_not_kept(tmp_path: Path) -> None:
    """As in a notebook: a change of it could not be seen."""
    namespace: dict[str, Any] = {"__name__": "nowhere", "PlainLevel": PlainLevel}
    exec("class Net(PlainLevel): pass", namespace)
    traced(tmp_path, namespace["Net"]())
    assert not list(tmp_path.glob("*"))


def test_a_damaged_file_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = traced(tmp_path)
    (file,) = tmp_path.glob("*")
    whole = file.read_text()
    for text in (whole[:100], "{}", whole.replace("false", "true")):
        file.write_text(text)
        assert told(traced(tmp_path)) == told(first)
        assert f"the kept trace {file} is made anew" in capsys.readouterr().out
        assert file.read_text() == whole


def test_what_was_refused_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="changes step in its forward"):
        traced(tmp_path, Odd("counts"), {"x": torch.ones(2, 8)})
    assert not list(tmp_path.glob("*"))


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"plan_cache: cannot keep .* File exists; name another folder"):
        traced(tmp_path / "file")
    with pytest.raises(GraphError, match=r"plan_cache= is for models that are traced; UNet2DModel has a family"):
        to_layers(small_unet(), plan_cache=tmp_path)


def test_others_wait_for_the_one_that_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And go on when it is done, or gone."""
    waits, wait = threading.Event(), keeping._wait

    def waiting(file: object, path: Path) -> None:
        waits.set()
        wait(file, path)

    monkeypatch.setattr(keeping, "_wait", waiting)
    path, order = tmp_path / "model-trace-x.json", []

    def other() -> None:
        with keeping.kept_leaves(path) as leaves:
            order.append(f"other, {len(leaves.added) + len(leaves._kept)} kept")

    for dies in (True, False):
        thread = threading.Thread(target=other)
        with keeping.kept_leaves(path) as leaves:
            waits.clear()
            thread.start()
            assert waits.wait(60)
            order.append("first")
            if not dies:
                leaves.added["a leaf"] = [[], "", False, []]
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert order == ["first", "other, 0 kept", "first", "other, 1 kept"]
    assert [one.name for one in tmp_path.glob("*")] == [path.name]
