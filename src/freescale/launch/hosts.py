"""How many hosts take part, and where they meet."""

import re
from dataclasses import dataclass

from freescale.errors import UsageError


@dataclass(frozen=True)
class Hosts:
    """At least `least` hosts and at most `most`; their agents meet at an address of one of them."""

    least: int = 1
    most: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    """0: any that is free, which only works where nobody else has to find it."""

    @staticmethod
    def parse(hosts: str, meet: str) -> "Hosts | None":
        """Read what `--hosts 2:4 --meet 10.0.0.1:29400` say; None if neither is given."""
        if not hosts and not meet:
            return None
        count, place = re.fullmatch(r"(\d+)(?::(\d+))?", hosts), re.fullmatch(r"(.+):(\d+)", meet)
        if count is None or place is None or not 0 < int(count[1]) <= int(count[2] or count[1]):
            raise UsageError(
                f"--hosts {hosts or '(nothing)'} --meet {meet or '(nothing)'} does not say who meets where",
                remedy="on every host the same, for example: --hosts 2:4 --meet 10.0.0.1:29400",
            )
        return Hosts(int(count[1]), int(count[2] or count[1]), place[1], int(place[2]))
