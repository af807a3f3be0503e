"""The process in which `agentrl plugins check` checks one plugin: KIND NAME DIST VERSION SECONDS.

The result goes to stdout, pickled; what the plugin prints, to stderr.
"""

import faulthandler
import os
import pickle
import sys

from agentrl_core.api.plugin import PluginRef
from agentrl_core.devtools.check import check_alone
from agentrl_core.plugins.child import stdout_to_stderr


def main() -> None:
    *names, seconds = sys.argv[1:]
    faulthandler.enable()
    # Ends the process, and says where it hung.
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    with stdout_to_stderr():
        result = pickle.dumps(check_alone(PluginRef(*names)))
    with open(1, "wb", closefd=False) as stdout:
        stdout.write(result)
    # Not by the usual way: threads that the plugin has left would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
