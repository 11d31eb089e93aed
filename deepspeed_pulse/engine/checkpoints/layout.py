"""How this job's state lies on its ranks: what a save records, and what a checkpoint is compared with."""

from __future__ import annotations

from typing import Any

from deepspeed_pulse.engine.checkpoints.optimizer_state import parameter_names
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord
from deepspeed_pulse.engine.collectives import told_by_all


def record_of(engine: Any) -> CheckpointRecord:
    """This job's layout. Collective in the pipeline."""
    module, optimizer = engine.module, engine.optimizer
    mine = () if optimizer is None else parameter_names(optimizer, engine.param_names)
    plan = module.plan
    return CheckpointRecord(
        pipeline_ranks=engine.num_stages,
        data_parallel=engine.grid.data_parallel_size,
        boundaries=tuple(module.parts),
        placement=tuple(range(engine.num_stages)) if plan is None else plan.placement,
        layers=tuple(layer.name for layer in module.graph.layers),
        zero_stage=int(engine.zero_optimization_stage()),
        dtype="bfloat16" if engine.bfloat16_enabled() else "float16" if engine.fp16_enabled() else "float32",
        optimizer=type(engine.basic_optimizer).__name__,
        parameters=tuple(told_by_all(mine, engine.grid.get_pipe_parallel_group())),
    )


def sizes_of(engine: Any) -> dict[str, int]:
    """Numbers in each parameter of the model. Collective in the pipeline."""
    mine = {name: p.numel() for p, name in engine.param_names.items()}
    by_rank = told_by_all(mine, engine.grid.get_pipe_parallel_group())
    return {name: size for rank in by_rank for name, size in rank.items()}
