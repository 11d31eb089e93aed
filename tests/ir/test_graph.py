"""Layer lists: named values, batch entries, and every violation at once."""

import pytest

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.graph import Graph, Layer, NamedValue


def graph(*layers):
    """Layers as (stash, pop) texts of names."""
    return Graph(
        layers=tuple(
            Layer(name=f"{i}.L", stash=tuple(stash.split()), pop=tuple(pop.split()))
            for i, (stash, pop) in enumerate(layers)
        )
    )


def test_values_and_batch_entries():
    found = graph(("a temb", ""), ("b", "temb text"), ("", "b text"), ("", "a temb"))
    assert found.values == (
        NamedValue(name="a", source=0, targets=(3,)),
        NamedValue(name="temb", source=0, targets=(1, 3)),
        NamedValue(name="b", source=1, targets=(2,)),
    )
    assert found.batch_entries == (NamedValue(name="text", source=None, targets=(1, 2)),)
    assert found.uses_names
    assert not graph(("", ""), ("", "")).uses_names


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([("a", ""), ("a", "a")], "layer 1 (1.L) stashes 'a', which layer 0 (0.L) stashed already"),
        ([("a", ""), ("", "b")], "layer 0 (0.L) stashes 'a', which no layer pops"),
        ([("skip1", ""), ("", "skip_1")], 'did you mean "skip_1"?'),
        ([("", "a"), ("a", "")], "layer 0 (0.L) pops 'a' before layer 1 (1.L) stashes it"),
        ([("a", "a")], "pops 'a' before layer 0"),
        ([("a a", ""), ("", "a")], "layer 0 (0.L) stashes 'a' twice"),
        ([("a", ""), ("", "a a")], "layer 1 (1.L) pops 'a' twice"),
    ],
)
def test_violations(layers, message):
    with pytest.raises(GraphError) as caught:
        graph(*layers)
    assert message in str(caught.value)


def test_all_violations_are_listed():
    with pytest.raises(GraphError) as caught:
        graph(("a b", "c"), ("c", ""))
    assert len(caught.value.text.splitlines()) == 1 + 3


def test_layers_by_name():
    found = Graph(layers=(Layer(name="stem"), Layer(name="head"), Layer(name="head")))
    assert found.index_of("stem") == 0
    with pytest.raises(GraphError, match="2 layers are called 'head', expected one"):
        found.index_of("head")
    with pytest.raises(GraphError, match=r'0 layers are called \'stam\', expected one \(did you mean "stem"\?\)'):
        found.index_of("stam")
