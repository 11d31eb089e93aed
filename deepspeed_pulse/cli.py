"""``ds_pulse``: profiles, plans, and what a run has written. Only ``profile`` and ``report`` without a path need torch.

Exit status: 0, 1 for a failed check, 2 for unusable input (one line on stderr, nothing written).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from deepspeed_pulse import __version__
from deepspeed_pulse.errors import ConfigError, PlanError, PulseError
from deepspeed_pulse.ir.fields import MAX_NUMBER

if TYPE_CHECKING:
    from deepspeed_pulse.ir.cluster import Cluster
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.ir.timeline import Timeline

OK, FAILED_CHECK, UNUSABLE = 0, 1, 2

_TFLOPS = 312.0
"""Peak rate that estimates assume: an A100's in bfloat16, by its data sheet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except PulseError as problem:
        return _complain(str(problem))
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _complain("interrupted")


def _complain(message: str) -> int:
    """The message on one line of stderr."""
    print("ds_pulse: error: " + " ".join(message.split()), file=sys.stderr)
    return UNUSABLE


class _Parser(argparse.ArgumentParser):
    """Complains through :class:`ConfigError`, so that every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ds_pulse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"ds_pulse {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_profile(commands)
    _add_plan(commands)
    _add_tune(commands)
    _add_simulate(commands)
    _add_check(commands)
    _add_show(commands)
    _add_report(commands)
    return parser


def _add_profile(commands: argparse._SubParsersAction[_Parser]) -> None:
    profile = commands.add_parser("profile", help="layer costs of a model, measured or estimated")
    profile.set_defaults(command=_profile)
    profile.add_argument(
        "model",
        metavar="MODEL",
        help="a published model's name (sd15, sdxl, ...), a diffusers folder or config.json, package.module:function",
    )
    profile.add_argument("--microbatch-size", type=_count, metavar="b", help="default: 1, or the function's")
    profile.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: bfloat16")
    profile.add_argument(
        "--granularity", choices=("block", "fine"), help="fine: attention and MLP apart; default: block"
    )
    profile.add_argument(
        "--estimate", action="store_true", help="count operations instead of measuring; needs no device"
    )
    profile.add_argument(
        "--tflops", type=_positive, metavar="T", help=f"what --estimate divides operations by; default: {_TFLOPS:g}"
    )
    profile.add_argument("--out", required=True, metavar="PROFILE", help="the profile that is written")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser("plan", help="partition and schedule a profile")
    plan.set_defaults(command=_plan)
    plan.add_argument("profile", metavar="PROFILE", help="layer costs (pulse-profile/1)")
    plan.add_argument("--cluster", required=True, help="link speeds and memory (pulse-cluster/1)")
    plan.add_argument("--pipeline-ranks", required=True, type=_count, metavar="P")
    plan.add_argument("--microbatches", required=True, type=_count, metavar="M", help="of one step and pipeline")
    plan.add_argument("--data-parallel", default=1, type=_count, metavar="G", help="pipelines side by side")
    plan.add_argument("--placement", default="auto", choices=("auto", "wave", "linear"))
    plan.add_argument("--waves", default=1, type=_count, metavar="W", help="stages = 2 * P * W")
    plan.add_argument("--memory-gb", type=_positive, metavar="X", help="of one rank; default: the cluster's")
    plan.add_argument("--schedule", default="auto", metavar="S", help='"auto" or a schedule\'s name')
    plan.add_argument("--split-backward", action="store_true", help="input and weight gradients apart (I and W)")
    plan.add_argument("--solver-seconds", default=30.0, type=_seconds, metavar="T")
    plan.add_argument(
        "--tolerance", default=0.0, type=_share, metavar="T", help="share of the load to give up for fewer bytes sent"
    )
    plan.add_argument(
        "--cuts", type=lambda text: text.split(","), metavar="A,B,..", help="first layer of each stage but the first"
    )
    plan.add_argument(
        "--recompute",
        default="none",
        type=_layers,
        metavar="A,B,..",
        help='layers that run again in backward: "none", "all", "auto" (as few as the memory needs), or indices and '
        "names",
    )
    _add_zero_stage(plan)
    plan.add_argument("--out", required=True, metavar="PLAN", help="the plan that is written")


def _add_tune(commands: argparse._SubParsersAction[_Parser]) -> None:
    tune = commands.add_parser(
        "tune", help="choose ranks, placement, microbatch size and ZeRO stage for a global batch"
    )
    tune.set_defaults(command=_tune)
    tune.add_argument(
        "profiles",
        nargs="+",
        metavar="PROFILE",
        help="layer costs, a file for each microbatch size; of a single one, larger microbatches are scaled",
    )
    tune.add_argument("--cluster", required=True, help="link speeds and memory (pulse-cluster/1)")
    tune.add_argument("--global-batch", required=True, type=_count, metavar="B", help="samples of one step, all ranks")
    tune.add_argument("--world", type=_count, metavar="N", help="ranks to use; default: the cluster's")
    tune.add_argument("--memory-gb", type=_positive, metavar="X", help="of one rank; default: the cluster's")
    tune.add_argument(
        "--solver-seconds", default=10.0, type=_seconds, metavar="T", help="search for better orders of the best"
    )
    tune.add_argument("--exhaustive", action="store_true", help="simulate what bounds exclude, too")
    tune.add_argument("--all", action="store_true", help="a row for everything that was tried")
    tune.add_argument("--out", metavar="PLAN", help="the best choice's plan")
    tune.add_argument("--profile-out", metavar="PROFILE", help="the profile, perhaps scaled, behind that plan")
    tune.add_argument("--config", metavar="JSON", help="DeepSpeed's settings for it; needs --out")
    tune.add_argument("--picture", metavar="FILE", help="throughput and memory over P (.png, .svg, .pdf)")


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    simulate = commands.add_parser("simulate", help="times, traffic and memory of a plan, also one made elsewhere")
    simulate.set_defaults(command=_estimate)
    _add_files(simulate)


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    check = commands.add_parser("check", help="every violation of a plan, memory included; status 1 if there are any")
    check.set_defaults(command=_check)
    _add_files(check)


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", metavar="PLAN", help="a plan (pulse-plan/1)")
    command.add_argument("--profile", required=True, help="layer costs (pulse-profile/1)")
    command.add_argument("--cluster", required=True, help="link speeds and memory (pulse-cluster/1)")
    _add_zero_stage(command)


def _add_zero_stage(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--zero-stage", default=0, type=int, choices=(0, 1), help="1: data-parallel ranks share the optimizer state"
    )


def _add_show(commands: argparse._SubParsersAction[_Parser]) -> None:
    show = commands.add_parser("show", help="a plan as grid, picture, trace or table")
    show.set_defaults(command=_show)
    show.add_argument("plan", metavar="PLAN", help="a plan (pulse-plan/1)")
    show.add_argument("--profile", help="real times; without it a forward takes 1 ms, a backward 2 ms")
    show.add_argument("--cluster", help="goes with --profile")
    show.add_argument("--memory", action="store_true", help="draw each rank's live bytes too (needs --profile)")
    show.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="picture (.png .svg .pdf), page (.html), Perfetto trace (.json), torch's action table (.csv); repeatable",
    )


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    report = commands.add_parser(
        "report", help="what a run has written; without a path what a bug report needs: versions, device, backend"
    )
    report.set_defaults(command=_report)
    report.add_argument(
        "path",
        nargs="*",
        metavar="FOLDER_OR_FILE",
        help="run files (pulse_run.json beside checkpoints, .run.json beside a trace) and csv_monitor's tables",
    )
    report.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="planned step above measured ones: .png .svg .pdf, page (.html), Perfetto trace (.json); repeatable",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, found {text!r}")
    return int(text)


def _positive(text: str) -> float:
    number = _number(text)
    if not 0.0 < number <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"expected a number > 0 and at most {MAX_NUMBER:g}, found {text!r}")
    return number


def _seconds(text: str) -> float:
    number = _number(text)
    if not 0.0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds >= 0, found {text!r}")
    return number


def _share(text: str) -> float:
    number = _number(text)
    if not 0.0 <= number <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return number


def _layers(text: str) -> str | list[str]:
    return text if text in ("none", "all", "auto") else [layer.strip() for layer in text.split(",")]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _profile(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.report.files import replacing
    from deepspeed_pulse.report.profiles import profile_table
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
            tflops = arguments.tflops or _TFLOPS
            estimated = estimate_profile(job, tflops=tflops, watch=watch)
            profile, counts = estimated.profile, estimated.counts
            figures = {
                "forward GFLOP": [count.forward_flop / 1e9 for count in counts],
                "backward GFLOP": [count.backward_flop / 1e9 for count in counts],
                "weights' GFLOP": [count.weight_grad_flop / 1e9 for count in counts],
            }
            note = f"estimated: operations at {tflops:g} TFLOP/s; a multiplication and its addition are two operations"
        else:
            timed = measure_profile(job, watch=watch)
            profile = timed.profile
            figures = {
                "forward ms": [layer.forward_ms for layer in profile.layers],
                "backward ms": [layer.backward_ms for layer in profile.layers],
                "spread %": [100 * spread for spread in timed.spread],
            }
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


def _plan(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.cluster import Cluster
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.planner.make import make_plan
    from deepspeed_pulse.planner.partition import explicit_cuts
    from deepspeed_pulse.report.files import replacing
    from deepspeed_pulse.report.progress import solving
    from deepspeed_pulse.report.tables import plan_table

    profile, cluster = Profile.load(arguments.profile), Cluster.load(arguments.cluster)
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
        )
        out.write_text(plan.to_json(), encoding="utf-8")
    _print(plan_table(plan, profile=profile))
    return OK


def _tune(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.cluster import Cluster
    from deepspeed_pulse.ir.fields import write_json
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.planner.tune import tune
    from deepspeed_pulse.report.files import IMAGES, replacing
    from deepspeed_pulse.report.progress import counting
    from deepspeed_pulse.report.tuning import tuning_table

    if arguments.config and not arguments.out:
        raise ConfigError("--config names the plan file: give --out PLAN, too")
    if arguments.picture and Path(arguments.picture).suffix not in IMAGES:
        raise ConfigError(f"--picture {arguments.picture}: expected a name ending in one of {', '.join(IMAGES)}")
    profiles, cluster = [Profile.load(path) for path in arguments.profiles], Cluster.load(arguments.cluster)
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


def _estimate(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.planner.instance import Instance
    from deepspeed_pulse.planner.simulate import summarize
    from deepspeed_pulse.report.tables import estimate_table

    plan, profile, cluster = _costs(arguments, Plan.load(arguments.plan))
    timeline = _simulate(arguments.plan, plan, profile, cluster)
    shard = arguments.zero_stage == 1
    estimate = summarize(Instance(plan, profile, cluster, shard_optimizer=shard), timeline)
    _print(estimate_table(plan, timeline, estimate, memory_bytes=cluster.memory_bytes))
    return OK


def _check(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.cluster import Cluster
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.planner.audit import audit
    from deepspeed_pulse.report.tables import audit_text

    plan = Plan.load(arguments.plan)
    profile, cluster = Profile.load(arguments.profile), Cluster.load(arguments.cluster)
    found = audit(plan, profile, cluster, shard_optimizer=arguments.zero_stage == 1)
    _print(audit_text(arguments.plan, found.problems, found.rows))
    return FAILED_CHECK if found.problems else OK


def _show(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.ir.plan import Plan
    from deepspeed_pulse.report.files import SUFFIXES, replacing, write
    from deepspeed_pulse.report.grid import schedule_grid
    from deepspeed_pulse.report.tables import plan_table

    for path in arguments.out:
        if Path(path).suffix not in SUFFIXES:
            raise ConfigError(f"--out {path}: expected a name ending in one of {', '.join(SUFFIXES)}")
    plan = Plan.load(arguments.plan)
    runnable, profile, cluster = _costs(arguments, plan)
    timeline = _simulate(arguments.plan, runnable, profile, cluster)
    with contextlib.ExitStack() as files:
        for path in arguments.out:
            write(files.enter_context(replacing(path)), plan, timeline, memory=arguments.memory)
    _print(plan_table(plan, profile=profile if arguments.profile else None, costs=_costs_note(arguments)))
    _print(schedule_grid(timeline, plan.placement, width=_width()))
    return OK


def _report(arguments: argparse.Namespace) -> int:
    from deepspeed_pulse.report.files import PICTURES, replacing, write_rows
    from deepspeed_pulse.report.runs import collect, environment_table, report, timelines

    for path in arguments.out:
        if Path(path).suffix not in PICTURES:
            raise ConfigError(f"--out {path}: expected a name ending in one of {', '.join(PICTURES)}")
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


def _costs(arguments: argparse.Namespace, plan: Plan) -> tuple[Plan, Profile, Cluster]:
    """The plan with the costs it is drawn with."""
    from deepspeed_pulse.ir.cluster import Cluster
    from deepspeed_pulse.ir.profile import Profile
    from deepspeed_pulse.report.units import with_unit_costs

    if (arguments.profile is None) != (arguments.cluster is None):
        raise ConfigError("--profile and --cluster go together: give both, or none for unit times")
    if arguments.profile is None:
        if arguments.memory:
            raise ConfigError("--memory needs --profile and --cluster: unit times say nothing about bytes")
        return with_unit_costs(plan)
    profile = Profile.load(arguments.profile)
    if plan.profile_fingerprint not in (None, profile.fingerprint):
        raise PlanError(
            f"{arguments.plan} was made from another profile than {arguments.profile}: expected fingerprint "
            f"{plan.profile_fingerprint}, found {profile.fingerprint}; give the profile it was made from"
        )
    cluster = Cluster.load(arguments.cluster)
    if plan.pipeline_ranks * plan.data_parallel > cluster.num_ranks:
        raise PlanError(
            f"{arguments.plan} is for {plan.pipeline_ranks} x {plan.data_parallel} ranks, {arguments.cluster} has "
            f"{cluster.num_ranks}; give a larger cluster"
        )
    return plan, profile, cluster


def _costs_note(arguments: argparse.Namespace) -> str | None:
    return None if arguments.profile else "unit times below: a forward takes 1 ms, a backward 2 ms, a message nothing"


def _simulate(path: str, plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """The timeline of a plan that can run; a :class:`PlanError` that lists what is wrong with any other."""
    from deepspeed_pulse.planner.routes import named_values
    from deepspeed_pulse.planner.simulate import simulate
    from deepspeed_pulse.planner.validate import violations

    found = violations(plan, num_layers=profile.num_layers, values=named_values(profile))
    if found:
        raise PlanError(f"{path}: the plan cannot run: {'; '.join(found)}")
    return simulate(plan, profile, cluster)


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


if __name__ == "__main__":
    sys.exit(main())
