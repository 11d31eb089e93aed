"""What ranks run in the tests of loading and saving diffusers models."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.parity import TOLERANCE, RecordingSGD, mse, share_groups
from support.reference import error
from support.small_models import small_sd_unet
from support.small_unet import unet_batch

TRAINED_STEPS = 2
MMAP_THRESHOLD = -3
"""Of glibc's mallopt: larger pieces of memory go back to the system as soon as they are freed."""


def make_engine(layers: list[Any], ranks: int, microbatches: int = 2, **config: Any) -> Any:
    """An engine over ``ranks`` pipeline ranks for a layer list of the small SD U-Net."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
        **config,
    }
    module = PipelineModule(layers=layers, num_stages=ranks, loss_fn=mse, config=config, input="sample")
    trainable = [p for p in module.parameters() if p.requires_grad]
    sgd = RecordingSGD(trainable, lr=0.05, momentum=0.9)
    optimizer = torch.optim.AdamW(trainable) if "bf16" in config else sgd  # ZeRO knows Adam
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def batches(engine: Any, step: int, dtype: torch.dtype = torch.float32) -> Any:
    for microbatch in itertools.count():
        inputs, labels = unet_batch(step, microbatch, engine.grid.data_parallel_id)
        cast = {name: v.to(dtype) if v.is_floating_point() else v for name, v in inputs.items()}
        yield cast, labels.to(dtype)


def run(folders: dict[str, str]) -> None:
    """Everything below, in one launch of 4 ranks."""
    share_groups()
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**16)  # else freed tensors stay, and memory cannot be measured
    draws_the_same_for_every_plan(folders["pretrained"])  # also loads what else takes memory: planner, libraries
    holds_its_share(folders["large"])
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**25)
    trains_as_the_whole_model(folders)
    saves_half_precision(folders["precisions"])
    print("PASSED", flush=True)


def saves_half_precision(folder: str) -> None:
    """Trained in bfloat16 and saved: the files hold what the ranks hold, or the optimizer's fp32 weights.

    The model comes in channels_last, which DeepSpeed's optimizer does not keep.
    """
    from deepspeed_pulse.models import save_pretrained, to_layers

    for name, ranks, config in (
        ("zero1", 2, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("bf16", 4, {"bf16": {"enabled": True}}),
    ):
        torch.manual_seed(0)
        unet = small_sd_unet().to(memory_format=torch.channels_last)
        engine = make_engine(to_layers(unet), ranks, **config)
        engine.train_batch(batches(engine, 0, torch.bfloat16))
        save_pretrained(engine, f"{folder}/{name}", max_shard_size="1MB")
        check_files(engine, Path(folder, name), torch.bfloat16)
        save_pretrained(engine, f"{folder}/{name} masters", dtype=torch.float32)
        check_files(engine, Path(folder, f"{name} masters"), torch.float32, rounds_to=torch.bfloat16)
        engine.destroy()


def check_files(engine: Any, folder: Path, dtype: torch.dtype, rounds_to: torch.dtype | None = None) -> None:
    """Every rank finds its own weights in the folder, complete when the call returns."""
    from safetensors.torch import load_file

    written: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        written.update(load_file(path))
    inexact = 0
    for _, layer in engine.module.local_layers():
        for key, weight in layer.state_dict().items():
            assert written[key].dtype == dtype, (folder, key)
            assert torch.equal(written[key].to(rounds_to or dtype), weight), (folder, key)
            inexact += int(not torch.equal(written[key], weight.to(dtype)))
    assert bool(inexact) == (rounds_to is not None), (folder, inexact)


def trains_as_the_whole_model(folders: dict[str, str]) -> None:
    """Loss and gradients of the first step, and the weights after the last, are those of the model's own forward."""
    from diffusers import UNet2DConditionModel

    from deepspeed_pulse.models import from_pretrained, save_pretrained

    microbatches = 2
    engine = make_engine(from_pretrained(folders["pretrained"]), 4, microbatches)
    whole = UNet2DConditionModel.from_pretrained(folders["pretrained"]).train()
    optimizer = RecordingSGD(whole.parameters(), lr=0.05, momentum=0.9)
    names = dict(whole.named_parameters())
    for step in range(TRAINED_STEPS):
        loss = float(engine.train_batch(batches(engine, step)).detach())
        optimizer.zero_grad()
        expected = 0.0
        for inputs, labels in itertools.islice(batches(engine, step), microbatches):
            share = mse(whole(**inputs).sample, labels) / microbatches
            share.backward()
            expected += float(share.detach())
        optimizer.step()
        assert abs(loss - expected) <= TOLERANCE * expected, (step, loss, expected)
        scale = max(float(gradient.norm()) for gradient in optimizer.seen.values())
        for _, layer in engine.module.local_layers():
            for name, parameter in layer.named_parameters():
                gradient = optimizer.seen[id(names[name])]
                if float(gradient.norm()) > 1e-6 * scale:
                    assert error(engine.optimizer.seen[id(parameter)], gradient) <= TOLERANCE, (step, name)
                assert error(parameter, names[name]) <= TOLERANCE, (step, name)
    save_pretrained(engine, folders["trained"], max_shard_size="2MB")
    if engine.global_rank == 0:
        whole.save_pretrained(folders["expected"], max_shard_size="2MB")
    engine.destroy()


def holds_its_share(
    folder: str, kind: str = "UNet2DModel", inputs: dict[str, Any] | None = None, most_of_it: float = 0.4
) -> None:
    """Loading, with and without measuring costs, never takes more than 40 % of the model's bytes on a rank.

    ``inputs``: of a model without a family, which is traced.
    """
    import diffusers

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.models import from_pretrained
    from deepspeed_pulse.models.weights.lazy import LazyLayer

    with torch.device("meta"):
        config = getattr(diffusers, kind).load_config(folder)
        whole = sum(p.numel() * 4 for p in getattr(diffusers, kind).from_config(config).parameters())
    traced = {} if inputs is None else {"example_batch": inputs}
    inputs = inputs or {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([7])}
    first = next(iter(inputs))
    example = (inputs, torch.randn(inputs[first].shape))
    # links are given: measuring them takes messages of some megabytes, whatever the model
    pulse = {"solver_seconds": 0, "placement": "wave", "cluster": "a100:1x4"}
    build, cuts = LazyLayer.build, None
    for example_batch in (None, example):
        gc.collect()
        gc.freeze()  # what is there already is not counted
        most = [0]

        def counting(self: Any, log: bool = False, most: list[int] = most) -> Any:
            made = build(self, log)
            most[0] = max(most[0], new_bytes())
            return made

        LazyLayer.build = counting
        with resident_bytes() as resident:
            module = PipelineModule(
                layers=from_pretrained(folder, **traced),
                num_stages=4,
                loss_fn=mse,
                config={"train_micro_batch_size_per_gpu": 1, "pulse": pulse},
                input=first,
                example_batch=example_batch,
                partition_method=cuts,  # cut by parameters both times: measured times differ from run to run
            )
            cuts = module.plan.boundaries[1:-1]
        LazyLayer.build = build
        mine = sum(p.numel() * 4 for p in module.parameters())
        print(
            f"SHARE measured={example_batch is not None} own={mine / whole:.3f} tensors={most[0] / whole:.3f} "
            f"resident={resident[0] / whole:.3f}",
            flush=True,
        )
        assert mine <= most[0] <= most_of_it * whole, (mine, most, whole)
        assert resident[0] <= most_of_it * whole, (resident, whole)
        del module
    gc.unfreeze()


def new_bytes() -> int:
    """Bytes of all tensors of this process that are newer than ``gc.freeze``, each storage once."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def resident_bytes() -> Iterator[list[int]]:
    """The most memory that this process had of its own (not the pages of files), beyond what it had before."""

    def now() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024

    gc.collect()
    start, most, done = now(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], now() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()
        most[0] = max(most[0], now() - start)


def draws_the_same_for_every_plan(folder: str) -> None:
    """Initial weights of 4 ranks, cut in two ways, upstream's way too, are those that one process draws."""
    from diffusers import UNet2DConditionModel

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.models import from_config
    from deepspeed_pulse.models.weights.skeleton import Skeleton

    config = UNet2DConditionModel.load_config(folder)
    skeleton = Skeleton(lambda: UNet2DConditionModel.from_config(config), seed=5)
    expected = skeleton.initial(list(skeleton.entries))
    for pulse, method in (({"solver_seconds": 0, "placement": "wave"}, None), (False, "parameters")):
        torch.manual_seed(17)  # must not matter
        module = PipelineModule(
            layers=from_config(folder, seed=5),
            num_stages=4,
            loss_fn=mse,
            config={"train_micro_batch_size_per_gpu": 1, "pulse": pulse},
            input="sample",
            partition_method=method,
        )
        found = {key: value for _, layer in module.local_layers() for key, value in layer.state_dict().items()}
        assert 0 < len(found) < len(expected)
        for key, value in found.items():
            assert torch.equal(value, expected[key]), key
