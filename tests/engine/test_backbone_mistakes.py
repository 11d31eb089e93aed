"""Users' mistakes with several backbones, a row each: one clear error, the same on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.backbone_mistake_ranks import write_files
from support.told import Found, assert_told, found_by

from deepspeed_pulse.engine.gradients.clipping import OwnNorms
from deepspeed_pulse.engine.gradients.missed import Missed
from deepspeed_pulse.errors import ConfigError

EACH = "a dict with a part for each backbone (base, upper), found"
PAIR = "expected a batch (inputs, labels), each a dict by backbone (base, upper), found a tuple of 3"
PULSE = ("ConfigError", "several backbones train by a plan", 'a "pulse" block that is not disabled')
NAME = ("ConfigError", "backbones: expected names without dots, slashes and spaces around them, found")
OTHERS = ("PlanError", "load one backbone with load_checkpoint(..., backbone=NAME)")
CLIPS = ("ConfigError", "clip_fp32_gradients: expected DeepSpeed's own with several backbones")
LACKS = ("BatchError", "backbone upper: layer", "so the batch must have it")

MISTAKES: dict[str, tuple[str, ...]] = {
    "both": ("ConfigError", "expected layers= (one backbone) or backbones= (several), found both"),
    "neither": ("ConfigError", "expected layers= (one backbone) or backbones= (several), found neither"),
    "one alone": ("ConfigError", "backbones: expected a dict of at least two", "found 1", "pass one model as layers="),
    "a list": ("ConfigError", "backbones: expected a dict of at least two Backbones by name, found list"),
    "a name with a dot": (*NAME, "'up.per'"),
    "a name with a slash": (*NAME, "'up/per'"),
    "a number as a name": (*NAME, "3"),
    "layers as a backbone": ("ConfigError", "backbones: expected a Backbone for 'upper', found list"),
    "loss_fn beside": ("ConfigError", "loss_fn= beside backbones=", "Backbone(..., loss_fn=)"),
    "input beside": ("ConfigError", "input= beside backbones=", "Backbone(..., input=)"),
    "a loss_fn in words": ("ConfigError", "backbone upper: loss_fn: expected a function", "found 'mse'"),
    "an input that is a number": ("ConfigError", "backbone upper: input: expected the name", "found 3"),
    "layers a number": ("ConfigError", "backbone upper: layers: expected a list of layers", "found 3"),
    "no layers": ("ConfigError", "backbone upper: layers: expected at least one layer, found none"),
    "a layer None": ("GraphError", "backbone upper: layer 0: expected a LayerSpec", "found None"),
    "a weight in both": ("GraphError", "backbones base and upper share a weight: 'weight' of layer base.10.Linear"),
    "pulse off": PULSE,
    "no block": PULSE,
    "num_stages auto": ("ConfigError", 'backbones beside num_stages "auto": expected numbers'),
    "waves auto": ("ConfigError", 'backbones beside waves "auto": expected numbers'),
    "cuts in the middle": ("ConfigError", "the same number of stages for each backbone", "10 (upper)"),
    "example of one": ("BatchError", f"example_batch: inputs: expected {EACH} a dict of 'hidden'"),
    "example without a part": ("BatchError", f"example_batch: inputs: expected {EACH} a dict of 'base'"),
    "frozen of nobody": ("ConfigError", "frozen part 'text': expected the name of a backbone before it (base.text, "),
    "frozen of an unknown": ("ConfigError", "frozen part 'other.text': expected the name of a backbone before it"),
    "frozen reads the other": ("ConfigError", "frozen part 'upper.t': input:", "found 'base.t'; backbones are indep"),
    "profile of one": ("ConfigError", "profile.json: expected costs of 20 layers as the model has, found 10"),
    "plan of one": ("PlanError", "plan.json: the plan cannot run", "cuts 10 layers, the model has 20"),
    "own steps of one": ("ConfigError", '"backbone_steps": "each": expected several backbones, found one'),
    "own steps in words": ("ConfigError", 'key \'backbone_steps\': expected "together", "each" or "auto", found'),
    "own steps with fp16": ("ConfigError", '"backbone_steps": "each": expected no fp16', 'use "together"'),
    "own steps with sums in backward": ("ConfigError", '"backbone_steps": "each": expected no "overlap_comm"'),
    "groups of both beside a schedule": ("ConfigError", "expected parameter groups of one backbone each", "together"),
    "clipping of its own": (*CLIPS, "found support.backbone_mistake_ranks.clip, which would clip all in one"),
    "parameters of an unknown": ("ConfigError", "(base, upper), found 'bese' (did you mean \"base\"?)"),
    "on some ranks": ("GraphError", "PipelineModule(): ranks 0 and 1 differ"),
    "clipping of one rank's own": (*CLIPS, 'leave it out, or set "gradient_clipping": 0'),
    "batch of one": ("BatchError", f"inputs: expected {EACH} a dict of 'hidden'"),
    "inputs lack a part": ("BatchError", f"inputs: expected {EACH} a dict of 'base'"),
    "labels lack a part": ("BatchError", f"labels: expected {EACH} a dict of 'base'"),
    "a part too much": ("BatchError", f"inputs: expected {EACH} a dict of 'base', 'upper', 'other'"),
    "a part is None": (*LACKS, "the inputs are None"),
    "labels a tensor": ("BatchError", f"labels: expected {EACH} a Tensor"),
    "an entry is missing": (*LACKS, "pops 'c'"),
    "three in a batch": ("BatchError", PAIR),
    "no data on one rank": ("BatchError", "every rank reads data: pipeline rank 1 was given none"),
    "no batches": ("BatchError", "the data iterator is empty"),
    "outputs asked for": ("ConfigError", "eval_batch(compute_loss=): expected True with several backbones"),
    "logits asked for": ("ConfigError", "eval_batch(return_logits=): expected False with several backbones"),
    "all losses asked for": ("ConfigError", "eval_batch(reduce_output=None)"),
    "loss on one rank": ("ConfigError", "eval_batch(bcast_loss=): expected True with several backbones"),
    "names of the other": (*LACKS, "Backbone base stashes a value 'found', but backbones are independent"),
    "another number on one rank": ("BatchError", "ranks begin different steps: rank 0 one of 2 micro", "of 4 micro"),
    "evaluated on one rank": ("BatchError", "ranks begin different steps: rank 0 one of", "(train)", "(eval)"),
    "frozen while a step goes on": ("RunError", "weights were frozen", "call engine.finish_backbones() on every rank"),
    "frozen wholly": ("ConfigError", "backbone upper: no layer has a trainable parameter", "leave the backbone out"),
    "unknown here": ("ConfigError", "load_checkpoint: backbone: expected the name of a backbone (base, upper)"),
    "unknown there": ("ConfigError", "has no backbone 'bese' (did you mean", "its backbones: base, upper"),
    "both of one": ("ConfigError", "is of one backbone, and so is this run; leave backbone= out"),
    "joint from alone": (*OTHERS, "written by a run of one backbone, this one has base, upper"),
    "joint from alone, weights": OTHERS,
    "alone from joint": (*OTHERS, "written by a run of base, upper, this one has one"),
    "other layers": ("PlanError", "backbone base has 10 layers there and 11 here", "its layer 10: none there, Linear"),
    "other layers, weights": ("PlanError", "backbone base has 10 layers there and 11 here, so all layers behind"),
    "no name": ("ConfigError", "load_checkpoint: backbone: expected a name or None, found 3"),
    "other names": ("ConfigError", "expected the same on every rank, found ['base', 'upper']"),
    "a schedule of other groups": (
        "PlanError",
        "expected a learning rate schedule of 2 parameter groups, as this run has, found one of 1",
        "load_lr_scheduler_states=False",
    ),
    "no averages": ("FileError", "expected averages in its folder ema/base, found none"),
    "two averages of one": (
        "ConfigError",
        "ema: expected one EMA for each backbone, found 2 of backbone base",
        "EMA.save(folder)",
    ),
    "averages of another": ("ConfigError", "ema: expected averages of backbone upper, found those of base"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return found_by("support.backbone_mistake_ranks:mistakes", 2, str(folder))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_refused_on_every_rank(refused: Found, name: str) -> None:
    assert_told(refused, name, *MISTAKES[name])


def test_every_mistake_has_its_row(refused: Found) -> None:
    assert all(rank.keys() == MISTAKES.keys() for rank in refused)


def test_scaled_gradients_are_not_clipped_apart() -> None:
    """Ranks of the tests have no fp16, so the check is asked itself."""
    scaled = SimpleNamespace(gradient_clipping=lambda: 0.5, fp16_enabled=lambda: True)
    with pytest.raises(ConfigError, match=r"with fp16 and several backbones: expected 0, found 0\.5"):
        OwnNorms(scaled, lambda parameter: 0, 2)


def test_gradients_on_the_host_are_not_clipped_apart() -> None:
    """Kernels that step there are compiled, so the check is asked itself."""
    options = {"fp16_enabled": lambda: False, "zero_use_cpu_optimizer": lambda: True}
    with pytest.raises(ConfigError, match=r"with zero_optimization\.offload_optimizer .*: expected 0, found 0\.5"):
        OwnNorms(SimpleNamespace(gradient_clipping=lambda: 0.5, **options), lambda parameter: 0, 2)
    assert OwnNorms(SimpleNamespace(gradient_clipping=lambda: 0.0, **options), lambda parameter: 0, 2).clip() is None


def test_a_step_that_one_backbone_missed_for_another_is_told_once() -> None:
    """Whose gradients it was is said where norms are known; where it was all of them, nobody missed anything."""
    missed, inf = Missed(["base", "upper"]), float("inf")
    assert missed.told(1, torch.tensor([inf, float("nan")])) is None
    assert "step 2: gradients of upper are not finite, so" in str(missed.told(2, torch.tensor([1.0, inf])))
    assert missed.told(3, torch.tensor([1.0, inf])) is None
    assert "step 1: gradients are not finite, so" in str(Missed(["base", "upper"]).told(1, None))
