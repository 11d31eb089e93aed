"""A pytest plugin for a mutation run: which lines each test runs, into the file $COVERED names.

Without $COVERED it only keeps hypothesis from looking for the smallest example: that a test fails is all that is asked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from coverage import Coverage
from hypothesis import Phase

hypothesis.settings.register_profile("asked", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
hypothesis.settings.load_profile("asked")

WHERE = os.environ.get("COVERED")
COVERAGE: Any = None

if WHERE:  # before the package is imported, so that what runs at import is seen too
    COVERAGE = Coverage(
        data_file=None, source_pkgs=["deepspeed_pulse.planner", "deepspeed_pulse.runtime"], config_file=False
    )
    COVERAGE.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    if COVERAGE is not None:
        COVERAGE.switch_context(item.nodeid)


def pytest_sessionfinish() -> None:
    if COVERAGE is None:
        return
    COVERAGE.stop()
    data = COVERAGE.get_data()
    lines = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
    Path(str(WHERE)).write_text(json.dumps(lines))
