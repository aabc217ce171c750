"""`freescale config`: a whole config as TOML, the start of one's own."""

import sys
from collections.abc import Sequence

from freescale import config

_HELP = f"""usage: freescale config RECIPE|FILE.toml [--FIELD VALUE ...]

Print the resolved config as TOML, with the meaning of each field above it. Every field can be given as a flag,
such as --data.global-batch 64.

  freescale config tiny --data.path data/kr > run.toml

recipes: {", ".join(config.RECIPES)}
"""


def run(argv: Sequence[str], prog: str) -> int:
    """Print the config that a run would have."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    found = config.resolve(argv[0], argv[1:], prog=f"{prog} {argv[0]}")
    sys.stdout.write(config.to_toml(found, explain=True))
    return 0
