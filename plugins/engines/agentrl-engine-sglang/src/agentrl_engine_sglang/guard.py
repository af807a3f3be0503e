"""Kills its process group when the process at the other end of its standard input has gone.

It runs as a script, with the bare standard library, in the process group of the server that it guards: a server must
not outlive the engine that drives it, however that ends.
"""

import os
import signal
import sys

if __name__ == "__main__":
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)
