"""What is used of DeepSpeed is listed, what is listed is used and is there, and what is not there is told by name."""

from __future__ import annotations

import os
import subprocess
import sys

import deepspeed
import pytest
from packaging.version import Version
from support.waist import used

from deepspeed_pulse.engine import hook
from deepspeed_pulse.engine.waist import check
from deepspeed_pulse.engine.waist.names import NAMES, SINCE
from deepspeed_pulse.errors import ConfigError

NOT_YET = {name for name, since in SINCE.items() if Version(deepspeed.__version__) < Version(since)}
LISTED = {f"{owner}.{name}" for owner, names in NAMES.items() for name in names.split()}

HIDES = """
import deepspeed.runtime.pipe.engine
del deepspeed.runtime.pipe.engine.PIPE_SEND_GRAD_TIMER
from deepspeed_pulse import PipelineModule
"""


def test_listed_is_what_the_sources_use() -> None:
    found = {f"{owner}.{name}" for owner, names in used().items() for name in names}
    assert not found - LISTED, "used, not listed"
    assert not LISTED - found - NOT_YET, "listed, not used"


def test_listed_is_there_in_the_versions_that_have_it() -> None:
    missing = {
        f"{owner}.{name}" for owner, names in NAMES.items() for name in names.split() if not check.has(owner, name)
    }
    assert missing == NOT_YET
    assert set(SINCE) <= LISTED


def test_instances_have_more_than_their_class() -> None:
    engine = "deepspeed.runtime.pipe.engine.PipelineEngine"
    assert check.has(engine, "pipe_buffers") and check.has(engine, "checkpoint_engine")
    assert not check.has(engine, "share_memory") and not check.has(f"{engine}.no_such_class", "steps")


def test_what_this_package_sets_on_a_class_is_not_upstreams() -> None:
    hook.install()
    check._names_of.cache_clear()  # a test before this one may have asked before it was set
    assert not check.has("deepspeed.DeepSpeedConfig", "__new__")
    assert check.has("deepspeed.DeepSpeedConfig", "__init__")


def test_a_name_that_is_not_there_is_told_with_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "deepspeed.comm", "all_reduce all_reduse")
    with pytest.raises(ConfigError) as caught:
        check.check_names.__wrapped__()
    for part in (
        "deepspeed.comm.all_reduse",
        deepspeed.__version__,
        "0.18.4 to 0.19.8",
        "pip install deepspeed==0.19.8",
    ):
        assert part in str(caught.value)


def test_it_is_told_before_anything_imports_the_name() -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    found = subprocess.run([sys.executable, "-c", HIDES], env=environment, capture_output=True, text=True, timeout=200)
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "deepspeed_pulse.errors.ConfigError: deepspeed: expected deepspeed.runtime.pipe.engine.PIPE_SEND"
    )
