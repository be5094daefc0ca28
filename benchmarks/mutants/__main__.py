"""Try the recorded mutants again, or record a sample."""

from __future__ import annotations

import argparse
import difflib
import json
import resource
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants.copy import Copy, Limit, Outcome
from benchmarks.mutants.source import Mutant, digest, mutants_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("benchmarks") / "mutants"
# A mutant may be slower than the code that it replaces, and the machine busier than before.
PROCESSOR_FACTOR = 3.0
CLOCK_FACTOR = 20.0
# In a process whose data exceed this many bytes a mutant fails, rather than the machine.
MEMORY = 12 << 30


@dataclass(frozen=True)
class Table:
    """The contents of ``rooms.toml``."""

    seed: str
    sample: int
    operators: list[str]
    #: Arguments of pytest for every room.
    options: list[str]
    #: Name -> patterns of ``sources``, those to ``exclude``, and arguments of pytest (``tests``).
    rooms: dict[str, dict[str, list[str]]]

    def mutants(self, room: str, root: Path) -> list[Mutant]:
        """All mutants of a room, in the order of hashes.

        A sample is the beginning of the list: what is in it changes little if a mutant comes or
        goes.
        """
        paths = {path for pattern in self.rooms[room]["sources"] for path in root.glob(pattern)}
        for pattern in self.rooms[room].get("exclude", []):
            paths -= set(root.glob(pattern))
        mutants: list[Mutant] = []
        for path in sorted(paths):
            file = path.relative_to(root).as_posix()
            mutants += mutants_of(file, path.read_text(encoding="utf-8"), self.operators)
        return sorted(mutants, key=lambda mutant: digest(self.seed, mutant.identity))


class UnmutatedFails(Exception):
    """The tests of a room fail without a mutant, so they say nothing about mutants."""


def _processor_seconds() -> float:
    """Processor time of the processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Trial:
    """The tests of a room, with which mutants are tried.

    Raises:
        UnmutatedFails: the tests fail without a mutant.
    """

    def __init__(self, table: Table, room: str, copy: Copy) -> None:
        self._copy = copy
        self._arguments = [*table.options, *table.rooms[room]["tests"]]
        start, before = time.monotonic(), _processor_seconds()
        # Bytecode is kept for the runs with mutants, which write none.
        if copy.run(self._arguments, None, PYTHONDONTWRITEBYTECODE="") is not Outcome.SURVIVED:
            output = copy.log.read_text(encoding="utf-8", errors="replace")
            raise UnmutatedFails("\n".join([room, *output.splitlines()[-30:]]))
        seconds = time.monotonic() - start
        processor = PROCESSOR_FACTOR * (_processor_seconds() - before)
        self._limit = Limit(processor, CLOCK_FACTOR * seconds)
        print(f"{room}: {seconds:.1f} s without a mutant", flush=True)

    def entry(self, mutant: Mutant) -> dict[str, Any] | None:
        """What ``results.json`` says of a mutant; None if Python does not compile it."""
        source = (self._copy.root / mutant.file).read_text(encoding="utf-8")
        mutated = mutant.apply(source)
        if mutated is None:
            return None
        outcome = self._copy.run_mutated(mutant.file, mutated, self._arguments, self._limit)
        entry: dict[str, Any] = {"identity": mutant.identity, "outcome": str(outcome)}
        entry |= {"file": mutant.file, "line": mutant.line, "operator": mutant.operator}
        if outcome is Outcome.SURVIVED:
            diff = difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0)
            entry["diff"] = [line for line in list(diff)[2:] if not line.startswith("@@")]
        print(f"  {outcome}: {mutant.file}:{mutant.line} {mutant.operator}", flush=True)
        return entry


def record(
    table: Table, room: str, copy: Copy, sample: int, recorded: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield what ``results.json`` says of a room's sample, after each mutant that was tried.

    Recorded mutants are not tried again, so a record that was interrupted can be continued.
    """
    known = {entry["identity"]: entry for entry in recorded}
    trial = Trial(table, room, copy)
    entries: list[dict[str, Any]] = []
    killed = 0
    mutants = table.mutants(room, copy.root)
    for mutant in mutants:
        entry = known.get(mutant.identity) or trial.entry(mutant)
        if entry is not None:
            entries.append(entry)
            killed = sum(entry["outcome"] != Outcome.SURVIVED for entry in entries)
            yield {"sampled": len(entries), "killed": killed, "mutants": entries}
        if len(entries) == sample:
            break
    print(f"{room}: {killed} of {len(entries)} killed, of {len(mutants)} mutants", flush=True)


def compare(table: Table, room: str, copy: Copy, recorded: Sequence[dict[str, Any]]) -> int:
    """Try recorded mutants of a room; return how many were killed before and survive now."""
    trial = Trial(table, room, copy)
    before = {entry["identity"]: entry["outcome"] for entry in recorded}
    mutants = [m for m in table.mutants(room, copy.root) if m.identity in before]
    killed = weaker = 0
    for mutant in mutants:
        entry = trial.entry(mutant)
        if entry is None or entry["outcome"] != Outcome.SURVIVED:
            killed += 1
        elif before[mutant.identity] != Outcome.SURVIVED:
            weaker += 1
            print("    was killed before:", *entry["diff"], sep="\n      ", flush=True)
    gone = len(before) - len(mutants)
    print(f"{room}: {killed} of {len(mutants)} killed; {weaker} that were killed before survive;")
    print(f"  {gone} skipped, because their lines are gone", flush=True)
    return weaker


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; return 1 if a mutant survives that was recorded as killed."""
    table = Table(**tomllib.loads((root / FOLDER / "rooms.toml").read_text(encoding="utf-8")))
    path = root / FOLDER / "results.json"
    rooms = json.loads(path.read_text(encoding="utf-8"))["rooms"] if path.exists() else {}
    parser = argparse.ArgumentParser(prog="benchmarks.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(table.rooms))
    parser.add_argument("--sample", type=int, default=table.sample, help="mutants of each room")
    parser.add_argument("--write", action="store_true", help="record a sample")
    options = parser.parse_args(arguments)
    if not set(options.rooms) <= set(table.rooms):
        parser.error(f"the rooms are {', '.join(table.rooms)}")
    weaker = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(root, Path(folder))
        for room in options.rooms or table.rooms:
            recorded = rooms[room]["mutants"] if room in rooms else []
            if options.write:
                for result in record(table, room, copy, options.sample, recorded):
                    rooms[room] = result
                    text = json.dumps({"seed": table.seed, "rooms": rooms}, indent=1)
                    path.write_text(text + "\n", encoding="utf-8")
            elif recorded:
                weaker += compare(table, room, copy, recorded[: options.sample])
            else:
                print(f"{room}: not recorded", flush=True)
    return 1 if weaker else 0


if __name__ == "__main__":
    # The processes of the tests inherit the limit.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    sys.exit(main())
