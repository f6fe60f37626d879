"""Messages between the pytest process, the zygote and device processes: JSON over a stream socket.

JSON and not pickle, because a pickled CUDA tensor would be rebuilt, and initialise CUDA, in the process that reads it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!I")

Message = dict[str, Any]


_TUPLE = "\0tuple"


def _packed(value: Any) -> Any:
    """The value in JSON's types: tuples are told from lists, as reports need them, and what is left is its `repr`."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(v) for v in value]}
    if isinstance(value, list):
        return [_packed(v) for v in value]
    if isinstance(value, dict):
        return {k if isinstance(k, str) else repr(k): _packed(v) for k, v in value.items()}
    return repr(value)


def _unpacked(value: dict[str, Any]) -> Any:
    return tuple(value[_TUPLE]) if _TUPLE in value else value


class Channel:
    """One end of a socket over which messages go both ways, each with open files if need be."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send one message; what JSON does not know goes as its `repr`. Raises OSError where nobody reads."""
        body = json.dumps(_packed(message)).encode()
        data = _HEADER.pack(len(body)) + body
        if fds:
            sent = socket.send_fds(self.sock, [data], list(fds))
            data = data[sent:]
        self.sock.sendall(data)

    def receive(self) -> Message | None:
        """The next message, waiting for it; None where the other end has closed."""
        while (message := self.pending()) is None:
            if not self._read():
                return None
        return message

    def receive_with_fds(self, count: int) -> tuple[Message | None, list[int]]:
        """The next message and the open files that came with it."""
        fds: list[int] = []
        while (message := self.pending()) is None:
            data, received, _, _ = socket.recv_fds(self.sock, 65536, count, socket.MSG_CMSG_CLOEXEC)
            fds += received
            if not data:
                return None, fds
            self._received += data
        return message, fds

    def pending(self) -> Message | None:
        """A message that has arrived in full; None where there is none yet."""
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack(self._received[: _HEADER.size])
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        body, self._received = self._received[_HEADER.size : end], self._received[end:]
        message: Message = json.loads(body, object_hook=_unpacked)
        return message

    def fill(self) -> bool:
        """Take in what has arrived, to be called when the socket is readable; False where the other end has closed."""
        return self._read()

    def _read(self) -> bool:
        try:
            data = self.sock.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return False
        self._received += data
        return bool(data)

    def close(self) -> None:
        self.sock.close()


def channels() -> tuple[Channel, Channel]:
    """Two connected ends."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)
