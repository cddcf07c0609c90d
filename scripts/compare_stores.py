"""Says whether two stores hold the same results, but for times:

    python scripts/compare_stores.py .oa/tiny .oa/aside/tiny-1

For example those of two runs with `FRESH=1`: the second one moved what the first had stored to
`aside`. Compares every result's JSON without its seconds (and without its seal, which covers them),
and the bytes of its tensors. Threads and versions of packages are compared too: under other ones
the same numbers are not promised. Lists of what notebooks used, results of the test budget and what
was moved aside are no results. Prints what differs or is in one store only; then it ends with 1.
"""

import sys
from pathlib import Path

from oa_utils import store
from oa_utils.paper.publishing import USED

OTHER_FOLDERS = {USED, "aside", "test", "failed"}
TIMES = ("seconds",)


def results(place: Path) -> dict[str, store.Numbers]:
    """By its path in the store, what each result says, times left out."""
    by_name = {}
    for path in sorted(place.rglob("*.json")):
        name = path.relative_to(place)
        if OTHER_FOLDERS.isdisjoint(name.parts):
            by_name[str(name)] = result(path)
    return by_name


def result(path: Path) -> store.Numbers:
    """A record without times, the hash of its tensors taken from the file beside it."""
    record = store.read_record(path)
    if record.get("tensors"):
        beside = path.with_name(record["tensors"])
        found = store.sha256(beside.read_bytes()) if beside.is_file() else "missing"
        record["tensors_sha256"] = found
    return {field: value for field, value in record.items() if field not in TIMES}


def differences(left: Path, right: Path) -> list[str]:
    """A line for each result that differs or is in one of the two only."""
    ours = results(left)
    theirs = results(right)
    if not ours or not theirs:
        raise FileNotFoundError(f"no results in {right if ours else left}")
    lines = [f"{name}: only in {left}" for name in ours.keys() - theirs.keys()]
    lines += [f"{name}: only in {right}" for name in theirs.keys() - ours.keys()]
    for name in ours.keys() & theirs.keys():
        one = ours[name]
        other = theirs[name]
        fields = sorted(one.keys() | other.keys())
        apart = [field for field in fields if not same(one.get(field), other.get(field))]
        if apart:
            lines.append(f"{name}: {', '.join(apart)}")
    return sorted(lines)


def same(one: object, other: object) -> bool:
    """As JSON, where not-a-number equals itself."""
    return store.canonical(one) == store.canonical(other)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit("say which two: python scripts/compare_stores.py A B")
    left, right = map(Path, arguments)
    try:
        lines = differences(left, right)
    except (FileNotFoundError, store.BadFile) as error:
        sys.exit(str(error))
    if lines:
        print("\n".join(lines))
        sys.exit(1)
    print(f"the same {len(results(left))} results in {left} and {right}, but for times")


if __name__ == "__main__":
    main(sys.argv[1:])
