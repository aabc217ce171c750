"""What the process that ranks are forked from does before it forks any. Importing this module does it.

Torch and TorchRec take five seconds to import: here once, and not for every rank of every generation.
"""

import gc
import os
import signal
import sys

from freescale.launch import AGENT
from freescale.launch.ranks import HELD_BACK, end_with_parent

end_with_parent(name="freescale-fork")
if os.environ.get(AGENT, str(os.getppid())) != str(os.getppid()):
    sys.exit()  # the agent ended before this process could ask to end with it
signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)

# To count devices must not initialize CUDA: a process that is forked afterwards could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

gc.disable()  # nothing of what is imported is garbage, and to look for it takes a fifth of the time

import torchrec  # noqa: E402, F401

gc.freeze()  # nor will it be in any rank
gc.enable()
