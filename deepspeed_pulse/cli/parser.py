"""The arguments of every command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from deepspeed_pulse import __version__
from deepspeed_pulse.cli import making, showing
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.clusters import SPELLINGS
from deepspeed_pulse.ir.fields import MAX_NUMBER

Add = Callable[..., argparse.Action]
"""``add_argument`` of a command's parser."""


class _Parser(argparse.ArgumentParser):
    """Complains through :class:`ConfigError`, so that every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def make_parser(description: str) -> argparse.ArgumentParser:
    """The parser of ``ds_pulse``; ``description`` stands at the head of its help."""
    parser = _Parser(prog="ds_pulse", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"ds_pulse {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, add_arguments, what in _COMMANDS:
        subparser = subparsers.add_parser(command.__name__, help=what)
        subparser.set_defaults(command=command)
        add_arguments(subparser.add_argument)
    return parser


_BACKBONES = "several: backbones that train together, called as their profiles are"
_FUSED = "the optimizer's step makes no tensors of its own (DeepSpeed's Adam; not torch's): less memory"
_OWN_STEPS = (
    "when several backbones make their optimizer steps: all at the end, each when its own last backward has ended, or "
    "what is faster; default: together"
)


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Reads a number that ``fits``."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return number

    return read


_positive = _number(f"a number > 0 and at most {MAX_NUMBER:g}", lambda number: 0.0 < number <= MAX_NUMBER)
_seconds = _number("a number of seconds >= 0", lambda number: 0.0 <= number < math.inf)
_share = _number("a number from 0 to 1", lambda number: 0.0 <= number <= 1.0)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, found {text!r}")
    return int(text)


def _layers(text: str) -> str | list[str]:
    return text if text in ("none", "all", "auto") else [layer.strip() for layer in text.split(",")]


def _profile(add: Add) -> None:
    model = "a published model's name (sd15, sdxl, ...), a diffusers folder or config.json, package.module:function"
    add("model", metavar="MODEL", help=model)
    add("--microbatch-size", type=_count, metavar="b", help="default: 1, or the function's")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="default: bfloat16")
    add("--granularity", choices=("block", "fine"), help="fine: attention and MLP apart; default: block")
    add("--estimate", action="store_true", help="count operations instead of measuring; needs no device")
    rate = f"what --estimate divides operations by; default: {making.TFLOPS:g}"
    add("--tflops", type=_positive, metavar="T", help=rate)
    stepped = "of the device's memory, by which --estimate counts the optimizer's step; default: it counts nothing"
    add("--memory-gb-per-s", type=_positive, metavar="X", help=stepped)
    add("--fused-optimizer", action="store_true", help="measure the step of a fused optimizer (DeepSpeed's Adam)")
    add("--out", required=True, metavar="PROFILE", help="the profile that is written")


def _plan(add: Add) -> None:
    add("profile", nargs="+", metavar="PROFILE", help=f"layer costs (pulse-profile/1); {_BACKBONES}")
    add("--cluster", required=True, help=SPELLINGS)
    add("--pipeline-ranks", required=True, type=_count, metavar="P")
    add("--microbatches", required=True, type=_count, metavar="M", help="of one step and pipeline")
    add("--data-parallel", default=1, type=_count, metavar="G", help="pipelines side by side")
    add("--placement", default="auto", choices=("auto", "wave", "linear", "loop"))
    add("--waves", default=1, type=_count, metavar="W", help="stages = 2 * P * W, of a wave or a loop (2 W rounds)")
    add("--memory-gb", type=_positive, metavar="X", help="of one rank; default: the cluster's")
    add("--schedule", default="auto", metavar="S", help='"auto" or a schedule\'s name')
    halves = "input and weight gradients apart (I and W); default: where that is faster, if the profile knows halves"
    add("--split-backward", action=argparse.BooleanOptionalAction, help=halves)
    add("--solver-seconds", default=30.0, type=_seconds, metavar="T", help="processor time to search for better orders")
    add("--tolerance", default=0.0, type=_share, metavar="T", help="share of the load to give up for fewer bytes sent")
    first = "first layer of each stage but the first"
    add("--cuts", type=lambda text: text.split(","), metavar="A,B,..", help=first)
    which = '"none", "all", "auto" (as few as the memory needs), or indices and names'
    again = f"layers that run again in backward: {which}"
    add("--recompute", default="none", type=_layers, metavar="A,B,..", help=again)
    add("--zero-stage", default=0, type=int, choices=(0, 1), help="1: data-parallel ranks share the optimizer state")
    add("--fused-optimizer", action="store_true", help=_FUSED)
    add("--backbone-steps", default="together", choices=("together", "each", "auto"), help=_OWN_STEPS)
    add("--frozen", metavar="FILE", help="encoders that run in idle time for the next batch (pulse-frozen/1)")
    add("--out", required=True, metavar="PLAN", help="the plan that is written")


def _tune(add: Add) -> None:
    costs = (
        "layer costs, a file for each microbatch size; of a single one, larger microbatches are scaled; profiles of "
        "different names are backbones that train together, each with the same sizes"
    )
    add("profiles", nargs="+", metavar="PROFILE", help=costs)
    add("--cluster", required=True, help=SPELLINGS)
    add("--global-batch", required=True, type=_count, metavar="B", help="samples of one step, all ranks")
    add("--world", type=_count, metavar="N", help="ranks to use; default: the cluster's")
    add("--memory-gb", type=_positive, metavar="X", help="of one rank; default: the cluster's")
    add(
        "--solver-seconds",
        default=10.0,
        type=_seconds,
        metavar="T",
        help="processor time to search for better orders of the best",
    )
    add("--backbone-steps", default="together", choices=("together", "each", "auto"), help=_OWN_STEPS)
    add("--fused-optimizer", action="store_true", help=_FUSED)
    encoders = "encoders that run in idle time (pulse-frozen/1); default: their results are cached, nothing to fill"
    add("--frozen", metavar="FILE", help=encoders)
    add("--exhaustive", action="store_true", help="simulate what bounds exclude, too")
    add("--all", action="store_true", help="a row for everything that was tried")
    add("--out", metavar="PLAN", help="the best choice's plan")
    add("--profile-out", metavar="PROFILE", help="the profile, perhaps scaled, behind that plan")
    add("--config", metavar="JSON", help="DeepSpeed's settings for it; needs --out")
    add("--picture", metavar="FILE", help="throughput and memory over P, and each rank of the best (.png, .svg, .pdf)")
    add("--verify", type=_count, metavar="K", help="run the best K a few steps on this machine and rank by measurement")
    add("--model", metavar="MODEL", help="for --verify: the model of the profiles, as `ds_pulse profile` takes it")
    add("--granularity", choices=("block", "fine"), help="for --verify: the profiles'; default: block")
    limit = f"for --verify: that one choice may take, start and all; default: {making.VERIFY_SECONDS:g}"
    add("--verify-seconds", type=_positive, metavar="T", help=limit)


def _plan_and_costs(add: Add) -> None:
    add("plan", metavar="PLAN", help="a plan (pulse-plan/2)")
    add("--profile", required=True, nargs="+", help=f"layer costs (pulse-profile/1); {_BACKBONES}")
    add("--cluster", required=True, help=SPELLINGS)


def _show(add: Add) -> None:
    add("file", metavar="FILE", help="a plan (pulse-plan/2) or a profile (pulse-profile/1)")
    add("--plan", help="goes with a profile: draw this plan's cuts, and what it sends")
    times = "real times; without it a forward takes 1 ms, a backward 2 ms"
    add("--profile", nargs="+", help=f"{times}; {_BACKBONES}")
    add("--cluster", help="goes with --profile")
    add("--memory", action="store_true", help="draw each rank's live bytes too, in pictures (needs --profile)")
    kinds = "page (.html), Perfetto trace (.json), torch's action table (.csv); repeatable"
    add("--out", action="append", default=[], metavar="FILE", help=f"picture (.png .svg .pdf); of a plan also {kinds}")


def _report(add: Add) -> None:
    files = "run files (pulse_run.json beside checkpoints, .run.json beside a trace) and csv_monitor's tables"
    add("path", nargs="*", metavar="FOLDER_OR_FILE", help=files)
    kinds = ".png .svg .pdf, page (.html), Perfetto trace (.json); repeatable"
    add("--out", action="append", default=[], metavar="FILE", help=f"planned step above measured ones: {kinds}")


_BUG_REPORT = "without a path what a bug report needs: versions, device, backend"
_COMMANDS: tuple[tuple[Callable[[argparse.Namespace], int | None], Callable[[Add], None], str], ...] = (
    (making.profile, _profile, "layer costs of a model, measured or estimated"),
    (making.plan, _plan, "partition and schedule a profile"),
    (making.tune, _tune, "choose ranks, placement, microbatch size and ZeRO stage for a global batch"),
    (showing.simulate, _plan_and_costs, "times, traffic and memory of a plan, also one made elsewhere"),
    (showing.check, _plan_and_costs, "every violation of a plan, memory included; status 1 if there are any"),
    (showing.show, _show, "a plan as grid, picture, trace or table; a profile's layers and skips"),
    (showing.report, _report, f"what a run has written; {_BUG_REPORT}"),
)
"""What runs, its arguments, and a line of help; its name is the command's."""
