"""A link's latency and bandwidth from times of several sizes."""

from __future__ import annotations

from deepspeed_pulse.ir.cluster import MIN_BANDWIDTH_GB_PER_S, Link

Points = list[tuple[int, float]]
"""(bytes that a link carries, ms until they are there)."""


def fit_link(points: Points) -> Link:
    """Latency a and bandwidth b of t = a + bytes / b, by least squares of the relative errors.

    Where that gives nonsense, a is the time of the smallest message and b what the largest one says.

    >>> fit_link([(1000, 0.101), (10**6, 1.1)])
    Link(bandwidth_gb_per_s=1.0, latency_us=100.0)
    """
    weighed = [(1 / ms**2, size, ms) for size, ms in points]
    total = sum(w for w, _, _ in weighed)
    mean_size = sum(w * size for w, size, _ in weighed) / total
    mean_ms = sum(w * ms for w, _, ms in weighed) / total
    spread = sum(w * (size - mean_size) ** 2 for w, size, _ in weighed)
    slope = sum(w * (size - mean_size) * (ms - mean_ms) for w, size, ms in weighed) / spread
    latency_ms = mean_ms - slope * mean_size
    if slope <= 0.0 or latency_ms < 0.0:
        size, ms = points[-1]
        slope, latency_ms = ms / size, points[0][1]
    bandwidth = max(MIN_BANDWIDTH_GB_PER_S, round(1 / slope / 1e6, 6))
    return Link(bandwidth_gb_per_s=bandwidth, latency_us=round(latency_ms * 1e3, 3))
