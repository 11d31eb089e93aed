"""DeepSpeed's PipelineModule: 1F1B or DualPipeV, every skip relayed from stage to stage in the tuple."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.schedule import BackwardPass
from resting import Resting
from slow_network.cases import Case


class Cut(PipelineModule):
    """Stages given as layer indices: upstream's own methods balance numbers of layers or parameters, not time."""

    def __init__(self, boundaries: Sequence[int], **arguments: Any) -> None:
        self._given = list(boundaries)
        super().__init__(**arguments)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._given
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class CutV(DualPipeVModule, Cut):
    """The same for two stages a rank."""


def build(case: Case, *, boundaries: Sequence[int], dualpipev: bool, joined: bool) -> Callable[[], None]:
    """``joined``: a stage's outputs are differentiated in one traversal; upstream makes one for each of them."""
    deepspeed.init_distributed("gloo")
    model = (CutV if dualpipev else Cut)(
        boundaries,
        layers=[LayerSpec(*made) for made in case.relaying()],
        num_stages=case.ranks,
        loss_fn=torch.nn.functional.mse_loss,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }
    optimizer = Resting(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if joined:
        instructions = engine._INSTRUCTION_MAP
        engine._INSTRUCTION_MAP = {**instructions, BackwardPass: _joined(instructions[BackwardPass])}
    data = itertools.repeat(case.batch())

    def step() -> None:
        engine.train_batch(data)

    return step


class _Outputs:
    """Of a stage, as upstream takes a single tensor."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors

    def backward(self, gradient: Sequence[torch.Tensor]) -> None:
        torch.autograd.backward(self.tensors, list(gradient))


def _joined(backward: Callable[..., None]) -> Callable[..., None]:
    def run(engine: Any, buffer_id: int, **phase: int) -> None:
        outputs = engine.pipe_buffers["outputs"]
        if isinstance(outputs[buffer_id], tuple):
            outputs[buffer_id] = _Outputs(outputs[buffer_id])
        backward(engine, buffer_id, **phase)

    return run
