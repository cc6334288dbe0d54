"""Pass frames between two new TAP devices, with delay and loss:  python -m tests.nodes.relay DEVICE DEVICE

Each line of standard input sets the delay of a frame in seconds and the share of lost frames, as ``0.05 0.01``.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import sys
from collections import deque
from contextlib import suppress

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # <linux/if_tun.h>
_MOST_BYTES = 1 << 16  # bytes of a frame


class Relay:
    """Relays frames in both directions of one link."""

    def __init__(self, names: list[str]) -> None:
        self.delay_s, self.loss = 0.0, 0.0
        self._rng = random.Random(0)
        one, other = (_open_tap(name) for name in names)
        loop = asyncio.get_running_loop()
        for source, target in ((one, other), (other, one)):
            loop.add_reader(source, self._on_frames, source, target, deque[bytes]())

    def _on_frames(self, source: int, target: int, waiting: deque[bytes]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                frame = os.read(source, _MOST_BYTES)
            except BlockingIOError:
                return
            if self._rng.random() < self.loss:
                continue
            waiting.append(frame)  # frames stay in order, also if the delay decreases
            loop.call_later(self.delay_s, self._pass_on, target, waiting)

    @staticmethod
    def _pass_on(target: int, waiting: deque[bytes]) -> None:
        with suppress(OSError):  # the device is down
            os.write(target, waiting.popleft())


def _open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


async def main() -> None:
    """Relay until standard input closes."""
    relay, lines = Relay(sys.argv[1:]), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    async for line in lines:
        relay.delay_s, relay.loss = map(float, line.split())


if __name__ == "__main__":
    asyncio.run(main())
