"""Ranks that bring different things, or meet something alone: one error, the same everywhere, naming what differs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.launch import launch

SAME = "on every rank"
CASES: dict[str, tuple[str, ...]] = {
    "eight layers and six": ("GraphError", "rank 0 has 8 layers, rank 1 has 6", SAME),
    "other classes": ("GraphError", "differ in layer 3", "Down", "Up2", SAME),
    "other names": ("GraphError", "differ in layer 6: rank 0 has 6.Up", "rank 1 has ascent", SAME),
    "other arguments": ("GraphError", "differ in layer 7", '{"bias": true}', '{"bias": false}'),
    "other pops": ("GraphError", "differ in layer 4", '"c", "temb"', '"c", "t"'),
    "other shapes": ("GraphError", "differ in layer 7: rank 0 has head", "(8, 8)", "(3, 8)"),
    "frozen on one rank": ("GraphError", "differ in layer 7", "frozen"),
    "other functions": ("GraphError", "differ in layer 8", "tanh", "relu"),
    "other cuts": ("ConfigError", "differ in partition_method: rank 0 has [4], rank 1 has [5]", SAME[3:]),
    "another number of stages": ("ConfigError", "differ in num_stages: rank 0 has 2, rank 1 has 1"),
    "another block": ("ConfigError", 'differ in config: "pulse"', '"waves": 2'),
    "a plan on one rank": ("ConfigError", 'differ in config: "pulse"', '"plan": "a path"'),
    "pulse on one rank": ("ConfigError", 'differ in config: "pulse"', '"enabled": false'),
    "no config on one rank": ("ConfigError", "found no file '/nowhere/config.json'"),
    "other accumulation": ("ConfigError", "differ in config: gradient_accumulation_steps: rank 0 has 2, rank 1 has 4"),
    "other clipping": ("ConfigError", "differ in config: gradient_clipping: rank 0 has 0.0, rank 1 has 1.0"),
    "another loss": ("ConfigError", "differ in loss_fn", "toy.loss_fn", "squared"),
    "another loss module": ("ConfigError", "differ in loss_fn", "MSELoss", "L1Loss"),
    "another seed": ("ConfigError", "differ in base_seed: rank 0 has 1, rank 1 has 2"),
    "seeded on one rank": ("ConfigError", "differ in seed_layers: rank 0 has true, rank 1 has false"),
    "another interval": ("ConfigError", "differ in activation_checkpoint_interval: rank 0 has 0, rank 1 has 1"),
    "a list that ends in an error": ("RunError", "OSError: the shard index is not there"),
    "a misspelt key on one rank": ("ConfigError", "unknown key 'wavs'"),
    "an unknown name on one rank": ("GraphError", "s0"),
    "a constructor that fails on one rank": ("RunError", "rank 1, while its layers are built", "no such shard"),
    "an example on one rank": ("ConfigError", "differ in example_batch", "rank 1 has null"),
    "another frozen part": ("ConfigError", "differ in frozen", "(8, 8)", "(3, 8)"),
    "what may differ": ("RuntimeError", "accepted"),
    "settings with a rank": ("RuntimeError", "accepted"),
    "a monitor of one rank": ("RuntimeError", "accepted"),
    "a monitor of one rank, pulse off": ("RuntimeError", "accepted"),
    "another accumulation in initialize": ("ConfigError", "deepspeed.initialize", "gradient_accumulation_steps"),
    "resized on one rank": (
        "BatchError",
        "rank 0 one of 2 microbatches of 2 samples (train), rank 1 one of 4 microbatches of 2 samples (train)",
    ),
    "evaluated with another number": ("BatchError", "rank 0 one of 2 microbatches", "rank 1 one of 3", "(eval)"),
    "one trains and one evaluates": ("BatchError", "(train)", "(eval)"),
    "plans are kept": ("RuntimeError", "planned once each"),
}


def errors_of(output: str) -> dict[str, tuple[str, str]]:
    rows = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE ")]
    return {name: (kind, text) for name, kind, text in rows}


def run(target: str) -> list[dict[str, tuple[str, str]]]:
    return [errors_of(output) for _, output in launch(f"support.differing_ranks:{target}", 2, timeout=240)]


@pytest.fixture(scope="module")
def disagreeing() -> list[dict[str, tuple[str, str]]]:
    return run("cases")


@pytest.fixture(scope="module")
def other_engines() -> list[dict[str, tuple[str, str]]]:
    return run("engines")


def check(found: list[dict[str, tuple[str, str]]], name: str, expected: tuple[str, ...]) -> None:
    first, second = (errors.get(name, ("nothing", "the case was not reached")) for errors in found)
    assert first == second
    kind, *parts = expected
    assert first[0] == kind, first
    for part in parts:
        assert part in first[1], first


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_disagree(disagreeing: Any, name: str) -> None:
    check(disagreeing, name, CASES[name])


ENGINES = {
    "a subclass of PipelineEngine": ("ConfigError", "with a plan was given to", "PluginEngine", '"enabled": false'),
    "a plugin's __new__": ("ConfigError", "with a plan was given to deepspeed.runtime.pipe.engine.PipelineEngine"),
    "a plain engine around it": ("ConfigError", "with a plan was given to", "DeepSpeedEngine"),
    "called directly": ("ConfigError", "with a plan was called directly", "engine.train_batch"),
    "a subclass of its own engine": ("RuntimeError", "trained"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_planned_module_runs_by_its_own_engine_only(other_engines: Any, name: str) -> None:
    check(other_engines, name, ENGINES[name])
