"""What each command does; frameworks, solvers and pictures are loaded by the commands that need them."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_pulse import __version__
from deepspeed_pulse.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from deepspeed_pulse.cli.verify import Machine
    from deepspeed_pulse.ir.cluster import Cluster
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.ir.timeline import Timeline

OK, FAILED_CHECK = 0, 1

TFLOPS = 312.0
"""Peak rate that estimates assume: an A100's in bfloat16, by its data sheet."""


def profile(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.report.files import replacing
    from deepspeed_pulse.report.profiles import layer_times, profile_table
    from deepspeed_pulse.report.progress import visiting

    if arguments.tflops is not None and not arguments.estimate:
        raise ConfigError("--tflops goes with --estimate: measured times need no rate")
    with replacing(arguments.out) as out, visiting(sys.stderr) as watch, _quiet():
        from deepspeed_pulse.engine.plans.profiles import estimate_profile, measure_profile
        from deepspeed_pulse.models.catalogue.sources import find_job

        job = find_job(
            arguments.model,
            microbatch_size=arguments.microbatch_size,
            dtype=arguments.dtype,
            granularity=arguments.granularity,
        )
        if arguments.estimate:
            tflops = arguments.tflops or TFLOPS
            estimated = estimate_profile(job, tflops=tflops, watch=watch)
            profile, counts = estimated.profile, estimated.counts
            figures = {
                "forward GFLOP": [count.forward_flop / 1e9 for count in counts],
                "backward GFLOP": [count.backward_flop / 1e9 for count in counts],
                "weights' GFLOP": [count.weight_grad_flop / 1e9 for count in counts],
            }
            note = f"estimated: operations at {tflops:g} TFLOP/s; a multiplication and its addition are two operations"
        else:
            profile = measure_profile(job, watch=watch)
            figures = layer_times(profile)
            note = f"measured on {profile.device}: medians; spread is (largest - smallest) / median"
        out.write_text(profile.to_json(), encoding="utf-8")
    _print(profile_table(profile, figures, note=note))
    return OK


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log lines of the frameworks, some of which go to stdout, are left out."""
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def plan(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.clusters import load_cluster
    from deepspeed_pulse.ir.frozen import FrozenParts
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.planner.make import make_plan
    from deepspeed_pulse.planner.partition.cuts import explicit_cuts
    from deepspeed_pulse.report.files import replacing
    from deepspeed_pulse.report.progress import solving
    from deepspeed_pulse.report.tables import plan_table

    profile, cluster = Profile.load(arguments.profile), load_cluster(arguments.cluster)
    frozen = FrozenParts.load(arguments.frozen).at(profile.microbatch_size) if arguments.frozen else ()
    with replacing(arguments.out) as out, solving(sys.stderr) as progress:
        plan = make_plan(
            profile,
            cluster=cluster,
            pipeline_ranks=arguments.pipeline_ranks,
            microbatches=arguments.microbatches,
            data_parallel=arguments.data_parallel,
            placement=arguments.placement,
            waves=arguments.waves,
            boundaries=None if arguments.cuts is None else explicit_cuts(profile, arguments.cuts),
            schedule=arguments.schedule,
            memory_bytes=None if arguments.memory_gb is None else int(arguments.memory_gb * 1e9),
            split_backward=arguments.split_backward,
            solver_seconds=arguments.solver_seconds,
            tolerance=arguments.tolerance,
            progress=progress,
            recompute=arguments.recompute,
            shard_optimizer=arguments.zero_stage == 1,
            frozen=frozen,
        )
        out.write_text(plan.to_json(), encoding="utf-8")
    _print(plan_table(plan, profile=profile))
    return OK


def tune(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.cli.verify import check_machine, verify
    from deepspeed_pulse.ir.clusters import load_cluster
    from deepspeed_pulse.ir.fields import write_json
    from deepspeed_pulse.ir.frozen import FrozenParts
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.planner.tuning.tune import tune
    from deepspeed_pulse.report.files import IMAGES, replacing
    from deepspeed_pulse.report.progress import counting
    from deepspeed_pulse.report.tuning import tuning_table

    if arguments.config and not arguments.out:
        raise ConfigError("--config names the plan file: give --out PLAN, too")
    _check_suffixes([arguments.picture] if arguments.picture else [], IMAGES, "--picture")
    if (arguments.verify is None) != (arguments.model is None):
        raise ConfigError("--verify K and --model MODEL go together: what is run, and how many choices of it")
    if arguments.verify and arguments.frozen:
        raise ConfigError("--verify beside --frozen: what is run has no encoders; leave one out")
    if arguments.granularity and arguments.model is None:
        raise ConfigError("--granularity goes with --verify: profiles have the layers they were made with")
    profiles, cluster = [Profile.load(path) for path in arguments.profiles], load_cluster(arguments.cluster)
    if arguments.verify:
        check_machine(_machine(), cluster, arguments.world or cluster.num_ranks)
    with contextlib.ExitStack() as files:
        out, profile_out, config, picture = (
            files.enter_context(replacing(name)) if name else None
            for name in (arguments.out, arguments.profile_out, arguments.config, arguments.picture)
        )
        with counting(sys.stderr) as progress:
            tuning = tune(
                profiles,
                cluster=cluster,
                global_batch=arguments.global_batch,
                world_size=arguments.world,
                memory_bytes=None if arguments.memory_gb is None else int(arguments.memory_gb * 1e9),
                solver_seconds=arguments.solver_seconds,
                exhaustive=arguments.exhaustive,
                progress=progress,
                frozen=FrozenParts.load(arguments.frozen) if arguments.frozen else None,
            )
        if arguments.verify:
            with counting(sys.stderr) as progress:
                tuning = verify(
                    tuning,
                    arguments.verify,
                    model=arguments.model,
                    granularity=arguments.granularity,
                    seconds=arguments.verify_seconds,
                    progress=progress,
                )
        best = tuning.best
        profile = tuning.profiles[best.choice.microbatch_size]
        if out is not None:
            out.write_text(best.planned.to_json(), encoding="utf-8")
        if profile_out is not None:
            profile_out.write_text(profile.to_json(), encoding="utf-8")
        if config is not None:
            config.write_text(write_json(best.choice.ds_config(profile, arguments.out)), encoding="utf-8")
        if picture is not None:
            from deepspeed_pulse.report.throughput import draw_tuning

            draw_tuning(tuning, picture)
    _print(tuning_table(tuning, everything=arguments.all))
    return OK


def _machine() -> Machine:
    from deepspeed_pulse.cli.verify import Machine

    with _quiet():
        from deepspeed_pulse.engine.verifying import available

        device, devices = available()
    return Machine(device=device, devices=devices)


def simulate(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.planner.instance import Instance
    from deepspeed_pulse.planner.simulate import summarize
    from deepspeed_pulse.report.tables import estimate_table

    plan, profile, cluster = _costs(arguments, arguments.plan, Plan.load(arguments.plan))
    timeline = _simulate(arguments.plan, plan, profile, cluster)
    shard = arguments.zero_stage == 1
    estimate = summarize(Instance(plan, profile, cluster, shard_optimizer=shard), timeline)
    _print(estimate_table(plan, timeline, estimate, memory_bytes=cluster.memory_bytes))
    return OK


def check(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.clusters import load_cluster
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.planner.checks.audit import audit
    from deepspeed_pulse.report.tables import audit_text

    plan = Plan.load(arguments.plan)
    profile, cluster = Profile.load(arguments.profile), load_cluster(arguments.cluster)
    found = audit(plan, profile, cluster, shard_optimizer=arguments.zero_stage == 1)
    _print(audit_text(arguments.plan, found.problems, found.rows))
    return FAILED_CHECK if found.problems else OK


def show(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir import plan, profile
    from deepspeed_pulse.ir.fields import read_file, read_format

    text = read_file(arguments.file)  # once: it may be a pipe
    found = read_format(text, arguments.file, (plan.FORMAT, profile.FORMAT))
    return _show_plan(arguments, text) if found == plan.FORMAT else _show_model(arguments, text)


def _show_model(arguments: argparse.Namespace, text: str) -> int:
    """A profile: its layers, and where a plan cuts them."""
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.report.files import IMAGES, replacing
    from deepspeed_pulse.report.profiles import layer_times, profile_table

    for option in ("profile", "cluster", "memory"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option} goes with a plan: {arguments.file} is a profile, whose cuts --plan gives")
    _check_suffixes(arguments.out, IMAGES)
    profile = Profile.from_json(text, arguments.file)
    plan = None if arguments.plan is None else Plan.load(arguments.plan)
    if plan is not None:
        _check_origin(arguments.plan, plan, arguments.file, profile)
        _check_plan(arguments.plan, plan, profile)
    with contextlib.ExitStack() as files:
        for path in arguments.out:
            from deepspeed_pulse.report.model import draw_model  # loads matplotlib

            draw_model(profile, files.enter_context(replacing(path)), plan=plan)
    _print(profile_table(profile, layer_times(profile), note=f"costs: {profile.device}"))
    return OK


def _show_plan(arguments: argparse.Namespace, text: str) -> int:
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.report.files import SUFFIXES, replacing, write
    from deepspeed_pulse.report.grid import schedule_grid
    from deepspeed_pulse.report.tables import plan_table

    if arguments.plan is not None:
        raise ConfigError(f"--plan goes with a profile: {arguments.file} is none")
    _check_suffixes(arguments.out, SUFFIXES)
    plan = Plan.from_json(text, arguments.file)
    runnable, profile, cluster = _costs(arguments, arguments.file, plan)
    timeline = _simulate(arguments.file, runnable, profile, cluster)
    with contextlib.ExitStack() as files:
        for path in arguments.out:
            write(files.enter_context(replacing(path)), plan, timeline, memory=arguments.memory)
    _print(plan_table(plan, profile=profile if arguments.profile else None, costs=_costs_note(arguments)))
    _print(schedule_grid(timeline, plan.placement, width=_width()))
    return OK


def report(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.report.files import PICTURES, replacing, write_rows
    from deepspeed_pulse.report.runs import collect, environment_table, report, timelines

    _check_suffixes(arguments.out, PICTURES)
    if not arguments.path:
        if arguments.out:
            raise ConfigError("--out goes with the folder or file of a run")
        with _quiet():
            from deepspeed_pulse.engine.observation.environment import environment

            rows = [("ds_pulse", __version__), *environment()]
        _print(environment_table(rows))
        return OK
    found = collect(arguments.path)
    if arguments.out:
        run = found.only_run()
        with contextlib.ExitStack() as files:
            for path in arguments.out:
                write_rows(files.enter_context(replacing(path)), timelines(run), run.plan.placement)
    _print(report(found))
    return OK


def _check_suffixes(paths: Sequence[str], suffixes: Sequence[str], option: str = "--out") -> None:
    for path in paths:
        if Path(path).suffix not in suffixes:
            raise ConfigError(f"{option} {path}: expected a name ending in one of {', '.join(suffixes)}")


def _costs(arguments: argparse.Namespace, path: str, plan: Plan) -> tuple[Plan, Profile, Cluster]:
    """The plan with the costs it is drawn with."""
    from deepspeed_pulse.ir.clusters import load_cluster
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.report.units import with_unit_costs

    if (arguments.profile is None) != (arguments.cluster is None):
        raise ConfigError("--profile and --cluster go together: give both, or none for unit times")
    if arguments.profile is None:
        if arguments.memory:
            raise ConfigError("--memory needs --profile and --cluster: unit times say nothing about bytes")
        return with_unit_costs(plan)
    profile = Profile.load(arguments.profile)
    _check_origin(path, plan, arguments.profile, profile)
    cluster = load_cluster(arguments.cluster)
    if plan.pipeline_ranks * plan.data_parallel > cluster.num_ranks:
        raise PlanError(
            f"{path} is for {plan.pipeline_ranks} x {plan.data_parallel} ranks, {arguments.cluster} has "
            f"{cluster.num_ranks}; give a larger cluster"
        )
    return plan, profile, cluster


def _check_origin(path: str, plan: Plan, profile_path: str, profile: Profile) -> None:
    if plan.profile_fingerprint not in (None, profile.fingerprint):
        raise PlanError(
            f"{path} was made from another profile than {profile_path}: expected fingerprint "
            f"{plan.profile_fingerprint}, found {profile.fingerprint}; give the profile it was made from"
        )


def _costs_note(arguments: argparse.Namespace) -> str | None:
    return None if arguments.profile else "unit times below: a forward takes 1 ms, a backward 2 ms, a message nothing"


def _simulate(path: str, plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """The timeline of a plan that can run."""
    from deepspeed_pulse.planner.simulate import simulate

    _check_plan(path, plan, profile)
    return simulate(plan, profile, cluster)


def _check_plan(path: str, plan: Plan, profile: Profile) -> None:
    """A :class:`PlanError` that lists what is wrong with a plan that cannot run."""
    from deepspeed_pulse.planner.checks.validate import violations
    from deepspeed_pulse.planner.routes import named_values

    found = violations(plan, num_layers=profile.num_layers, values=named_values(profile))
    if found:
        raise PlanError(f"{path}: the plan cannot run: {'; '.join(found)}")


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _print(content: object) -> None:
    """Coloured where stdout is a terminal. One write, so that a closed pipe is one error."""
    from rich.console import Console

    console = Console(width=_width(), highlight=False)
    with console.capture() as capture:
        console.print(content)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(capture.get())
    sys.stdout.flush()
