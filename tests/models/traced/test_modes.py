"""A list made in one mode runs in the other as the model does: models that are read from files come in evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.families import interpret
from torch import Tensor, nn

from deepspeed_pulse.engine.module import set_mode
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models import to_layers

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def embed(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5, self.training)


class TokenDrop(nn.Module):
    """A dropout that no class of torch's tells."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) > 0.5).to(x.dtype) if self.training else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tokens = Stem(), TokenDrop()
        self.drop, self.inplace = nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = self.begin(x, c)
        for block in self.blocks:
            x = block(x) + self.each(c)
        return self.end(x)

    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        return x

    def each(self, c: Tensor) -> Tensor:
        return c

    def end(self, x: Tensor) -> Tensor:
        return x


class AsksAMethod(Net):
    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        return self.stem.embed(x)


class AsksAChild(Net):
    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        return F.dropout(self.stem.inner(x), self.drop.p, self.drop.training)


class DropsAnEntry(Net):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return super().forward(x, self.tokens(c))


class DropsInPlace(Net):
    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        self.kept = self.stem.inner(x)
        return self.inplace(self.kept) * 1

    def end(self, x: Tensor) -> Tensor:
        return x + self.kept


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(2, WIDTH, generator=generator) for name in ("x", "c")}


@pytest.mark.parametrize("made_in", [True, False], ids=["made in training", "made in evaluation"])
@pytest.mark.parametrize("kind", [AsksAMethod, AsksAChild, DropsAnEntry])
def test_a_list_runs_in_both_modes(kind: Callable[[], Net], made_in: bool) -> None:
    torch.manual_seed(0)
    model = kind().train(made_in)
    layers = to_layers(model, example_batch=batch())
    for runs_in in (not made_in, made_in, not made_in):
        model.train(runs_in)
        [layer.layer.train(runs_in) for layer in layers]
        for seed in range(3):
            torch.manual_seed(seed)
            found = interpret(layers, batch())
            torch.manual_seed(seed)
            assert torch.equal(found, model(**batch())), (runs_in, seed)


@pytest.mark.parametrize("made_in", [True, False], ids=["made in training", "made in evaluation"])
def test_what_is_changed_in_place_in_training_is_handed_on_changed(made_in: bool) -> None:
    layers = to_layers(DropsInPlace().train(made_in), example_batch=batch())
    assert [layer.stash for layer in layers][:1] == [("inplace",)]


class LooksAtTheKind(Net):
    """Of its entry, by functions of torch's which tell a dtype."""

    def each(self, c: Tensor) -> Tensor:
        return c if c.is_floating_point() else 1 - c


def test_an_entry_of_another_kind_takes_the_other_branch() -> None:
    model = LooksAtTheKind()
    layers = to_layers(model, example_batch=batch())
    other = {**batch(), "c": torch.ones(2, WIDTH, dtype=torch.long)}
    assert torch.equal(interpret(layers, other), model(**other))


class Seeds(Net):
    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)


def test_a_forward_that_seeds_is_refused_and_leaves_no_trace() -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(
        GraphError, match=r"\(begin\): draws random numbers with a seed that code between blocks has set"
    ):
        to_layers(Seeds(), example_batch=batch())
    torch.manual_seed(5)
    model = Seeds()
    state = torch.random.get_rng_state()
    with pytest.raises(GraphError):
        to_layers(model, example_batch=batch())
    assert torch.equal(torch.random.get_rng_state(), state) and before is not None


class SeedsForATime(Net):
    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.drop(x)


class SeedsForOthers(Net):
    def end(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x


class Generates(Net):
    def begin(self, x: Tensor, c: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (SeedsForATime, r"\(begin\): draws random numbers with a seed that code between blocks has set.*in the data"),
        (Generates, r"\(begin\): draws with a torch.Generator, which layers would not seed.*draw in the data"),
        (SeedsForOthers, r"SeedsForOthers seeds torch's random numbers in its forward.*draw in the data"),
    ],
)
def test_a_forward_that_draws_with_a_seed_is_refused(kind: Callable[[], Net], told: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(GraphError, match=told):
        to_layers(kind(), example_batch=batch())


class SeedsItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(int(7 * random.Random(3).random()))
        return super().forward(F.dropout(x)) * (1 if random.random() < 2 and np.random.rand() < 2 else 0)


def test_a_block_may_draw_and_seed() -> None:
    torch.manual_seed(0)
    model = Net()
    model.blocks[1] = SeedsItself()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    layers = to_layers(model, example_batch=batch())
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist())
    assert torch.equal(interpret(layers, batch()), model(**batch()))


class Freezes(Net):
    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.stem.eval()
        return self


def stays(module: nn.Module) -> nn.Module:
    """In the mode that it has."""
    module.train = lambda mode=True: module  # type: ignore[assignment, method-assign]
    return module


def test_a_train_that_no_layer_would_run_is_refused() -> None:
    with pytest.raises(GraphError, match=r"the model itself has a train of its own \(Freezes's\), and no layer calls"):
        to_layers(Freezes(), example_batch=batch())
    model = Net()
    stays(model.blocks)
    with pytest.raises(GraphError, match=r"blocks has a train set on the instance.*module.train = lambda mode=True"):
        to_layers(model, example_batch=batch())


def test_a_train_of_what_a_layer_calls_runs() -> None:
    model = AsksAMethod()
    stays(model.blocks[1].eval())
    layers = to_layers(model, example_batch=batch())
    for mode in (True, False, True):
        [set_mode(layer.layer, mode) for layer in layers]
        assert (model.stem.inner.training, model.blocks[0].a.training) == (mode, mode)
        assert not model.blocks[1].a.training


class AsksForTheKind(Net):
    """Code that tells modules by their class, and a class that no other can be derived from."""

    class Last(Block):
        def __init_subclass__(cls) -> None:
            raise TypeError("no class is derived from this one")

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.Last()

    def each(self, c: Tensor) -> Tensor:
        return F.dropout(c, 0.5, self.training) if type(self.stem) is Stem else -c


def test_modules_keep_their_class_in_a_trace() -> None:
    torch.manual_seed(0)
    model = AsksForTheKind()
    layers = to_layers(model, example_batch=batch())
    torch.manual_seed(1)
    found = interpret(layers, batch())
    torch.manual_seed(1)
    assert torch.equal(found, model(**batch()))
    assert "training" not in vars(nn.Module)
