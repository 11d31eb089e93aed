"""Every name of DeepSpeed that this package uses: by module or class, by its full name.

Names of a class are methods, attributes and what its instances have, inherited ones too. ``tests/engine/test_waist.py``
reads from the sources which names are used: it fails for one that is not here, and for one here that is not used.
"""

from __future__ import annotations

SUPPORTED = "0.18.4 to 0.19.8"

NAMES = {
    "deepspeed": "DeepSpeedConfig PipelineEngine __version__ init_distributed initialize",
    "deepspeed.accelerator": "get_accelerator",
    "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator": """
        Event Stream communication_backend_name create_op_builder current_device current_device_name current_stream
        device_count device_name empty_cache get_rng_state is_bf16_supported is_fp16_supported is_pinned manual_seed_all
        max_memory_allocated memory_allocated pin_memory reset_peak_memory_stats set_device set_rng_state stream
        synchronize total_memory use_host_timers
    """,
    "deepspeed.checkpoint.constants": """
        BASE_OPTIMIZER_STATE LOSS_SCALER OPTIMIZER_STATE_DICT PARAM PARAM_GROUPS PARAM_SLICE_MAPPINGS
        SINGLE_PARTITION_OF_FP32_GROUPS
    """,
    "deepspeed.comm": """
        ReduceOp all_gather all_reduce barrier broadcast broadcast_object_list get_rank get_world_size is_initialized
        new_group recv send
    """,
    "deepspeed.comm.ReduceOp": "MAX",
    "deepspeed.comm.comm": "cdb irecv isend timed_op",
    "deepspeed.comm.torch": "TorchBackend",
    "deepspeed.comm.torch.TorchBackend": "irecv isend new_group",
    "deepspeed.git_version_info": "installed_ops",
    "deepspeed.monitor.monitor.MonitorMaster": "enabled write_events",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.ops.op_builder.builder": "OpBuilder",
    "deepspeed.ops.op_builder.builder.OpBuilder": "_loaded_ops",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "checkpoint",
    "deepspeed.runtime.base_optimizer": "ZeROOptimizer",
    "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": """
        _create_param_mapping _global_grad_norm _hp_grad _hp_mapping _hp_optimizer_states_linked
        _lazy_init_hp_params_optimizer_state _link_all_hp_params _param_slice_mappings _update_hp_grad bf16_groups
        clear_lp_grads clip_grad fp32_groups_flat_partition fp32_groups_gradients fp32_groups_has_gradients
        get_grads_for_norm grad_acc_dtype immediate_grad_update optimizer param_groups refresh_fp32_params scale_if_loss
        state step zero_grad
    """,
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": "TorchCheckpointEngine",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine": "load save",
    "deepspeed.runtime.config": "DtypeEnum",
    "deepspeed.runtime.config.DeepSpeedConfig": """
        _param_dict bfloat16_config buffer_dtype comms_config data_efficiency_config flops_profiler_config
        float16_config grad_accum_dtype gradient_accumulation_steps pipeline steps_per_print tensor_parallel_config
        torch_autocast_enabled train_micro_batch_size_per_gpu wall_clock_breakdown zero_config zero_optimization_stage
    """,
    "deepspeed.runtime.config_utils": "dict_raise_error_on_duplicate_keys",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.engine.DeepSpeedEngine": "__init__",
    "deepspeed.runtime.engine.EngineTimers": "backward_reduce_timers forward_timers",
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": """
        _global_grad_norm clip_grad dynamic_loss_scale fp16_groups fp32_groups_flat loss_scale loss_scale_config
        optimizer param_groups refresh_fp32_params state step zero_grad
    """,
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": "dynamic",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": """
        _global_grad_norm clip_grad fp16_groups fp32_groups loss_scale loss_scale_config optimizer param_groups
        refresh_fp32_params state step zero_grad
    """,
    "deepspeed.runtime.pipe.engine": """
        BATCH_INPUT_TIMER PIPE_RECV_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_SEND_GRAD_TIMER PIPE_SEND_OUTPUT_TIMER
        PipelineEngine TRAIN_BATCH_TIMER
    """,
    "deepspeed.runtime.pipe.engine.PipelineEngine": """
        _INSTRUCTION_MAP _aggregate_total_loss _allocate_buffer _allocate_or_extend_buffers _backward_epilogue
        _backward_prologue _backward_prologue_per_tensor _bcast_pipe_scalar _broadcast_model _check_for_duplicates
        _compute_loss _config _configure_basic_optimizer _configure_checkpointing _configure_lr_scheduler
        _configure_optimizer _copy_recovery_script _curr_ckpt_path _exec_backward_pass _exec_forward_pass
        _exec_optimizer_step _exec_reduce_grads _exec_reduce_tied_grads _exec_schedule _exec_send_activations
        _exec_send_grads _get_all_ckpt_names _get_ckpt_name _get_rank_zero_ckpt_name _get_zero_ckpt_name
        _get_zero_param_shapes _global_grad_norm _inference_schedule _loss_stage_global_rank _next_batch _reduce_outputs
        _running_engine_backward _save_checkpoint _save_zero_checkpoint _take_model_step _train_schedule
        allreduce_gradients basic_optimizer bfloat16_enabled buffered_allreduce_fallback checkpoint_engine
        client_lr_scheduler clip_fp32_gradients communication_data_type config data_iterator destroy device
        dp_group_loss dp_world_size engine_timers eval_batch eval_return_logits fp16_enabled fwd_outputs global_rank
        global_samples global_steps gradient_average gradient_clipping gradient_predivide_factor grid has_moe_layers
        is_data_parallel is_first_stage is_last_stage load_checkpoint load_module_state_dict load_universal_checkpoint
        local_rank loss losses lr_scheduler micro_batches module_state_dict monitor mp_world_size mpu num_stages
        optimizer optimizer_name optimizer_params outputs param_names pipe_buffers pipeline_enable_backward_allreduce
        postscale_gradients reset_activation_shape save_16bit_model save_checkpoint save_zero_checkpoint
        set_dataiterator set_dataloader set_train_batch_size skipped_steps stage_id steps_per_print timers
        total_additional_losses total_loss train_batch train_micro_batch_size_per_gpu training_dataloader
        use_node_local_storage using_bf16_optimizer wall_clock_breakdown zero_grad zero_optimization
        zero_optimization_stage zero_use_cpu_optimizer
    """,
    "deepspeed.runtime.pipe.module": "LayerSpec PipelineModule TiedLayerSpec",
    "deepspeed.runtime.pipe.module.LayerSpec": "build typename",
    "deepspeed.runtime.pipe.module.PipelineModule": """
        _build _count_layer_params _grid _index_tied_modules _layer_specs _local_start _local_stop _num_layers
        _partition_layers _set_bounds _synchronize_tied_weights _topo activation_checkpoint_func
        activation_checkpoint_interval base_seed ckpt_layer_path ckpt_layer_path_list ds_pipe_replicated dynamic_shape
        forward forward_funcs get_additional_losses get_tied_weights_and_groups global_rank local_rank loss_fn
        micro_offset mpu num_stages parts seed_fn seed_layers stage_id stage_owner tied_comms tied_modules
        tied_weight_attrs
    """,
    "deepspeed.runtime.pipe.module.TiedLayerSpec": "build forward_fn key typename",
    "deepspeed.runtime.pipe.module.ds_utils": "set_random_seed",
    "deepspeed.runtime.pipe.schedule": """
        BackwardPass ForwardPass OptimizerStep PipeInstruction ReduceGrads ReduceTiedGrads SendActivation SendGrad
        TrainSchedule
    """,
    "deepspeed.runtime.pipe.schedule.TrainSchedule": "num_pipe_buffers steps",
    "deepspeed.runtime.pipe.topology": "ProcessTopology",
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": """
        data_parallel_id data_parallel_size get_data_parallel_group get_model_parallel_rank get_pipe_parallel_group
        get_slice_parallel_world_size pp_group stage_to_global topology
    """,
    "deepspeed.runtime.pipe.topology.ProcessTopology": "get_axis_comm_lists get_axis_names get_dim world_size",
    "deepspeed.runtime.precision_config.DeepSpeedBF16Config": "enabled",
    "deepspeed.runtime.precision_config.DeepSpeedFP16Config": "auto_cast enabled",
    "deepspeed.runtime.utils": "partition_balanced partition_uniform",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": """
        _create_optimizer_mapping _create_param_mapping _global_grad_norm _hp_mapping _hp_optimizer_states_linked
        _lazy_init_hp_params_optimizer_state _link_all_hp_params _param_slice_mappings averaged_gradients bit16_groups
        clip_grad cpu_offload elastic_checkpoint gradient_accumulation_dtype loss_scale loss_scaler optimizer
        param_groups params_in_partition reduce_bucket_size refresh_fp32_params round_robin_bit16_groups
        round_robin_gradients scale_if_loss single_partition_of_fp32_groups state step use_grad_accum_attribute
        zero_grad
    """,
    "deepspeed.utils": "safe_get_full_fp32_param",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "deepspeed.utils.tensor_fragment.fragment_address": "numel start",
    "deepspeed.utils.timer.SynchronizedWallClockTimer.Timer": "reset start started_ stop",
}
"""Module or class to names, separated by spaces."""

ENGINE = "deepspeed.runtime.pipe.engine.PipelineEngine"

SINCE = {
    "deepspeed.runtime.config.DeepSpeedConfig.buffer_dtype": "0.19.2",
    f"{ENGINE}._inference_schedule": "0.19.8",
    f"{ENGINE}._loss_stage_global_rank": "0.19.8",
    f"{ENGINE}._train_schedule": "0.19.8",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer.loss_scale_config": "0.18.6",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.loss_scale_config": "0.18.6",
}
"""The first version that has a name, where not all have it; before that ``older.py`` stands in, or ``getattr`` asks."""
