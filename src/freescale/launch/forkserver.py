"""Prepares the process that ranks are forked from. Importing this module does the work.

Torch and TorchRec take seconds to import. The forkserver imports them once, instead of every rank at every restart.
"""

import gc
import os
import signal
import sys

from freescale.launch import AGENT
from freescale.launch.local_ranks import BLOCKED_SIGNALS, end_with_parent

end_with_parent(name="freescale-fork")
if os.environ.get(AGENT, str(os.getppid())) != str(os.getppid()):
    sys.exit()  # the agent ended before this process could ask to end with it
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)

# Counting devices must not initialize CUDA: a process that is forked afterwards could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

gc.disable()  # imports create no garbage, and collecting takes a fifth of their time

import torchrec  # noqa: E402, F401

gc.freeze()  # ranks need not collect what was imported either
gc.enable()
