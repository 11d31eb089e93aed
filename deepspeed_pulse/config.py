"""The ``"pulse"`` block of ds_config.json. Unknown keys are errors; every key has a default."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_pulse.errors import ConfigError, did_you_mean

Schedule = Literal[
    "auto", "gpipe", "1f1b", "interleaved", "wave", "dualpipev", "zbv", "vhalf", "vmin", "mixed", "sequential"
]
Auto = Literal["auto"]
Flag = Annotated[bool, Field(description="true or false")]
Path = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=1000)]
Step = Annotated[int, Field(ge=1)]
Steps = Annotated[list[Step], Field(min_length=1, max_length=20)]
Megabytes = Annotated[int, Field(ge=1, le=65536)]
Gigabytes = Annotated[float, Field(gt=0.0, le=1e15)]

START_SECONDS = 300.0
"""Before the first step, in saving and in loading, ranks that live wait at least so long for one another."""


class PulseConfig(BaseModel):
    """One field per key, with its meaning; ``description`` is what an error says was expected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    enabled: Flag = True
    """False: stock 1F1B with skips relayed in the tuple, the baseline."""

    placement: Literal["auto", "wave", "linear", "loop"] = Field(
        default="auto", description='"auto", "wave", "linear" or "loop"'
    )
    """wave: stages i and 2P-1-i on rank i. linear: one stage a rank. loop: stages i, P+i, .. on rank i, interleaved.

    "auto": wave or linear, whichever is faster; where microbatches are few, two waves and loops of two and four rounds,
    too, where they are faster.
    """

    waves: Auto | Count = Field(default=1, description="an integer from 1 to 1000")
    """Number of waves W, of a loop half of its rounds: stages = 2 * ranks * W; "auto": the fastest, 1, 2 or
    more, of a loop more than 2 where memory is short."""

    schedule: Schedule = Field(default="auto", description=f"one of {', '.join(get_args(Schedule))}")
    """"auto": the best order that fits memory; or a generator's name."""

    split_backward: Auto | Flag = Field(default="auto", description='"auto", true or false')
    """True: schedules may use I and W (input and weight gradients apart). "auto": where that is faster, by measured
    costs."""

    backbone_steps: Literal["together", "each", "auto"] = Field(
        default="together", description='"together", "each" or "auto"'
    )
    """When several backbones make their optimizer steps: "together" at the end of ``train_batch``, or "each" as soon as
    its own last backward has ended, while others still work. The end of a backbone's step then runs in the next
    ``train_batch``; ``engine.losses`` has each one's last finished step. "auto": each where that is planned as faster.
    """

    profile: Path = Field(default="auto", description='"auto" or a path')
    """"auto": layer costs measured from ``example_batch``, else from parameter counts; or a profile file."""

    cluster: Path = Field(default="auto", description='"auto", a path or a name as a100:8x8')
    """"auto": links measured between the ranks (nominal ones where layer costs are no times) and this device's memory;
    or a cluster file; or a name (``ir/clusters.py``)."""

    plan: Path | None = Field(default=None, description="a path or null")
    """A Plan file to run as it is."""

    plan_cache: Path | None = Field(default=None, description="a path or null")
    """Folder where plans, measured layer costs and links are kept between runs."""

    memory_gb: Auto | Gigabytes = Field(default="auto", description='"auto" or a number > 0 and at most 1e15')
    """Activation and state budget of a rank, GB (1e9 bytes)."""

    solver_seconds: float = Field(default=30.0, ge=0.0, description="a finite number >= 0")
    """Processor time the synthesiser may take, so that a busy machine finds what a quiet one does; 0 keeps the best
    generator's order."""

    timeout_seconds: float = Field(default=600.0, gt=0.0, le=1e7, description="a number > 0 and at most 1e7")
    """A peer silent for longer ends the run with an error naming rank, stage, microbatch and action."""

    receive_ahead: Flag = True
    """False: a receive is posted only once its message has left, as the plan goes.

    For models with a layer that waits for the whole device (``torch.cuda.synchronize()``): it would else wait for
    messages that wait for it.
    """

    hccl_buffer_size: Megabytes | None = Field(default=None, description="an integer from 1 to 65536, or null")
    """On HCCL: MB (2**20 bytes) that a communicator keeps for what it sends, and as much again for what it receives.

    null: ``HCCL_BUFFSIZE``, 200 without it. Of all process groups but the world's own. Messages between two ranks have
    ``P2P_HCCL_BUFFSIZE`` instead, an environment variable of torch-npu, unless that is 0.
    """

    nccl_high_priority_stream: Flag = False
    """On NCCL: messages of the pipeline run on streams of high priority, before layers that wait for the device."""

    trace: Path | None = Field(default=None, description="a path or null")
    """Where rank 0 writes the measured timeline (Chrome trace, opens in Perfetto), planned above measured.

    Beside it lies a run file (``.run.json``) with the plan and the measured figures, for ``ds_pulse report``. A file
    that cannot be written is a warning and ends no run.
    """

    trace_steps: Step | Steps | None = Field(
        default=None, description="a step n >= 1 for every n-th, a list of at most 20 steps, or null"
    )
    """Which training steps are traced, counted from 1 as ``engine.global_steps`` is: every n-th, or those listed.

    null: the first and the third of the process. The files hold the last 20. Only in these steps the device is measured
    exactly, which on an accelerator costs waiting for it before and after.
    """

    @property
    def halves(self) -> bool | None:
        """``split_backward``; None: where that is faster."""
        return None if self.split_backward == "auto" else bool(self.split_backward)


def parse_pulse(block: Any) -> PulseConfig | None:
    """The block as configuration; None when there is no block.

    ``true`` and ``{}`` mean defaults, ``false`` means ``{"enabled": false}``.

    Raises:
        ConfigError: names key, found value and what was expected.
    """
    if block is None:
        return None
    if isinstance(block, bool):
        return PulseConfig(enabled=block)
    if not isinstance(block, dict):
        raise ConfigError(f'the "pulse" block: expected an object, true or false, found {block!r}')
    try:
        config = PulseConfig(**block)
    except (ValidationError, TypeError) as problem:
        raise ConfigError('the "pulse" block: ' + "; ".join(_explain(problem, block))) from None
    patience = max(config.timeout_seconds, START_SECONDS)
    if config.solver_seconds > patience / 2:
        raise ConfigError(
            f"the \"pulse\" block: key 'solver_seconds': expected at most {patience / 2:g}, half of what ranks wait "
            f'for the plan ("timeout_seconds", {START_SECONDS:g} if that is less), found {config.solver_seconds:g}; '
            'plan with ds_pulse plan and name the file ("plan"), or raise "timeout_seconds"'
        )
    if config.trace_steps is not None and config.trace is None:
        raise ConfigError('the "pulse" block: key \'trace_steps\': expected "trace" beside it, a path to write to')
    return config


def _explain(problem: Exception, block: dict[str, Any]) -> list[str]:
    if not isinstance(problem, ValidationError):
        return [str(problem)]
    lines: list[str] = []
    fields = PulseConfig.model_fields
    for error in problem.errors():
        key = str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}{did_you_mean(key, fields)}; known: {', '.join(fields)}")
        else:
            lines.append(f"key {key!r}: expected {fields[key].description}, found {block[key]!r}")
    return list(dict.fromkeys(lines))
