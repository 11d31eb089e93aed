"""How far the device is, which the host does not wait for."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from threading import Lock, local
from typing import Any

from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.device import recorded_event
from deepspeed_pulse.engine.observation.whereabouts import Activity


class DeviceProgress:
    """What the device was given and has not done: the main thread tells, the watchdog's thread looks.

    A message that never comes holds up the device, while the host runs on or waits elsewhere. A rank whose device has
    done what it is given when the call returns needs none of this.
    """

    def __init__(self) -> None:
        self._given: deque[tuple[Activity, Any]] = deque()
        """Not done yet, each with an event after it; ``since``: when the one before was seen to be done."""
        self._lock = Lock()
        self._device, self._thread = get_accelerator().current_device(), local()

    def gave(self, doing: Activity) -> None:
        """The device was given all of this; of what is ``inside`` the watchdog asks that it ends in time."""
        given = replace(doing, doing=f"{doing.doing.rstrip(',')}, on its device,", since=time.monotonic())
        after = recorded_event(timed=False)
        with self._lock:
            self._forget_done()
            self._given.append((given, after))

    def under_way(self) -> Activity | None:
        """What the device is doing; None where it has done all. Asked by threads that use no device but for this."""
        if not hasattr(self._thread, "asks"):  # on Ascend a thread without a device may ask none
            get_accelerator().set_device(self._device)
            self._thread.asks = True
        with self._lock:
            self._forget_done()
            return self._given[0][0] if self._given else None

    def _forget_done(self) -> None:
        while self._given and self._given[0][1].query():
            self._given.popleft()
            if self._given:  # it begins now, whenever it was given
                following, after = self._given[0]
                self._given[0] = replace(following, since=time.monotonic()), after
