"""The arguments of every command."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from deepspeed_pulse import __version__
from deepspeed_pulse.cli import making, showing
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.clusters import SPELLINGS
from deepspeed_pulse.ir.fields import MAX_NUMBER


class _Parser(argparse.ArgumentParser):
    """Complains through :class:`ConfigError`, so that every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def make_parser(description: str) -> argparse.ArgumentParser:
    """The parser of ``ds_pulse``; ``description`` stands at the head of its help."""
    parser = _Parser(prog="ds_pulse", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"ds_pulse {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_profile(subparsers)
    _add_plan(subparsers)
    _add_tune(subparsers)
    _add_simulate(subparsers)
    _add_check(subparsers)
    _add_show(subparsers)
    _add_report(subparsers)
    return parser


def _add_profile(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    profile = subparsers.add_parser("profile", help="layer costs of a model, measured or estimated")
    profile.set_defaults(command=making.profile)
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
        "--tflops",
        type=_positive,
        metavar="T",
        help=f"what --estimate divides operations by; default: {making.TFLOPS:g}",
    )
    profile.add_argument("--out", required=True, metavar="PROFILE", help="the profile that is written")


def _add_plan(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    plan = subparsers.add_parser("plan", help="partition and schedule a profile")
    plan.set_defaults(command=making.plan)
    plan.add_argument("profile", metavar="PROFILE", help="layer costs (pulse-profile/1)")
    plan.add_argument("--cluster", required=True, help=SPELLINGS)
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
    plan.add_argument(
        "--zero-stage", default=0, type=int, choices=(0, 1), help="1: data-parallel ranks share the optimizer state"
    )
    plan.add_argument(
        "--frozen", metavar="FILE", help="encoders that run in idle time for the next batch (pulse-frozen/1)"
    )
    plan.add_argument("--out", required=True, metavar="PLAN", help="the plan that is written")


def _add_tune(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    tune = subparsers.add_parser(
        "tune", help="choose ranks, placement, microbatch size and ZeRO stage for a global batch"
    )
    tune.set_defaults(command=making.tune)
    tune.add_argument(
        "profiles",
        nargs="+",
        metavar="PROFILE",
        help="layer costs, a file for each microbatch size; of a single one, larger microbatches are scaled",
    )
    tune.add_argument("--cluster", required=True, help=SPELLINGS)
    tune.add_argument("--global-batch", required=True, type=_count, metavar="B", help="samples of one step, all ranks")
    tune.add_argument("--world", type=_count, metavar="N", help="ranks to use; default: the cluster's")
    tune.add_argument("--memory-gb", type=_positive, metavar="X", help="of one rank; default: the cluster's")
    tune.add_argument(
        "--solver-seconds", default=10.0, type=_seconds, metavar="T", help="search for better orders of the best"
    )
    tune.add_argument(
        "--frozen",
        metavar="FILE",
        help="encoders that run in idle time (pulse-frozen/1); default: their results are cached, nothing to fill",
    )
    tune.add_argument("--exhaustive", action="store_true", help="simulate what bounds exclude, too")
    tune.add_argument("--all", action="store_true", help="a row for everything that was tried")
    tune.add_argument("--out", metavar="PLAN", help="the best choice's plan")
    tune.add_argument("--profile-out", metavar="PROFILE", help="the profile, perhaps scaled, behind that plan")
    tune.add_argument("--config", metavar="JSON", help="DeepSpeed's settings for it; needs --out")
    tune.add_argument(
        "--picture", metavar="FILE", help="throughput and memory over P, and each rank of the best (.png, .svg, .pdf)"
    )
    tune.add_argument(
        "--verify", type=_count, metavar="K", help="run the best K a few steps on this machine and rank by measurement"
    )
    tune.add_argument(
        "--model", metavar="MODEL", help="for --verify: the model of the profiles, as `ds_pulse profile` takes it"
    )
    tune.add_argument("--granularity", choices=("block", "fine"), help="for --verify: the profiles'; default: block")
    tune.add_argument(
        "--verify-seconds", default=600.0, type=_positive, metavar="T", help="that one choice may take, start and all"
    )


def _add_simulate(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    simulate = subparsers.add_parser("simulate", help="times, traffic and memory of a plan, also one made elsewhere")
    simulate.set_defaults(command=showing.simulate)
    _add_files(simulate)


def _add_check(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    check = subparsers.add_parser("check", help="every violation of a plan, memory included; status 1 if there are any")
    check.set_defaults(command=showing.check)
    _add_files(check)


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", metavar="PLAN", help="a plan (pulse-plan/2)")
    command.add_argument("--profile", required=True, help="layer costs (pulse-profile/1)")
    command.add_argument("--cluster", required=True, help=SPELLINGS)


def _add_show(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    show = subparsers.add_parser("show", help="a plan as grid, picture, trace or table; a profile's layers and skips")
    show.set_defaults(command=showing.show)
    show.add_argument("file", metavar="FILE", help="a plan (pulse-plan/2) or a profile (pulse-profile/1)")
    show.add_argument("--plan", help="goes with a profile: draw this plan's cuts, and what it sends")
    show.add_argument("--profile", help="real times; without it a forward takes 1 ms, a backward 2 ms")
    show.add_argument("--cluster", help="goes with --profile")
    show.add_argument("--memory", action="store_true", help="draw each rank's live bytes too (needs --profile)")
    show.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="picture (.png .svg .pdf); of a plan also page (.html), Perfetto trace (.json), torch's action table "
        "(.csv); repeatable",
    )


def _add_report(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    report = subparsers.add_parser(
        "report", help="what a run has written; without a path what a bug report needs: versions, device, backend"
    )
    report.set_defaults(command=showing.report)
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
