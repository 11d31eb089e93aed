"""What all tests have in common."""

import math
from collections.abc import Iterator

import pytest

from deepspeed_pulse.report import progress


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
