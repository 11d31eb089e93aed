"""Sizes as a person reads them, the same in errors, tables and pictures."""

from __future__ import annotations

import math


def gigabytes(num_bytes: float, *, enough: bool = False) -> str:
    """GB of 1e9 bytes with two decimals; small sizes keep two digits.

    ``enough``: with three decimals and rounded up, so that what an error says would do does.

    >>> gigabytes(1_500_000_001), gigabytes(1_500_000), gigabytes(1_500_000_001, enough=True)
    ('1.50', '0.0015', '1.501')
    """
    if enough:
        return f"{math.ceil(num_bytes / 1e6) / 1e3:.3f}"
    gb = num_bytes / 1e9
    return f"{gb:.2f}" if gb >= 0.1 or gb == 0 else f"{gb:.2g}"
