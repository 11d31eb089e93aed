"""A "pulse" block that comes with ``deepspeed.initialize``, after the module was built without one.

Many training programs build their module deep inside a model's code and know the config only later. The layers then lie
where upstream's cuts put them: one stage a rank. That is a plan too, so they run by it.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist

from deepspeed_pulse.config import parse_pulse
from deepspeed_pulse.engine.collectives import everywhere
from deepspeed_pulse.engine.gradients.placeholders import add_placeholder
from deepspeed_pulse.engine.groups import check_options
from deepspeed_pulse.engine.observation.watchdog import Watchdog, of_process
from deepspeed_pulse.engine.relay.forward import explicit_parts
from deepspeed_pulse.engine.sharing.shared import tie_all_parameters
from deepspeed_pulse.engine.sharing.unseen import check_builds
from deepspeed_pulse.engine.starting.sameness import check_same, config_facts
from deepspeed_pulse.engine.starting.setting_up import join_others, refuse_unrunnable, watched_start
from deepspeed_pulse.errors import ConfigError, PlanError

WHERE = "deepspeed.initialize"


def take_late_block(module: Any, config: dict[str, Any]) -> None:
    """Plan a module that has none, if this config of ``deepspeed.initialize`` says so; collective in the world.

    A block that is wrong, or asks for what the layers' cuts do not fit, is every rank's PulseError.
    """
    if dist.get_world_size() > 1:
        check_same(config_facts({"pulse": config.get("pulse")}), WHERE)
    pulse = parse_pulse(config.get("pulse"))
    if pulse is None:
        return
    watchdog = of_process(pulse.timeout_seconds) if pulse.enabled else None
    before = module.job.config
    try:
        with watched_start(watchdog, pulse, WHERE):
            _take(module, config, watchdog)
    except Exception:
        module.job.bring_config(before)
        module.pulse = module.job.pulse
        raise


def _take(module: Any, config: dict[str, Any], watchdog: Watchdog | None) -> None:
    if watchdog is not None:
        watchdog.stop_request.listen()
        join_others(watchdog)
        watchdog.meet()
        module.watchdog = watchdog
    module.job.bring_config(config)
    module.pulse = module.job.pulse
    everywhere(lambda: _check(module), WHERE)
    # all parameters of a tied module are tied, as if the block had been there when it was built
    tie_all_parameters(module)
    module.tied_comms = module._index_tied_modules()
    module._synchronize_tied_weights()
    if module.pulse_enabled:
        if not any(p.requires_grad for p in module.parameters()):
            add_placeholder(module)
        plan_own_cuts(module)
        if module.global_rank == 0:
            print(
                'pulse: the "pulse" block came with deepspeed.initialize, after the layers were cut: they run by a '
                f"plan of these cuts, one stage a rank ({', '.join(map(str, module.parts))}); for a wave give "
                "PipelineModule the same config (config=)",
                flush=True,
            )


def _check(module: Any) -> None:
    """What a module with a block is held to before it is built."""
    module.job.check(module.num_stages, module._topo, dynamic_shape=module.dynamic_shape)
    refuse_unrunnable(module.job, type(module), module.shared)
    if module.pulse_enabled:
        check_options(module.pulse)
        if module.pulse.hccl_buffer_size is not None:
            raise ConfigError(
                "the \"pulse\" block: key 'hccl_buffer_size': process groups were made before the block came with "
                "deepspeed.initialize; give PipelineModule the same config (config=), or set HCCL_BUFFSIZE"
            )
    check_builds(module)


def plan_own_cuts(module: Any) -> None:
    """Plan the cuts that a module has: a subclass made them, or they were made before a block was known.

    A PulseError where they cannot be planned, or the block asks for others.
    """
    cuts = explicit_parts(module.graph, list(module.parts)[1:-1], module.num_stages)
    module.job.keep_cuts(cuts[1:-1])
    module.make_plan()
    assert module.plan is not None
    if (list(module.plan.boundaries), list(module.plan.placement)) != (cuts, list(range(module.num_stages))):
        raise PlanError(
            f"the plan has cuts {list(module.plan.boundaries)} on ranks {list(module.plan.placement)}, the layers are "
            f'already cut at {cuts}, one stage a rank; leave "plan" out of the block, or pass config= to '
            "PipelineModule and leave its cuts to the plan"
        )
