"""Every name of DeepSpeed that this package relies on, in one place.

A test checks that they exist in the installed version. The engine subclasses, overrides the small
seams named here, and copies no upstream method.
"""

from __future__ import annotations

import deepspeed

from deepspeed_pulse.errors import ConfigError

REQUIRED_VERSION = "0.19.8"

RELIED_ON = {
    "deepspeed": ("initialize", "PipelineEngine", "DeepSpeedConfig"),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.comm": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast_object_list",
        "init_distributed",
        "irecv",
        "is_initialized",
        "isend",
        "new_group",
        "recv",
        "send",
    ),
    "deepspeed.utils": ("safe_get_full_fp32_param",),
    "deepspeed.runtime.pipe.topology": ("ProcessTopology",),
    "deepspeed.runtime.pipe.module.PipelineModule": (
        "_build",
        "_count_layer_params",
        "_index_tied_modules",
        "_partition_layers",
        "_set_bounds",
        "_synchronize_tied_weights",
        "ckpt_layer_path",
        "ckpt_layer_path_list",
        "forward",
        "get_tied_weights_and_groups",
        "stage_owner",
    ),
    "deepspeed.runtime.pipe.engine": (
        "BATCH_INPUT_TIMER",
        "PIPE_RECV_GRAD_TIMER",
        "PIPE_RECV_INPUT_TIMER",
        "PIPE_SEND_GRAD_TIMER",
        "PIPE_SEND_OUTPUT_TIMER",
        "TRAIN_BATCH_TIMER",
    ),
    "deepspeed.runtime.pipe.engine.PipelineEngine": (
        "_INSTRUCTION_MAP",
        "_aggregate_total_loss",
        "_allocate_buffer",
        "_allocate_or_extend_buffers",
        "_exec_backward_pass",
        "_exec_optimizer_step",
        "_exec_reduce_grads",
        "_exec_reduce_tied_grads",
        "_exec_schedule",
        "_exec_send_activations",
        "_exec_send_grads",
        "_inference_schedule",
        "_loss_stage_global_rank",
        "_next_batch",
        "_reduce_outputs",
        "_train_schedule",
        "eval_batch",
        "is_first_stage",
        "is_last_stage",
        "load_module_state_dict",
        "set_dataiterator",
        "set_dataloader",
        "set_train_batch_size",
        "train_batch",
    ),
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.comm.torch.TorchBackend": ("new_group",),
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "__init__",
        "_backward_epilogue",
        "_backward_prologue",
        "_configure_checkpointing",
        "_configure_optimizer",
        "_copy_recovery_script",
        "_get_all_ckpt_names",
        "_get_ckpt_name",
        "_get_rank_zero_ckpt_name",
        "_get_zero_ckpt_name",
        "_get_zero_param_shapes",
        "_save_checkpoint",
        "_save_zero_checkpoint",
        "bfloat16_enabled",
        "buffered_allreduce_fallback",
        "fp16_enabled",
        "clip_fp32_gradients",
        "communication_data_type",
        "gradient_predivide_factor",
        "load_checkpoint",
        "load_universal_checkpoint",
        "postscale_gradients",
        "save_checkpoint",
        "steps_per_print",
        "use_node_local_storage",
        "wall_clock_breakdown",
        "zero_optimization_stage",
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": ("_link_all_hp_params",),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": (
        "_link_all_hp_params",
        "clear_lp_grads",
        "get_grads_for_norm",
        "update_hp_grads",
    ),
    "deepspeed.runtime.config": ("DtypeEnum",),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine": ("load", "save"),
    "deepspeed.runtime.base_optimizer": ("ZeROOptimizer",),
    "deepspeed.runtime.bf16_optimizer": ("BF16_Optimizer",),
    "deepspeed.runtime.fp16.fused_optimizer": ("FP16_Optimizer",),
    "deepspeed.runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer",),
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "deepspeed.checkpoint.constants": (
        "BASE_OPTIMIZER_STATE",
        "LOSS_SCALER",
        "OPTIMIZER_STATE_DICT",
        "PARAM",
        "PARAM_GROUPS",
        "PARAM_SLICE_MAPPINGS",
        "SINGLE_PARTITION_OF_FP32_GROUPS",
    ),
    "deepspeed.runtime.engine.EngineTimers": ("__init__",),
    "deepspeed.monitor.monitor.MonitorMaster": ("write_events",),
    "deepspeed.runtime.tensor_parallel.init_utils": ("load_ds_config",),
    "deepspeed.runtime.pipe.schedule": (
        "OptimizerStep",
        "PipeInstruction",
        "ReduceGrads",
        "ReduceTiedGrads",
        "TrainSchedule",
    ),
}
"""Module or class to the attributes used."""


def check_version() -> None:
    """Raise a ConfigError when the installed DeepSpeed is another version than the one built on."""
    if deepspeed.__version__.split("+")[0] != REQUIRED_VERSION:
        raise ConfigError(
            f"deepspeed_pulse needs deepspeed {REQUIRED_VERSION}, found {deepspeed.__version__}: "
            f"pip install deepspeed=={REQUIRED_VERSION}"
        )
