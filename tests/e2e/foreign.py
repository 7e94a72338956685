"""A BPF program of someone else on a hook of tc: counts packets, gives one verdict for all, and prints each new count.

As a filter it stays until its interface goes; as a tcx link it ends with this process.

usage: foreign.py filter DEVICE ingress|egress PRIORITY VERDICT
       foreign.py tcx DEVICE ingress|egress first|last VERDICT
"""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import time

kind, device, hook, place, verdict = sys.argv[1:]

libc = ctypes.CDLL(None, use_errno=True)
BPF = 321  # System call number on x86-64.
MAP_CREATE, MAP_LOOKUP, PROG_LOAD, OBJ_PIN, LINK_CREATE = 0, 1, 5, 6, 28
ARRAY, SCHED_CLS = 2, 3
TCX = {"ingress": 46, "egress": 47}
BEFORE, AFTER = 1 << 3, 1 << 4


def bpf(command, attributes):
    attributes = ctypes.create_string_buffer(attributes.ljust(144, b"\0"), 144)
    result = libc.syscall(BPF, command, attributes, 144)
    if result < 0:
        errno = ctypes.get_errno()
        sys.exit(f"bpf({command}): {os.strerror(errno)}")
    return result


def instruction(code, destination=0, source=0, offset=0, immediate=0):
    return struct.pack("<BBhi", code, source << 4 | destination, offset, immediate)


counter = bpf(MAP_CREATE, struct.pack("<IIIII", ARRAY, 4, 8, 1, 0))
program = b"".join(
    [
        instruction(0x62, 10, 0, -4, 0),  # *(u32 *)(r10 - 4) = 0
        instruction(0xBF, 2, 10),  # r2 = r10
        instruction(0x07, 2, 0, 0, -4),  # r2 -= 4
        instruction(0x18, 1, 1, 0, counter),  # r1 = the map
        instruction(0x00),
        instruction(0x85, 0, 0, 0, 1),  # r0 = bpf_map_lookup_elem(r1, r2)
        instruction(0x15, 0, 0, 2, 0),  # if r0 == 0 skip two
        instruction(0xB7, 1, 0, 0, 1),  # r1 = 1
        instruction(0xDB, 0, 1, 0, 0),  # lock *(u64 *)r0 += r1
        instruction(0xB7, 0, 0, 0, int(verdict)),  # r0 = verdict
        instruction(0x95),  # exit
    ]
)
text = ctypes.create_string_buffer(program, len(program))
licence = ctypes.create_string_buffer(b"GPL")
program = bpf(
    PROG_LOAD,
    struct.pack("<IIQQ", SCHED_CLS, len(program) // 8, ctypes.addressof(text), ctypes.addressof(licence)),
)

if kind == "tcx":
    flags = BEFORE if place == "first" else AFTER
    link = bpf(LINK_CREATE, struct.pack("<IIII", program, socket.if_nametoindex(device), TCX[hook], flags))
else:
    pin = f"/sys/fs/bpf/foreign-{os.getpid()}"
    path = ctypes.create_string_buffer(pin.encode())
    bpf(OBJ_PIN, struct.pack("<QI", ctypes.addressof(path), program))
    try:
        subprocess.run(["tc", "qdisc", "add", "dev", device, "clsact"], stderr=subprocess.DEVNULL, check=False)
        command = ["tc", "filter", "add", "dev", device, hook, "pref", place, "protocol", "all"]
        subprocess.run([*command, "bpf", "da", "object-pinned", pin], check=True)
    finally:
        os.unlink(pin)

key, value = ctypes.create_string_buffer(4), ctypes.create_string_buffer(8)
shown = None
while True:
    bpf(MAP_LOOKUP, struct.pack("<IxxxxQQ", counter, ctypes.addressof(key), ctypes.addressof(value)))
    (count,) = struct.unpack("<Q", value.raw)
    if count != shown:
        print("count", count, flush=True)
        shown = count
    time.sleep(0.02)
