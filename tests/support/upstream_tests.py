"""DeepSpeed's own tests, of pipelines and of what they stand on: which are run, and which give something else.

What is run is not here: a checkout of DeepSpeed has it, which the environment names as ``DEEPSPEED_TESTS``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

from support.standin import environment

PIPELINES = {
    "unit/pipe/test_pipe_module.py": "",
    "unit/runtime/pipe/test_pipe.py": "",
    "unit/runtime/pipe/test_pipe_schedule.py": "",
    "unit/runtime/pipe/test_topology.py": "",
    "unit/checkpoint/test_pipeline.py": "",
}
"""Files whose ``PipelineModule`` may be ours, each with what pytest selects of it."""

UP_TO_ZERO_2 = "not True-1 and not True-2 and not -3] and not test[3] and not Zero3"
"""Without offloading, which compiles a kernel for a real device, and without ZeRO-3, whose norm HCCL cannot sum."""

ZERO_TESTS = "AllreduceOpTraining or GradReduction or Unbalanced or NcclAlignment or StepCount"

PLAIN = {
    "unit/comm/test_dist.py": "",
    "unit/runtime/comm/test_coalesced_collectives.py": "",
    "unit/runtime/half_precision/test_dynamic_loss_scale.py": "",
    "unit/runtime/half_precision/test_fp16.py": UP_TO_ZERO_2,
    "unit/runtime/test_autocast.py": "",
    "unit/runtime/test_data.py": "",
    "unit/runtime/test_multi_output_model.py": "",
    "unit/v1/zero/test_zero.py": f"({ZERO_TESTS}) and {UP_TO_ZERO_2}",
}
"""Files without pipelines: replicas, ZeRO, collectives, precisions."""

MODULES = ("theirs", "ours", "line", "wave")
"""In place of their ``PipelineModule``; see :mod:`support.upstream_plugin`."""


class Otherwise(NamedTuple):
    """A test that does not pass.

    Attributes:
        test: class and name as far as they go, ``TestPipeline::test_x[1``.
        outcome: of pytest's report.
        message: part of what is said.
        why: in words.
        modules: with which modules.
    """

    test: str
    outcome: str
    message: str
    why: str
    modules: tuple[str, ...] = MODULES


TOO_SHORT = "a wave has two stages on each rank, and no stage is without a layer"

OTHERWISE = (
    Otherwise("TestPipeGradientAccumulationScaling::", "failure", "needs at least 4 layers", TOO_SHORT, ("wave",)),
    Otherwise(
        "TestPipeDynamicShape::test_pipe_base[topo_config2]", "failure", "needs at least 8 layers", TOO_SHORT, ("wave",)
    ),
    Otherwise("TestPipelineCheckpoint::test_checkpoint_pipe_module", "skipped", "empty parameter set", "has no cases"),
    Otherwise("TestDistributedFixture::", "error", "not found", "pytest 9 takes no class for a fixture"),
    Otherwise("TestLocoQuantized::", "failure", "not compiled with CUDA", "asks for CUDA by name"),
    Otherwise("test_autocast::test_get_autocast_decorators_use_legacy", "skipped", "", "for an older torch"),
    Otherwise(
        "TestGradientAllreduceOpTraining::test[muon", "failure", "InductorError", "torch compiles nothing for it"
    ),
    *(
        Otherwise(test, "failure", "a leaf Variable", "DeepSpeed's Lamb for this device writes to weights")
        for test in (
            "TestUnfused::test_no_overflow",
            "TestUnfused::test_some_overflow",
            "TestLambFP16::",
            "TestFP16OptimizerForMoE::test_lamb_gradnorm[True]",
        )
    ),
)


def expected(test: str, module: str) -> Otherwise | None:
    """What a test gives instead of passing."""
    return next((o for o in OTHERWISE if test.startswith(o.test) and module in o.modules), None)


def lacking() -> str | None:
    """Why nothing can be run, or None."""
    named = os.environ.get("DEEPSPEED_TESTS")
    if named is None:
        return "DEEPSPEED_TESTS names no checkout of DeepSpeed, whose tests these are"
    found = Path(named, "tests", "unit", "common.py")
    return (
        None if found.is_file() else f"DEEPSPEED_TESTS={named}: expected a checkout of DeepSpeed, there is no {found}"
    )


def run(
    file: str, selected: str, *, module: str, waits: str, timeout: float, more: Mapping[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Outcome and message by test, of one of their files.

    The installed DeepSpeed is tested, not the checkout's: they look for it beside their folder, where a link stands.

    Args:
        module: one of :data:`MODULES`.
        waits: whose kind of wait the device has.
        timeout: in seconds; what hangs then is ended, with its ranks.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tests").symlink_to(Path(os.environ["DEEPSPEED_TESTS"]).resolve() / "tests")
        report, log = folder / "report.xml", folder / "log"
        command = [sys.executable, "-m", "pytest", "-p", "support.upstream_plugin", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-k", selected, f"tests/{file}"]
        whole = {**_environment(module, waits, timeout), **(more or {})}
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=whole, stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                output.write(f"no end after {timeout} s\n")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
        if not report.exists():
            raise AssertionError(f"{file}: no report:\n{log.read_text(errors='replace')[-6000:]}")
        return dict(map(_read, ElementTree.parse(report).iter("testcase")))


def _environment(module: str, waits: str, timeout: float) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "PYTEST_ADDOPTS")}
    return {
        **{name: value for name, value in own.items() if not name.startswith("PYTEST_XDIST")},
        **environment(waits=waits),
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",  # or they ask a program of the device's
        "DS_UNITTEST_TIMEOUT": str(int(timeout)),
        "OMP_NUM_THREADS": "1",
        "UPSTREAM_MODULE": module,
    }


def _read(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for outcome in ("failure", "error", "skipped"):
        found = case.find(outcome)
        if found is not None:
            return name, (outcome, f"{found.get('message')}\n{(found.text or '')[-3000:]}")
    return name, ("passed", "")
