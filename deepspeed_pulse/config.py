"""The ``"pulse"`` block of ds_config.json. Unknown keys are errors; every key has a default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from deepspeed_pulse.errors import ConfigError, did_you_mean

SCHEDULES = ("gpipe", "1f1b", "interleaved", "wave", "dualpipev", "zbv", "vhalf", "vmin")


class PulseConfig(BaseModel):
    """One field per key, with its meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = True
    """False: stock 1F1B with skips relayed in the tuple, the baseline."""

    placement: Literal["auto", "wave", "linear"] = "auto"
    """wave: stages i and 2P-1-i on rank i. linear: one stage a rank."""

    waves: Literal["auto"] | int = 1
    """Number of waves W: stages = 2 * ranks * W."""

    schedule: StrictStr = "auto"
    """"auto": the best order that fits memory; or a generator's name."""

    split_backward: StrictBool = False
    """True: schedules may use I and W (input and weight gradients apart)."""

    profile: StrictStr = "auto"
    """"auto": layer costs measured from ``example_batch``, else from parameter counts; or a profile file."""

    cluster: StrictStr = "auto"
    """"auto": nominal links and this device's memory; or a cluster file."""

    plan: StrictStr | None = None
    """A Plan file to run as it is."""

    plan_cache: StrictStr | None = None
    """Folder where plans are kept between runs."""

    memory_gb: Literal["auto"] | float = "auto"
    """Activation and state budget of a rank, GB (1e9 bytes)."""

    solver_seconds: float = Field(default=30.0, ge=0.0)
    """Time the synthesiser may take; 0 keeps the best generator's order."""

    timeout_seconds: float = Field(default=600.0, gt=0.0)
    """A peer silent for longer ends the run with an error naming rank, stage, microbatch and action."""

    trace: StrictStr | None = None
    """Where rank 0 writes the measured timeline (Chrome trace, opens in Perfetto)."""


def parse_pulse(block: Any, where: str = 'the "pulse" block') -> PulseConfig | None:
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
        raise ConfigError(f"{where}: expected an object, true or false, found {block!r}")
    try:
        config = PulseConfig(**block)
    except (ValidationError, TypeError) as problem:
        raise ConfigError(f"{where}: " + "; ".join(_explain(problem))) from None
    _check_later(config, where)
    return config


def _explain(problem: Exception) -> list[str]:
    if not isinstance(problem, ValidationError):
        return [str(problem)]
    lines: list[str] = []
    known = list(PulseConfig.model_fields)
    for error in problem.errors():
        key = str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}{did_you_mean(key, known)}; known: {', '.join(known)}")
        else:
            lines.append(f"key {key!r}: {error['msg']}, found {error['input']!r}")
    return list(dict.fromkeys(lines))


def _check_later(config: PulseConfig, where: str) -> None:
    if config.waves == "auto":
        raise ConfigError(f'{where}: key "waves": "auto" is not there yet; give the number of waves, for example 1')
    if isinstance(config.waves, bool) or config.waves < 1:
        raise ConfigError(f'{where}: key "waves": expected an integer >= 1, found {config.waves!r}')
    if config.schedule != "auto" and config.schedule not in SCHEDULES:
        raise ConfigError(
            f'{where}: key "schedule": expected "auto" or one of {", ".join(SCHEDULES)}, found {config.schedule!r}'
        )
    if config.split_backward:
        raise ConfigError(
            f'{where}: key "split_backward": the engine cannot run plans with split backward (I and W actions) yet; '
            "set it to false"
        )
    if config.memory_gb != "auto" and (isinstance(config.memory_gb, bool) or config.memory_gb <= 0):
        raise ConfigError(f'{where}: key "memory_gb": expected "auto" or a number > 0, found {config.memory_gb!r}')
