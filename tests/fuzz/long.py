"""All surfaces in turn, with new examples each time, until the time is up."""

import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import settings

from fuzz.guard import EXAMPLES

SURFACES = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
ROUND = 200  # examples of a test before the next has its turn


def fuzzed(surfaces: Sequence[str]) -> dict[str, Callable[[], None]]:
    """The tests of these modules that `fuzz` made, by name."""
    found = {}
    for surface in surfaces or SURFACES:
        module = importlib.import_module(f"fuzz.{surface}")
        for name, test in vars(module).items():
            if hasattr(test, "is_hypothesis_test"):
                found[f"{surface}.{name}"] = test
    return found


def fuzz_for(minutes: float, surfaces: Sequence[str] = ()) -> list[str]:
    """Print how many examples there were; the tests that failed, each with what it failed of printed once."""
    tests, failed = fuzzed(surfaces), list[str]()
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline and len(failed) < len(tests):
        for name, test in tests.items():
            if name in failed or time.monotonic() > deadline:
                continue
            test._hypothesis_internal_use_settings = settings(  # type: ignore[attr-defined]
                test._hypothesis_internal_use_settings,
                max_examples=ROUND,  # type: ignore[attr-defined]
            )
            try:
                test()
            except KeyboardInterrupt:
                raise
            except BaseException:
                failed.append(name)
                traceback.print_exc()
    for name in tests:
        print(f"{EXAMPLES[name]:9,d} examples  {name}{'  FAILED' if name in failed else ''}")
    print(f"{sum(EXAMPLES.values()):9,d} examples in {minutes:g} minutes, {len(failed)} of {len(tests)} tests failed")
    return failed
