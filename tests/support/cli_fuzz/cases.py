"""Random commands: mostly valid words with something wrong in them, on files of which some are damaged.

A case follows from a seed and its number alone, so that one can be run again.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from . import worlds
from .damage import KINDS, Damage
from .forms import FORMS, Form, Option
from .runner import Circumstances
from .values import TEXTS, bad


@dataclass(frozen=True)
class Case:
    """A command, the damage to its files, and what it meets."""

    number: int
    words: tuple[str, ...]
    damages: tuple[Damage, ...]
    circumstances: Circumstances
    outputs: tuple[str, ...]
    """What must be there when the command says that it succeeded."""


def drawn(seed: int, number: int, world: Path) -> Case:
    """One of the cases of a seed."""
    rng = Random(f"{seed}/{number}")
    names = list(FORMS)
    name = rng.choices(names, [FORMS[n].weight for n in names])[0]
    words, output = _call(name, FORMS[name], rng)
    if rng.random() < 0.15:
        words, output = _disturbed(words, rng), ""
    damages = _damages(words[len(name.split()) :], world, rng) if rng.random() < 0.45 else ()
    return Case(number, tuple(words), damages, _circumstances(name, rng), (output,) if output else ())


def _call(name: str, form: Form, rng: Random) -> tuple[list[str], str]:
    """Words of a command, with no, one or several bad values; and where its result must be, if that is known."""
    mistakes = rng.choice((0.0, 0.0, 0.15, 0.4))
    placed = {option.name: _value(option, mistakes, rng) for option in form.positional}
    words = [*name.split(), *placed.values(), *form.always]
    chosen = [rng.choice(form.options) for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 5)))]
    for option in chosen:
        words += [option.name] if option.kind == "flag" else [option.name, _value(option, mistakes, rng)]
    if rng.random() < 0.02 and name in ("train", "evaluate", "predict", "export"):
        words += ["--nproc", "2"]
    given = [value for name, value in itertools.pairwise(words) if name == form.output]
    return words, given[-1] if given else placed.get(form.output, "")


def _value(option: Option, mistakes: float, rng: Random) -> str:
    if option.good and rng.random() >= mistakes:
        return rng.choice(option.good)
    return bad(option.kind, rng) if option.kind != "flag" else option.name


def _disturbed(words: Sequence[str], rng: Random) -> list[str]:
    """As somebody mistypes a command: words left out, doubled, exchanged, cut short or unknown."""
    new = list(words)
    at = rng.randrange(len(new))
    kind = rng.choice(("drop", "double", "swap", "cut", "insert", "append", "help", "equals"))
    if kind == "drop":
        del new[at]
    elif kind == "double":
        new[at:at] = new[at : at + 2]
    elif kind == "swap":
        other = rng.randrange(len(new))
        new[at], new[other] = new[other], new[at]
    elif kind == "cut":
        new[at] = new[at][: len(new[at]) // 2]
    elif kind == "insert":
        new.insert(at, rng.choice((*TEXTS, "-1", "0", "--no-such-option", "--", "-x", "--json=3", "@file", "--out")))
    elif kind == "append":
        new += rng.choice((["--no-such-option", "3"], ["extra"], ["--"], ["--out"], ["--data"], ["--model.nope", "1"]))
    elif kind == "help":
        new.insert(at, rng.choice(("-h", "--help", "--version")))
    elif kind == "equals" and at + 1 < len(new):
        new[at : at + 2] = [f"{new[at]}={new[at + 1]}"]
    return new


def _damages(words: Sequence[str], world: Path, rng: Random) -> tuple[Damage, ...]:
    """To one of the files that the words name, or two."""
    files = [str(path) for word in words for path in worlds.files_of(world, word)]
    if not files:
        return ()
    return tuple(Damage(rng.choice(files), rng.choice(KINDS), rng.random()) for _ in range(rng.choice((1, 1, 1, 2))))


def _circumstances(name: str, rng: Random) -> Circumstances:
    what = rng.random()
    if what < 0.02:
        return Circumstances(file_bytes=rng.choice((0, 100, 5000, 20000)))
    if what < 0.03:
        return Circumstances(full_stdout=True)
    if what < 0.045 and name in ("train", "data synth", "data import", "evaluate", "predict", "simulate"):
        return Circumstances(interrupt_after=rng.uniform(0.1, 1.0))
    return Circumstances()
