"""Constructs of programs written for DeepSpeed's ``PipelineModule``: each trains as with upstream's class."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.versions import has_checkpoints, mend_upstream
from torch import nn

WIDTH, STEPS, MICROBATCHES = 6, 3, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}
BLOCKS: dict[str, Any] = {
    "no block": {},
    "a block": {"pulse": {"solver_seconds": 0, "timeout_seconds": 60}},
    "off": {"pulse": {"enabled": False}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) + x


def batches() -> Iterator[Any]:
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        yield torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


def modules(count: int = 6) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Block() for _ in range(count)]


def train(module: Any, config: dict[str, Any], *, data: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """Losses of a few steps, the engine's class, and the engine."""
    import deepspeed

    made = optimizer or torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=made, config=copy.deepcopy({**CONFIG, **config}))
    return losses(engine, data, **options), engine


def losses(engine: Any, data: Any = None, steps: int = STEPS) -> list[float]:
    data = batches() if data is None else data
    return [float(engine.train_batch(data).detach()) for _ in range(steps)]


def block_at_initialize(base: Any, config: dict[str, Any]) -> Any:
    """The module is built without a config."""
    module = base(layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss)
    found, engine = train(module, config)
    evaluated = float(engine.eval_batch(batches(), num_micro_batches=2).detach())
    return [*found, evaluated]


def tied_at_initialize(base: Any, config: dict[str, Any]) -> Any:
    """With tied layers, one of them with a ``forward_fn``."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    weights = {"tied_weight_attr": ["inner.weight", "inner.bias"]}
    layers = [
        TiedLayerSpec("tied", Block, **weights),
        *(LayerSpec(Block) for _ in range(4)),
        TiedLayerSpec("tied", Block, forward_fn=lambda module, x: module.inner(x), **weights),
    ]
    arguments = {"num_stages": 2, "loss_fn": nn.functional.mse_loss, "seed_layers": True, "partition_method": "uniform"}
    module = base(layers=layers, **arguments)
    return train(module, config)[0]


class Words(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


def functions_of_the_module(base: Any, config: dict[str, Any]) -> Any:
    """A subclass whose tied head and loss hold the module itself; its config comes late, then with the layers."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    class Program(base):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            self.scale, self.last_loss = 0.5, None

            def head(embed: Any, x: torch.Tensor) -> torch.Tensor:
                scale = self.scale * self.tied_modules.embed.words.weight.shape[1] / WIDTH
                return scale * x @ embed.words.weight.t()

            tied = {"tied_weight_attr": ["words.weight"]}
            layers = [
                TiedLayerSpec("embed", Words, **tied),
                *(LayerSpec(Block) for _ in range(4)),
                TiedLayerSpec("embed", Words, forward_fn=head, **tied),
            ]
            usual = {"num_stages": 2, "seed_layers": True, "partition_method": "uniform"}
            super().__init__(layers=layers, loss_fn=self.measure, **usual, **given)

        def measure(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100)
            self.last_loss = loss.detach()
            return loss

    found = train(Program(), config, data=words())[0]
    if config:
        again = train(Program(config={**CONFIG, **config}), config, data=words())[0]
        assert all(abs(a - b) < 1e-6 for a, b in zip(again, found, strict=True)), (again, found)
    return found


def words() -> Iterator[Any]:
    return ((ids, labels) for (ids, _, _), labels in sentences())


def own_cuts(base: Any, config: dict[str, Any]) -> Any:
    """A subclass cuts the layers by itself."""

    class Manual(base):  # type: ignore[misc]
        def __init__(self, *args: Any, split: list[int], **kwargs: Any) -> None:
            self.split = split
            super().__init__(*args, **kwargs)

        def _partition_layers(self, method: str = "uniform") -> None:
            if method != "manual":
                super()._partition_layers(method)
                return
            self.parts = [0, *self.split, len(self._layer_specs)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    module = Manual(
        layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="manual", split=[1]
    )
    found = train(module, config)[0]
    return [*found, list(module.parts), len(module.forward_funcs)]


def own_cuts_with_config(base: Any, config: dict[str, Any]) -> Any:
    """The same, with the config given to the module where it is ours."""
    given = {} if base.__module__.startswith("deepspeed.") else {"config": {**CONFIG, **config}}
    return own_cuts(lambda_base(base, given), config)


def lambda_base(base: Any, given: dict[str, Any]) -> Any:
    class WithConfig(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, **given})

    return WithConfig


def own_clipping(base: Any, config: dict[str, Any]) -> Any:
    """The program puts its own clipping in the place of DeepSpeed's."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    calls: list[float] = []

    def clip(self: Any) -> None:
        calls.append(float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.gradient_clipping())))

    before = DeepSpeedEngine.clip_fp32_gradients
    DeepSpeedEngine.clip_fp32_gradients = clip
    try:
        module = base(layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss)
        return [*train(module, {**config, "gradient_clipping": 0.01})[0], calls]
    finally:
        DeepSpeedEngine.clip_fp32_gradients = before


def own_reduction(base: Any, config: dict[str, Any]) -> Any:
    """The program assigns its own reduction of gradients, after the engine was made."""
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import ReduceGrads

    calls: list[int] = []

    def reduce(self: Any) -> None:
        for parameter in self.module.parameters():
            calls.append(parameter.grad.mul_(2).numel())

    module = base(layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss)
    first, engine = train(module, config)
    before = PipelineEngine._INSTRUCTION_MAP[ReduceGrads]
    PipelineEngine._INSTRUCTION_MAP[ReduceGrads] = reduce
    try:
        return [*first, *losses(engine), len(calls)]
    finally:
        PipelineEngine._INSTRUCTION_MAP[ReduceGrads] = before


def optimizer_later(base: Any, config: dict[str, Any]) -> Any:
    """``deepspeed.initialize`` gets no optimizer; one is made with the engine, and a scheduler of torch's over it."""
    import deepspeed

    module = base(layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=module, config=copy.deepcopy({**CONFIG, **config}))
    parameters = [p for p in module.parameters() if p.requires_grad]
    engine._configure_optimizer(lambda given: torch.optim.SGD(given, lr=0.1), parameters)
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    return losses(engine)


def intervals_later(base: Any, config: dict[str, Any]) -> Any:
    """Activation checkpointing is switched on, changed and switched off between steps."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    calls = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return checkpointing.non_reentrant_checkpoint(*args)

    module = base(layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss, activation_checkpoint_func=counted)
    found, engine = train(module, config)
    counts = []
    for interval in (1, 3, 0):
        calls.clear()
        module.set_checkpoint_interval(interval)
        found += losses(engine, steps=1)
        counts.append(len(calls))
    return [*found, counts]


def absent_classes(base: Any, config: dict[str, Any]) -> Any:
    """``checkpointable_layers`` names classes that this model has not, as a framework for many models does."""
    module = base(
        layers=modules(),
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        activation_checkpoint_interval=1,
        checkpointable_layers=["GMLPBlock", "ParallelTransformerLayerPipe"],
    )
    return train(module, config)[0]


def groups_of(module: Any) -> list[dict[str, Any]]:
    """Biases without decay; a rank that has none gives one group less."""
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    return [{"params": decayed}, *([{"params": others, "weight_decay": 0.0}] if others else [])]


def groups_dropped(base: Any, config: dict[str, Any]) -> Any:
    """Ranks have other numbers of parameter groups."""
    found = []
    for precision in ({}, {"bf16": {"enabled": True}}):
        layers = modules()
        layers[:2] = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        module = base(layers=layers, num_stages=2, partition_method="uniform", loss_fn=loss_of)
        settings = {**config, **precision, "gradient_clipping": 0.0}
        optimizer = torch.optim.SGD(groups_of(Biased(module)), lr=0.1, weight_decay=0.1)
        found += train(module, settings, data=batches_of(precision), optimizer=optimizer)[0]
    if config.get("pulse") == BLOCKS["a block"]["pulse"]:  # upstream's ranks wait for each other for ever
        sharded = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        assert groups_dropped(base, {**config, **sharded, "pulse": {"solver_seconds": 0}})[:STEPS] == found[:STEPS]
    return found


class Biased:
    """The first rank's layers lose their biases."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def parameters(self) -> list[torch.Tensor]:
        import os

        return [p for p in self._module.parameters() if os.environ["RANK"] == "1" or p.ndim > 1]


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), labels.float())


def batches_of(precision: dict[str, Any]) -> Iterator[Any]:
    return ((x.bfloat16(), y) if precision else (x, y) for x, y in batches())


def labels_of_other_data(base: Any, config: dict[str, Any]) -> Any:
    """Data is not seeded alike on the ranks: inputs are the first rank's, labels the last one's."""
    module = base(layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss)
    later = itertools.islice(batches(), 100 * torch.distributed.get_rank(), None)
    return train(module, config, data=later)[0]


class Embed(nn.Module):
    """Hidden state, mask and labels travel in the tuple, two of them whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH).requires_grad_(False)

    def forward(self, batch: Any) -> Any:
        ids, mask, labels = batch
        return self.table(ids), mask, labels


class LowRank(nn.Module):
    """A frozen layer with a trained part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, batch: Any) -> Any:
        hidden, mask, labels = batch
        changed = torch.tanh(self.base(hidden) + self.up(self.down(hidden)))
        return hidden + changed * mask[..., None], mask, labels


class LossHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 9).requires_grad_(False)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden, _, labels = batch
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def sentences() -> Iterator[Any]:
    for seed in itertools.count():
        ids = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        yield (ids, mask, labels), labels


def loss_in_the_last_layer(base: Any, config: dict[str, Any]) -> Any:
    """No ``loss_fn``: adapters on frozen layers, labels in the tuple; evaluated too."""
    torch.manual_seed(1)
    layers = [Embed(), *(LowRank() for _ in range(4)), LossHead()]
    module = base(layers=layers, num_stages=2, partition_method="parameters")
    found, engine = train(module, config, data=sentences())
    return [*found, float(engine.eval_batch(sentences()))]


def picture_layers() -> list[Any]:
    """A list as ``[*net.features, net.avgpool, flatten, *net.classifier]`` gives it, with in-place layers apart."""
    torch.manual_seed(1)
    features = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)]
    classifier = [nn.Dropout(0.0), nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(8, 5)]
    return [*features, nn.AdaptiveAvgPool2d(2), lambda x: torch.flatten(x, 1), *classifier]


def picture(index: int) -> tuple[torch.Tensor, int]:
    return torch.randn(3, 10, 10, generator=torch.Generator().manual_seed(index)), index % 5


def in_place_layers(base: Any, config: dict[str, Any]) -> Any:
    """A list of modules and a function, fed by ``training_data``."""
    import deepspeed

    found = []
    for method in ("parameters", "uniform"):
        loss_fn = nn.CrossEntropyLoss()
        module = base(layers=picture_layers(), num_stages=2, loss_fn=loss_fn, partition_method=method)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            config=copy.deepcopy({**CONFIG, **config}),
            training_data=[picture(index) for index in range(16)],
        )
        found += [float(engine.train_batch().detach()) for _ in range(STEPS)]
    return found


CONSTRUCTS: tuple[Callable[[Any, dict[str, Any]], Any], ...] = (
    block_at_initialize,
    tied_at_initialize,
    functions_of_the_module,
    own_cuts,
    own_cuts_with_config,
    own_clipping,
    own_reduction,
    optimizer_later,
    *((intervals_later,) if has_checkpoints() else ()),
    absent_classes,
    groups_dropped,
    labels_of_other_data,
    loss_in_the_last_layer,
    in_place_layers,
)


def drop_in(_: Any) -> None:
    """Every construct with upstream's class, then with ours under every block, each told by its name."""
    import traceback

    import deepspeed
    from deepspeed.pipe import PipelineModule

    import deepspeed_pulse

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    mend_upstream()
    for construct in CONSTRUCTS:
        expected = construct(PipelineModule, {})
        for name, block in BLOCKS.items():
            case = f"{construct.__name__}, {name}"
            try:
                found = construct(deepspeed_pulse.PipelineModule, block)
                verdict = "right" if found == expected else f"expected {expected}, found {found}"
            except Exception:
                verdict = traceback.format_exc()
            print("CASE", json.dumps([case, verdict]), flush=True)


def between_first_and_last(engine: Any) -> Any:
    """A loader for upstream: the first rank makes the labels and sends them to the last."""
    from deepspeed import comm as dist

    for inputs, labels in batches():
        if engine.is_first_stage():
            dist.send(labels, engine.grid.stage_to_global(engine.num_stages - 1))
        else:
            dist.recv(labels, engine.grid.stage_to_global(0))
        yield inputs, labels


def sending_loader(case: dict[str, Any]) -> None:
    """One that asks for the first and the last stage, drawn in ``train_batch`` or before it."""
    import deepspeed

    import deepspeed_pulse

    torch.set_num_threads(1)
    config = {**CONFIG, "pulse": {"solver_seconds": 0, "timeout_seconds": 40, "placement": case["placement"]}}
    module = deepspeed_pulse.PipelineModule(
        layers=modules(), num_stages=2, loss_fn=nn.functional.mse_loss, config=config
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    loader = between_first_and_last(engine) if engine.is_first_stage() or engine.is_last_stage() else None
    for _ in range(STEPS):
        data = loader
        if case["before"] and loader is not None:
            data = iter([next(loader) for _ in range(MICROBATCHES)])
        engine.train_batch(data)
    print("TRAINED", flush=True)


def says_why_it_is_off(_: Any) -> None:
    from deepspeed_pulse import PipelineModule

    for config in ({}, {"pulze": {}}, BLOCKS["off"]):
        layers = modules()
        made = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss, config={**CONFIG, **config})
        train(made, config, steps=1)
