"""What a run says aloud: plain lines on stderr, so that stdout stays for results.

Everything that fell back, was skipped or was made up is said through `notice`, once per distinct text.
"""

import sys

_said: set[str] = set()


def notice(text: str) -> None:
    """Say something that the user should know but did not ask for."""
    if text not in _said:
        _said.add(text)
        sys.stderr.write(f"note: {text}\n")
