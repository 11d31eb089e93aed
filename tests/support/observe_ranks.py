"""What ranks run in the tests of figures: monitor, timers, logged messages, traced steps."""

from __future__ import annotations

from typing import Any

from support.engine_ranks import data_of, make_engine, torch_world
from support.parity import share_groups

STEPS = 4


def observed(folder: str) -> None:
    """One run with everything switched on; files go to ``folder``, upstream's lines to the output."""
    share_groups()
    engine = make_engine(
        torch_world(),
        3,
        model="unet",
        pulse={"solver_seconds": 0, "trace": f"{folder}/traces/step.json", "trace_steps": [2, 4], "placement": "wave"},
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "events"},
        comms_logger={"enabled": True, "verbose": False, "prof_all": True},
        wall_clock_breakdown=True,
        steps_per_print=2,
    )
    gathered = count_gathers(engine)
    for step in range(STEPS):
        logged = logged_bytes()
        engine.train_batch(data_of(engine, step, "unet"))
        check_logged(engine, logged)
        # traced or written: 2 and 4; the table: 3
        assert len(gathered) == (0, 1, 2, 3)[step], (step, gathered)
        engine.eval_batch(data_of(engine, 100, "unet"))
    check_timers(engine)
    engine.save_checkpoint(f"{folder}/checkpoints")
    engine.destroy()
    relays(folder)
    print("PASSED", flush=True)


def count_gathers(engine: Any) -> list[Any]:
    """Items that are gathered over the pipeline from now on."""
    found: list[Any] = []
    genuine = engine.module.ranks.gather_to_first

    def counting(item: Any) -> Any:
        found.append(item)
        return genuine(item)

    engine.module.ranks.gather_to_first = counting
    return found


def logged_bytes() -> tuple[int, int]:
    """Bytes of point-to-point messages that upstream's logger has seen: sent, received."""
    from deepspeed.comm.comm import comms_logger

    sent, received = (
        sum(size * row[0] for size, row in comms_logger.comms_dict.get(name, {}).items()) for name in ("isend", "irecv")
    )
    return sent, received


def check_logged(engine: Any, before: tuple[int, int]) -> None:
    sent = logged_bytes()[0] - before[0]
    stats = engine.pulse_stats()
    assert sent == sum(stats["p2p_bytes"].values()) + stats["metadata_bytes"] > 0, (sent, stats)
    assert logged_bytes()[1] > before[1]


def check_timers(engine: Any) -> None:
    """Each timer ran once for each thing that it is named after, on this rank, since upstream last printed it."""
    timers = engine.timers.get_timers()
    # evaluation goes on after upstream's last line; there are as many forwards in it as a step has
    row = engine.module.plan.schedule[engine.stage_id]
    forwards = sum(action.op.value == "F" for action in row)
    assert len(timers["fwd_microstep"].event_timers) == forwards
    for name in ("bwd_microstep", "bwd_inner_microstep", "bwd_allreduce_microstep", "step_microstep"):
        assert not timers[name].event_timers, name
        assert not timers[name].started_, name


def relays(folder: str) -> None:
    """The baseline writes its bytes under the same names."""
    engine = make_engine(
        torch_world(),
        2,
        pulse=False,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "baseline"},
        steps_per_print=1,
    )
    engine.train_batch(data_of(engine, 0))
    engine.destroy()
