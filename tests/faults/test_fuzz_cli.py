"""Every command ends soon with a result or an error of ours, whatever its options and files.

The long form is `python benchmarks/fuzz_cli.py`; a case that fails here is run again with `--seed 7 --only NUMBER`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from freescale.cli.main import COMMANDS
from tests.support.cli_fuzz import worlds
from tests.support.cli_fuzz.cases import Case, drawn
from tests.support.cli_fuzz.forms import FORMS
from tests.support.cli_fuzz.fuzz import Outcome, run_case
from tests.support.cli_fuzz.runner import Circumstances, Reply, Runner
from tests.support.cli_fuzz.verdict import verdicts

SEED, CASES, WHOLE_CASES = 7, 15, 2000


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as started:
        yield started


@pytest.fixture(scope="module")
def world(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz") / "world"
    worlds.build(made, runner)
    return made


def test_random_commands_end_with_a_result_or_an_error_of_ours(world: Path, runner: Runner, whole_form: bool) -> None:
    outcomes = [run_case(SEED, number, world, runner) for number in range(WHOLE_CASES if whole_form else CASES)]
    faults = [_told(outcome) for outcome in outcomes if outcome.faults]
    assert not faults, "\n".join(faults)
    codes = [outcome.reply.code for outcome in outcomes]
    assert codes.count(0) > len(codes) / 10, "commands that all fail prove little"
    assert codes.count(2) + codes.count(3) > len(codes) / 5


def _told(outcome: Outcome) -> str:
    said = outcome.reply.err[-3000:]
    return f"case {outcome.case.number}: {outcome.faults}\n  {outcome.command}\n  {outcome.case.damages}\n{said}"


def test_every_command_is_among_the_cases_and_a_case_follows_from_its_number(world: Path) -> None:
    assert FORMS.keys() == COMMANDS.keys()
    cases = [drawn(SEED, number, world) for number in range(3000)]
    joined = [" ".join(case.words[:2]) for case in cases]
    assert all(any(words.startswith(name) for words in joined) for name in COMMANDS)
    assert drawn(SEED, 1234, world) == cases[1234]


CASE = Case(0, ("data", "synth", "new"), (), Circumstances(), ("new",))
FAULTS = {
    "a hang": (Reply(-9, True, 60.0, "", "", []), "hang"),
    "a traceback": (
        Reply(1, False, 1.0, "", "Traceback (most recent call last)\nOSError: full\n", []),
        "OSError: full",
    ),
    "a signal": (Reply(-11, False, 1.0, "", "", []), "exit code -11"),
    "an error without a remedy": (Reply(3, False, 1.0, "", "error: something\n", []), "without an error and a remedy"),
    "a silent failure": (Reply(1, False, 1.0, "", "", []), "without an error and a remedy"),
    "a result that is not there": (Reply(0, False, 1.0, "made it", "", []), "was not written"),
    "a process left": (Reply(2, False, 1.0, "", "error: a\n  remedy: b\n", ["sleep 9"]), "left running: sleep 9"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_command_are_detected(tmp_path: Path, name: str) -> None:
    reply, expected = FAULTS[name]
    (fault,) = verdicts(CASE, reply, set(), tmp_path)
    assert expected in fault


def test_a_leftover_temporary_file_is_detected(tmp_path: Path) -> None:
    (tmp_path / "tmpab12").touch()
    reply = Reply(2, False, 1.0, "", "error: a\n  remedy: b\n", [])
    assert list(verdicts(CASE, reply, set(), tmp_path)) == ["left behind: tmpab12"]
    assert not list(verdicts(CASE, reply, {"tmpab12"}, tmp_path))
