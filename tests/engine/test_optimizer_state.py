"""Flat buffers that were cut over replicas: a rank opens the files that hold its numbers, and takes those alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_pulse.engine.checkpoints.optimizer_state import SavedState, read_state

SIZES = {"a": 7, "b": 500, "c": 3, "d": 1, "e": 210}
GROUPS = [["a", "b", "pulse_placeholder", "c"], ["d", "e"]]

Parts = dict[str, range]
"""Per parameter, some of its numbers."""


def numbers(name: str) -> torch.Tensor:
    """A parameter's full-precision copy; its moment has the negatives."""
    return torch.arange(SIZES[name]) + 1000.0 * list(SIZES).index(name)


@dataclass(kw_only=True)
class Saved:
    """What one pipeline rank has saved: parts of buffers begin at multiples of ``alignment``.

    ``gap``: zeros between parameters; ``adapts``: replicas have learning rates of their own.
    """

    replicas: int
    alignment: int = 2
    gap: int = 0
    adapts: bool = False
    opened: list[int] = field(default_factory=list)

    def part(self, group: list[str], replica: int) -> tuple[dict[str, fragment_address], torch.Tensor]:
        """Addresses in a replica's part of a group's buffer, and that part."""
        spans, rows, end = {}, [], 0
        for name in group:
            rows += [numbers(name) if name in SIZES else torch.zeros(1), torch.zeros(self.gap)]
            spans[name] = range(end, end + len(rows[-2]))
            end += len(rows[-2]) + self.gap
        length = -(-end // (self.alignment * self.replicas)) * self.alignment
        low, addresses = replica * length, {}
        for name in filter(SIZES.__contains__, group):
            first, last = max(low, spans[name].start), min(low + length, spans[name].stop)
            if first < last:
                addresses[name] = fragment_address(start=first - low, numel=last - first)
        flat = torch.cat([*rows, torch.zeros(length * self.replicas - end)])
        return addresses, flat[low : low + length]

    def load(self, rank: int, replica: int | None) -> Any:
        """A file, as upstream writes it."""
        assert rank == 0 and replica is not None
        self.opened.append(replica)
        found = [self.part(group, replica) for group in GROUPS]
        state = {index: {"exp_avg": -flat, "step": torch.tensor(3.0)} for index, (_, flat) in enumerate(found)}
        options = {"lr": 0.5, **({"d": 1.0 + replica} if self.adapts else {})}
        return {
            "optimizer_state_dict": {
                "base_optimizer_state": {"state": state, "param_groups": [options] * len(GROUPS)},
                "single_partition_of_fp32_groups": [flat for _, flat in found],
                "param_slice_mappings": [addresses for addresses, _ in found],
                "param_alignment_paddings": [[self.gap for _ in group] for group in GROUPS],
            }
        }

    def read(self, wanted: Parts, but: str = "") -> SavedState:
        """``but``: a parameter that this run does not have."""
        self.opened.clear()
        record: Any = SimpleNamespace(parameters=[GROUPS], partitioned=True, data_parallel=self.replicas)
        sizes = {name: size for name, size in SIZES.items() if name != but}
        return read_state(record, wanted, self.load, "there", sizes)

    def parts(self) -> Iterator[Parts]:
        """For each replica, the numbers that it steps, by the addresses."""
        seen = dict.fromkeys(SIZES, 0)
        for replica in range(self.replicas):
            mine = dict.fromkeys(SIZES, range(0))
            for group in GROUPS:
                for name, address in self.part(group, replica)[0].items():
                    mine[name] = range(seen[name], seen[name] + address.numel)
                    seen[name] += address.numel
            yield mine


def have_common(one: Parts, other: Parts) -> bool:
    return any(set(one[name]) & set(other[name]) for name in SIZES)


def check(found: SavedState, wanted: Parts) -> None:
    """The numbers are there, and as they were."""
    for name, part in wanted.items():
        assert found.options[name]["lr"] == 0.5
        if part:
            low = part.start - found.parts.get(name, range(SIZES[name])).start
            expected = numbers(name)[part.start : part.stop]
            assert torch.equal(found.tensors[name]["fp32"][low : low + len(part)], expected)
            assert torch.equal(found.tensors[name]["exp_avg"][low : low + len(part)], -expected)
            assert found.scalars[name] == {"step": 3.0}


@pytest.mark.parametrize(("before", "now"), [(64, 63), (63, 64), (2, 16), (16, 2), (5, 1), (1, 5)])
def test_files_without_a_number_of_this_rank_are_not_opened(before: int, now: int) -> None:
    saved = Saved(replicas=before)
    held = list(saved.parts())
    for wanted in Saved(replicas=now).parts():
        found = saved.read(wanted)
        check(found, wanted)
        assert found.parts == {name: part for name, part in wanted.items() if part}
        holders = [replica for replica, parts in enumerate(held) if have_common(parts, wanted)]
        # one is for the options of a rank that has nothing but what fills buffers up
        assert saved.opened == (holders or [before - 1])


@pytest.mark.parametrize(("other", "but"), [({"gap": 4}, ""), ({"alignment": 16}, ""), ({}, "a")])
def test_buffers_that_were_laid_out_in_another_way_are_read_whole(other: dict[str, Any], but: str) -> None:
    saved = Saved(replicas=8, **other)
    for parts in Saved(replicas=3).parts():
        wanted = {name: part for name, part in parts.items() if name != but}
        found = saved.read(wanted, but)
        check(found, wanted)
        assert not found.parts and saved.opened[-8:] == list(range(8))


def test_of_rates_that_replicas_have_adapted_the_last_counts() -> None:
    saved = Saved(replicas=8, adapts=True)
    for wanted in Saved(replicas=4).parts():
        assert {options["d"] for options in saved.read(wanted).options.values()} == {8.0}
        assert len(saved.opened) <= 4
