"""`stranger.py CARD` knocks at the address on rank 0's card and says something wrong; prints what comes of it."""

import hmac
import json
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

NONCE, MAC = 16, 32


def hello(token: bytes, nonce: bytes) -> bytes:
    body = json.dumps({"rank": 1, "world_size": 2, "host": "node2", "process": [1, 0.0], "node_rank": 1, "cores": 4,
                       "error": None}).encode()  # fmt: skip
    return hmac.digest(token, b"hello" + nonce + body, "sha256") + struct.pack("!I", len(body)) + body


def knock(address: tuple[str, int], name: str) -> str:
    with socket.create_connection(address, timeout=12) as line:  # rank 0 hangs up after 10 s at the latest
        nonce = line.recv(NONCE + MAC)[:NONCE]
        words = {
            "a wrong token": hello(b"\0" * 32, nonce),
            "garbage": os.urandom(500),
            "another protocol": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n" * 20,
            "nothing": b"",
        }
        line.sendall(words[name])
        try:
            answer = line.recv(1 << 16)
        except ConnectionResetError:
            answer = b""
    return f"{name}: told {answer!r}" if answer else f"{name}: turned away"


def main() -> None:
    with open(sys.argv[1]) as file:
        address = json.load(file)["addresses"][0]
    with ThreadPoolExecutor() as pool:
        names = ("a wrong token", "garbage", "another protocol", "nothing")
        print(*pool.map(partial(knock, tuple(address)), names), sep="\n")


if __name__ == "__main__":
    main()
