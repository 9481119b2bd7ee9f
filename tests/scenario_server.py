"""Forks a process for each scenario: it has imported what their bodies need, and starts in no time.

A new interpreter would import the same for each, which takes longer than most bodies. Torch is never here, and no
thread. What a scenario spawns imports this file as its main module, so it imports nothing else before it serves.

python tests/scenario_server.py DESCRIPTOR      serves the client (scenario.Server) at the other end of that socket
"""

from __future__ import annotations

import os
import sys


def serve(number: str) -> int:
    """Fork for each request until the client has gone. Returns in the server, and in each process that it has forked."""
    import importlib
    import json
    import select
    import signal
    import socket
    import threading
    from multiprocessing.connection import Connection

    from scenario import run_inside

    control = socket.socket(fileno=int(number))
    wakeup, woken = socket.socketpair()
    for end in (wakeup, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, Connection] = {}
    while True:
        readable, _, _ = select.select([control, wakeup], [], [])
        if wakeup in readable:
            wakeup.recv(4096)
            for pid in list(waiting):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with waiting.pop(pid) as connection:
                        connection.send(os.waitstatus_to_exitcode(status))
        if control not in readable:
            continue
        header, descriptors, _, _ = socket.recv_fds(control, 4, 2)
        if not header:
            return 0
        length, request = int.from_bytes(header, "big"), b""
        while len(request) < length:
            request += control.recv(length - len(request))
        module, name, kwargs, leaks, env = json.loads(request)
        importlib.import_module(module)
        assert "torch" not in sys.modules and threading.active_count() == 1
        answer, log = Connection(descriptors[0], readable=False), descriptors[1]
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control, wakeup, woken, answer, *waiting.values()):
                end.close()
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
            os.environ.clear()
            os.environ.update(env)
            return run_inside(module, name, kwargs, leaks)
        os.close(log)
        waiting[pid] = answer
        answer.send(pid)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
