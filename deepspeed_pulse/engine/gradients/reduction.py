"""Gradients summed over data-parallel replicas, a stage at a time, while other stages still work.

Upstream sums everything when the step's last backward has ended. Here a stage's gradients leave while its own last
backward runs, a bucket as soon as it is whole, as torch's DDP does; what belongs to no single stage (tied weights, a
placeholder) still goes upstream's way at the end. What is sent and how it is scaled is upstream's arithmetic: results
are the same up to the order in which a collective adds more than two replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.pipe.schedule import ReduceGrads

from deepspeed_pulse.engine.device import SideStream, runs_at_once, wait
from deepspeed_pulse.engine.gradients.buckets import Bucket, Expected, Kept
from deepspeed_pulse.engine.gradients.stores import MasterGradients, OwnGradients
from deepspeed_pulse.engine.replaced import replaced_instructions
from deepspeed_pulse.errors import PeerError, RunError

_SHOWN = 4
"""Parameters that an error names."""

_COPIES = 2
"""Buckets of copies that an asynchronous device has at a time: one is summed while the other is put back."""


def reduces_early(config: Any) -> bool:
    """False when DeepSpeed's configuration gives gradients to an optimizer that sums them itself, at the end.

    The bf16 optimizer, which is upstream's choice also for ZeRO-1 with fp32 accumulation, leaves that to the engine.
    """
    bf16 = config.bfloat16_config
    if config.zero_optimization_stage == 0:
        return not (bf16.enabled and bf16.immediate_grad_update)
    accumulation = config.grad_accum_dtype and DtypeEnum(config.grad_accum_dtype).value
    offload = config.zero_config.offload_optimizer
    return (
        config.zero_optimization_stage == 1
        and bf16.enabled
        and not bf16.immediate_grad_update
        and accumulation == torch.float32
        and offload is None
    )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What gradients are multiplied by before and after they are summed over the replicas (upstream's options)."""

    before: float
    after: float

    @classmethod
    def of(cls, engine: Any, replicas: int) -> Scaling:
        factor = engine.gradient_predivide_factor()
        if not engine.gradient_average:
            return cls(before=1.0, after=1.0)
        if engine.postscale_gradients():
            return cls(before=1.0 / factor, after=factor / replicas)
        return cls(before=1.0 / replicas, after=1.0)


class StageReduction:
    """Sums the gradients of one rank's stages over its data-parallel replicas.

    Where what is sent is a copy, it is put back and let go as soon as it is summed: a device with a stream to spare
    (``aside``) does that by itself, else it is looked after when the next stage starts.

    Args:
        parameters: of each stage on this rank; one that several stages share leaves with the last of them.
        names: of all parameters, in the order in which every replica has them.
        gradients: where their gradients lie.
        dtype: in which gradients are sent.
        bucket_bytes: of parameters whose gradients are sent together.
        group: the rank's data-parallel process group.
        timeout_seconds: silence of a replica after which a wait raises.
        count: told of the bytes of copies that come and, negative, go, and of what is there in that moment only.
        aside: of an asynchronous device.
    """

    def __init__(
        self,
        parameters: dict[int, list[torch.nn.Parameter]],
        *,
        names: dict[torch.nn.Parameter, str],
        gradients: OwnGradients | MasterGradients,
        dtype: torch.dtype,
        bucket_bytes: int,
        group: Any,
        scaling: Scaling,
        timeout_seconds: float,
        count: Callable[[int, int], None],
        aside: SideStream | None,
    ) -> None:
        self._parameters, self._names, self._gradients = parameters, names, gradients
        self._dtype, self._group, self._scaling = dtype, group, scaling
        self.bucket_bytes = bucket_bytes
        self._timeout_seconds, self._count, self._aside = timeout_seconds, count, aside
        self._trains: tuple[bool, ...] = ()
        """Of each parameter, whether it trains: what :attr:`_expected` is made for."""
        self._expected: dict[tuple[int, ...], Expected] = {}
        """By stages whose last backwards have come, the last one's buckets."""
        self._ended: tuple[int, ...] = ()
        """Stages whose last backwards have come in this step."""
        self._now = Expected([], bucket_bytes)
        """Of the stage whose last backward runs."""
        self._missing: list[int] = []
        """Of each of its buckets, how many gradients are not whole yet."""
        self._gone = 0
        """How many of them have left."""
        self._left: list[Sequence[torch.nn.Parameter]] = []
        """All buckets that have left in this step."""
        self._times: dict[int, int] = {}
        """How often that backward has added to a parameter, by its id as below: a tensor's own hash is slow."""
        self._once: set[int] = set()
        self._more: set[int] = set()
        """To which last backwards of earlier steps have added once each, so that they may leave at once; and others."""
        self._hooks: list[Any] = []
        self._under_way: list[Bucket] = []
        self._kept: dict[int, Kept] = {}
        """Buckets of this step that gradients are parts of, by their first parameter; ``_given``: those of the last one
        that may be again."""
        self._given: dict[int, Kept] = {}
        self._copied: deque[Bucket] = deque()
        """Of those under way, copies that no gradient is a part of: nobody reads them once they are put back."""
        self.expects = False
        """The last backward of a stage runs or has ended, and what is left of its gradients has not started."""

    def begin(self) -> None:
        """Start a step: nothing has been summed."""
        self._forget()  # where a step before failed
        if self._under_way or self._copied:  # and may still be writing sums
            self._under_way.clear()
            self._copied.clear()
            self._kept = {}
        self._gradients.begin()
        self._given = {first: kept for first, kept in self._kept.items() if kept.take_back()}
        self._kept = {}
        for kept in self._given.values():
            kept.give()
        trains = tuple(p.requires_grad for p in self._names)
        if trains != self._trains:
            self._trains = trains
            self._expected.clear()
        self._ended = ()
        self._left.clear()

    def expect(self, stage: int) -> None:
        """The last backward of a stage comes next: sum what it has made whole while it makes the rest.

        Buckets and their order follow from the layers alone, so that all replicas have the same; when one leaves is up
        to each. What was added to several times in one backward (a checkpoint that runs a backward of its own) leaves
        at the end, as in the first step all does.
        """
        self._ended = (*self._ended, stage)
        if self._ended not in self._expected:
            self._expected[self._ended] = Expected(list(self._ready(stage)), self.bucket_bytes)
        self._now = self._expected[self._ended]
        self._missing = [len(bucket) for bucket in self._now.buckets]
        self._gone = 0
        self.expects = True
        self._times.clear()
        arrived = self._arrived
        self._hooks = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in self._now.parameters]

    def _ready(self, stage: int) -> Iterator[torch.nn.Parameter]:
        """What of the stage no other stage adds to any more, last layers first."""
        waiting = [held for other, held in self._parameters.items() if other not in self._ended]
        later = {id(parameter) for held in waiting for parameter in held}
        for parameter in reversed(self._parameters[stage]):
            if parameter in self._names and _is_summed(parameter) and id(parameter) not in later:
                yield parameter

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        key = id(parameter)
        times = self._times[key] = self._times.get(key, 0) + 1
        if times > 1 or key not in self._once:
            return
        self._missing[self._now.number[key]] -= 1
        while self._gone < len(self._missing) and not self._missing[self._gone]:
            bucket = self._now.buckets[self._gone]
            self._gone += 1
            for one in bucket:
                self._gradients.collect(one)
            self._start(bucket)

    def start(self, stage: int) -> None:
        """Start summing what is left of the gradients of a stage whose last backward has just ended; returns at once.

        Raises:
            RunError: that backward added to a gradient which has left already.
        """
        rest = self._now.buckets[self._gone :]
        self._forget()
        self._more.update(key for key, times in self._times.items() if times > 1)
        self._once.update(self._times)
        self._once -= self._more
        late = self._gradients.changed()
        if late:
            raise self._changed(stage, late)
        while self._aside is None and self._copied and self._copied[0].work.is_completed():
            self._finish(self._copied.popleft())
        for bucket in rest:
            self._start(bucket)
        if self._aside is not None and self._copied:
            with self._aside.entered():
                self._finish_copied(0)

    def _changed(self, stage: int, late: Sequence[torch.nn.Parameter]) -> RunError:
        named = " or ".join(sorted(self._names[parameter] for parameter in late[:_SHOWN]))
        if not self._times.keys().isdisjoint(map(id, late)):
            return RunError(
                f"parameter {named} got two gradients in the last backward of this step and one in those of earlier "
                f"steps: a checkpoint in a layer of stage {stage} runs it a changing number of times; use "
                "use_reentrant=False there"
            )
        return RunError(
            f"parameter {named} got a gradient after the last backward of its stage: a layer of stage {stage} uses it "
            "without holding it; make it a submodule of every layer that uses it, or tie them with TiedLayerSpec",
            more="shared-weights",
        )

    def _forget(self) -> None:
        """Nothing is expected."""
        self.expects = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _start(self, bucket: Sequence[torch.nn.Parameter]) -> None:
        """Start summing; from now on nothing may be added."""
        gradients = [self._gradients.of(p) for p in bucket]
        if not self._is_copied(gradients):
            self._under_way.append(self._started(bucket, gradients))
        elif self._aside is None:
            self._copied.append(self._started(bucket, gradients))
        else:
            with self._aside.entered():
                self._finish_copied(_COPIES - 1)
                self._copied.append(self._started(bucket, gradients))
        self._left.append(bucket)
        for parameter in bucket:
            self._gradients.remember(parameter)

    def finish(self) -> list[torch.Tensor]:
        """Wait for what was started, and put sums where gradients were.

        Returns:
            The gradients that were not started, to be summed upstream's way.
        """
        while self._under_way or self._copied:
            self._finish(self._under_way.pop(0) if self._under_way else self._copied.popleft())
        if self._aside is not None:
            self._aside.join()
        left = {id(parameter) for bucket in self._left for parameter in bucket}
        return [self._gradients.of(p) for p in self._names if _is_summed(p) and id(p) not in left]

    def _finish_copied(self, left: int) -> None:
        """The oldest, until so many are left."""
        while len(self._copied) > left:
            self._finish(self._copied.popleft())

    def _is_copied(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether no part of what is sent can be a gradient from then on."""
        return not self._gradients.may_change or all(g.dtype != self._dtype for g in gradients)

    def _started(self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> Bucket:
        kept = self._given.get(id(parameters[0]))
        if kept is not None and kept.holds(parameters):
            self._kept[id(parameters[0])] = kept
            sent, in_place = kept.sent, True
        else:
            sent = self._sent(gradients, self._gradients.beside_bytes(parameters))
            in_place = sent is gradients[0]
        if self._scaling.before != 1.0:
            sent.mul_(self._scaling.before)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        copies = [] if in_place else self._placed(parameters, gradients, sent)
        return Bucket(self._names[parameters[0]], sent, copies, work)

    def _sent(self, gradients: Sequence[torch.Tensor], beside_bytes: int) -> torch.Tensor:
        """One gradient itself where it may be summed in place (what goes over the wire is the same), or a copy.

        A copy of a part of other memory: what is added to that would count as a change of the gradient.
        ``beside_bytes``: of what goes when the copy is made.
        """
        first = gradients[0]
        as_sent = first.dtype == self._dtype and first.is_contiguous()
        alone = len(gradients) == 1 and first.untyped_storage().nbytes() == first.nbytes
        if self._gradients.may_change and as_sent and alone:
            return first
        sent = torch.empty(sum(g.numel() for g in gradients), dtype=self._dtype, device=first.device)
        self._count(sent.nbytes, beside_bytes)
        return torch.cat([g.reshape(-1) for g in gradients], out=sent)

    def _placed(
        self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor], sent: torch.Tensor
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]:
        """Gradients that cannot be views of what is sent, with their parts of it; where all are, it is kept."""
        parts = [
            part.view(gradient.shape).detach()  # an optimizer that zeroes gradients in place may detach them in place
            for gradient, part in zip(gradients, sent.split([g.numel() for g in gradients]), strict=True)
        ]
        placed = zip(parameters, gradients, parts, strict=True)
        copies = [(p, gradient, part) for p, gradient, part in placed if not self._gradients.becomes(p, part.detach())]
        if not copies:
            self._count(-sent.nbytes, 0)  # it is the gradients now
            self._kept[id(parameters[0])] = Kept(parameters, sent, parts, given=[p.grad for p in parameters])
        return copies

    def _finish(self, bucket: Bucket) -> None:
        self._wait(bucket)
        if self._scaling.after != 1.0:
            bucket.sent.mul_(self._scaling.after)
        for parameter, gradient, part in bucket.copies:
            gradient.copy_(part)
            self._gradients.wrote(parameter)
        if bucket.copies:
            self._count(-bucket.sent.nbytes, 0)

    def _wait(self, bucket: Bucket) -> None:
        try:
            wait(bucket.work, bucket.sent, self._timeout_seconds)
        except RuntimeError as problem:
            reason = str(problem).splitlines()[0]
            raise PeerError(
                f"a data-parallel replica did not sum the gradient of {bucket.name} within "
                f"{self._timeout_seconds:g} s, or died: {reason}; see the other ranks' errors, or raise "
                '"timeout_seconds" in the "pulse" block'
            ) from problem


class EarlyReduction:
    """Sums this rank's gradients while it works, as long as the program lets it.

    Args:
        engine: its optimizer and the dtype in which it sends gradients are followed: a program may set others.
        timeout_seconds: silence of a replica after which a wait raises.
        count: told of the bytes of copies that come and, negative, go, and of what is there in that moment only.

    Attributes:
        sums: those of the stages; None where gradients are summed upstream's way.
        is_on: in the step under way.
    """

    def __init__(self, engine: Any, timeout_seconds: float, count: Callable[[int, int], None]) -> None:
        self._engine, self._timeout_seconds, self._count = engine, timeout_seconds, count
        self._aside = None if runs_at_once(engine.device) else SideStream()
        self._make()
        self.is_on = False

    def _make(self) -> None:
        self._made_for = self._engine.optimizer, self._engine.communication_data_type
        self.sums = stage_reduction(self._engine, self._timeout_seconds, self._count, self._aside)

    @property
    def expects(self) -> bool:
        """A stage's last backward runs or has ended, and the sum of its gradients is yet to be started."""
        return self.sums is not None and self.sums.expects

    def join(self) -> None:
        """What comes next finds done what was given to the device aside: sums of a step that broke off, say."""
        if self._aside is not None:
            self._aside.join()

    def begin(self, *, training: bool) -> bool:
        """Start a step; False where gradients are summed upstream's way at its end, or by the program."""
        # 1-bit optimizers turn upstream's reduction off in the middle of a run
        may_be = training and self._engine.pipeline_enable_backward_allreduce
        if not may_be or ReduceGrads in replaced_instructions():
            self.is_on = False
            return False
        if self._made_for != (self._engine.optimizer, self._engine.communication_data_type):
            self._make()
        self.is_on = self.sums is not None
        if self.sums is not None:
            self.sums.begin()
        return self.is_on


def stage_reduction(
    engine: Any, timeout_seconds: float, count: Callable[[int, int], None], aside: SideStream | None
) -> StageReduction | None:
    """What sums gradients early on this rank; None where they are summed upstream's way at the end of the step.

    That is where nothing is to be summed, an optimizer of DeepSpeed sums itself, or gradients may be sparse.
    """
    module, replicas, bf16 = engine.module, engine.grid.data_parallel_size, engine.using_bf16_optimizer
    if (
        replicas == 1
        or not reduces_early(engine._config)
        or (engine.zero_optimization_stage() and not bf16)
        or engine.has_moe_layers
        or any(getattr(part, "sparse", False) is True for part in module.modules())
    ):
        return None
    names = {p: name for name, p in module.named_parameters()}
    gradients: OwnGradients | MasterGradients = OwnGradients(names)
    if bf16:
        gradients = MasterGradients(engine.optimizer)
        names = {p: name for p, name in names.items() if p in gradients}
    tied = {p for part in module.tied_modules.values() for p in part.parameters()}
    tied.update(module.shared.copies)
    functions = dict(module.local_layers())
    parameters = {
        stage: [
            p
            for p in dict.fromkeys(q for layer in module.plan.stage_layers(stage) for q in _held(functions[layer]))
            if p not in tied
        ]
        for stage in module.plan.stages_of(engine.stage_id)
    }
    return StageReduction(
        parameters,
        names=names,
        gradients=gradients,
        dtype=engine.communication_data_type,
        bucket_bytes=module.plan.bucket_bytes,
        group=engine.grid.get_data_parallel_group(),
        scaling=Scaling.of(engine, replicas),
        timeout_seconds=timeout_seconds,
        count=count,
        aside=aside,
    )


def _is_summed(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _held(function: Any) -> Iterable[torch.nn.Parameter]:
    parameters = getattr(function, "parameters", None)
    return parameters() if callable(parameters) else ()
