"""Sends TCP SYNs as whole frames, past the TCP of this namespace: COUNT of them, each from the next port.

With FLAGS they have these flags of TCP instead, and are sent past the hooks of tc, too.

usage: syns.py DEVICE GATEWAY-MAC SOURCE DESTINATION PORT COUNT MARK [FLAGS]
"""

import ipaddress
import socket
import struct
import sys

device, gateway, source, destination, port, count, mark, *rest = sys.argv[1:]
flags = int(rest[0], 0) if rest else 2
source, destination = ipaddress.ip_address(source), ipaddress.ip_address(destination)


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def segment(source_port):
    fields = [source_port, int(port), source_port * 7919, 0, 5 << 4, flags, 64240, 0, 0]
    layout = "!HHIIBBHHH"
    pseudo = source.packed + destination.packed + struct.pack("!II", 20, 6)
    fields[7] = checksum(pseudo + struct.pack(layout, *fields))
    return struct.pack(layout, *fields)


def header():
    if source.version == 6:
        start = struct.pack("!IHBB", 6 << 28, 20, 6, 64)
        return start + source.packed + destination.packed
    start = struct.pack("!BBHHHBB", 0x45, 0, 40, 0, 0, 64, 6)
    addresses = source.packed + destination.packed
    return start + struct.pack("!H", checksum(start + b"\0\0" + addresses)) + addresses


out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
out.setsockopt(socket.SOL_SOCKET, 36, int(mark, 0))  # SO_MARK
if rest:
    out.setsockopt(263, 20, 1)  # SOL_PACKET, PACKET_QDISC_BYPASS
out.bind((device, 0))
with open(f"/sys/class/net/{device}/address", encoding="ascii") as file:
    own = file.read().strip()
ethernet = bytes.fromhex((gateway + own).replace(":", ""))
ethernet += struct.pack("!H", 0x86DD if source.version == 6 else 0x0800)
start = ethernet + header()
for number in range(int(count)):
    try:
        out.send(start + segment(1024 + number % 64000))
    except OSError as error:
        # A filter on the way out that drops the frame says so.
        if number == 0:
            print("first:", error)
print("sent", count)
