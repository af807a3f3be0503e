"""A Python that has imported torch and all of agentrl before it starts.

``python warm_python.py SOCKET script arguments`` runs the script in a process that is forked from a server, with this
process's environment, folder and standard files, and ends when that process has ended.
"""

import json
import os
import socket
import sys

PRELOADED = [
    "agentrl_core.trainer",
    "agentrl_core.cli.train",
    "agentrl_dataset_prompts.prompts",
    "agentrl_trackers_basic.jsonl",
]
"""What takes many seconds to import."""


def main(address: str, *command: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        message = json.dumps([command, dict(os.environ), os.getcwd()])
        socket.send_fds(server, [message.encode()], [0, 1, 2])
        # The other end is closed with the process that has it.
        server.recv(1)


def serve(file: int) -> None:
    """At a socket that listens already, until standard input ends: with the process that started this one."""
    import gc
    import importlib
    import select
    import signal

    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=file) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return become(connection)
            connection.close()


def become(connection: socket.socket) -> None:
    """The process that was asked for."""
    import runpy

    message, files, *_ = socket.recv_fds(connection, 2**20, 3)
    command, environment, folder = json.loads(message)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
