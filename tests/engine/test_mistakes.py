"""Users' mistakes, a row each: one clear error on every rank, before the first step, and nothing changed on disk.

The rows of a table share one launch and are reported one by one. What is wrong in files, data and calls has its tables
in ``test_bad_input.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launch import launch
from support.mistake_ranks import write_files
from support.told import Found, assert_told, files_below, found_by

NAMES = ("GraphError", "stash and pop take a non-empty name or a sequence of names, found")
LAYER = ("GraphError", "expected a LayerSpec, spec(...), a module or a function, found")
STAGES = ("ConfigError", 'num_stages: expected the number of pipeline ranks, an integer >= 1 or "auto", found')
CUTS = ("ConfigError", "partition_method: expected strictly increasing cuts inside the 10 layers (from 1 to 9), found")
CUT = ("ConfigError", "partition_method: expected cuts by layer index or name, found")
METHOD = ("ConfigError", "partition_method: expected 'profile', 'uniform'", "or a list of cuts")
CONFIG = ("ConfigError", "config: expected a DeepSpeed configuration (a dict or a file), found")
FOREIGN = ("ConfigError", "optimizer: expected parameters of the PipelineModule of this rank, found 1 of")
PATH = ("FileError", ": cannot be read: ")
PLATEAU = ("ConfigError", "lr_scheduler: expected one that steps without a loss, found ReduceLROnPlateau", "step(loss)")


def argument(name: str, expected: str) -> tuple[str, str]:
    return "ConfigError", f"{name}: expected {expected}, found"


def integer(name: str) -> tuple[str, str]:
    return argument(name, 'an integer >= 1 or "auto"')


def key(name: str, expected: str) -> tuple[str, str]:
    return "ConfigError", f"key '{name}': expected {expected}, found"


MISTAKES: dict[str, tuple[str, ...]] = {
    "pop is None": (*NAMES, "None"),
    "pop is a number": (*NAMES, "3"),
    "pop is a set": NAMES,
    "pop is a list of numbers": NAMES,
    "pop is bytes": NAMES,
    "stash is None": NAMES,
    "stash is a number": NAMES,
    "stash is a set": NAMES,
    "stash is a list of numbers": NAMES,
    "stash is bytes": NAMES,
    "tied pop is None": NAMES,
    "name is a number": ("GraphError", "a layer's name: expected a non-empty word or None, found 3"),
    "layer_name is empty": ("GraphError", "a layer's name: expected"),
    "LayerSpec of a number": ("GraphError", "LayerSpec: expected a class of modules", "found 3"),
    "LayerSpec of a module": ("GraphError", "LayerSpec: expected a class of modules", "found Linear("),
    "spec of a class": ("GraphError", "spec() takes a module or a function, found <class"),
    "tied key is None": ("GraphError", "TiedLayerSpec: expected a name", "found None"),
    "forward_fn is a number": ("GraphError", "TiedLayerSpec 'key': forward_fn: expected a function or None, found 3"),
    "layers a number": ("ConfigError", "layers: expected a list of layers, an nn.Sequential for example, found 3"),
    "layers a word": ("ConfigError", "layers: expected a list of layers"),
    "layers a dict": ("ConfigError", "layers: expected a list of layers"),
    "layers one module": ("ConfigError", "layers: expected a list of layers", "found Linear("),
    "layers of None": (*LAYER, "layer 0", "None"),
    "layers of numbers": (*LAYER, "layer 0", "1"),
    "layers of classes": (*LAYER, "the class Identity itself (LayerSpec(Identity, ...) builds one)"),
    "layers a dict of modules": (*LAYER, "'a'"),
    "layers with one None": (*LAYER, "layer 5", "None"),
    "layers of no arguments": ("GraphError", "a layer Linear cannot be built: TypeError", "in_features"),
    "loss_fn is 3": argument("loss_fn", "a function of the model's output and the labels"),
    "loss_fn is 'mse'": argument("loss_fn", "a function of the model's output and the labels"),
    "input is 3": argument("input", "the name of the first layer's input"),
    "input is None": argument("input", "the name of the first layer's input"),
    "input is ''": argument("input", "the name of the first layer's input"),
    "frozen is 3": argument("frozen", "FrozenSpecs by the name that layers pop"),
    "frozen is ['c']": argument("frozen", "FrozenSpecs by the name that layers pop"),
    "frozen is {'c': 3}": ("ConfigError", "frozen: expected a FrozenSpec under the name", "found 3 under 'c'"),
    "frozen is {3: FrozenSpec(layers=[Identity()], input='c', dty": ("ConfigError", "frozen: expected", "under 3"),
    "frozen part of a number": (*LAYER, "frozen part 'c': layer 0"),
    "frozen part of nothing": ("GraphError", "frozen part 'c': expected at least one layer"),
    "frozen part reading a number": ("ConfigError", "frozen part 'c': input: expected the name", "found 3"),
    "frozen part of a dtype in words": ("ConfigError", "frozen part 'c': dtype: expected a torch.dtype or None"),
    "frozen part on ranks in words": ("ConfigError", "frozen part 'c': ranks: expected pipeline ranks or None"),
    "example_batch is 3": ("BatchError", "example_batch: expected a batch (inputs, labels), found an int"),
    "example_batch is 'batch'": ("BatchError", "example_batch: expected a batch (inputs, labels), found a str"),
    "example_batch is {}": ("BatchError", "example_batch: expected a batch (inputs, labels), found a dict"),
    "seed_layers is 'yes'": argument("seed_layers", "True or False"),
    "seed_layers is 1.5": argument("seed_layers", "True or False"),
    "base_seed is 'seed'": argument("base_seed", "an integer"),
    "base_seed is None": argument("base_seed", "an integer"),
    "base_seed is 1.5": argument("base_seed", "an integer"),
    "seed_fn is 3": argument("seed_fn", "a function of a seed"),
    "dynamic_shape is 'yes'": argument("dynamic_shape", "True or False"),
    "activation_checkpoint_interval is -1": argument("activation_checkpoint_interval", "a number of layers >= 0"),
    "activation_checkpoint_interval is 'two'": argument("activation_checkpoint_interval", "a number of layers >= 0"),
    "activation_checkpoint_interval is 1.5": argument("activation_checkpoint_interval", "a number of layers >= 0"),
    "activation_checkpoint_interval is True": argument("activation_checkpoint_interval", "a number of layers >= 0"),
    "activation_checkpoint_func is 3": argument("activation_checkpoint_func", "a checkpoint function"),
    "checkpointable_layers is 'Middle'": argument("checkpointable_layers", "a list of class names"),
    "checkpointable_layers is 3": argument("checkpointable_layers", "a list of class names"),
    "checkpointable_layers is [3]": argument("checkpointable_layers", "a list of class names"),
    "topology is 3": argument("topology", "a ProcessTopology of DeepSpeed"),
    "partition_method is 3": METHOD,
    "partition_method is {'a': 1}": METHOD,
    "partition_method is [1.5, 3.0, 5.0]": (*CUT, "1.5 in [1.5, 3.0, 5.0]"),
    "partition_method is [True, 3, 5]": (*CUT, "True"),
    "partition_method is [-3, 2, 5]": (*CUTS, "[-3, 2, 5]"),
    "partition_method is [2, 2, 5]": CUTS,
    "partition_method is [2, 5, 99]": CUTS,
    "cuts at no layer": ("GraphError", "0 layers are called 'nowhere', expected one"),
    "cuts of None": (*CUT, "None"),
    "cuts at the end": CUTS,
    "cuts at the start": CUTS,
    "cuts of floats without pulse": CUT,
    "cuts out of range without pulse": CUTS,
    **{f"num_stages is {value}": (*STAGES, value) for value in ("0", "-1", "True", "1.5", "'two'", "[2]")},
    **{f"num_stages is {value} without pulse": STAGES for value in ("0", "-1", "True", "1.5", "'two'", "[2]")},
    "config is a list": (*CONFIG, "[1]"),
    "config is a number": CONFIG,
    "config is True": CONFIG,
    "config is bytes": CONFIG,
    "config is empty": CONFIG,
    "config is a folder": (*CONFIG, "no file"),
    "config is binary": ("ConfigError", "binary' is no JSON file"),
    "config is nested for ever": ("ConfigError", "nested.json' is no JSON file: maximum recursion depth"),
    **{
        f"{name} is {value}": (*integer(name), value)
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
        for value in ("'2'", "2.5", "0", "-2", "[2]", "True")
    },
    **{
        f"{name} is {what}": PATH
        for name in ("plan", "profile", "cluster")
        for what in ("a folder", "binary", "missing", "below a file", "no path")
    },
    **{f"plan is {value}": key("plan", "a path or null") for value in ("3", "''", "['a']", "True")},
    **{f"profile is {value}": key("profile", '"auto" or a path') for value in ("3", "''", "['a']", "True")},
    **{f"cluster is {value}": ("ConfigError", "key 'cluster': expected") for value in ("3", "''", "['a']", "True")},
    **{f"plan_cache is {value}": key("plan_cache", "a path or null") for value in ("3", "''", "True")},
    **{f"trace is {value}": key("trace", "a path or null") for value in ("3", "''", "True")},
    **{
        f"plan_cache is {what}": ("FileError", "plan_cache: cannot keep", "name another folder")
        for what in ("a file", "below a file", "no path", "beyond reach")
    },
    "optimizer over foreign parameters": (*FOREIGN, "1 of 1 that are not (the first of shape [2, 2])"),
    "optimizer over some foreign parameters": FOREIGN,
    "optimizer over foreign parameters on one rank": FOREIGN,
    "optimizer factory over foreign parameters": FOREIGN,
    "foreign model_parameters": FOREIGN,
    "optimizer is a number": ("AssertionError", "Client Optimizer is of unexpected type"),
    "optimizer that exchanges weights": (
        "ConfigError",
        "found Exchanging, whose step calls all_gather as if all ranks had the same weights",
        "SingleDeviceMuon",
    ),
    "optimizer that sums an estimate of nothing": (
        "ConfigError",
        "Adapting(fsdp_in_use=True): expected weights to train on every rank, found none on rank 1",
    ),
    "schedule of losses": PLATEAU,
    "schedule of losses without pulse": PLATEAU,
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    before = files_below(folder)
    found = found_by("support.mistake_ranks:mistakes", 2, str(folder))
    assert files_below(folder) == before
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_refused_on_every_rank(refused: Found, name: str) -> None:
    assert_told(refused, name, *MISTAKES[name])


def test_every_mistake_has_its_row(refused: Found) -> None:
    assert all(rank.keys() == MISTAKES.keys() for rank in refused)


FOUND = {
    "None": "found None",
    "a number": "found a value of type float",
    "a word": "found a value of type str",
    "an empty tuple": "found a tuple of nothing",
    "a nested tuple": "found a tuple of Tensor, tuple",
    "a tuple with None": "found a tuple of Tensor, NoneType",
    "a dict": "found a value of type dict",
    "a list of numbers": "found a list of int, int",
}
WAYS = ("cut between", "cut before", "cut behind", "recomputed")


@pytest.fixture(scope="module")
def handed_on() -> Found:
    return found_by("support.mistake_ranks:handed_on", 1, None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", FOUND)
@pytest.mark.parametrize("role", ["stash", "hidden state"])
def test_what_cannot_travel_is_refused_wherever_the_cut_is(handed_on: Found, role: str, what: str, way: str) -> None:
    verb = "stashed 'odd'" if role == "stash" else "returned"
    where = f"layer odd_one {verb}: expected a tensor or a tuple of tensors, which can travel between ranks"
    assert_told(handed_on, f"{role} is {what}, {way}", "GraphError", "microbatch 0", where, FOUND[what])


def test_measuring_refuses_it_too(handed_on: Found) -> None:
    assert_told(handed_on, "measured on an example", "GraphError", "layer odd_one stashed 'odd'", "found None")


def test_what_looks_odd_and_is_right(tmp_path: Path) -> None:
    """An nn.Sequential and a generator of layers; a folder for a trace; an optimizer that leaves parameters out.

    One that adapts a learning rate on each rank, and float16 without loss scaling: told once.
    """
    outputs = [output for _, output in launch("support.mistake_ranks:accepted", 2, str(tmp_path), timeout=200)]
    for said in (
        "the optimizer was not given 9 trainable parameters, which stay as they are: 0.inner.bias, 0.embed.bias, ",
        "warning: Adapting estimates one learning rate of all weights that it steps, and each rank steps others",
        "warning: train_batch inside torch.autocast of float16: the loss is not scaled",
    ):
        assert [output.count(said) for output in outputs] == [1, 0], said
    assert all("ACCEPTED" in output for output in outputs)
