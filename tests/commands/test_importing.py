"""Nothing looks for garbage while something is imported; afterwards all that needs it does."""

import gc

import pytest

from hvd_ddp.commands.importing import importing


@pytest.mark.parametrize("fails", [False, True])
def test_importing(fails: bool) -> None:
    begun: list[str] = []

    def note(phase: str, _: object) -> None:
        begun.append(phase)

    gc.callbacks.append(note)
    try:
        with importing():
            made = [[[]] for _ in range(20_000)]
            while_importing = list(begun)
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    finally:
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.callbacks.remove(note)
    assert not while_importing and frozen > len(made) and gc.isenabled()
