"""What all tests have in common."""

import gc
import math
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from deepspeed_pulse.report import progress

# torch asks for the name of each address that it connects to; a name server that loses a question costs 5 s without
os.environ.setdefault("RES_OPTIONS", "timeout:1")


def pytest_configure(config: pytest.Config) -> None:
    """The same cases in every run: a change must not fail by chance. Soak draws anew.

    Garbage is collected seldom: all that is imported takes 0.3 s each time.
    """
    gc.set_threshold(5000, 10, 100)
    settings.register_profile("the same", derandomize=True)
    if "not soak" in config.option.markexpr:
        settings.load_profile("the same")


@pytest.fixture(autouse=True, scope="session")
def nothing_said_for_being_slow() -> Iterator[None]:
    """A busy machine does not add lines of progress to what a command writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "EVERY_SECONDS", math.inf)
        yield


LONGEST = (
    *("test_docs_run.py", "test_cli_verify.py", "test_benchmarks.py"),
    *("test_standin.py", "test_accelerator.py", "test_unsteady.py"),
)
"""Of one of these, begun last, a single worker runs on when the others have nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; all else stays in order."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
