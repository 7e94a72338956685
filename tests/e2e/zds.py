"""A proxy that takes pods from a node agent, written from the protocol's description alone: no code of culvert's,
and no protobuf library. Prints what it is told, one line each, and ends after the given number of requests."""

import array
import os
import socket
import sys


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data):
    """Length-delimited fields by number; the protocol's requests have no others."""
    found, at = {}, 0
    while at < len(data):
        key, at = varint(data, at)
        assert key & 7 == 2, "not length-delimited"
        size, at = varint(data, at)
        found[key >> 3] = data[at : at + size]
        at += size
    return found


path, count = sys.argv[1], int(sys.argv[2])
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.connect(path)
agent.send(bytes([0x08, 1]))
for _ in range(count):
    descriptors = array.array("i")
    data, control, flags, _ = agent.recvmsg(1024, socket.CMSG_LEN(4 * descriptors.itemsize))
    if not data:
        sys.exit("the agent hung up")
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "cut"
    for level, kind, brought in control:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        descriptors.frombytes(brought)
    (kind, body), = fields(data).items()
    if kind == 1:
        add = fields(body)
        info = fields(add[2])
        (netns,) = descriptors
        words = [add[1], info[2] + b"/" + info[1], info[3], str(os.fstat(netns).st_ino).encode()]
    else:
        assert not descriptors
        words = list(fields(body).values())
    name = {1: "add", 2: "del", 3: "snapshot", 5: "keep"}[kind]
    print(name, *(word.decode() for word in words), flush=True)
    # WorkloadResponse { ack: {} }
    agent.send(bytes([0x0A, 0]))
