"""Every bad input is one clear PulseError, the same on every rank where all can know it; never a hang.

The tables below are the list, over a hundred: CONSTRUCTION (arguments, layer lists, configs, files), FIRST_STEPS
(data and calls that all ranks can know of before any waits) and IN_A_STEP (what comes up in the middle of a step).
Where a call is upstream's own to refuse, its words are kept.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.told import Found, assert_told, files_below, found_by
from support.toy import toy_profile

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions, make_plan
from deepspeed_pulse.planner.cost import default_cluster

MICROBATCHES = 2

DEADLOCK = [
    ["0F0", "3F0", "3B0", "0B0", "0F1", "3F1", "3B1", "0B1"],
    ["1F0", "1F1", "2F0", "2B0", "1B0", "2F1", "2B1", "1B1"],
]
"""Rank 1 waits for 0F1, which rank 0 runs after 3F0, which waits for rank 1's 2F0."""


def toy_plan(profile: Profile | None = None, *, ranks: int = 2, microbatches: int = MICROBATCHES) -> Plan:
    return make_plan(
        Job(
            profile=profile or toy_profile(microbatch_size=2),
            cluster=default_cluster(ranks, 2**40),
            pipeline_ranks=ranks,
            microbatches=microbatches,
        ),
        SearchOptions(placement="wave", schedule="wave", solver_seconds=0),
    )


def write_plan(folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(toy_plan().to_json())
    return path


def write_files(folder: Path) -> dict[str, str]:
    """Bad files of every kind, by the name of their case."""
    profile, plan = toy_profile(microbatch_size=2), toy_plan()
    first, *rest = profile.layers
    wider = replace(profile, layers=(replace(first, param_bytes=2 * first.param_bytes), *rest))
    shorter = replace(profile, layers=profile.layers[:9], skips=tuple(s for s in profile.skips if s.target < 9))
    data = plan.to_dict()
    inputs = [[action.replace("B", "I") for action in row] for row in data["schedule"]]
    renamed = [{**route, "name": route["name"].replace("s3", "s_3")} for route in data["routes"]]
    texts = {
        "broken": '{"pulse": ',
        "a list": "[1]",
        "plan truncated": plan.to_json()[:200],
        "plan of another format": json.dumps({**data, "format": "pulse-plan/3"}),
        "plan of another model": toy_plan(shorter).to_json(),
        "plan with unknown routes": json.dumps({**data, "routes": renamed}),
        "plan in deadlock": json.dumps({**data, "schedule": DEADLOCK}),
        "plan without weights' halves": json.dumps({**data, "schedule": inputs}),
        "plan of other ranks": toy_plan(ranks=3).to_json(),
        "plan of other replicas": replace(plan, data_parallel=2).to_json(),
        "plan of other microbatches": toy_plan(microbatches=3).to_json(),
        "profile of other layers": shorter.to_json(),
        "profile of other values": replace(profile, skips=profile.skips[1:]).to_json(),
        "profile of other widths": wider.to_json(),
        "profile of microbatches of 2": profile.to_json(),
        "cluster too small": small_cluster().to_json(),
    }
    paths = {name: folder / f"{name.replace(' ', '_')}.json" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    missing = str(folder / "missing.json")
    return {"missing": missing, "plan missing": missing, **{name: str(path) for name, path in paths.items()}}


def small_cluster() -> Cluster:
    return replace(default_cluster(2, 2**40), nodes=1, ranks_per_node=1, name="laptop")


CONSTRUCTION = {
    "an optimizer without a compiler": ("ConfigError", "cannot compile one", "Ninja", '"torch_adam": true'),
    "tensor-parallel topology": ("ConfigError", "tensor-parallel ('model') dimensions", "use pipe x data"),
    "block is a word": ("ConfigError", "expected an object, true or false, found 'on'"),
    "zero waves": ("ConfigError", "key 'waves': expected an integer from 1", "found 0"),
    "unknown placement": ("ConfigError", "key 'placement': expected", "found 'ring'"),
    "no time": ("ConfigError", "key 'timeout_seconds': expected a number > 0", "found 0"),
    "popped before it is stashed": ("GraphError", "layer 0 (0.Linear) pops 's2' before layer 2", "flows forward only"),
    "stashed twice": ("GraphError", "stashes 's2', which layer 2 (2.DownTime) stashed already", "one producer"),
    "popped twice": ("GraphError", "layer 4 (4.Identity) pops 'c' twice; name it once"),
    "empty name": ("GraphError", "stash and pop take a non-empty name"),
    "no LOCAL_RANK": ("ConfigError", "LOCAL_RANK is not set", "deepspeed launcher"),
    "misspelt key": ("ConfigError", "unknown key 'wavs'", 'did you mean "waves"?'),
    "never popped": ("GraphError", "layer 0 (0.First) stashes 's0', which no layer pops"),
    "no world of that size": (
        "ConfigError",
        "num_stages: expected a divisor of the world size 2 (1, 2), found 3",
        "start a multiple of 3 ranks",
    ),
    "no stages": ("ConfigError", "num_stages: expected the number of pipeline ranks", "found neither"),
    "zero stages": ("ConfigError", "num_stages: expected", "an integer >= 1 or", "found 0"),
    "auto without a batch": ("ConfigError", "train_batch_size: expected the global batch", "found none"),
    "auto without pulse": ("ConfigError", 'train_micro_batch_size_per_gpu: "auto" needs pulse', "does not disable"),
    "auto without costs": ("ConfigError", 'num_stages: "auto" needs to know what layers cost', "example_batch="),
    "auto with cuts": ("ConfigError", "beside partition_method [2, 3, 4]", "leave partition_method out"),
    "auto and a batch that nothing divides": (
        "ConfigError",
        "train_batch_size: 7 samples are no whole number of microbatches on 2 ranks",
        "train_micro_batch_size_per_gpu 3",
        "6 or 9 would do",
    ),
    "auto and numbers that contradict": ("ConfigError", "8 samples are no whole number", "16 or 32 would do"),
    "two numbers of stages": ("ConfigError", "PipelineModule was given 2", "pipeline.stages says 1", "give one"),
    "auto and a batch of a word": ("ConfigError", "train_batch_size: expected an integer >= 1", "found 'many'"),
    "auto and autotuning": ("ConfigError", "beside DeepSpeed's autotuning", 'remove the "autotuning" block'),
    "auto and tensor parallel": ("ConfigError", "expected no tensor_parallel.autotp_size", "found 2", "remove it"),
    "auto and a topology": ("ConfigError", "beside topology=", "leave one of them out"),
    "auto and too little memory": (
        "InfeasibleError",
        "nothing fits 0.001 GB a rank on 2 ranks, layers recomputed: ",
        "GB a rank would do",
    ),
    "auto and a profile of larger microbatches": (
        "ConfigError",
        "microbatch size: expected one that a profile is for, found 1",
        "there is one for 2, which stands for its multiples",
        "profile that size",
    ),
    "auto and a plan of other numbers": ("ConfigError", "the plan is for microbatches 3", "says 4", "or plan anew"),
    "auto in initialize only": ("ConfigError", 'deepspeed.initialize brings "auto"', "pass config= to PipelineModule"),
    "auto of another batch": ("ConfigError", "brings train_batch_size 16", "pass the same config to both"),
    "auto and an mpu": ("AssertionError", "mpu must be None with pipeline parallelism"),
    "topology of another world": ("ConfigError", "topology: expected 2 ranks as this job has, found 4"),
    "negative interval": ("ConfigError", "activation_checkpoint_interval: expected a number of layers >= 0, found -1"),
    "reentrant in the tuple": ("ConfigError", "activation_checkpoint_func", "one by one", "turn pulse on"),
    "an adapter that no layer has": ("GraphError", "2.Linear has a forward set on the instance (a method of a Patch)"),
    "no layers": ("ConfigError", "layers: expected at least one layer, found none"),
    "one layer": ("ConfigError", "2 pipeline ranks for 1 layers", "use fewer ranks"),
    "three layers in a wave": ("InfeasibleError", "needs at least 4 layers", "has 3", "use fewer ranks or waves"),
    "spec of no function": ("GraphError", "spec() takes a module or a function, found 3"),
    "unknown method": ("ConfigError", "partition_method: expected", "found 'perfect'"),
    "method without match": ("ConfigError", "'type:transformer' matches no layer", "UpTime"),
    "cut at no layer": ("GraphError", "0 layers are called 'stem'"),
    "too few cuts": ("ConfigError", "expected 3 (wave placement) or 1 (linear placement) inner cuts, found 2: [2, 3]"),
    "cuts backwards": ("ConfigError", "strictly increasing", "found [5, 3, 7]"),
    "too little memory": ("InfeasibleError", "no schedule found fits", "raise the memory limit"),
    "schedule of another placement": ("ConfigError", "'1f1b' does not fit placement wave", "those that do: wave"),
    "example without entry": ("BatchError", "example_batch: layer 4.Middle pops 'c'", "entries are: t, unused"),
    "example with a stashed name": ("BatchError", "example_batch", "an entry 's1'", "layer 1.Square stashes"),
    "example is no pair": ("BatchError", "example_batch: expected a batch (inputs, labels), found a dict"),
    "example of another width": ("RunError", "measuring on rank 0: RuntimeError", "in layer 0.First", "2x3 and 8x8"),
    "wrong count in the example": (
        "GraphError",
        "layer down_2 stashes 's2': expected it to return a tuple of 2 (output, s2), found a tuple of 3",
    ),
    "config of no batch size": ("ConfigError", "DeepSpeed refuses the config", "train_batch_size"),
    "config missing": ("ConfigError", "config: expected", "found no file", "missing.json"),
    "config broken": ("ConfigError", "broken.json' is no JSON file", "line 1"),
    "config a list": ("ConfigError", "expected an object in", "a_list.json", "found a list"),
    "plan missing": ("FileError", "missing.json: cannot be read"),
    "plan truncated": ("FileError", "plan_truncated.json: not a JSON file", "line 7"),
    "plan of another format": ("FileError", "field 'format': expected 'pulse-plan/2', found 'pulse-plan/3'"),
    "plan of another model": (
        "PlanError",
        "_model.json: the plan cannot run",
        "the plan cuts 9 layers, the model has 10",
    ),
    "plan with unknown routes": ("PlanError", "route 's_3': the model has no such value", 'did you mean "s3"?'),
    "plan in deadlock": ("PlanError", "deadlock: rank 1 is stuck at 1F1, which waits for 0F1 of rank 0", ">>1F1<<"),
    "plan without weights' halves": ("PlanError", "never runs: ", "plan anew with ds_pulse plan"),
    "plan of other ranks": ("PlanError", "field 'pipeline_ranks': expected 2 as this job runs, found 3"),
    "plan of other replicas": ("PlanError", "field 'data_parallel': expected 1 as this job runs, found 2"),
    "plan of other microbatches": ("PlanError", "field 'microbatches': expected 2 as this job runs, found 3"),
    "profile missing": ("FileError", "missing.json: cannot be read"),
    "profile of other layers": ("ConfigError", "expected costs of 10 layers as the model has, found 9"),
    "profile of other widths": ("ConfigError", "layer 0.First: expected 352 bytes of parameters", "found 704"),
    "profile of other values": ("ConfigError", "only the model has 's0' from layer 0 to layer 9", "profile this model"),
    "cluster missing": ("FileError", "missing.json: cannot be read"),
    "cluster too small": ("ConfigError", "2 ranks, the cluster 'laptop' has 1", "use fewer ranks or another cluster"),
    "zero 2": ("ConfigError", "zero_optimization.stage: expected 0 or 1, found 2", "use stage 1"),
    "zero 3": ("ConfigError", "expected 0 or 1, found 3"),
    "fp16": ("ConfigError", "fp16.enabled: expected a device with fp16, found 'cpu'", "use bf16 or fp32"),
    "batches cast to fp16": ("ConfigError", "fp16.auto_cast: expected false", "yield float16"),
    "autocast": ("ConfigError", "torch_autocast.enabled: expected false under pulse", "use bf16 or fp16"),
    "a breakdown that is never printed": (
        "ConfigError",
        "wall_clock_breakdown: expected steps_per_print",
        "found none",
    ),
    "a profiler that is never printed": (
        "ConfigError",
        "flops_profiler.enabled: expected steps_per_print",
        "found none",
    ),
    "tensor parallel": ("ConfigError", "tensor_parallel.autotp_size: expected none, found 2", "leave it out"),
    "sequence parallel": ("ConfigError", "sequence_parallel_size: expected none, found 2", "leave it out"),
    "dropped tokens": ("ConfigError", "random_ltd.enabled: expected false, found true", "leave it out"),
    "a curriculum of samples": ("ConfigError", "curriculum_learning.enabled beside training_data=", "a loader of your"),
    "weights stepped within a backward": ("ConfigError", "zero_optimization.zenflow: expected none", "leave it out"),
    "elastic checkpoints": ("ConfigError", "elastic_checkpoint: expected false", "leave it out"),
    "storage of each host": ("ConfigError", "use_node_local_storage: expected false", "all machines share"),
    "storage of each host without pulse": ("ConfigError", "use_node_local_storage: expected false", "leave it out"),
    "unequal halves": (
        "ConfigError",
        "expected as many parameter groups of MuonWithAuxAdam on every rank of the pipeline, found 1, 2",
    ),
    "groups that a schedule has not counted": (
        "ConfigError",
        "the optimizer lacks 1 parameter groups that other ranks of the pipeline have",
        "give every rank the same groups, empty ones too",
    ),
    "another interval in the config": (
        "ConfigError",
        "pipeline.activation_checkpoint_interval: the module was planned with 0, deepspeed.initialize brings 1",
        "pass config= to PipelineModule",
    ),
    "another block": ("ConfigError", 'another "pulse" block', "found {'waves': 2", "pass config= to PipelineModule"),
    "no block": ("ConfigError", 'another "pulse" block', "found none", "pass config= to PipelineModule"),
    "a wave only at initialize": ("ConfigError", "asks for placement 'wave'", "already cut", "pass config= to"),
    "two waves only at initialize": ("ConfigError", "asks for waves 2", "already cut", "leave the key out"),
    "an unknown key only at initialize": ("ConfigError", "unknown key 'wave'", "known: enabled, placement"),
    "a block on one rank only": ("ConfigError", "ranks 0 and 1 differ in config", "give every rank the same"),
    "a plan of other cuts only at initialize": ("PlanError", "already cut at [0, ", 'leave "plan" out'),
    "a subclass with a forward": ("ConfigError", "Wrapping.forward would never run", "put what it does into layers"),
    "a trained function only at initialize": ("GraphError", "is a function that reads trainable weights"),
}


@pytest.fixture(scope="module")
def construction(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("construction")
    paths = write_files(folder)
    before = files_below(folder)
    found = found_by("support.bad_ranks:construction", 2, paths)
    assert files_below(folder) == before
    return found


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_construction_refuses_with_the_same_words_on_every_rank(construction: Found, name: str) -> None:
    assert_told(construction, name, *CONSTRUCTION[name])


FIRST_STEPS = {
    "an instruction that never runs": (
        "ConfigError",
        "_INSTRUCTION_MAP[ForwardPass] was replaced by support.bad_ranks.replaced_instruction",
        "expected none but ReduceTiedGrads, ReduceGrads, OptimizerStep",
    ),
    "entry missing": ("BatchError", "layer 4.Middle pops 'c'", "the batch's entries are: t, unused"),
    "entry with a stashed name": ("BatchError", "an entry 's1'", "layer 1.Square stashes", "rename one"),
    "no pair": ("BatchError", "expected a batch (inputs, labels), found a Tensor", "yield pairs"),
    "no dict": ("BatchError", "layer 0.First pops 't'", "the inputs are a Tensor, not a dict"),
    "empty dict": ("BatchError", "at least one entry, found an empty dict"),
    "input is a number": ("BatchError", "to be a tensor or a tuple of tensors, found an int"),
    "no data on the first rank": ("BatchError", "the first pipeline rank was given no data", "pass data_iter"),
    "no data": ("BatchError", "the first pipeline rank was given no data"),
    "loader broken on one rank": ("BatchError", "rank 1: the first batch cannot be drawn: KeyError: 'sample 17'"),
    "loader empty on one rank": ("BatchError", "rank 1: the data iterator is empty"),
    "a number for a rank without data": (
        "BatchError",
        "the values of batch entry 'added.factor' cannot be sent: expected a tensor or a tuple of tensors",
        "found a float",
        "pipeline rank 1 reads it and was given no data: pass data_iter on every rank",
    ),
    "a number in the tuple": ("BatchError", "batch entry 'added.factor': expected a tensor", "turn pulse on"),
    "all frozen": ("ConfigError", "no layer has a trainable parameter", "unfreeze some layer"),
    "noise by rank": ("BatchError", "step 1", "batch entry 'c' of pipeline rank 1 differ", "seed noise"),
    "labels by rank": ("BatchError", "step 1: the labels of pipeline rank 1 differ"),
    "another shape in step 2": (
        "BatchError",
        "rank 0, first microbatch of step 2: batch inputs: expected [2, 8] float32 as in the first batch, found [3, 8]",
        "dynamic_shape=True); else use drop_last=True",
    ),
    "no data in step 2": (
        "BatchError",
        "rank 0 was given one data iterator in the first step of its kind and none now",
    ),
    "no data on one rank in step 2": ("BatchError", "rank 1 was given one data iterator", "and none now"),
    "no data on one rank in evaluation 2": ("BatchError", "rank 1 was given one data iterator", "and none now"),
    "all frozen in step 2": ("ConfigError", "no layer has a trainable parameter", "unfreeze some layer"),
    "all frozen after an evaluation": ("ConfigError", "no layer has a trainable parameter", "unfreeze some layer"),
    "a parameter that is none of the module's": ("ConfigError", "found 1, the first of shape [3]"),
    "averages saved on one rank": ("ConfigError", "save_checkpoint: rank 0", "tag 'one', ema=, rank 1", "no ema="),
    "averages gathered on one rank": ("ConfigError", "gather_model(): rank 0 was given", "no ema=", "every rank calls"),
    "averages of diffusers saved": ("ConfigError", "ema: expected a deepspeed_pulse.models.EMA, found diffusers."),
    "averages of diffusers gathered": ("ConfigError", "ema: expected a deepspeed_pulse.models.EMA, found diffusers."),
    "frozen on one replica": ("RunError", "parameter 3.inner.weight trains on rank 0 and is frozen on rank 1"),
    "frozen on one replica from the start": ("RunError", "trains on rank 0 and is frozen on rank 1", "in each replica"),
    "a tied copy frozen on one rank": ("RunError", "parameter tied_modules.square.weight trains on rank 0", "a tied"),
    "other microbatches than the plan": ("ConfigError", "is for 2 microbatches, the engine runs 4", 'remove "plan"'),
    "refused, then trains": ("RuntimeError", "trained"),
    "batch refused, then trains": ("RuntimeError", "trained"),
    **dict.fromkeys(
        ("a view of what is changed", "a view of what is changed, linear"),
        (
            "GraphError",
            "before the first step",
            "layer changer changes in place memory of 's3', which a later layer pops",
        ),
    ),
    **dict.fromkeys(
        (f"a weight that every forward changes, recomputed, {way}" for way in ("on", "off")),
        (
            "GraphError",
            "layer down_2 changes its weight inner.weight in every forward",
            "and runs again in backward",
            "or do not recompute this layer",
        ),
    ),
    "a weight that every forward changes": (
        "GraphError",
        "layer down_2 changes its weight inner.weight in every forward",
        "change it after engine.train_batch",
    ),
    "batch size that is no multiple": ("ConfigError", "expected a multiple of 2", "found 3"),
    "batch size of nothing": ("ConfigError", "set_train_batch_size: expected a multiple of 2", "found 0"),
    "a list for an iterator": ("BatchError", "expected an iterator of batches, found a list of 2", "RepeatingLoader"),
    "input of another name": ("BatchError", "'latents' among the batch's entries, found c, hidden, t, unused"),
    "batch function broken": ("BatchError", "the first batch cannot be drawn: TypeError"),
    "training without gradients": ("RuntimeError", "Use eval_batch() instead"),
    "backward by hand": ("PipelineError", "Only train_batch() is accessible"),
    "step by hand": ("PipelineError", "Only train_batch() is accessible"),
    "evaluation by another reduction": ("ConfigError", "reduce_output=): expected \"avg\" or None, found 'sum'"),
    "list of losses for every rank": ("ConfigError", "expected bcast_loss=False with it, found True"),
    "evaluation of no microbatches": ("ConfigError", "num_micro_batches=): expected an integer >= 1", "found 0"),
    "evaluation without data": ("BatchError", "the first pipeline rank was given no data"),
    "relayed evaluation of no microbatches": ("ConfigError", "expected an integer >= 1", "found -1"),
    "evaluation of other microbatches": ("ConfigError", "is for 2 microbatches, the engine runs 5"),
    "data over in a step of changing shapes": ("BatchError", "the data iterator ended after 1 of 2 microbatches"),
    "data over before a step of changing shapes": ("StopIteration", "the data iterator of a rank is over"),
    "data over before step 2": ("StopIteration", "the data iterator of a rank is over", "RepeatingLoader"),
    "no optimizer": ("ConfigError", "train_batch: expected an optimizer, found none", 'add an "optimizer" block'),
    "weights of a part": ("ConfigError", "save_16bit_model: a rank of a pipeline holds", "models.save_pretrained"),
    "state of a part": ("ConfigError", "module_state_dict: a rank of a pipeline holds", "save_checkpoint"),
    "a loader on one rank": ("RuntimeError", "trained"),
    "broken off, then trains": ("RuntimeError", "the same"),
    "data over on the only rank that reads": ("RuntimeError", "StopIteration the data", "; StopIteration the data"),
    "loader broken in step 2 on the only rank that reads": (
        "RuntimeError",
        "BatchError rank 0: the first batch cannot be drawn: KeyError: 'sample 17'; BatchError rank 0",
    ),
}


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by("support.bad_ranks:first_steps", 2, str(write_plan(tmp_path_factory.mktemp("first_steps"))))


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_what_a_step_refuses_is_told_to_every_rank(first_steps: Found, name: str) -> None:
    assert_told(first_steps, name, *FIRST_STEPS[name])


IN_A_STEP = {
    "wrong count": (
        "GraphError",
        "before the first step, pipeline rank 0, stage 0, microbatch 0: layer down_2 stashes 's2'",
    ),
    "no loss": ("ConfigError", "action 1F0: the last layer (there is no loss_fn)", "shape [2, 3]", "pass loss_fn="),
    "two losses": ("ConfigError", "loss_fn: expected a scalar loss, found tuple"),
    "loss of no gradient": ("ConfigError", "loss_fn: the loss depends on no trainable parameter"),
    "data ends in the step": ("BatchError", "action 0F1: the data iterator ended after 1 of 2 microbatches"),
    "another shape in the step": ("BatchError", "action 0F1: batch inputs: expected [2, 8]", "found [3, 8]"),
    "loader broken in the step": ("OSError", "shard 3 cannot be read", "step 1, pipeline rank 0", "action 0F1"),
    "another dtype in the step": ("BatchError", "batch labels: expected [2, 3] float32", "found [2, 3] float64"),
    "labels of a dtype the loss refuses": (
        "RuntimeError",
        "step 1, pipeline rank 0, stage 1, microbatch 0, action 1F0",
    ),
    "no labels": ("AttributeError", "NoneType", "action 1F0"),
    "an entry of another width": ("RuntimeError", "in layer 0.First", "before the first step"),
    "a word for a hidden state": ("GraphError", "layer 5.<lambda> returned: expected a tensor", "type str"),
    "a word for a stashed value": ("GraphError", "stashed 's3': expected a tensor", "type str"),
    "several losses for every rank": ("ConfigError", "expected a scalar loss to give to every rank, found a list of 2"),
    "outputs for every rank": ("ConfigError", "found a tensor of shape [2, 3]", "pass bcast_loss=False"),
    "an entry missing later": ("BatchError", "action 0F1: layer 4.Middle pops 'c'"),
}


@pytest.fixture(scope="module")
def in_a_step() -> Found:
    return found_by("support.bad_ranks:in_a_step", 1, None)


@pytest.mark.parametrize("name", IN_A_STEP)
def test_errors_in_a_step_name_rank_stage_microbatch_and_action(in_a_step: Found, name: str) -> None:
    assert_told(in_a_step, name, *IN_A_STEP[name])


def test_every_case_has_its_row(construction: Found, first_steps: Found, in_a_step: Found) -> None:
    for found, expected in ((construction, CONSTRUCTION), (first_steps, FIRST_STEPS), (in_a_step, IN_A_STEP)):
        assert all(rank.keys() == expected.keys() for rank in found)
