"""A slow cable: takes two interfaces, bits per second and seconds, carries every frame from one to the other,
each way, at that rate and with that delay. Not every kernel has netem, which would do the same.

    python relay.py A B 1000000 0.05
"""

import select
import socket
import sys
import time
from collections import deque

ALL = 0x0003  # ETH_P_ALL, linux/if_ether.h
PACKET, VNET_HEADER = 263, 15  # SOL_PACKET, PACKET_VNET_HDR, linux/if_packet.h
HEADER = 10  # struct virtio_net_hdr: lets frames pass that were not yet cut or summed
FRAME = 1 << 17
QUEUE = 1000  # frames, as netem's own limit; those above are lost


def opened(interface: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setsockopt(PACKET, VNET_HEADER, 1)
    link.bind((interface, ALL))
    return link


def carry(first: str, second: str, rate: float, delay: float) -> None:
    ends = (opened(first), opened(second))
    waiting: tuple[deque, deque] = (deque(), deque())  # of (when, frame): from the first end, from the second
    free = [0.0, 0.0]  # when the last frame of this direction has left
    print("ready", flush=True)
    while True:
        times = [queue[0][0] for queue in waiting if queue]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        readable, _, _ = select.select(ends, (), (), timeout)
        for way, end in enumerate(ends):
            if end in readable:
                try:
                    frame, address = end.recvfrom(FRAME)
                except OSError:  # once, when its interface is set down
                    continue
                if address[2] != socket.PACKET_OUTGOING and len(waiting[way]) < QUEUE:
                    free[way] = max(free[way], time.monotonic()) + (len(frame) - HEADER) * 8 / rate
                    waiting[way].append((free[way] + delay, frame))
            while waiting[way] and waiting[way][0][0] <= time.monotonic():
                try:
                    ends[1 - way].send(waiting[way].popleft()[1])
                except OSError:  # the link is cut: lost
                    pass


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
