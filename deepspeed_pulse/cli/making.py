"""The commands that make files: ``profile``, ``plan`` and ``tune``; frameworks and solvers are loaded when needed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_pulse.cli.terminal import check_files, check_suffixes, print_text, quiet
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.choice import Constraints, Tuning
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.fields import write_json
from deepspeed_pulse.ir.frozen import FrozenParts
from deepspeed_pulse.ir.joined import joined_by_size, joined_profile
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.report.files import IMAGES, replacing
from deepspeed_pulse.report.progress import counting, solving, visiting

TFLOPS = 312.0
"""Peak rate that estimates assume: an A100's in bfloat16, by its data sheet."""

VERIFY_SECONDS = 600.0


def profile(arguments: argparse.Namespace) -> None:
    from deepspeed_pulse.report.tables import layer_times, profile_table

    if arguments.tflops is not None and not arguments.estimate:
        raise ConfigError("--tflops goes with --estimate: measured times need no rate")
    if arguments.memory_gb_per_s is not None and not arguments.estimate:
        raise ConfigError("--memory-gb-per-s goes with --estimate: the optimizer's step is measured, too")
    if arguments.fused_optimizer and arguments.estimate:
        raise ConfigError("--fused-optimizer goes with measured times; an estimate takes --memory-gb-per-s")
    check_files([arguments.out], [arguments.model])
    with replacing(arguments.out) as out, visiting(sys.stderr) as watch, quiet():
        from deepspeed_pulse.engine.plans.profiles import estimate_profile, measure_profile
        from deepspeed_pulse.models.catalogue.sources import find_workload

        workload = find_workload(
            arguments.model,
            microbatch_size=arguments.microbatch_size,
            dtype=arguments.dtype,
            granularity=arguments.granularity,
        )
        if arguments.estimate:
            tflops = arguments.tflops or TFLOPS
            estimated = estimate_profile(
                workload, tflops=tflops, memory_gb_per_s=arguments.memory_gb_per_s, watch=watch
            )
            profile, counts = estimated.profile, estimated.counts
            figures = {
                "forward GFLOP": [count.forward_flop / 1e9 for count in counts],
                "backward GFLOP": [count.backward_flop / 1e9 for count in counts],
                "weights' GFLOP": [count.weight_grad_flop / 1e9 for count in counts],
            }
            note = f"estimated: operations at {tflops:g} TFLOP/s; a multiplication and its addition are two operations"
        else:
            profile = measure_profile(workload, fused=arguments.fused_optimizer, watch=watch)
            figures = layer_times(profile)
            note = f"measured on {profile.device}: medians; spread is (largest - smallest) / median"
        out.write_text(profile.to_json(), encoding="utf-8")
    print_text(profile_table(profile, figures, note=note))


def plan(arguments: argparse.Namespace) -> None:
    from deepspeed_pulse.planner import Job, SearchOptions, make_plan
    from deepspeed_pulse.planner.partition.cuts import explicit_cuts
    from deepspeed_pulse.report.tables import plan_table

    if arguments.placement == "linear" and arguments.waves > 1:
        raise ConfigError("--waves goes with a wave or a loop: --placement linear has none; leave one out")
    check_files([arguments.out], [*arguments.profile, arguments.cluster, arguments.frozen])
    profile, cluster = load_profiles(arguments.profile), load_cluster(arguments.cluster)
    frozen = FrozenParts.load(arguments.frozen).at(profile.microbatch_size) if arguments.frozen else ()
    with replacing(arguments.out) as out, solving(sys.stderr) as progress:
        job = Job(
            profile=profile,
            cluster=cluster,
            pipeline_ranks=arguments.pipeline_ranks,
            microbatches=arguments.microbatches,
            data_parallel=arguments.data_parallel,
            memory_bytes=_memory_bytes(arguments),
            rules=Rules.of(arguments.zero_stage, fused_optimizer=arguments.fused_optimizer),
            recompute=arguments.recompute,
            frozen=frozen,
        )
        options = SearchOptions(
            placement=arguments.placement,
            waves=arguments.waves,
            boundaries=None if arguments.cuts is None else explicit_cuts(profile, arguments.cuts),
            schedule=arguments.schedule,
            split_backward=arguments.split_backward,
            solver_seconds=arguments.solver_seconds,
            tolerance=arguments.tolerance,
            backbone_steps=arguments.backbone_steps,
        )
        plan = make_plan(job, options, progress=progress)
        out.write_text(plan.to_json(), encoding="utf-8")
    print_text(plan_table(plan, profile=profile))


def load_profiles(paths: Sequence[str]) -> Profile:
    """The profile of one file, or of several backbones that train together."""
    return joined_profile([Profile.load(path) for path in paths])


def _memory_bytes(arguments: argparse.Namespace) -> int | None:
    return None if arguments.memory_gb is None else round(arguments.memory_gb * 1e9)


def tune(arguments: argparse.Namespace) -> None:
    from deepspeed_pulse.cli.verify import check_machine
    from deepspeed_pulse.report.tuning import tuning_table

    _check_options_of_tune(arguments)
    outputs = [arguments.out, arguments.profile_out, arguments.config, arguments.picture]
    check_files(outputs, [*arguments.profiles, arguments.cluster, arguments.frozen, arguments.model])
    profiles = joined_by_size([Profile.load(path) for path in arguments.profiles])
    cluster = load_cluster(arguments.cluster)
    if arguments.verify and profiles[0].backbones:
        raise ConfigError("--verify: expected profiles of one model, found several backbones; leave it out")
    if arguments.verify:
        check_machine(cluster, arguments.world or cluster.num_ranks)
        with quiet():
            from deepspeed_pulse.models.catalogue.sources import check_takes_sizes
        check_takes_sizes(arguments.model)
    with contextlib.ExitStack() as files:
        # Before the search, so that what cannot be written is known at once.
        paths = {
            name: files.enter_context(replacing(getattr(arguments, name)))
            for name in ("out", "profile_out", "config", "picture")
            if getattr(arguments, name)
        }
        tuning = _tuned(arguments, profiles, cluster)
        _write_tuning(tuning, paths, plan_file=arguments.out)
    print_text(tuning_table(tuning, everything=arguments.all))


def _check_options_of_tune(arguments: argparse.Namespace) -> None:
    if arguments.config and not arguments.out:
        raise ConfigError("--config names the plan file: give --out PLAN, too")
    check_suffixes([arguments.picture] if arguments.picture else [], IMAGES, "--picture")
    if (arguments.verify is None) != (arguments.model is None):
        raise ConfigError("--verify K and --model MODEL go together: what is run, and how many choices of it")
    if arguments.verify and arguments.frozen:
        raise ConfigError("--verify beside --frozen: what is run has no encoders; leave one out")
    if arguments.verify_seconds is not None and arguments.verify is None:
        raise ConfigError("--verify-seconds goes with --verify")
    if arguments.granularity and arguments.model is None:
        raise ConfigError("--granularity goes with --verify: profiles have the layers they were made with")


def _tuned(arguments: argparse.Namespace, profiles: Sequence[Profile], cluster: Cluster) -> Tuning:
    """Every choice, predicted, the best ones also run where that was asked for."""
    from deepspeed_pulse.cli.verify import verify
    from deepspeed_pulse.planner import OpenJob, tune

    with counting(sys.stderr) as progress:
        job = OpenJob(
            profiles=profiles,
            cluster=cluster,
            global_batch=arguments.global_batch,
            world_size=arguments.world,
            memory_bytes=_memory_bytes(arguments),
            given=Constraints(fused_optimizer=arguments.fused_optimizer, backbone_steps=arguments.backbone_steps),
            frozen=FrozenParts.load(arguments.frozen) if arguments.frozen else None,
        )
        seconds = arguments.solver_seconds
        tuning = tune(job, solver_seconds=seconds, exhaustive=arguments.exhaustive, progress=progress)
    if not arguments.verify:
        return tuning
    with counting(sys.stderr) as progress:
        return verify(
            tuning,
            arguments.verify,
            model=arguments.model,
            granularity=arguments.granularity,
            seconds=arguments.verify_seconds or VERIFY_SECONDS,
            progress=progress,
        )


def _write_tuning(tuning: Tuning, paths: Mapping[str, Path], *, plan_file: str) -> None:
    """The best choice as the files that were asked for, by option; ``plan_file``: what the config calls the plan."""
    best = tuning.best
    profile = tuning.profiles[best.choice.microbatch_size]
    apart = best.planned.carries
    config = write_json(best.choice.ds_config(profile, plan_file, apart=apart))
    texts = {"out": best.planned.to_json(), "profile_out": profile.to_json(), "config": config}
    for option in paths.keys() & texts.keys():
        paths[option].write_text(texts[option], encoding="utf-8")
    if "picture" in paths:
        from deepspeed_pulse.report.throughput import draw_tuning

        draw_tuning(tuning, paths["picture"])
