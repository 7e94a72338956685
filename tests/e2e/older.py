"""Puts netlink filters in the place of a pod's tcx links, as versions of culvert without them left a pod.

usage: older.py PINS, the pod's folder, in the pod's network namespace
"""

import ctypes
import os
import socket
import struct
import subprocess
import sys

(pins,) = sys.argv[1:]

libc = ctypes.CDLL(None, use_errno=True)
BPF = 321  # System call number on x86-64.
OBJ_GET, PROG_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD = 7, 13, 15
NEW_FILTER = 44
REQUEST, ACK, CREATE = 1, 4, 0x400
HOOKS = {"hold_in": (0xFFFFFFF2, 0x0003), "hold_out": (0xFFFFFFF2, 0x86DD), "guard": (0xFFFFFFF3, 0x0003)}


def bpf(command, attributes):
    attributes = ctypes.create_string_buffer(attributes.ljust(144, b"\0"), 144)
    result = libc.syscall(BPF, command, attributes, 144)
    if result < 0:
        sys.exit(f"bpf({command}): {os.strerror(ctypes.get_errno())}")
    return result


def program_of(pin):
    path = ctypes.create_string_buffer(pin.encode())
    link = bpf(OBJ_GET, struct.pack("<QII", ctypes.addressof(path), 0, 0))
    info = ctypes.create_string_buffer(128)
    bpf(OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", link, 128, ctypes.addressof(info)))
    os.close(link)
    return bpf(PROG_GET_FD_BY_ID, info.raw[8:12])


def attribute(kind, value):
    return struct.pack("<HH", len(value) + 4, kind) + value + b"\0" * (-len(value) % 4)


def attach(interface, name, program):
    parent, protocol = HOOKS[name]
    options = attribute(6, struct.pack("<i", program)) + attribute(7, name.encode() + b"\0")
    options += attribute(8, struct.pack("<I", 1))
    body = struct.pack("<BxxxiIII", 0, interface, 1, parent, 11 << 16 | socket.htons(protocol))
    body += attribute(1, b"bpf\0") + attribute(2, options)
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    netlink.send(struct.pack("<IHHII", len(body) + 16, NEW_FILTER, REQUEST | ACK | CREATE, 1, 0) + body)
    (code,) = struct.unpack("<i", netlink.recv(4096)[16:20])
    if code:
        sys.exit(f"filter {name}: {os.strerror(-code)}")


for entry in os.listdir(f"{pins}/tc"):
    pin = f"{pins}/tc/{entry}"
    interface, name = entry.split("-")
    program = program_of(pin)
    device = socket.if_indextoname(int(interface))
    os.makedirs(f"{pins}/qdiscs/{interface}", exist_ok=True)
    subprocess.run(["tc", "qdisc", "add", "dev", device, "clsact"], stderr=subprocess.DEVNULL, check=False)
    attach(int(interface), name, program)
    os.unlink(pin)
os.rmdir(f"{pins}/tc")
