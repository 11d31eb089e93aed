"""The module's cuts in the order of each number of microbatches that the engine is asked to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepspeed_pulse.engine.collectives import agree
from deepspeed_pulse.engine.observation import figures
from deepspeed_pulse.engine.observation.watchdog import Watchdog
from deepspeed_pulse.engine.plans import planning
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.plan import Plan


class Orders:
    """Plans of the same cuts, the module's the first; all ranks have the same."""

    def __init__(self, module: Any, watchdog: Watchdog) -> None:
        self._module, self._watchdog = module, watchdog
        self._plans: dict[int, Plan] = {module.plan.microbatches: module.plan}
        self._asked = self._asked_now()
        """Of activation checkpointing, when plans were made or changed last."""

    def made(self, micro_batches: int) -> Plan | None:
        """The plan for so many microbatches, if there is one."""
        return self._plans.get(micro_batches)

    def of(self, micro_batches: int) -> Plan:
        """The plan for so many microbatches, made if there is none yet: collective then."""
        if micro_batches not in self._plans:
            self.check_may_run(micro_batches)
            module = self._module
            with self._watchdog.watching_patiently(f"planning the order of {micro_batches} microbatches on rank 0"):
                self._plans[micro_batches] = agree(
                    lambda: planning.reorder(module.planned, module.job.planned_pulse, micro_batches), "planning"
                )
        return self._plans[micro_batches]

    def forwards(self, micro_batches: int) -> Plan:
        """The plan of an evaluation."""
        module = self._module
        return planning.evaluation_plan(module.planned, module.pulse, micro_batches, module.base_seed)

    def check_may_run(self, micro_batches: int) -> None:
        """Raise a ConfigError for another number of microbatches than a given plan's, or one's with frozen parts."""
        if micro_batches in self._plans:
            return
        if self._module.frozen is not None:
            raise ConfigError(
                f"{micro_batches} microbatches: with frozen parts expected {self._module.plan.microbatches} as "
                "planned, because the data of a step is encoded during the one before; set "
                "gradient_accumulation_steps in the config"
            )
        planning.check_may_differ(self._module.planned, self._module.pulse, micro_batches)

    def follow_program(self) -> bool:
        """Recompute the layers that the program asks for by now, and predict memory anew; False where that is done."""
        now = self._asked_now()
        if now == self._asked:
            return False
        (interval, function), (_, before), self._asked = now, self._asked, now
        module = self._module
        module.job.recompute_every(interval, None if function is before else function)
        layers = module.job.recomputing.layers
        self._plans = {m: planning.recomputing(module.planned, plan, layers) for m, plan in self._plans.items()}
        module.plan = planning.recomputing(module.planned, module.plan, layers)
        module.planned = replace(module.planned, plan=module.plan)
        if module.global_rank == 0:
            figures.print_recomputing(module.planned, interval)
        return True

    def _asked_now(self) -> tuple[int, Any]:
        return self._module.activation_checkpoint_interval, self._module.activation_checkpoint_func
