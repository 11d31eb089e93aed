"""The commands that read files: ``simulate``, ``check``, ``show`` and ``report``; pictures are loaded on demand."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace

from deepspeed_pulse import __version__
from deepspeed_pulse.cli.making import load_profiles
from deepspeed_pulse.cli.terminal import check_files, check_suffixes, print_text, quiet, width
from deepspeed_pulse.errors import ConfigError, PlanError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.fields import read_file, read_format
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.report.files import IMAGES, PICTURES, SUFFIXES, replacing, write, write_rows

FAILED_CHECK = 1


def simulate(arguments: argparse.Namespace) -> None:
    from deepspeed_pulse.planner.problem import Problem
    from deepspeed_pulse.planner.simulator import run, summarize
    from deepspeed_pulse.report.tables import estimate_table

    plan, profile, cluster = _costs(arguments, arguments.plan, Plan.load(arguments.plan))
    problem = Problem(plan, profile, cluster)
    timeline = run(problem, plan.schedule)
    print_text(estimate_table(plan, timeline, summarize(problem, timeline), memory_bytes=cluster.memory_bytes))


def check(arguments: argparse.Namespace) -> int | None:
    from deepspeed_pulse.planner.checks.audit import audit
    from deepspeed_pulse.report.tables import audit_text

    plan = Plan.load(arguments.plan)
    profile, cluster = load_profiles(arguments.profile), load_cluster(arguments.cluster)
    found = audit(plan, profile, cluster)
    print_text(audit_text(arguments.plan, found.problems, found.rows))
    return FAILED_CHECK if found.problems else None


def show(arguments: argparse.Namespace) -> None:
    text = read_file(arguments.file)  # once: it may be a pipe
    found = read_format(text, arguments.file, (*Plan.FORMATS, *Profile.FORMATS))
    (_show_plan if found in Plan.FORMATS else _show_model)(arguments, text)


def _show_model(arguments: argparse.Namespace, text: str) -> None:
    """A profile: its layers, and where a plan cuts them."""
    from deepspeed_pulse.report.tables import layer_times, profile_table

    for option in ("profile", "cluster", "memory"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option} goes with a plan: {arguments.file} is a profile, whose cuts --plan gives")
    check_suffixes(arguments.out, IMAGES)
    check_files(arguments.out, [arguments.file, arguments.plan])
    profile = Profile.from_json(text, arguments.file)
    plan = None if arguments.plan is None else Plan.load(arguments.plan)
    if plan is not None:
        _check_origin(arguments.plan, plan, arguments.file, profile)
        _check_plan(arguments.plan, plan, profile)
    with contextlib.ExitStack() as files:
        for path in arguments.out:
            from deepspeed_pulse.report.model import draw_model  # loads matplotlib

            draw_model(profile, files.enter_context(replacing(path)), plan=plan)
    print_text(profile_table(profile, layer_times(profile), note=f"costs: {profile.device}"))


def _show_plan(arguments: argparse.Namespace, text: str) -> None:
    from deepspeed_pulse.planner.problem import Problem
    from deepspeed_pulse.planner.simulator import run, summarize
    from deepspeed_pulse.report.grid import schedule_grid
    from deepspeed_pulse.report.tables import plan_table

    if arguments.plan is not None:
        raise ConfigError(f"--plan goes with a profile: {arguments.file} is none")
    check_suffixes(arguments.out, SUFFIXES)
    plan = Plan.from_json(text, arguments.file)
    check_files(arguments.out, [arguments.file, *(arguments.profile or []), arguments.cluster])
    runnable, profile, cluster = _costs(arguments, arguments.file, plan)
    if arguments.memory and not any(path.endswith(IMAGES) for path in arguments.out):
        raise ConfigError(f"--memory is drawn in pictures: give an --out that ends in one of {', '.join(IMAGES)}")
    problem = Problem(runnable, profile, cluster)
    timeline = run(problem, runnable.schedule)
    with contextlib.ExitStack() as files:
        for path in arguments.out:
            write(files.enter_context(replacing(path)), plan, timeline, memory=arguments.memory)
    if arguments.profile:
        print_text(plan_table(_estimated(plan, summarize(problem, timeline)), profile=profile))
    else:
        print_text(plan_table(plan, costs="unit times below: a forward takes 1 ms, a backward 2 ms, a message nothing"))
    names = [part.name for part in plan.backbones]
    print_text(schedule_grid(timeline, plan.placement, width=width(), backbones=names))


def _estimated(plan: Plan, found: Estimate) -> Plan:
    """With the figures of the costs that were given; what a search says of itself is of those that it had."""
    solver, same = plan.solver, plan.estimate is not None and plan.estimate.makespan_ms == found.makespan_ms
    if solver is not None and not same:
        solver = replace(solver, optimal=False, generator=None)
    return replace(plan, estimate=found, solver=solver)


def report(arguments: argparse.Namespace) -> None:
    from deepspeed_pulse.report.runs import collect, environment_table, report, timelines

    check_suffixes(arguments.out, PICTURES)
    if not arguments.path:
        if arguments.out:
            raise ConfigError("--out goes with the folder or file of a run")
        with quiet():
            from deepspeed_pulse.engine.observation.environment import environment

            rows = [("ds_pulse", __version__), *environment()]
        print_text(environment_table(rows))
        return
    found = collect(arguments.path)
    if arguments.out:
        check_files(arguments.out, arguments.path)
        the_run = found.only_run()
        with contextlib.ExitStack() as files:
            for path in arguments.out:
                write_rows(files.enter_context(replacing(path)), timelines(the_run), the_run.plan)
    print_text(report(found))


def _costs(arguments: argparse.Namespace, path: str, plan: Plan) -> tuple[Plan, Profile, Cluster]:
    """The plan, which can run, with the costs it is drawn with."""
    from deepspeed_pulse.report.units import with_unit_costs

    if (arguments.profile is None) != (arguments.cluster is None):
        raise ConfigError("--profile and --cluster go together: give both, or none for unit times")
    if arguments.profile is None:
        if arguments.memory:
            raise ConfigError("--memory needs --profile and --cluster: unit times say nothing about bytes")
        plan, profile, cluster = with_unit_costs(plan)
    else:
        profile = load_profiles(arguments.profile)
        _check_origin(path, plan, " and ".join(arguments.profile), profile)
        cluster = load_cluster(arguments.cluster)
    if plan.grid.num_ranks > cluster.num_ranks:
        raise PlanError(
            f"{path} is for {plan.pipeline_ranks} x {plan.data_parallel} ranks, {arguments.cluster} has "
            f"{cluster.num_ranks}; give a larger cluster"
        )
    _check_plan(path, plan, profile)
    return plan, profile, cluster


def _check_origin(path: str, plan: Plan, profile_path: str, profile: Profile) -> None:
    if plan.profile_fingerprint not in (None, profile.fingerprint):
        raise PlanError(
            f"{path} was made from another profile than {profile_path}: expected fingerprint "
            f"{plan.profile_fingerprint}, found {profile.fingerprint}; give the profile it was made from"
        )


def _check_plan(path: str, plan: Plan, profile: Profile) -> None:
    """A :class:`PlanError` that lists what is wrong with a plan that cannot run."""
    from deepspeed_pulse.planner import violations

    found = violations(plan, num_layers=profile.num_layers, values=profile.values)
    if found:
        raise PlanError(f"{path}: the plan cannot run: {'; '.join(found)}")
